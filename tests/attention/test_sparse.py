"""Sparse attention on real pipelines: against dense attention under the same mask, and what stays dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from diffaccel import accelerate, attach, restore
from diffaccel.attention.calls import Inputs, Where
from diffaccel.attention.geometry import Geometry
from diffaccel.attention.plan import BlockPlan, Blocks, HeadPlans
from diffaccel.attention.sparse import svg2
from diffaccel.attention.sparse.registry import SparseVideoGen2
from diffaccel.errors import DiffaccelError, InvalidOptionError, UnsupportedModelError
from tests import fingerprint, tiny
from tests.attention.test_intercept import opened
from tests.models.families import table

FAMILIES = ("wan", "wan22", "hunyuan_video", "hunyuan_video15", "ltx", "cogvideox", "mochi")
METHODS = ("radial", "sta", "svg", "svg2", "topk")
SPARSE = {"attention_dense_steps": 0, "attention_dense_layers": 0}


def checkers(geometry: Geometry, q: Any, k: Any, *, layer: int, step: int, state: dict[str, Any]) -> HeadPlans:
    """A plan of blocks of 3 tokens, every second one kept; text is dense."""
    blocks = Blocks.even(geometry.tokens, 3)
    index = torch.arange(blocks.count)
    kept = (index[:, None] + index[None]) % 2 == 0
    start = 0 if geometry.text_first else geometry.video
    text = (blocks.starts[:-1] < start + geometry.text) & (blocks.starts[1:] > start)
    kept[text] = True
    kept[:, text] = True
    return HeadPlans((BlockPlan.of_mask(kept, blocks, blocks),))


def masked_dense(where: Where, inputs: Inputs, plain: Callable[[], Any]) -> Any:
    """What `checkers` means, by one dense call under one whole mask."""
    if where.geometry is None or where.cross:
        return plain()
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    batch, _, tokens, _ = q.shape
    mask = torch.ones(batch, 1, tokens, tokens, dtype=torch.bool)
    for i in range(batch):
        valid = tokens
        if inputs.mask is not None:
            row = inputs.mask[min(i, len(inputs.mask) - 1), 0]
            valid = int(row[0].sum()) if len(row) == 1 else int(row.diagonal().sum())
            mask[i, 0] = row.expand(tokens, tokens)
        grid = where.geometry
        grid = Geometry(*grid.shape, valid - grid.video, grid.text_first, grid.frame_sink)
        plan = checkers(grid, None, None, layer=0, step=0, state={}).plans[0]
        mask[i, 0, :valid, :valid] &= plan.token_mask()
    return F.scaled_dot_product_attention(q, k, v, mask, scale=inputs.scale).transpose(1, 2)


def build(family: str) -> Any:
    return table.build(family)


def run(pipe: Any, family: str, **more: Any) -> torch.Tensor:
    return table.run(pipe, family, **more)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_dense_attention_under_the_same_mask(family: str) -> None:
    pipe = attach(build(family))
    with opened(pipe, masked_dense):
        expected = run(pipe, family)
    dense = run(pipe, family)
    accelerate(pipe, None, attention="custom", attention_method=checkers, **SPARSE)
    found = run(pipe, family)
    assert torch.allclose(found, expected, atol=2e-5, rtol=1e-4)
    assert not torch.allclose(found, dense, atol=1e-3), "the mask did nothing"
    stats = pipe.acceleration.report.stats["attention.custom"]
    assert stats["fallbacks"] == {} and stats["calls"]["sparse"] > 0 and 0.4 < stats["density"] < 1
    restore(pipe)
    assert torch.equal(run(pipe, family), dense)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["wan", "hunyuan_video", "cogvideox"])
def test_methods_by_name(family: str, method: str) -> None:
    pipe = build(family)
    dense = run(pipe, family)
    accelerate(pipe, None, attention=method, attention_density=1.0, **SPARSE)
    assert torch.equal(run(pipe, family), dense), "density 1 is dense attention, bit by bit"
    accelerate(pipe, None, attention=method, attention_density=0.4, **SPARSE)
    found = run(pipe, family)
    stats = pipe.acceleration.report.stats[f"attention.{method}"]
    assert torch.isfinite(found).all() and stats["fallbacks"] == {}
    assert sum(stats["calls"].values()) > 0
    assert torch.equal(run(pipe, family), found), "a second run equals the first"
    restore(pipe)
    assert torch.equal(run(pipe, family), dense)


def test_first_steps_and_layers_stay_dense() -> None:
    pipe = attach(build("wan"))
    layers, steps = len(pipe.transformer.blocks), 4
    for dense_steps, dense_layers, expected in (
        (0, 0, steps * layers), (1, 0, (steps - 1) * layers), (0.5, 1, 2 * (layers - 1)), (1.0, 0, 0),
        (0, layers, 0), (0.3, 0, 2 * layers),
    ):  # fmt: skip
        pipe.enable_sparse_attention(method=checkers, dense_steps=dense_steps, dense_layers=dense_layers)
        run(pipe, "wan", num_inference_steps=steps)
        calls = pipe.acceleration.report.stats["attention.custom"]["calls"]
        branches = 2
        assert calls.get("sparse", 0) == expected * branches
        assert calls.get("dense", 0) == (steps * layers - expected) * branches
        assert calls["other"] == steps * layers * branches, "cross-attention is left alone"


def test_images_are_refused_with_the_reason() -> None:
    for family in ("flux_cfg", "sd3"):
        pipe = build(family)
        plan = accelerate(pipe, None, attention="radial").acceleration.plan
        assert plan.items[0].status == "skipped" and "nothing to gain" in plan.items[0].reason
        with pytest.raises(UnsupportedModelError, match="images"):
            pipe.enable_sparse_attention()
        restore(pipe)


@pytest.mark.parametrize(
    "bad",
    [
        {"attention_density": 0}, {"attention_density": 1.5}, {"attention_density": True},
        {"attention_dense_steps": 1.5}, {"attention_dense_steps": -1}, {"attention_dense_layers": 0.5},
        {"attention_kernel": "cuda"}, {"attention_densty": 0.5},
    ],
)  # fmt: skip
def test_bad_options(bad: dict[str, Any]) -> None:
    pipe = tiny.build("wan")
    tiny.run(pipe, "wan")
    before = fingerprint.snapshot_pipe(pipe)
    with pytest.raises(InvalidOptionError, match=next(iter(bad)).removeprefix("attention_")[:6]):
        accelerate(pipe, None, attention="svg", **bad)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


def test_a_method_that_returns_something_else_is_named() -> None:
    pipe = accelerate(build("wan"), None, attention="custom", attention_method=lambda *a, **k: 3, **SPARSE)
    with pytest.raises(DiffaccelError, match="int"):
        run(pipe, "wan")
    restore(pipe)


def test_with_a_cache_and_compile_and_after_an_exception() -> None:
    """Neighbours on, a run that raised in between, another size: each run equals that of a fresh pipeline."""
    options: dict[str, Any] = {
        "attention": "svg2", "attention_density": 0.5, **SPARSE, "cache": "first_block", "cache_threshold": 0.11,
        "cache_min_steps": 0, "compile": True, "compile_backend": "eager", "compile_fullgraph": True,
    }  # fmt: skip
    expected = tiny.run(accelerate(tiny.build("wan"), None, **options), "wan")
    pipe = accelerate(tiny.build("wan"), None, **options)

    def stop(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        tiny.run(pipe, "wan", callback_on_step_end=stop)
    assert torch.equal(tiny.run(pipe, "wan"), expected)
    tiny.run(pipe, "wan", height=32, width=48)
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch.equal(tiny.run(pipe, "wan"), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made
    assert 0 < pipe.acceleration.report.hit_rate < 1
    restore(pipe)


def test_a_paused_run_goes_on() -> None:
    pipe = accelerate(tiny.build("wan"), None, attention="svg2", attention_density=0.5, **SPARSE)
    expected = tiny.run(pipe, "wan")
    kept: list[Any] = []

    def pause(own: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if step == 2:
            kept.append(pipe.acceleration.snapshot())
        return kwargs

    tiny.run(pipe, "wan", callback_on_step_end=pause)
    tiny.run(pipe, "wan", seed=3)
    assert torch.equal(tiny.output(pipe.acceleration.resume(kept[0])), expected)
    restore(pipe)


@pytest.mark.parametrize("method", ["radial", "svg2"])
def test_nothing_stays(method: str) -> None:
    pipe = tiny.build("wan")
    tiny.run(pipe, "wan")
    before = fingerprint.snapshot_pipe(pipe)
    accelerate(pipe, None, attention=method, attention_density=0.5, **SPARSE)
    tiny.run(pipe, "wan")
    restore(pipe)
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))


@pytest.mark.parametrize("family", ["wan", "hunyuan_video"])
@pytest.mark.parametrize("dense_steps", [0, 3])
def test_svg2_starts_warm_where_steps_were_dense(
    family: str, dense_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations of k-means by step: after dense steps, the first sparse one needs no more than later ones."""
    rounds: list[tuple[int, int]] = []
    pipe = attach(build(family))
    plain = svg2.assign

    def counted(x: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
        rounds.append((pipe.acceleration.run_in_progress().step, x.shape[0]))
        return plain(x, centroids)

    monkeypatch.setattr(svg2, "assign", counted)
    method = SparseVideoGen2(q_clusters=10, k_clusters=14, first_iterations=30, block=8)
    pipe.enable_sparse_attention(method=method, dense_steps=dense_steps, dense_layers=1)
    run(pipe, family, num_inference_steps=5, height=96, width=96)
    stats = pipe.acceleration.report.stats["attention.custom"]
    assert stats["fallbacks"] == {} and stats["calls"]["sparse"] > 0
    steps = [sum(at == step for at, _ in rounds) for step in range(5)]
    calls = stats["calls"]["sparse"] // (5 - dense_steps)
    assert all(count <= calls * 2 * 2 for count in steps[dense_steps + 1 :]), "warm: two iterations, two sides"
    if dense_steps:
        assert steps[dense_steps] <= calls * 2 * 2 and all(0 < count <= calls * 2 * 10 for count in steps[:3])
    else:
        assert steps[0] > calls * 2 * 2, "the negative control: without dense steps the first call starts cold"
