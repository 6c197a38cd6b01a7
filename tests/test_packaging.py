"""The skeleton: metadata, pins, package data, what an import loads, and how the set-up fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if line and line[0] != "#")
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def name_of(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement).group().lower()


def test_every_dependency_and_tool_is_pinned():
    project = PYPROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert {name_of(requirement) for requirement in wanted} - {project["name"]} <= set(PINS)  # less its own extras


def test_the_version_is_stated_once_in_effect():
    import diffaccel

    assert PYPROJECT["project"]["version"] == diffaccel.__version__


def test_the_promised_extras_exist():
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert {"sage", "quant", "bench", "notebooks", "comfyui", "dev"} <= set(extras)


def test_the_installed_versions_are_the_pinned_ones():
    import diffusers
    import torch

    assert torch.__version__.split("+")[0] == PINS["torch"]
    assert diffusers.__version__ == PINS["diffusers"]


def test_the_console_script_points_at_main():
    assert PYPROJECT["project"]["scripts"] == {"diffaccel": "diffaccel.cli:main"}
    from diffaccel.cli import main

    for script in entry_points(group="console_scripts", name="diffaccel"):
        assert script.load() is main


def test_package_data_is_there():
    package = ROOT / "diffaccel"
    assert (package / "py.typed").exists()
    presets = {path.stem for path in package.glob("planner/presets/*.toml")}
    assert {"auto", "cpu-demo", "lossless"} <= presets
    weights = [path for path in package.glob("testbed/weights/**/*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in weights)
    for kind in ("image", "video", "scenes"):
        sizes = [path.stat().st_size for path in (package / "testbed" / "weights" / kind).rglob("*") if path.is_file()]
        assert 0 < sum(sizes) < 12 * 2**20


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


def test_importing_the_package_does_not_import_diffusers():
    code = "import sys, diffaccel; sys.exit(any(m in sys.modules for m in ('diffusers', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_file_names_an_index_or_a_home_folder():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    if not any(names):
        pytest.skip("not a git checkout with files")
    bad = re.compile(r"--?index-url|--?find-links|(?<![\w.])/(?:home|root|Users)/\w")
    files = [ROOT / name for name in names if name and not name.endswith(".safetensors")]
    files = [path for path in files if path.is_file() and path != Path(__file__)]
    assert [path for path in files if bad.search(path.read_text(errors="ignore"))] == []


# ---- make ------------------------------------------------------------------------------------------------

# Answers like an interpreter that is new enough; what it installs is a copy of itself.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python;;
    *"pip install"*) echo "$*" >> pip.log; test ! -e network-is-down;;
esac
"""


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path):
    """A folder with just what the set-up reads; returns it and a function that runs make there."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}

    def make(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", *words], cwd=tmp_path, env=clean, capture_output=True, text=True)

    return tmp_path, make


@needs_make
@pytest.mark.parametrize("target", ["demo", "test", "test-all", "lint"])
def test_without_a_new_enough_python_make_says_so(checkout, target):
    folder, make = checkout
    old = script(folder / "python3.9", "#!/bin/sh\nexit 1\n")  # as the version check of an old one would
    for python in (old, folder / "nowhere" / "python3"):
        done = make(target, f"PYTHON={python}")
        assert done.returncode != 0
        assert "Python 3.11 or newer" in done.stderr and str(python) in done.stderr
        assert "Traceback" not in done.stderr
        assert not (folder / ".venv").exists()


@needs_make
def test_a_failed_install_is_tried_again_and_a_good_one_is_not(checkout):
    folder, make = checkout
    python = script(folder / "python", FAKE_PYTHON)
    down = folder / "network-is-down"
    down.touch()
    assert make(".venv/.ok", f"PYTHON={python}").returncode != 0
    assert not (folder / ".venv" / ".ok").exists()

    down.unlink()
    (folder / "pip.log").unlink()
    done = make(".venv/.ok", f"PYTHON={python}")
    assert done.returncode == 0 and (folder / ".venv" / ".ok").exists()
    installs = (folder / "pip.log").read_text().splitlines()
    assert installs[0].endswith(f"torch=={PINS['torch']}")  # before anything that would choose a build of it
    assert installs[1].endswith("-e .[dev]")

    make(".venv/.ok", f"PYTHON={python}")
    assert (folder / "pip.log").read_text().splitlines() == installs  # nothing was installed again


@needs_make
def test_new_pins_are_installed_over_the_old(checkout):
    folder, make = checkout
    python = script(folder / "python", FAKE_PYTHON)
    make(".venv/.ok", f"PYTHON={python}")
    (folder / "pip.log").unlink()
    later = (folder / ".venv" / ".ok").stat().st_mtime + 10
    os.utime(folder / "constraints.txt", (later, later))
    assert make(".venv/.ok").returncode == 0
    assert "-e .[dev]" in (folder / "pip.log").read_text()
