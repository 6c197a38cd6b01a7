"""Block-sparse self-attention of video models: the lever that joins a method's plans, a kernel and the seam.

Which pairs of blocks are kept is the method's (`masks/`, pure), how they are computed the kernel's (`kernels/`).
Here: when to stay dense (first steps, first layers, cross-attention, text refiners), padding, and plans kept per
geometry.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.options import Check, above, is_number, take, whole
from ...core.run import Run
from ...errors import IncompatibleError, InvalidOptionError, UnsupportedModelError, unknown
from ...planner.places import SPARSE
from ..attach import attach_handler, interceptable
from ..calls import Counts, Inputs, Where
from ..geometry import Geometry
from ..kernels import KERNELS, Kernel, choose_kernel
from ..padding import PaddingReader
from ..plan import BlockPlan, HeadPlans
from ..processors import processors
from ..tokens import is_video
from .registry import METHODS, choose

KEPT_PLANS = 8  # geometries whose plans are kept; a run has one or two
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
        return f"attention.{self.method}" if self.method in SPARSE else "attention.sparse_auto"

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
        dense = f"{self.dense_layers} layers and {self.dense_steps:g} {'of the' if self.dense_steps < 1 else ''} steps"
        return Verdict.yes(f"kernel {kernel.name}; dense: the first {dense.replace('  ', ' ')}")

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Nothing is promised without a measurement."""
        return {"origin": "unmeasured"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Put the method on the seam of every denoiser."""
        kernel, why = choose_kernel(self.kernel, target.hardware)
        if kernel is None:
            raise InvalidOptionError(f"{self.name}: {why}")
        handler = _Handler(self, kernel)
        return attach_handler(self.name, target, site, handler, handler.begin_run, handler.stats)


def _processors(target: Target) -> list[Any]:
    modules = (getattr(target.pipe, name, None) for name in target.spec.denoisers)
    return [row[2] for module in modules if module is not None for row in processors(module)]


class _States(dict[tuple[Any, ...], dict[str, Any]]):
    """What methods keep per layer and branch; methods replace tensors and never write into them."""

    def __copy__(self) -> _States:
        return _States((key, dict(state)) for key, state in self.items())


class _Handler:
    """Answers self-attention of video tokens sparsely; leaves the rest as it is."""

    def __init__(self, lever: SparseAttention, kernel: Kernel) -> None:
        self.lever, self.kernel = lever, kernel
        self.padding = PaddingReader()
        self.plans: OrderedDict[tuple[str, Geometry], HeadPlans | None] = OrderedDict()  # of static methods
        self.configs: dict[str, Any] = {}

    # ---- what the run sees -----------------------------------------------------------------------------

    def begin_run(self, run: Run) -> None:
        """A run begins: count anew."""
        self.padding.forget()
        run.state[self.lever.name] = {"counts": Counts(), "density": [], "methods": _States()}

    def stats(self, run: Run) -> dict[str, Any]:
        """Calls by kind, fallbacks by reason, mean density of the sparse calls."""
        self.padding.forget()
        state = run.state.get(self.lever.name, {})
        if not state:
            return {}
        found = state["density"]
        mean = {"density": sum(found) / len(found)} if found else {}
        return {"kernel": self.kernel.name, **state["counts"].stats(), **mean}

    # ---- one call --------------------------------------------------------------------------------------

    def __call__(self, where: Where, inputs: Inputs, plain: Callable[[], Any]) -> Any:
        """Answer one attention call."""
        state = where.call.run.state[self.lever.name]
        counts: Counts = state["counts"]
        if where.cross or where.geometry is None:
            counts.add("other")  # cross-attention, text refiners
            return plain()
        if self._dense(where):
            counts.add("dense")
            return plain()
        reason, valid = self._readable(where.geometry, inputs)
        if reason is not None:
            counts.fall_back(where, self.lever.name, reason)
            return plain()
        assert valid is not None
        output = self._sparse(where, inputs, valid, state)
        counts.add("dense" if output is None else "sparse")
        return plain() if output is None else output

    def _dense(self, where: Where) -> bool:
        lever, total = self.lever, where.call.run.total
        if lever.density == 1 or where.layer < lever.dense_layers:
            return True
        steps = lever.dense_steps
        if 0 < steps < 1:
            if total is None:
                return True  # a share of an unknown number
            steps = math.ceil(steps * total)
        return where.call.step < steps if steps != 1 or isinstance(steps, int) else True

    def _readable(self, geometry: Geometry, inputs: Inputs) -> tuple[str | None, tuple[int, ...] | None]:
        """(why this call cannot be answered, or None; valid tokens of each sample)."""
        if inputs.causal or inputs.gqa or inputs.lse:
            return "it is causal, has grouped queries or asks for the log-sum-exp", None
        batch, tokens = inputs.q.shape[:2]
        valid = self.padding.read(inputs.mask, batch, tokens, inputs.k.shape[1])
        if valid is None:
            return "its mask hides more than padding at the end", None
        if min(valid) < geometry.video or (geometry.text_first and min(valid) < tokens):
            return "its mask hides video tokens", None
        return None, valid

    def _sparse(self, where: Where, inputs: Inputs, valid: tuple[int, ...], state: dict[str, Any]) -> Any:
        """The output [B, N, H, D]; None where the method asks for dense attention."""
        q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
        if len(set(valid)) == 1:
            output = self._rows(where, inputs, q, k, v, valid[0], slice(None), state)
            return None if output is None else output.transpose(1, 2)
        parts = []
        for i, n in enumerate(valid):
            one = slice(i, i + 1)
            part = self._rows(where, inputs, q[one], k[one], v[one], n, one, state)
            if part is None:
                return None
            parts.append(part)
        return torch.cat(parts).transpose(1, 2)

    def _rows(
        self,
        where: Where,
        inputs: Inputs,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        valid: int,
        rows: slice,
        state: dict[str, Any],
    ) -> torch.Tensor | None:
        """Samples with the same number of valid tokens, [B, H, N, D]; padded queries are computed as they were."""
        assert where.geometry is not None
        geometry = replace(where.geometry, text=valid - where.geometry.video)
        q_valid, k_valid, v_valid = (x[:, :, :valid] for x in (q, k, v))
        plans = self._plan(where, geometry, (q_valid, k_valid, v_valid, inputs.scale), rows, state)
        if plans is None:
            return None
        self._book(where, plans.density, state)
        output = self.kernel.run(q_valid, k_valid, v_valid, plans, scale=inputs.scale)
        if valid == q.shape[2]:
            return output
        mask = inputs.mask
        assert mask is not None
        if mask.shape[0] > 1:
            mask = mask[rows]
        if mask.shape[2] > 1:
            mask = mask[:, :, valid:]
        padded = F.scaled_dot_product_attention(q[:, :, valid:], k, v, mask, scale=inputs.scale)
        return torch.cat([output, padded], dim=2)

    def _book(self, where: Where, density: float, state: dict[str, Any]) -> None:
        state["density"].append(density)
        asked = self.lever.density
        if asked is not None and density > 1.1 * asked:
            where.call.run.note(
                f"{self.lever.name} keeps {density:.2f} of all pairs where density={asked:g} was asked for: this size "
                "and method allow no less"
            )

    # ---- plans -----------------------------------------------------------------------------------------

    def _plan(
        self, where: Where, geometry: Geometry, tensors: tuple[Any, ...], rows: slice, state: dict[str, Any]
    ) -> HeadPlans | None:
        method = self._method(geometry)
        if getattr(method, "static", False):
            return self._kept_plan(method, where, geometry)
        q, k, v, scale = tensors
        key = (where.call.component, where.call.branch, where.name, rows.start, geometry)
        at = {"layer": where.layer, "step": where.call.step, "state": state["methods"].setdefault(key, {})}
        config = hasattr(method, "plan")
        found = method.plan(geometry, q, k, v=v, scale=scale, **at) if config else method(geometry, q, k, **at)
        if isinstance(found, BlockPlan):
            found = HeadPlans((found,))
        if found is not None and not isinstance(found, HeadPlans):
            raise InvalidOptionError(
                f"{self.lever.name}: the method returned {type(found).__name__}; a HeadPlans, a BlockPlan or None "
                "(dense) is wanted"
            )
        return found

    def _kept_plan(self, method: Any, where: Where, geometry: Geometry) -> HeadPlans | None:
        """The plan of a method that looks at nothing but the geometry, made once for each."""
        known = (type(method).__name__, geometry)
        if known not in self.plans:
            self.plans[known] = method.plan(geometry, None, None, layer=where.layer, step=where.call.step, state={})
            if len(self.plans) > KEPT_PLANS:
                self.plans.popitem(last=False)
        self.plans.move_to_end(known)
        return self.plans[known]

    def _method(self, geometry: Geometry) -> Any:
        lever = self.lever
        if not isinstance(lever.method, str):
            return lever.method
        name = choose(geometry, lever.density)[0] if lever.method == "auto" else lever.method
        if name not in self.configs:
            own = {} if lever.density is None else {"density": lever.density}
            self.configs[name] = METHODS[name](**own)
        return self.configs[name]
