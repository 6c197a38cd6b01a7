"""The training script, with a tiny model and a few steps: it runs, it resumes, it exports."""

import pytest
import torch

from diffaccel.testbed import bundle, task_image
from diffaccel.testbed.build import Size, pipeline
from diffaccel.testbed.train_dit import Latents, noise_levels, train_dit
from diffaccel.testbed.train_vae import train_vae
from diffaccel.testbed.training import Average, Clock, learning_rate

TINY = Size(heads=2, head_dim=32, double_blocks=1, single_blocks=1, text_layers=1, vae_channels=(8, 8, 8))


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_schedule_follows_the_clock():
    clock = Clock(budget_s=100.0, elapsed_s=50.0)
    assert 0.5 <= clock.fraction < 0.51
    assert learning_rate(1.0, 0, 0.0, warmup_steps=10) == pytest.approx(0.1)
    assert learning_rate(1.0, 100, 0.4, warmup_steps=10, hold=0.4) == 1.0
    assert learning_rate(1.0, 100, 0.7, warmup_steps=10, hold=0.4) == pytest.approx(0.5)
    assert learning_rate(1.0, 100, 1.0, warmup_steps=10) == 0.0


def test_the_average_swaps_back_and_forth():
    weight = torch.nn.Parameter(torch.zeros(3))
    average = Average([weight], decay=0.5)
    weight.data.fill_(1.0)
    average.update()
    live = weight.clone()
    average.swap()
    assert 0.0 < weight[0] < 1.0
    average.swap()
    assert torch.equal(weight, live)


def test_noise_levels_cover_the_scale_and_shift_with_mu():
    low, high = (noise_levels(4000, mu, 0.5, torch.Generator().manual_seed(0)) for mu in (0.0, 1.15))
    assert low.min() > 0 and high.max() == 1.0
    assert low.median() < high.median()


def test_both_trainings_resume_where_they_stopped(tmp_path):
    pipe = pipeline(TINY, seed=1)
    first = train_vae(pipe.vae, task_image.VAE, 60, tmp_path / "vae.pt", resume=False, max_steps=2)
    spent_s = torch.load(tmp_path / "vae.pt", weights_only=True)["elapsed_s"]
    second = train_vae(pipe.vae, task_image.VAE, 60, tmp_path / "vae.pt", resume=True, max_steps=1)
    assert second["images"] > first["images"] and second["seconds"] > spent_s > 0

    latents = Latents(pipe, task_image.DENOISER, {(64, 64): 32, (96, 64): 16})
    assert latents.values[96, 64].shape == (16, 12 * 8, 4 * TINY.latent_channels)

    def run(name, resume, steps):
        pipe = pipeline(TINY, seed=1)
        task = task_image.DENOISER
        result = train_dit(pipe, task, latents, 60, tmp_path / name, resume, max_steps=steps, batch_scale=0.1)
        return result, torch.load(tmp_path / name, weights_only=True)

    whole, whole_state = run("whole.pt", False, 3)
    run("parts.pt", False, 2)
    parts, parts_state = run("parts.pt", True, 1)
    assert parts["steps"] == whole["steps"] == 3 and parts["images"] == whole["images"]
    for name, weights in whole_state["modules"].items():  # equal but for the clock in the learning rate
        for key, value in weights.items():
            assert torch.allclose(value, parts_state["modules"][name][key], atol=1e-5), (name, key)


def test_a_tiny_pipeline_exports_as_half_and_replaces_what_was_there(tmp_path):
    folder = tmp_path / "weights" / "image"
    folder.mkdir(parents=True)
    (folder / "left.over").write_text("old")
    bundle.export(pipeline(TINY, seed=1), folder)
    assert not (folder / "left.over").exists()
    assert {path.name for path in folder.parent.iterdir()} == {"image"}
    from safetensors.torch import load_file

    for path in folder.rglob("*.safetensors"):
        assert all(value.dtype is torch.float16 for value in load_file(path).values()), path
