"""What an introduction to the field says about costs, number by number, beside what the ledger computes.

The numbers of the claims are those of the table in docs/ledger.md, which this test reads. QUOTED are claims about
measurements of others: nothing to compute.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diffaccel.ledger import Ledger, estimate
from diffaccel.ledger.book import GIB
from diffaccel.ledger.comparison import LLM_FLOPS, LLM_INTENSITY, llm_seconds
from diffaccel.ledger.hardware import HARDWARE
from diffaccel.ledger.memory import kv_bytes, kv_bytes_per_token, need

ROOT = Path(__file__).parents[2]
PUBLISHED = json.loads((ROOT / "benchmarks" / "data" / "published_times.json").read_text())["rows"]
H100 = HARDWARE["h100"]


@cache
def book(model: str, *size: int, **more: Any) -> Ledger:
    height, width, frames = (*size, None, None, None)[:3]
    return estimate(model, height, width, frames, **more)


FLUX, WAN, HUNYUAN = "flux.1-dev", "wan2.1-t2v-14b", "hunyuanvideo"


def published(model: str, gpu: str, config: str, width: int | None = None) -> float:
    """Seconds of the first such row."""
    found = [r for r in PUBLISHED if r["model"] == model and r["gpu"].startswith(gpu) and config in r["config"]]
    return float(next(r["seconds"] for r in found if width is None or r["shape"].startswith(str(width))))


def served(model: str) -> float:
    """Part of an H100's peak that a serving engine reaches, end to end, in the first such row."""
    row = next(r for r in PUBLISHED if r["model"] == model and r["gpu"] == "H100" and "tuned" in r["config"])
    forward = book(model, 1024, 1024, text_tokens=row.get("text_tokens")).flops.forward.total
    return float(forward * row["cfg_branches"] * row["steps"] / row["seconds"] / 989e12)


def wan_attention(keys: int) -> float:
    """FLOPs of attention from all tokens of the usual clip to so many keys: 40 layers, 5120 wide."""
    return 4.0 * 40 * book(WAN).tokens * keys * 5120


def reached(model: str, seconds: float, *size: int, machine: str = "h100") -> float:
    """Part of the peak, all seconds taken for denoising."""
    return book(model, *size).flops.denoise / seconds / (HARDWARE[machine].bf16_tflops or 0) / 1e12


def pixel_mflop(model: str, *size: int) -> float:
    """Decoding: MFLOP per pixel, of every frame."""
    request = book(model, *size).request
    return (book(model, *size).flops.decode or 0) / (request.height * request.width * (request.frames or 1)) / 1e6


def vae_gib(model: str, *size: int) -> float:
    return (book(model, *size).vae_peak_bytes or 0) / GIB


def act_gib(model: str, *size: int) -> float:
    return (book(model, *size).activation_bytes or 0) / GIB


def sent_gb(per_layer: float) -> float:
    """GB sent per GPU and step for FLUX.1: `per_layer` tensors [tokens, width] in bf16, times 57 layers."""
    return per_layer * 57 * 2 * 4608 * 3072 / 1e9


def minutes(share: float, model: str) -> float:
    return estimate(model, mfu=share).seconds.denoise / 60  # type: ignore[union-attr]


P, T, B = 1e15, 1e12, 1e9
CLAIMS: dict[int, list[tuple[Callable[[], float], float, float]]] = {  # what we compute, what it is, tolerance
    1: [
        (lambda: book(FLUX).flops.total / P, 2.098, 1e-3),
        (lambda: book(FLUX).flops.denoise / P, 2.0828, 1e-3),
        (lambda: book(FLUX).flops.forward.total / T, 74.385, 1e-4),
        (lambda: book(FLUX).flops.encode / T, 4.86, 1e-3),
        (lambda: (book(FLUX).flops.decode or 0) / T, 10.47, 1e-3),
    ],
    2: [(lambda: book(FLUX).flops.total / LLM_FLOPS, 149.9, 1e-3)],
    3: [
        (lambda: estimate(FLUX, mfu=0.45).seconds.denoise, 4.68, 5e-3),  # type: ignore[union-attr]
        (lambda: llm_seconds(H100) or 0, 5.97, 1e-3),
    ],
    4: [
        (lambda: book(FLUX).per_token["image"] / B, 6.4553, 1e-4),
        (lambda: book(FLUX).per_token["text"] / B, 6.4677, 1e-4),
        (lambda: book(FLUX).per_token["condition"] / B, 3.279, 1e-3),
        (lambda: book(FLUX).params["transformer"], 11901408320, 0),
    ],
    5: [(lambda: book(FLUX).tokens, 4608, 0), (lambda: book(FLUX).image_tokens, 4096, 0)],
    6: [(lambda: book(FLUX).attention_share, 0.1999, 1e-3)],
    7: [(lambda: book(WAN, 720, 1280, 81).tokens, 75600, 0)],
    8: [
        (lambda: book(WAN).attention_share, 0.7226, 1e-3),
        (lambda: wan_attention(book(WAN).tokens) / book(WAN).flops.forward.total, 0.718, 1e-3),  # to itself
        (lambda: wan_attention(512) / book(WAN).flops.forward.total, 0.005, 0.03),  # across to the text
    ],
    9: [
        (lambda: book(WAN).flops.forward.total / T, 6523.4, 1e-4),
        (lambda: book(WAN).flops.denoise / P, 652.3, 1e-3),
        (lambda: (book(WAN).flops.decode or 0) / P, 0.639, 2e-3),
    ],
    10: [
        (lambda: book(WAN).flops.forward.attention / P, 4.714, 1e-3),
        (lambda: 2 * book(WAN).flops.forward.attention / P, 9.43, 1e-3),  # both branches of a step
    ],
    11: [
        (lambda frames=frames: book(WAN, 720, 1280, frames).attention_share, share, 2e-3)
        for frames, share in ((17, 0.387), (81, 0.723), (129, 0.803))
    ]
    + [
        (lambda frames=frames: book(WAN, 720, 1280, frames).tokens, tokens, 0)
        for frames, tokens in ((17, 18000), (129, 118800))
    ],
    12: [
        (lambda: book(HUNYUAN).tokens, 119056, 0),
        (lambda: book(HUNYUAN).attention_share, 0.866, 1e-3),
        (lambda: book(HUNYUAN).flops.forward.total / P, 12.07, 1e-3),
        (lambda: book(HUNYUAN).flops.denoise / P, 603.4, 1e-3),
        (lambda: book(HUNYUAN, 720, 1280, 81).attention_share, 0.804, 1e-3),
    ],
    13: [
        (lambda: book(WAN, 720, 1280, 321).tokens / book(WAN).tokens, 3.857, 1e-3),
        (
            lambda: book(WAN, 720, 1280, 321).flops.forward.attention / book(WAN).flops.forward.attention,
            14.9,
            0.01,  # 14.88 of self-attention alone
        ),
        (lambda: (book(WAN, 720, 1280, 4 * 84 - 3).tokens / book(WAN).tokens) ** 2, 16, 0),  # 84 latent frames for 21
    ],
    14: [
        (lambda: book(FLUX).weights_gib["transformer"], 22.17, 1e-3),
        (lambda: book(FLUX).weights_gib["text_encoders"], 8.87 + 0.23, 1e-3),
        (lambda: need(book(FLUX)).weights, 31.4, 2e-3),
    ],
    15: [
        (lambda: act_gib(FLUX), 0.46, 0.05),
        (lambda: act_gib("flux.2-dev"), 1.14, 0.05),
        (lambda: act_gib("qwen-image"), 0.37, 0.1),
        (lambda: act_gib(WAN), 7.99, 0.05),
        (lambda: act_gib("cogvideox-5b"), 1.33, 0.05),
        (lambda: act_gib("hunyuanvideo-1.5"), 27.2, 0.05),
    ],
    16: [
        (lambda: vae_gib(WAN, 720, 1280, 81), 17.6, 0.02),
        (lambda: 4 * 4 * 96 * 81 * 720 * 1280 / GIB, 106.8, 1e-3),  # a whole clip at once, which nobody decodes
        (lambda: vae_gib("mochi-1"), 228.9, 0.03),
        (lambda: vae_gib("hunyuanvideo-1.5"), 319, 0.02),
        (lambda: (book("hunyuanvideo-1.5").flops.decode or 0) / P, 2.84, 2e-3),
        (lambda: vae_gib(HUNYUAN), 69, 0.03),
    ],
    17: [
        (lambda: pixel_mflop(FLUX), 9.99, 2e-3),
        (lambda: pixel_mflop(WAN), 8.56, 2e-3),
        (lambda: pixel_mflop(HUNYUAN), 25, 0.02),
        (lambda: pixel_mflop("cogvideox-5b"), 18.6, 2e-3),
        (lambda: pixel_mflop("wan2.2-ti2v-5b"), 18.4, 5e-3),
        (lambda: pixel_mflop("mochi-1"), 16.3, 2e-3),
        (lambda: pixel_mflop("ltx-video-2b"), 0.87, 5e-3),
        (lambda: pixel_mflop("ltx-2-19b"), 1.27, 5e-3),
        (lambda: pixel_mflop("qwen-image"), 11.1, 5e-3),
    ],
    18: [
        (lambda: book(FLUX).intensity, 3125, 1e-3),
        (lambda: book(WAN).intensity, 228276, 1e-5),
        (lambda: book(HUNYUAN).intensity, 470648, 1e-4),
        (lambda: H100.ridge or 0, 295.2, 1e-3),
    ],
    19: [(lambda: LLM_INTENSITY, 1.0, 0)],
    20: [
        (lambda: reached(FLUX, published(FLUX, "H100", "eager")), 0.314, 2e-3),
        (lambda: reached(FLUX, published(FLUX, "H100", "compile")), 0.490, 2e-3),
    ],
    21: [
        (lambda: 50 * book(FLUX).flops.forward.total / 6.447 / 989e12, 0.584, 2e-3),
        (lambda: reached(FLUX, published(FLUX, "A100", "compile"), machine="a100"), 0.668, 2e-3),
        (lambda: book(FLUX).flops.forward.total / published(FLUX, "L40S", "compile") / 362e12, 0.549, 2e-3),
        # the same engine, end to end instead of its denoising alone
        (lambda: served(FLUX), 0.562, 2e-3),
        (lambda: served("qwen-image"), 0.549, 2e-3),
        (lambda: served("flux.2-dev"), 0.617, 2e-3),
        (lambda: served("z-image-turbo"), 0.568, 2e-3),
    ],
    22: [(lambda: reached(FLUX, 4.30) / reached(FLUX, 6.71), 0.49 / 0.314, 2e-3)],
    23: [(lambda: book(FLUX).weights_gib["transformer"] / 3.6, 6.2, 0.01)],
    24: [
        (lambda: minutes(0.45, WAN), 24.4, 2e-3),
        (lambda: reached(WAN, published(WAN, "H100", "dense")), 0.348, 2e-3),
        (lambda: published(WAN, "H100", "dense") / 60, 31.6, 1e-3),
        (lambda: published(WAN, "unstated", "baseline") / 60, 30.5, 1e-3),
    ],
    25: [
        (lambda: math.log10(book(FLUX).flops.total / LLM_FLOPS), 2.18, 3e-3),
        (lambda: math.log10(book(WAN).flops.total / LLM_FLOPS), 4.67, 2e-3),
    ],
    26: [
        (
            lambda: (
                book(FLUX).flops.denoise / book("flux.1-schnell", 1024, 1024, text_tokens=256, steps=4).flops.denoise
            ),
            7.50,
            1e-3,
        ),
        (
            lambda: (
                book(FLUX).flops.denoise / book("flux.1-schnell", 1024, 1024, text_tokens=512, steps=4).flops.denoise
            ),
            7,  # with as much text
            1e-6,
        ),
    ],
    27: [
        (lambda: book("flux.1-schnell", 1024, 1024, text_tokens=256).flops.denoise / 0.45 / 989e12, 0.62, 0.01),
        (lambda: book("flux.1-schnell", 1024, 1024, text_tokens=256).flops.denoise / 0.31 / 989e12, 0.90, 0.01),
    ],
    28: [  # hits of 28 that cost nothing, and that cost 0.03 of a step
        (lambda: 28 - 28 / (published(FLUX, "A800", "baseline") / 10), 12.4, 0.01),
        (lambda: (28 - 28 / (published(FLUX, "A800", "baseline") / 10)) / (1 - 0.03), 12.8, 0.01),
    ],
    29: [  # by the rows of the method's own tables
        (lambda: published(WAN, "A800", "baseline") / published(WAN, "A800", "TeaCache 0.2"), 2.04, 2e-3),
        (lambda: published(HUNYUAN, "A800", "baseline", 1280) / published(HUNYUAN, "A800", "0.15", 1280), 2.17, 2e-3),
    ],
    31: [(lambda: 1 / (1 - 0.8 * book(WAN).attention_share), 2.37, 2e-3)],
    32: [(lambda: published(FLUX, "H100", "single GPU, bf16 torch.compile") / 1.63, 2.64, 2e-3)],
    34: [
        (lambda: sent_gb(4 * 3 / 4 / 4), 1.210, 1e-3),  # Ulysses over 4: queries, keys, values, output
        (lambda: sent_gb(4 * 7 / 8 / 8), 0.706, 1e-3),
        (lambda: sent_gb(2 * 7 / 8), 2.824, 1e-3),  # ring over 8: keys and values go round
        (lambda: sent_gb(2 * 2 * 7 / 8), 5.648, 1e-3),  # tensor parallel over 8: two sums a layer
        (lambda: sent_gb(2 * 7 / 8 * (19 * 2 + 38) / 57), 3.765, 1e-3),  # one sum in the 38 single blocks
        (lambda: 28 * sent_gb(4 * 7 / 8 / 8) / 450, 0.044, 5e-3),  # seconds of 28 steps at 450 GB/s, and at 25
        (lambda: 28 * sent_gb(2 * 2 * 7 / 8) / 450, 0.351, 2e-3),
        (lambda: 28 * sent_gb(4 * 7 / 8 / 8) / 25, 0.79, 2e-3),
        (lambda: 28 * sent_gb(2 * 2 * 7 / 8) / 25, 6.33, 1e-3),
    ],
    35: [(lambda: published(FLUX, "L20", "bf16 eager") / published(FLUX, "L20", "float8"), 1.9, 0.06)],
    37: [(lambda: 2 * book(FLUX).flops.denoise / book(FLUX).flops.denoise, 2, 0)],
    38: [
        (lambda: published(FLUX, "H100", "compile") * 2 / 3600, 0.0024, 0.02),
        (lambda: published(FLUX, "H100", "eager") * 4 / 3600, 0.0074, 0.02),
    ],
    39: [
        (lambda: 100 * published(FLUX, "H100", "compile"), 430, 0),
        (lambda: 100 * published(FLUX, "H100", "eager"), 671, 1e-9),
        (lambda: 100 * 28 / 11.5, 243, 3e-3),
    ],
    40: [
        (lambda: kv_bytes_per_token("wan2.1-t2v-1.3b"), 184320, 0),
        (lambda: kv_bytes_per_token(WAN), 819200, 0),
        (lambda: kv_bytes("wan2.1-t2v-1.3b", 480, 832, 1) / 2**20, 274, 2e-3),
        (lambda: kv_bytes("wan2.1-t2v-1.3b", 480, 832, 3) / GIB, 0.803, 2e-3),
        (lambda: kv_bytes("wan2.1-t2v-1.3b", 480, 832, 21) / GIB, 5.62, 2e-3),
        (lambda: kv_bytes(WAN, 480, 832, 21) / GIB, 25.0, 2e-3),
    ],
    41: [
        (lambda name=name: book(name).params["transformer"] / B, size, 1e-3)
        for name, size in ((FLUX, 11.90), ("sd3-medium", 2.03), ("qwen-image", 20.43), (HUNYUAN, 12.82), (WAN, 14.29))
    ],
    42: [(lambda: book(FLUX).flops.encode / (0.225 * 989e12), 0.022, 0.02)],
    43: [
        (lambda: H100.bf16_tflops or 0, 989, 0),
        (lambda: H100.bandwidth_gb_s or 0, 3350, 0),
        (lambda: H100.memory_gib or 0, 80, 0),
        (lambda: HARDWARE["4090"].bf16_tflops or 0, 165, 2e-3),
    ],
    45: [(lambda: book(WAN).flops.total / book(FLUX).flops.total, 311, 2e-3)],
}
QUOTED = {30, 33, 36, 44}


@pytest.mark.parametrize("number", sorted(CLAIMS))
def test_a_claim_and_our_number(number: int) -> None:
    for computed, expected, tolerance in CLAIMS[number]:
        assert computed() == pytest.approx(expected, rel=tolerance or 1e-12)


def test_the_page_lists_every_claim() -> None:
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "ledger.md").read_text(), re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 46)) == sorted({*CLAIMS, *QUOTED})
