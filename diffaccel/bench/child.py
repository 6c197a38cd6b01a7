"""A traced run in a process of its own: `python -m diffaccel.bench.child FILE.json`, for the check of determinism."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import DiffaccelError
from .contender import contenders
from .lab import Lab
from .sources import load
from .tracing import Mark, Trace


def in_a_process(job: Mapping[str, Any], keep: int | None) -> tuple[np.ndarray, Trace]:
    """The picture and the trace of a job, run by another Python with as many threads. Raises DiffaccelError with the
    last line that it said where it fails, or where the job cannot be written down."""
    with tempfile.TemporaryDirectory(prefix="diffaccel-") as folder:
        place = Path(folder)
        try:
            text = json.dumps({**job, "keep": keep, "threads": torch.get_num_threads(), "out": folder})
        except TypeError as error:
            raise DiffaccelError(f"the call cannot be handed to another process ({error})") from error
        (place / "job.json").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "diffaccel.bench.child", str(place / "job.json")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            raise DiffaccelError(f"the other process failed: {said[:200]}")
        marks = [Mark(*row) for row in json.loads((place / "marks.json").read_text(encoding="utf-8"))]
        kept = torch.load(place / "kept.pt", weights_only=True)
        return np.load(place / "picture.npy"), Trace(marks, kept)


def main(path: str) -> None:
    """Run a job that `in_a_process` wrote, and write what came out beside it."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    one = contenders([job["wish"] or None])[-1]
    lab = Lab(load(job["source"]).pipe, (job["prompt"], job["prompt"]), job["seed"], job["call"], one)
    picture, trace = lab.run(job["keep"])
    place = Path(job["out"])
    np.save(place / "picture.npy", picture)
    torch.save(trace.kept, place / "kept.pt")
    rows = [[mark.step, mark.site, mark.digest] for mark in trace.marks]
    (place / "marks.json").write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
