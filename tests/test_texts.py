"""What docs, docstrings, comments and presets name is there: files, folders, modules, and what docs import."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENDINGS = (".md", ".py", ".toml", ".json", ".jsonl", ".txt", ".ipynb", ".yaml", ".yml", ".csv", ".png", ".safetensors")
WORD = re.compile(r"[\w./*{}<>-]+")
ROOMS = ("diffaccel/", "tests/", "docs/", "benchmarks/", "notebooks/")
MODULE = re.compile(r"(?<![\w./-])diffaccel(?:\.[a-z_]\w*)+(?:\.[A-Z]\w*)?")
IMPORT = re.compile(r"^\s*(from diffaccel[\w.]* import [\w, ]+|import diffaccel[\w.]*)", re.MULTILINE)

# Names that are no files of ours, and whose they are.
OTHERS = {
    "collated_results.csv": "a table in the data set diffusers/benchmarks",
    "docs/performance/flux.md": "xDiT's",
}
# Names of files that a user makes, or that a command writes.
EXAMPLES = (
    r"(.*/)?(FILE|NAME|KIND|my|file|style|face|prompts|frame\d+|svdq-.*|svdquant|search_schedule_KIND)\.\w+",
    r"[\w.-]+\.safetensors",  # weights that somebody has
    r"(out/)?(bench|sweep)\.(json|csv|png)",  # what the verbs of these names write
    r"(results/)?(attention|caches|house|tuned)\.json",  # what scripts in benchmarks/ write
    r"ROOM/\w+\.py",
)


def tracked() -> list[str]:
    """Paths of all files in the repository; outside of git (an unpacked sdist), of all files there are."""
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return found.stdout.splitlines()
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]


def texts_of(name: str, source: str) -> Iterator[str]:
    """What a person reads in a file: all of a page, the comments of a TOML file, comments and docstrings of code."""
    if name.endswith(".md"):
        yield without_examples(source)
    elif name.endswith(".py"):
        yield from (
            t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT
        )
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
    else:
        yield from (line.partition("#")[2] for line in source.splitlines())


def without_examples(page: str) -> str:
    """A page without the blocks that have a title: files that are not there, which tests/test_contributing.py runs."""
    return re.sub(r'^```python title="(.*?)^```$', "", page, flags=re.MULTILINE | re.DOTALL)


def missing(text: str, files: list[str], at: str = "") -> list[str]:
    """Files and folders that `text` names and that are not among `files`; a name may leave out leading folders.

    `at`: the file in which the text stands. A bare name of code in a room of the package is one of that room's files.
    """
    room = "/".join(at.split("/")[:2]) + "/" if at.startswith("diffaccel/") and at.count("/") > 1 else ""
    tails, folders = _index(tuple(files))
    others, _ = (
        _index(tuple(name for name in files if name.startswith((room, *ROOMS[1:])))) if room else (tails, folders)
    )
    out = []
    for word in WORD.findall(text):
        name = word.removeprefix("./").rstrip(".-/")
        if re.search(r"[*{}<>]", name):
            continue  # a pattern
        if name.endswith(ENDINGS) and not Path(name).name.startswith("."):
            known = (
                name in (others if "/" not in name and name.endswith(".py") else tails)
                or name in OTHERS
                or any(re.fullmatch(e, name) for e in EXAMPLES)
            )
        elif name.startswith(ROOMS):
            known = name in folders or name in tails
        else:
            continue
        if not known:
            out.append(name)
    return out


@functools.cache
def _index(files: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """Every way to name a file by its last parts, and all folders."""
    tails = {"/".join(parts[i:]) for parts in (name.split("/") for name in files) for i in range(len(parts))}
    return tails, {str(parent) for name in files for parent in Path(name).parents}


FILES = tracked()
READ = [name for name in FILES if name.endswith((".md", ".py", ".toml", "Makefile"))]
PAGES = [name for name in FILES if name.endswith(".md")]


def test_texts_name_only_files_that_are_there() -> None:
    wrong = {}
    for name in READ:
        found = [word for text in texts_of(name, (ROOT / name).read_text()) for word in missing(text, FILES, name)]
        if found:
            wrong[name] = found
    assert not wrong


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("facts are in quant_memory.md 4.2", ["quant_memory.md"]),
        ("see `shared/spec/bugs.md`", ["shared/spec/bugs.md"]),
        ("the masks are in masks/svg.py", ["masks/svg.py"]),
        ("run `pytest tests/families -k mochi`", ["tests/families"]),
        ("`diffaccel/memory/` holds them", ["diffaccel/memory"]),
        ("`docs/caching.md`, caching.md and `tests/tiny.py`", []),
        ("(huggingface.co, collated_results.csv), `my.toml`", []),
    ],
)
def test_a_name_of_what_is_not_there_is_found(text: str, found: list[str]) -> None:
    assert missing(text, FILES) == found


def test_a_bare_name_is_one_of_the_room_s_own_files() -> None:
    text = "`sensitivity.py` measures, `budget.py` chooses"
    assert missing(text, FILES, "diffaccel/quantization/policy.py") == ["budget.py"]
    assert missing(text, FILES) == []  # vae/exact has one: seen from a page, that will do


def test_only_comments_and_docstrings_of_code_are_read() -> None:
    source = '"""See a.md."""\nx = "b.md"  # c.md\ndef f():\n    "d.md"\n'
    assert sorted(" ".join(texts_of("x.py", source)).split()) == ["#", "See", "a.md.", "c.md", "d.md"]


def resolves(dotted: str) -> bool:
    """Is this a module of ours, or an attribute of one?"""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_a_page_names_are_there(page: str) -> None:
    text = without_examples((ROOT / page).read_text())
    assert [name for name in sorted(set(MODULE.findall(text))) if not resolves(name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_imports_is_there(page: str) -> None:
    for line in IMPORT.findall(without_examples((ROOT / page).read_text())):
        exec(line, {})


def test_a_module_that_is_not_there_is_found() -> None:
    assert resolves("diffaccel.caching.Denoiser") and resolves("diffaccel.offload.bandwidth")
    assert not resolves("diffaccel.memory.links") and not resolves("diffaccel.attention.methods.make")


SCRIPTS = [name for name in FILES if name.endswith(".py") and name.startswith(("benchmarks/", "notebooks/", "docs/"))]


def test_what_scripts_import_of_the_package_is_there() -> None:
    """Benchmarks run for minutes and no test runs them all; a renamed function must not break them unseen."""
    wrong = []
    for script in SCRIPTS:
        for node in ast.walk(ast.parse((ROOT / script).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("diffaccel"):
                wrong += [
                    (script, f"{node.module}.{a.name}") for a in node.names if not resolves(f"{node.module}.{a.name}")
                ]
    assert not wrong
