"""Gates and guards, in closed form."""

from __future__ import annotations

import pytest
import torch

from diffaccel.caching.gates import relative_l1
from diffaccel.caching.guards import Guards, must_compute, stands_down
from diffaccel.caching.methods import FirstBlockCache
from diffaccel.errors import InvalidOptionError


def test_relative_l1() -> None:
    previous = torch.tensor([1.0, -2.0, 3.0, -2.0])
    assert relative_l1(previous * 1.25, previous).item() == pytest.approx(0.25)
    assert relative_l1(previous, previous).item() == 0.0


def test_min_steps() -> None:
    assert stands_down(Guards(), 9) is None
    assert "8 steps" in (stands_down(Guards(), 8) or "")
    assert "unknown" in (stands_down(Guards(), None) or "")
    assert stands_down(Guards(min_steps=0, last_steps=0), None) is None


def test_last_warmup_and_consecutive() -> None:
    guards = Guards(min_steps=0, last_steps=2, warmup_steps=3, max_consecutive=2)
    assert [must_compute(guards, t, 10, 0) for t in range(10)] == [True] * 3 + [False] * 5 + [True] * 2
    assert [must_compute(guards, 4, 10, n) for n in range(4)] == [False, False, True, True]


@pytest.mark.parametrize(
    "bad", [{"threshold": -0.1}, {"threshold": float("nan")}, {"threshold": "0.1"}, {"threshold": True},
            {"min_steps": -1}, {"last_steps": 1.5}, {"max_consecutive": -1}, {"warmup_steps": "2"}]
)  # fmt: skip
def test_bad_values_name_the_argument(bad: dict[str, object]) -> None:
    [name] = bad
    with pytest.raises(InvalidOptionError, match=name):
        FirstBlockCache(**bad)  # type: ignore[arg-type]
