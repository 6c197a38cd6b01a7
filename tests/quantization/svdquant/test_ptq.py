"""Quantizing a pipeline into a file: calibration within its bytes, interrupts, and the file itself."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diffaccel.errors import BudgetError, InvalidOptionError, UnsupportedModelError
from diffaccel.models.registry import lookup
from diffaccel.quantization.policy import Policy
from diffaccel.quantization.svdquant.calibration import Collector, Seen, rows_within
from diffaccel.quantization.svdquant.checkpoint import Checkpoint
from diffaccel.quantization.svdquant.math import Recipe, reference_forward
from diffaccel.quantization.svdquant.ptq import Settings, quantize_pipeline, works
from tests import tiny

PROMPTS = ("red ring", "blue square")
SETTINGS = Settings(Recipe(rank=4, alpha=(0.5,)), steps=2, max_bytes=200_000)


@pytest.fixture(scope="module")
def pipe():
    made = tiny.build("flux")
    made.set_progress_bar_config(disable=True)
    return made


def call_of(family: str) -> dict:
    known = tiny.call_kwargs(family)
    return {k: known[k] for k in ("height", "width", "num_frames", "max_sequence_length") if k in known}


def test_a_reservoir_is_uniform_repeatable_and_bounded():
    hits = torch.zeros(40)
    for trial in range(400):
        seen = Seen.nothing(1)
        for start in range(0, 40, 10):
            seen.add(torch.arange(start, start + 10.0)[:, None], 8, trial * 100 + start)
        assert seen.rows.shape == (8, 1) and seen.count == 40
        hits[seen.rows.view(-1).long()] += 1
    assert hits.sum() == 3200
    assert bool(((hits - 80).abs() < 45).all())  # mean 80, standard deviation 8
    again = [Seen.nothing(3), Seen.nothing(3)]
    for seen in again:
        for seed in range(5):
            seen.add(torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(seed)), 16, seed)
    assert torch.equal(again[0].rows, again[1].rows)


def test_maxima_are_those_of_everything_seen():
    layer, inputs = nn.Linear(5, 3), [torch.randn(2, 7, 5) for _ in range(3)]
    collector = Collector({"a": layer}, 10_000)
    with collector.watching():
        for x in inputs:
            layer(x)
    layer(torch.full((1, 5), 100.0))  # not watched any more
    every = torch.cat([x.view(-1, 5) for x in inputs])
    seen = collector.seen["a"]
    assert torch.equal(seen.absmax, every.abs().amax(0)) and seen.least == float(every.min()) and seen.count == 42
    assert not layer._forward_pre_hooks


def test_bytes_are_bounded_before_anything_runs(pipe):
    assert rows_within([100, 60], 160 * 4 * 33) == 32
    layers = {n: m for n, m in pipe.transformer.named_modules() if isinstance(m, nn.Linear)}
    collector = Collector(layers, 150_000)
    with collector.watching(), torch.no_grad():
        pipe("red ring", num_inference_steps=2, output_type="latent", **call_of("flux"))
    assert 0.5 * 150_000 < collector.bytes_held() <= 150_000
    with pytest.raises(BudgetError, match="max_bytes=1000"):
        Collector(layers, 1000)


def test_a_run_and_its_file(pipe, tmp_path):
    steps = []
    before = {k: v.clone() for k, v in pipe.transformer.state_dict().items()}
    report = quantize_pipeline(
        pipe, lookup(pipe), tmp_path, SETTINGS, PROMPTS, call_of("flux"), lambda *step: steps.append(step)
    )
    assert all(torch.equal(v, before[k]) for k, v in pipe.transformer.state_dict().items())
    total = report["layers"]
    assert ("calibrate", 2, 2) in steps and ("quantize", 0, total) in steps and steps[-1] == ("quantize", total, total)
    assert [p.name for p in tmp_path.iterdir()] == ["svdquant.safetensors"]
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.header.classes == {"transformer": "FluxTransformer2DModel"}
    assert checkpoint.header.recipe["prompts"] == 2 and checkpoint.header.precision == "int4"
    layers = dict(checkpoint.layers("transformer"))
    assert len(layers) == total == len(checkpoint.header.layers["transformer"])
    name = "transformer_blocks.0.ff.net.2"
    linear, x = pipe.transformer.get_submodule(name), torch.randn(9, 128)
    x = nn.functional.gelu(x)
    truth = linear(x).detach()
    assert layers[name].parts[0].unsigned
    assert float((reference_forward(x, layers[name]) - truth).norm() / truth.norm()) < 0.2
    assert 0 < report["worst"][0]["relative_error"] < 0.5
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize("stage", ["calibrate", "quantize"])
def test_an_interrupted_run_goes_on_where_it_was(stage, pipe, tmp_path):
    whole = tmp_path / "whole"
    quantize_pipeline(pipe, lookup(pipe), whole, SETTINGS, PROMPTS, call_of("flux"))

    def interrupt(at: str, done: int, total: int) -> None:
        if at == stage and done == 1:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_pipeline(pipe, lookup(pipe), out, SETTINGS, PROMPTS, call_of("flux"), interrupt)
    assert (out / "partial").is_dir() and not (out / "svdquant.safetensors").exists()
    assert not any(m._forward_pre_hooks for m in pipe.transformer.modules())
    other = Settings(Recipe(rank=5, alpha=(0.5,)), steps=2, max_bytes=200_000)
    with pytest.raises(InvalidOptionError, match="unfinished run"):
        quantize_pipeline(pipe, lookup(pipe), out, other, PROMPTS, call_of("flux"))
    calls = []
    handle = pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        quantize_pipeline(pipe, lookup(pipe), out, SETTINGS, PROMPTS, call_of("flux"))
    finally:
        handle.remove()
    assert len(calls) == (2 if stage == "calibrate" else 0)  # the second prompt's two steps, or nothing
    assert (out / "svdquant.safetensors").read_bytes() == (whole / "svdquant.safetensors").read_bytes()
    assert not (out / "partial").exists()


def test_restart_throws_the_old_run_away(pipe, tmp_path):
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "settings").write_text("something else")
    with pytest.raises(InvalidOptionError, match="restart"):
        quantize_pipeline(pipe, lookup(pipe), tmp_path, SETTINGS)
    report = quantize_pipeline(pipe, lookup(pipe), tmp_path, SETTINGS, restart=True)
    assert report["worst"] == []  # no prompts: no sample to measure on


def test_nothing_to_quantize_is_an_error(pipe, tmp_path):
    with pytest.raises(UnsupportedModelError, match="policy"):
        works(pipe, lookup(pipe), Settings(policy=Policy(keep=(".",))))


def test_bad_checkpoints_are_refused(tmp_path):
    with pytest.raises(InvalidOptionError, match="no such file"):
        Checkpoint(tmp_path)
    (tmp_path / "svdquant.safetensors").write_bytes(b"not this")
    with pytest.raises(InvalidOptionError, match="not a safetensors file"):
        Checkpoint(tmp_path)
    save_file({"a": torch.zeros(1)}, str(tmp_path / "svdquant.safetensors"))
    with pytest.raises(InvalidOptionError, match="not written by diffaccel"):
        Checkpoint(tmp_path)
    save_file({"a": torch.zeros(1)}, str(tmp_path / "svdquant.safetensors"), metadata={"diffaccel": '{"format": "x"}'})
    with pytest.raises(InvalidOptionError, match="version"):
        Checkpoint(tmp_path)
