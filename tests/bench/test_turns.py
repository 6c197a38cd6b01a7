"""Turns take a drift of the machine out of ratios; contenders are read from text, plans and overrides."""

from __future__ import annotations

import pytest

from diffaccel.bench.contender import Contender, contenders, parse
from diffaccel.bench.turns import ratios, turns
from diffaccel.errors import InvalidOptionError


def test_every_round_runs_forwards_and_backwards() -> None:
    order = list(turns(3, 2))
    assert [one for _, one in order] == [0, 1, 2, 2, 1, 0] * 2
    assert [number for number, _ in order] == [0] * 6 + [1] * 6


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_machine_that_slows_down_steadily_changes_no_ratio(count: int) -> None:
    """All take the same work, and seconds grow with time: every ratio is 1. In plain rotation it is not."""
    seconds: dict[int, list[list[float]]] = {one: [[] for _ in range(4)] for one in range(count)}
    for clock, (number, one) in enumerate(turns(count, 4)):
        seconds[one][number].append(1 + 0.1 * clock)
    for one in range(count):
        assert ratios(seconds[0], seconds[one]) == pytest.approx([1.0] * 4)
    first, last = ([[1 + 0.1 * (2 * count * number + at + half) for half in (0, count)] for number in range(4)]
                   for at in (0, count - 1))  # fmt: skip
    assert max(ratios(first, last)) < 0.99


@pytest.mark.parametrize(
    ("text", "preset", "overrides", "steps", "scheduler"),
    [
        ("plain", None, {}, None, "own"),
        ("plain,steps=14", None, {}, 14, "own"),
        ("plain,scheduler=unipc,steps=9", None, {}, 9, "unipc"),
        ("auto", "auto", {}, None, "own"),
        ("cpu-demo, level=fast", "cpu-demo", {"level": "fast"}, None, "own"),
        ("auto,steps=20", "auto", {}, 20, "own"),
        ("my.toml", "my.toml", {}, None, "own"),
        ("cache=first_block,cache_threshold=0.1", None, {"cache": "first_block", "cache_threshold": 0.1}, None, "own"),
        ("auto,compile=true,cache=None", "auto", {"compile": True, "cache": None}, None, "own"),
    ],
)
def test_plans_in_words(text: str, preset: str | None, overrides: dict, steps: int | None, scheduler: str) -> None:
    found = parse(text)
    assert (found.preset, dict(found.overrides), found.steps, found.scheduler) == (preset, overrides, steps, scheduler)
    assert found.accelerated is bool(preset or overrides) and found.is_baseline is (text == "plain")


def test_the_plain_pipeline_is_always_among_them_and_names_are_unique() -> None:
    assert [one.name for one in contenders(["auto"])] == ["plain", "auto"]
    assert [one.name for one in contenders({"a": "auto", "reference": None})] == ["a", "reference"]
    assert contenders({"b": {"cache": "first_block"}})[1] == Contender("b", None, {"cache": "first_block"})


@pytest.mark.parametrize(
    ("plans", "said"),
    [
        (["autp"], "is no preset"),
        (["auto,level"], "KEY=VALUE"),
        (["auto,scheduler=euler"], "is for plain runs"),
        (["plain,steps=0"], "at least 1"),
        (["plain,scheduler=eulre"], "euler"),
        (["auto", "auto"], "two plans"),
        (3, "plans must be"),
        ([3], "a plan must be"),
    ],
)
def test_bad_plans_are_refused_in_one_sentence(plans: object, said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said) as refusal:
        contenders(plans)
    assert len(str(refusal.value)) <= 300
