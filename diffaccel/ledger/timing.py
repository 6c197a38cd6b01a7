"""Seconds: FLOPs over the rate that a machine reaches, by published times; with an interval, and what it rests on.

The rates are parts of the bf16 peak by machine, kind of work (image, video) and execution (eager, compiled, tuned
engine), fitted to published times by benchmarks/ledger_rates.py into rates.json. Where nobody published a time for a
cell, the rate follows from the peak alone, and the prediction says so.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ..errors import InvalidOptionError, unknown
from .book import Forward, Ledger
from .hardware import Hardware

EXECUTIONS = ("compiled", "eager", "tuned")
EIGHTY = 1.2816  # standard deviations to each side of 80 % of a normal distribution

# At a peak of PEAK TFLOP/s; they change with the peak as the denoiser's rate does. DECODE: eager decoders on a 4090
# reach 0.24 (SD3) to 0.32 (Wan) of its peak (published times of THU-MIG/edge-dit.cpp). ENCODE: half of a denoiser's,
# assumed.
PEAK = 165.2
DECODE = 0.25
ENCODE = 0.30
SIZE_AT = 12e9  # parameters of a denoiser from which on the table holds; smaller ones reach less
SLOWEST = 119.5  # TFLOP/s of the slowest GPU with a published time: below it nothing is extrapolated


def log_peak(tflops: float) -> float:
    """What the slope over peaks is multiplied with."""
    return math.log(max(tflops, SLOWEST) / PEAK)


def log_size(parameters: int) -> float:
    """What the slope over sizes is multiplied with: 0 for a denoiser of 12 billion parameters or more."""
    return min(0.0, math.log(parameters / SIZE_AT))


def conv_part(forward: Forward) -> float:
    """Part of a forward that is convolution: 0.24 for SDXL, next to nothing for transformers."""
    return forward.conv / forward.total


@dataclass(frozen=True)
class Seconds:
    """Predicted seconds of one generation on one machine.

    Attributes:
        encode, denoise, decode, total: seconds; `low` and `high`: where the total lies in 80 % of new sources.
        mfu: part of the bf16 peak that the denoiser is taken to reach.
        basis: what the rate rests on: "3 sources", "one source", "no source: by the peak", or "given".
    """

    hardware: str
    execution: str
    encode: float
    denoise: float
    decode: float
    total: float
    low: float
    high: float
    mfu: float
    basis: str


@cache
def rates() -> dict[str, Any]:
    """The fitted table."""
    found: dict[str, Any] = json.loads((files(__package__) / "rates.json").read_text())
    return found


def predict(ledger: Ledger, machine: Hardware, execution: str = "eager", mfu: float | None = None) -> Seconds | None:
    """Seconds on that machine; None where its peak is not known. `mfu`: a rate of your own in place of the table's."""
    if execution not in EXECUTIONS:
        raise unknown("execution", execution, EXECUTIONS)
    if mfu is not None and not (isinstance(mfu, (int, float)) and 0 < mfu <= 2):
        raise InvalidOptionError(f"mfu must be a part of the peak, above 0 and at most 2, got {mfu!r}")
    if machine.bf16_tflops is None:
        return None
    peak = machine.bf16_tflops * 1e12
    rate, width, basis = (mfu, 0.0, "given") if mfu else _rate(machine, ledger, execution)
    scale = math.exp(rates()["slope"] * log_peak(machine.bf16_tflops))
    encode = ledger.flops.encode / (peak * ENCODE * scale)
    decode = (ledger.flops.decode or 0) / (peak * DECODE * scale)
    denoise = ledger.flops.denoise / (peak * rate)
    spread = math.exp(EIGHTY * width)
    return Seconds(
        machine.name,
        execution,
        encode,
        denoise,
        decode,
        encode + denoise + decode,
        encode + denoise / spread + decode,
        encode + denoise * spread + decode,
        rate,
        basis,
    )


def _rate(machine: Hardware, ledger: Ledger, execution: str) -> tuple[float, float, str]:
    """(part of the peak, standard deviation of its logarithm, what it rests on)."""
    kind, table = "image" if ledger.request.frames is None else "video", rates()
    assert machine.bf16_tflops is not None
    conv = conv_part(ledger.flops.forward) * (table["conv"] + table["conv_slope"] * log_peak(machine.bf16_tflops))
    size = math.exp(conv + table["size"] * log_size(ledger.params["transformer"]) * (execution != "tuned"))
    cell = table["cells"].get(f"{machine.name} {kind} {execution}")
    if cell is None:  # a machine of the user's own
        general = table["general"][f"{kind} {execution}"] * math.exp(table["slope"] * log_peak(machine.bf16_tflops))
        return general * size, ALONE, NO_SOURCE
    count = len(cell["sources"])
    return (
        cell["rate"] * size,
        cell["width"],
        NO_SOURCE if not count else "one source" if count == 1 else f"{count} sources",
    )


NO_SOURCE = "no source: scaled by the peak"
ALONE = 0.3  # width where not even the machine is in the table
