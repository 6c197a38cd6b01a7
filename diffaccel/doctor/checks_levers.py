"""What the levers that are on do to a run: nothing, too much, on another's memory, or no longer being in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import DiffaccelError
from ..planner.levers import PLACES
from ..planner.plan import PlanItem
from .diagnosis import Finding
from .patient import Patient
from .signals import FLICKER, LOWEST_DB, colour_shift, decibels, flicker, is_shifted, seams

REUSING = ("cache", "guidance")  # places whose levers leave calls out
KEPT_SHARE = 0.25  # of the host's free memory, for originals
GIB = 1024**3


def enabled(patient: Patient) -> Iterator[tuple[str, PlanItem]]:
    """(place, item) of what is on, with what the first run measured."""
    for item in patient.plan.items:
        place = next((key for key in PLACES if item.name in {PLACES[key].item(v) for v in PLACES[key].values}), "")
        if item.status == "enabled" and place:
            yield place, item


def displaced(patient: Patient) -> Iterator[Finding]:
    """Somebody else took a lever's place before anything was run."""
    for name, why in patient.displaced.items():
        yield Finding("displaced-lever", name, why)


def idle(patient: Patient) -> Iterator[Finding]:
    """A lever that is on, and answered nothing."""
    report = patient.first.report
    if report is None or patient.first.error is not None:
        return
    for place, item in enabled(patient):
        if item.name in patient.displaced:
            continue
        stats = report.stats.get(item.name, {})
        down = next((note for note in report.notes if note.startswith(f"{item.name} stood down:")), None)
        if down is not None:
            yield Finding("silent-fallback", item.name, down)
            continue
        yield from _fell_back(item.name, stats)
        if place in REUSING and not report.hit_rate and not stats.get("steps_reuse"):
            steps = len({step.index for step in report.steps})
            patient.remarks.append(f"{item.name} answered no call in {steps} steps: nothing was near enough to reuse")


def _fell_back(name: str, stats: Mapping[str, object]) -> Iterator[Finding]:
    calls, fallbacks = stats.get("calls"), stats.get("fallbacks")
    if not isinstance(calls, Mapping) or not isinstance(fallbacks, Mapping) or not fallbacks:
        return
    total, back = sum(calls.values()), sum(fallbacks.values())
    reason = max(fallbacks, key=lambda key: fallbacks[key])
    if back == total:
        yield Finding("silent-fallback", name, f"all {total} calls fell back: {reason}")


def fidelity(patient: Patient) -> Iterator[Finding]:
    """Each lossy lever against the same pipeline without it."""
    ours = patient.first.pictures
    if ours is None or not bool(torch.isfinite(ours).all()):
        return
    for place, item in enabled(patient):
        if item.fidelity != "lossy" or item.name in patient.displaced:
            continue
        plain = _without(patient, place)
        if plain is None or plain.shape != ours.shape or not bool(torch.isfinite(plain).all()):
            continue
        if not patient.decoded:
            patient.remarks.append(f"{item.name}: nothing is decoded, so its pictures were not judged")
        else:
            yield from _judged(item.name, plain, ours)


def _without(patient: Patient, place: str) -> torch.Tensor | None:
    """The pictures of the same call with one place empty."""
    try:
        with patient.handle.without(place):
            return patient.run().pictures
    except DiffaccelError as why:
        patient.remarks.append(f"{place}: not compared with a run without it: {why}")
        return None


def _judged(name: str, plain: torch.Tensor, ours: torch.Tensor) -> Iterator[Finding]:
    if is_shifted(plain, ours):
        largest, share = colour_shift(plain, ours)
        yield Finding("colour-shift", name, f"a channel's mean is off by {largest:.3f}, {share:.0%} of the error")
        return
    said = []
    near, before = decibels(plain, ours), flicker(plain)
    if near < LOWEST_DB:
        said.append(f"{near:.1f} dB to the same run without it")
    if before and flicker(ours) > FLICKER * before and near < 2 * LOWEST_DB:
        said.append(f"flicker {flicker(ours) / before:.1f} times that without it")
    if said:
        yield Finding("artefacts", name, "; ".join(said))


def originals(patient: Patient) -> Iterator[Finding]:
    """Weights that are kept in RAM for undo."""
    for place, item in enabled(patient):
        stats = item.measured or {}
        kept, layers, before = stats.get("originals"), stats.get("layers"), stats.get("bytes_before")
        if place != "quantization" or not isinstance(kept, Mapping) or not isinstance(before, int):
            continue
        share = kept.get("host", 0) / layers if isinstance(layers, int) and layers else 0.0
        if share * before > KEPT_SHARE * patient.host_bytes:
            evidence = (
                f"{share * before / GIB:.3g} GiB of originals in RAM, of {patient.host_bytes / GIB:.3g} GiB free"
            )
            yield Finding("host-memory", item.name, evidence)


# ---- video in pieces -----------------------------------------------------------------------------------------------


def decoding(patient: Patient) -> Iterator[Finding]:
    """Decoding in tiles against decoding whole: jumps in time, and the size of what comes out."""
    ours, vae = patient.first.pictures, getattr(patient.pipe, "vae", None)
    if ours is None or not patient.decoded or not _in_pieces(patient, vae, ours.shape[1]):
        return
    with _whole(patient, vae):
        seen = patient.run()
    whole = seen.pictures
    if whole is None:
        patient.remarks.append(f"decoding in pieces was not compared with decoding whole: {seen.error}")
    elif whole.shape != ours.shape:
        evidence = (
            f"{list(ours.shape[1:])} in tiles, {list(whole.shape[1:])} whole ([frames, channels, height, width])"
        )
        yield Finding("decode-size", type(vae).__name__, evidence)
    else:
        found = seams(whole, ours)
        if found:
            evidence = f"jumps at frame {', '.join(map(str, found[:8]))} of {ours.shape[1]}"
            yield Finding("temporal-seams", type(vae).__name__, evidence)


def _in_pieces(patient: Patient, vae: Any, frames: int) -> bool:
    if any(place == "vae_tiling" for place, _ in enabled(patient)) or getattr(vae, "use_tiling", False):
        return True
    least = getattr(vae, "tile_sample_min_num_frames", None)
    return bool(getattr(vae, "use_framewise_decoding", False)) and least is not None and frames > least


@contextlib.contextmanager
def _whole(patient: Patient, vae: Any) -> Iterator[None]:
    """The VAE decodes whole: our tiling and the VAE's own are off, for the length of the `with`."""
    with contextlib.ExitStack() as stack:
        if any(place == "vae_tiling" for place, _ in enabled(patient)):
            stack.enter_context(patient.handle.without("vae_tiling"))
        for switch in ("use_tiling", "use_framewise_decoding"):
            if getattr(vae, switch, False):
                stack.callback(setattr, vae, switch, getattr(vae, switch))
                setattr(vae, switch, False)
        yield
