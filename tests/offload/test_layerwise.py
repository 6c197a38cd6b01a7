"""Layerwise offload: the same bits with few blocks in memory, and everything as it was afterwards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import IncompatibleError, Plan, accelerate, attach, plan, restore
from diffaccel.offload.store import FOLDER_PREFIX
from tests import fingerprint, tiny
from tests.invariants.levers import Stop, at_step, plain, raise_at
from tests.models.families import table
from tests.offload.offloads import ITEM, blocks_of, evicted, files, offloaded, stats

# ---- the same bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("resident_layers", "prefetch"), [(1, 0), (1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("family", ["flux", "wan22"])
def test_exact_within_bounds(family: str, resident_layers: int, prefetch: int, tmp_path: Path) -> None:
    """Two runs equal the plain one; no more blocks than allowed at once; undone without a trace."""
    pipe = tiny.build(family)
    assert torch.equal(tiny.run(pipe, family), plain(family))
    before = fingerprint.snapshot_pipe(pipe)
    offloaded(pipe, tmp_path, resident_layers=resident_layers, prefetch=prefetch)
    predicted = pipe.acceleration.plan.item(ITEM).predicted
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, family), plain(family))
        found = stats(pipe)
        assert found["live_blocks_peak"] == resident_layers + prefetch
        assert found["live_bytes_peak"] == predicted["resident_bytes"]
    assert pipe.acceleration.plan.item(ITEM).measured["bytes_moved"] == found["bytes_moved"]
    assert files(tmp_path)
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert list(tmp_path.iterdir()) == [] and torch.equal(tiny.run(pipe, family), plain(family))


STACKS = [name for name in table.FAMILIES if name not in ("flux_cfg", "flux_img2img", "flux_inpaint", "flux_fill")]


@pytest.mark.parametrize("name", STACKS)
def test_every_family(name: str, tmp_path: Path) -> None:
    """Each family with a stack of blocks: bit-equal, blocks really moved, nothing left."""
    pipe = table.build(name)
    reference = table.run(pipe, name)
    names = [list(c.state_dict()) for _, c in tiny.component_modules(pipe)]
    offloaded(pipe, tmp_path)
    found = table.run(pipe, name)
    assert all(torch.equal(a, b) for a, b in zip(reference, found, strict=True))
    assert stats(pipe)["blocks_moved"] > 0 and stats(pipe)["live_blocks_peak"] == 2
    restore(pipe)
    assert [list(c.state_dict()) for _, c in tiny.component_modules(pipe)] == names
    assert all(torch.equal(a, b) for a, b in zip(reference, table.run(pipe, name), strict=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Half precision goes the same way."""
    pipe = tiny.build("wan", dtype=dtype)
    reference = tiny.run(pipe, "wan")
    offloaded(pipe, tmp_path)
    assert torch.equal(tiny.run(pipe, "wan"), reference)


# ---- where the weights are -------------------------------------------------------------------------------


def test_weights_are_in_the_files(tmp_path: Path) -> None:
    """Between runs every block that takes turns points into its file; inside, only the one that computes does not."""
    pipe = tiny.build("flux")
    offloaded(pipe, tmp_path, resident_layers=2)
    blocks = blocks_of(pipe)
    assert [evicted(b, tmp_path) for b in blocks] == [False, True, True, True]
    seen: list[list[bool]] = []
    for block in blocks:
        block.attn.register_forward_hook(lambda *_: seen.append([evicted(b, tmp_path) for b in blocks]))
    tiny.run(pipe, "flux")
    for at, row in enumerate(seen):
        assert row == [i not in (0, at % 4) for i in range(4)]
    assert [evicted(b, tmp_path) for b in blocks] == [False, True, True, True]
    assert len(seen) == 4 * tiny.STEPS


def resident_kib() -> int:
    """Anonymous memory of this process: what no file backs."""
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon")]
    return int(line.split()[1])


def test_memory_is_really_freed(tmp_path: Path) -> None:
    """Twelve blocks of 10 MiB: the process is smaller by what moved, during a run too."""
    from diffusers import FluxTransformer2DModel

    pipe = tiny.build("flux")
    pipe.transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=0, num_single_layers=12, attention_head_dim=64,
        num_attention_heads=6, joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    ).eval()  # fmt: skip
    reference = tiny.run(pipe, "flux")
    size = sum(p.numel() * 4 for p in pipe.transformer.single_transformer_blocks[0].parameters())
    assert 8e6 < size < 12e6
    before = resident_kib()
    offloaded(pipe, tmp_path, resident_layers=2, prefetch=1)
    attached = resident_kib()
    assert before - attached > 0.9 * 11 * size / 1024
    during: list[int] = []
    for block in blocks_of(pipe):
        block.register_forward_hook(lambda *_: during.append(resident_kib()))
    assert torch.equal(tiny.run(pipe, "flux"), reference)
    assert max(during) - attached < 4 * size / 1024  # two buffers, and what the pass itself needs
    assert stats(pipe)["live_bytes_peak"] == pytest.approx(3 * size, rel=0.05)
    restore(pipe)
    assert resident_kib() - attached > 0.9 * 11 * size / 1024


def test_order_is_learnt(tmp_path: Path) -> None:
    """Blocks that run in another order than they are listed: after one pass nothing is fetched in vain (C28)."""
    from diffusers import FluxTransformer2DModel

    class Reversed(FluxTransformer2DModel):
        """Runs its blocks from the last to the first."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            listed = self._modules["transformer_blocks"]
            self._modules["transformer_blocks"] = list(listed)[::-1]
            try:
                return super().forward(*args, **kwargs)
            finally:
                self._modules["transformer_blocks"] = listed

    pipe = tiny.build("flux")
    config = {k: v for k, v in pipe.transformer.config.items() if not k.startswith("_")} | {"num_layers": 5}
    model = Reversed(**config).eval()
    Reversed.__name__ = "FluxTransformer2DModel"  # what its card goes by
    pipe.transformer = model
    reference = tiny.run(pipe, "flux")
    offloaded(pipe, tmp_path)
    ran: list[int] = []
    for i, block in enumerate(model.transformer_blocks):
        block.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
    assert torch.equal(tiny.run(pipe, "flux"), reference)
    assert ran[:5] == [4, 3, 2, 1, 0]
    assert stats(pipe)["blocks_moved"] == 7 * tiny.STEPS


# ---- runs that end early, runs within runs, other callers ------------------------------------------------


@pytest.mark.parametrize("error", [Stop("stop"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("where", ["callback", "block"])
def test_a_run_that_ends_early(where: str, error: BaseException, tmp_path: Path) -> None:
    """All is evicted again, no thread is left, and the next run is as if nothing had been."""
    pipe = tiny.build("wan")
    offloaded(pipe, tmp_path)
    calls = [0]

    def fail(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise error

    handle = pipe.transformer.blocks[1].attn1.register_forward_hook(fail) if where == "block" else None
    more = {"callback_on_step_end": raise_at(2, error)} if where == "callback" else {}
    with pytest.raises(type(error)):
        tiny.run(pipe, "wan", **more)
    if handle is not None:
        handle.remove()
    assert all(evicted(block, tmp_path) for block in blocks_of(pipe))
    assert not [t for t in threading.enumerate() if t.name.startswith("diffaccel-offload")]
    assert torch.equal(tiny.run(pipe, "wan"), plain("wan"))
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "wan"), plain("wan"))


def test_runs_within_runs_and_pauses(tmp_path: Path) -> None:
    """A nested run, and a run paused at a step and gone on with after another one."""
    pipe = tiny.build("flux")
    offloaded(pipe, tmp_path)
    inner: list[torch.Tensor] = []
    nest = at_step(2, lambda p: inner.append(tiny.run(pipe, "flux", seed=5)))
    assert torch.equal(tiny.run(pipe, "flux", callback_on_step_end=nest), plain("flux"))
    assert torch.equal(inner[0], plain("flux", seed=5))
    states: list[Any] = []

    def pause(pipe: Any) -> None:
        states.append(pipe.acceleration.snapshot())
        raise Stop("pause")

    with pytest.raises(Stop):
        tiny.run(pipe, "flux", callback_on_step_end=at_step(2, pause))
    tiny.run(pipe, "flux", seed=5)
    assert torch.equal(tiny.output(pipe.acceleration.resume(states[0])), plain("flux"))


def test_other_callers_of_the_denoiser(tmp_path: Path) -> None:
    """A plain pipeline on the same denoiser, and direct calls: exact, with their weights fetched for them."""
    from diffusers import FluxPipeline

    pipe = tiny.build("flux")
    offloaded(pipe, tmp_path)
    other = FluxPipeline(**pipe.components)
    other.set_progress_bar_config(disable=True)
    assert torch.equal(tiny.run(other, "flux"), plain("flux"))
    with pytest.raises(IncompatibleError, match="shared with a pipeline"):
        attach(other)
    assert all(evicted(block, tmp_path) for block in blocks_of(pipe))


def test_gradients_are_right(tmp_path: Path) -> None:
    """A direct call with gradients on: those of the plain model."""
    grads = []
    for offload in (False, True):
        pipe = tiny.build("wan")
        if offload:
            offloaded(pipe, tmp_path)
        x = torch.randn(1, 16, 1, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        text = torch.ones(1, 4, 32)
        pipe.transformer(x, torch.tensor([500]), text, return_dict=False)[0].square().sum().backward()
        grads.append([x.grad, *(p.grad for p in pipe.transformer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True) if a is not None)


def test_two_pipelines_one_folder(tmp_path: Path) -> None:
    """Two models of one class in one folder compute each with its own weights (diffusers does not)."""
    pipes = [tiny.build("flux", seed=seed) for seed in (0, 1)]
    expected = [tiny.run(pipe, "flux") for pipe in pipes]
    for pipe in pipes:
        offloaded(pipe, tmp_path)
    assert [torch.equal(tiny.run(p, "flux"), e) for p, e in zip(pipes, expected, strict=True)] == [True, True]
    assert not torch.equal(*expected)
    restore(pipes[0])
    assert torch.equal(tiny.run(pipes[1], "flux"), expected[1])
    restore(pipes[1])
    assert list(tmp_path.iterdir()) == []


def test_on_twice_and_off_by_verb(tmp_path: Path) -> None:
    """A second call swaps cleanly (C32); disable_offload gives files and memory back."""
    pipe = attach(tiny.build("flux"))
    for layers in (1, 2, 2):
        assert pipe.enable_layerwise_offload(resident_layers=layers, store="disk", folder=str(tmp_path)) is pipe
        assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))
        assert len(list(tmp_path.glob(f"{FOLDER_PREFIX}*"))) == 1 and len(files(tmp_path)) == 5 - layers
    assert pipe.disable_offload() is pipe
    assert list(tmp_path.iterdir()) == [] and torch.equal(tiny.run(pipe, "flux"), plain("flux"))
    assert ITEM not in pipe.acceleration.plan.enabled


def test_plan_round_trip(tmp_path: Path) -> None:
    """A plan in TOML puts the same offload on."""
    options = {"offload_store": "disk", "offload_folder": tmp_path, "offload_resident_layers": 1}
    made = plan(tiny.build("flux"), preset=None, offload="layerwise", **options)
    again = Plan.from_toml(made.to_toml())
    assert again == made and again.item(ITEM).params["folder"] == str(tmp_path)
    pipe = accelerate(tiny.build("flux"), again)
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux")) and stats(pipe)["live_blocks_peak"] == 2
