"""What gets enabled, what does not, and what is said about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffaccel import (
    Budget,
    BudgetError,
    InvalidOptionError,
    MissingDependencyError,
    Plan,
    UnsupportedModelError,
    accelerate,
    plan,
    presets,
    restore,
)
from diffaccel.planner.presets import parse
from tests import tiny


@pytest.fixture(scope="module")
def flux():  # type: ignore[no-untyped-def]
    return tiny.build("flux")


@pytest.fixture(scope="module")
def sdxl():  # type: ignore[no-untyped-def]
    return tiny.build("sdxl")


def test_importing_diffaccel_imports_neither_torch_nor_diffusers() -> None:
    code = "import sys, diffaccel; assert not {'torch', 'diffusers'} & set(sys.modules); print('light')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "light"


def test_presets() -> None:
    assert {"auto", "cpu-demo", "lossless"} <= set(presets())
    for name in presets():
        text = presets(name)
        assert text.startswith("#"), "a preset is commented"
        assert parse(text, name).wishes
    with pytest.raises(InvalidOptionError, match="cpu-demo"):
        presets("cpu-dmo")


def test_auto_lists_what_is_not_there_yet(flux) -> None:  # type: ignore[no-untyped-def]
    decided = plan(flux)
    assert decided.item("cache.adaptive").status == "enabled"
    assert decided.item("fusion").status == "skipped" and "not in this version" in decided.item("fusion").reason
    assert decided.item("offload.stage").status == "skipped" and "memory limit" in decided.item("offload.stage").reason
    assert "_diffaccel" not in vars(flux), "planning touches nothing"


def test_lossless_enables_nothing_lossy(flux) -> None:  # type: ignore[no-untyped-def]
    assert all(i.fidelity == "exact" for i in plan(flux, "lossless").items if i.status == "enabled")
    item = plan(flux, "lossless", cache="first_block").item("cache.first_block")
    assert item.status == "skipped" and "exact" in item.reason


def test_budgets(flux) -> None:  # type: ignore[no-untyped-def]
    item = plan(flux, "cpu-demo", budget=Budget(min_psnr_db=30)).item("cache.adaptive")
    assert item.status == "enabled" and item.params["min_psnr_db"] == 30
    item = plan(flux, "cpu-demo", budget=Budget(max_seconds=2)).item("cache.adaptive")
    assert item.status == "enabled" and "at most 2 s" in item.reason
    with pytest.raises(BudgetError, match="weights alone"):
        plan(flux, budget=Budget(memory_gib=1e-6))
    with pytest.raises(BudgetError, match="equivalent"):
        plan(flux, None, budget=Budget(fidelity="equivalent"), strict=True, cache="first_block")


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        ({"cach": "first_block"}, "cache"),
        ({"cache": "first_blok"}, "first_block"),
        ({"cache": "first_block", "cache_treshold": 0.1}, "cache_threshold"),
        ({"attention": "falsh"}, "flash"),
        ({"cache_threshold": 0.1, "cache": None}, "cache"),
        ({"compile": "yes"}, "True"),
        ({"cache": True}, "first_block"),
    ],
)
def test_unknown_options(flux, overrides: dict[str, object], meant: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidOptionError, match=meant):
        accelerate(flux, None, **overrides)
    assert "_diffaccel" not in vars(flux)


def test_options_of_later_versions(flux) -> None:  # type: ignore[no-untyped-def]
    item = plan(flux, None, fusion=True).item("fusion")
    assert item.status == "skipped" and "not in this version" in item.reason
    with pytest.raises(InvalidOptionError, match="not in this version"):
        accelerate(flux, None, strict=True, fusion=True)


def test_a_method_without_its_numbers_is_skipped_with_the_models_that_have_some(flux) -> None:  # type: ignore[no-untyped-def]
    item = plan(flux, None, cache="teacache", cache_threshold=0.4, cache_coefficients="auto").item("cache.teacache")
    assert item.status == "skipped" and "FLUX.1-dev" in item.reason and "calibrate" in item.reason
    given = plan(flux, None, cache="teacache", cache_threshold=0.4, cache_coefficients="FLUX.1-dev")
    assert given.item("cache.teacache").status == "enabled"


def test_preset_of_another_family(sdxl) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnsupportedModelError, match=r"flux.*sdxl"):
        accelerate(sdxl, "cpu-demo")


def test_preset_from_a_file(flux, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.toml"
    path.write_text('description = "mine"\n[wishes]\ncache = "first_block"\ncache_threshold = 0.33\n')
    decided = plan(flux, str(path))
    assert decided.preset == "mine" and decided.item("cache.first_block").params["threshold"] == 0.33
    path.write_text('familes = ["flux"]\n')
    with pytest.raises(InvalidOptionError, match="families"):
        plan(flux, str(path))
    with pytest.raises(InvalidOptionError, match="no such file"):
        plan(flux, str(tmp_path / "none.toml"))


def test_a_plan_is_a_preset(flux, sdxl) -> None:  # type: ignore[no-untyped-def]
    decided = Plan.from_toml(plan(flux, None, cache="first_block", cache_threshold=0.21, cache_last_steps=2).to_toml())
    accelerate(flux, decided)
    try:
        assert flux.acceleration.plan.item("cache.first_block").params["threshold"] == 0.21
        assert flux.acceleration.plan.item("cache.first_block").params["last_steps"] == 2
    finally:
        restore(flux)
    with pytest.raises(UnsupportedModelError):
        accelerate(sdxl, decided)


def test_overrides_of_another_method_drop_the_presets_numbers(flux) -> None:  # type: ignore[no-untyped-def]
    assert plan(flux, "cpu-demo", cache=None).enabled == ()
    assert plan(flux, "cpu-demo", cache_tolerance=0.5).item("cache.adaptive").params["tolerance"] == 0.5
    item = plan(flux, "cpu-demo", cache="interval").item("cache.interval")
    assert item.status == "enabled" and "tolerance" not in item.params and item.params["interval"] == 2


def test_hardware(flux) -> None:  # type: ignore[no-untyped-def]
    assert plan(flux, hardware="RTX 4090").hardware == "4090 24 GiB"
    with pytest.raises(InvalidOptionError, match="h100"):
        plan(flux, hardware="h1000")
    item = plan(flux, None, attention="flash", hardware="4090").item("attention.flash")
    assert item.status == "skipped" and "float32" in item.reason
    with pytest.raises(InvalidOptionError, match="cuda"):
        plan(flux, None, attention="flash", strict=True)


def test_missing_package_has_an_install_line() -> None:
    half = tiny.build("flux", dtype=torch.bfloat16)
    with pytest.raises(MissingDependencyError, match="pip install flash-attn"):
        plan(half, None, attention="flash", hardware="h100", strict=True)
    assert plan(half, None, attention="auto", hardware="h100").item("attention.auto").status == "skipped"


def test_what_a_family_cannot_do_is_refused_with_its_name(sdxl) -> None:  # type: ignore[no-untyped-def]
    assert "sdxl" in plan(sdxl, cache="first_block").item("cache.first_block").reason
    with pytest.raises(UnsupportedModelError, match="sdxl"):
        plan(sdxl, None, strict=True, cache="first_block")
    accelerate(sdxl, None)
    try:
        with pytest.raises(UnsupportedModelError, match="sdxl"):
            sdxl.enable_first_block_cache()
        with pytest.raises(UnsupportedModelError, match="sdxl"):
            sdxl.enable_sparse_attention()
    finally:
        restore(sdxl)


def test_preset_argument_types(flux) -> None:  # type: ignore[no-untyped-def]
    for bad in (3, ["auto"], True):
        with pytest.raises(InvalidOptionError, match="preset"):
            plan(flux, bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="Budget"):
        plan(flux, budget={"memory_gib": 3})  # type: ignore[arg-type]
