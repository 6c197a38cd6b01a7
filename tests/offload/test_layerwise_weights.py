"""Weights that change, are saved or are shared while they are away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import restore
from tests import fingerprint, tiny
from tests.invariants.levers import at_step, plain
from tests.offload.offloads import blocks_of, evicted, files, offloaded, stats


def _load(pipe: Any) -> None:
    pipe.transformer.load_state_dict({name: t * 1.5 for name, t in pipe.transformer.state_dict().items()})


def _assign(pipe: Any) -> None:
    new = {name: t * 1.5 for name, t in pipe.transformer.state_dict().items()}
    pipe.transformer.load_state_dict(new, assign=True)


def _data(pipe: Any) -> None:
    for parameter in pipe.transformer.parameters():
        parameter.data += 0.01


def _rebind(pipe: Any) -> None:
    for parameter in pipe.transformer.parameters():
        parameter.data = parameter.data.clone() * 1.5


def _replace(pipe: Any) -> None:
    for module in pipe.transformer.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(module.weight.detach() * 1.5)


def _narrow(pipe: Any) -> None:
    pipe.to(torch.bfloat16)


def _prune(pipe: Any) -> None:
    for module in pipe.transformer.modules():
        if isinstance(module, torch.nn.Linear):
            module.bias = None


@pytest.mark.parametrize("change", [_load, _assign, _data, _rebind, _replace, _narrow, _prune])
def test_weights_changed_between_runs(change: Callable[[Any], None], tmp_path: Path) -> None:
    """Offload, run, change the weights, run, restore, run: always the bits of a twin that was never offloaded."""
    pipe, twin = tiny.build("flux"), tiny.build("flux")
    offloaded(pipe, tmp_path)
    tiny.run(pipe, "flux")
    for one in (pipe, twin):
        with torch.no_grad():
            change(one)
    expected = tiny.run(twin, "flux")
    assert not torch.equal(expected, plain("flux"))
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, "flux"), expected)
    assert all(evicted(block, tmp_path) for block in blocks_of(pipe)) and len(files(tmp_path)) == 4
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), expected)
    for (name, a), (_, b) in zip(
        pipe.transformer.state_dict().items(), twin.transformer.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


def test_weights_changed_within_a_run(tmp_path: Path) -> None:
    """A step callback that changes weights by an in-place operation or a new tensor: what comes after uses them."""

    def change(pipe: Any) -> None:
        block = pipe.transformer.transformer_blocks[0]
        with torch.no_grad():
            block.attn.to_q.weight.mul_(1.5)
        block.attn.to_k.weight.data = block.attn.to_k.weight.data * 1.5

    pipe, twin = tiny.build("flux"), tiny.build("flux")
    offloaded(pipe, tmp_path)
    expected = tiny.run(twin, "flux", callback_on_step_end=at_step(2, change))
    assert torch.equal(tiny.run(pipe, "flux", callback_on_step_end=at_step(2, change)), expected)
    assert torch.equal(tiny.run(pipe, "flux"), tiny.run(twin, "flux"))


def test_saving_while_offloaded(tmp_path: Path) -> None:
    """state_dict and save_pretrained have the right values, and what is saved stays right after the offload ended."""
    pipe = tiny.build("flux")
    expected = {name: t.clone() for name, t in pipe.transformer.state_dict().items()}
    offloaded(pipe, tmp_path / "store")
    tiny.run(pipe, "flux")
    taken = pipe.transformer.state_dict()
    assert list(taken) == list(expected)
    pipe.save_pretrained(tmp_path / "saved")
    restore(pipe)
    assert all(torch.equal(taken[name], expected[name]) for name in expected)
    from diffusers import FluxPipeline

    again = FluxPipeline.from_pretrained(tmp_path / "saved").to("cpu")
    assert all(torch.equal(t, expected[name]) for name, t in again.transformer.state_dict().items())


def test_shared_weights_stay_and_are_counted_once(tmp_path: Path) -> None:
    """One Parameter in two blocks, and one that a module outside of the blocks uses: still one, in memory."""
    pipe = tiny.build("flux")
    first, second = pipe.transformer.transformer_blocks
    second.attn.to_q.weight = first.attn.to_q.weight
    second.attn.to_k.weight.data = first.attn.to_k.weight.data  # two Parameters, one memory
    reference = tiny.run(pipe, "flux")
    before = fingerprint.snapshot_pipe(pipe)
    offloaded(pipe, tmp_path)
    assert torch.equal(tiny.run(pipe, "flux"), reference)
    assert second.attn.to_q.weight is first.attn.to_q.weight
    assert second.attn.to_k.weight.data_ptr() == first.attn.to_k.weight.data_ptr()
    size = max(sum(p.numel() * 4 for p in b.parameters()) for b in blocks_of(pipe))
    shared = 2 * first.attn.to_q.weight.numel() * 4
    assert stats(pipe)["live_bytes_peak"] == pytest.approx(2 * (size - shared) + shared, rel=0.01)
    with torch.no_grad():
        first.attn.to_k.weight.mul_(2)
    changed = tiny.run(pipe, "flux")
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), changed) and not torch.equal(changed, reference)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_weights_written_to_while_their_block_computes(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A block that changes its own weights as it runs (every call, in place) ends with the twin's weights and bits."""

    def wear(module: torch.nn.Module, *_: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(1.02)

    results, weights = [], []
    for offload in (False, True):
        pipe = tiny.build(family, dtype=dtype)
        if offload:
            offloaded(pipe, tmp_path)
        worn = [next(m for m in b.modules() if isinstance(m, torch.nn.Linear)) for b in blocks_of(pipe)]
        before = [layer.weight.detach().clone() for layer in worn]
        for layer in worn:
            layer.register_forward_hook(wear)
        results.append([tiny.run(pipe, family) for _ in range(2)])
        weights.append([layer.weight.detach().clone() for layer in worn])
        assert not any(torch.equal(a, b) for a, b in zip(before, weights[-1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(*results[0]), "the second run sees what the first one wrote"
