"""`diffaccel quantize` writes a checkpoint that the lever takes, goes on after an interrupt, and refuses early."""

from __future__ import annotations

import json

import pytest
import torch

from diffaccel import accelerate, testbed
from diffaccel.cli import main
from diffaccel.quantization.svdquant.checkpoint import Checkpoint
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.build("flux").save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("red ring\n\nblue square\n")
    return path


def words(model, prompts, out, *more: str) -> list[str]:
    options = ["--model", str(model), "--calib", str(prompts), "--out", str(out), "--size", "16x16", "--steps", "2"]
    return ["quantize", "--scheme", "svdquant-int4", *options, "--rank", "4", "--max-bytes", "1M", *more]


def test_json_and_a_checkpoint_that_the_lever_takes(model, prompts, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(words(model, prompts, out, "--json", "--alpha", "0.5", "--keep", "to_k$")) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["written"] == [str(out / "svdquant.safetensors")] and report["layers"] > 20
    assert "calibrate" in captured.err and "quantize" in captured.err
    assert "matches keep='to_k$'" in set(report["kept"]["transformer"].values())
    header = Checkpoint(out).header
    assert header.recipe["prompts"] == 2 and header.recipe["alpha"] == [0.5] and header.recipe["rank"] == 4
    pipe = accelerate(tiny.build("flux"), preset=None, quantization="svdquant", quantization_checkpoint=str(out))
    pipe(**tiny.call_kwargs("flux"))
    assert pipe.acceleration.report.stats["quantization.svdquant"]["layers"] == report["layers"]


def test_an_interrupt_is_told_and_the_same_command_goes_on(model, prompts, tmp_path, capsys, monkeypatch):
    from diffaccel.quantization.svdquant import ptq

    out, true, calls = tmp_path / "out", ptq.quantize_job, []

    def interrupt(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return true(*args)

    monkeypatch.setattr(ptq, "quantize_job", interrupt)
    assert main(words(model, prompts, out, "--quiet")) == 130
    assert "goes on from there" in capsys.readouterr().err
    assert main(words(model, prompts, out, "--quiet", "--rank", "8")) == 1
    assert "unfinished run" in capsys.readouterr().err
    assert main(words(model, prompts, out, "--quiet")) == 0
    text = capsys.readouterr().out
    assert len(calls) == 1 + int(text.split()[0])  # one was begun twice
    assert str(out / "svdquant.safetensors") in text


def test_without_prompts_it_says_so(model, tmp_path, capsys):
    options = ["--model", str(model), "--out", str(tmp_path / "o"), "--quiet", "--rank", "4"]
    assert main(["quantize", "--scheme", "svdquant-nvfp4", *options]) == 0
    assert "nothing is smoothed" in capsys.readouterr().err
    assert Checkpoint(tmp_path / "o").header.precision == "nvfp4"


def test_the_testbed_needs_no_folder(prompts, tmp_path, monkeypatch):
    pipe = testbed.load("image", random=True)
    monkeypatch.setattr(testbed, "load", lambda kind: pipe)
    assert main(words("testbed:image", prompts, tmp_path / "o", "--quiet", "--layout", "best")) == 0
    layers = dict(Checkpoint(tmp_path / "o").layers("transformer"))
    assert all(torch.isfinite(layer.parts[0].smooth.float()).all() for layer in layers.values())


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--layout", "lite"], 1, "multiples of 128"),
        (["--max-bytes", "1K"], 1, "max_bytes=1024"),
        (["--keep", "("], 1, "regular expression"),
        (["--calib", "no/such/file"], 1, "no/such/file"),
        (["--model", "no/such/folder"], 1, "no/such/folder"),
        (["--model", "testbed:sound"], 1, "sound"),
        (["--alpha", "2"], 2, "'2'"),
        (["--size", "16"], 2, "WxH"),
        (["--scheme", "int4"], 2, "invalid choice"),
        (["--max-bytes", "many"], 2, "number of bytes"),
    ],
)
def test_refusals_come_before_any_work(more, code, said, model, prompts, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(words(model, prompts, out, "--quiet", *more)) == code
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""
    assert not (out / "svdquant.safetensors").exists()
