"""`diffaccel plan` prints the library's own decision, as table, JSON and TOML."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from diffaccel import Plan, plan, testbed
from diffaccel.cli import main
from diffaccel.cli.plan import TESTBED, _load
from diffaccel.ledger import estimate
from tests import tiny


@pytest.fixture(scope="module")
def pipe():
    return testbed.load("image", random=True)


@pytest.fixture(autouse=True)
def untrained_testbed(monkeypatch, pipe):
    monkeypatch.setattr(testbed, "load", lambda kind: pipe)


@pytest.mark.parametrize(
    ("words", "preset", "hardware"),
    [
        ([], "auto", None),
        (["--preset", "cpu-demo"], "cpu-demo", None),
        (["cpu-demo"], "cpu-demo", None),
        (["auto", "--hardware", "4090"], "auto", "4090"),
    ],
)
def test_all_three_forms_are_the_library_plan(words, preset, hardware, pipe, capsys):
    expected = replace(plan(pipe, preset, hardware=hardware), model=TESTBED)
    assert main(["plan", *words]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert main(["plan", *words, "--json"]) == 0
    assert Plan.from_dict(json.loads(capsys.readouterr().out)) == expected
    assert main(["plan", *words, "--toml"]) == 0
    assert Plan.from_toml(capsys.readouterr().out) == expected


def test_a_model_folder_is_loaded(pipe, tmp_path, capsys):
    pipe.save_pretrained(tmp_path)
    assert main(["plan", "cpu-demo", "--model", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["pipeline"] == "FluxPipeline"
    assert captured.err == "diffaccel: 'cpu-demo' is a preset: write `diffaccel plan MODEL --preset cpu-demo`\n"
    assert main(["plan", str(tmp_path), "--preset", "cpu-demo"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"diffaccel plan: {tmp_path.name}: FluxPipeline (flux)") and captured.err == ""


def test_a_model_without_weights(capsys):
    assert main(["plan", "flux.1-dev", "--hardware", "4090"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("diffaccel plan: flux.1-dev (bundled config, no weights): FluxPipeline (flux), 4090 24 GiB")


def test_a_size_says_what_it_costs(capsys):
    """The ledger's numbers: one picture with nothing on, and under this plan; as notes, which the files keep."""
    book = estimate("flux.1-dev", 512, 768, steps=10, hardware="4090")
    words = ["plan", "flux.1-dev", "--preset", "4090-flux", "--hardware", "4090"]
    assert main([*words, "--size", "768x512", "--steps", "10", "--json"]) == 0
    decided = Plan.from_dict(json.loads(capsys.readouterr().out))
    stack = book.apply(decided)
    time, memory = decided.notes[-2:]
    assert time.startswith(
        f"768x512, 10 steps: {stack.first.total:.3g} s with nothing on, {stack.last.total:.3g} s with"
    )
    assert stack.last.total < stack.first.total and book.seconds.total == pytest.approx(stack.first.total)
    assert f"{stack.first.need_gib:.1f} GiB with nothing on, {stack.last.need_gib:.1f} GiB with this plan" in memory
    assert memory.endswith("fits for the 24 of 4090")
    gains = {row.name: round(row.gain, 3) for row in stack.rows}
    assert {item.name: item.predicted["gain"] for item in decided.items if item.status == "enabled"} == gains
    assert not any("1024x1024" in note for note in decided.notes), "no costs of another size"
    assert main([*words, "--size", "768x512", "--toml"]) == 0
    assert Plan.from_toml(capsys.readouterr().out).notes[-2].startswith("768x512, 28 steps: ")


def test_the_pipeline_is_not_touched(pipe, capsys):
    assert main(["plan"]) == 0
    assert not hasattr(pipe, "acceleration")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["cpu-dmo"], 1, "cpu-demo"),
        (["auto", "--hardware", "40900"], 1, "4090"),
        (["auto", "--model", "no/such/folder"], 1, "no/such/folder"),
        (["auto", "--json", "--toml"], 2, "not allowed with"),
        (["--size", "64x64"], 1, "--size wants MODEL"),
        (["flux.1-dev", "--steps", "4"], 1, "--steps wants --size"),
        (["flux.1-dev", "--size", "64"], 2, "is not of the form WxH"),
    ],
)
def test_refusals(words, code, said, capsys):
    assert main(["plan", *words]) == code
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_folder_is_loaded_as_it_was_saved(dtype, tmp_path):
    """In another dtype the plan would judge weights of another size."""
    tiny.build("flux").to(dtype).save_pretrained(tmp_path)
    assert _load(tmp_path).transformer.dtype == dtype
