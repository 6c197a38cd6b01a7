"""Choose the attention backend of a pipeline's denoisers: by interception, never process-wide.

diffusers' `set_attention_backend` also moves the process-wide default, and its reset does not move it back, and it
does nothing on models that call SDPA themselves; here each call is handed to the backend as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ..core.compat import attention_backends, dispatch_attention, unwrap_module
from ..core.run import Call, Run
from ..core.state import PerRun
from ..errors import InvalidOptionError, MissingDependencyError, unknown
from .attach import attach_handler, interceptable
from .backends import AUTO, BACKENDS, Backend, unfit, unfit_call
from .calls import Counts, Inputs, Where
from .intercept import BACKEND
from .processors import form, processors


def head_dim_of(attention: torch.nn.Module) -> int | None:
    """Channels of one head of an attention module of diffusers; None where it does not say."""
    for name in ("head_dim", "dim_head"):
        value = getattr(attention, name, None)
        if isinstance(value, int):
            return value
    inner, heads = getattr(attention, "inner_dim", None), getattr(attention, "heads", None)
    return inner // heads if isinstance(inner, int) and isinstance(heads, int) and heads else None


@dataclass(frozen=True)
class AttentionBackend:
    """Which backend computes attention.

    Attributes:
        backend: "auto" (the best that fits device, dtype, head_dim and installed packages), or a name of
            `attention.backends.BACKENDS`.
    """

    backend: str = "auto"

    slot: ClassVar[Slot] = Slot.CALL

    def __post_init__(self) -> None:
        if self.backend != "auto" and self.backend not in BACKENDS:
            raise unknown("attention backend", self.backend, ["auto", *BACKENDS])

    @property
    def name(self) -> str:
        """Plan item name."""
        return f"attention.{self.backend}"

    @property
    def fidelity(self) -> Fidelity:
        """Another kernel rounds otherwise; PyTorch's own SDPA is what the plain pipeline runs."""
        return Fidelity.EXACT if self.backend == "native" else Fidelity.EQUIVALENT

    def _sites(self, target: Target) -> list[tuple[torch.nn.Module, Any]]:
        modules = (getattr(target.pipe, name, None) for name in target.spec.denoisers)
        found = (row for module in modules if module is not None for row in processors(module))
        return [(attention, processor) for _, attention, processor in found if form(processor) is not None]

    def _unfit(self, target: Target, backend: Backend) -> str | None:
        module = getattr(target.pipe, target.spec.denoisers[0])
        dtype = str(next(unwrap_module(module).parameters()).dtype).removeprefix("torch.")
        for attention, _ in self._sites(target):
            reason = unfit(backend, target.hardware, dtype, head_dim_of(attention))
            if reason is not None:
                return reason
        return None

    def resolve(self, target: Target) -> Backend:
        """The backend that "auto" stands for here (always falls back to native)."""
        if self.backend != "auto":
            return BACKENDS[self.backend]
        return next(b for b in map(BACKENDS.__getitem__, AUTO) if b.name == "native" or not self._unfit(target, b))

    def check(self, target: Target) -> Verdict:
        """Needs attention that can be intercepted, and a backend that fits."""
        verdict = interceptable(target)
        if not verdict.ok:
            return verdict
        backend = self.resolve(target)
        reason = self._unfit(target, backend)
        if reason is not None:
            missing = backend.package is not None and "not installed" in reason
            return Verdict.no(
                f"{reason}; attention stays as it is",
                MissingDependencyError if missing else InvalidOptionError,
            )
        if self.backend == "auto" and all(self._is(p, backend) for _, p in self._sites(target)):
            there = f"{backend.name} is the best that fits {target.hardware.name}, and is in use already"
            return Verdict.already(there)
        return Verdict.yes(f"{backend.name} for {len(self._sites(target))} attention layers")

    @staticmethod
    def _is(processor: Any, backend: Backend) -> bool:
        current = getattr(processor, BACKEND, None)
        return backend.name == "native" if current is None else current.value == backend.diffusers_name

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Nothing is promised without a measurement."""
        return {"origin": "unmeasured"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Hand every attention call of this pipeline's runs to the backend."""
        backend = self.resolve(target)
        handler = BackendHandler(self.name, backend)
        return attach_handler(self.name, target, site, handler, handler.begin_run, handler.stats, handler.inline())


@dataclass(frozen=True)
class Inline:
    """A backend that compiled graphs call without leaving the graph, what it takes, and who counts its calls."""

    member: Any
    mask: bool
    causal: bool
    count: Callable[[Call], None]

    def takes(self, masked: bool, causal: bool) -> bool:
        """Can such a call go to it? (Decided while a graph is traced.)"""
        return (self.mask or not masked) and (self.causal or not causal)


class BackendHandler:
    """Computes calls with the backend where it can; as the plain pipeline where it cannot, and says so."""

    def __init__(self, name: str, backend: Backend) -> None:
        self.name, self.backend = name, backend
        self.member = attention_backends()[backend.diffusers_name]

    def inline(self) -> Inline:
        """For compiled graphs."""
        return Inline(self.member, self.backend.mask, self.backend.causal, self._count)

    def _count(self, call: Call) -> None:
        """The backend computed one more call."""
        call.run.state[self.name]["counts"].add(self.backend.name)

    def begin_run(self, run: Run) -> None:
        """A run begins: count anew."""
        run.state[self.name] = PerRun({"counts": Counts()})

    def stats(self, run: Run) -> dict[str, Any]:
        """For the report."""
        state = run.state.get(self.name)
        return {"backend": self.backend.name, **(state["counts"].stats() if state else {})}

    def __call__(self, where: Where, inputs: Inputs, plain: Callable[[], Any]) -> Any:
        """Answer one attention call."""
        counts: Counts = where.call.run.state[self.name]["counts"]
        reason = self._unfit(inputs)
        if reason is not None:
            counts.fall_back(where, self.name, reason)
            return plain()
        self._count(where.call)
        return dispatch_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.mask,
            0.0,
            inputs.causal,
            inputs.scale,
            inputs.gqa,
            backend=self.member,
        )

    def _unfit(self, inputs: Inputs) -> str | None:
        q, k = inputs.q, inputs.k
        return unfit_call(
            self.backend, q.shape, k.shape, q.dtype, q.device.type, inputs.mask is not None, inputs.causal, inputs.gqa,
            inputs.lse,
        )  # fmt: skip
