"""What a run computed, module by module, as digests of bits: enough to say where two runs part, in little memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.run import current_run
from ..models.registry import lookup

_DENOISERS = ("transformer", "transformer_2", "unet")


@dataclass(frozen=True)
class Mark:
    """One call of a module: in which step of the loop (None outside of it), which module, digest of its outputs."""

    step: int | None
    site: str
    digest: str


@dataclass
class Trace:
    """All marks of a run, in their order, and the outputs of the call that was asked for."""

    marks: list[Mark] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)

    def parts_at(self, other: Trace) -> int | None:
        """Index of the first call that is not as in `other`; None where all are."""
        for index, (one, two) in enumerate(zip(self.marks, other.marks, strict=False)):
            if one != two:
                return index
        return min(len(self.marks), len(other.marks)) if len(self.marks) != len(other.marks) else None


@contextmanager
def tracing(pipe: Any, row: tuple[int, int] = (0, 1), keep: int | None = None) -> Iterator[Trace]:
    """Trace the calls of the pipeline's modules for the length of the `with`.

    row: (place, size) of the prompt in its batch: only its part of each output counts.
    keep: index of the call whose outputs are kept.
    Steps are seen where the pipeline has a handle (`attach` will do). The hooks are gone afterwards.
    """
    trace = Trace()
    with ExitStack() as stack:
        for name, module in sites(pipe).items():
            handle = module.register_forward_hook(_hook(trace, name, row, keep))
            stack.callback(handle.remove)
        yield trace


def sites(pipe: Any) -> dict[str, torch.nn.Module]:
    """Name -> module, of text encoders, blocks of denoisers, denoisers, and the decoder."""
    found: dict[str, torch.nn.Module] = {}
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module) and name.startswith("text_encoder"):
            found[name] = part
    lists = [block.attribute for block in lookup(pipe).stack]
    for name in _DENOISERS:
        part = getattr(pipe, name, None)
        if isinstance(part, torch.nn.Module):
            found |= _blocks(name, part, lists)
            found[name] = part
    decoder = getattr(getattr(pipe, "vae", None), "decoder", None)
    return found if decoder is None else {**found, "vae.decoder": decoder}


def _blocks(name: str, denoiser: torch.nn.Module, lists: Sequence[str]) -> dict[str, torch.nn.Module]:
    """The blocks of a known stack, else the modules right below the denoiser."""
    inside = [(f"{name}.{at}.{i}", block) for at in lists for i, block in enumerate(getattr(denoiser, at, ()))]
    if inside:
        return dict(inside)
    children = denoiser.named_children()
    return {
        f"{name}.{at}.{i}" if isinstance(child, torch.nn.ModuleList) else f"{name}.{at}": one
        for at, child in children
        for i, one in enumerate(child if isinstance(child, torch.nn.ModuleList) else [child])
    }


def _hook(trace: Trace, site: str, row: tuple[int, int], keep: int | None) -> Any:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        tensors = [part(tensor, row) for tensor in flat(output)]
        if len(trace.marks) == keep:
            trace.kept = [tensor.detach().float().cpu() for tensor in tensors]
        trace.marks.append(Mark(_step(), site, digest(tensors)))

    return torch.compiler.disable(hook)  # where blocks are compiled it breaks their graph, and sees what they gave


def _step() -> int | None:
    """The step of the run in progress; None in front of and behind its loop."""
    run = current_run()
    inside = run is not None and run.calls and (run.total is None or run.step < run.total)
    return run.step if run is not None and inside else None


def flat(output: Any) -> list[torch.Tensor]:
    """The tensors in an output of a module, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    return [tensor for one in output for tensor in flat(one)] if isinstance(output, list | tuple) else []


def part(tensor: torch.Tensor, row: tuple[int, int]) -> torch.Tensor:
    """What belongs to one prompt of a batch; guidance branches stand one behind the other: [k * size, ...]."""
    place, size = row
    if size == 1 or tensor.ndim == 0 or tensor.shape[0] % size:
        return tensor
    return tensor.reshape(-1, size, *tensor.shape[1:])[:, place]


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Of shapes, dtypes and bits."""
    found = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        found.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
