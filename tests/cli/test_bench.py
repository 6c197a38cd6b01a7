"""`diffaccel bench` on a folder, a Python file and a testbed; what it writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diffaccel.cli import main
from tests import tiny

FILE = """
from tests import tiny

def build():
    return tiny.build("flux"), {"height": 16, "width": 16, "max_sequence_length": 16}

def nothing():
    return 3
"""
PLAN = "cache=interval,cache_interval=2,cache_min_steps=0"
QUICK = ["--rounds", "1", "--floor", "0", "--steps", "4", "--quiet"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "prompts.txt").write_text("red ring\n")
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


def words(file: str, *more: str) -> list[str]:
    return ["bench", file, "--prompts", str(Path(file.partition(":")[0]).parent / "prompts.txt"), *QUICK, *more]


def test_a_python_file_of_the_user_s_json_page_and_no_regression_against_itself(
    file: str, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert main(words(file, "--plan", PLAN, "--plan", "plain,steps=2", "--out", str(out), "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    names = [one["name"] for one in told["buckets"][0]["contenders"]]
    assert names == ["plain", PLAN, "plain,steps=2"] and told["call"]["num_inference_steps"] == 4
    assert (out / "bench.html").read_text().startswith("<!doctype html>")

    stored = json.loads((out / "bench.json").read_text())
    for one in stored["buckets"][0]["contenders"]:
        one["speed"] |= {"median": 0.001, "interval": [0.001, 0.001]}  # times mean nothing here
    (out / "slow.json").write_text(json.dumps(stored))
    assert main(words(file, "--plan", PLAN, "--against", str(out / "slow.json"))) == 0
    assert "psnr" in capsys.readouterr().out

    for one in stored["buckets"][0]["contenders"]:
        one["computed"]["each"] = [1.0]
    (out / "better.json").write_text(json.dumps(stored))
    assert main(words(file, "--plan", PLAN, "--against", str(out / "better.json"))) == 4
    assert f"REGRESSION: {PLAN} at 16x16: computed steps" in capsys.readouterr().out


def test_a_folder_and_refusals(file: str, tmp_path: Path, capsys: Any) -> None:
    tiny.build("flux").save_pretrained(tmp_path / "model")
    folder = ["bench", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.txt"), *QUICK]
    call = ["--call", "height=16", "--call", "width=16", "--call", "max_sequence_length=16"]
    assert main([*folder, *call, "--plan", "plain,steps=2"]) == 0
    assert "plain,steps=2" in capsys.readouterr().out
    for given, said in (
        (["bench", str(tmp_path / "model")], "--prompts FILE is missing"),
        (["bench", str(tmp_path), "--prompts", str(tmp_path / "prompts.txt")], "no diffusers pipeline"),
        (words(f"{file}:nothing"), "must return a diffusers pipeline"),
        (words(f"{file}:absent"), "no function 'absent'"),
        (words(file, "--plan", "autp"), "is no preset"),
        (words(file, "--against", str(tmp_path / "prompts.txt")), "no JSON document"),
    ):
        assert main(given) == 1
        assert said in capsys.readouterr().err
