"""The bundled weights: small, loadable offline, reproducible, and as good as the aims say."""

import json

import pytest
import torch

from diffaccel import testbed
from diffaccel.testbed import bundle, evaluate

FOLDER = bundle.WEIGHTS / "image"

if not (FOLDER / "model_index.json").exists():
    pytest.skip("no trained weights in the package yet", allow_module_level=True)


@pytest.fixture(scope="module")
def pipe():
    return testbed.load("image")


def test_it_is_a_small_folder_in_diffusers_format():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 15e6
    assert json.loads((FOLDER / "model_index.json").read_text())["_class_name"] == "FluxPipeline"
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".ckpt")]


def test_no_machine_path_is_bundled():
    for path in FOLDER.rglob("*.json"):
        text = path.read_text()
        assert "/tmp" not in text and "/home" not in text and "/work" not in text, path


def test_two_loads_draw_the_same_picture(pipe):
    one, two = (evaluate.generate(p, testbed.prompts(n=1), (64, 64), steps=3) for p in (pipe, testbed.load("image")))
    assert (one == two).all()


def test_nothing_requires_gradients_and_all_is_float32(pipe):
    for name in ("vae", "transformer", "text_encoder", "text_encoder_2"):
        module = getattr(pipe, name)
        assert not module.training
        for parameter in module.parameters():
            assert not parameter.requires_grad and parameter.dtype is torch.float32


@pytest.mark.parametrize("prompts", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_it_draws_what_the_prompt_says(pipe, prompts):
    wanted = testbed.prompts(n=prompts)
    result = testbed.score(evaluate.generate(pipe, wanted, (64, 64)), wanted)
    assert result["score"] >= 0.8, result


def test_the_decoder_gives_back_what_the_encoder_saw(pipe):
    assert evaluate.vae_round_trip(pipe.vae, 16, (64, 64)) >= 28.0


@pytest.mark.slow  # runs of 28 and of 112 steps; the figure is in figures.json, which the next test reads
def test_the_trajectory_is_smooth(pipe):
    mean, lowest = evaluate.smoothness(pipe, 4, (64, 64))
    assert mean >= 22.0, (mean, lowest)


def test_the_stated_figures_are_those_of_a_finished_training():
    figures = json.loads((FOLDER / "figures.json").read_text())
    assert not figures.get("provisional")
    assert figures["score"] >= 0.85
    assert min(figures["vae_round_trip_db"].values()) >= 28.0
    assert figures["psnr_28_112_db"] >= 22.0
