"""Invariant 8: our hooks stay in the forward chain whatever others do to it, and compiled stays compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from diffusers.hooks import HookRegistry, ModelHook

from diffaccel import restore
from tests import fingerprint, tiny

from .levers import CACHES, accelerated, counted, fresh, fresh_run, inner, pattern, plain, put_on
from .test_7_order import offload


def model_offload(pipe: Any) -> None:
    """accelerate's model offload, to the CPU as device: it re-applies itself at every run's end."""
    pipe.enable_model_cpu_offload(device="cpu")


def sequential_offload(pipe: Any) -> None:
    """accelerate's sequential offload as diffusers applies it (its own method wants an accelerator)."""
    for _, module in tiny.component_modules(pipe):
        cpu_offload(module, torch.device("cpu"), offload_buffers=len(module._parameters) > 0)


def group_offload(pipe: Any) -> None:
    """diffusers' group offload of every component."""
    device = torch.device("cpu")
    pipe.enable_group_offload(device, device, offload_type="block_level", num_blocks_per_group=1)


OFFLOADS: dict[str, Callable[[Any], None]] = {
    "model": model_offload,
    "sequential": sequential_offload,
    "group": group_offload,
}


BEFORE = [(family, kind) for family in CACHES for kind in OFFLOADS] + [("sdxl", "model")]


@pytest.mark.parametrize(("family", "kind"), BEFORE)
def test_offload_before_attach(family: str, kind: str) -> None:
    """Three runs under each kind of offload: same picture, same hits, and the blocks really are skipped."""
    pipe = tiny.build(family)
    OFFLOADS[kind](pipe)
    assert torch.equal(tiny.run(pipe, family), plain(family))
    put_on(pipe, family, "cache")
    reference, records = fresh_run(family)
    for run in range(3):
        if family == "sdxl":
            assert torch.equal(tiny.run(pipe, family), reference), f"run {run}"
        else:
            with counted(inner(pipe)) as calls:
                assert torch.equal(tiny.run(pipe, family), reference), f"run {run}"
            assert calls[0] == sum(computed for _, _, computed in records), f"run {run}"
        assert len(pattern(pipe)) == len(records), f"run {run}"
        assert pattern(pipe) == [computed for _, _, computed in records], f"run {run}"
    restore(pipe)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, family), plain(family))


@pytest.mark.parametrize(
    ("family", "kind"), [("flux", "model"), ("flux", "sequential"), ("flux", "group"), ("wan", "model")]
)
def test_offload_after_attach(family: str, kind: str) -> None:
    """Offload switched on later: it drops our forwards, and the next run has them back."""
    pipe = accelerated(family, "both")
    tiny.run(pipe, family)
    OFFLOADS[kind](pipe)
    for run in range(3):
        with counted(inner(pipe)) as calls:
            assert torch.equal(tiny.run(pipe, family), fresh(family, "both")), f"run {run}"
        assert 0 < calls[0] == pattern(pipe).count(True) < len(pattern(pipe)), f"run {run}"
    restore(pipe)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, family), plain(family))


def assert_only_plain_forwards(pipe: Any) -> None:
    """Where accelerate or diffusers left an instance-level forward behind, it is the class's own."""
    for path, module in pipe.transformer.named_modules():
        forward = vars(module).get("forward")
        assert forward is None or forward.__func__ is type(module).forward, path


@pytest.mark.parametrize("family", CACHES)
def test_restore_under_model_offload_leaves_offload(family: str) -> None:
    """After restore the offload hooks are accelerate's own again and nothing of ours is on the denoiser."""
    pipe = tiny.build(family)
    model_offload(pipe)
    tiny.run(pipe, family)
    put_on(pipe, family, "cache")
    tiny.run(pipe, family)
    restore(pipe)
    assert hasattr(pipe.transformer, "_hf_hook")
    for path, module in pipe.transformer.named_modules():
        assert not getattr(getattr(module, "_diffusers_hook", None), "_hook_order", []), path
    pipe.remove_all_hooks()
    pipe._all_hooks = []
    assert_only_plain_forwards(pipe)
    assert torch.equal(tiny.run(pipe, family), plain(family))


class Below(ModelHook):
    """A hook of diffusers' own kind, with nothing to do."""


@pytest.mark.parametrize("family", CACHES)
def test_a_lower_hook_removed_while_the_cache_is_on(family: str) -> None:
    """HookRegistry.remove_hook on a hook below ours must not cut the cache out of the chain."""
    pipe = tiny.build(family)
    for block in tiny.blocks(pipe.transformer):
        HookRegistry.check_if_exists_or_initialize(block).register_hook(Below(), "below")
    put_on(pipe, family, "cache")
    assert torch.equal(tiny.run(pipe, family), fresh(family))
    for block in tiny.blocks(pipe.transformer):
        block._diffusers_hook.remove_hook("below", recurse=False)
    with counted(inner(pipe)) as calls:
        assert torch.equal(tiny.run(pipe, family), fresh(family))
    assert 0 < calls[0] == pattern(pipe).count(True) < len(pattern(pipe))
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), plain(family))
    assert_only_plain_forwards(pipe)


@pytest.mark.parametrize("family", CACHES)
def test_group_offload_removed_while_the_cache_is_on(family: str) -> None:
    """The same with diffusers' group offload, the case that was seen: last block from 1 call to 8."""
    pipe = tiny.build(family)
    offload(pipe.transformer)
    put_on(pipe, family, "cache")
    tiny.run(pipe, family)
    pipe.transformer._diffusers_hook.remove_hook("group_offloading", recurse=True)
    with counted(tiny.blocks(pipe.transformer)[-1].ff if family == "sd3" else inner(pipe)) as calls:
        assert torch.equal(tiny.run(pipe, family), fresh(family))
    assert 0 < calls[0] == pattern(pipe).count(True) < len(pattern(pipe))


class Tracker(ModelHook):
    """On the denoiser: takes the hooks below the blocks' caches away at the end of its first forward.

    diffusers' group offload with streams does this: it learns the order in the first forward, then drops the
    trackers and registers prefetching hooks.
    """

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Remove the trackers, and itself, in the middle of the run."""
        module._diffusers_hook.remove_hook("tracker", recurse=True)
        module._diffusers_hook.remove_hook("tracker_root", recurse=False)
        return output


@pytest.mark.parametrize("family", CACHES)
def test_hooks_that_go_in_the_middle_of_a_run(family: str) -> None:
    """Lower hooks removed during the first forward: the cache acts from that very run on."""
    pipe = tiny.build(family)
    for block in tiny.blocks(pipe.transformer):
        HookRegistry.check_if_exists_or_initialize(block).register_hook(Below(), "tracker")
    HookRegistry.check_if_exists_or_initialize(pipe.transformer).register_hook(Tracker(), "tracker_root")
    put_on(pipe, family, "cache")
    for _ in range(2):
        with counted(inner(pipe)) as calls:
            assert torch.equal(tiny.run(pipe, family), fresh(family))
        assert 0 < calls[0] == pattern(pipe).count(True) < len(pattern(pipe))
    assert "tracker" not in tiny.blocks(pipe.transformer)[0]._diffusers_hook.hooks
    restore(pipe)
    assert torch.equal(tiny.run(pipe, family), plain(family))


@pytest.fixture
def dynamo() -> Iterator[Callable[[], int]]:
    """A clean torch.compile; the number of graphs it has made so far."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def compile_blocks(pipe: Any) -> None:
    """Regional compilation, in place."""
    pipe.transformer.compile_repeated_blocks(backend="eager")


def compile_in_place(pipe: Any) -> None:
    """The whole denoiser, in place."""
    pipe.transformer.compile(backend="eager")


def compile_wrapped(pipe: Any) -> None:
    """The whole denoiser, replaced by a wrapper module."""
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")


COMPILES = {"blocks": compile_blocks, "in place": compile_in_place, "wrapped": compile_wrapped}
COMPILED = [
    ("flux", "blocks", "compile first"),
    ("flux", "blocks", "attach first"),
    ("wan", "blocks", "compile first"),
    ("flux", "wrapped", "compile first"),
    ("wan", "wrapped", "attach first"),
    ("flux", "in place", "attach first"),
]


@pytest.mark.parametrize(("family", "kind", "order"), COMPILED)
def test_compiled(family: str, kind: str, order: str, dynamo: Callable[[], int]) -> None:
    """Picture and hits of the uncompiled cache, nothing compiled in a second call, still compiled after."""
    call = {"num_inference_steps": 4} | tiny.no_guidance(family)
    reference, records = fresh_run(family, **call)
    computed = [flag for _, _, flag in records]
    assert True in computed and False in computed
    pipe = tiny.build(family)
    before = None
    if order == "compile first":
        COMPILES[kind](pipe)
        tiny.run(pipe, family, **call)
        assert dynamo() > 0, "nothing was compiled"
        before = fingerprint.snapshot_pipe(pipe)
        put_on(pipe, family, "cache")
    else:
        put_on(pipe, family, "cache")
        COMPILES[kind](pipe)
    torch.testing.assert_close(tiny.run(pipe, family, **call), reference, atol=1e-5, rtol=0)
    assert pattern(pipe) == computed
    graphs = dynamo()
    assert graphs > 0, "nothing was compiled"
    with torch._dynamo.config.patch(error_on_recompile=True):
        again = tiny.run(pipe, family, **call)
    torch.testing.assert_close(again, reference, atol=1e-5, rtol=0)
    assert pattern(pipe) == computed
    assert dynamo() == graphs, "a second identical call compiled again"
    restore(pipe)
    if before is not None:
        fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    torch.testing.assert_close(tiny.run(pipe, family, **call), plain(family, **call), atol=1e-5, rtol=0)
