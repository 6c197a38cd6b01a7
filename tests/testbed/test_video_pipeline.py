"""The video architecture with random weights: an ordinary WanPipeline at every size and length, and its seeds."""

import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from transformers import UMT5EncoderModel

from diffaccel import testbed
from diffaccel.testbed import motion
from diffaccel.testbed.tokenizers import TEXT_LENGTH, t5_tokenizer, umt5_tokenizer


@pytest.fixture(scope="module")
def pipe():
    pipe = testbed.load("video", random=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def film(pipe, **changes):
    arguments = testbed.call_kwargs("video") | {"num_inference_steps": 2, "height": 48, "width": 48, "num_frames": 5}
    arguments |= {"output_type": "pt", "prompt": testbed.prompts(n=1, kind="video")} | changes
    return pipe(generator=torch.Generator().manual_seed(0), **arguments).frames


def test_it_is_made_of_the_ordinary_classes(pipe):
    assert type(pipe) is WanPipeline
    assert type(pipe.vae) is AutoencoderKLWan
    assert type(pipe.transformer) is WanTransformer3DModel
    assert type(pipe.text_encoder) is UMT5EncoderModel
    assert len(pipe.transformer.blocks) >= 6
    for name in ("vae", "transformer", "text_encoder"):
        assert not any(p.requires_grad for p in getattr(pipe, name).parameters())


@pytest.mark.parametrize("frames, height, width", [(9, 48, 48), (9, 64, 64), (17, 48, 48), (17, 64, 64), (5, 48, 64)])
def test_it_films_at_every_size_and_length(pipe, frames, height, width):
    clips = film(pipe, num_frames=frames, height=height, width=width)
    assert clips.shape == (1, frames, 3, height, width)
    assert clips.isfinite().all() and clips.std() > 0.01


def test_call_kwargs_leave_the_step_count_to_the_caller():
    kwargs = testbed.call_kwargs("video")
    assert set(kwargs) == {"height", "width", "num_frames", "max_sequence_length", "guidance_scale"}
    assert kwargs["num_frames"] % 4 == 1 and kwargs["guidance_scale"] > 1


def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone(pipe):
    before = torch.get_rng_state()
    again, other = testbed.load("video", random=True), testbed.load("video", random=True, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    for name in ("transformer", "vae", "text_encoder"):
        one, two = (getattr(p, name).state_dict() for p in (pipe, again))
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(pipe.transformer.proj_out.weight, other.transformer.proj_out.weight)


def test_every_block_matters(pipe):
    """Leaving out any one block changes the output: no gate or projection is left at zero."""
    reference = film(pipe, output_type="latent")
    for block in pipe.transformer.blocks:
        handle = block.register_forward_hook(lambda module, args, output: args[0])
        try:
            changed = film(pipe, output_type="latent")
        finally:
            handle.remove()
        assert (changed - reference).norm() > 1e-3 * reference.norm()


def test_the_prompt_the_guidance_and_the_negative_prompt_matter(pipe):
    reference = film(pipe, output_type="latent")
    other = testbed.prompts(n=2, kind="video")[1:]
    assert not torch.equal(reference, film(pipe, output_type="latent", prompt=other))
    assert not torch.equal(reference, film(pipe, output_type="latent", guidance_scale=1.0))
    assert not torch.equal(reference, film(pipe, output_type="latent", negative_prompt=other))


def test_the_tokenizer_knows_every_word_and_fits_every_caption():
    tokenizer = umt5_tokenizer()
    for split in ("train", "test"):
        for clip in motion.combinations(split)[::37]:
            for template in range(motion.TEMPLATE_COUNT):
                caption = clip.caption(template)
                ids = tokenizer(caption).input_ids
                assert tokenizer.unk_token_id not in ids
                assert len(ids) == len(caption.replace(",", " ,").split()) + 1 <= TEXT_LENGTH


def test_the_image_tokenizer_is_as_it_was():
    image, video = t5_tokenizer().get_vocab(), umt5_tokenizer().get_vocab()
    assert {piece for piece in video if piece not in image} == {"▁moving", "▁standing", "▁still", "▁up", "▁down"}
    assert len(image) == 133


def test_a_dtype_can_be_chosen():
    pipe = testbed.load("video", random=True, torch_dtype=torch.bfloat16)
    assert pipe.transformer.dtype is torch.bfloat16 and pipe.vae.dtype is torch.bfloat16


def test_a_saved_pipeline_loads_as_it_was(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    back = WanPipeline.from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True)
    back.set_progress_bar_config(disable=True)
    assert torch.allclose(film(pipe), film(back), atol=1e-4)  # memory-mapped weights may be added in another order
