"""The exact VAE lever on whole pipelines: same picture, nothing left behind, nobody else touched, budgets kept."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import accelerate as hf_accelerate
import pytest
import torch
from diffusers.hooks import apply_group_offloading

from diffaccel import (
    UnsupportedModelError,
    accelerate,
    attach,
    plan,
    restore,
)
from tests import fingerprint, tiny
from tests.vae import vaes
from tests.vae.exact import ITEM, SEAM, apart, by_hand, flux_with, latents, stats, vae

# ---- the same picture -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "mode"),
    [("flux", "auto"), ("sd3", "low"), ("sdxl", "auto"), ("sdxl", "low"), ("flux_img2img", "low"), ("wan", "auto"),
     ("wan_v2v", "low")],
)  # fmt: skip
def test_the_picture_stays(family: str, mode: str) -> None:
    plain = tiny.run(tiny.build(family), family, num_inference_steps=2)
    pipe = accelerate(tiny.build(family), None, vae_tiling="exact", vae_tiling_mode=mode, vae_tiling_rows=2)
    item = pipe.acceleration.plan.item(ITEM)
    assert item.status == "enabled" and item.fidelity == "equivalent"
    assert item.predicted["origin"] == "computed" or family == "wan_v2v"
    assert apart(tiny.run(pipe, family, num_inference_steps=2), plain) < 1e-5
    encodes = int(family in ("flux_img2img", "wan_v2v"))
    assert not pipe.acceleration.report.notes
    assert stats(pipe)["decodes"] == 1 and stats(pipe)["encodes"] == encodes
    assert stats(pipe)["exact"] == 1 + encodes and stats(pipe)["rows"] == 2


def test_the_posterior_is_sampled_as_before() -> None:
    """The same moments give the same sample for the same generator."""
    pipe = attach(flux_with(vae("narrow")))
    x = latents(24, 40, channels=3)

    def sample() -> torch.Tensor:
        with torch.no_grad():
            posterior = pipe.vae.encode(x).latent_dist
        drawn: torch.Tensor = posterior.sample(torch.Generator().manual_seed(5))
        return drawn

    plain = sample()
    pipe.enable_vae_tiling(exact=True, rows=1)
    with pipe.acceleration.run():
        exact = sample()
    assert stats(pipe)["encodes"] == stats(pipe)["exact"] == 1
    assert apart(exact, plain) < 1e-5 and not torch.equal(exact, plain)


@torch.no_grad()
def test_slicing_and_return_dict() -> None:
    pipe = attach(flux_with(vae("narrow"))).enable_vae_tiling(exact=True, rows=1)
    z = latents(6, 5, batch=2)
    plain = pipe.vae.decode(z).sample
    pipe.vae.enable_slicing()
    try:
        with pipe.acceleration.run():
            (found,) = pipe.vae.decode(z, return_dict=False)
    finally:
        pipe.vae.disable_slicing()
    assert stats(pipe)["decodes"] == 2 and apart(found, plain) < 1e-5


def test_the_vaes_own_tiling_is_set_aside_and_kept() -> None:
    pipe = flux_with(vaes.kl().eval())
    z = latents(20, 12)
    with torch.no_grad():
        plain = pipe.vae.decode(z).sample
        pipe.vae.enable_tiling()
        tiled = pipe.vae.decode(z).sample
    assert apart(tiled, plain) > 1e-3
    accelerate(pipe, None, vae_tiling="exact")
    assert "set aside" in pipe.acceleration.plan.item(ITEM).reason
    assert apart(by_hand(pipe, z), plain) < 1e-5
    restore(pipe)
    assert pipe.vae.use_tiling
    with torch.no_grad():
        assert torch.equal(pipe.vae.decode(z).sample, tiled)


def test_from_blended_to_exact_and_back() -> None:
    pipe = attach(flux_with(vaes.kl().eval())).enable_vae_tiling(tile_height=16)
    assert pipe.vae.use_tiling
    pipe.enable_vae_tiling(exact=True, mode="low")
    assert not pipe.vae.use_tiling and pipe.acceleration.plan.item(ITEM).params["mode"] == "low"
    pipe.enable_vae_tiling(tile_height=16)
    assert pipe.vae.use_tiling and pipe.acceleration.plan.item(ITEM).fidelity == "lossy"
    pipe.disable_vae_tiling()
    assert not pipe.vae.use_tiling and not pipe.acceleration.plan.enabled


def test_float16_lifted_to_float32() -> None:
    """SDXL decodes in float32 where its VAE asks for it; the prediction counts on that."""
    plain = tiny.run(tiny.build("sdxl", dtype=torch.float16), "sdxl", num_inference_steps=1)
    pipe = tiny.build("sdxl", dtype=torch.float16)
    assert pipe.vae.config.force_upcast
    accelerate(pipe, None, vae_tiling="exact", vae_tiling_rows=1, vae_tiling_mode="low")
    said = pipe.acceleration.plan.item(ITEM).predicted["peak_mib"]
    assert apart(tiny.run(pipe, "sdxl", num_inference_steps=1), plain) < 1e-3
    assert said == round(stats(pipe)["predicted_peak_bytes"] / 2**20, 1) and stats(pipe)["exact"] == 1


# ---- nothing left behind --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["flux", "sdxl", "flux_img2img", "wan"])
def test_undo(family: str) -> None:
    pipe = tiny.build(family)
    plain = tiny.run(pipe, family, num_inference_steps=1)
    before = fingerprint.snapshot_pipe(pipe)
    accelerate(pipe, None, vae_tiling="exact", vae_tiling_rows=1)
    pipe.enable_vae_tiling(exact=True, mode="low").enable_vae_tiling(exact=True)
    tiny.run(pipe, family, num_inference_steps=1)
    assert stats(pipe)["exact"]
    restore(pipe)
    assert not SEAM & set(vars(pipe.vae))
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert torch.equal(tiny.run(pipe, family, num_inference_steps=1), plain)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_broken_run_leaves_nothing(error: type[BaseException]) -> None:
    pipe = accelerate(tiny.build("sdxl"), None, vae_tiling="exact", vae_tiling_rows=1)
    plain = tiny.run(tiny.build("sdxl"), "sdxl", num_inference_steps=1)

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise error("stop")

    with pytest.raises(error):
        tiny.run(pipe, "sdxl", num_inference_steps=1, callback_on_step_end=stop)
    handle = pipe.vae.decoder.up_blocks[1].resnets[0].conv1.register_forward_hook(stop)  # in the middle of a strip
    with pytest.raises(error):
        tiny.run(pipe, "sdxl", num_inference_steps=1)
    handle.remove()
    assert apart(tiny.run(pipe, "sdxl", num_inference_steps=1), plain) < 1e-5


def test_a_run_inside_a_run() -> None:
    pipe = accelerate(tiny.build("sdxl"), None, vae_tiling="exact", vae_tiling_rows=1)
    plain = tiny.run(tiny.build("sdxl"), "sdxl", num_inference_steps=2)
    inner: list[torch.Tensor] = []

    def again(running: Any, step: int, *rest: Any) -> dict[str, Any]:
        if not inner:
            inner.append(torch.zeros(0))
            inner[0] = tiny.run(running, "sdxl", num_inference_steps=1)
        return {}

    outer = tiny.run(pipe, "sdxl", num_inference_steps=2, callback_on_step_end=again)
    assert apart(outer, plain) < 1e-5 and stats(pipe)["decodes"] == 1
    assert apart(inner[0], tiny.run(tiny.build("sdxl"), "sdxl", num_inference_steps=1)) < 1e-5


def test_what_the_user_set_on_the_vae_comes_back() -> None:
    pipe = flux_with(vaes.kl().eval())
    calls: list[int] = []
    own = pipe.vae._decode

    def counted(z: torch.Tensor, return_dict: bool = True) -> Any:
        calls.append(1)
        return own(z, return_dict=return_dict)

    pipe.vae._decode = counted
    attach(pipe).enable_vae_tiling(exact=True)
    by_hand(pipe, latents(6, 6))
    assert not calls, "strips stand in for it"
    restore(pipe)
    assert vars(pipe.vae)["_decode"] is counted and "_encode" not in vars(pipe.vae)


# ---- nobody else touched --------------------------------------------------------------------------------


def test_a_plain_pipeline_that_shares_the_vae_is_bit_equal() -> None:
    one, other, lone = tiny.build("sdxl"), tiny.build("sdxl", seed=1), tiny.build("sdxl", seed=1)
    lone.vae = tiny.build("sdxl").vae
    other.vae = one.vae
    truth = tiny.run(lone, "sdxl", num_inference_steps=1)
    accelerate(one, None, vae_tiling="exact", vae_tiling_rows=1)
    assert torch.equal(tiny.run(other, "sdxl", num_inference_steps=1), truth)
    seen: list[torch.Tensor] = []

    def meanwhile(*args: Any) -> dict[str, Any]:
        seen.append(tiny.run(other, "sdxl", num_inference_steps=1))
        return {}

    tiny.run(one, "sdxl", num_inference_steps=1, callback_on_step_end=meanwhile)
    assert stats(one)["decodes"] == 1 and torch.equal(seen[0], truth), "also in the middle of the other's run"


def test_two_accelerated_pipelines_share_a_vae() -> None:
    one, two = tiny.build("sdxl"), tiny.build("sdxl", seed=1)
    two.vae = one.vae
    truths = [tiny.run(pipe, "sdxl", num_inference_steps=1) for pipe in (one, two)]
    accelerate(one, None, vae_tiling="exact", vae_tiling_rows=1)
    accelerate(two, None, vae_tiling="exact", vae_tiling_rows=1, vae_tiling_mode="low")
    for pipe, truth, mode in zip((one, two), truths, ("fast", "low"), strict=True):
        assert apart(tiny.run(pipe, "sdxl", num_inference_steps=1), truth) < 1e-5
        assert stats(pipe)["exact"] == 1 and stats(pipe)["mode"] == mode
    restore(one)
    assert apart(tiny.run(two, "sdxl", num_inference_steps=1), truths[1]) < 1e-5
    shared = two.vae
    del one, two, pipe
    gc.collect()
    assert not SEAM & set(vars(shared))


def test_a_replaced_vae_is_followed() -> None:
    pipe = accelerate(tiny.build("flux"), None, vae_tiling="exact")
    pipe.vae = vaes.kl().eval()
    by_hand(pipe, latents(6, 6))
    assert stats(pipe)["exact"] == 1
    pipe.vae = vaes.dc().eval()
    by_hand(pipe, latents(8, 8))
    assert any(note.startswith(f"{ITEM} stood down") for note in pipe.acceleration.report.notes)


# ---- offload --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fast", "low"])
def test_sequential_offload(mode: str) -> None:
    """accelerate keeps every weight away until its layer is called: what is computed past the layers would fail."""
    model = vaes.kl().eval()
    z, pipe = latents(9, 7), flux_with(model)
    with torch.no_grad():
        plain = model.decode(z).sample
        hf_accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert model.decoder.conv_out.weight.is_meta and model.decoder.conv_norm_out.weight.is_meta
        attach(pipe)
        pipe.enable_vae_tiling(exact=True, mode=mode, rows=1)
        assert apart(by_hand(pipe, z), plain) < 1e-5
    assert stats(pipe)["exact"] == 1 and model.decoder.conv_norm_out.weight.is_meta


@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload_to_disk(kind: str, tmp_path: Path) -> None:
    """Diffusers hands out the weights by group, from disk, and takes them back: blocks are groups, or layers are."""
    model = vaes.kl().eval()
    z, pipe = latents(9, 7), flux_with(model)
    cpu = torch.device("cpu")
    with torch.no_grad():
        plain = model.decode(z).sample
        groups: dict[str, Any] = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        apply_group_offloading(model, cpu, cpu, offload_type=kind, offload_to_disk_path=str(tmp_path), **groups)
        attach(pipe)
        pipe.enable_vae_tiling(exact=True, rows=1)
        assert apart(by_hand(pipe, z), plain) < 1e-5
    assert stats(pipe)["exact"] == 1 and not pipe.acceleration.report.notes


# ---- where it stands down -------------------------------------------------------------------------------


def test_gradients() -> None:
    pipe = attach(flux_with(vaes.kl().eval())).enable_vae_tiling(exact=True)
    z = latents(4, 4).requires_grad_()
    with pipe.acceleration.run():
        pipe.vae.decode(z).sample.sum().backward()
    assert z.grad is not None and stats(pipe)["exact"] == 0
    assert "gradients" in pipe.acceleration.report.notes[0]


def test_encode_is_left_alone_where_asked() -> None:
    pipe = accelerate(tiny.build("flux_img2img"), None, vae_tiling="exact", vae_tiling_encode=False)
    assert "encoding is left" in pipe.acceleration.plan.item(ITEM).reason
    tiny.run(pipe, "flux_img2img", num_inference_steps=2)
    assert stats(pipe)["encodes"] == 1 and stats(pipe)["exact"] == 1 and not pipe.acceleration.report.notes


def test_a_hook_of_the_users_is_still_called() -> None:
    pipe = attach(flux_with(vaes.kl().eval())).enable_vae_tiling(exact=True)
    seen: list[int] = []
    pipe.vae.decoder.up_blocks[0].register_forward_hook(lambda *_: seen.append(1))
    by_hand(pipe, latents(4, 4))
    assert seen == [1] and stats(pipe)["exact"] == 0
    assert "stood down" in pipe.acceleration.report.notes[0] and "forward hook" in pipe.acceleration.report.notes[0]


def test_an_autoencoder_that_strips_do_not_know() -> None:
    pipe = attach(flux_with(vaes.dc().eval()))
    with pytest.raises(UnsupportedModelError, match="AutoencoderDC"):
        pipe.enable_vae_tiling(exact=True)
    assert plan(pipe, None, vae_tiling="exact").item(ITEM).status == "skipped"
    with pytest.raises(UnsupportedModelError, match="AutoencoderDC"):
        accelerate(restore(pipe), None, strict=True, vae_tiling="exact")


def test_no_vae() -> None:
    pipe = tiny.build("flux")
    pipe.vae = None
    assert "no vae" in plan(pipe, None, vae_tiling="exact").item(ITEM).reason
