"""Invariants 3 (shared denoiser), 4, 7 and 8 of the levers on weights, memory and attention, and orders of verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from diffusers import FluxImg2ImgPipeline, StableDiffusion3Img2ImgPipeline, WanVideoToVideoPipeline

from diffaccel import attach, plan, restore
from diffaccel.errors import DiffaccelError, IncompatibleError
from tests import fingerprint, tiny

from . import stacks
from .levers import pattern, plain, trace
from .stacks import ROWS, STACKS, apart, fresh, put_on
from .test_8_chain import model_offload, sequential_offload


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> Iterator[None]:
    """A clean compiler, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- 3: others on the same denoiser --------------------------------------------------------------------------------

OTHERS = {"flux": FluxImg2ImgPipeline, "sd3": StableDiffusion3Img2ImgPipeline, "wan": WanVideoToVideoPipeline}
ON_WEIGHTS = ("quantization", "lora")  # what others on the same denoiser see too: there is one set of weights


@pytest.mark.parametrize("name", ROWS)
def test_a_plain_pipeline_on_the_same_denoiser(name: str, tmp_path: Path) -> None:
    """It is exact unless the weights themselves are others; to accelerate it too is refused, and nothing happens."""
    row = ROWS[name]
    pipe, other = tiny.build(row.family), tiny.build(row.family)
    other.transformer = pipe.transformer
    put_on(pipe, row, tmp_path)
    tiny.run(pipe, row.family)
    before = fingerprint.snapshot_pipe(other)
    second = OTHERS[row.family](**{k: v for k, v in other.components.items() if k in _parts(OTHERS[row.family])})
    with pytest.raises(IncompatibleError, match="transformer"):
        attach(second)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(other))
    if not set(ON_WEIGHTS) & set(row.places):
        assert torch.equal(tiny.run(other, row.family), plain(row.family))
    assert torch.equal(tiny.run(pipe, row.family), fresh(name))
    restore(pipe)
    assert torch.equal(tiny.run(other, row.family), plain(row.family))


def _parts(cls: type) -> set[str]:
    import inspect

    return set(inspect.signature(cls.__init__).parameters)


# ---- 4: the clock --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flow_shift", [3.0, 7.0])
def test_dense_steps_are_counted_by_the_scheduler(flow_shift: float) -> None:
    """Where caches and guidance leave calls out, and in bfloat16, where several steps carry one timestep."""
    layers, steps, dense = 3, 20, 7
    pipe = tiny.build("wan", dtype=torch.bfloat16)
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=flow_shift)
    on = STACKS["wan stack"].on
    chosen = {k: v for k, v in on.items() if k.startswith(("cache", "guidance", "attention"))}
    put_on(pipe, stacks.Row("wan", chosen), attention_dense_steps=dense)
    tiny.run(pipe, "wan", num_inference_steps=steps)
    late = [computed for index, _, computed in trace(pipe) if index >= dense]
    assert pipe.acceleration.report.stats["guidance.reuse"]["steps_reuse"] > 0 and {True, False} == set(late)
    calls = pipe.acceleration.report.stats["attention.custom"]["calls"]
    assert calls["sparse"] == late.count(True) * (layers - 1), "the first block is dense, and the only one reused"


# ---- 7: order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, row in STACKS.items() if row.on["offload"] == "layerwise"])
def test_skipped_blocks_are_not_moved(name: str, tmp_path: Path) -> None:
    """Under the whole stack: a computed call moves every block, a reused one none but the first."""
    row = STACKS[name]
    pipe = put_on(tiny.build(row.family), row, tmp_path)
    for _ in range(2):
        tiny.run(pipe, row.family)
        ran, count = pattern(pipe), len(tiny.blocks(pipe.transformer))
        assert 0 < ran.count(False) < len(ran)
        moved = pipe.acceleration.report.stats["offload.layerwise"]["blocks_moved"]
        assert moved == count * ran.count(True) + ran.count(False)
    restore(pipe)


def orders(places: list[str]) -> list[list[str]]:
    """Backwards, and from the middle (forwards is `accelerate`'s own)."""
    middle = len(places) // 2
    return [places[::-1], places[middle:] + places[:middle]]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "wan" in n else n for n in STACKS])
def test_verbs_in_any_order_and_undone_in_any_other(name: str, tmp_path: Path) -> None:
    """Orders of the same verbs, each said twice, give the picture of the stack; then off one by one."""
    row, call = STACKS[name], {"num_inference_steps": 4}
    pipe = tiny.build(row.family)
    tiny.run(pipe, row.family, **call)
    before = fingerprint.snapshot_pipe(pipe)
    for on, off in zip(orders(row.places), reversed(orders(row.places)), strict=True):
        attach(pipe)
        for place in on:
            stacks.enable(pipe, row, place, tmp_path)
        found = tiny.run(pipe, row.family, **call)
        assert apart(found, fresh(name, **call)) < 1e-5, on
        for place in on[::2]:
            stacks.enable(pipe, row, place, tmp_path)
        assert torch.equal(tiny.run(pipe, row.family, **call), found), "twice in a row is once"
        for place in off[:-1]:
            stacks.disable(pipe, place)
        rest = {k: v for k, v in row.on.items() if k.split("_")[0] == off[-1].split("_")[0]}
        alone = put_on(tiny.build(row.family), stacks.Row(row.family, rest, row.lora if off[-1] == "lora" else None))
        assert torch.equal(tiny.run(pipe, row.family, **call), tiny.run(alone, row.family, **call)), off[-1]
        restore(alone)
        stacks.disable(pipe, off[-1])
        assert torch.equal(tiny.run(pipe, row.family, **call), plain(row.family, **call))
        assert list(tmp_path.iterdir()) == []
        restore(pipe)
        fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


# ---- 8: the chain --------------------------------------------------------------------------------------------------

OFFLOADS: dict[str, Callable[[Any], None]] = {"model": model_offload, "sequential": sequential_offload}
OURS = [name for name in ROWS if "offload" in ROWS[name].on]
BESIDE = [name for name in ROWS if name not in OURS]


@pytest.mark.parametrize("kind", OFFLOADS)
@pytest.mark.parametrize("name", BESIDE)
def test_offload_of_accelerate_before(name: str, kind: str, tmp_path: Path) -> None:
    """Three runs as without it, or a refusal that says why, with nothing done."""
    row = ROWS[name]
    pipe = tiny.build(row.family)
    OFFLOADS[kind](pipe)
    tiny.run(pipe, row.family)
    before = fingerprint.snapshot_pipe(pipe)
    try:
        put_on(pipe, row, tmp_path)
    except DiffaccelError as error:
        assert kind == "sequential" and ("offload" in str(error) or "hook of another library" in str(error)), error
        fingerprint.assert_same(before, fingerprint.snapshot_pipe(restore(pipe)))
        assert torch.equal(tiny.run(pipe, row.family), plain(row.family))
        return
    for _ in range(3):
        assert torch.equal(tiny.run(pipe, row.family), fresh(name))
    restore(pipe)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, row.family), plain(row.family))


# accelerate's sequential offload cannot hold weights that are no plain parameters: it raises itself.
AFTERWARDS = [
    (name, kind) for name in BESIDE for kind in OFFLOADS if kind == "model" or "quantization" not in ROWS[name].on
]


@pytest.mark.parametrize(("name", "kind"), AFTERWARDS)
def test_offload_of_accelerate_afterwards(name: str, kind: str, tmp_path: Path) -> None:
    """Switched on later, it drops our forwards; the next runs have them back, and restore leaves the plain picture."""
    row = ROWS[name]
    pipe = put_on(tiny.build(row.family), row, tmp_path)
    tiny.run(pipe, row.family)
    OFFLOADS[kind](pipe)
    for _ in range(3):
        found = tiny.run(pipe, row.family)
        assert torch.equal(found, fresh(name)) or apart(found, plain(row.family)) <= (row.near or 0)
    if kind == "sequential" and row.merge:
        with pytest.raises(IncompatibleError, match=r"lora cannot be undone: the weight of .* accelerate's offload"):
            restore(pipe)
        for _, component in tiny.component_modules(pipe):
            remove_hook_from_module(component, recurse=True)
    restore(pipe)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, row.family), plain(row.family))


@pytest.mark.parametrize("name", OURS)
def test_two_offloads_on_one_pipeline(name: str, tmp_path: Path) -> None:
    """Ours after accelerate's is refused by name; accelerate's after ours: the same picture, or a refusal by name."""
    row = ROWS[name]
    pipe = tiny.build(row.family)
    model_offload(pipe)
    on = dict(row.on) | {"offload_folder": str(tmp_path)}
    item = plan(pipe, None, **on).item(f"offload.{row.on['offload']}")
    assert item.status == "refused" and "offload" in item.reason and list(tmp_path.iterdir()) == []
    later = put_on(tiny.build(row.family), row, tmp_path)
    tiny.run(later, row.family)
    model_offload(later)
    for _ in range(2):
        try:
            found = tiny.run(later, row.family)
        except IncompatibleError as error:
            assert f"offload.{row.on['offload']}" in str(error)
        else:
            assert torch.equal(found, plain(row.family))
    restore(later)
    assert torch.equal(tiny.run(later, row.family), plain(row.family)) and list(tmp_path.iterdir()) == []
