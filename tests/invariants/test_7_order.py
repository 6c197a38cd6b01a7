"""Invariant 7: caches are outermost, so that a skipped block's weights are never moved; undo in reverse."""

from __future__ import annotations

import pytest
import torch
from diffusers.hooks.group_offloading import ModuleGroup

from diffaccel import restore
from tests import fingerprint, tiny

from .levers import CACHES, REUSE_ALL, accelerated, fresh, pattern, plain, put_on


def offload(model: torch.nn.Module, kind: str = "block_level") -> None:
    """diffusers' group offload, from CPU to CPU: the hooks are real, the transfers are not."""
    from diffusers.hooks import apply_group_offloading

    more = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    device = torch.device("cpu")
    apply_group_offloading(model, onload_device=device, offload_device=device, offload_type=kind, **more)


@pytest.mark.parametrize("family", CACHES)
def test_skipped_blocks_are_not_onloaded(family: str, onloads: list[ModuleGroup]) -> None:
    """Offload, then cache: each skipped block saves its onload; the picture is that of the cache alone."""
    pipe = tiny.build(family)
    offload(pipe.transformer)
    assert torch.equal(tiny.run(pipe, family), plain(family))
    onloads.clear()
    tiny.run(pipe, family)
    full = len(onloads)
    before = fingerprint.snapshot_pipe(pipe)

    put_on(pipe, family, "cache")
    for _ in range(2):
        onloads.clear()
        assert torch.equal(tiny.run(pipe, family), fresh(family))
        skipped = pattern(pipe).count(False) * (len(tiny.blocks(pipe.transformer)) - 1)
        assert skipped > 0 and len(onloads) == full - skipped

    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    onloads.clear()
    assert torch.equal(tiny.run(pipe, family), plain(family))
    assert len(onloads) == full


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_leaf_level_offload(family: str, onloads: list[ModuleGroup]) -> None:
    """Leaf-level offload under the cache: fewer onloads, same picture."""
    pipe = tiny.build(family)
    offload(pipe.transformer, "leaf_level")
    tiny.run(pipe, family)
    onloads.clear()
    tiny.run(pipe, family)
    full = len(onloads)
    put_on(pipe, family, "cache")
    onloads.clear()
    assert torch.equal(tiny.run(pipe, family), fresh(family))
    assert 0 < len(onloads) < full
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), plain(family))


@pytest.mark.parametrize("family", CACHES)
def test_offload_switched_on_later(family: str, onloads: list[ModuleGroup]) -> None:
    """Cache, then offload: the picture is the same, and restore leaves the offload working."""
    pipe = accelerated(family, "cache")
    tiny.run(pipe, family)
    offload(pipe.transformer)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, family), fresh(family))
    restore(pipe)
    onloads.clear()
    assert torch.equal(tiny.run(pipe, family), plain(family))
    twin = tiny.build(family)
    offload(twin.transformer)
    count = len(onloads)
    onloads.clear()
    tiny.run(twin, family)
    assert len(onloads) == count > 0


@pytest.mark.parametrize("family", CACHES)
def test_our_hooks_are_outermost_and_named(family: str) -> None:
    """On every block our hook is the last registered, under a name of ours; the user's stays below."""
    pipe = tiny.build(family)
    offload(pipe.transformer)
    put_on(pipe, family, "cache", cache_threshold=REUSE_ALL)
    for block in tiny.blocks(pipe.transformer):
        order = block._diffusers_hook._hook_order
        assert order[0] == "group_offloading" and order[-1].startswith("diffaccel."), order
