"""The demo end to end: on the testbed's architecture with random weights at a small size, for seconds."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from PIL import Image

from diffaccel import testbed
from diffaccel.cli import main
from diffaccel.cli.demo import demo, report_text, run_entry
from diffaccel.cli.native import first_block
from diffaccel.cli.rounds import PLAIN, Outcome, Strength
from diffaccel.core.place import LEVELS

STEPS = 10


@pytest.fixture(scope="module", autouse=True)
def untrained_testbed():
    load, usual = testbed.load, testbed.call_kwargs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testbed, "load", lambda kind: load(kind, random=True))
        patch.setattr(testbed, "call_kwargs", lambda kind: {**usual(kind), "height": 48, "width": 48})
        yield


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What `diffaccel demo --json` writes to stdout, its exit code and its folder."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    words = ["demo", "--json", "--steps", str(STEPS), "--prompts", "1", "--rounds", "1", "--out", str(out)]
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        code = main(words)
    return code, stdout.getvalue(), out


@pytest.fixture(scope="module")
def extremes():
    """A cache that is off, and one that always answers."""
    strengths = (
        PLAIN,
        Strength("balanced", "cpu-demo", {"cache_tolerance": 0}),
        Strength("always", "cpu-demo", {"cache_tolerance": 1e9}),
    )
    return demo(STEPS, 2, 1, 0, strengths=strengths)


def test_json_is_one_document_with_the_promised_keys(printed):
    code, text, _ = printed
    document = json.loads(text)  # fails on anything before or after it
    assert code == 0
    assert [run["name"] for run in document["runs"]] == [
        "plain",
        *(f"{level}{what}" for level in LEVELS for what in (": fewer steps", ": diffusers", "")),
    ]
    promised = {"name", "steps_computed", "steps", "seconds", "speedup", "psnr", "ssim", "score"}
    for run in document["runs"]:
        assert promised <= set(run)
        assert 0 < run["steps_computed"] <= run["steps"] == len(run["computed"]) <= STEPS
        assert run["steps_computed"] == sum(run["computed"]) == run["mean_computed"]
        assert run["seconds"] > 0 and 0 <= run["score"] <= 1
        assert run["speedup"] == pytest.approx(document["runs"][0]["seconds"] / run["seconds"])


def test_each_level_meets_its_rivals_at_its_own_number_of_computed_steps(printed):
    runs = {run["name"]: run for run in json.loads(printed[1])["runs"]}
    for level in LEVELS:
        assert runs[f"{level}: fewer steps"]["steps"] == runs[level]["steps_computed"]
        peer = runs[f"{level}: diffusers"]
        assert peer["steps"] == STEPS and peer["computed"][0], "nothing to reuse yet"
    assert json.loads(printed[1])["plan"]["level"] == "balanced"


def test_the_plain_run_is_the_reference(printed):
    plain = json.loads(printed[1])["runs"][0]
    assert plain["psnr"] is None and plain["ssim"] is None
    assert plain["speedup"] == 1 and plain["steps_computed"] == STEPS


def test_files_are_written_and_are_what_they_say(printed):
    _, text, out = printed
    document = json.loads(text)
    assert json.loads((out / "demo.json").read_text()) == document
    for what in ("grid", "strip"):
        with Image.open(document["files"][what]) as image:
            assert image.format == "PNG" and image.width > 300


def test_a_cache_that_is_off_gives_identical_pictures(extremes):
    off = extremes[0]["runs"][1]
    assert off["identical"] and off["psnr"] is None and off["ssim"] == pytest.approx(1)
    assert off["steps_computed"] == STEPS


def test_a_cache_that_always_answers_shows_in_every_figure(extremes):
    always = extremes[0]["runs"][2]
    assert not always["identical"]
    assert always["steps_computed"] < STEPS - 2
    assert 0 < always["psnr"] < 60 and always["ssim"] < 1
    assert always["computed"][0] and always["computed"][-1]  # nothing to reuse yet; the guarded last step


def test_the_printed_report_has_plan_table_and_files(extremes):
    document, outcomes = extremes
    document = document | {"files": {"grid": "g.png", "strip": "s.png", "json": "d.json"}}
    text = report_text(document, outcomes)
    assert outcomes[1].table.strip() in text and "adaptive" in outcomes[1].table
    for word in ("plain", "reference", "balanced", "identical", "always", "g.png", "s.png", "d.json"):
        assert word in text
    rows = [line for line in text.splitlines() if line.lstrip().startswith(("run ", "plain ", "always "))]
    assert len({len(line) for line in rows}) == 1  # columns are aligned


def test_the_peer_is_diffusers_own_cache_and_leaves_nothing_behind():
    """A threshold of 0 reuses nothing, a huge one everything behind the first step."""
    pipe = testbed.load("image")
    call = {**testbed.call_kwargs("image"), "prompt": "a red ring", "num_inference_steps": 4, "output_type": "latent"}
    before = [len(part._forward_pre_hooks) for part in pipe.transformer.modules()]
    found = {}
    for threshold in (0.0, 1e9):
        with first_block(pipe, threshold) as told:
            assert pipe.transformer.is_cache_enabled
            pipe(**call)
        found[threshold] = told
    assert found == {0.0: [True] * 4, 1e9: [True, False, False, False]}
    assert not pipe.transformer.is_cache_enabled
    assert [len(part._forward_pre_hooks) for part in pipe.transformer.modules()] == before


def test_speedup_is_the_ratio_of_the_medians():
    picture = [Image.new("RGB", (32, 32), (255, 0, 0))]
    prompts = testbed.prompts("test", 1)
    plain = Outcome("plain", (True,) * 4, [9.0, 4.0, 4.0], picture)
    fast = Outcome("fast", (True, False) * 2, [2.0, 1.0, 2.0], picture)
    entry = run_entry(fast, plain, prompts)
    assert (entry["seconds"], entry["speedup"], entry["steps_computed"]) == (2.0, 2.0, 2)
    assert entry["identical"] and entry["psnr"] is None


def test_an_unknown_level_is_refused_before_anything_runs(capsys, tmp_path):
    assert main(["demo", "--level", "fats", "--out", str(tmp_path)]) == 1
    assert "did you mean 'fast'" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_missing_bundle_is_an_exit_code_and_a_sentence(monkeypatch, capsys, tmp_path):
    def missing(kind):
        raise FileNotFoundError("the trained weights are missing")

    monkeypatch.setattr(testbed, "load", missing)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.err == "diffaccel: the trained weights are missing\n" and captured.out == ""
