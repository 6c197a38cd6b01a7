"""Block-sparse self-attention of video models: the lever that joins a method's plans, a kernel and the interception.

Which pairs of blocks are kept is the method's (pure, the files beside this one), how they are computed the kernel's
(`kernels/`), what one call needs `handler`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.options import Check, above, is_number, take, whole
from ...errors import IncompatibleError, InvalidOptionError, UnsupportedModelError, unknown
from ..attach import attach_handler, interceptable
from ..kernels import KERNELS, choose_kernel
from ..processors import processors
from ..tokens import is_video
from .handler import SparseHandler
from .registry import METHODS

SHARE_OR_STEPS = Check(
    "a share of the steps (0 to 1) or a whole number of steps",
    lambda value: is_number(value) and value >= 0 and (value <= 1 or value == int(value)),
)


@dataclass(frozen=True)
class SparseAttention:
    """Let self-attention of a video model look at some blocks of keys only.

    Attributes:
        method: "radial", "sta", "svg", "svg2", "topk", "auto" (by geometry and length, per call), a config of
            `attention.sparse.registry`, or a callable `(geometry, q, k, *, layer, step, state) -> HeadPlans | None`,
            which is asked at every call (None: dense).
        density: share of pairs kept, above 0 and at most 1; None takes the method's own. 1 is dense, bit by bit.
        dense_steps: steps at the start of a run that stay dense: a share of them (0.2) or a number (10).
        dense_layers: blocks at the start of the denoiser that stay dense.
        kernel: "auto" (Triton on CUDA, else PyTorch), "torch", "triton" or "flex".

    Raises:
        InvalidOptionError: a value that is not allowed.
    """

    method: Any = "auto"
    density: float | None = None
    dense_steps: float = 0.2
    dense_layers: int = 1
    kernel: str = "auto"

    slot: ClassVar[Slot] = Slot.CALL
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    def __post_init__(self) -> None:
        if isinstance(self.method, str) and self.method != "auto" and self.method not in METHODS:
            raise unknown("method of sparse attention", self.method, ["auto", *METHODS])
        if not isinstance(self.method, str) and not callable(getattr(self.method, "plan", self.method)):
            raise InvalidOptionError(f"method={self.method!r}: must be a name, a config or a callable")
        take(self, above(0, 1, "a number above 0 and at most 1").or_none(), "density")
        if self.density is not None and not isinstance(self.method, str):
            raise InvalidOptionError("density was given beside a method that brings its own: give one of them")
        take(self, SHARE_OR_STEPS, "dense_steps")
        take(self, whole(0, "a whole number of blocks"), "dense_layers")
        if self.kernel != "auto" and self.kernel not in KERNELS:
            raise unknown("kernel", self.kernel, ["auto", *KERNELS])

    @property
    def name(self) -> str:
        """Plan item name."""
        if not isinstance(self.method, str):
            return "attention.custom"
        return f"attention.{self.method}" if self.method in METHODS else "attention.sparse_auto"

    def check(self, target: Target) -> Verdict:
        """Needs a video model whose self-attention can be intercepted, and is not spread over processes."""
        spec = target.spec
        if not is_video(spec):
            return Verdict.no(
                f"{spec.family} makes images: at a few thousand tokens attention is a small part of the time, and "
                "there is nothing to gain from leaving some of it out",
                UnsupportedModelError,
            )
        verdict = interceptable(target)
        if not verdict.ok:
            return verdict
        if any(getattr(processor, "_parallel_config", None) is not None for processor in _processors(target)):
            return Verdict.refuse(
                "the denoiser runs context-parallel (enable_parallelism): masks over the whole sequence cannot be "
                "applied to its pieces",
                IncompatibleError,
            )
        kernel, why = choose_kernel(self.kernel, target.hardware)
        if kernel is None:
            return Verdict.no(why, InvalidOptionError)
        steps = f"{self.dense_steps:g} of the steps" if self.dense_steps < 1 else f"{self.dense_steps:g} steps"
        return Verdict.yes(f"kernel {kernel.name}; dense: the first {self.dense_layers} layers and {steps}")

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Nothing is promised without a measurement."""
        return {"origin": "unmeasured"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Intercept the attention of every denoiser."""
        kernel, why = choose_kernel(self.kernel, target.hardware)
        if kernel is None:
            raise InvalidOptionError(f"{self.name}: {why}")
        handler = SparseHandler(self.name, kernel, self.method, self.density, self.dense_steps, self.dense_layers)
        return attach_handler(self.name, target, site, handler, handler.begin_run, handler.stats)


def _processors(target: Target) -> list[Any]:
    modules = (getattr(target.pipe, name, None) for name in target.spec.denoisers)
    return [row[2] for module in modules if module is not None for row in processors(module)]
