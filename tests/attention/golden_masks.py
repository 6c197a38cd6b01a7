"""Golden cases of sparse masks (KIND masks of tests/golden.py): the keys that each kind knows, and the check.

Every number a case may state is computed here by the functions that the methods use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from diffaccel.attention.geometry import Geometry
from diffaccel.attention.plan import BlockPlan
from diffaccel.attention.sparse import radial, sta, svg, svg2
from tests.golden import Mismatch, compare

Data = dict[str, Any]

FIRST = "perm_first"  # + how many: the permutation's first entries


@dataclass(frozen=True)
class Kind:
    """A driver (params, case) -> what it says by key of a case; the params it knows; other keys that are no claim."""

    driver: Callable[[Data], Data]
    params: frozenset[str]


def check(case: Data) -> None:
    """Raise what is wrong with this case; every key in it must be known."""
    name = case["kind"]
    if name not in KINDS:
        raise Mismatch(f"unknown kind {name!r}")
    kind = KINDS[name]
    strange = sorted(set(case["params"]) - kind.params)
    if strange:
        raise Mismatch(f"unknown key {strange[0]!r} in params")
    said = kind.driver(case["params"])
    claims = [key for key in case if key not in ("name", "kind", "params") and not key.endswith("note")]
    for key in sorted(claims, key=lambda key: key == "rows"):
        if key.startswith(FIRST) and key[len(FIRST) :].isdigit() and "perm" in said:
            compare(case[key], said["perm"][: int(key[len(FIRST) :])], key)
        elif key not in said:
            raise Mismatch(f"unknown key {key!r}")
        else:
            compare(case[key], said[key], key)


def check_width(case: Data) -> None:
    """One entry of `svg_width_frames`: S tokens a frame, ctx text tokens."""
    strange = sorted(set(case) - {"density", "F", "S", "ctx", "width"})
    if strange:
        raise Mismatch(f"unknown key {strange[0]!r}")
    geometry = Geometry(case["F"], 1, case["S"], text=case.get("ctx", 0))
    compare(case["width"], svg.width_frames(geometry, case["density"]), "width")


def _said(kept: torch.Tensor) -> Data:
    return {
        "rows": ["".join("1" if bit else "0" for bit in row) for row in kept.tolist()],
        "n_q_blocks": kept.shape[0],
        "n_kv_blocks": kept.shape[1],
        "kept": int(kept.sum()),
        "density": float(kept.double().mean()),
    }


def _geometry(params: Data) -> Geometry:
    first = params.get("text_first", False)
    return Geometry(params["F"], params["H"], params["W"], text=params.get("text", 0), text_first=first)


def _radial(params: Data) -> Data:
    geometry = _geometry(params)
    options = {
        "decay": params.get("decay", 1.0),
        "block": params["block"],
        "threshold": params.get("split_threshold"),
        "sink": params.get("first_frame_sink", False),
    }
    kept = radial.radial_map(geometry, shrink=params.get("shrink", "any"), **options)
    return {**_said(kept), "token_density": float(radial.radial_token_mask(geometry, **options).double().mean())}


def _sta(params: Data) -> Data:
    geometry, tile = _geometry(params), tuple(params["tile"])
    compare(params.get("grid"), list(sta.grid_of(geometry, tile)), "params.grid")
    plan = sta.tile_plan(geometry, tile=tile, window=tuple(params["window_tiles"]), block=params.get("block", 128))
    return {**_said(plan.block_mask()), "token_density": plan.density, **_permutation(plan)}


def _permutation(plan: BlockPlan) -> Data:
    order = plan.queries.order
    assert order is not None
    return {"perm": order.tolist(), "perm_sum_i_times_p": int((torch.arange(len(order)) * order).sum())}


def _svg(params: Data) -> tuple[Geometry, int, bool]:
    geometry = _geometry(params)
    return geometry, svg.half_width(geometry, params["width_frames"], params["block"]), params["first_frame_sink"]


def _svg_spatial(params: Data) -> Data:
    geometry, half, sink = _svg(params)
    tokens = svg.band_token_mask(geometry, half, sink=sink)
    plan = svg.spatial_plan(geometry, half, block=params["block"], sink=sink)
    return {**_said(plan.block_mask()), "token_density": float(tokens.double().mean())}


def _svg_temporal(params: Data) -> Data:
    """The rows are the token mask seen frame by frame in even blocks; the plan works on the permuted order."""
    if params.get("view", "frame_major") not in ("frame_major", "permuted"):
        raise Mismatch(f"unknown view {params['view']!r}")
    geometry, half, sink = _svg(params)
    block = params["block"]
    tokens = svg.band_token_mask(geometry, half, sink=sink, temporal=True)
    plan = svg.temporal_plan(geometry, half, block=block, sink=sink)
    permuted = plan.block_mask()
    seen = permuted if params.get("view") == "permuted" else any_of_blocks(tokens, block)
    return {
        **_said(seen),
        "token_density": float(tokens.double().mean()),
        "permuted_block_density": float(permuted.double().mean()),
        **_permutation(plan),
    }


def any_of_blocks(mask: torch.Tensor, block: int) -> torch.Tensor:
    """[blocks, blocks]: whether any pair of a token mask is set in even blocks."""
    count = -(-len(mask) // block)
    padded = torch.zeros(count * block, count * block, dtype=torch.bool)
    padded[: len(mask), : len(mask)] = mask
    return padded.view(count, block, count, block).any(3).any(1)


def _svg2_map(params: Data) -> Data:
    q, k = (torch.tensor(params[key], dtype=torch.float64)[None] for key in ("q_centroids", "k_centroids"))
    sizes = torch.tensor(params["k_sizes"])[None]
    weights = svg2.probabilities(q, k, sizes)
    kept = svg2.top_map(weights, params["top_p"], min_kc_ratio=params.get("min_kc_ratio", 0.0))
    said = {**_said(kept[0]), "probs": weights[0].tolist()}
    if "q_sizes" in params:
        queries = torch.tensor(params["q_sizes"])[None]
        said["size_weighted_density"] = float(svg2.size_weighted_density(kept, queries, sizes))
    return said


VIDEO = frozenset(["F", "H", "W", "text", "text_first"])
BAND = VIDEO | frozenset(["block", "width_frames", "first_frame_sink"])
KINDS = {
    "radial": Kind(_radial, VIDEO | frozenset(["block", "decay", "first_frame_sink", "split_threshold", "shrink"])),
    "sta": Kind(_sta, VIDEO | frozenset(["block", "tile", "window_tiles", "grid"])),
    "svg_spatial": Kind(_svg_spatial, BAND),
    "svg_temporal": Kind(_svg_temporal, BAND | {"view"}),
    "svg2_map": Kind(
        _svg2_map, frozenset(["q_centroids", "k_centroids", "k_sizes", "q_sizes", "top_p", "min_kc_ratio"])
    ),
}
