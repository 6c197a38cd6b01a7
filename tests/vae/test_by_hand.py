"""`pipe.vae.decode(latents)` by hand, as users decode after output_type="latent": the pipeline's lever acts there."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from diffaccel import BudgetError, accelerate, attach, restore
from diffaccel.vae.exact.live_bytes import LiveBytes
from tests import fingerprint, tiny
from tests.vae import vaes
from tests.vae.exact import apart, flux_with, stats
from tests.vae.test_blended import flux_with as any_flux_with

# name -> (builder, shape of latents that strips can cut)
EXACT: dict[str, tuple[Any, tuple[int, ...]]] = {
    "kl": (vaes.kl, (1, 4, 24, 16)),
    "flux2": (vaes.flux2, (1, 4, 24, 16)),
    "wan": (vaes.SOUND["wan"][0], (1, 4, 2, 48, 4)),
    "qwen": (vaes.SOUND["qwen"][0], (1, 4, 1, 48, 4)),
    "ltx": (vaes.ltx, (1, 4, 3, 48, 4)),
}


def peak(vae: Any, z: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(picture, most bytes held at once) of a decode by hand."""
    with torch.no_grad(), LiveBytes() as live:
        picture: torch.Tensor = vae.decode(z).sample
    return picture, live.peak_bytes


@pytest.mark.parametrize(
    ("name", "batch", "slicing"),
    [*((name, 1, False) for name in EXACT), ("kl", 2, False), ("kl", 2, True), ("flux2", 2, True), ("ltx", 2, True)],
)
def test_exact_strips_act(name: str, batch: int, slicing: bool) -> None:
    make, shape = EXACT[name]
    torch.manual_seed(0)
    vae = make().eval()
    if slicing:
        vae.enable_slicing()
    z = torch.randn(batch, *shape[1:], generator=torch.Generator().manual_seed(0))
    truth, before = peak(vae, z)
    kept = fingerprint.snapshot_pipe(pipe := any_flux_with(vae))
    attach(pipe).enable_vae_tiling(exact=True, mode="low", rows=2)
    assert "by hand" in pipe.acceleration.plan.item("vae.tiling").reason
    found, after = peak(vae, z)
    assert apart(found, truth) < 1e-5 and after < before
    with pipe.acceleration.run():
        pass
    assert stats(pipe)["by_hand"] == (batch if slicing else 1) and stats(pipe)["decodes"] == 0
    restore(pipe)
    assert torch.equal(peak(vae, z)[0], truth)
    fingerprint.assert_same(kept, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    vae = vaes.kl().eval().to(dtype)
    z = torch.randn(1, 4, 24, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    truth, before = peak(vae, z)
    attach(flux_with(vae)).enable_vae_tiling(exact=True, mode="low", rows=1)
    gone, _ = peak(vae, z)
    assert torch.equal(gone, truth), "the pipeline is gone, so the VAE is plain again"
    pipe = attach(flux_with(vae)).enable_vae_tiling(exact=True, mode="low", rows=1)
    found, after = peak(vae, z)
    assert apart(found.float(), truth.float()) < 0.05 and after < before
    restore(pipe)


@torch.no_grad()
def test_encoding_by_hand() -> None:
    vae = vaes.kl().eval()
    x = torch.randn(1, 3, 48, 32, generator=torch.Generator().manual_seed(0))
    truth = vae.encode(x).latent_dist.parameters
    pipe = attach(flux_with(vae)).enable_vae_tiling(exact=True, rows=1)
    found = vae.encode(x).latent_dist.parameters
    assert apart(found, truth) < 1e-5 and not torch.equal(found, truth)
    pipe.enable_vae_tiling(exact=True, rows=1, encode=False)
    assert torch.equal(vae.encode(x).latent_dist.parameters, truth)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", ["flux", "sdxl", "wan"])
def test_another_pipeline_that_shares_the_vae_stays_plain(family: str, exact: bool) -> None:
    """Its own calls, before and after, also in the middle of a run of the accelerated one; by hand the lever acts."""
    size = {"height": 24, "width": 24} if family != "wan" else {}
    one, other = tiny.build(family), tiny.build(family, seed=1)
    other.vae = one.vae
    truth, mine = (tiny.run(pipe, family, num_inference_steps=1, **size) for pipe in (other, one))
    options = {"exact": True, "rows": 1} if exact else {}
    attach(one).enable_vae_tiling(**options)
    assert torch.equal(tiny.run(other, family, num_inference_steps=1, **size), truth)
    seen: list[torch.Tensor] = []

    def meanwhile(*args: Any) -> dict[str, Any]:
        seen.append(tiny.run(other, family, num_inference_steps=1, **size))
        return {}

    found = tiny.run(one, family, num_inference_steps=1, callback_on_step_end=meanwhile, **size)
    assert torch.equal(seen[0], truth)
    accelerated = attach(other)  # with nothing on: still another pipeline
    assert torch.equal(tiny.run(accelerated, family, num_inference_steps=1, **size), truth)
    used = stats(one)["exact"] == 1 if exact else not torch.equal(found, mine)
    assert used or (family == "wan" and not exact), "negative control: the lever acts in its own pipeline"
    restore(one)
    assert torch.equal(tiny.run(one, family, num_inference_steps=1, **size), mine)


def test_blended_tiles_act_and_another_pipeline_keeps_its_own_tiling() -> None:
    one, other = tiny.build("flux"), tiny.build("flux", seed=1)
    other.vae = vae = one.vae
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 24, 12
    z = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    truth, _ = peak(vae, z)
    theirs = tiny.run(other, "flux", height=32, width=32, num_inference_steps=1)
    attach(one).enable_vae_tiling(tile_height=8)
    tiled, _ = peak(vae, z)
    assert not torch.equal(tiled, truth) and vae.tile_sample_min_size == 8
    assert torch.equal(tiny.run(other, "flux", height=32, width=32, num_inference_steps=1), theirs)
    assert torch.equal(peak(vae, z)[0], tiled)
    restore(one)
    assert torch.equal(peak(vae, z)[0], truth)


def test_a_callback_that_decodes_a_preview() -> None:
    """Between steps no run is current: the call is the user's, and the lever acts."""
    pipe = attach(tiny.build("flux")).enable_vae_tiling(exact=True, rows=1)
    z = torch.randn(1, 4, 24, 16, generator=torch.Generator().manual_seed(0))
    truth, _ = peak(tiny.build("flux").vae, z)
    seen: list[torch.Tensor] = []

    def preview(pipe: Any, *args: Any) -> dict[str, Any]:
        seen.append(peak(pipe.vae, z)[0])
        return {}

    tiny.run(pipe, "flux", num_inference_steps=1, callback_on_step_end=preview)
    assert apart(seen[0], truth) < 1e-5
    assert stats(pipe)["by_hand"] == 1 and stats(pipe)["decodes"] == 1


def test_what_it_cannot_do_is_said() -> None:
    """Gradients, a hook on a block, a budget that is too small: a warning by name, or a refusal."""
    vae = vaes.kl().eval()
    pipe = attach(flux_with(vae)).enable_vae_tiling(exact=True, max_bytes=70_000)
    z = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match=r"pipe\.vae, called by hand: vae\.tiling stood down: gradients"):
        assert vae.decode(z.requires_grad_()).sample.requires_grad
    with torch.no_grad(), pytest.raises(BudgetError, match="to decode 128x128 px takes at least"):
        vae.decode(torch.zeros(1, 4, 32, 32))
    vae.decoder.up_blocks[0].register_forward_hook(lambda *_: None)
    with torch.no_grad(), pytest.warns(UserWarning, match="forward hook"):
        vae.decode(z)
    restore(pipe)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vae.decode(z)


@pytest.mark.parametrize("exact", [True, False])
def test_copies_of_the_vae_are_plain(exact: bool) -> None:
    pipe = tiny.build("flux")
    z = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    truth, _ = peak(pipe.vae, z)
    attach(pipe).enable_vae_tiling(exact=exact)
    stored = io.BytesIO()
    torch.save(pipe.vae, stored)
    stored.seek(0)
    for twin in (copy.deepcopy(pipe.vae), torch.load(stored, weights_only=False)):
        if exact:
            assert torch.equal(peak(twin, z)[0], truth)
        else:
            assert torch.equal(peak(twin, z)[0], peak(pipe.vae, z)[0]), "the tiles are settings, which are copied"
        assert twin.decode.__self__ is twin


def test_the_owner_is_found_below_helpers() -> None:
    """A subclass's own helper that decodes is that pipeline's call."""
    one = tiny.build("flux")

    class Other(DiffusionPipeline):
        """Holds the VAE only."""

        def __init__(self, vae: Any) -> None:
            super().__init__()
            self.register_modules(vae=vae)

        def helper(self, z: torch.Tensor) -> torch.Tensor:
            return peak(self.vae, z)[0]

        def __call__(self, z: torch.Tensor) -> torch.Tensor:
            return self.helper(z)

    other = Other(one.vae)
    z = torch.randn(1, 4, 24, 16, generator=torch.Generator().manual_seed(0))
    truth = other(z)
    accelerate(one, None, vae_tiling="exact", vae_tiling_rows=1)
    counts = []
    for decode in (other, lambda z: peak(one.vae, z)[0]):
        assert apart(decode(z), truth) < 1e-5
        with one.acceleration.run():
            pass
        counts.append(stats(one).get("by_hand", 0))
    assert counts == [0, 1]
