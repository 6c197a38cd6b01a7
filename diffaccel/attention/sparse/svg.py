"""Sparse VideoGen: every head is spatial (a band of near frames) or temporal (the same places over all frames).

Xi et al., "Sparse VideoGen: Accelerating Video Diffusion Transformers with Spatial-Temporal Sparsity" (2025). One
band serves both: in the order of the sequence (frame by frame) it keeps near frames, and with the tokens put place by
place (n' = s * F + f) it keeps near places. Which of them a head is, is measured on sampled rows at every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any, ClassVar, Literal

import torch

from ...core.options import BOOLEAN
from ..geometry import Geometry
from ..plan import BlockPlan, Blocks, HeadPlans
from .layout import BLOCK, around_text, dense_text, density_of, framed, full, largest, spans, video_start
from .method import Query, kept
from .options import COUNT, POSITIVE, SHARE, either, one_of, take

SinkMode = Literal["reference", "frame0"]


def width_frames(geometry: Geometry, density: float) -> float:
    """The paper's band half width in frames for a density: (N/S)(1 - sqrt(1 - d')), d' = d - 2 text / N.

    A sink comes on top of it (density 0.3 becomes 0.343 on 21 frames); `half_width_for` counts it in.
    """
    rest = min(1.0, max(0.0, density - 2 * geometry.text / geometry.tokens))
    return geometry.tokens / geometry.frame * (1 - sqrt(1 - rest))


def half_width(geometry: Geometry, frames: float, block: int = BLOCK) -> int:
    """Tokens on either side that a band of so many frames keeps: rounded up to whole blocks."""
    return ceil(frames * geometry.frame / block) * block


def _near(
    rows: tuple[torch.Tensor, torch.Tensor], columns: tuple[torch.Tensor, torch.Tensor], half: int
) -> torch.Tensor:
    """[rows, columns] boolean: spans (first, last) that come within `half` of each other."""
    return torch.maximum(rows[0][:, None] - columns[1][None], columns[0][None] - rows[1][:, None]) <= half


def spatial_map(geometry: Geometry, half: int, *, block: int = BLOCK, sink: bool = False) -> torch.Tensor:
    """[blocks, blocks] boolean: every even block with a pair within `half` tokens (both ends in); text dense.

    Args:
        sink: every token sees frame 0.
    """
    first, last = spans(geometry, block)
    kept = _near((first, last), (first, last), half)
    if sink:
        kept[:, (first < geometry.frame) & (last >= first)] = True
    return dense_text(kept, geometry, block)


def spatial_plan(geometry: Geometry, half: int, *, block: int = BLOCK, sink: bool = False) -> BlockPlan:
    """`spatial_map` as a plan: the band on the order of the sequence."""
    blocks = Blocks.even(geometry.tokens, block)
    return BlockPlan.of_mask(spatial_map(geometry, half, block=block, sink=sink), blocks, blocks)


def place_order(geometry: Geometry) -> torch.Tensor:
    """[video] int64: the video token at each position of the order place by place."""
    return torch.arange(geometry.video).view(geometry.frames, geometry.frame).T.flatten()


def temporal_plan(
    geometry: Geometry, half: int, *, block: int = BLOCK, sink: bool = False, sink_mode: SinkMode = "reference"
) -> BlockPlan:
    """The band on the order place by place; text in blocks of its own, dense.

    Args:
        sink_mode: "reference" keeps the first S *positions of this order*, as upstream does (a few places of all
            frames); "frame0" keeps frame 0 itself, whose keys then stand in front.
    """
    order = place_order(geometry)
    queries, video = _evenly(geometry, order, block)
    rows = _positions(queries, video)
    if not (sink and sink_mode == "frame0"):
        kept = _near(rows, rows, half)
        if sink:
            kept[:, rows[0] < geometry.frame] = True
        return BlockPlan.of_mask(framed(kept, queries.count, video), queries, queries)
    rest = torch.arange(geometry.video)[order >= geometry.frame]  # positions of the other frames, in order
    heads, tails = Blocks.even(geometry.frame, block), Blocks.even(len(rest), block)
    lengths = torch.cat([heads.starts.diff(), tails.starts.diff()]) if len(rest) else heads.starts.diff()
    keys, key_video = around_text(geometry, lengths, torch.cat([torch.arange(geometry.frame), order[rest]]), block)
    kept = torch.ones(queries.count, keys.count, dtype=torch.bool)
    if len(rest):
        columns = rest[tails.starts[:-1].long()], rest[tails.starts[1:].long() - 1]
        after = slice(key_video.start + heads.count, key_video.stop)
        kept[video, after] = _near(rows, columns, half)
    return BlockPlan.of_mask(kept, queries, keys)


def _evenly(geometry: Geometry, order: torch.Tensor, block: int) -> tuple[Blocks, slice]:
    return around_text(geometry, Blocks.even(geometry.video, block).starts.diff(), order, block)


def _positions(blocks: Blocks, video: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last position (within the video) of its blocks."""
    starts = blocks.starts[video.start : video.stop + 1].long()
    return starts[:-1] - starts[0], starts[1:] - starts[0] - 1


def band_token_mask(geometry: Geometry, half: int, *, sink: bool = False, temporal: bool = False) -> torch.Tensor:
    """[N, N] boolean mask over tokens as they come (sink of temporal heads as upstream has it)."""
    place = torch.arange(geometry.video)
    seen = (place[:, None] - place[None]).abs() <= half
    if sink:
        seen[:, : geometry.frame] = True
    if temporal:
        order = place_order(geometry)
        seen = torch.empty_like(seen).index_put_((order[:, None], order[None]), seen)
    mask = torch.ones(geometry.tokens, geometry.tokens, dtype=torch.bool)
    start = video_start(geometry)
    mask[start : start + geometry.video, start : start + geometry.video] = seen
    return mask


def half_width_for(geometry: Geometry, density: float, *, block: int = BLOCK, sink: bool = False) -> int:
    """The widest band, in whole blocks, whose plan keeps at most `density` of the pairs, sink and text included.

    At least one block to either side.
    """

    def fits(wide: int) -> bool:
        kept = spatial_map(geometry, wide * block, block=block, sink=sink)
        return density_of(kept, geometry.tokens, block) <= density

    return largest(fits, 1, max(1, -(-geometry.tokens // block))) * block


def sample_rows(geometry: Geometry, count: int, seed: int) -> torch.Tensor:
    """[count or fewer] int64: distinct video tokens out of all of them, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(geometry.video, generator=generator)[:count] + video_start(geometry)


def row_mask(plan: BlockPlan, rows: torch.Tensor) -> torch.Tensor:
    """[rows, N] boolean: the keys, as they come, that these tokens see under a plan."""
    home = plan.queries.block_of_token()[rows]
    return plan.block_mask()[home][:, plan.keys.block_of_token()]


def classify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    plans: tuple[BlockPlan, ...],
    rows: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """[B, H] int64, on the CPU: for every head the plan whose output on `rows` is nearest to dense attention.

    Args:
        q, k, v: [B, H, N, D]. Without v, the plan that loses the least attention mass.
        rows: [rows] int64, tokens to try.

    The error is the mean square over rows and channels, in float32. One head at a time is held: [B, rows, N].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seen = [row_mask(plan, rows).to(q.device) for plan in plans]
    rows = rows.to(q.device)
    chosen = []
    for head in range(q.shape[1]):
        scores = (q[:, head, rows].float() * scale) @ k[:, head].float().transpose(-1, -2)
        weights = scores.softmax(-1)
        chosen.append(_errors(weights, seen, None if v is None else v[:, head].float()).argmin(0))
    return torch.stack(chosen, 1).cpu()


def _errors(weights: torch.Tensor, seen: list[torch.Tensor], v: torch.Tensor | None) -> torch.Tensor:
    """[plans, B]: how far each mask is from dense. A masked softmax is the dense one, cut and scaled up again."""
    exact = None if v is None else weights @ v
    errors = []
    for mask in seen:
        cut = weights * mask
        mass = cut.sum(-1, keepdim=True)
        if v is None or exact is None:
            errors.append(1 - mass.mean((1, 2)))
        else:
            errors.append(((cut @ v) / mass.clamp(min=1e-20) - exact).square().mean((1, 2)))
    return torch.stack(errors)


# ---- the config -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseVideoGen:
    """Sparse VideoGen: each head spatial or temporal, by the error on sampled rows at every call.

    Attributes:
        density: finds the band's width, sink and text counted in. With neither: 0.3.
        width_frames: half width in frames, instead of density (the function `width_frames` is the paper's formula).
        sample_rows: video tokens tried per call, out of all of them.
        sink: all see frame 0; None: as the family has it.
        sink_mode: of temporal heads: "reference" (the first S positions place by place) or "frame0".
        block: tokens.
    """

    density: float | None = None
    width_frames: float | None = None
    sample_rows: int = 64
    sink: bool | None = None
    sink_mode: SinkMode = "reference"
    block: int = BLOCK

    name: ClassVar[str] = "svg"
    static: ClassVar[bool] = False

    def __post_init__(self) -> None:
        take(self, SHARE.or_none(), "density")
        take(self, POSITIVE.or_none(), "width_frames")
        either(self.density, "width_frames", self.width_frames)
        take(self, BOOLEAN.or_none(), "sink")
        one_of("sink_mode", self.sink_mode, ("reference", "frame0"))
        take(self, COUNT, "sample_rows", "block")

    def _half(self, geometry: Geometry) -> tuple[int, bool]:
        sink = geometry.frame_sink if self.sink is None else self.sink
        if self.width_frames is not None:
            return half_width(geometry, self.width_frames, self.block), sink
        density = 0.3 if self.density is None else self.density
        return half_width_for(geometry, density, block=self.block, sink=sink), sink

    def plan(self, query: Query) -> HeadPlans:
        """Two plans, and which head takes which. Without v, heads are told apart by the attention they lose."""
        both = kept(self, query.geometry)
        if len(both.plans) == 1:
            return both
        q, k = query.tensors(self.name)
        rows = sample_rows(query.geometry, self.sample_rows, 1_000_003 * query.layer + query.step)
        return HeadPlans(both.plans, classify(q, k, query.v, both.plans, rows, query.scale))

    def build(self, geometry: Geometry) -> HeadPlans:
        """The spatial and the temporal plan, or one that keeps everything."""
        if self.density == 1.0:
            return full(geometry.tokens, self.block)
        half, sink = self._half(geometry)
        near = spatial_plan(geometry, half, block=self.block, sink=sink)
        placed = temporal_plan(geometry, half, block=self.block, sink=sink, sink_mode=self.sink_mode)
        return HeadPlans((near, placed), torch.zeros(1, 1, dtype=torch.int64))

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """{half_width, width_frames, sink, density} (of the spatial plan)."""
        half, sink = self._half(geometry)
        density = kept(self, geometry).plans[0].density
        return {"half_width": half, "width_frames": half / geometry.frame, "sink": sink, "density": density}
