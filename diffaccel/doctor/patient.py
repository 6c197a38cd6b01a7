"""The pipeline on the table: how it is called, what its runs gave, and what is allowed on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..handle import Acceleration
from ..planner.plan import Plan
from .observed import Observation, observe


@dataclass
class Patient:
    """A pipeline that has a handle (perhaps with nothing on), in its examination.

    Attributes:
        call: the pipeline's own arguments.
        first, second: the same call twice, as the pipeline is.
        displaced: by lever, who had taken its place before anything was run.
        memory_bytes: of the device; None where it has none of its own and no limit was given.
        host_bytes: what the host has free.
        sizes: other (width, height) to run it at, where it is compiled.
        loras: what files of adapters say, by adapter.
        remarks: what was not looked at.
    """

    pipe: Any
    handle: Acceleration
    call: Mapping[str, Any]
    seed: int
    displaced: Mapping[str, str]
    plan: Plan
    memory_bytes: float | None
    host_bytes: float
    sizes: Sequence[tuple[int, int]]
    loras: Mapping[str, Any]
    first: Observation = field(default_factory=Observation)
    second: Observation = field(default_factory=Observation)
    remarks: list[str] = field(default_factory=list)

    def run(self, **more: Any) -> Observation:
        """One more run, with the same noise."""
        return observe(self.pipe, {**self.call, **more}, self.seed)

    @property
    def decoded(self) -> bool:
        """Are its outputs pictures, and not latents?"""
        return getattr(self.pipe, "vae", None) is not None and self.call.get("output_type") != "latent"

    @property
    def prompts(self) -> list[str]:
        """The texts of the call."""
        found: list[str] = []
        for name in ("prompt", "negative_prompt"):
            value = self.call.get(name)
            found += [value] if isinstance(value, str) else [v for v in value or () if isinstance(v, str)]
        return found
