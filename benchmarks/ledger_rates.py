"""Fit the rates that `diffaccel.ledger` predicts seconds with, and say how well whole sources are foretold.

    python benchmarks/ledger_rates.py            # prints the table of sources, left out one by one
    python benchmarks/ledger_rates.py --write    # and writes diffaccel/ledger/rates.json

Rows: benchmarks/data/published_times.json, one GPU, no cache, no quantization, no offload, confidence absent or
medium. The rate of a row is the part of the GPU's bf16 peak at which the denoiser ran, once the predicted seconds of
text encoder and decoder are taken off. Its logarithm is modelled as a sum: one term by execution (eager, compiled,
tuned), one for video, one for cards for the desk, slopes over the logarithms of the peak (large GPUs reach a smaller
part of it) and of the denoiser's parameters (small models do, unless a tuned engine runs them), two for the part of a
forward that is convolution (UNets run slower, and more so on large GPUs), and deviations of GPU, of GPU and kind of
work, and of the source. All are normal with the widths below, so that the
posterior has a closed form, and a source that is not known gets the width of sources on top.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diffaccel.ledger import estimate
from diffaccel.ledger.hardware import named
from diffaccel.ledger.timing import DECODE, EIGHTY, ENCODE, conv_part, log_peak, log_size

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "data" / "published_times.json"
RATES = ROOT / "diffaccel" / "ledger" / "rates.json"

# (mean, standard deviation) of the terms before any row is seen; logarithms.
PRIOR = {"eager": (math.log(0.5), 0.5), "compiled": (math.log(0.65), 0.5), "tuned": (math.log(0.75), 0.5)}
VIDEO, SLOPE, SIZE, CARD = (0.0, 0.3), (-0.35, 0.15), (0.0, 0.1), (0.0, 0.2)
CONV, CONV_SLOPE = (0.0, 1.0), (0.0, 1.0)  # SDXL: a quarter of a forward is convolution
GPU, WORK, SOURCE, NOISE = 0.12, 0.10, 0.13, 0.10
MOST = 0.9  # of the peak, where no published time says otherwise
CARDS = {"3060", "3090", "4090", "5090"}  # for the desk: they clock above the peak that their data sheets state

# What changes how much is computed, or how: not the rate of the plain model.
OTHER = re.compile(r"cache|fp8|float8|nf4|int8|offload|ring|pipefusion|taylor|rdt", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """A published time that says something about a rate."""

    source: str
    gpu: str
    video: bool
    execution: str
    size: float  # `log_size` of the denoiser
    conv: float  # part of a forward that is convolution
    flops: float  # of the denoiser
    others_s: float  # predicted seconds of encoder and decoder
    seconds: float
    what: str

    @property
    def rate(self) -> float:
        """Logarithm of the part of the peak."""
        peak = named(self.gpu).bf16_tflops
        assert peak is not None
        return math.log(self.flops / (self.seconds - self.others_s) / (peak * 1e12))


def usable(row: dict[str, Any]) -> bool:
    """Whether a row is of the plain model on one known GPU."""
    return (
        row["n_gpus"] == 1
        and row.get("confidence", "medium") == "medium"
        and row["model"].split(" ")[0] in KNOWN
        and not OTHER.search(row["config"])
        and "i2v" not in row["model"]
    )


KNOWN = {
    *("flux.1-dev", "flux.1-schnell", "flux.2-dev", "flux.2-klein-4b", "qwen-image", "z-image-turbo", "sd3-medium"),
    *("sdxl", "wan2.1-t2v-1.3b", "wan2.1-t2v-14b", "wan2.2-t2v-a14b", "hunyuanvideo", "ltx-video-13b"),
}


def read(row: dict[str, Any]) -> Row:
    """Put the ledger beside a published row."""
    model, config = row["model"].split(" ")[0], row["config"]
    sizes = [int(n) for n in re.findall(r"\d+", row["shape"].split(",")[0])] if "x" in row["shape"] else []
    width, height, frames = (*sizes, None)[:3] if 2 <= len(sizes) <= 3 else (None, None, None)
    book = estimate(model, height, width, frames, row["steps"], text_tokens=row.get("text_tokens"), hardware=None)
    gpu = named(re.split(r"-(?:SXM|80)", row["gpu"])[0].removesuffix(" SXM 80GB"))
    assert gpu.bf16_tflops is not None and book.flops.decode is not None
    peak, alone = gpu.bf16_tflops * 1e12, "ONE" in row["scope"]
    scale = math.exp(SLOPE[0] * log_peak(gpu.bf16_tflops))
    return Row(
        source=re.split(r"[(:;]", row["source"])[0].strip(),
        gpu=gpu.name,
        video=book.request.frames is not None,
        execution="tuned" if "tuned" in config else "compiled" if "compile" in config else "eager",
        size=log_size(book.params["transformer"]),
        conv=conv_part(book.flops.forward),
        flops=float(book.flops.forward.total * row["cfg_branches"] * row["steps"]),
        others_s=0.0
        if alone
        else book.flops.decode / (peak * DECODE * scale) + book.flops.encode / (peak * ENCODE * scale),
        seconds=row["seconds"],
        what=f"{model} {row['shape']}",
    )


# ---- the model ------------------------------------------------------------------------------------------------------

FIXED = ("eager", "compiled", "tuned", "video", "slope", "size", "card", "conv", "conv slope")


def features(gpu: str, video: bool, execution: str, size: float, conv: float, terms: list[str]) -> np.ndarray:
    """The row of the design matrix for one cell; terms that it does not have are zero."""
    peak = named(gpu).bf16_tflops
    assert peak is not None
    values = {execution: 1.0, "video": float(video), "slope": log_peak(peak), "size": size * (execution != "tuned")}
    values |= {"card": float(gpu in CARDS), "conv": conv, "conv slope": conv * log_peak(peak)}
    values |= {f"gpu {gpu}": 1.0, f"work {gpu} {video}": 1.0}
    return np.array([values.get(term, 0.0) for term in terms])


@dataclass
class Fit:
    """Posterior of the terms."""

    terms: list[str]
    mean: np.ndarray
    covariance: np.ndarray

    def predict(
        self, gpu: str, video: bool, execution: str, size: float = 0.0, conv: float = 0.0
    ) -> tuple[float, float]:
        """(mean, standard deviation) of the logarithm of the rate that a new source would see."""
        x = features(gpu, video, execution, size, conv, self.terms)
        known = set(self.terms)
        extra = GPU**2 * (f"gpu {gpu}" not in known) + WORK**2 * (f"work {gpu} {video}" not in known)
        variance = float(x @ self.covariance @ x) + extra + SOURCE**2 + NOISE**2
        return float(x @ self.mean), math.sqrt(variance)


def fit(rows: list[Row]) -> Fit:
    """The posterior given these rows."""
    gpus = sorted({row.gpu for row in rows})
    works = sorted({(row.gpu, row.video) for row in rows})
    sources = sorted({row.source for row in rows})
    terms = [*FIXED, *(f"gpu {g}" for g in gpus), *(f"work {g} {v}" for g, v in works)]
    priors = [*(PRIOR[name] for name in FIXED[:3]), VIDEO, SLOPE, SIZE, CARD, CONV, CONV_SLOPE]
    priors += [(0.0, GPU)] * len(gpus) + [(0.0, WORK)] * len(works) + [(0.0, SOURCE)] * len(sources)
    design = np.array(
        [
            np.concatenate(
                [
                    features(row.gpu, row.video, row.execution, row.size, row.conv, terms),
                    [float(row.source == source) for source in sources],
                ]
            )
            for row in rows
        ]
    )
    before = np.diag([1 / width**2 for _, width in priors])
    covariance = np.linalg.inv(design.T @ design / NOISE**2 + before)
    mean = covariance @ (
        design.T @ np.array([row.rate for row in rows]) / NOISE**2 + before @ np.array([m for m, _ in priors])
    )
    size = len(terms)
    return Fit(terms, mean[:size], covariance[:size, :size])


def left_out(rows: list[Row]) -> list[tuple[Row, float, bool]]:
    """(row, error of its predicted seconds, within the 80 % interval?), each foretold without its source."""
    out = []
    for source in sorted({row.source for row in rows}):
        known = fit([row for row in rows if row.source != source])
        for row in (row for row in rows if row.source == source):
            mean, width = known.predict(row.gpu, row.video, row.execution, row.size, row.conv)
            peak = named(row.gpu).bf16_tflops
            assert peak is not None

            def seconds(rate: float, row: Row = row, peak: float = peak) -> float:
                return row.others_s + row.flops / (peak * 1e12 * math.exp(rate))

            inside = seconds(mean + EIGHTY * width) <= row.seconds <= seconds(mean - EIGHTY * width)
            out.append((row, seconds(mean) / row.seconds - 1, inside))
    return out


def load() -> list[Row]:
    """All usable rows."""
    return [read(row) for row in json.loads(ROWS.read_text())["rows"] if usable(row)]


def table(rows: list[Row]) -> dict[str, Any]:
    """What rates.json holds."""
    from diffaccel.ledger.hardware import HARDWARE

    found = fit(rows)
    cells: dict[str, Any] = {}
    for name, machine in HARDWARE.items():
        for video in (False, True):
            for execution in PRIOR:
                if machine.bf16_tflops is None:
                    continue
                mean, width = found.predict(name, video, execution)
                same = [row for row in rows if (row.gpu, row.video, row.execution) == (name, video, execution)]
                rate = math.exp(mean) if same else min(MOST, math.exp(mean))
                cells[f"{name} {'video' if video else 'image'} {execution}"] = {
                    "rate": round(rate, 4),
                    "width": round(width, 4),
                    "sources": sorted({row.source for row in same}),
                }
    general = {
        f"{kind} {execution}": round(
            math.exp(float(found.mean[found.terms.index(execution)] + (kind == "video") * found.mean[3])), 4
        )
        for kind in ("image", "video")
        for execution in PRIOR
    }
    return {
        "about": "Written by benchmarks/ledger_rates.py: parts of the bf16 peak, and widths of their logarithms",
        "slope": round(float(found.mean[FIXED.index("slope")]), 4),
        "size": round(float(found.mean[FIXED.index("size")]), 4),
        "conv": round(float(found.mean[FIXED.index("conv")]), 4),
        "conv_slope": round(float(found.mean[FIXED.index("conv slope")]), 4),
        "general": general,
        "cells": cells,
    }


def main() -> None:
    """Print the sources, write the table if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write diffaccel/ledger/rates.json")
    parser.add_argument("--rows", action="store_true", help="print every row")
    args = parser.parse_args()
    rows = load()
    results = left_out(rows)
    for source in sorted({row.source for row in rows}):
        own = [(row, error, inside) for row, error, inside in results if row.source == source]
        errors = np.abs([error for _, error, _ in own])
        covered = np.mean([inside for _, _, inside in own])
        print(f"{len(own):3} rows  median error {np.median(errors):5.1%}  covered {covered:4.0%}  {source}")
        for row, error, inside in own if args.rows else ():
            print(f"     {row.gpu:6} {row.execution:8} {math.exp(row.rate):.3f} {error:+6.1%} {inside!s:5} {row.what}")
    errors, covered = np.abs([error for _, error, _ in results]), np.mean([inside for _, _, inside in results])
    print(f"{len(rows):3} rows  median error {np.median(errors):5.1%}  covered {covered:4.0%}  all")
    cells = {(row.gpu, row.video, row.execution): set[str]() for row in rows}
    for row in rows:
        cells[row.gpu, row.video, row.execution].add(row.source)
    several = [r for r in results if len(cells[r[0].gpu, r[0].video, r[0].execution]) > 1]
    errors, covered = np.abs([error for _, error, _ in several]), np.mean([inside for _, _, inside in several])
    print(
        f"{len(several):3} rows  median error {np.median(errors):5.1%}  covered {covered:4.0%}  cells of two sources"
    )
    if args.write:
        RATES.write_text(json.dumps(table(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
