"""Layers around a method: any order of coming and going leaves the object as it was."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from diffaccel.core.method_layers import add_layer


class Thing:
    """Has a method."""

    def shout(self, word: str, *, times: int = 1) -> str:
        """Loudly."""
        return word.upper() * times


def around(mark: str) -> Callable[..., Any]:
    return lambda below, *args, **kwargs: f"{mark}({below(*args, **kwargs)})"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("own", [False, True])
def test_any_order(order: tuple[int, ...], own: bool) -> None:
    thing = Thing()
    if own:
        thing.shout = lambda word, times=1: word  # type: ignore[method-assign]
    before, plain = dict(vars(thing)), thing.shout("a")
    undos = [add_layer(thing, "shout", around(mark)) for mark in "xyz"]
    assert thing.shout("a") == f"z(y(x({plain})))" and len(vars(thing)) == 1
    left = ["x", "y", "z"]
    for index in order:
        undos[index]()
        undos[index]()
        left.remove("xyz"[index])
        expected = plain
        for mark in left:
            expected = f"{mark}({expected})"
        assert thing.shout("a") == expected
    assert vars(thing) == before


def test_it_looks_like_the_method_and_copies_are_plain() -> None:
    thing = Thing()
    add_layer(thing, "shout", around("x"))
    assert list(inspect.signature(thing.shout).parameters) == ["word", "times"]
    assert thing.shout.__doc__ == "Loudly." and thing.shout("a", times=2) == "x(AA)"
    for twin in (copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))):
        assert twin.shout("a") == "A" and twin.shout.__self__ is twin


def test_under_a_foreign_stand_in_it_lets_everything_through() -> None:
    thing = Thing()
    undo = add_layer(thing, "shout", around("x"))
    ours = thing.shout
    thing.shout = lambda word: f"foreign({ours(word)})"  # type: ignore[method-assign]
    undo()
    assert thing.shout("a") == "foreign(A)"
