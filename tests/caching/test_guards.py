"""Gates and guards, in closed form."""

from __future__ import annotations

import pytest
import torch

from diffaccel.caching.gates.base import relative_l1
from diffaccel.caching.guards import Guards, ReuseCounts, rule
from diffaccel.caching.methods.first_block import FirstBlockCache
from diffaccel.caching.step import Ruling, Step
from diffaccel.errors import InvalidOptionError


def test_relative_l1() -> None:
    previous = torch.tensor([1.0, -2.0, 3.0, -2.0])
    assert relative_l1(previous * 1.25, previous).item() == pytest.approx(0.25)
    assert relative_l1(previous, previous).item() == 0.0


def test_min_steps() -> None:
    guards = FirstBlockCache().guards()
    assert (guards.min_steps, guards.last_steps) == (9, 1)
    assert guards.stands_down(9) is None
    assert "8 steps" in (guards.stands_down(8) or "")
    assert "unknown" in (guards.stands_down(None) or "")
    assert Guards().stands_down(None) is None


def test_last_warmup_and_consecutive() -> None:
    guards = Guards(last_steps=2, warmup_steps=3, max_consecutive=2)
    computed = [rule(guards, ReuseCounts(), Step(t, 10)) is Ruling.COMPUTE for t in range(10)]
    assert computed == [True] * 3 + [False] * 5 + [True] * 2
    computed = [rule(guards, ReuseCounts(consecutive=n), Step(4, 10)) is Ruling.COMPUTE for n in range(4)]
    assert computed == [False, False, True, True]


def test_masks_in_every_form() -> None:
    for mask in ("1101", (True, True, False, True), [0, 1, 3], [0, 1, -1]):
        assert Guards(mask=mask).fit(4).mask == (True, True, False, True)  # type: ignore[arg-type]
    assert len(Guards(mask="fast").fit(28).mask or ()) == 28
    for mask in ("11", (True,), [0, 9]):
        with pytest.raises(InvalidOptionError):
            Guards(mask=mask).fit(4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", [{"threshold": -0.1}, {"threshold": float("nan")}, {"threshold": "0.1"}, {"threshold": True},
            {"min_steps": -1}, {"last_steps": 1.5}, {"max_consecutive": -1}, {"warmup_steps": "2"}]
)  # fmt: skip
def test_bad_values_name_the_argument(bad: dict[str, object]) -> None:
    [name] = bad
    with pytest.raises(InvalidOptionError, match=name):
        FirstBlockCache(**bad)  # type: ignore[arg-type]
