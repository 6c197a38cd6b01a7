"""The cards describe the installed diffusers, and every card has a pipeline under test."""

from __future__ import annotations

import inspect

import pytest

from diffaccel.models import CARDS, lookup
from tests import tiny

from .families.table import FAMILIES, build


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_card_fits_the_model(name: str) -> None:
    """Block lists, the leading parameters of their blocks, the arguments that make a cache step aside."""
    pipe = build(name)
    card = lookup(pipe)
    assert card is CARDS[FAMILIES[name].card]
    denoiser = getattr(pipe, card.denoisers[0])
    for row in card.stack:
        blocks = getattr(denoiser, row.attribute)
        assert len(blocks) >= 1
        assert len({type(block) for block in blocks}) == 1
        parameters = list(inspect.signature(type(blocks[0]).forward).parameters)[1:]
        assert tuple(parameters[: len(row.inputs)]) == row.inputs
        assert set(row.outputs) <= set(row.inputs) and set(row.joins) <= set(card.stack[0].outputs)
        assert card.stream in row.outputs
    assert set(card.reads) <= set(card.stack[-1].outputs)
    assert set(card.stand_down) <= set(inspect.signature(type(denoiser).forward).parameters)


def test_every_card_is_under_test() -> None:
    """Here, or among the four pipelines that all invariants run over."""
    assert {family.card for family in FAMILIES.values()} | set(tiny.FAMILIES) == set(CARDS)
    assert list(CARDS) == sorted(CARDS) == [card.family for card in CARDS.values()]
