"""diffusers' own first-block cache for the length of a run, and which of its calls were computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def first_block(pipe: Any, threshold: float) -> Iterator[list[bool]]:
    """diffusers' own first-block cache, on for the length of the `with`. Gives, for every call of the denoiser,
    whether its last block was computed."""
    from diffusers import FirstBlockCacheConfig

    denoiser, told = pipe.transformer, list[bool]()
    inside = _last_part(pipe)
    handles = [
        denoiser.register_forward_pre_hook(lambda *_: told.append(False)),
        inside.register_forward_pre_hook(lambda *_: told.__setitem__(-1, True)),
    ]
    denoiser.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    try:
        yield told
    finally:
        denoiser.disable_cache()
        for handle in handles:
            handle.remove()


def _last_part(pipe: Any) -> torch.nn.Module:
    """The first part with weights of the denoiser's last block: what diffusers' hooks on blocks let through only where
    the block is computed."""
    from ..models.registry import lookup

    last: torch.nn.Module = getattr(pipe.transformer, lookup(pipe).stack[-1].attribute)[-1]
    return next(part for part in last.modules() if not list(part.children()) and list(part.parameters()))


def by_step(told: Sequence[bool], steps: int) -> tuple[bool, ...]:
    """Per step, whether any of its calls (guidance branches) was computed."""
    each = max(1, len(told) // steps)
    return tuple(any(told[begin : begin + each]) for begin in range(0, len(told), each))
