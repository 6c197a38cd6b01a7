"""Block-sparse attention in Triton (interpreted) and through flex_attention: equal to masked dense attention."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from diffaccel.attention.kernels import flex, tables, triton_sparse
from diffaccel.attention.plan import BlockPlan, Blocks
from diffaccel.errors import InvalidOptionError

from .cases import full_plan, ragged_plans, tensors, token_masks, truth

# Roundings of the inputs and of the output; sums are in float32.
LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", LIMITS)
def test_equals_masked_dense_attention(interpreted: dict[str, Any], dtype: str, dim: int) -> None:
    found = interpreted[f"sparse {dtype} {dim}"]
    assert found["dtype"] == f"torch.{dtype}"
    assert found["error"] < LIMITS[dtype] and found["lse_error"] < 1e-5
    assert found["torch_error"] < LIMITS[dtype] and found["torch_lse_error"] < 1e-5, "the PyTorch path says the same"
    assert found["empty"] == 64 and found["empty_ok"], "rows without keys give 0 and -inf"


def test_lengths_that_no_block_divides(interpreted: dict[str, Any]) -> None:
    """C49."""
    found = interpreted["lengths"]
    assert max(found[n] for n in ("100", "127", "129")) < 1e-5
    assert found["zeros"] > 0.01, "the control: padding with zeros and no mask is another result"


def test_samples_grouped_heads_views_and_scale(interpreted: dict[str, Any]) -> None:
    found = interpreted["shapes"]
    assert found["error"] < 1e-5 and found["default"] > 0.1 and found["kept"]


def test_broken_inputs_are_not_hidden(interpreted: dict[str, Any]) -> None:
    assert interpreted["not_a_number"] == {"rows": [5], "others": True}


def test_a_plan_that_keeps_nothing(interpreted: dict[str, Any]) -> None:
    assert interpreted["no_keys_at_all"] == {"zero": True, "lse": True}


# ---- the lists ------------------------------------------------------------------------------------------------------


def covered(plan: BlockPlan, tile_queries: int, tile_keys: int) -> torch.Tensor:
    """[N, N] how often the kernel's lists visit each pair of positions."""
    pointer, keys = tables.key_tiles(plan, tile_keys)
    count = torch.zeros(plan.queries.tokens, plan.keys.tokens, dtype=torch.int64)
    for block, first, end in zip(*(x.tolist() for x in tables.query_tiles(plan, tile_queries)), strict=True):
        assert 0 < end - first <= tile_queries
        for begin, stop in keys[pointer[block] : pointer[block + 1]].tolist():
            assert 0 < stop - begin <= tile_keys
            count[first:end, begin:stop] += 1
    return count


@pytest.mark.parametrize("tile", [(16, 16), (128, 64), (64, 32)])
def test_lists_visit_each_kept_pair_once(tile: tuple[int, int]) -> None:
    for plan in ragged_plans(200).plans:
        wide = plan.block_mask().repeat_interleave(plan.queries.starts.diff().long(), 0)
        wide = wide.repeat_interleave(plan.keys.starts.diff().long(), 1)
        assert torch.equal(covered(plan, *tile), wide.long())


def test_lists_of_a_long_ragged_sequence() -> None:
    """C49: 4352 + 77 tokens, all kept; neighbouring small blocks fill whole tiles."""
    tokens = 4352 + 77
    pointer, keys = tables.key_tiles(full_plan(tokens, 48).plans[0], 64)
    row = keys[: pointer[1]]
    assert len(row) == -(-tokens // 64) and int((row[:, 1] - row[:, 0]).sum()) == tokens


def test_lists_are_kept_as_long_as_the_plan() -> None:
    plans = ragged_plans(200)
    device = torch.device("cpu")
    first = tables.tables(plans, 2, 128, 64, device)
    assert tables.tables(plans, 2, 128, 64, device) is first
    assert tables.tables(plans, 2, 64, 64, device) is not first
    known = len(tables._BUILT)
    del plans
    assert len(tables._BUILT) == known - 1


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_refusals_come_before_any_compute() -> None:
    q, k, v = tensors((1, 2, 200, 64))
    plans = ragged_plans()
    with pytest.raises(InvalidOptionError, match=r"200 queries and 200 keys, got 200 and 100"):
        triton_sparse.block_sparse(q, k[:, :, :100], v[:, :, :100], plans)
    with pytest.raises(InvalidOptionError, match=r"no multiple"):
        triton_sparse.block_sparse(torch.cat([q, q[:, :1]], 1), k, v, plans)
    with pytest.raises(InvalidOptionError, match=r"one dtype"):
        triton_sparse.block_sparse(q, k.half(), v, plans)
    with pytest.raises(InvalidOptionError, match=r"assign is \(1, 2\), must be \(2, 2\)"):
        triton_sparse.block_sparse(*(torch.cat([x, x]) for x in (q, k, v)), plans)
    with pytest.raises(InvalidOptionError, match="need a CUDA device, not cpu"):
        triton_sparse.block_sparse(q, k, v, plans)
    assert "at most 128, not 160" in (triton_sparse.lacks(torch.device("cuda"), torch.float16, 160) or "")
    assert "not float64" in (triton_sparse.lacks(torch.device("cuda"), torch.float64, 64) or "")


def test_everything_imports_without_triton() -> None:
    """A machine without Triton still has the rest, and is told why the kernels are not there."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name.startswith('triton') else real(name, *a)\n"
        "import torch\n"
        "from diffaccel.attention.kernels import flex, tables, triton_int8, triton_sparse\n"
        "print(triton_sparse.lacks(torch.device('cuda'), torch.float16, 64))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.splitlines()[-1] == "triton is not installed (pip install triton)", done.stderr


# ---- flex_attention -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_equals_masked_dense_attention(dtype: torch.dtype) -> None:
    q, k, v = tensors((1, 2, 200, 64), dtype)
    plans = ragged_plans()
    found = flex.block_sparse(q, k, v, plans, return_lse=True)
    wanted, wanted_lse = truth(q, k, v, token_masks(plans, 1, 2))
    limit = LIMITS[str(dtype).removeprefix("torch.")]
    assert torch.allclose(found[0].double(), wanted, atol=limit)
    assert torch.allclose(found[1].double(), wanted_lse, atol=1e-5)


@pytest.mark.slow
def test_flex_compiled_obeys_the_lists() -> None:
    """Compiled (on a CPU: half a minute and a C++ compiler), the lists decide and not the mask function alone."""
    q, k, v = tensors((1, 2, 333, 64))
    plans = ragged_plans(333)
    out = flex.block_sparse(q, k, v, plans, compiled=True)
    wanted = truth(q, k, v, token_masks(plans, 1, 2))[0]
    assert isinstance(out, torch.Tensor) and torch.allclose(out.double(), wanted, atol=1e-5)


def test_flex_lists_agree_with_the_mask() -> None:
    """Compiled, the block lists decide: full tiles must be full, tiles in neither list empty, others partial."""
    even = Blocks.even(300, 100)
    kept = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    plan = BlockPlan.of_mask(kept, even, even)
    part, full = flex.tile_lists(plan)
    mask = plan.token_mask()
    for i in range(3):
        for j in range(3):
            tile = mask[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            assert bool(full[i, j]) == bool(tile.all()) and bool(part[i, j]) == bool(tile.any() and not tile.all())
    assert part.any() and full.any()
    blocks = flex.block_mask(plan, torch.device("cpu"))
    assert blocks.kv_num_blocks.flatten().tolist() == part.sum(1).tolist()
    assert blocks.full_kv_num_blocks.flatten().tolist() == full.sum(1).tolist()


def test_flex_refuses_where_it_would_compute_every_pair() -> None:
    assert flex.lacks(torch.device("cuda"), 100_000) is None
    q, k, v = tensors((1, 1, 4200, 16))
    with pytest.raises(InvalidOptionError, match="at most 4096 tokens, not 4200"):
        flex.block_sparse(q, k, v, full_plan(4200))
    assert "not mps" in (flex.lacks(torch.device("mps"), 1) or "")


def test_heads_share_one_plan_without_assign() -> None:
    q, k, v = tensors((2, 2, 100, 32))
    assert full_plan(100).assign is None
    out = flex.block_sparse(q, k, v, full_plan(100))
    assert torch.allclose(out.double(), truth(q, k, v)[0], atol=1e-5)  # type: ignore[union-attr]
