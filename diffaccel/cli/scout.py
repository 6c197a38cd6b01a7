"""`diffaccel scout`: many seeds a few steps far as one page of previews, and the chosen ones to their end."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from . import hush_libraries
from .given import TESTBED, load_pipeline, prompts_of, size, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"a folder of a diffusers pipeline, or {TESTBED}KIND")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", metavar="TEXT", help="what to make")
    text.add_argument("--prompts", metavar="FILE", help="a file of prompts, one a line")
    add("--seeds", type=whole(1), default=16, metavar="N", help="how many, from 0 on (16)")
    add("--until", type=whole(1), default=6, metavar="N", help="steps of each seed (6)")
    add("--steps", type=whole(2), default=28, metavar="N", help="steps of a whole run (28)")
    add("--size", type=size, metavar="WxH[xF]", help="pixels, and frames (the pipeline's default)")
    add("--preset", default="auto", metavar="PRESET", help="the plan of all runs: a name, a file, or none (auto)")
    add("--memory-gib", type=float, metavar="GIB", help="for the paused runs; what finds no room is run anew")
    add("--html", type=Path, metavar="FILE", help="write the previews as one self-contained page")
    add("--finish", metavar="NUMBERS", help="candidates to finish, with commas")
    add("--ask", action="store_true", help="read the candidates to finish from stdin, once the page is there")
    add("--out", type=Path, default=Path("scouted"), metavar="FOLDER", help="for finished pictures (scouted)")
    add("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    hush_libraries()
    from .. import accelerate
    from ..scouting import scout

    prompts = [args.prompt] if args.prompt else prompts_of(args.prompts, "--prompts", args.model, "test")
    pipe, call = load_pipeline(args.model, args.size)
    chosen = _numbers(args.finish, args.seeds * len(prompts))
    accelerate(pipe, None if args.preset == "none" else args.preset)
    call |= {"num_inference_steps": args.steps, "output_type": "pil"}
    with scout(pipe, prompts, args.seeds, args.until, memory_gib=args.memory_gib, **call) as found:
        _write_page(args.html, found)
        if args.ask:
            print(f"finish which of 0 to {len(found.candidates) - 1}? (numbers, with commas)", file=sys.stderr)
            chosen = _numbers(sys.stdin.readline().strip() or None, len(found.candidates))
        files = [_save(args.out, found.candidates[index], found.finish(index)[0]) for index in chosen]
        if chosen:
            _write_page(args.html, found)
        document = _document(found, files, pipe)
    print(json.dumps(document, indent=2) if args.json else _text(document))
    return 0


def _numbers(text: str | None, count: int) -> list[int]:
    """Candidates by number. Raises InvalidOptionError for what is none."""
    from ..errors import InvalidOptionError

    words = [word.strip() for word in (text or "").split(",") if word.strip()]
    for word in words:
        if not word.isascii() or not word.isdigit() or int(word) >= count:
            raise InvalidOptionError(f"--finish: candidates are numbers from 0 to {count - 1}, got {word[:40]!r}")
    return [int(word) for word in words]


def _write_page(path: Path | None, found: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found.page(), encoding="utf-8")


def _save(folder: Path, candidate: Any, output: Any) -> str:
    """Write a finished picture (of a video its frames one by one); the path of it."""
    from ..scouting.page import picture_of
    from ..scouting.preview import first_of

    folder.mkdir(parents=True, exist_ok=True)
    value, name = first_of(output), f"{candidate.index:03d}_seed{candidate.seed}"
    if hasattr(output, "frames"):
        for number, frame in enumerate(value):
            picture_of(frame).save(folder / f"{name}_{number:03d}.png")
        return str(folder / f"{name}_*.png")
    picture_of(value).save(folder / f"{name}.png")
    return str(folder / f"{name}.png")


def _document(found: Any, files: list[str], pipe: Any) -> dict[str, Any]:
    rows = [
        {"index": c.index, "prompt": c.prompt, "seed": c.seed, "scouted": c.scouted, "finished": c.finished}
        for c in found.candidates
    ]
    plan = list(pipe.acceleration.plan.enabled)
    return {
        "plan": plan,
        "until_step": found.until_step,
        "computed": found.computed,
        "candidates": rows,
        "files": files,
    }


def _text(document: dict[str, Any]) -> str:
    lines = [f"plan: {', '.join(document['plan']) or 'nothing on'}"]
    lines.append(f"{len(document['candidates'])} candidates, {document['computed']} denoiser calls computed")
    return "\n".join(lines + [f"  {name}" for name in document["files"]])
