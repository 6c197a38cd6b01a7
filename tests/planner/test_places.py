"""The rule table: order, names, and no public function of one name in two modules."""

from __future__ import annotations

from diffaccel.planner.levers import PLACES, in_order


def test_slots_order_and_caches_outermost() -> None:
    order = in_order(sorted(PLACES))
    assert order.index("quantization") < order.index("compile") < order.index("attention") < order.index("cache")
    assert order[-2:] == ["cache", "solver"], "what stands around the scheduler comes last"


def test_ready_values_are_allowed_values() -> None:
    for place in PLACES.values():
        assert set(place.ready) <= set(place.values), place.key


def test_item_names_of_the_contract() -> None:
    assert PLACES["cache"].item("first_block") == "cache.first_block"
    assert PLACES["vae_tiling"].item("exact") == "vae.tiling"
    assert PLACES["compile"].item(True) == "compile"
    assert PLACES["offload"].item("stage") == "offload.stage"
