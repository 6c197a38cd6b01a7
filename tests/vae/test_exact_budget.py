"""What the exact VAE lever is asked for: options, plans, and budgets in bytes that are kept or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import Budget, BudgetError, InvalidOptionError, Plan, accelerate, attach, plan
from diffaccel.vae.exact.live_bytes import LiveBytes
from tests import tiny
from tests.vae.exact import ITEM, by_hand, flux_with, latents, stats, vae


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"mode": "slow"}, "mode='slow'"),
        ({"rows": 0}, "rows=0"),
        ({"rows": 1.5}, "whole number"),
        ({"max_bytes": -1}, "max_bytes=-1"),
        ({"max_bytes": True}, "max_bytes=True"),
        ({"encode": "yes"}, "encode='yes'"),
        ({"tile_height": 64}, "tile_height"),
    ],
)
def test_bad_options(options: dict[str, Any], meant: str) -> None:
    pipe = attach(tiny.build("flux"))
    with pytest.raises(InvalidOptionError, match=meant):
        pipe.enable_vae_tiling(exact=True, **options)
    assert not pipe.acceleration.plan.enabled


@pytest.mark.parametrize(
    "wishes",
    [
        {"vae_tiling": "exact", "vae_tiling_mode": "low", "vae_tiling_rows": 2},
        {"vae_tiling": "blended", "vae_tiling_tile_height": 8},
    ],
)
def test_a_plan_goes_through_toml(wishes: dict[str, Any]) -> None:
    """Both kinds of tiling share one item name; read back, each must be itself."""
    written = accelerate(tiny.build("flux"), None, **wishes).acceleration.plan
    again = accelerate(tiny.build("flux"), Plan.from_toml(written.to_toml())).acceleration.plan.item(ITEM)
    first = written.item(ITEM)
    assert (again.status, again.fidelity, again.params) == ("enabled", first.fidelity, first.params)


def test_budgets_of_fidelity() -> None:
    pipe = tiny.build("flux")
    assert plan(pipe, None, budget=Budget(fidelity="equivalent"), vae_tiling="exact").item(ITEM).status == "enabled"
    assert plan(pipe, None, budget=Budget(fidelity="exact"), vae_tiling="exact").item(ITEM).status == "skipped"


def test_max_bytes_chooses_mode_and_rows_and_is_kept() -> None:
    model, z = vae("wide"), latents(16, 16)
    pipe = attach(flux_with(model))
    chosen, sizes = [], []
    with LiveBytes() as plain, torch.no_grad():
        model.decode(z)
    for share in (0.9, 0.5, 0.33):
        most = int(share * plain.peak_bytes)
        pipe.enable_vae_tiling(exact=True, max_bytes=most)
        with LiveBytes() as live:
            by_hand(pipe, z)
        found = stats(pipe)
        assert live.peak_bytes <= most * 1.02, (share, found)
        chosen.append((found["mode"], found["rows"]))
        sizes.append(found["predicted_peak_bytes"])
    assert chosen[0] == ("fast", 2) and chosen[-1][0] == "low" and sizes == sorted(sizes, reverse=True)
    assert pipe.acceleration.plan.item(ITEM).params["max_bytes"] == most


def test_an_impossible_budget_says_the_least() -> None:
    pipe = attach(flux_with(vae("wide")))
    with pytest.raises(BudgetError, match=r"max_bytes=1000: to decode 64x64 px takes at least \d+ bytes"):
        pipe.enable_vae_tiling(exact=True, max_bytes=1000)
    assert not pipe.acceleration.plan.enabled
    with pytest.raises(BudgetError, match="max_bytes=1000"):
        accelerate(tiny.build("flux"), None, strict=True, vae_tiling="exact", vae_tiling_max_bytes=1000)
    pipe.enable_vae_tiling(exact=True, max_bytes=700_000)
    with pytest.raises(BudgetError, match="to decode 256x256 px takes at least") as refused:
        by_hand(pipe, latents(32, 32))
    least = int(str(refused.value).split("at least ")[1].split()[0])
    pipe.enable_vae_tiling(exact=True, max_bytes=least)
    assert by_hand(pipe, latents(32, 32)).shape[-1] == 256
    pipe.enable_vae_tiling(exact=True, max_bytes=least, mode="fast")
    with pytest.raises(BudgetError, match="mode='fast' was asked for"):
        by_hand(pipe, latents(32, 32))


def test_an_impossible_budget_is_seen_before_the_first_step() -> None:
    """The size is known when the call begins: no step is computed for a picture that cannot be decoded."""
    pipe = attach(tiny.build("sdxl")).enable_vae_tiling(exact=True, max_bytes=25_000)
    steps: list[int] = []
    handle = pipe.unet.register_forward_hook(lambda *_: steps.append(1))
    with pytest.raises(BudgetError, match="to decode 32x32 px"):
        tiny.run(pipe, "sdxl", height=32, width=32)
    assert not steps
    tiny.run(pipe, "sdxl", height=32, width=32, num_inference_steps=1, output_type="latent")
    assert steps and stats(pipe)["decodes"] == 0
    tiny.run(pipe, "sdxl", height=16, width=16, num_inference_steps=1)
    assert stats(pipe)["exact"] == 1
    handle.remove()
