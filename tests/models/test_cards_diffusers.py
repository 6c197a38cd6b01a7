"""The cards describe the installed diffusers: blocks, parameter names, and the order of what they return."""

from __future__ import annotations

import inspect

import pytest

from diffaccel.models import lookup
from tests import tiny


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_card_fits_the_model(family: str) -> None:
    pipe = tiny.build(family)
    card = lookup(pipe)
    assert card.family == family
    for row in card.stack:
        blocks = getattr(getattr(pipe, card.denoisers[0]), row.attribute)
        assert len(blocks) >= 1
        parameters = list(inspect.signature(type(blocks[0]).forward).parameters)[1:]
        assert tuple(parameters[: len(row.inputs)]) == row.inputs
        assert card.stream in row.outputs
    assert bool(card.stack) != bool(card.no_stack), "no stack needs a reason"


def test_unknown_family_is_named() -> None:
    class Pipe:
        transformer = __import__("torch").nn.Linear(1, 1)

    card = lookup(Pipe())
    assert card.family == "unknown" and card.denoisers == ("transformer",) and "Linear" in card.no_stack
