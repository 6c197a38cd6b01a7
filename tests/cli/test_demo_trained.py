"""The demo on the bundled weights: fidelity and reuse (both repeatable), not speed."""

from __future__ import annotations

import pytest

from diffaccel.cli.demo import demo


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_level_costs_what_it_says_and_beats_its_rivals(kind):
    document, _ = demo(prompts=2, rounds=1, kind=kind)
    runs = {run["name"]: run for run in document["runs"]}
    careful, balanced, fast = (runs[level] for level in ("careful", "balanced", "fast"))
    assert 28 > careful["steps_computed"] > balanced["steps_computed"] > fast["steps_computed"]
    assert careful["psnr"] > balanced["psnr"] > fast["psnr"] >= 28
    assert balanced["score"] >= runs["plain"]["score"] - 0.1
    for level in ("careful", "balanced"):
        assert runs[level]["psnr"] > runs[f"{level}: fewer steps"]["psnr"]
