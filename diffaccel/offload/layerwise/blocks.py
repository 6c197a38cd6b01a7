"""What a layerwise offload finds: the blocks and their bytes, what they share, and who else moves weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...core.accelerator import Target
from ...core.chain import PREFIX, whole_in_graph
from ...core.compat import REGISTRY, foreign_offload, unwrap_module
from ...core.unloaded import execution_device
from ...models.spec import BlockList
from ..packing import pack, shared_between, span, tensors_of

HOOK = "offload.layerwise"
# In diffusers' names of layers: adaptive norms and modulation see one vector per sample, and a text stream's own
# layers see the text's tokens, which are few.
NOT_PER_TOKEN = ("norm", "mod", "context", "add_", "txt")


@dataclass(frozen=True)
class BlockTable:
    """The blocks of all denoisers in running order.

    Attributes:
        blocks: (block, its card row).
        components: the denoiser each belongs to.
        sizes: bytes of each block in a buffer, without what it shares.
        shared: ids of the tensors that more than one block, or anything else, refers to; they stay.
        shared_bytes: bytes of those that belong to blocks, each once.
        attached: is a layerwise offload on already?
    """

    blocks: tuple[tuple[torch.nn.Module, BlockList], ...]
    components: tuple[str, ...]
    sizes: tuple[int, ...]
    shared: frozenset[int]
    shared_bytes: int
    attached: bool

    @property
    def total_bytes(self) -> int:
        """Of all blocks."""
        return sum(self.sizes) + self.shared_bytes


def denoisers(target: Target) -> Iterator[tuple[str, torch.nn.Module]]:
    """The denoisers that the pipeline has, by name."""
    for name in target.spec.denoisers:
        module = getattr(target.pipe, name, None)
        if module is not None:
            yield name, module


def compute_device(target: Target, wanted: str | None) -> torch.device:
    """Where the denoiser computes."""
    if wanted is not None:
        return torch.device(wanted)
    return execution_device(target.pipe)


def find_blocks(target: Target) -> BlockTable:
    """Look at the blocks. Raises IncompatibleError where a weight cannot be moved."""
    blocks: list[tuple[torch.nn.Module, BlockList]] = []
    components: list[str] = []
    seen: set[int] = set()
    for name, module in denoisers(target):
        for row in target.spec.stack:
            for block in getattr(unwrap_module(module), row.attribute, ()):
                if id(block) not in seen:
                    seen.add(id(block))
                    blocks.append((block, row))
                    components.append(name)
    shared = shared_of(target, [block for block, _ in blocks])
    sizes: list[int] = []
    both: set[tuple[int, int]] = set()
    for block, _ in blocks:
        tensors = tensors_of(unwrap_module(block))
        sizes.append(pack((name, t) for name, t in tensors if id(t) not in shared).nbytes)
        both |= {span(t) for _, t in tensors if id(t) in shared}
    attached = any(_has_hook(block, PREFIX + HOOK) for block, _ in blocks)
    shared_bytes = sum(end - begin for begin, end in both)
    return BlockTable(tuple(blocks), tuple(components), tuple(sizes), frozenset(shared), shared_bytes, attached)


def shared_of(target: Target, blocks: list[torch.nn.Module]) -> set[int]:
    """Ids of the tensors that more than one block, or a block and anything else of the pipeline, refers to."""
    components = [c for c in target.pipe.components.values() if isinstance(c, torch.nn.Module)]
    return shared_between([unwrap_module(c) for c in components], [unwrap_module(block) for block in blocks])


def work_per_token(block: torch.nn.Module) -> float:
    """Weights that one token of the picture is multiplied with in this block, estimated from its linear layers."""
    total = 0.0
    for path, child in unwrap_module(block).named_modules():
        ins, outs = getattr(child, "in_features", None), getattr(child, "out_features", None)
        if isinstance(ins, int) and isinstance(outs, int) and not any(word in path for word in NOT_PER_TOKEN):
            total += ins * outs
    return total


def compiled_whole(target: Target) -> str | None:
    """The first denoiser that is compiled as a whole."""
    for name, module in denoisers(target):
        if whole_in_graph(module):
            return name
    return None


def other_offload(target: Target) -> str | None:
    """Who else moves the weights of a denoiser, in words."""
    for name, module in denoisers(target):
        found = foreign_offload(module)
        if found is not None:
            return f"{found}, on {name},"
    return None


def _has_hook(module: torch.nn.Module, name: str) -> bool:
    return name in getattr(vars(unwrap_module(module)).get(REGISTRY), "hooks", {})
