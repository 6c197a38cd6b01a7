"""Published numbers: found by model, refused where they were not fitted to it."""

from __future__ import annotations

import pytest

from diffaccel.caching.gates.teacache import PolynomialGate, TimePolynomialGate
from diffaccel.caching.tables import load_table, magnitude_gate, named_set, polynomial_set
from diffaccel.errors import InvalidOptionError, UnsupportedModelError


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("FLUX.1-dev", "FLUX.1-dev"),
        ("black-forest-labs/FLUX.1-dev", "FLUX.1-dev"),
        ("/models/flux.1-dev/", "FLUX.1-dev"),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan2.1-T2V-1.3B"),
        ("hunyuanvideo-community/HunyuanVideo", "HunyuanVideo"),
    ],
)
def test_auto_finds_the_models_own_set(model: str, name: str) -> None:
    found = polynomial_set("auto", model)
    assert found.name == name and len(found.coefficients) == 5 and not found.use_abs


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("Qwen/Qwen-Image", "round numbers made by hand"),
        ("black-forest-labs/FLUX.1-Kontext-dev", "not part of the reference table"),
        ("MiniMax-H3", "R\\^2 = 0.095"),
        ("TangoFlux", "reused"),
        ("Wan-AI/Wan2.2-T2V-A14B-Diffusers", "do not reuse Wan2.1"),
        ("stabilityai/stable-diffusion-3.5-large", "stable-diffusion-3.5-large"),
        (None, "a model without a name"),
    ],
)
def test_auto_refuses_and_says_how_to_calibrate(model: str | None, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{why}.*fit_polynomial"):
        polynomial_set("auto", model)


def test_a_named_set_is_taken_as_it_is() -> None:
    found = polynomial_set("Qwen-Image family", "anything")
    assert found.use_abs and found.gate(0.2) == PolynomialGate(0.2, coefficients=found.coefficients, use_abs=True)
    assert isinstance(polynomial_set("Wan2.1-T2V-14B ret_steps").gate(0.1), TimePolynomialGate)
    with pytest.raises(InvalidOptionError, match=r"did you mean 'HunyuanVideo'"):
        polynomial_set("HunyanVideo")


def test_forced_steps_of_the_reference() -> None:
    found = polynomial_set("Wan2.1-T2V-14B ret_steps")
    assert (found.first_steps, found.last_steps) == (5, 0)


def test_numbers_of_the_users_own() -> None:
    assert polynomial_set([1, 0]).coefficients == (1.0, 0.0)
    with pytest.raises(InvalidOptionError, match="finite"):
        polynomial_set([float("nan"), 1.0])
    with pytest.raises(InvalidOptionError, match="finite"):
        polynomial_set([])


@pytest.mark.parametrize("table", ["magcache", "teacache"])
def test_every_entry_has_a_source_and_makes_a_gate(table: str) -> None:
    for name, row in load_table(table)["models"].items():
        assert row["source"], name
        if table == "magcache":
            gate = magnitude_gate(name)
            assert len(gate.ratios) == row["steps"] and gate.ratios[0] == 1.0, name
        else:
            assert polynomial_set(name).gate(0.1).rescale(0.1) is not None
            assert row["calibrated"] is ("why_not" not in row), name
    for alias, name in load_table(table)["aliases"].items():
        assert named_set(table, alias)[0] == name
