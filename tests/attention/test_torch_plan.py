"""The PyTorch kernel against SDPA with the plan's mask, written out over tokens."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from diffaccel.attention.geometry import Geometry
from diffaccel.attention.kernels import torch_plan
from diffaccel.attention.kernels.torch_plan import block_sparse, prepare
from diffaccel.attention.plan import BlockPlan, Blocks, HeadPlans
from diffaccel.attention.sparse import layout, radial, sta, svg, svg2, topk
from diffaccel.errors import InvalidOptionError


def tensors(batch: int, heads: int, tokens: int, width: int = 16, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v as processors make them: views of [B, N, H, D]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, tokens, heads, width, generator=generator).transpose(1, 2) for _ in range(3)]


def masks_of(plans: HeadPlans, batch: int, heads: int) -> torch.Tensor:
    """[B, H, N, N] boolean."""
    each = torch.stack([plan.token_mask() for plan in plans.plans])
    index = torch.zeros(batch, heads, dtype=torch.int64) if plans.assign is None else plans.assign
    return each[index]


def random_plan(tokens: int, block: int, share: float, seed: int = 0, permuted: bool = False) -> BlockPlan:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(tokens, generator=generator) if permuted else None
    blocks = Blocks.even(tokens, block, order)
    kept = torch.rand(blocks.count, blocks.count, generator=generator) < share
    kept[:, 0] |= ~kept.any(1)
    return BlockPlan.of_mask(kept, blocks, blocks)


def agrees(plans: HeadPlans, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, within: float = 1e-5) -> None:
    truth = F.scaled_dot_product_attention(q, k, v, attn_mask=masks_of(plans, *q.shape[:2]))
    output = block_sparse(q, k, v, plans)
    assert isinstance(output, torch.Tensor) and output.shape == q.shape
    assert float((output - truth).abs().max()) < within


GRIDS = [
    Geometry(3, 5, 7),
    Geometry(8, 7, 13, text=11),
    Geometry(1, 4, 4),
    Geometry(6, 4, 9, text=5, text_first=True, frame_sink=True),
]


def plans_of(name: str, geometry: Geometry, q: torch.Tensor, k: torch.Tensor) -> HeadPlans:
    if name == "radial":
        return HeadPlans((radial.radial_plan(geometry, decay=0.3, block=16, sink=True),))
    if name == "sta":
        return HeadPlans((sta.tile_plan(geometry, tile=(2, 3, 4), window=(1, 3, 1), block=16),))
    if name == "svg":
        both = [make(geometry, 16, block=16, sink=True) for make in (svg.spatial_plan, svg.temporal_plan)]
        return HeadPlans(
            (*both, svg.temporal_plan(geometry, 8, block=8, sink=True, sink_mode="frame0")), heads_to(q, 3)
        )
    if name == "svg2":
        return svg2.cluster_plans(geometry, q, k, clusters=(5, 9), top_p=0.6, density=0.5, block=16)[0]
    return topk.top_block_plans(geometry, q, k, density=0.4, block=16)


def heads_to(q: torch.Tensor, plans: int) -> torch.Tensor:
    return torch.arange(q.shape[0] * q.shape[1]).view(q.shape[:2]) % plans


@pytest.mark.parametrize("name", ["radial", "sta", "svg", "svg2", "topk"])
@pytest.mark.parametrize("geometry", GRIDS, ids=str)
def test_methods_equal_masked_dense_attention(name: str, geometry: Geometry) -> None:
    q, k, v = tensors(2, 3, geometry.tokens)
    agrees(plans_of(name, geometry, q, k), q, k, v)


@pytest.mark.parametrize("tokens", [100, 127, 129, 4352 + 77])
@pytest.mark.parametrize("permuted", [False, True])
def test_ragged_lengths_equal_masked_dense_attention(tokens: int, permuted: bool) -> None:
    """radial-attention#34 (C49): lengths that are no multiple of the block."""
    q, k, v = tensors(1, 1, tokens)
    for share in (0.3, 1.0):
        agrees(HeadPlans((random_plan(tokens, 128, share, permuted=permuted),)), q, k, v)


@pytest.mark.parametrize("grid", [(3, 5, 7), (8, 7, 13), (1, 4, 4)])
@pytest.mark.parametrize("window", [(9, 9, 9), (1, 3, 1)])
def test_grids_that_are_no_multiple_of_the_tile(grid: sta.Three, window: sta.Three) -> None:
    """FastVideo#620 (C50): with all tiles kept it is dense attention, with some it is the masked one."""
    geometry = Geometry(*grid, text=3)
    q, k, v = tensors(1, 2, geometry.tokens)
    plan = sta.tile_plan(geometry, tile=(4, 4, 4), window=window, block=16)
    agrees(HeadPlans((plan,)), q, k, v)
    if window == (9, 9, 9):
        assert torch.equal(block_sparse(q, k, v, HeadPlans((plan,))), F.scaled_dot_product_attention(q, k, v))


def test_one_block_more_or_less_is_seen() -> None:
    """Negative control: the comparison above notices a single block."""
    q, k, v = tensors(1, 1, 129)
    plan = random_plan(129, 16, 0.4)
    kept = plan.block_mask()
    kept[3, 5] = ~kept[3, 5]
    with pytest.raises(AssertionError):
        truth = HeadPlans((BlockPlan.of_mask(kept, plan.queries, plan.keys),))
        mask = masks_of(truth, 1, 1)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert float((block_sparse(q, k, v, HeadPlans((plan,))) - expected).abs().max()) < 1e-5


class Attentions(TorchDispatchMode):
    """Counts attention ops, and all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.all = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all += 1
        self.attention += "attention" in str(func)
        return func(*args, **(kwargs or {}))


def test_a_full_plan_is_sdpa_itself() -> None:
    q, k, v = tensors(2, 3, 300)
    plans = layout.full(300)
    prepare(plans.plans[0])
    with Attentions() as ours:
        output = block_sparse(q, k, v, plans)
    with Attentions() as plain:
        truth = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(output, truth) and (ours.attention, ours.all) == (1, plain.all)
    shuffled = HeadPlans((random_plan(300, 16, 1.0, permuted=True),))
    assert torch.equal(block_sparse(q, k, v, shuffled), truth)


@pytest.mark.parametrize("scale", [None, 0.05])
@pytest.mark.parametrize("permuted", [False, True])
def test_log_sum_exp(scale: float | None, permuted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(2, 2, 129)
    plans = HeadPlans(
        (random_plan(129, 16, 0.3, permuted=permuted), layout.full(129).plans[0]), torch.tensor([[0, 1], [1, 0]])
    )
    monkeypatch.setattr(torch_plan, "SCORE_BYTES", 2**14)  # so that rows are taken in parts
    output, lse = block_sparse(q, k, v, plans, scale=scale, return_lse=True)
    mask = masks_of(plans, 2, 2)
    scores = (q.double() @ k.double().transpose(-1, -2)) * (scale or 16**-0.5)
    truth = scores.masked_fill(~mask, -torch.inf)
    assert lse.dtype == torch.float32
    assert float((lse - truth.logsumexp(-1)).abs().max()) < 1e-5
    assert float((output - truth.softmax(-1) @ v.double()).abs().max()) < 1e-5
    assert float((block_sparse(q, k, v, plans, scale=scale) - output).abs().max()) < 1e-5


def test_a_query_that_sees_nothing_gets_zero() -> None:
    q, k, v = tensors(1, 2, 64)
    blocks = Blocks.even(64, 16)
    kept = torch.eye(4, dtype=torch.bool)
    kept[2] = False
    plans = HeadPlans((BlockPlan.of_mask(kept, blocks, blocks),))
    output, lse = block_sparse(q, k, v, plans, return_lse=True)
    for out in (output, block_sparse(q, k, v, plans)):
        assert not bool(out[:, :, 32:48].any()) and bool(out[:, :, :32].all())
    assert bool((lse[:, :, 32:48] == -torch.inf).all()) and bool(lse[:, :, :32].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_masked_sdpa(dtype: torch.dtype) -> None:
    exact = tensors(1, 2, 200)
    q, k, v = (x.to(dtype) for x in exact)
    plans = HeadPlans((random_plan(200, 16, 0.4, permuted=True),))
    mask = masks_of(plans, 1, 2)
    truth = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), attn_mask=mask)
    output = block_sparse(q, k, v, plans)
    native = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert output.dtype == dtype
    assert float((output - truth).abs().mean()) <= 1.2 * float((native - truth).abs().mean())


def test_strides_follow_the_queries_and_inputs_are_left_alone() -> None:
    q, k, v = tensors(1, 3, 100)
    before = [x.clone() for x in (q, k, v)]
    for plans in (HeadPlans((random_plan(100, 16, 0.4, permuted=p),)) for p in (False, True)):
        assert block_sparse(q, k, v, plans).stride() == q.stride()
        even = [x.contiguous() for x in (q, k, v)]
        assert torch.allclose(block_sparse(*even, plans), block_sparse(q, k, v, plans), atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


def test_queries_and_keys_may_differ_in_number() -> None:
    q, (k, v) = tensors(1, 2, 70)[0], tensors(1, 2, 45)[1:]
    rows, columns = Blocks.even(70, 16), Blocks.even(45, 8)
    kept = torch.rand(rows.count, columns.count, generator=torch.Generator().manual_seed(0)) < 0.6
    plans = HeadPlans((BlockPlan.of_mask(kept, rows, columns),))
    mask = kept.repeat_interleave(16, 0)[:70].repeat_interleave(8, 1)[:, :45]
    truth = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert float((block_sparse(q, k, v, plans) - truth).abs().max()) < 1e-5


# ---- the work -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [GRIDS[1], GRIDS[3], Geometry(12, 16, 32)], ids=str)
def test_no_pair_is_computed_that_the_plan_leaves_out(geometry: Geometry) -> None:
    for plan in (
        sta.tile_plan(geometry, tile=(4, 4, 8), window=(1, 3, 1)),
        svg.temporal_plan(geometry, 256, sink=True),
        radial.radial_plan(geometry, decay=0.5, sink=True),
    ):
        work = prepare(plan)
        pairs = sum((piece.stop - piece.start) * piece.keys for piece in work.pieces) if not work.full else None
        assert pairs is None or pairs == round(plan.density * geometry.tokens**2)


def test_query_blocks_with_the_same_keys_are_one_piece() -> None:
    geometry = Geometry(12, 16, 32)
    work = prepare(sta.tile_plan(geometry, tile=(2, 8, 8), window=(3, 1, 3)))
    assert len(work.pieces) == 4 * 2 * 2  # 48 tiles, but 16 different windows
    band = prepare(svg.spatial_plan(geometry, 768))
    assert all(len(piece.runs) == 1 for piece in band.pieces) and band.most == 0  # sliced, never copied


def test_a_plan_is_prepared_once_and_forgotten_with_it() -> None:
    plan = random_plan(100, 16, 0.4, permuted=True)
    assert prepare(plan) is prepare(plan) and prepare(plan) is not prepare(plan, 2)
    held = len(torch_plan._PREPARED)
    del plan
    gc.collect()
    assert len(torch_plan._PREPARED) < held


def test_coarser_groups_see_the_union() -> None:
    q, k, v = tensors(1, 1, 256)
    plan = svg.spatial_plan(Geometry(16, 4, 4), 32, block=16)
    assert len(prepare(plan, 4).pieces) < len(prepare(plan).pieces)
    kept = plan.block_mask()
    union = torch.cat([part.any(0, keepdim=True).expand(len(part), -1) for part in kept.split(4)])
    mask = BlockPlan.of_mask(union, plan.queries, plan.keys).token_mask()
    output = block_sparse(q, k, v, HeadPlans((plan,)), coarsen=4)
    assert float((output - F.scaled_dot_product_attention(q, k, v, attn_mask=mask)).abs().max()) < 1e-5


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = tensors(1, 2, 100)
    plan = random_plan(96, 16, 0.5)
    with pytest.raises(InvalidOptionError, match="for \\(96, 96\\)"):
        block_sparse(q, k, v, HeadPlans((plan,)))
    good = random_plan(100, 16, 0.5)
    with pytest.raises(InvalidOptionError, match="assignment of heads is \\[1, 3\\]"):
        block_sparse(q, k, v, HeadPlans((good, good), torch.zeros(1, 3, dtype=torch.int64)))
    with pytest.raises(InvalidOptionError, match="2 plans without"):
        block_sparse(q, k, v, HeadPlans((good, good)))
    with pytest.raises(InvalidOptionError, match="same B, H and D"):
        block_sparse(q, k[:, :1], v[:, :1], HeadPlans((good,)))
    with pytest.raises(InvalidOptionError, match="coarsen=0"):
        block_sparse(q, k, v, HeadPlans((good,)), coarsen=0)
