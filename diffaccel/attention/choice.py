"""Choose the attention backend of a pipeline's denoisers, per processor and never process-wide.

diffusers' `set_attention_backend` also moves the process-wide default, and its reset does not move it back;
here only `processor._attention_backend` of the model's own processors is written, for the length of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ..core.compat import attention_backends, unwrap_module
from ..core.run import Call, Run
from ..errors import InvalidOptionError, MissingDependencyError, UnsupportedModelError, unknown
from ..ledger.hardware import detect
from .backends import AUTO, BACKENDS, Backend, unfit

FIELD = "_attention_backend"


def processors(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """(attention module, processor) of every processor that goes through diffusers' dispatcher."""
    for child in unwrap_module(module).modules():
        processor = getattr(child, "processor", None)
        if processor is not None and hasattr(processor, FIELD):
            yield child, processor


def _head_dim(attention: torch.nn.Module) -> int | None:
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
        return [pair for module in modules if module is not None for pair in processors(module)]

    def _unfit(self, target: Target, backend: Backend) -> str | None:
        module = getattr(target.pipe, target.spec.denoisers[0])
        dtype = str(next(unwrap_module(module).parameters()).dtype).removeprefix("torch.")
        for attention, _ in self._sites(target):
            reason = unfit(backend, target.hardware, dtype, _head_dim(attention))
            if reason is not None:
                return reason
        return None

    def resolve(self, target: Target) -> Backend:
        """The backend that "auto" stands for here (always falls back to native)."""
        if self.backend != "auto":
            return BACKENDS[self.backend]
        return next(b for b in map(BACKENDS.__getitem__, AUTO) if b.name == "native" or not self._unfit(target, b))

    def check(self, target: Target) -> Verdict:
        """Needs processors that go through diffusers' dispatcher, and a backend that fits."""
        spec = target.spec
        if not spec.denoisers or not self._sites(target):
            where = spec.denoisers[0] if spec.denoisers else "the pipeline"
            return Verdict.no(
                f"{spec.family}: the attention processors of {where} call scaled_dot_product_attention themselves "
                "and take no backend",
                UnsupportedModelError,
            )
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
        current = getattr(processor, FIELD)
        return backend.name == "native" if current is None else current.value == backend.diffusers_name

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Nothing is promised without a measurement."""
        return {"origin": "unmeasured"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Have the backend in the processors for the length of each denoiser call of this pipeline's runs."""
        backend = self.resolve(target)
        switches = []
        for component, root in site.roots.items():
            switch = _Switch(backend, getattr(target.pipe, component))
            root.listeners.append(switch)
            switches.append((root, switch))

        def begin_run(run: Run) -> None:
            for _, switch in switches:
                reason = switch.ask(run)
                if reason is not None:
                    run.note(f"{self.name} stood down: {reason}")

        def undo() -> None:
            for root, switch in switches:
                if switch in root.listeners:
                    root.listeners.remove(switch)

        return Edit(self.name, undo, begin_run=begin_run, stats=lambda run: {"backend": backend.name})


class _Switch:
    """Sets the backend of one denoiser's processors when a call begins, and puts back what was there.

    Only calls of the accelerated pipeline's own runs are announced, so another pipeline on the same model (and
    the process-wide default) never sees it.
    """

    def __init__(self, backend: Backend, module: torch.nn.Module) -> None:
        self.backend, self.module = backend, module
        self.member = attention_backends()[backend.diffusers_name]
        found = list(processors(module))
        self.head_dim = max((d for d in (_head_dim(a) for a, _ in found) if d), default=None)
        self.processors = list({id(p): p for _, p in found}.values())  # layers may share one processor
        self.before: list[tuple[Any, Any]] = []
        self.fits = True

    def ask(self, run: Run) -> str | None:
        """Does the backend still fit? Device and dtype may have changed since the plan was made."""
        dtype = str(next(unwrap_module(self.module).parameters()).dtype).removeprefix("torch.")
        reason = unfit(self.backend, detect(run.device.type), dtype, self.head_dim)
        self.fits = reason is None
        return reason

    def begin_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The denoiser is about to run (under its root hook's lock)."""
        if not self.fits:
            return
        self.before = [(processor, vars(processor).get(FIELD, _ABSENT)) for processor in self.processors]
        for processor in self.processors:
            setattr(processor, FIELD, self.member)

    def end_call(self, call: Call) -> None:
        """The denoiser returned or raised."""
        for processor, value in self.before:
            if value is not _ABSENT:
                setattr(processor, FIELD, value)
            else:
                delattr(processor, FIELD)
        self.before = []


_ABSENT = object()
