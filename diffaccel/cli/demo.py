"""`diffaccel demo [--video]`: one small, really trained pipeline, plain and accelerated, side by side."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench.environment import environment
from ..core.place import BALANCED, LEVELS
from . import hush_libraries
from .contest import runs, settle
from .rounds import Outcome, Strength, measure

if TYPE_CHECKING:
    from PIL.Image import Image

_SHOWN = BALANCED  # whose plan is printed, unless another level is asked for
_PRESETS = {"image": "cpu-demo", "video": "auto"}
_FILES = {
    "image": {"grid": "demo_grid.png", "strip": "demo_steps.png", "json": "demo.json"},
    "video": {
        "grid": "demo_video_grid.png",
        "clips": "demo_video.gif",
        "strip": "demo_video_steps.png",
        "json": "demo_video.json",
    },
}
_FRAMES_SHOWN = 3  # of each clip, in the grid
_FRAME_MS = 125


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--video", action="store_true", help="the bundled video pipeline instead of the picture one")
    add("--json", action="store_true", help="print one JSON document instead of tables")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="folder for the pictures (out)")
    add("--steps", type=_positive, default=28, metavar="N", help="denoising steps (28)")
    add("--prompts", type=_positive, default=4, metavar="N", help="how many test prompts (4)")
    add("--rounds", type=_positive, default=2, metavar="N", help="measured rounds (2)")
    add("--level", metavar="NAME", help="only this level of the dial: careful, balanced or fast (all three)")
    add("--seed", type=_seed, default=0, metavar="N", help="seed of the first picture's noise (0)")
    add("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    kind = "video" if args.video else "image"
    levels = LEVELS if args.level is None else (_level(args.level),)
    with _progress(runs(levels, args.rounds), args.quiet) as tick:
        document, outcomes = demo(
            args.steps, args.prompts, args.rounds, args.seed, kind=kind, levels=levels, tick=tick
        )
    document["files"] = write_files(document, outcomes, args.out)
    if args.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print(report_text(document, outcomes))
    return 0


def demo(
    steps: int = 28,
    prompts: int = 4,
    rounds: int = 2,
    seed: int = 0,
    *,
    kind: str = "image",
    levels: Sequence[str] = LEVELS,
    strengths: Sequence[Strength] | None = None,
    tick: Callable[[], object] = lambda: None,
) -> tuple[dict[str, Any], list[Outcome]]:
    """Measure one testbed, plain strength first: the JSON document and the outcomes behind it.

    `strengths` are, unless told, plain and for each of the `levels` ours, and at as many computed steps simply fewer
    steps and diffusers' own first-block cache (`contest.settle`). An outcome of kind "video" has lists of frames for
    images.
    """
    hush_libraries()
    from diffaccel import testbed

    pipe = testbed.load(kind)
    pipe.set_progress_bar_config(disable=True)  # one bar for all runs instead
    texts = testbed.prompts("test", prompts, kind=kind)
    kwargs = testbed.call_kwargs(kind)
    if kind == "video":
        kwargs["output_type"] = "pil"
    common: dict[str, Any] = {"steps": steps, "seed": seed, "tick": tick}
    warm_up = 1
    if strengths is None:
        strengths = settle(pipe, texts, kwargs, preset=_PRESETS[kind], levels=levels, **common)
        warm_up = 0  # finding them did
    outcomes = measure(pipe, texts, kwargs, strengths=strengths, rounds=rounds, warm_up=warm_up, **common)
    shown = _shown(outcomes)
    document = {
        "schema": 1,
        "kind": kind,
        "pipeline": type(pipe).__name__,
        "prompts": texts,
        "seed": seed,
        "rounds": rounds,
        "runs": [run_entry(outcome, outcomes[0], texts) for outcome in outcomes],
        "plan": None if shown is None else shown.plan,
        "environment": environment(),
    }
    return document, outcomes


def _shown(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The outcome whose plan is told: the middle level, else the first that has a plan."""
    planned = [outcome for outcome in outcomes if outcome.plan is not None]
    return next((outcome for outcome in planned if outcome.name == _SHOWN), planned[0] if planned else None)


def run_entry(outcome: Outcome, plain: Outcome, prompts: Sequence[str]) -> dict[str, Any]:
    """One entry of "runs". psnr and ssim are against the plain run's pictures and null for the plain run itself;
    psnr is also null where all pictures are identical, which `identical` then says."""
    from diffaccel import quality, testbed

    entry: dict[str, Any] = {
        "name": outcome.name,
        "steps_computed": sum(outcome.computed),
        "mean_computed": outcome.mean_computed,
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
        scores = quality.compare(_frames(plain.images), _frames(outcome.images))
        entry |= quality.jsonable(scores) | {"identical": math.isinf(scores["psnr"])}
    return entry


def _frames(images: Sequence[Any]) -> list[Image]:
    """Pictures as they are, clips as all their frames one after the other."""
    return [frame for image in images for frame in (image if isinstance(image, list) else [image])]


def write_files(document: dict[str, Any], outcomes: Sequence[Outcome], out: Path) -> dict[str, str]:
    """Write the pictures (or clips), the strip and the document into `out`; {what: path}."""
    from .drawing import picture_grid, step_strip

    out.mkdir(parents=True, exist_ok=True)
    files = {what: str(out / name) for what, name in _FILES[document["kind"]].items()}
    labels = [
        [entry["name"], f"{entry['seconds']:.2f} s, {entry['speedup']:.2f}x", _fidelity(entry)]
        for entry in document["runs"]
    ]
    texts = document["prompts"]
    rows: list[list[Any]] = [outcome.images for outcome in outcomes]  # of pictures, or of clips
    if document["kind"] == "video":
        picture_grid([[_side_by_side(clip) for clip in row] for row in rows], labels, texts).save(files["grid"])
        first, *others = [
            picture_grid([[clip[number] for clip in row] for row in rows], labels, texts)
            for number in range(len(rows[0][0]))
        ]
        first.save(files["clips"], save_all=True, append_images=others, duration=_FRAME_MS, loop=0)
    else:
        picture_grid(rows, labels, texts).save(files["grid"])
    step_strip([o.computed for o in outcomes], [o.name for o in outcomes]).save(files["strip"])
    Path(files["json"]).write_text(json.dumps(document | {"files": files}, indent=2, allow_nan=False) + "\n")
    return files


def _side_by_side(clip: Sequence[Image]) -> Image:
    """The first, middle and last frame of a clip as one picture."""
    from PIL import Image as PIL_Image

    last = len(clip) - 1
    shown = [clip[round(i * last / (_FRAMES_SHOWN - 1))] for i in range(_FRAMES_SHOWN)]
    width, height = shown[0].size
    canvas = PIL_Image.new("RGB", (_FRAMES_SHOWN * width, height))
    for number, frame in enumerate(shown):
        canvas.paste(frame, (number * width, 0))
    return canvas


def report_text(document: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The plan, the table of runs and where the pictures are, as printed."""
    shown = _shown(outcomes)
    runs, files = document["runs"], document["files"]
    film = document["kind"] == "video"
    what, asked = ("clips", "places, grounds and motions") if film else ("pictures", "places and grounds")
    places = {"grid": what.capitalize(), "clips": "moving", "strip": "steps", "json": "figures"}
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
            *([] if shown is None else [f"Plan of the {shown.name} run:", shown.table.rstrip(), ""]),
            f"Runs (median of {document['rounds']} interleaved rounds after a warm-up; PSNR and SSIM against",
            f"the plain {what}; score: share of shapes, colours, sizes, {asked} as asked for).",
            "Each level stands beside simply fewer steps, as many as it computes, and diffusers' own first-block",
            "cache at a threshold that computes about as many:",
            *_align([head, *body]),
            "",
            "   ".join(f"{word}: {files[name]}" for name, word in places.items() if name in files),
        ]
    )


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
def _progress(total: int, quiet: bool) -> Iterator[Callable[[], object]]:
    """A bar on stderr that advances with each run; none where stderr is not a terminal."""
    from tqdm.auto import tqdm

    hide = quiet or not sys.stderr.isatty()
    with tqdm(total=total, desc="demo", unit="run", file=sys.stderr, disable=hide) as bar:
        yield bar.update


def _level(name: str) -> str:
    """The name of a level. Raises InvalidOptionError with the nearest."""
    from ..planner.options import require_level

    require_level(name)
    return name


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
