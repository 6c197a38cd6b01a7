"""One run of a pipeline with open eyes: pictures or the error, the report, what was logged, compiled and tokenized."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.compat import compile_counts
from ..core.report import RunReport
from .reading import Read, reading
from .signals import as_videos

STEPS = 12  # more than the nine below which caches stand down
LOGGERS = ("diffusers", "torch._dynamo", "transformers")


@dataclass
class Observation:
    """What one run gave.

    Attributes:
        pictures: [N, F, C, H, W] in 0..1; latents in their own range where there is no VAE; None after an error.
        error: what was raised.
        inside: the component in whose module it was raised, "" where in none.
        report: of an accelerated pipeline.
        graphs: compiled by torch.compile in this run.
        said: warnings that libraries logged.
        reads: texts that tokenizers were given.
    """

    pictures: torch.Tensor | None = None
    error: Exception | None = None
    inside: str = ""
    report: RunReport | None = None
    graphs: int = 0
    said: tuple[str, ...] = ()
    reads: list[Read] = field(default_factory=list)


def arguments(pipe: Any, call: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The arguments of a call: the user's, and what every observed run has; fresh noise of `seed`."""
    known = inspect.signature(type(pipe).__call__).parameters
    ours = {
        "num_inference_steps": STEPS,
        "output_type": "latent" if getattr(pipe, "vae", None) is None else "pt",
        "generator": torch.Generator("cpu").manual_seed(seed),
    }
    return {name: value for name, value in ours.items() if name in known} | dict(call)


def observe(pipe: Any, call: Mapping[str, Any], seed: int = 0) -> Observation:
    """One run. Errors are caught and kept: whoever asks a doctor expects some."""
    seen, graphs = Observation(), compile_counts()[0]
    with _logged() as said, reading(pipe) as seen.reads:
        try:
            with torch.no_grad():
                seen.pictures = _pictures(pipe(**arguments(pipe, call, seed)))
        except Exception as error:
            seen.error, seen.inside = error, inside(pipe, error)
    seen.graphs, seen.said = compile_counts()[0] - graphs, tuple(said)
    handle = getattr(pipe, "acceleration", None)
    seen.report = None if handle is None else handle.report
    return seen


def _pictures(output: Any) -> torch.Tensor | None:
    found = getattr(output, "images", None)
    found = getattr(output, "frames", None) if found is None else found
    if isinstance(found, (list, tuple)) and found and isinstance(found[0], torch.Tensor):
        found = torch.stack(list(found))
    if not isinstance(found, torch.Tensor):
        return None
    while found.ndim < 4:  # packed latents [N, tokens, channels]
        found = found[:, None]
    return as_videos(found)


def inside(pipe: Any, error: BaseException) -> str:
    """The component in one of whose modules the error was raised, by the frames it went through; "" for none."""
    owners = {
        id(module): name
        for name, part in pipe.components.items()
        if isinstance(part, torch.nn.Module)
        for module in part.modules()
    }
    found, trace = "", error.__traceback__
    while trace is not None:
        owner = owners.get(id(trace.tb_frame.f_locals.get("self")))
        found, trace = owner or found, trace.tb_next
    return found


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Warnings of the libraries below us, as text."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    ear, loggers = Ear(logging.WARNING), [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(ear)
    try:
        yield said
    finally:
        for logger in loggers:
            logger.removeHandler(ear)


# ---- where numbers go wrong ----------------------------------------------------------------------------------------


def first_not_finite(pipe: Any, call: Mapping[str, Any], seed: int = 0) -> str:
    """The first layer whose output is not finite though its inputs are, by one more run; "" where none is seen."""
    found: list[str] = []

    def look(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not found and not _finite(output) and _finite(args):
                bad = [key for key, value in module.named_parameters(recurse=False) if not _finite(value.float())]
                found.append(f"{name} ({type(module).__name__}{', in its ' + ' and '.join(bad) if bad else ''})")

        return hook

    with contextlib.ExitStack() as stack:
        for component, part in pipe.components.items():
            for name, module in part.named_modules() if isinstance(part, torch.nn.Module) else ():
                if not list(module.children()):
                    stack.callback(module.register_forward_hook(look(f"{component}.{name}")).remove)
        observe(pipe, call, seed)
    return found[0] if found else ""


def _finite(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_finite(part) for part in value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return True
    return bool(torch.isfinite(value).all())
