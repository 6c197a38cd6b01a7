"""What a run itself shows: errors, memory, numbers, graphs compiled again, prompts cut short."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .. import ledger
from ..core.chain import compiled_body
from ..core.wrappers import is_compiled
from ..errors import DiffaccelError
from ..planner.presets.fitting import elsewhere
from ..planner.resolve import choose_hardware
from .diagnosis import Finding
from .observed import first_not_finite
from .patient import Patient
from .reading import cut_prompts
from .signals import all_finite, is_flat

GIB = 1024**3
OOM = ("out of memory", "can't allocate memory", "cannot allocate memory")
GAVE_UP = "recompile_limit"  # in what torch logs when it compiles a function no more


def is_oom(error: BaseException | None) -> bool:
    """Out of memory, on a GPU or the host?"""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in OOM)


def errors(patient: Patient) -> Iterator[Finding]:
    """The run raised."""
    error, inside = patient.first.error, patient.first.inside
    if error is None:
        return
    said = f"{type(error).__name__}: {str(error)[:200]}"
    if isinstance(error, DiffaccelError) and "finite" in str(error):
        yield Finding("not-finite", inside or "denoiser", str(error)[:200])
    elif is_oom(error):
        yield Finding("vae-oom" if inside == "vae" else "wrong-machine", inside or "the run", said)
    else:
        yield Finding("crash", inside or "the run", said)


def numbers(patient: Patient) -> Iterator[Finding]:
    """NaN, infinity, nothing to see."""
    pictures = patient.first.pictures
    if pictures is None:
        return
    if not all_finite(pictures):
        at = first_not_finite(patient.pipe, patient.call, patient.seed)
        share = 1 - float(torch.isfinite(pictures).float().mean())
        yield Finding("not-finite", at or "pictures", f"{share:.0%} of the values are not finite")
    elif patient.decoded and is_flat(pictures):
        black = float(pictures.max()) <= 2 / 255
        yield Finding("flat-picture", "pictures", f"{'black' if black else 'one colour'}: {pictures.mean():.3f}")


def memory(patient: Patient) -> Iterator[Finding]:
    """What the plan puts on the device against what it has, and the VAE's computed peak."""
    plan, limit = patient.plan, patient.memory_bytes
    planned, here = patient.handle.stack.target.hardware, choose_hardware(patient.pipe, None)
    where = elsewhere(planned, here)
    if where is not None:
        yield Finding("wrong-machine", f"plan {plan.preset}", where)
    for note in plan.notes:
        if note.startswith("made for "):
            yield Finding("wrong-machine", f"preset {plan.preset}", note)
    if limit is None:
        return
    weights = resident_bytes(patient)
    if weights > limit:
        evidence = f"weights of {weights / GIB:.3g} GiB on a device of {limit / GIB:.3g} GiB"
        yield Finding("wrong-machine", f"plan {plan.preset}", evidence)
    elif "vae.tiling" not in plan.enabled and not getattr(getattr(patient.pipe, "vae", None), "use_tiling", False):
        yield from _vae_peak(patient, limit - weights)


def resident_bytes(patient: Patient) -> float:
    """Bytes of weights that are on the device at once: of all components, or what the plan of offload says."""
    for item in patient.plan.items:
        if item.status == "enabled" and item.name.startswith("offload."):
            gib, count = item.predicted.get("weights_gib"), item.predicted.get("resident_bytes")
            if isinstance(gib, (int, float)):
                return gib * GIB
            if isinstance(count, (int, float)):
                return float(count)
    parts = [part for part in patient.pipe.components.values() if isinstance(part, torch.nn.Module)]
    sizes = {id(p): p.numel() * p.element_size() for part in parts for p in part.parameters()}
    return float(sum(sizes.values()))


def _vae_peak(patient: Patient, room: float) -> Iterator[Finding]:
    call, vae = patient.call, getattr(patient.pipe, "vae", None)
    size = {"height": call.get("height"), "width": call.get("width"), "frames": call.get("num_frames")}
    try:
        book = ledger.from_pipeline(patient.pipe, **{k: v for k, v in size.items() if v is not None})
    except DiffaccelError as why:
        patient.remarks.append(f"the VAE's peak was not computed: {why}")
        return
    if book.vae_peak_bytes is None or vae is None:
        return
    peak = book.vae_peak_bytes * (0.5 if next(vae.parameters()).element_size() == 2 else 1.0)
    if peak > room:
        at = f"{book.request.width}x{book.request.height}"
        yield Finding("vae-oom", "vae", f"decoding {at} needs {peak / GIB:.3g} GiB, and {room / GIB:.3g} are free")


def graphs(patient: Patient) -> Iterator[Finding]:
    """Something is compiled, and is compiled again in a second identical call, or at every size."""
    gave_up = next((line for line in patient.first.said + patient.second.said if GAVE_UP in line), None)
    if gave_up is not None:
        yield Finding("recompile-storm", "torch.compile", f"torch gave up: {gave_up[:160]}")
        return
    names = [name for name, part in patient.pipe.components.items() if _compiled(part)]
    if not names or patient.second.error is not None:
        return
    if patient.second.graphs:
        evidence = f"an identical second call compiled {patient.second.graphs} graphs again"
        yield Finding("recompile-storm", ", ".join(names), evidence)
        return
    at = [(size, patient.run(width=size[0], height=size[1])) for size in _sizes(patient)]
    late = [(size, seen.graphs) for size, seen in at[1:] if seen.graphs]  # a second size may make graphs general
    if late:
        (width, height), count = late[0]
        yield Finding("recompile-storm", ", ".join(names), f"{width}x{height}, a third size, compiled {count} graphs")


def _compiled(part: object) -> bool:
    if not isinstance(part, torch.nn.Module):
        return False
    return any(is_compiled(module) or compiled_body(module) is not None for module in part.modules())


def _sizes(patient: Patient) -> list[tuple[int, int]]:
    """Two more sizes: those given, or a little larger ones than the call's, where it names one."""
    if patient.sizes:
        return list(patient.sizes)
    height, width = patient.call.get("height"), patient.call.get("width")
    if not isinstance(height, int) or not isinstance(width, int):
        patient.remarks.append("other sizes were not tried: the call names no height and width")
        return []
    factors = (getattr(patient.pipe, name, None) for name in ("vae_scale_factor", "vae_scale_factor_spatial"))
    unit = 2 * int(next((factor for factor in factors if factor), 8))
    return [(width + unit * k, height + unit * k) for k in (1, 3)]


def prompts(patient: Patient) -> Iterator[Finding]:
    """The end of a prompt that no text encoder gets."""
    lost, partly = cut_prompts(patient.first.reads, patient.prompts)
    for read in lost:
        yield Finding("truncated-prompt", read.tokenizer, f"{read.tokens} tokens, of which {read.limit} are read")
    patient.remarks += [
        f"{read.tokenizer} reads {read.limit} of {read.tokens} tokens; another encoder reads all of them"
        for read in partly
    ]
