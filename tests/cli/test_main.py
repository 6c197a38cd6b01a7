"""Dispatch: verbs, exit codes, and what stays unloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib

import pytest

from diffaccel import cli, presets
from diffaccel.cli import VERBS, main
from diffaccel.errors import BudgetError
from tests import tiny


def test_help_lists_exactly_the_verbs_that_exist(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(verb in listed for verb in VERBS)
    assert not any(verb in listed for verb in cli._LATER)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert f"diffaccel {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "VERB"),
        (["dmeo"], "did you mean 'demo'"),
        (["preset"], "did you mean 'presets'"),
        (["demo", "--stepps", "3"], "--stepps"),
        (["demo", "--steps", "0"], "at least 1"),
        (["demo", "--steps", "many"], "many"),
        (["demo", "--prompts", "-1"], "at least 1"),
        (["demo", "--seed", "-1"], "0..2^63-1"),
        (["presets", "auto", "more"], "more"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_why(words, said, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_a_refusal_exits_with_1_and_its_own_sentence(monkeypatch, capsys):
    def refuse(args):
        raise BudgetError("24 GiB are needed, 16 are there")

    monkeypatch.setattr("diffaccel.cli.presets.run", refuse)
    assert main(["presets"]) == 1
    assert capsys.readouterr().err == "diffaccel: 24 GiB are needed, 16 are there\n"


def test_an_interrupt_exits_with_130(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("diffaccel.cli.presets.run", interrupt)
    assert main(["presets"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_help_loads_neither_torch_nor_diffusers():
    code = (
        "import sys; from diffaccel.cli import main; main(['--help']); main(['demo', '--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'diffusers', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_python_dash_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "diffaccel", "demoo"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean 'demo'" in done.stderr and done.stdout == ""


def test_presets_list(capsys):
    assert main(["presets"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    told = {name: description for name, description in lines}
    assert {"auto", "cpu-demo", "lossless"} <= set(told)
    for name, description in told.items():
        assert tomllib.loads(presets(name))["description"] == description != ""
    assert main(["presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"presets": presets(), "descriptions": told}


def test_presets_loads_no_library_and_says_nothing_beside_the_list():
    """Counted, not timed: without torch, diffusers and the like it takes a fraction of a second."""
    code = (
        "import sys; from diffaccel.cli import main; assert main(['presets']) == 0;"
        "heavy = {'torch', 'diffusers', 'transformers', 'accelerate', 'torchao', 'numpy', 'PIL'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cpu-demo" in done.stdout


QUIET = """
import sys
from diffaccel.cli import hush_libraries, main
folder, out = sys.argv[1:]
hush_libraries()
import transformers, diffusers
transformers.utils.logging.get_logger("transformers.tokenization").warning("a real warning")
diffusers.utils.logging.get_logger("diffusers.pipelines").warning("another real warning")
for words in (
    ["presets"],
    ["plan", "--json"],
    ["plan", "--model", folder],
    ["demo", "--steps", "2", "--prompts", "1", "--rounds", "1", "--quiet", "--out", out],
    ["quantize", "--scheme", "svdquant-int4", "--model", folder, "--out", out, "--rank", "2", "--quiet"],
):
    assert main(words) == 0, words
"""


def test_no_library_speaks_while_it_is_imported_and_real_warnings_are_heard(tmp_path):
    """Every verb in one process: on stderr is what the verb says itself, and what is warned of later."""
    tiny.build("flux").save_pretrained(tmp_path / "model")
    words = [sys.executable, "-c", QUIET, str(tmp_path / "model"), str(tmp_path / "out")]
    env = {key: value for key, value in os.environ.items() if not key.endswith("_VERBOSITY")}  # this test's own aside
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("diffaccel: ")]
    assert len(said) == 2 and "a real warning" in said[0] and "another real warning" in said[1], done.stderr


def test_one_preset_prints_its_text(capsys):
    assert main(["presets", "cpu-demo"]) == 0
    text = capsys.readouterr().out
    assert 'cache = "adaptive"' in text
    assert main(["presets", "cpu-demo", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["name"] == "cpu-demo" and document["text"].strip() == text.strip()


def test_unknown_preset_is_refused_with_the_nearest_name(capsys):
    assert main(["presets", "cpu-dem"]) == 1
    captured = capsys.readouterr()
    assert "cpu-demo" in captured.err and captured.out == ""


def test_a_reader_that_goes_away_is_no_failure_to_speak_of() -> None:
    """`diffaccel presets auto | head -1`."""
    command = [sys.executable, "-m", "diffaccel", "presets", "auto"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        assert done.stderr.read() == ""
