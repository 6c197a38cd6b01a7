"""The scenes architecture with random weights: an ordinary StableDiffusion3Pipeline, its guidance, its shifts."""

import dataclasses
import math

import pytest
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection

from diffaccel import testbed
from diffaccel.errors import InvalidOptionError
from diffaccel.testbed import build, build_scenes, build_video, evaluate, task_scenes
from diffaccel.testbed.train_dit import Latents, train_dit
from diffaccel.testbed.train_vae import train_vae

TINY = build_scenes.ScenesSize(
    heads=2, blocks=2, text_layers=1, text_dim=32, latent_channels=4, vae_channels=(8, 8, 8)
)


@pytest.fixture(scope="module")
def pipe():
    pipe = testbed.load("scenes", random=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, **changes):
    arguments = testbed.call_kwargs("scenes") | {"num_inference_steps": 2, "output_type": "latent"} | changes
    return pipe(testbed.prompts(n=1, kind="scenes"), generator=torch.Generator().manual_seed(0), **arguments).images


def sigmas(pipe, steps=4, **changes):
    draw(pipe, num_inference_steps=steps, **changes)
    return pipe.scheduler.sigmas[:-1].tolist()


def test_it_is_made_of_the_ordinary_classes_and_has_no_third_encoder(pipe):
    assert type(pipe) is StableDiffusion3Pipeline
    kinds = {
        "vae": AutoencoderKL,
        "transformer": SD3Transformer2DModel,
        "text_encoder": CLIPTextModelWithProjection,
        "text_encoder_2": CLIPTextModelWithProjection,
    }
    for name, kind in kinds.items():
        assert type(getattr(pipe, name)) is kind
    assert pipe.text_encoder_3 is None and pipe.tokenizer_3 is None
    assert len(pipe.transformer.transformer_blocks) == 8
    assert set(testbed.call_kwargs("scenes")) == {"height", "width", "guidance_scale", "max_sequence_length"}


def test_it_draws_at_both_sizes_and_guidance_and_prompts_matter(pipe):
    for side in (64, 128):
        images = draw(pipe, height=side, width=side, output_type="pt", num_inference_steps=1)
        assert images.shape == (1, 3, side, side) and images.isfinite().all() and images.std() > 0.01
    reference = draw(pipe)
    assert not torch.equal(reference, draw(pipe, guidance_scale=1.0))
    assert not torch.equal(reference, draw(pipe, negative_prompt="solid red ring top left, plain black background"))


def test_every_block_matters(pipe):
    reference = draw(pipe)
    for index in range(len(pipe.transformer.transformer_blocks)):
        block = pipe.transformer.transformer_blocks[index]
        handle = block.register_forward_hook(
            lambda module, args, kwargs, output: (
                None if output[0] is None else kwargs["encoder_hidden_states"],
                kwargs["hidden_states"],
            ),
            with_kwargs=True,
        )
        try:
            changed = draw(pipe)
        finally:
            handle.remove()
        assert (changed - reference).norm() > 1e-3 * reference.norm()


def test_random_weights_follow_the_seed_and_a_dtype_can_be_chosen(pipe):
    again = testbed.load("scenes", random=True, torch_dtype=torch.bfloat16)
    other = testbed.load("scenes", random=True, seed=1)
    one, two, three = (p.transformer.pos_embed.proj.weight for p in (pipe, again, other))
    assert torch.equal(one.bfloat16(), two) and not torch.equal(one, three)
    assert {m.dtype for m in (again.transformer, again.vae, again.text_encoder_2)} == {torch.bfloat16}


def test_shifts_are_those_of_the_formula(pipe):
    """A fixed shift s maps the unshifted level t to s t / (1 + (s - 1) t); dynamic has s = exp(0.5) at 64 tokens."""
    usual = pipe.scheduler
    try:
        plain = sigmas(testbed.with_shift(pipe, 1.0))
        for shift, scale in [(3, 3.0), ("dynamic", math.exp(0.5))]:
            wanted = [scale * t / (1 + (scale - 1) * t) for t in plain]
            got = sigmas(testbed.with_shift(pipe, shift))
            # a fixed shift moves the ends of diffusers' range too, so its inner levels are equally spaced elsewhere
            assert got == pytest.approx(wanted, abs=0.02 if shift == 3 else 0.001)
        large = sigmas(pipe, height=128, width=128)
        assert large == pytest.approx([math.exp(1.15) * t / (1 + (math.exp(1.15) - 1) * t) for t in plain], abs=0.001)
        assert (
            type(pipe.scheduler) is type(usual) and usual.config.shift == 3.0 and not usual.config.use_dynamic_shifting
        )
    finally:
        pipe.scheduler = usual


def test_the_other_kinds_take_a_shift_and_a_wrong_one_is_refused():
    flux = build.pipeline(build.Size(double_blocks=1, single_blocks=1))
    assert testbed.with_shift(flux, 1.0) is flux
    assert flux.scheduler.config.shift == 1.0 and not flux.scheduler.config.use_dynamic_shifting
    assert testbed.with_shift(flux, "dynamic").scheduler.config.use_dynamic_shifting
    wan = testbed.with_shift(build_video.pipeline(build_video.VideoSize(blocks=1)), "dynamic")
    assert not wan.scheduler.config.use_dynamic_shifting  # WanPipeline tells its scheduler no exponent
    assert wan.scheduler.config.shift == pytest.approx(math.exp(0.5 + 0.65 * 128 / 192))
    for wrong in (0, -1.0, "static", None, math.inf):
        with pytest.raises(InvalidOptionError, match="shift"):
            testbed.with_shift(flux, wrong)


def test_its_training_runs_resumes_and_exports(tmp_path, monkeypatch):
    from diffaccel.testbed import bundle

    threads = torch.get_num_threads()
    try:
        pipe = build_scenes.pipeline(TINY, seed=1)
        vae = dataclasses.replace(task_scenes.VAE, batches=(((64, 64), 2),))
        train_vae(pipe.vae, vae, 60, tmp_path / "vae.pt", False, max_steps=1, threads=1)
        latents = Latents(pipe, task_scenes.DENOISER, {(64, 64): 8, (128, 128): 4}, threads=1)
        assert latents.values[128, 128].shape == (4, 4, 32, 32)
        for resume in (False, True):
            result = train_dit(
                pipe,
                task_scenes.DENOISER,
                latents,
                60,
                tmp_path / "dit.pt",
                resume,
                max_steps=1,
                batch_scale=0.1,
                threads=1,
            )
        assert result["steps"] == 2
    finally:
        torch.set_num_threads(threads)
    bundle.export(pipe, tmp_path / "scenes")
    monkeypatch.setenv(bundle.ELSEWHERE, str(tmp_path))
    loaded = testbed.load("scenes")
    assert len(loaded.transformer.transformer_blocks) == 2  # the environment's, not the bundled ones
    assert evaluate.kind_of(loaded) == "scenes"
    assert evaluate.generate(loaded, testbed.prompts(n=1, kind="scenes"), (64, 64), steps=1).shape == (1, 64, 64, 3)
