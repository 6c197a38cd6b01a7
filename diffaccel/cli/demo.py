"""`diffaccel demo`: one small, really trained pipeline, plain and accelerated, side by side."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import hush_libraries
from .rounds import STRENGTHS, Outcome, Strength, measure

_SHOWN = "medium"  # the preset as it is; its plan is the one printed
_FILES = {"grid": "demo_grid.png", "strip": "demo_steps.png", "json": "demo.json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON document instead of tables")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="folder for the pictures (out)")
    add("--steps", type=_positive, default=28, metavar="N", help="denoising steps (28)")
    add("--prompts", type=_positive, default=4, metavar="N", help="how many test prompts (4)")
    add("--rounds", type=_positive, default=3, metavar="N", help="measured rounds (3)")
    add("--seed", type=_seed, default=0, metavar="N", help="seed of the first picture's noise (0)")
    add("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    with _progress(args.rounds, args.quiet) as tick:
        document, outcomes = demo(args.steps, args.prompts, args.rounds, args.seed, tick=tick)
    document["files"] = write_files(document, outcomes, args.out)
    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print(report_text(document, outcomes))
    return 0


def demo(
    steps: int = 28,
    prompts: int = 4,
    rounds: int = 3,
    seed: int = 0,
    *,
    strengths: Sequence[Strength] = STRENGTHS,
    tick: Callable[[], object] = lambda: None,
) -> tuple[dict[str, Any], list[Outcome]]:
    """Measure the image testbed, plain strength first: the JSON document and the outcomes behind it."""
    hush_libraries()
    from diffaccel import testbed

    pipe = testbed.load("image")
    pipe.set_progress_bar_config(disable=True)  # one bar for all runs instead
    texts = testbed.prompts("test", prompts)
    kwargs = testbed.call_kwargs("image")
    outcomes = measure(pipe, texts, kwargs, steps=steps, rounds=rounds, seed=seed, strengths=strengths, tick=tick)
    document = {
        "schema": 1,
        "pipeline": type(pipe).__name__,
        "prompts": texts,
        "seed": seed,
        "rounds": rounds,
        "runs": [run_entry(outcome, outcomes[0], texts) for outcome in outcomes],
        "plan": next((outcome.plan for outcome in outcomes if outcome.name == _SHOWN), None),
        "environment": environment(),
    }
    return document, outcomes


def run_entry(outcome: Outcome, plain: Outcome, prompts: Sequence[str]) -> dict[str, Any]:
    """One entry of "runs". psnr and ssim are against the plain pictures and null for the plain run itself;
    psnr is also null where all pictures are identical, which `identical` then says."""
    from diffaccel import quality, testbed

    entry: dict[str, Any] = {
        "name": outcome.name,
        "steps_computed": sum(outcome.computed),
        "steps": len(outcome.computed),
        "seconds": outcome.median_s,
        "speedup": plain.median_s / outcome.median_s,
        "psnr": None,
        "ssim": None,
        "score": testbed.score(outcome.images, prompts)["score"],
        "seconds_of_rounds": outcome.seconds,
        "computed": list(outcome.computed),
    }
    if outcome is not plain:
        scores = quality.compare(plain.images, outcome.images)
        entry |= quality.jsonable(scores) | {"identical": math.isinf(scores["psnr"])}
    return entry


def write_files(document: dict[str, Any], outcomes: Sequence[Outcome], out: Path) -> dict[str, str]:
    """Write the grid, the strip and the document into `out`; {what: path}."""
    from .drawing import picture_grid, step_strip

    out.mkdir(parents=True, exist_ok=True)
    files = {what: str(out / name) for what, name in _FILES.items()}
    labels = [
        [entry["name"], f"{entry['seconds']:.2f} s, {entry['speedup']:.2f}x", _fidelity(entry)]
        for entry in document["runs"]
    ]
    picture_grid([o.images for o in outcomes], labels, document["prompts"]).save(files["grid"])
    step_strip([o.computed for o in outcomes], [o.name for o in outcomes]).save(files["strip"])
    Path(files["json"]).write_text(json.dumps(document | {"files": files}, indent=2, allow_nan=False) + "\n")
    return files


def report_text(document: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The plan, the table of runs and where the pictures are, as printed."""
    shown = next(outcome for outcome in outcomes if outcome.name == _SHOWN)
    runs = document["runs"]
    head = ("run", "computed", "seconds", "speed", "PSNR", "SSIM", "score")
    body = [
        (
            entry["name"],
            f"{entry['steps_computed']}/{entry['steps']}",
            f"{entry['seconds']:.2f}",
            f"{entry['speedup']:.2f}x",
            _fidelity(entry),
            "-" if entry["ssim"] is None else f"{entry['ssim']:.3f}",
            f"{entry['score']:.2f}",
        )
        for entry in runs
    ]
    env = document["environment"]
    return "\n".join(
        [
            f"{document['pipeline']} (bundled, tiny), {len(document['prompts'])} prompts in one batch, "
            f"{runs[0]['steps']} steps, torch {env['torch']}, {env['threads']} threads",
            "",
            f"Plan of the {_SHOWN} run:",
            shown.table.rstrip(),
            "",
            f"Runs (median of {document['rounds']} interleaved rounds after a warm-up; PSNR and SSIM against",
            "the plain pictures; score: share of shapes, colours, sizes, places and grounds as asked for):",
            *_align([head, *body]),
            "",
            f"Pictures: {document['files']['grid']}   steps: {document['files']['strip']}   "
            f"figures: {document['files']['json']}",
        ]
    )


def environment() -> dict[str, Any]:
    """The versions and the machine that a figure belongs to."""
    from importlib.metadata import version

    import torch

    names = ("diffusers", "transformers", "accelerate")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in names},
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


def _fidelity(entry: dict[str, Any]) -> str:
    if entry["psnr"] is not None:
        return f"{entry['psnr']:.1f} dB"
    return "identical" if entry["ssim"] is not None else "reference"


def _align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        yield "  " + "   ".join(cells).rstrip()


@contextlib.contextmanager
def _progress(rounds: int, quiet: bool) -> Iterator[Callable[[], object]]:
    """A bar on stderr that advances with each run; none where stderr is not a terminal."""
    from tqdm.auto import tqdm

    total = (rounds + 1) * len(STRENGTHS)
    hide = quiet or not sys.stderr.isatty()
    with tqdm(total=total, desc="demo", unit="run", file=sys.stderr, disable=hide) as bar:
        yield bar.update


def _positive(text: str) -> int:
    number = int(text)  # argparse turns the ValueError into a usage message
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError(f"must be in 0..2^63-1, got {number}")
    return number
