"""The architecture with random weights: an ordinary FluxPipeline at every size, its tokenizers, its seeds."""

import subprocess
import sys

import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, T5EncoderModel

from diffaccel import testbed
from diffaccel.testbed import world
from diffaccel.testbed.tokenizers import TEXT_LENGTH, clip_tokenizer, t5_tokenizer


@pytest.fixture(scope="module")
def pipe():
    pipe = testbed.load("image", random=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, **changes):
    arguments = testbed.call_kwargs("image") | {"num_inference_steps": 2, "output_type": "pt"} | changes
    return pipe(testbed.prompts(n=1), generator=torch.Generator().manual_seed(0), **arguments).images


def test_importing_the_testbed_imports_neither_torch_nor_diffusers():
    code = "import sys, diffaccel.testbed as t; t.prompts(n=1); print({'torch', 'diffusers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_it_is_made_of_the_ordinary_classes(pipe):
    assert type(pipe) is FluxPipeline
    kinds = {
        "vae": AutoencoderKL,
        "transformer": FluxTransformer2DModel,
        "text_encoder": CLIPTextModel,
        "text_encoder_2": T5EncoderModel,
    }
    for name, kind in kinds.items():
        assert type(getattr(pipe, name)) is kind
    assert len(pipe.transformer.transformer_blocks) >= 2
    assert len(pipe.transformer.single_transformer_blocks) >= 6


@pytest.mark.parametrize("height, width", [(64, 64), (96, 96), (128, 128), (96, 64), (64, 96)])
def test_it_draws_at_every_size(pipe, height, width):
    images = draw(pipe, height=height, width=width)
    assert images.shape == (1, 3, height, width)
    assert images.isfinite().all() and images.std() > 0.01


def test_call_kwargs_leave_the_step_count_to_the_caller():
    kwargs = testbed.call_kwargs("image")
    assert set(kwargs) == {"height", "width", "max_sequence_length", "guidance_scale"}
    assert kwargs["max_sequence_length"] == 32


def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone(pipe):
    before = torch.get_rng_state()
    again, other = testbed.load("image", random=True), testbed.load("image", random=True, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    one, two, three = (p.transformer.state_dict() for p in (pipe, again, other))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(one["x_embedder.weight"], three["x_embedder.weight"])


def test_every_block_matters(pipe):
    """Leaving out any one block changes the output: no gate or projection is left at zero."""
    reference = draw(pipe, output_type="latent")
    blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
    for block in blocks:
        handle = block.register_forward_hook(
            lambda module, args, kwargs, output: (kwargs["encoder_hidden_states"], kwargs["hidden_states"]),
            with_kwargs=True,
        )
        try:
            changed = draw(pipe, output_type="latent")
        finally:
            handle.remove()
        assert (changed - reference).norm() > 1e-3 * reference.norm()


def test_the_prompt_and_the_guidance_and_the_negative_prompt_matter(pipe):
    reference = draw(pipe, output_type="latent")
    assert not torch.equal(reference, draw(pipe, output_type="latent", guidance_scale=1.0))
    assert not torch.equal(reference, draw(pipe, output_type="latent", negative_prompt="", true_cfg_scale=2.0))


def test_a_dtype_can_be_chosen():
    pipe = testbed.load("image", random=True, torch_dtype=torch.bfloat16)
    assert pipe.transformer.dtype is torch.bfloat16 and pipe.vae.dtype is torch.bfloat16


def test_an_unknown_kind_is_refused_by_name():
    from diffaccel.errors import InvalidOptionError

    for call in (testbed.load, testbed.call_kwargs):
        with pytest.raises(InvalidOptionError, match="image, video"):
            call("sound")
    with pytest.raises(InvalidOptionError, match="image, video"):
        testbed.prompts(kind="sound")


def test_tokenizers_know_every_word_and_fit_every_caption():
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    for split in ("train", "test"):
        for scene in world.combinations(split)[::7]:
            for template in range(world.TEMPLATE_COUNT):
                caption = scene.caption(template)
                words = len(caption.replace(",", " ,").split())
                ids = t5(caption).input_ids
                assert t5.unk_token_id not in ids and len(ids) == words + 1 <= TEXT_LENGTH
                assert len(clip(caption).input_ids) == words + 2 <= TEXT_LENGTH
    assert clip.eos_token_id == len(clip) - 1  # the pooled embedding is read at the highest id
    assert t5.unk_token_id not in t5("Some other words: 7?").input_ids


def test_a_saved_pipeline_loads_as_it_was(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    back = FluxPipeline.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True)
    back.set_progress_bar_config(disable=True)
    assert torch.equal(draw(pipe, output_type="latent"), draw(back, output_type="latent"))
    for name in ("tokenizer", "tokenizer_2"):
        caption = testbed.prompts(n=1)[0]
        assert getattr(back, name)(caption).input_ids == getattr(pipe, name)(caption).input_ids
