"""`diffaccel demo --video` end to end: on the video testbed's architecture with random weights, for seconds."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from PIL import Image

from diffaccel import testbed
from diffaccel.cli import main
from diffaccel.cli.demo import demo, report_text
from diffaccel.cli.rounds import PLAIN, Strength

STEPS = 10


@pytest.fixture(scope="module", autouse=True)
def untrained_testbed():
    load, usual = testbed.load, testbed.call_kwargs
    small = {"height": 48, "width": 48, "num_frames": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testbed, "load", lambda kind: load(kind, random=True))
        patch.setattr(testbed, "call_kwargs", lambda kind: {**usual(kind), **small})
        yield


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What `diffaccel demo --video --json` writes to stdout, its exit code and its folder."""
    out = tmp_path_factory.mktemp("demo")
    words = [
        "demo",
        "--video",
        "--json",
        "--steps",
        str(STEPS),
        "--prompts",
        "1",
        "--rounds",
        "1",
        "--level",
        "fast",
        "--out",
        str(out),
    ]
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        code = main(words)
    return code, stdout.getvalue(), out


def test_the_document_is_that_of_the_picture_demo(printed):
    code, text, out = printed
    document = json.loads(text)
    assert code == 0
    assert (document["kind"], document["pipeline"]) == ("video", "WanPipeline")
    assert [run["name"] for run in document["runs"]] == ["plain", "fast: fewer steps", "fast: diffusers", "fast"]
    assert all("moving" in prompt or "standing" in prompt for prompt in document["prompts"])
    for run in document["runs"]:
        assert len(run["computed"]) == run["steps"] and 0 < run["steps_computed"] <= run["steps"] <= STEPS
        assert 0 <= run["score"] <= 1 and run["seconds"] > 0
    assert json.loads((out / "demo_video.json").read_text()) == document


def test_the_files_are_what_they_say(printed):
    files = json.loads(printed[1])["files"]
    with Image.open(files["grid"]) as grid, Image.open(files["strip"]) as strip:
        assert grid.format == strip.format == "PNG" and grid.width > 300
    with Image.open(files["clips"]) as clips:
        assert clips.format == "GIF" and clips.n_frames > 1


def test_a_cache_that_is_off_gives_identical_clips_and_one_that_always_answers_does_not():
    off, always = ({"cache_tolerance": value} for value in (0, 1e9))
    strengths = (PLAIN, Strength("balanced", "auto", off), Strength("always", "auto", always))
    document, outcomes = demo(STEPS, 2, 1, 0, kind="video", strengths=strengths)
    _, medium, most = document["runs"]
    assert medium["identical"] and medium["psnr"] is None and medium["steps_computed"] == STEPS
    assert not most["identical"] and most["steps_computed"] < STEPS and 0 < most["psnr"] < 60
    assert len(outcomes[0].images) == 2 and len(outcomes[0].images[0]) == 5

    text = report_text(
        document | {"files": {"grid": "g.png", "clips": "c.gif", "strip": "s.png", "json": "d"}}, outcomes
    )
    for word in ("WanPipeline", "plain clips", "motions", "c.gif", "identical", "adaptive"):
        assert word in text
