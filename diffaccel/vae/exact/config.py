"""Exact VAE tiling: the picture of a plain decode, but for rounding, at a fraction of its peak memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.options import BOOLEAN, choose_name, take, whole
from ...errors import BudgetError, InvalidOptionError, UnsupportedModelError
from ..layout import vae_of
from .attached import ExactAttached
from .backends import find_backend, itemsize_of
from .budget import MIB, choose_strips, expected, size_in_words, smallest

MODES = ("auto", "fast", "low")


@dataclass(frozen=True)
class ExactVae:
    """Decode (and encode) in strips that give the picture of a plain decode, but for rounding (equivalent in float32).

    Acts in this pipeline's calls and where `pipe.vae.decode` or `encode` is called by hand; another pipeline that
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
        vae = vae_of(target.pipe)
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
            choose_strips(self, backend, vae, smallest(vae), itemsize_of(vae))
        except BudgetError as error:
            return Verdict.no(str(error), BudgetError)
        own = "; the VAE's own (blended) tiling is set aside" if getattr(vae, "use_tiling", False) else ""
        untouched = "" if self.encode and getattr(backend, "ENCODES", True) else "; encoding is left as it is"
        return Verdict.yes(f"{backend.PITCH_NOTE}; calls of pipe.vae by hand as well{own}{untouched}")

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Peak bytes of a decode at the pipeline's default size, computed from the shapes of the layers."""
        vae = vae_of(target.pipe)
        shape = expected(target.pipe, vae, None)
        backend, _ = find_backend(vae)
        if shape is None or backend is None:
            return {"origin": "unmeasured"}
        try:
            choice = choose_strips(self, backend, vae, shape, itemsize_of(vae))
        except BudgetError:
            return {"origin": "unmeasured"}
        plain = getattr(backend, "plain_bytes", None)
        found = {"size": size_in_words(vae, shape), "peak_mib": round(choice.bytes / MIB, 1)}
        if plain is not None:
            found["plain_peak_mib"] = round(plain(vae, shape, itemsize=itemsize_of(vae)) / MIB, 1)
        return {**found, "origin": "computed"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Stand in for the VAE's `_decode` and `_encode`; follow the pipeline when its VAE is replaced."""
        verdict = self.check(target)
        if not verdict.ok:
            raise verdict.error(f"{self.name}: {verdict.reason}")
        state = ExactAttached(self, target)
        state.attach(vae_of(target.pipe))
        return Edit(
            self.name,
            state.detach,
            begin_run=state.begin_run,
            end_run=state.end_run,
            relink=state.follow,
            stats=state.stats,
            displaced=state.displaced,
        )
