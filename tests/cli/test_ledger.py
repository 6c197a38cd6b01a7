"""`diffaccel ledger` answers at once, with the library's own numbers, and loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffaccel.cli import main
from diffaccel.ledger import estimate
from diffaccel.ledger.exchange.stack_text import waterfall
from diffaccel.ledger.models import names

ROOT = Path(__file__).parents[2]


def said(capsys: Any, *words: str) -> str:
    assert main(["ledger", *words]) == 0
    return str(capsys.readouterr().out)


def test_nothing_heavy_is_imported() -> None:
    """In a process of its own: four answers without torch, or anything else that takes seconds to import."""
    words = ["ledger", "flux.1-dev", "--size", "1024x1024", "--steps", "28", "--hardware", "h100"]
    forms = [[], ["--json"], ["--sweep", "size"], ["--with", "compile,cache.adaptive"]]
    code = (
        "import sys\n"
        "from diffaccel.cli import main\n"
        f"codes = [main({words!r} + more) for more in {forms}]\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'numpy', 'PIL'} & set(sys.modules)\n"
        "sys.exit(f'{codes} {heavy}' if any(codes) or heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "4608" in done.stdout


def test_the_page(capsys: Any) -> None:
    page = said(capsys, "flux.1-dev", "--size", "1024x1024", "--steps", "28", "--hardware", "h100")
    for words in (
        "flux.1-dev  1024x1024, 28 steps, 1 forward a step, 512 text tokens (bundled config)",
        "tokens     4608 (4096 of the image)",
        "74.38 T: 59.51 T linear, 14.87 T attention",
        "20.0% of a forward",
        "3125 FLOP per byte of weights; the ridge of h100 is 295: limited by arithmetic",
        "2.08 P   99.3%",
        "31.4 GiB in bf16",
        "fits in 80 on h100",
        "(3 sources)",
        "this is 150 times as much",
        "both sides            5.62",
    ):
        assert words in page, words


def test_json_is_the_library_s_ledger(capsys: Any) -> None:
    words = ("wan2.1-t2v-14b", "--size", "832x480x81", "--guidance", "1", "--hardware", "a100", "--json")
    data = json.loads(said(capsys, *words))
    ours = estimate("wan2.1-t2v-14b", 480, 832, 81, guidance=1, hardware="a100")
    assert data["flops"]["total"] == ours.flops.total and data["request"]["branches"] == 1
    assert ours.seconds is not None and data["seconds"]["total"] == ours.seconds.total
    assert {"attention_share", "weights_gib", "intensity", "need_gib", "amplifiers"} <= set(data)


@pytest.mark.parametrize("over", ["frames", "guidance", "size", "steps"])
def test_sweeps(over: str, capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "my.png"
    words = ("wan2.1-t2v-1.3b", "--sweep", over, "--hardware", "4090", "--png", str(file))
    rows = [line.split() for line in said(capsys, *words).split("seconds\n")[-1].strip().splitlines()]
    assert len(rows) >= 2 and all(len(row) >= 8 for row in rows)
    assert file.read_bytes().startswith(b"\x89PNG")
    data = json.loads(said(capsys, "wan2.1-t2v-1.3b", "--sweep", over, "--json"))
    costs = [row["flops"]["denoise"] for row in data["sweep"]]
    assert costs == sorted(costs) and len(set(costs)) == len(costs)


def test_items_are_applied_in_turn(capsys: Any, tmp_path: Path) -> None:
    file, items = tmp_path / "my.png", ["compile", "attention.sage", "cache.adaptive"]
    words = ("wan2.1-t2v-14b", "--hardware", "4090", "--with", ",".join(items))
    ours = estimate("wan2.1-t2v-14b", hardware="4090").apply(items)
    assert said(capsys, *words, "--png", str(file)).rstrip().endswith(waterfall(ours))
    assert file.read_bytes().startswith(b"\x89PNG")
    assert json.loads(said(capsys, *words, "--json"))["stack"] == json.loads(json.dumps(ours.to_dict()))


def test_what_does_not_fit_is_said(capsys: Any) -> None:
    page = said(capsys, "flux.1-dev", "--hardware", "4090", "--assume-free-gib", "20")
    assert "does not fit in 20 (13.5 GiB short) that are free on 4090" in page
    assert "by stage   23.2 GiB with 0.6 of context: does not fit in 20" in page
    assert "no seconds: the peak of cpu" in said(capsys, "flux.1-dev", "--hardware", "cpu")


def test_without_a_model_they_are_listed(capsys: Any) -> None:
    assert said(capsys).split() == list(names())
    assert json.loads(said(capsys, "--json"))["models"] == list(names())


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["flux.1-dve"], "did you mean 'flux.1-dev'"),
        (["flux.1-dev", "--size", "1024"], "--size must be WxH or WxHxF"),
        (["flux.1-dev", "--size", "1024x1024x81"], "makes pictures"),
        (["flux.1-dev", "--hardware", "h101"], "unknown hardware"),
        (["flux.1-dev", "--text-tokens", "many"], "--text-tokens must be numbers"),
        (["flux.1-dev", "--assume-free-gib", "20"], "wants --hardware"),
        (["flux.1-dev", "--hardware", "h100", "--assume-free-gib", "-2"], "must be a number above 0, got -2"),
        (["flux.1-dev", "--hardware", "h100", "--prices", "no/such.toml"], "prices: no/such.toml cannot be read"),
        (["flux.1-dev", "--prices", "no/such.toml"], "wants --hardware"),
        (["flux.1-dev", "--with", " "], "--with must name plan items"),
        (["flux.1-dev", "--sweep", "frames"], "makes pictures"),
        (["flux.1-dev", "--png", "my.txt"], "must end in .png"),
        (["no/such/folder"], "unknown model"),
        (["flux.1-dev", "--with", "comple"], "did you mean 'compile'"),
        (["flux.1-dev", "--with", "attention.sage,attention.radial"], "only one item can hold the place 'attention'"),
    ],
)
def test_refusals(words: list[str], wrong: str, capsys: Any) -> None:
    assert main(["ledger", *words]) == 1
    complaint = capsys.readouterr().err
    assert wrong in complaint and len(complaint) <= 320
