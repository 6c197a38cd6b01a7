"""Any gate with any predictor under any guards in any scope."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

from ...core.accelerator import Target
from ...errors import InvalidOptionError
from ...extrapolation.forecast import REUSE
from ..engine import CacheRecipe, Scope
from ..gates.base import Gate
from ..guards import Guards
from ..policy import Policy, Predictor
from ..scopes.stack import BEHIND_FIRST_BLOCK
from .base import GUARDED, StepCache


@dataclass(frozen=True)
class CustomCache(StepCache):
    """A step cache put together from its parts: `enable_cache(gate=..., predictor=..., guard=..., scope=...)`.

    Attributes:
        gate: a gate of `diffaccel.caching` (ProbeGate, PolynomialGate, MagnitudeGate, SpectralGate, RateGate,
            ProbeSumGate, ScheduleGate, RatesGate), or a `Gate` of your own.
        predictor: a `Forecast` or `ProbeAligned`; reuse as it is unless told.
        guard: `Guards`, in place of min_steps, warmup_steps and the like (`Guards()` guards nothing, and computes
            neither last steps nor short runs for you).
        scope: Stack(front, back), Denoiser(), Modules(), Halves() or Deep(); behind the first block unless told.
        process_group: members of `torch.distributed` that must decide alike.
    """

    gate: Gate[Any] | None = None
    predictor: Predictor = REUSE
    guard: Guards | None = None
    scope: Scope = BEHIND_FIRST_BLOCK
    process_group: Any = None

    name: ClassVar[str] = "cache.custom"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("gate", Gate), ("guard", Guards), ("scope", Scope)):
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name == "guard" and value is None):
                raise InvalidOptionError(f"{name} must be one of diffaccel.caching's, got {value!r}")
        ours = {f.name: f.default for f in fields(StepCache) if f.name in GUARDED}
        both = [name for name, default in ours.items() if getattr(self, name) != default]
        if self.guard is not None and both:
            raise InvalidOptionError(f"guard was given, and {', '.join(both)} as well: put them into Guards(...)")
        if not hasattr(self.predictor, "predict"):
            raise InvalidOptionError(f"predictor must be one of diffaccel.caching's, got {self.predictor!r}")

    def off(self) -> str | None:
        """A gate's threshold of 0 turns it off."""
        return "threshold 0: every step is computed" if getattr(self.gate, "threshold", None) == 0 else None

    def recipe(self, target: Target) -> CacheRecipe:
        """As given."""
        assert self.gate is not None
        guards = self.guards() if self.guard is None else self.guard
        return CacheRecipe(Policy(self.gate, self.predictor, guards), self.scope, process_group=self.process_group)

    def describe(self, recipe: CacheRecipe, target: Target) -> str:
        """The parts, by name."""
        parts = (self.gate, self.predictor, self.scope)
        return " + ".join(type(part).__name__ for part in parts)

    def params(self) -> dict[str, Any]:
        """The parts in words: a plan with this item cannot be read back from a file."""
        hidden = GUARDED if self.guard is not None else ()
        named = [f.name for f in fields(self) if f.name not in hidden]
        shown = {name: getattr(self, name) for name in named if getattr(self, name) is not None}
        return {
            name: repr(value) if is_dataclass(value) or name == "process_group" else value
            for name, value in shown.items()
        }
