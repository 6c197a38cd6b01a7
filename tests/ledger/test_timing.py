"""Seconds: the table is what its script writes, whole sources are foretold, and a prediction says what it rests on."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffaccel import InvalidOptionError
from diffaccel.ledger import estimate
from diffaccel.ledger.hardware import HARDWARE, Hardware, named, with_prices
from diffaccel.ledger.memory import kept_bytes, load_s, need, tiled_peak_bytes
from diffaccel.ledger.timing import rates

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("ledger_rates", ROOT / "benchmarks" / "ledger_rates.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["ledger_rates"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_table_is_what_the_script_writes(script: Any) -> None:
    ours, written = rates(), json.loads(json.dumps(script.table(script.load())))
    assert set(ours["cells"]) == set(written["cells"])
    for cell, row in written["cells"].items():
        assert ours["cells"][cell]["sources"] == row["sources"]
        assert ours["cells"][cell]["rate"] == pytest.approx(row["rate"], rel=1e-3)


def test_whole_sources_are_foretold(script: Any) -> None:
    """Left out one by one: median error at most 30 %, and the 80 % interval holds 70 to 95 % of the rows."""
    results = script.left_out(script.load())
    assert len(results) == 61 and len({row.source for row, _, _ in results}) == 23
    assert np.median([abs(error) for _, error, _ in results]) < 0.30
    assert 0.70 <= np.mean([inside for _, _, inside in results]) <= 0.95


def test_convolutions_slow_large_machines_down() -> None:
    """An SDXL reaches a smaller part of the peak than a transformer does, and the more so the larger the GPU."""
    parts = {}
    for machine in ("4090", "a100", "h100"):
        unet, dit = (estimate(model, hardware=machine).seconds for model in ("sdxl", "flux.1-dev"))
        assert unet is not None and dit is not None
        parts[machine] = unet.mfu / dit.mfu
    assert 1 > parts["4090"] > parts["a100"] > parts["h100"] > 0.3


def test_another_rate_would_be_seen(script: Any) -> None:
    """Negative control: rows that took twice as long are not foretold."""
    from dataclasses import replace

    rows = [replace(r, seconds=2 * r.seconds) if "xDiT" in r.source else r for r in script.load()]
    errors = [error for row, error, _ in script.left_out(rows) if "xDiT" in row.source]
    assert np.median(np.abs(errors)) > 0.30


def test_rows_that_say_nothing_about_a_rate_are_left_out(script: Any) -> None:
    row = {"n_gpus": 1, "model": "flux.1-dev", "config": "bf16 eager"}
    assert script.usable(row)
    for change in (
        {"n_gpus": 2},
        {"config": "TeaCache 0.25"},
        {"config": "bf16, group offload leaf"},
        {"confidence": "low: GPU not stated"},
        {"model": "flux.1 (unstated)"},
    ):
        assert not script.usable(row | change)


@pytest.mark.parametrize(
    ("model", "machine", "execution", "basis"),
    [
        ("flux.1-dev", "h100", "eager", "3 sources"),
        ("flux.1-dev", "5090", "tuned", "one source"),
        ("flux.1-dev", "mi300x", "eager", "no source: scaled by the peak"),
    ],
)
def test_a_prediction_says_what_it_rests_on(model: str, machine: str, execution: str, basis: str) -> None:
    seconds = estimate(model, hardware=machine, execution=execution).seconds
    assert seconds is not None and seconds.basis == basis
    assert seconds.low < seconds.total < seconds.high
    assert seconds.total == pytest.approx(seconds.encode + seconds.denoise + seconds.decode)


def test_a_rate_of_your_own() -> None:
    seconds = estimate("flux.1-dev", hardware="h100", mfu=0.45).seconds
    assert seconds is not None and seconds.denoise == pytest.approx(4.68, rel=5e-3)
    assert seconds.low == seconds.high == seconds.total and seconds.basis == "given"
    own = estimate("flux.1-dev", hardware=Hardware("mine", "cuda", 24, bf16_tflops=100)).seconds
    assert own is not None and own.basis.startswith("no source") and own.low < own.total
    assert estimate("flux.1-dev", hardware="cpu").seconds is None is estimate("flux.1-dev", hardware=None).seconds
    for wrong in ({"mfu": 0}, {"mfu": 3}, {"execution": "fast"}, {"hardware": "h101"}):
        with pytest.raises(InvalidOptionError):
            estimate("flux.1-dev", **wrong)  # type: ignore[arg-type]


def test_machines_have_what_a_prediction_needs() -> None:
    assert {"h100", "h200", "a100", "l40s", "l20", "h20", "4090", "5090", "3060", "3090", "b200", "mi300x"} <= set(
        HARDWARE
    )
    for machine in HARDWARE.values():
        if machine.kind != "cpu":
            assert machine.bf16_tflops and machine.bandwidth_gb_s and machine.memory_gib and machine.ridge
    assert named("A800").name == "a100" and named("NVIDIA H100 SXM 80GB").name == "h100"


def test_prices_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('h100 = 1.25\n"rtx 4090" = 0.2\n')
    table = with_prices(str(path))
    assert table["h100"].usd_per_hour == 1.25 and table["4090"].usd_per_hour == 0.2
    assert HARDWARE["h100"].usd_per_hour != 1.25
    for wrong in ("h100 = 'much'", "h101 = 1", "h100 ="):
        path.write_text(wrong)
        with pytest.raises(InvalidOptionError):
            with_prices(str(path))


def test_memory_beside_the_weights() -> None:
    flux = estimate("flux.1-dev")
    assert need(flux).by_stage == pytest.approx(22.17 + 0.46 + 0.6, abs=0.05)
    assert need(flux).resident > need(flux).by_stage
    assert kept_bytes(flux, 3072) == 2 * 3072 * 4096
    assert load_s(flux, 2.0) == pytest.approx(2 * (11901408320 + 83819683 + 123060480 + 4762310656) / 2e9)
    large = estimate("flux.1-dev", 2048, 2048)
    tiled = tiled_peak_bytes("flux.1-dev", large, 512)
    assert tiled == (estimate("flux.1-dev", 512, 512).vae_peak_bytes or 0) + 4 * 3 * 2048**2
    assert tiled < 0.1 * (large.vae_peak_bytes or 0)
    with pytest.raises(InvalidOptionError, match="tile must be at least 16"):
        tiled_peak_bytes("flux.1-dev", large, 8)
