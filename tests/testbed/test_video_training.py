"""The video training, with a tiny model and a few steps: it runs, it resumes, it exports."""

import pytest
import torch

from diffaccel.testbed import build_video, bundle, evaluate, task_video
from diffaccel.testbed.train_dit import Latents, train_dit
from diffaccel.testbed.train_vae import train_vae

TINY = build_video.VideoSize(heads=2, blocks=6, ffn_dim=64, text_layers=1, latent_channels=8, vae_channels=8)


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_cuttings_show_the_shape_and_are_fixed_by_their_seeds():
    one, clips = task_video.cuttings("train", (5, 32, 32), range(6, 12))
    two, _ = task_video.cuttings("train", (5, 32, 32), range(6, 12))
    assert one.shape == (6, 3, 5, 32, 32) and len(clips) == 6
    assert torch.equal(one, two)
    assert (one.amax(dim=(1, 2, 3, 4)) - one.amin(dim=(1, 2, 3, 4)) > 0.2).all()


def test_a_view_of_the_autoencoder_shares_weights_but_not_its_encode_state():
    vae = build_video.vae(TINY).requires_grad_(False)
    x, _ = task_video.clips("train", (9, 48, 48), range(2))
    one, two = task_video.own_state(vae), task_video.own_state(vae)
    assert one.encoder is two.encoder is vae.encoder
    latents = [model.encode(x).latent_dist.mode() for model in (one, two, vae)]
    assert one._enc_feat_map is not two._enc_feat_map
    assert torch.equal(latents[0], latents[1]) and torch.equal(latents[0], latents[2])


@pytest.mark.slow  # the loops are those of the image testbed, whose test is quicker
def test_both_trainings_resume_where_they_stopped(tmp_path):
    pipe = build_video.pipeline(TINY, seed=1)
    first = train_vae(pipe.vae, task_video.VAE, 60, tmp_path / "vae.pt", resume=False, max_steps=2)
    second = train_vae(pipe.vae, task_video.VAE, 60, tmp_path / "vae.pt", resume=True, max_steps=1)
    assert second["images"] > first["images"]
    latents = Latents(pipe, task_video.DENOISER, {(9, 48, 48): 32, (17, 64, 64): 8})
    assert latents.values[17, 64, 64].shape == (8, TINY.latent_channels, 5, 8, 8)
    flat = latents.values[9, 48, 48].float().transpose(0, 1).flatten(1)
    assert flat.mean(1).abs().max() < 0.5 and 0.5 < flat.std() < 1.5

    def run(name, resume, steps):
        pipe = build_video.pipeline(TINY, seed=1)
        path = tmp_path / name
        result = train_dit(pipe, task_video.DENOISER, latents, 60, path, resume, max_steps=steps, batch_scale=0.1)
        return result, torch.load(path, weights_only=True)

    whole, whole_state = run("whole.pt", False, 3)
    run("parts.pt", False, 2)
    parts, parts_state = run("parts.pt", True, 1)
    assert parts["steps"] == whole["steps"] == 3 and parts["images"] == whole["images"]
    for name, weights in whole_state["modules"].items():  # equal but for the clock in the learning rate
        for key, value in weights.items():
            assert torch.allclose(value, parts_state["modules"][name][key], atol=1e-5), (name, key)


def test_the_denoiser_starts_as_identity_but_for_the_places(tmp_path):
    pipe = build_video.pipeline(TINY, seed=1)
    task_video.prepare(pipe, 0)
    block = pipe.transformer.blocks[0]
    assert not pipe.transformer.proj_out.weight.any() and not block.scale_shift_table.any()
    assert block.attn1.to_q.bias.std() > 0.5
    hidden = torch.randn(1, 6, 64)
    rope = pipe.transformer.rope(torch.zeros(1, 8, 1, 2, 3))
    with torch.no_grad():
        assert torch.equal(block(hidden, torch.randn(1, 4, 64), torch.zeros(1, 6, 64), rope), hidden)


def test_a_tiny_pipeline_exports_and_is_judged(tmp_path):
    bundle.export(build_video.pipeline(TINY, seed=1), tmp_path / "video")
    pipe = bundle.read("video", tmp_path / "video", torch.float32)
    result = evaluate.quick(pipe, "video", 1)
    assert set(result) == {"score", "shape", "colour", "size", "place", "ground", "motion", "psnr_28_112_db"}
