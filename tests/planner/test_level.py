"""The one dial: what a level sets, what goes before it, and where it says that it sets nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import InvalidOptionError, accelerate, plan, presets, restore
from diffaccel.caching.dial import ADAPTIVE
from diffaccel.core.place import LEVELS
from diffaccel.planner.plan import Plan
from diffaccel.planner.presets import bundled, load, parse
from tests import tiny

ON: dict[str, Any] = {"cache": "adaptive"}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.build("flux")


def tolerance(decided: Plan) -> object:
    return decided.item("cache.adaptive").params["tolerance"]


def test_the_table() -> None:
    """From careful to fast, tolerances grow; every level says what it sets."""
    assert tuple(ADAPTIVE) == LEVELS
    values = [ADAPTIVE[level]["tolerance"] for level in LEVELS]
    assert 0 < values[0] < values[1] < values[2]


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_sets_the_tolerance(level: str, pipe: Any) -> None:
    for preset in (None, "auto", "cpu-demo"):
        decided = plan(pipe, preset, level=level, **ON)
        assert tolerance(decided) == ADAPTIVE[level]["tolerance"] and decided.level == level
        assert f"level {level}" in str(decided).splitlines()[0] and not any("level" in note for note in decided.notes)
    assert Plan.from_toml(decided.to_toml()) == decided == Plan.from_dict(decided.to_dict())


def test_balanced_is_the_default_of_every_preset(pipe: Any) -> None:
    for name in bundled():
        preset = load(name)
        assert preset.wishes.get("cache") != "adaptive" or (preset.level, name) == ("balanced", name)
        assert preset.wishes.get("cache") in (None, "adaptive"), "all presets use what wins"
        assert ("cache" in preset.wishes) == ("\nlevel =" in presets(name))
    assert plan(pipe).level == "balanced" and tolerance(plan(pipe)) == ADAPTIVE["balanced"]["tolerance"]
    assert tolerance(plan(pipe, None, **ON)) == ADAPTIVE["balanced"]["tolerance"], "so has the method itself"


def test_a_number_goes_before_the_level_and_the_plan_says_so(pipe: Any) -> None:
    decided = plan(pipe, level="fast", cache_tolerance=0.001)
    assert tolerance(decided) == 0.001 and decided.level is None
    assert any("level='fast' sets nothing here: cache_tolerance was given" in note for note in decided.notes)
    assert not any("level" in note for note in plan(pipe, cache_tolerance=0.001).notes), "nobody asked for a level"


@pytest.mark.parametrize("wishes", [{"cache": None}, {"cache": "first_block"}, {"preset": "lossless"}], ids=str)
def test_a_level_that_sets_nothing_is_never_silent(wishes: dict[str, Any], pipe: Any) -> None:
    decided = plan(pipe, **({"preset": "auto"} | wishes), level="careful")
    assert decided.level is None and any("level='careful' sets nothing here" in note for note in decided.notes)
    with pytest.raises(InvalidOptionError, match="level='careful' sets nothing"):
        plan(pipe, None, level="careful", strict=True)


@pytest.mark.parametrize(
    ("level", "hint"), [("blanced", "'balanced'"), ("FAST", "fast"), (3, "careful"), ("", "careful")]
)
def test_an_unknown_level_is_refused(level: Any, hint: str, pipe: Any) -> None:
    for function in (plan, accelerate):
        with pytest.raises(InvalidOptionError, match=hint) as error:
            function(pipe, level=level)
        assert len(str(error.value)) <= 300
    with pytest.raises(InvalidOptionError, match=r"preset 'mine'.*level"):
        parse(f"level = {str(level)!r}", "mine")
    with pytest.raises(InvalidOptionError, match="'level'"):
        plan(pipe, levl="fast")
    assert "_diffaccel" not in vars(pipe)


def test_presets_and_plans_carry_a_level(pipe: Any, tmp_path: Path) -> None:
    """A preset's own level and numbers stand until the user turns the dial; so do those of a plan."""
    path = tmp_path / "mine.toml"
    path.write_text('level = "fast"\n[wishes]\ncache = "adaptive"\n')
    assert tolerance(plan(pipe, str(path))) == ADAPTIVE["fast"]["tolerance"]
    assert tolerance(plan(pipe, str(path), level="careful")) == ADAPTIVE["careful"]["tolerance"]
    path.write_text('[wishes]\ncache = "adaptive"\ncache_tolerance = 0.5\n')
    assert tolerance(plan(pipe, str(path))) == 0.5
    assert tolerance(plan(pipe, str(path), level="careful")) == ADAPTIVE["careful"]["tolerance"]
    decided = plan(pipe, level="fast")
    again = plan(pipe, decided)
    assert tolerance(again) == ADAPTIVE["fast"]["tolerance"] and again.level == "fast"
    assert tolerance(plan(pipe, decided, level="careful")) == ADAPTIVE["careful"]["tolerance"]
    assert tolerance(plan(pipe, plan(pipe, cache_tolerance=0.07))) == 0.07


def test_a_level_decides_how_many_steps_run() -> None:
    """Also by verb, and through what other verbs change; restore gives the plain picture."""
    pipe = tiny.build("flux")
    call = {"num_inference_steps": 28, "output_type": "latent"}
    plain = tiny.run(pipe, "flux", **call)
    computed = {}
    accelerate(pipe, None, level="careful", **ON)
    for level in LEVELS:
        pipe.enable_adaptive_cache(level=level)
        assert pipe.acceleration.plan.level == level
        tiny.run(pipe, "flux", **call)
        computed[level] = sum(step.computed for step in pipe.acceleration.report.steps)
    assert computed["careful"] >= computed["balanced"] >= computed["fast"] and computed["careful"] > computed["fast"]
    pipe.enable_attention("native")
    assert tolerance(pipe.acceleration.plan) == ADAPTIVE["fast"]["tolerance"], "another verb leaves the dial alone"
    with pytest.raises(InvalidOptionError, match="balanced"):
        pipe.enable_adaptive_cache(level="balance")
    with pytest.raises(InvalidOptionError, match="level"):
        pipe.enable_first_block_cache(level="fast")
    assert tolerance(pipe.acceleration.plan) == ADAPTIVE["fast"]["tolerance"]
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux", **call), plain)
