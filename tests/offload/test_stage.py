"""Stage offload on tiny pipelines, the disk as the store and the CPU as the device: everything but the GPU is real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import accelerate, restore
from diffaccel.offload.stage.attached import StageRecord
from diffaccel.offload.stage.residency import Group
from tests import tiny
from tests.fingerprint import assert_same, snapshot_pipe
from tests.invariants.levers import Stop, at_step, plain, raise_at
from tests.models.families import table
from tests.offload.stages import FAMILIES, ITEM, inside, linux, staged, stats, watch, weights

# ---- the same picture, in turns ------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("family", FAMILIES)
def test_bit_equal_and_in_turns(family: str) -> None:
    """Two runs equal the plain pipeline; nobody is in beside the stage at work; all are away in between."""
    pipe = staged(family)
    assert inside(pipe) == set(), "away as soon as it is on"
    seen = watch(pipe)
    assert torch.equal(tiny.run(pipe, family), plain(family))
    encoders = {name for name, _ in tiny.component_modules(pipe) if name.startswith("text_encoder")}
    assert {name for name, _ in seen} == {name for name, _ in tiny.component_modules(pipe)}, "all were called"
    for name, there in seen:
        assert there <= (encoders if name in encoders else {name}), (name, there)
    assert inside(pipe) == set()
    assert torch.equal(tiny.run(pipe, family), plain(family))
    assert restore(pipe) is pipe and len(inside(pipe)) == len(list(tiny.component_modules(pipe)))
    assert torch.equal(tiny.run(pipe, family), plain(family))


def test_the_vae_comes_for_encode_too() -> None:
    """Found by its own call: in image-to-image it is brought in twice, in text-to-image once."""
    pipe = staged("flux_img2img")
    tiny.run(pipe, "flux_img2img")
    twice = stats(pipe)
    vae = twice["decode_in_bytes"]
    assert vae > 0
    text = staged("flux")
    tiny.run(text, "flux")
    assert twice["encode_in_bytes"] - stats(text)["encode_in_bytes"] == vae == stats(text)["decode_in_bytes"]


@pytest.mark.parametrize("family", ["flux", "wan22"])
def test_stats_say_what_moved(family: str) -> None:
    """Bytes in are the weights (with the gaps of the files), each once; nothing is written; peaks are the largest."""
    pipe = tiny.build(family)
    sizes = {name: weights(module) for name, module in tiny.component_modules(pipe)}
    accelerate(pipe, None, offload="stage", strict=True)
    tiny.run(pipe, family)
    found = stats(pipe)
    experts = [size for name, size in sizes.items() if name.startswith("transformer")]
    encoders = sum(size for name, size in sizes.items() if name.startswith("text_encoder"))
    assert found["denoise_in_bytes"] == pytest.approx(sum(experts), rel=0.05)
    assert found["denoise_peak_bytes"] == pytest.approx(max(experts), rel=0.01)
    assert found["encode_peak_bytes"] == pytest.approx(encoders, rel=0.01)
    assert found["decode_in_bytes"] == pytest.approx(sizes["vae"], rel=0.15)
    assert all(found[f"{moment}_written_bytes"] == 0 for moment in ("encode", "denoise", "decode"))
    assert all(found[f"{moment}_wait_s"] > 0 for moment in ("encode", "denoise", "decode"))


@linux
def test_encoders_one_at_a_time() -> None:
    pipe = staged("sd3", in_turn=True)
    seen = watch(pipe)
    assert torch.equal(tiny.run(pipe, "sd3"), plain("sd3"))
    assert all(there == {name} for name, there in seen), seen


@linux
def test_kept_components_stay() -> None:
    pipe = staged("flux", keep=("vae", "text_encoder"))
    assert inside(pipe) == {"vae", "text_encoder"}
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))
    assert inside(pipe) == {"vae", "text_encoder"}


@pytest.mark.parametrize("name", ["flux_controlnet", "wan_i2v"])
def test_other_components(name: str) -> None:
    """A ControlNet stays in with the denoiser; an image encoder and the VAE take turns before it."""
    before = table.run(table.build(name), name)
    pipe = accelerate(table.build(name), None, strict=True, offload="stage")
    assert all(map(torch.equal, before, table.run(pipe, name)))
    sizes = {key: weights(module) for key, module in tiny.component_modules(pipe)}
    denoise = sizes["transformer"] + sizes.get("controlnet", 0)
    assert stats(pipe)["denoise_in_bytes"] == pytest.approx(denoise, rel=0.05), "each once, not in every step"


def test_who_works_between_denoiser_calls_is_found() -> None:
    """Called before and after: no. Called between two calls of one loop: yes. In another loop: no."""

    class At:
        loop = 0

    run: Any = At()
    denoiser, other = Group(("transformer",), (), "denoise", True), Group(("adapter",), (), "encode")
    seen = StageRecord()
    assert [seen.note(group, run) for group in (other, denoiser, denoiser)] == [[], [], []]
    assert seen.note(other, run) == [] and seen.moment == "decode"
    assert seen.note(denoiser, run) == [other] and seen.moment == "denoise"
    run.loop = 1
    assert seen.note(other, run) == [] and seen.note(denoiser, run) == []


# ---- runs that go wrong, runs in runs ------------------------------------------------------------------


@linux
@pytest.mark.parametrize("error", [Stop("stop"), KeyboardInterrupt()])
def test_a_run_that_fails_leaves_nothing(error: BaseException) -> None:
    pipe = staged("wan22")
    with pytest.raises(type(error)):
        tiny.run(pipe, "wan22", callback_on_step_end=raise_at(2, error))
    assert inside(pipe) == set()
    assert torch.equal(tiny.run(pipe, "wan22"), plain("wan22"))


def test_other_sizes_and_prompts_between() -> None:
    pipe = staged("wan")
    for size in (
        {},
        {"height": 32, "width": 48},
        {},
        {"prompt": list(tiny.PROMPTS[:2]), "negative_prompt": ["a", "b"]},
    ):
        assert torch.equal(tiny.run(pipe, "wan", **size), plain("wan", **size))


def test_a_run_inside_a_run() -> None:
    """The text encoder comes while the denoiser waits; both pictures are right."""
    pipe = staged("flux")
    inner: list[torch.Tensor] = []

    def nested(_: Any) -> None:
        inner.append(tiny.run(pipe, "flux", prompt=tiny.PROMPTS[1], seed=3))

    outer = tiny.run(pipe, "flux", callback_on_step_end=at_step(2, nested))
    assert torch.equal(outer, plain("flux"))
    assert torch.equal(inner[0], plain("flux", prompt=tiny.PROMPTS[1], seed=3))


def test_snapshot_and_resume() -> None:
    pipe = staged("flux")
    taken: list[Any] = []

    def pause(pipe_: Any) -> None:
        taken.append(pipe.acceleration.snapshot())
        raise Stop

    with pytest.raises(Stop):
        tiny.run(pipe, "flux", callback_on_step_end=at_step(2, pause))
    tiny.run(pipe, "flux", prompt=tiny.PROMPTS[2])
    assert torch.equal(tiny.output(pipe.acceleration.resume(taken[0])), plain("flux"))


@linux
def test_components_called_by_hand() -> None:
    """Outside of a run a component comes for the call and leaves again; its submodules bring it in as well."""
    pipe, twin = staged("flux"), tiny.build("flux")
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(pipe.vae.decode(latents)[0], twin.vae.decode(latents)[0])
        assert inside(pipe) == set()
        assert torch.equal(pipe.vae.decoder(latents), twin.vae.decoder(latents))
    assert inside(pipe) == {"vae"}, "who calls a submodule does not say when it is over"
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux")) and inside(pipe) == set()


# ---- on and off ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["flux", "wan22"])
def test_undo_leaves_no_trace(family: str, tmp_path: Path) -> None:
    pipe = tiny.build(family)
    tiny.run(pipe, family)
    before = snapshot_pipe(pipe)
    parameters = [id(p) for _, module in tiny.component_modules(pipe) for p in module.parameters()]
    accelerate(pipe, None, strict=True, offload="stage", offload_folder=str(tmp_path))
    assert any(tmp_path.iterdir())
    tiny.run(pipe, family)
    restore(pipe)
    assert not any(tmp_path.iterdir()), "the files are gone"
    assert_same(before, snapshot_pipe(pipe))
    assert parameters == [id(p) for _, module in tiny.component_modules(pipe) for p in module.parameters()]
    assert torch.equal(tiny.run(pipe, family), plain(family))


def test_twice_is_once(tmp_path: Path) -> None:
    """C32: the same again, other settings, another lever beside, off and on: each time a clean swap."""
    pipe = staged("flux", folder=str(tmp_path))
    for options in ({"offload": "stage"}, {"offload": "stage", "offload_keep": ("vae",)}, {"attention": "native"}):
        accelerate(pipe, None, strict=True, **options)
        assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))
    assert not any(tmp_path.iterdir())
    pipe.enable_stage_offload(folder=str(tmp_path))
    [folder] = tmp_path.iterdir()
    pipe.enable_first_block_cache(threshold=0.0, min_steps=0)
    assert [folder] == list(tmp_path.iterdir()), "another lever does not move weights anew"
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))
    pipe.disable_offload()
    assert not any(tmp_path.iterdir()) and torch.equal(tiny.run(pipe, "flux"), plain("flux"))


COMPANIONS: dict[str, dict[str, Any]] = {
    "cache": {"cache": "first_block", "cache_threshold": 0.3, "cache_min_steps": 0, "cache_last_steps": 0},
    "compile": {"compile": True, "compile_backend": "eager"},
    "tiles": {"vae_tiling": "blended"},
    "int8": {"quantization": "int8"},
    "guidance": {"guidance": "reuse", "guidance_min_steps": 0, "guidance_last_steps": 0},
}


@pytest.mark.parametrize("companion", COMPANIONS)
def test_beside_other_levers(companion: str) -> None:
    """The picture is that of the other lever alone, twice; a skipped call brings nothing in."""
    family = "wan" if companion == "guidance" else "flux"
    alone = accelerate(tiny.build(family), None, **COMPANIONS[companion])
    both = accelerate(tiny.build(family), None, offload="stage", **COMPANIONS[companion])
    assert {ITEM, *alone.acceleration.plan.enabled} == set(both.acceleration.plan.enabled)
    for _ in range(2):
        assert torch.equal(tiny.run(both, family), tiny.run(alone, family))
        assert both.acceleration.report.strip() == alone.acceleration.report.strip()
    restore(both)
    assert torch.equal(tiny.run(both, family), plain(family))
