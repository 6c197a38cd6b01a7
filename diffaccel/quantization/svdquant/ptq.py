"""Quantizing a whole pipeline's denoisers into a file, with what a few prompts show of the activations.

Everything that took long lies in `OUT/partial` as soon as it is done (the calibration after each prompt, then every
layer), and a run that was interrupted goes on from there. `OUT/partial` goes away when the checkpoint is written.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from ...core.accelerator import PLAIN
from ...core.compat import unwrap_module
from ...errors import InvalidOptionError, UnsupportedModelError
from ...models.spec import ModelSpec
from ..policy import Policy, Selection
from .calibration import DEFAULT_MAX_BYTES, Collector, Seen
from .checkpoint import HEADER, Header, about, tensors_of, write
from .jobs import Job, jobs, quantize_job
from .math import Layer, Recipe, reference_forward

if TYPE_CHECKING:
    from ...core.protocols import Pipeline

FILE = "svdquant.safetensors"
Progress = Callable[[str, int, int], None]  # stage ("calibrate" | "quantize"), done, of how many


@dataclass(frozen=True)
class Settings:
    """What decides the result (and hence whether an interrupted run can be gone on with).

    Attributes:
        recipe: how each layer is quantized.
        policy: which layers are.
        layout: see `jobs.jobs`.
        steps: denoising steps of each calibration run.
        seed: of the calibration runs.
        max_bytes: bound of what calibration keeps in memory and on disk.
    """

    recipe: Recipe = field(default_factory=Recipe)
    policy: Policy = field(default_factory=Policy)
    layout: str = "best"
    steps: int = 4
    seed: int = 0
    max_bytes: int = DEFAULT_MAX_BYTES

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        recipe = {**asdict(self.recipe), "dtype": str(self.recipe.dtype).removeprefix("torch.")}
        return {**recipe, "policy": asdict(self.policy), "layout": self.layout, "steps": self.steps, "seed": self.seed}


@dataclass
class Work:
    """A denoiser, and what to quantize of it."""

    component: str
    module: nn.Module
    jobs: list[Job]
    selection: Selection


def works(pipe: Pipeline, spec: ModelSpec, settings: Settings) -> list[Work]:
    """What there is to do.

    Raises:
        UnsupportedModelError: no layer of any denoiser can be quantized.
    """
    found = []
    for component in spec.denoisers:
        module = getattr(pipe, component, None)
        if module is not None:
            module = unwrap_module(module)  # torch.compile(model) has other names for its layers
            found.append(Work(component, module, *jobs(module, spec, settings.policy, settings.layout)))
    if not any(work.jobs for work in found):
        raise UnsupportedModelError(
            f"{type(pipe).__name__}: no linear layer to quantize ({spec.no_stack or 'the policy keeps all of them'})"
        )
    return found


def calibrate(
    pipe: Pipeline,
    todo: Sequence[Work],
    settings: Settings,
    prompts: Sequence[str],
    call: Mapping[str, Any],
    progress: Progress | None = None,
    folder: Path | None = None,
) -> dict[str, dict[str, Seen]]:
    """Run the pipeline once per prompt and remember what its layers read: component -> first layer of a job -> Seen.

    With a `folder`, what is known lies there after each prompt, and prompts that were done are not run again.
    """
    layers = {f"{w.component}.{j.names[0]}": w.module.get_submodule(j.names[0]) for w in todo for j in w.jobs}
    collector = Collector(layers, settings.max_bytes)  # type: ignore[arg-type]
    path = None if folder is None else folder / "calibration.safetensors"
    done = _load_seen(path, collector) if path is not None and path.is_file() else 0
    for index, prompt in enumerate(prompts):
        if progress is not None:
            progress("calibrate", min(max(index, done), len(prompts)), len(prompts))
        if index < done:
            continue
        draw = torch.Generator().manual_seed(settings.seed + index)
        with collector.watching(index), torch.no_grad():
            _plain_call(pipe)(
                pipe, prompt, num_inference_steps=settings.steps, generator=draw, output_type="latent", **call
            )
        if path is not None:
            _save_seen(path, collector, index + 1)
    if progress is not None:
        progress("calibrate", len(prompts), len(prompts))
    return {
        work.component: {job.names[0]: collector.seen[f"{work.component}.{job.names[0]}"] for job in work.jobs}
        for work in todo
    }


def quantize_pipeline(
    pipe: Pipeline,
    spec: ModelSpec,
    out: Path,
    settings: Settings,
    prompts: Sequence[str] = (),
    call: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Quantize the denoisers of a pipeline into `out/svdquant.safetensors`; the pipeline is left as it is.

    Args:
        prompts: calibration runs; without any, nothing is smoothed (no activation is known).
        call: more arguments of the calibration calls (size, guidance, ...).
        restart: throw an unfinished run in `out` away instead of going on with it.

    Returns:
        A report: path, bytes, bytes before, layers, kept, worst layers, seconds.

    Raises:
        InvalidOptionError: `out` holds an unfinished run of other settings.
        UnsupportedModelError, BudgetError: see `works` and `calibrate`.
    """
    started = time.perf_counter()
    todo = works(pipe, spec, settings)
    folder = out / "partial"
    _open_partial(folder, _fingerprint(todo, settings, prompts, call), restart)
    seen = calibrate(pipe, todo, settings, prompts, call or {}, progress, folder) if prompts else {}
    count, total = 0, sum(len(work.jobs) for work in todo)
    for work in todo:
        for index, job in enumerate(work.jobs):
            if progress is not None:
                progress("quantize", count, total)
            path = folder / f"{work.component}-{index:05d}.safetensors"
            if not path.is_file():
                _quantize_to(path, work, job, settings.recipe, seen.get(work.component, {}).get(job.names[0]))
            count += 1
    if progress is not None:
        progress("quantize", total, total)
    header = Header(
        {**settings.facts(), "prompts": len(prompts)}, {w.component: type(w.module).__name__ for w in todo}
    )
    size = _join(folder, todo, header, out / FILE)
    shutil.rmtree(folder)
    return _report(out / FILE, size, todo, header, time.perf_counter() - started)


def relative_error(weight: torch.Tensor, bias: torch.Tensor | None, layer: Layer, rows: torch.Tensor) -> float:
    """How far a quantized layer's output on `rows` [T, K] is from the original's, in L2."""
    truth = nn.functional.linear(rows, weight.float(), None if bias is None else bias.detach().float())
    return float((reference_forward(rows, layer) - truth).norm() / truth.norm().clamp(min=1e-30))


def _quantize_to(path: Path, work: Work, job: Job, recipe: Recipe, seen: Seen | None) -> None:
    layers, alphas = quantize_job(work.module, job, recipe, seen)
    tensors: dict[str, torch.Tensor] = {}
    entries = {}
    for name, layer in layers.items():
        linear: Any = work.module.get_submodule(name)
        error = None
        if seen is not None and seen.count:
            rows = seen.rows.to(linear.weight.device)
            error = relative_error(linear.weight.detach(), linear.bias, layer, rows)
        tensors |= tensors_of(f"{work.component}.{name}", layer)
        entries[name] = about(layer, alphas, error)
    write(path, tensors, json.dumps(entries))


def _join(folder: Path, todo: Sequence[Work], header: Header, path: Path) -> int:
    tensors: dict[str, torch.Tensor] = {}
    for work in todo:
        entries = header.layers.setdefault(work.component, {})
        for index in range(len(work.jobs)):
            piece = folder / f"{work.component}-{index:05d}.safetensors"
            tensors |= load_file(str(piece))
            with safe_open(str(piece), framework="pt") as file:
                entries.update(json.loads(file.metadata()[HEADER]))
    write(path, tensors, header.text())
    return path.stat().st_size


def _report(path: Path, size: int, todo: Sequence[Work], header: Header, seconds: float) -> dict[str, Any]:
    before = 0
    for work in todo:
        for name in work.selection.quantized:
            weight: Any = work.module.get_submodule(name).weight
            before += weight.numel() * weight.element_size()
    known = [
        {"layer": f"{component}.{name}", "relative_error": round(entry["error"], 5)}
        for component, entries in header.layers.items()
        for name, entry in entries.items()
        if entry["error"] is not None
    ]
    return {
        "path": str(path),
        "bytes": size,
        "bytes_before": before,
        "layers": sum(len(work.selection.quantized) for work in todo),
        "kept": {work.component: dict(work.selection.kept) for work in todo},
        "worst": sorted(known, key=lambda row: -float(row["relative_error"]))[:5],
        "seconds": round(seconds, 2),
    }


def _plain_call(pipe: Pipeline) -> Any:
    """The pipeline class's own `__call__`, also where the pipeline is accelerated."""
    return vars(type(pipe)).get(PLAIN, type(pipe)).__call__


def _shape(layer: Any) -> list[int]:
    return list(layer.weight.shape)


def _fingerprint(todo: Sequence[Work], settings: Settings, prompts: Sequence[str], call: Any) -> str:
    shapes = {
        f"{work.component}.{name}": _shape(work.module.get_submodule(name))
        for work in todo
        for job in work.jobs
        for name in job.names
    }
    facts = {"settings": settings.facts(), "max_bytes": settings.max_bytes, "prompts": list(prompts), "shapes": shapes}
    text = json.dumps({**facts, "call": {k: str(v) for k, v in (call or {}).items()}}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _open_partial(folder: Path, fingerprint: str, restart: bool) -> None:
    mark = folder / "settings"
    if restart and folder.is_dir():
        shutil.rmtree(folder)
    if mark.is_file() and mark.read_text() != fingerprint:
        raise InvalidOptionError(
            f"{folder} holds an unfinished run of another model, other prompts or other settings: give those again to "
            "go on with it, name another folder, or start anew (restart)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(fingerprint)


def _save_seen(path: Path, collector: Collector, done: int) -> None:
    tensors, facts = {}, {}
    for name, seen in collector.seen.items():
        tensors[f"{name}.absmax"], tensors[f"{name}.rows"] = seen.absmax, seen.rows
        facts[name] = [seen.least if seen.count else None, seen.count]
    write(path, tensors, json.dumps({"done": done, "seen": facts}))


def _load_seen(path: Path, collector: Collector) -> int:
    tensors = load_file(str(path))
    with safe_open(str(path), framework="pt") as file:
        facts = json.loads(file.metadata()[HEADER])
    for name, (least, count) in facts["seen"].items():
        least = float("inf") if least is None else least
        collector.seen[name] = Seen(tensors[f"{name}.absmax"], tensors[f"{name}.rows"], least, count)
    return int(facts["done"])
