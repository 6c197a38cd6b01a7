"""Exact VAE tiling: the picture of a plain decode, but for rounding, at a fraction of its peak memory."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.compat import unwrap_module
from ...core.options import BOOLEAN, choose_name, take, whole
from ...core.run import Run
from ...errors import BudgetError, InvalidOptionError, UnsupportedModelError
from .budget import MIB, Choice, choose, expected, size_in_words, smallest
from .intercept import JOBS, seam

MODES = ("auto", "fast", "low")
BACKENDS = ("kl", "causal")  # modules of this room, asked in this order


@dataclass(frozen=True)
class ExactVae:
    """Decode (and encode) in strips that give the picture of a plain decode, but for rounding (equivalent in float32).

    Acts within this pipeline's runs only (`with pipe.acceleration.run():` makes one by hand); a plain pipeline that
    shares the VAE is not touched. Takes the place of diffusers' tiling while it is on.

    Attributes:
        mode: "fast" computes nothing twice, "low" holds as little as it can, "auto" is "fast" unless `max_bytes` asks
            for less.
        max_bytes: most bytes of live tensors that a decode may hold (weights and the latents not counted); chooses
            mode and height of the strips. BudgetError, before the run where the size is known, if none is low enough.
        rows: height of a strip in latent rows; None chooses by size or budget.
        encode: also when pictures are encoded (image to image).

    Raises:
        InvalidOptionError: an unknown mode, or a number that is not whole and above 0.
    """

    mode: str = "auto"
    max_bytes: int | None = None
    rows: int | None = None
    encode: bool = True

    name: ClassVar[str] = "vae.tiling"
    slot: ClassVar[Slot] = Slot.MODULE
    fidelity: ClassVar[Fidelity] = Fidelity.EQUIVALENT

    def __post_init__(self) -> None:
        choose_name(self, "mode", MODES)
        take(self, whole(1, "a whole number above 0").or_none(), "max_bytes", "rows")
        take(self, BOOLEAN, "encode")

    def check(self, target: Target) -> Verdict:
        """Needs a VAE whose structure a backend reproduces, and a budget that is possible at all."""
        vae = _vae(target.pipe)
        if vae is None:
            return Verdict.no(f"{type(target.pipe).__name__} has no vae")
        backend, why = find_backend(vae)
        if backend is None:
            return Verdict.no(f"{type(vae).__name__}: {why}", UnsupportedModelError)
        if self.mode != "auto" and self.mode not in backend.MODES:
            allowed = ", ".join(repr(mode) for mode in ("auto", *backend.MODES))
            return Verdict.no(
                f"mode={self.mode!r}: for {type(vae).__name__} it is one of {allowed}", InvalidOptionError
            )
        try:
            choose(self, backend, vae, smallest(vae), _itemsize(vae))
        except BudgetError as error:
            return Verdict.no(str(error), BudgetError)
        own = "; the VAE's own (blended) tiling is set aside" if getattr(vae, "use_tiling", False) else ""
        untouched = "" if self.encode and getattr(backend, "ENCODES", True) else "; encoding is left as it is"
        return Verdict.yes(backend.PITCH_NOTE + own + untouched)

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Peak bytes of a decode at the pipeline's default size, computed from the shapes of the layers."""
        vae = _vae(target.pipe)
        shape = expected(target.pipe, vae, None)
        backend, _ = find_backend(vae)
        if shape is None or backend is None:
            return {"origin": "unmeasured"}
        try:
            choice = choose(self, backend, vae, shape, _itemsize(vae))
        except BudgetError:
            return {"origin": "unmeasured"}
        plain = getattr(backend, "plain_bytes", None)
        found = {"size": size_in_words(vae, shape), "peak_mib": round(choice.bytes / MIB, 1)}
        if plain is not None:
            found["plain_peak_mib"] = round(plain(vae, shape, itemsize=_itemsize(vae)) / MIB, 1)
        return {**found, "origin": "computed"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Nothing is edited between runs; each run opens the VAE's seam for itself."""
        verdict = self.check(target)
        if not verdict.ok:
            raise verdict.error(f"{self.name}: {verdict.reason}")

        def begin(run: Run) -> None:
            _begin(self, run)

        return Edit(self.name, lambda: None, begin_run=begin, end_run=_end, stats=_stats)


def find_backend(vae: Any) -> tuple[Any, str]:
    """(the module that decodes this VAE in strips or None, why not)."""
    reasons = []
    for name in BACKENDS:
        backend = importlib.import_module(f".{name}", __package__)
        why = backend.supports(vae)
        if why is None:
            return backend, ""
        reasons.append(f"{why} ({backend.NAME})")
    return None, "; ".join(dict.fromkeys(reasons))


def _vae(pipe: Any) -> Any:
    vae = getattr(pipe, "vae", None)
    return None if vae is None else unwrap_module(vae)


def _itemsize(vae: Any) -> int:
    """Bytes per element of what the VAE computes in: its own type, or float32 where a pipeline lifts it to that."""
    dtype = next(vae.parameters()).dtype
    lifted = dtype == torch.float16 and getattr(getattr(vae, "config", None), "force_upcast", False)
    return 4 if lifted else dtype.itemsize


# ---- a run ----------------------------------------------------------------------------------------------


def _begin(lever: ExactVae, run: Run) -> None:
    vae = _vae(run.pipe)
    backend, why = find_backend(vae) if vae is not None else (None, "the pipeline has no vae any more")
    if backend is None:
        run.note(f"{lever.name} stood down: {why}")
        return
    known = lever.max_bytes is not None and run.request is not None
    shape = expected(run.pipe, vae, run.request) if known else None
    if shape is not None:
        choose(lever, backend, vae, shape, _itemsize(vae))  # raises before anything is computed
    JOBS[run] = _Job(lever, backend, vae, run)
    seam(vae).open()


def _end(run: Run) -> None:
    job = JOBS.pop(run, None)
    if job is not None:
        seam(job.vae).close()


def _stats(run: Run) -> dict[str, Any]:
    job = JOBS.get(run)
    return {"decodes": 0, "encodes": 0, "exact": 0} if job is None else job.stats()


class _Job:
    """One run's decodes and encodes."""

    def __init__(self, lever: ExactVae, backend: Any, vae: Any, run: Run) -> None:
        self.lever, self.backend, self.vae, self.run = lever, backend, vae, run
        self.counts = {"decodes": 0, "encodes": 0, "exact": 0}
        self.last: Choice | None = None

    def call(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`own(*args, **kwargs)` in strips, or as it is with a note of the reason."""
        encode = name == "_encode"
        self.counts["encodes" if encode else "decodes"] += 1
        given = inspect.signature(own).bind(*args, **kwargs).arguments
        (_, x), *rest = given.items()
        more = {key: value for key, value in rest if key != "return_dict" and value is not None}
        why = self.why_not(x, more, encode)
        if why is not None:
            if why:
                self.run.note(f"{self.lever.name} stood down: {why}")
            return own(*args, **kwargs)
        choice = choose(self.lever, self.backend, self.vae, tuple(x.shape), x.element_size(), encode=encode)
        work = self.backend.encode if encode else self.backend.decode
        with torch.no_grad():
            made = work(self.vae, x, rows=choice.rows, mode=choice.mode, **more)
        self.counts["exact"] += 1
        self.last = choice
        if encode:
            return made
        return _output(made) if given.get("return_dict", True) else (made,)

    def why_not(self, x: torch.Tensor, more: Mapping[str, Any], encode: bool) -> str | None:
        """Why this call is left to the VAE: None where it is not, "" where that was asked for."""
        if encode and not self.lever.encode:
            return ""
        if encode and not getattr(self.backend, "ENCODES", True):
            return f"{type(self.vae).__name__}: encoding in strips is not in this version"
        takes = inspect.signature(self.backend.encode if encode else self.backend.decode).parameters
        anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
        for name in more:
            if name not in takes and not anything:
                return f"the VAE was called with {name}="
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.vae.parameters())):
            return "gradients are wanted, which strips do not keep: call it under torch.no_grad()"
        standing = getattr(self.backend, "standing", None)
        return standing(self.vae, "encoder" if encode else "decoder") if standing is not None else None

    def stats(self) -> dict[str, Any]:
        """Counts of the run, and what the last one was done with."""
        last = self.last
        chosen = {} if last is None else {"mode": last.mode, "rows": last.rows, "predicted_peak_bytes": last.bytes}
        return {**self.counts, **chosen}


def _output(sample: torch.Tensor) -> Any:
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample)
