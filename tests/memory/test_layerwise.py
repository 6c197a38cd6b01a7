"""Layerwise offload: the same bits with few blocks in memory, and everything as it was afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import (
    BudgetError,
    DiffaccelError,
    IncompatibleError,
    InvalidOptionError,
    accelerate,
    attach,
    plan,
    restore,
)
from diffaccel.memory.store import FOLDER_PREFIX
from tests import fingerprint, tiny
from tests.families import table
from tests.invariants.levers import Stop, at_step, cache_options, fresh, pattern, plain, raise_at

ITEM = "offload.layerwise"


def offloaded(pipe: Any, folder: Path, **more: Any) -> Any:
    """Accelerate with blocks on disk; parameters of the lever and other levers by keyword."""
    own = {"resident_layers": 1, "store": "disk", "folder": str(folder)}
    names = ("resident_layers", "prefetch", "store", "pin", "max_bytes", "folder", "device")
    own |= {name: more.pop(name) for name in names if name in more}
    given = {f"offload_{name}": value for name, value in own.items() if value is not None}
    return accelerate(pipe, preset=None, strict=True, offload="layerwise", **given, **more)


def stats(pipe: Any) -> dict[str, Any]:
    """What the last run moved."""
    return pipe.acceleration.report.stats[ITEM]


def files(folder: Path) -> list[Path]:
    """The stored weights."""
    return sorted(folder.glob("**/*.safetensors"))


def blocks_of(pipe: Any) -> list[torch.nn.Module]:
    return tiny.blocks(tiny.denoiser(pipe))


def parked(block: torch.nn.Module, folder: Path) -> bool:
    """Do a block's weights lie in a file of this folder (as the system's table of mappings has it)?"""
    where = [p.data_ptr() for p in block.parameters()]
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line and ".safetensors" in line:
            begin, end = line.split()[0].split("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return all(any(begin <= at < end for begin, end in ranges) for at in where)


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
    assert [parked(b, tmp_path) for b in blocks] == [False, True, True, True]
    seen: list[list[bool]] = []
    for block in blocks:
        block.attn.register_forward_hook(lambda *_: seen.append([parked(b, tmp_path) for b in blocks]))
    tiny.run(pipe, "flux")
    for at, row in enumerate(seen):
        assert row == [i not in (0, at % 4) for i in range(4)]
    assert [parked(b, tmp_path) for b in blocks] == [False, True, True, True]
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


# ---- weights that change ---------------------------------------------------------------------------------


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
    assert all(parked(block, tmp_path) for block in blocks_of(pipe)) and len(files(tmp_path)) == 4
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


# ---- runs that end early, runs within runs, other callers ------------------------------------------------


@pytest.mark.parametrize("error", [Stop("stop"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize("where", ["callback", "block"])
def test_a_run_that_ends_early(where: str, error: BaseException, tmp_path: Path) -> None:
    """All is parked again, no thread is left, and the next run is as if nothing had been."""
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
    assert all(parked(block, tmp_path) for block in blocks_of(pipe))
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
    assert all(parked(block, tmp_path) for block in blocks_of(pipe))


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


# ---- refusals --------------------------------------------------------------------------------------------


def test_host_store_on_a_cpu(tmp_path: Path) -> None:
    """The weights are on the host already: skipped with the reason, and the verb raises."""
    pipe = accelerate(tiny.build("flux"), preset=None, offload="layerwise")
    item = pipe.acceleration.plan.item(ITEM)
    assert item.status == "skipped" and "in its memory already: store='disk' frees it" in item.reason
    with pytest.raises(DiffaccelError, match="already"):
        pipe.enable_layerwise_offload()


def test_budget(tmp_path: Path) -> None:
    """max_bytes: never exceeded; below the least that is possible, the least is named."""
    pipe = tiny.build("wan")
    with pytest.raises(BudgetError, match="max_bytes=1000: one block at a time needs 47936 bytes"):
        offloaded(pipe, tmp_path, max_bytes=1000)
    assert torch.equal(tiny.run(pipe, "wan"), plain("wan")) and list(tmp_path.iterdir()) == []
    offloaded(pipe, tmp_path, max_bytes=47936, prefetch=0)
    assert torch.equal(tiny.run(pipe, "wan"), plain("wan"))
    assert stats(pipe)["live_bytes_peak"] == 47936
    offloaded(pipe, tmp_path, max_bytes=100_000)
    tiny.run(pipe, "wan")
    assert stats(pipe)["live_bytes_peak"] == 2 * 47936
    with pytest.raises(BudgetError):
        attach(pipe).enable_layerwise_offload(max_bytes=10, store="disk")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"resident_layers": 0}, "offload_resident_layers=0: must be a whole number of at least 1"),
        ({"prefetch": -1}, "offload_prefetch=-1"),
        ({"prefetch": True}, "offload_prefetch=True"),
        ({"max_bytes": 2.5}, r"offload_max_bytes=2\.5"),
        ({"store": "tape"}, "Allowed: disk, host"),
        ({"pin": "yes"}, "offload_pin='yes'"),
        ({"store": "host"}, "offload_folder is for offload_store='disk'"),
        ({"device": "gpu"}, "offload_device='gpu'"),
    ],
)
def test_bad_options(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    """Named, with what was given."""
    with pytest.raises(InvalidOptionError, match=match):
        offloaded(tiny.build("flux"), tmp_path, **options)
    with pytest.raises(InvalidOptionError, match="offload_folder=3"):
        accelerate(tiny.build("flux"), preset=None, offload="layerwise", offload_store="disk", offload_folder=3)


def test_no_place_to_write(tmp_path: Path) -> None:
    """A folder that cannot be: refused before anything is touched."""
    (tmp_path / "file").write_text("")
    pipe = tiny.build("flux")
    with pytest.raises(BudgetError, match="cannot write there"):
        offloaded(pipe, tmp_path / "file" / "below")
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))


def test_disk_full_while_attaching(tmp_path: Path) -> None:
    """The third file does not fit: a clear error, no file left, no weight moved."""
    import resource

    pipe = tiny.build("flux")
    tiny.run(pipe, "flux")
    before = fingerprint.snapshot_pipe(pipe)
    places = [p.data_ptr() for p in pipe.transformer.parameters()]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # single blocks fit, double blocks do not
    try:
        with pytest.raises(BudgetError, match=r"could not write .* transformer\.transformer_blocks\.0"):
            offloaded(pipe, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == [] and [p.data_ptr() for p in pipe.transformer.parameters()] == places
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_other_offloads_are_refused(tmp_path: Path) -> None:
    """diffusers' group offload, before and after; a denoiser compiled as a whole; a U-Net; a model that fits."""
    from diffusers.hooks import apply_group_offloading

    cpu = torch.device("cpu")
    grouped = tiny.build("flux")
    apply_group_offloading(grouped.transformer, cpu, cpu, offload_type="block_level", num_blocks_per_group=1)
    with pytest.raises(IncompatibleError, match="group offload"):
        offloaded(grouped, tmp_path)

    later = offloaded(tiny.build("flux"), tmp_path)
    apply_group_offloading(later.transformer, cpu, cpu, offload_type="block_level", num_blocks_per_group=1)
    with pytest.raises(IncompatibleError, match=r"switched on while offload\.layerwise is on"):
        tiny.run(later, "flux")

    whole = tiny.build("flux")
    whole.transformer.compile(backend="eager")
    with pytest.raises(IncompatibleError, match="compiled as a whole"):
        offloaded(whole, tmp_path)

    assert plan(tiny.build("sdxl"), preset=None, offload="layerwise").item(ITEM).status == "skipped"
    fits = plan(tiny.build("wan"), preset=None, offload="layerwise", offload_store="disk")
    assert "all 3 blocks" in fits.item(ITEM).reason


# ---- with other levers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["offload first", "cache first"])
@pytest.mark.parametrize("family", ["flux", "wan", "sd3"])
def test_a_skipped_block_is_never_fetched(family: str, order: str, tmp_path: Path) -> None:
    """First-block cache, enabled before or after: a reused call moves no block but the first, which may stay."""
    pipe = attach(tiny.build(family))

    def offload() -> None:
        pipe.enable_layerwise_offload(resident_layers=1, store="disk", folder=str(tmp_path))

    def cache() -> None:
        options = {k.removeprefix("cache_"): v for k, v in cache_options(family).items() if k != "cache"}
        pipe.enable_first_block_cache(**options)

    for enable in (offload, cache) if order == "offload first" else (cache, offload):
        enable()
    assert torch.equal(tiny.run(pipe, family), fresh(family))
    ran = pattern(pipe)
    count = len(blocks_of(pipe))
    assert 0 < ran.count(False) < len(ran)
    assert stats(pipe)["blocks_moved"] == count * ran.count(True) + ran.count(False)


@pytest.mark.parametrize("cache", ["schedule", "taylorseer", "dbcache", "teacache"])
def test_half_the_hits_move_half_the_bytes(cache: str, tmp_path: Path) -> None:
    """With the first block resident, bytes go with the calls that are computed."""
    guards = {"cache_min_steps": 0, "cache_last_steps": 0}
    options: dict[str, Any] = {
        "schedule": {"cache_steps": "101010"},
        "taylorseer": {"cache_interval": 2, "cache_first_enhance": 1},
        "dbcache": {"cache_threshold": 1e9, "cache_front_blocks": 1, "cache_back_blocks": 0, "cache_warmup_steps": 1},
        "teacache": {"cache_threshold": 1e9, "cache_coefficients": (0.0, 0.0)},
    }[cache]
    pipe = tiny.build("flux")
    offloaded(pipe, tmp_path, resident_layers=2)
    tiny.run(pipe, "flux")
    whole = stats(pipe)["bytes_moved"]
    reference = accelerate(tiny.build("flux"), preset=None, cache=cache, **guards, **options)
    expected = tiny.run(reference, "flux")
    offloaded(pipe, tmp_path, resident_layers=2, cache=cache, **guards, **options)
    assert torch.equal(tiny.run(pipe, "flux"), expected)
    ran = pattern(pipe)
    assert ran.count(False) > 0 and stats(pipe)["bytes_moved"] * len(ran) == whole * ran.count(True)


def test_compiled_blocks(tmp_path: Path) -> None:
    """Regional compile: whole graphs, none compiled again in the second run, same bits as compile alone."""
    reference = accelerate(tiny.build("flux"), preset=None, compile=True, compile_backend="eager")
    expected = tiny.run(reference, "flux")
    pipe = tiny.build("flux")
    offloaded(pipe, tmp_path, compile=True, compile_backend="eager", compile_fullgraph=True)
    assert torch.equal(tiny.run(pipe, "flux"), expected)
    assert pipe.acceleration.report.stats["compile"]["graph_breaks"] == 0
    assert torch.equal(tiny.run(pipe, "flux"), expected)
    assert pipe.acceleration.report.stats["compile"]["graphs_compiled"] == 0
    assert stats(pipe)["blocks_moved"] == 4 * tiny.STEPS
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))


def test_layerwise_casting(tmp_path: Path) -> None:
    """diffusers' storage in 8 bits, cast up around each layer, on top of weights that come and go."""
    outputs = []
    for offload in (False, True):
        pipe = tiny.build("flux")
        pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
        if offload:
            offloaded(pipe, tmp_path)
        outputs.append([tiny.run(pipe, "flux") for _ in range(2)])
        if offload:
            assert stats(pipe)["blocks_moved"] == 4 * tiny.STEPS
            restore(pipe)
            outputs[-1].append(tiny.run(pipe, "flux"))
    assert all(torch.equal(outputs[0][0], other) for other in (*outputs[0], *outputs[1]))


@pytest.mark.parametrize("kind", ["torchao", "quanto"])
def test_quantized_weights(kind: str, tmp_path: Path) -> None:
    """Weights that are tensor subclasses keep their wrapper; what is inside moves."""
    pipe = tiny.build("wan")
    if kind == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(pipe.transformer.blocks, quantization.Int8WeightOnlyConfig())
    else:
        quanto = pytest.importorskip("optimum.quanto")
        quanto.quantize(pipe.transformer.blocks, weights=quanto.qint8)
        quanto.freeze(pipe.transformer.blocks)
    reference = tiny.run(pipe, "wan")
    weights = [block.attn1.to_q.weight for block in pipe.transformer.blocks]
    assert all(type(w) not in (torch.Tensor, torch.nn.Parameter) for w in weights)
    offloaded(pipe, tmp_path)
    assert torch.equal(tiny.run(pipe, "wan"), reference) and not torch.equal(reference, plain("wan"))
    assert all(block.attn1.to_q.weight is w for block, w in zip(pipe.transformer.blocks, weights, strict=True))
    stored = sum(os.path.getsize(file) for file in files(tmp_path))
    assert stored < 4 * sum(w.numel() for w in weights) * 50
    restore(pipe)
    assert torch.equal(tiny.run(pipe, "wan"), reference)
