"""VAE tiling: pictures of the right size, a word where it does nothing, and the user's own tiling back afterwards."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from diffaccel import (
    Budget,
    DiffaccelError,
    IncompatibleError,
    InvalidOptionError,
    UnsupportedModelError,
    accelerate,
    attach,
    plan,
    restore,
)
from tests import fingerprint, tiny
from tests.vae import vaes

RATIO = {"kl": 4, "flux2": 2, "wan22": 16, "ltx": 4, "dc": 4}  # pixels per latent; 8 for the others


def flux_with(vae: Any) -> Any:
    """A pipeline that holds this VAE (only its decode is called)."""
    pipe = tiny.build("flux")
    pipe.vae = vae.eval()
    return pipe


def decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        picture: torch.Tensor = vae.decode(latents).sample
    return picture


def tile_state(vae: Any) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in vars(vae).items() if not k.startswith("_")]


# ---- every class ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", vaes.SOUND)
def test_every_size_comes_out_right(name: str) -> None:
    """The class's own tiles, and given ones of odd and even latents, on a picture that no tile divides."""
    build, video = vaes.SOUND[name]
    ratio = RATIO.get(name, 8)
    vae = build()
    pipe = attach(flux_with(vae))
    before = tile_state(vae)
    latents = torch.randn(1, 4, *((1,) if video else ()), 9, 11, generator=torch.Generator().manual_seed(0))
    whole = decode(vae, latents)
    assert whole.shape[-2:] == (9 * ratio, 11 * ratio)
    for sizes in ({}, {"tile_height": 5 * ratio}, {"tile_height": 6 * ratio, "stride_height": 4 * ratio}):
        square = "tile_sample_min_size" in vars(vae)
        if sizes and not square:
            sizes = sizes | {key.replace("height", "width"): value for key, value in sizes.items()}
        pipe.enable_vae_tiling(**sizes)
        assert vae.use_tiling
        tiled = decode(vae, latents)
        assert tiled.shape == whole.shape, (sizes, pipe.acceleration.plan.items)
        assert not sizes or not torch.equal(tiled, whole), "nothing was tiled"
    pipe.disable_vae_tiling()
    assert tile_state(vae) == before
    assert torch.equal(decode(vae, latents), whole)


def test_unsound_sizes_of_the_class_are_moved() -> None:
    """Negative control: at its own 10-latent tiles, diffusers returns a picture of the wrong size."""
    vae = vaes.kl(sample_size=40)
    latents = torch.randn(1, 4, 20, 20)
    vae.enable_tiling()
    assert decode(vae, latents).shape[-1] != 80
    vae.disable_tiling()
    pipe = attach(flux_with(vae)).enable_vae_tiling()
    assert decode(vae, latents).shape[-1] == 80
    assert "tile_overlap_factor 0.25 -> 0.3" in pipe.acceleration.plan.item("vae.tiling").reason
    restore(pipe)
    assert vae.tile_overlap_factor == 0.25 and not vae.use_tiling


def test_a_class_that_diffusers_tiles_wrongly_is_refused() -> None:
    """C54. Negative control: with diffusers' own tiling the picture has the wrong size."""
    vae = vaes.hunyuan_refiner()
    pipe = attach(flux_with(vae))
    with pytest.raises(UnsupportedModelError, match=r"AutoencoderKLHunyuanImageRefiner.*wrong size"):
        pipe.enable_vae_tiling()
    assert not vae.use_tiling
    vae.enable_tiling(32, 32)
    latents = torch.randn(1, 4, 1, 20, 20)
    assert decode(vae, latents).shape[-1] != 80
    vae.disable_tiling()
    assert decode(vae, latents).shape[-1] == 80


def test_a_class_whose_encoder_raises_says_so() -> None:
    vae = vaes.hunyuan_image()
    pipe = attach(flux_with(vae)).enable_vae_tiling(tile_height=16)
    assert "to encode a picture larger than a tile raises" in pipe.acceleration.plan.item("vae.tiling").reason
    assert decode(vae, torch.randn(1, 4, 20, 20)).shape[-1] == 40
    with pytest.raises(ValueError, match="unpack"), torch.no_grad():
        vae.encode(torch.randn(1, 3, 40, 40))


def test_a_vae_without_tiling_is_named() -> None:
    pipe = attach(flux_with(vaes.asymmetric()))
    with pytest.raises(UnsupportedModelError, match=r"AsymmetricAutoencoderKL: it has no tiling"):
        pipe.enable_vae_tiling()
    assert plan(pipe, None, vae_tiling="blended").item("vae.tiling").status == "skipped"
    pipe.vae = vaes.asymmetric()
    pipe.vae.use_tiling = False  # as Cosmos and KVAEVideo: a switch with nothing behind it
    with pytest.raises(UnsupportedModelError, match="no effect"):
        pipe.enable_vae_tiling()


# ---- in a pipeline --------------------------------------------------------------------------------------


def test_it_is_diffusers_own_tiling_and_says_when_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    native = tiny.build("flux")
    plain = tiny.run(native, "flux", height=24, width=24, num_inference_steps=2)
    native.vae.enable_tiling()
    reference = tiny.run(native, "flux", height=24, width=24, num_inference_steps=2)
    assert not torch.equal(plain, reference)

    pipe = accelerate(tiny.build("flux"), None, vae_tiling="blended")
    item = pipe.acceleration.plan.item("vae.tiling")
    assert item.fidelity == "lossy" and "does nothing up to 16x16 px" in item.reason
    calls = []
    tiled_decode = type(pipe.vae).tiled_decode
    monkeypatch.setattr(type(pipe.vae), "tiled_decode", lambda *a, **k: calls.append(1) or tiled_decode(*a, **k))
    assert torch.equal(tiny.run(pipe, "flux", height=24, width=24, num_inference_steps=2), reference)
    assert len(calls) == 1
    assert pipe.acceleration.report.stats["vae.tiling"] == {"decodes": 1, "tiled": 1}
    assert not pipe.acceleration.report.notes

    tiny.run(pipe, "flux", height=16, width=16, num_inference_steps=2)
    assert len(calls) == 1
    assert pipe.acceleration.report.stats["vae.tiling"] == {"decodes": 1, "tiled": 0}
    [note] = pipe.acceleration.report.notes
    assert "16x16 px is not larger than a tile of 16x16 px" in note
    assert note in pipe.acceleration.plan.item("vae.tiling").reason

    tiny.run(pipe, "flux", height=16, width=16, num_inference_steps=2, output_type="latent")
    assert pipe.acceleration.report.stats["vae.tiling"]["decodes"] == 0 and not pipe.acceleration.report.notes


@pytest.mark.parametrize("family", ["flux", "wan", "sd3", "sdxl"])
def test_undo_keeps_the_users_own_tiling(family: str) -> None:
    pipe = tiny.build(family)
    vae = pipe.vae
    size = 8 if family != "wan" else 64
    for name in [n for n in vars(vae) if n.startswith("tile_sample_min")]:
        setattr(vae, name, size)
    vae.use_tiling = True
    tiny.run(pipe, family, num_inference_steps=1)
    before, state = fingerprint.snapshot_pipe(pipe), tile_state(vae)
    accelerate(pipe, None, vae_tiling="blended", vae_tiling_tile_height=2 * size)
    pipe.enable_vae_tiling(tile_height=4 * size).enable_vae_tiling()  # again and again
    tiny.run(pipe, family, num_inference_steps=1)
    restore(pipe)
    assert not {"decode", "encode"} & set(vars(vae))
    assert tile_state(vae) == state and vae.use_tiling
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_an_exception_leaves_no_watch_behind() -> None:
    pipe = accelerate(tiny.build("flux"), None, vae_tiling="blended")

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        tiny.run(pipe, "flux", callback_on_step_end=stop)
    assert pipe.vae.use_tiling
    restore(pipe)
    assert "decode" not in vars(pipe.vae) and not pipe.vae.use_tiling


def test_a_run_inside_a_run() -> None:
    """A call from a callback is a run of its own, with its own count, and takes nothing from the outer one."""
    pipe = accelerate(tiny.build("flux"), None, vae_tiling="blended")
    done: list[int] = []

    def again(inner: Any, step: int, *rest: Any) -> dict[str, Any]:
        if not done:
            done.append(step)
            tiny.run(inner, "flux", num_inference_steps=1)
        return {}

    tiny.run(pipe, "flux", num_inference_steps=2, callback_on_step_end=again)
    assert done and pipe.acceleration.report.stats["vae.tiling"]["decodes"] == 1


def test_a_replaced_vae_is_followed() -> None:
    pipe = accelerate(tiny.build("flux"), None, vae_tiling="blended", vae_tiling_tile_height=8)
    old, new = pipe.vae, tiny.build("flux", seed=1).vae
    pipe.vae = new
    tiny.run(pipe, "flux", height=24, width=24, num_inference_steps=1)
    assert new.use_tiling and new.tile_sample_min_size == 8 and not old.use_tiling and old.tile_sample_min_size == 16
    assert pipe.acceleration.report.stats["vae.tiling"]["tiled"] == 1
    new.__class__ = type("Strange", (type(new),), {"tiled_decode": property()})  # one that cannot be tiled
    pipe.vae = old
    old.__class__ = new.__class__
    tiny.run(pipe, "flux", num_inference_steps=1)
    assert any("stood down" in note and "Strange" in note for note in pipe.acceleration.report.notes)
    restore(pipe)
    assert not new.use_tiling and not old.use_tiling


def test_a_shared_vae_has_one_master() -> None:
    one, two = tiny.build("flux"), tiny.build("flux", seed=1)
    two.vae = one.vae
    accelerate(one, None, vae_tiling="blended")
    with pytest.raises(IncompatibleError, match="shared with a pipeline"):
        attach(two).enable_vae_tiling()
    assert plan(two, None, vae_tiling="blended").item("vae.tiling").status == "refused"
    restore(one)
    two.enable_vae_tiling(tile_height=8)
    restore(two)
    assert not two.vae.use_tiling and two.vae.tile_sample_min_size == 16


def test_a_pipeline_gone_without_restore() -> None:
    one, two = tiny.build("flux"), tiny.build("flux", seed=1)
    two.vae = vae = one.vae
    accelerate(one, None, vae_tiling="blended", vae_tiling_tile_height=8)
    del one
    gc.collect()
    attach(two).enable_vae_tiling()
    assert vae.tile_sample_min_size == 16, "the VAE's own size, not what the lost pipeline left"
    restore(two)
    assert not vae.use_tiling


# ---- what is asked for ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "meant"),
    [
        ({"tile_height": 0}, "tile_height=0"),
        ({"tile_height": 12.0}, "whole number"),
        ({"tile_hight": 8}, "tile_height"),
        ({"tile_height": 8, "tile_width": 16}, "square"),
        ({"stride_height": 20}, "more than the tile"),
    ],
)
def test_bad_sizes(sizes: dict[str, Any], meant: str) -> None:
    pipe = attach(tiny.build("flux"))
    state = tile_state(pipe.vae)
    with pytest.raises(InvalidOptionError, match=meant):
        pipe.enable_vae_tiling(**sizes)
    assert tile_state(pipe.vae) == state


def test_budgets_keep_it_off() -> None:
    pipe = tiny.build("flux")
    for budget in (Budget(fidelity="equivalent"), Budget(min_psnr_db=30)):
        assert plan(pipe, None, budget=budget, vae_tiling="blended").item("vae.tiling").status == "skipped"


def test_no_vae() -> None:
    pipe = tiny.build("flux")
    pipe.vae = None
    assert "no vae" in plan(pipe, None, vae_tiling="blended").item("vae.tiling").reason
    with pytest.raises(DiffaccelError, match="no vae"):
        attach(pipe).enable_vae_tiling()
