"""The book of exchanges: formulas against closed forms and published pairs, items against the book they change."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from diffaccel import InvalidOptionError
from diffaccel.ledger import estimate
from diffaccel.ledger.exchange import parallel
from diffaccel.ledger.exchange.account import one_branch, opened, with_steps
from diffaccel.ledger.exchange.formulas import (
    amdahl,
    attention_8bit,
    cache_gain,
    interval_steps,
    kept_pairs,
    overlapped,
    quantized_gib,
    strips,
)
from diffaccel.ledger.exchange.stack import Stack
from diffaccel.ledger.exchange.stack_text import WIDTH, waterfall

ROOT = Path(__file__).parents[2]
PUBLISHED = json.loads((ROOT / "benchmarks" / "data" / "published_times.json").read_text())["rows"]


def published(model: str, gpu: str, config: str) -> float:
    """Seconds of the first such row."""
    rows = [r for r in PUBLISHED if r["model"] == model and r["gpu"].startswith(gpu) and config in r["config"]]
    return float(rows[0]["seconds"])


@dataclass
class Row:
    name: str
    params: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    status: str = "enabled"
    fidelity: str = "lossy"


@dataclass
class Rows:
    items: list[Row]


def apply(model: str, hardware: str | None, *rows: Row | str, **asked: Any) -> Stack:
    made = [row if isinstance(row, Row) else Row(row) for row in rows]
    return estimate(model, hardware=hardware, **asked).apply(Rows(made))


# ---- formulas -------------------------------------------------------------------------------------------------------


def test_caches() -> None:
    assert cache_gain(28, 14) == 2 and cache_gain(28, 28, 0.3) == 1
    assert cache_gain(28, 14, 0.1) == pytest.approx(28 / (14 + 14 * 0.1))
    assert cache_gain(28, 28 - 12.44) == pytest.approx(18 / 10, rel=1e-3)  # TeaCache on an A800, as published


@pytest.mark.parametrize("steps", [1, 2, 9, 28, 50])
@pytest.mark.parametrize("interval", [1, 2, 3, 5])
def test_interval_steps_are_those_of_the_schedule(steps: int, interval: int) -> None:
    from diffaccel.extrapolation.schedule import fora, taylorseer

    assert interval_steps(steps, interval) == sum(fora(steps, interval))
    for first in (1, 3, 4):
        assert interval_steps(steps, interval, first, last=0) == sum(taylorseer(steps, interval, first))


def test_sparsity_is_amdahls() -> None:
    wan = estimate("wan2.1-t2v-14b", hardware=None)
    assert amdahl(wan.attention_share, 0.8) == pytest.approx(2.37, rel=2e-3)
    found = apply("wan2.1-t2v-14b", None, Row("attention.radial", {"density": 0.2, "dense_steps": 0.0}))
    denoise = found.first.denoise / found.last.denoise
    assert denoise == pytest.approx(amdahl(wan.attention_share, 0.8), rel=1e-9)
    assert kept_pairs(0.2, 0.25) == pytest.approx(0.4) and kept_pairs(1.0, 0.0) == 1
    some = apply("wan2.1-t2v-14b", None, Row("attention.radial", {"density": 0.2, "dense_steps": 10.0}))
    assert some.last.attention / some.first.attention == pytest.approx(kept_pairs(0.2, 10 / 50))


def test_8_bit_attention_is_what_its_authors_report() -> None:
    assert attention_8bit(1, None) == 1
    assert 1 / attention_8bit(838 / 209.5, 419 / 209.5) == pytest.approx(2.7, rel=0.05)  # a 5090, thu-ml/SageAttention


def test_layers_overlap_one_by_one() -> None:
    assert overlapped([1, 1, 1], [0.5, 0.5, 0.5]) == 3
    assert overlapped([1, 1, 1], [2, 0, 1]) == 4  # not max(3, 3)


def test_strips_are_counted_line_by_line() -> None:
    assert strips(160, 1, 13) == (1.0, 1.0)
    part, work = strips(160, 4, 13)
    seen = [set(range(max(0, start - 13), min(160, start + 40 + 13))) for start in range(0, 160, 40)]
    assert (part * 160, work * 160) == (max(map(len, seen)), sum(map(len, seen)))
    assert work == pytest.approx(1.49, abs=0.01)  # the 1.5 of the preset 4090-wan


@pytest.mark.parametrize(("bits", "rank", "gb"), [(8.02, 0.0, 15.2), (4.25, 0.02, 11.4)])
def test_quantized_weights_are_those_of_the_layers(bits: float, rank: float, gb: float) -> None:
    """benchmarks/quantized_sizes.py: FLUX.1 takes 15.2 GB in FP8 and 11.4 GB in INT4 with rank 32."""
    flux = estimate("flux.1-dev", hardware=None)
    found = quantized_gib(flux.params["transformer"], flux.per_token["condition"], bits, rank)
    assert found * 1024**3 / 1e9 == pytest.approx(gb, rel=0.02)


def test_several_gpus_send_what_the_claims_say() -> None:
    asked = (4608, 3072, 57)
    found = [
        parallel.ulysses_bytes(*asked, 4),
        parallel.ulysses_bytes(*asked, 8),
        parallel.ring_bytes(*asked, 8),
        parallel.tensor_bytes(*asked, 8),
    ]
    assert [round(value / 1e9, 3) for value in found] == [1.210, 0.706, 2.824, 5.648]
    assert 28 * parallel.step_seconds(0, 8, found[1], 450) == pytest.approx(0.044, rel=0.02)
    assert 28 * parallel.step_seconds(0, 8, found[3], 25) == pytest.approx(6.33, rel=0.01)
    assert parallel.ulysses_bytes(*asked, 1) == parallel.pipefusion_bytes(4608, 3072, 1) == 0
    assert parallel.pipefusion_bytes(4608, 3072, 4) < parallel.ulysses_bytes(*asked, 4)
    assert parallel.guidance_bytes(16 * 128 * 128) == 2 * 16 * 128 * 128


def test_several_gpus_are_no_faster_in_truth_than_the_bound() -> None:
    one = published("flux.1-dev", "H100", "single GPU, bf16 torch.compile")
    for degree, row in ((2, "ulysses2, bf16 torch.compile"), (4, "ulysses4, bf16 torch.compile")):
        sent = parallel.ulysses_bytes(4608, 3072, 57, degree)
        bound = 28 * parallel.step_seconds(one / 28, degree, sent, 450)
        assert bound < published("flux.1-dev", "H100", row) < one


# ---- items ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "hardware", "before", "after", "items", "tolerance"),
    [
        ("H100", "h100", "single GPU, bf16 eager", "single GPU, bf16 torch.compile", ("compile",), 0.17),
        ("A100", "a100", "bf16 eager", "bf16 torch.compile", ("compile",), 0.15),
        ("L20", "l20", "bf16 eager", "float8", ("quantization.fp8", "compile"), 0.15),
    ],
)
def test_gains_are_near_published_pairs(
    gpu: str, hardware: str, before: str, after: str, items: tuple[str, ...], tolerance: float
) -> None:
    """The pair on the L20 is no part of what the constant of quantization was fitted to."""
    truth = published("flux.1-dev", gpu, before) / published("flux.1-dev", gpu, after)
    assert apply("flux.1-dev", hardware, *items).gain == pytest.approx(truth, rel=tolerance)


def test_order_does_not_change_where_a_stack_ends() -> None:
    rows = ("quantization.fp8", "compile", "attention.sage", "cache.adaptive")
    ends = {round(apply("flux.1-dev", "4090", *order).last.total, 9) for order in (rows, rows[::-1])}
    assert len(ends) == 1
    stack = apply("flux.1-dev", "4090", *rows)
    assert math.prod(row.gain or 1 for row in stack.rows) == pytest.approx(stack.gain)


def test_offload_waits_only_for_what_it_cannot_hide() -> None:
    wan = apply("wan2.1-t2v-14b", "4090", "offload.layerwise")
    assert wan.gain == 1 and wan.last.transfer < wan.last.compute
    flux = apply("flux.1-schnell", "h100", "offload.layerwise", height=256, width=256)
    assert flux.last.denoise == pytest.approx(4 * flux.last.transfer) and flux.gain < 0.5
    stage = apply("flux.1-dev", "4090", "offload.stage")
    assert stage.last.moved == pytest.approx(31.4 * 1024**3 / 25e9, rel=0.01)
    assert stage.last.need_gib < stage.first.need_gib - 8
    both = ("offload.layerwise", "quantization.fp8")
    transfers = [apply("flux.1-dev", "4090", *order).last.transfer for order in (both, both[::-1])]
    assert transfers[0] == pytest.approx(transfers[1])


@pytest.mark.parametrize(
    ("hardware", "name", "gains"),
    [
        ("3060", "quantization.fp8", False),  # no FP8 units below 8.9: fewer bytes alone
        ("4090", "quantization.fp8", True),
        ("h100", "quantization.svdquant", False),  # no INT4 units
        ("4090", "quantization.svdquant", True),
        ("mi300x", "quantization.fp8", False),
        ("a100", "quantization.int8", False),  # run eagerly
    ],
)
def test_products_in_few_bits_want_units_for_them(hardware: str, name: str, gains: bool) -> None:
    stack = apply("flux.1-dev", hardware, name)
    assert (stack.gain > 1.1) == gains and stack.last.denoiser_gib < 0.7 * stack.first.denoiser_gib
    assert apply("flux.1-dev", "a100", "quantization.int8", "compile").rows[0].gain > 1.3
    weight_only = apply("flux.1-dev", hardware, Row("quantization.int8", {"scheme": "weight_only"}))
    assert weight_only.gain == 1


def test_what_is_not_known_has_no_gain() -> None:
    named, off = Row("cache.schedule", {"steps": "fast"}), Row("compile", status="skipped")
    stack = apply("flux.1-dev", "h100", "attention.auto", named, "lora", off)
    assert [row.gain for row in stack.rows] == [None, None, None] and stack.gain == 1
    assert apply("flux.1-dev", "cpu", "compile").rows[0].gain is None
    assert apply("flux.1-schnell", "h100", "cache.adaptive").rows[0].how == "stands down below 9 steps"


def test_without_a_peak_the_book_is_in_flops() -> None:
    stack = apply("flux.1-dev", "cpu", "cache.adaptive")
    assert stack.unit == "FLOP" and stack.first.total == estimate("flux.1-dev", hardware=None).flops.total
    assert stack.gain > 1.3


@pytest.mark.parametrize(
    ("row", "computed"),
    [
        (Row("cache.schedule", {"steps": "10" * 14}), 14),
        (Row("cache.schedule", {"steps": (0, 5, 9, 27)}), 4),
        (Row("cache.interval", {"interval": 4}), 8),
        (Row("cache.schedule", {"steps": (1, 0, 1, 0)}), 2),
        (Row("cache.taylorseer", {"interval": 5, "first_enhance": 3}), 8),
        (Row("cache.adaptive", {"max_steps": 7}), 7),
    ],
)
def test_caches_known_beforehand(row: Row, computed: float) -> None:
    stack = apply("flux.1-dev", None, row)
    assert stack.last.computed == computed
    assert stack.first.denoise / stack.last.denoise == pytest.approx(cache_gain(28, computed))
    probe = apply("flux.1-dev", None, Row(row.name, row.params, {"parameters_skipped": 0.9}))
    if row.name != "cache.adaptive":
        assert probe.last.reused == pytest.approx(0.1)


def test_guidance_steps_and_branches() -> None:
    wan = apply("wan2.1-t2v-14b", None, Row("guidance.reuse", {"interval": 2}))
    assert wan.first.denoise / wan.last.denoise == pytest.approx(2 / 1.5)
    assert apply("flux.1-dev", None, "guidance.reuse").rows[0].how == "there is one branch"
    book = opened(estimate("wan2.1-t2v-14b", hardware=None))
    assert book.denoise / one_branch(book).denoise == 2
    assert book.denoise / with_steps(book, 4).denoise == 12.5


def test_the_whole_book_is_that_of_the_ledger() -> None:
    for model in ("flux.1-dev", "wan2.2-t2v-a14b", "sdxl"):
        ledger = estimate(model, hardware="h100")
        book = opened(ledger)
        assert ledger.seconds is not None and book.total == pytest.approx(ledger.seconds.total)
        stack = ledger.apply([])
        assert stack.rows == () and stack.gain == 1 and stack.first == stack.last


# ---- text -----------------------------------------------------------------------------------------------------------


def test_the_waterfall_is_narrow_and_says_all() -> None:
    rows = ("quantization.fp8", "compile", "offload.stage", "vae.tiling", "attention.sage", "cache.adaptive")
    text = waterfall(apply("wan2.1-t2v-14b", "4090", *rows))
    assert all(len(line) <= WIDTH for line in text.splitlines()) and all(row in text for row in rows)
    data = json.loads(json.dumps(apply("flux.1-dev", "h100", *rows).to_dict()))
    assert [row["name"] for row in data["rows"]] == list(rows) and data["gain"] > 1


def test_no_torch_is_imported() -> None:
    script = "import sys; from diffaccel import ledger; ledger.estimate('flux.1-dev').apply(['compile'])"
    subprocess.run([sys.executable, "-c", f"{script}; assert 'torch' not in sys.modules"], cwd=ROOT, check=True)


def test_bad_plans_are_named() -> None:
    with pytest.raises(InvalidOptionError, match="plan must be a Plan or names of items, got int"):
        estimate("flux.1-dev").apply(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="plan must be"):
        estimate("flux.1-dev").apply("compile")
