"""The generation beside what it is often compared with: an LLM's answer, and itself made larger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidOptionError, unknown
from .arithmetic import estimate
from .book import Ledger
from .hardware import Hardware
from .models import Model

# A 7B model in bf16 writes 1000 tokens: two FLOPs a parameter and token, all weights read once for each token at 70 %
# of the bandwidth. The intensity is 1 FLOP a byte.
LLM_PARAMETERS, LLM_TOKENS, LLM_BANDWIDTH = 7e9, 1000, 0.7
LLM_FLOPS = 2 * LLM_PARAMETERS * LLM_TOKENS
LLM_INTENSITY = 2 * LLM_PARAMETERS / (2 * LLM_PARAMETERS)


def llm_seconds(machine: Hardware) -> float | None:
    """Seconds of that answer; None where the bandwidth is not known."""
    if machine.bandwidth_gb_s is None:
        return None
    return LLM_TOKENS * 2 * LLM_PARAMETERS / (machine.bandwidth_gb_s * 1e9 * LLM_BANDWIDTH)


@dataclass(frozen=True)
class Step:
    """One point of a sweep."""

    label: str
    ledger: Ledger


SWEEPS = ("frames", "guidance", "size", "steps")


def sweep(
    model: Model,
    base: Ledger,
    over: str,
    hardware: Hardware | None = None,
    mfu: float | None = None,
    execution: str = "eager",
) -> list[Step]:
    """The same request with one thing changed: what multiplies the cost, and how."""
    if over not in SWEEPS:
        raise unknown("sweep", over, SWEEPS)
    request, steps = base.request, []
    for label, changes in _points(model, base, over):
        asked = {
            "height": request.height,
            "width": request.width,
            "frames": request.frames,
            "steps": request.steps,
            "guidance": None if request.branches == model.defaults.branches else float(request.branches),
            "text_tokens": request.text_tokens,
            "hardware": hardware,
            "mfu": mfu,
            "execution": execution,
            **changes,
        }
        steps.append(Step(label, estimate(model, **asked)))  # type: ignore[arg-type]
    return steps


def _points(model: Model, base: Ledger, over: str) -> Sequence[tuple[str, dict[str, object]]]:
    request = base.request
    if over == "frames":
        if request.frames is None:
            raise InvalidOptionError(f"no sweep over frames: {model.name} makes pictures")
        temporal = model.compression[1]
        counts = sorted({*(temporal * n + 1 for n in (4, 8, 12, 20, 32, 40, 80)), request.frames})
        return [(str(count), {"frames": count}) for count in counts]
    if over == "steps":
        counts = sorted({4, 8, 16, 28, 50, request.steps})
        return [(str(count), {"steps": count}) for count in counts]
    if over == "guidance":
        return [("off", {"guidance": 1.0}), ("on", {"guidance": 2.0})]
    grain = 2 * model.compression[0]
    points: list[tuple[str, dict[str, object]]] = []
    for factor in (0.5, 0.75, 1.0, 1.5, 2.0):
        height, width = (max(grain, round(side * factor / grain) * grain) for side in (request.height, request.width))
        if factor == 1.0:
            height, width = request.height, request.width
        points.append((f"{width}x{height}", {"height": height, "width": width}))
    return points


def amplifiers(model: Model, base: Ledger) -> list[tuple[str, float]]:
    """(what is doubled, factor of the denoiser's FLOPs)."""
    request, rows = base.request, []
    doubled: list[tuple[str, dict[str, object]]] = [("both sides", {"height": 2, "width": 2})]
    if request.frames is not None:
        doubled.append(("frames", {"frames": 2}))
    doubled.append(("steps", {"steps": 2}))
    for label, factors in doubled:
        asked = {name: getattr(request, name) * factors.get(name, 1) for name in ("height", "width", "steps")}
        frames = None if request.frames is None else request.frames * int(str(factors.get("frames", 1)))
        large = estimate(model, frames=frames, text_tokens=request.text_tokens, hardware=None, **asked)
        rows.append((label, large.flops.denoise / large.request.branches / (base.flops.denoise / request.branches)))
    if model.defaults.guidance == "two branches":
        rows.append(("guidance on, not off", 2.0))
    return rows
