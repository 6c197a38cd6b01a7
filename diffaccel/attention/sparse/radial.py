"""Radial attention: the farther two frames are apart, the narrower the band of positions that see each other.

Li et al., "Radial Attention: O(n log n) Sparse Attention with Energy Decay for Long Video Generation" (2025). With
bl(x) the bit length of x, S tokens a frame and d the distance of two frames:

    width(d) = S for d <= 1, else max(decay * 2^bl(S) / 2^bl(d), block)
    split(d) = 2^bl(S) / 2^bl(d) >= threshold, or d is a multiple of floor(threshold * 2^bl(d) / 2^bl(S))
    keep     = key in frame 0 (with the sink), or split(d) and |row - column| <= width(d)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch

from ...core.options import BOOLEAN
from ..geometry import Geometry
from ..plan import BlockPlan, Blocks, HeadPlans
from .layout import BLOCK, dense_text, density_of, full, largest, video_start
from .method import Query, kept
from .options import COUNT, POSITIVE, SHARE, either, one_of, take

Shrink = Literal["any", "strict"]

DECAY_STEPS = 16  # a doubling of the decay is searched in so many steps
DECAYS = (-8 * DECAY_STEPS, 5 * DECAY_STEPS)  # 2^-8: every band at its least width; 2^5: every band a whole frame


def width(distance: int, frame: int, decay: float, block: int) -> int:
    """Positions |row - column| up to this see each other, for frames `distance` apart."""
    if distance <= 1:
        return frame
    return int(max(decay * 2 ** frame.bit_length() / 2 ** distance.bit_length(), block))


def split(distance: int, frame: int, threshold: int) -> bool:
    """Whether two frames so far apart see each other at all (few do where a band would be under the threshold)."""
    band, scale = 2 ** frame.bit_length(), 2 ** distance.bit_length()
    return bool(band >= threshold * scale or distance % (threshold * scale // band) == 0)


def _bands(geometry: Geometry, decay: float, block: int, threshold: int) -> list[int]:
    """Band half width by frame distance; -1: not seen."""
    s = geometry.frame
    return [width(d, s, decay, block) if split(d, s, threshold) else -1 for d in range(geometry.frames)]


def _cuts(begin: int, count: int, frame: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last position in its frame of `count` blocks, the frame starting `begin` tokens into the first."""
    first = torch.arange(count) * block - begin
    return first.clamp(min=0), (first + block - 1).clamp(max=frame - 1)


@lru_cache(maxsize=4096)
def _pair(frame: int, block: int, begins: tuple[int, int], counts: tuple[int, int], band: int) -> torch.Tensor:
    """[row blocks, column blocks] of two frames: any pair of positions within the band."""
    top, bottom = (c[:, None] for c in _cuts(begins[0], counts[0], frame, block))
    left, right = (c[None] for c in _cuts(begins[1], counts[1], frame, block))
    return torch.maximum(top - right, left - bottom) <= band


@lru_cache(maxsize=4096)
def _pair_strict(frame: int, block: int, begins: tuple[int, int], counts: tuple[int, int], band: int) -> torch.Tensor:
    """The same by the reference's rule: a column of a block is high if more than a third of the block's rows are
    set (of a short last block too); the block is kept if more than 0.6 of its columns set at all are high.
    """
    top, bottom = (c[:, None] for c in _cuts(begins[0], counts[0], frame, block))
    columns = torch.arange(frame)[None]
    rows = (torch.minimum(bottom, columns + band) - torch.maximum(top, columns - band) + 1).clamp_(min=0)
    high, some = 3 * rows > block, rows > 0
    home = (columns[0] + begins[1]) // block
    seen = home < counts[1]
    tally = torch.zeros(2, counts[0], counts[1], dtype=torch.int64)
    tally[0].index_add_(1, home[seen], high[:, seen].long())
    tally[1].index_add_(1, home[seen], some[:, seen].long())
    return 5 * tally[0] > 3 * tally[1]


def radial_map(
    geometry: Geometry,
    *,
    decay: float = 1.0,
    block: int = BLOCK,
    threshold: int | None = None,
    shrink: Shrink = "strict",
    sink: bool = False,
) -> torch.Tensor:
    """[blocks, blocks] boolean map over even blocks; blocks with text are dense.

    Args:
        decay: the paper's gamma: widths of all bands beyond neighbouring frames scale with it.
        threshold: bands narrower than this drop frames instead; None: the block size.
        shrink: "any" keeps a block with any kept pair in it; "strict" is the reference's column rule, in which a
            frame that straddles one block more than it fills does not speak for that last one.
        sink: every token sees frame 0.
    """
    s, count = geometry.frame, -(-geometry.tokens // block)
    kept = torch.zeros(count, count, dtype=torch.bool)
    bands = _bands(geometry, decay, block, block if threshold is None else threshold)
    begins = [video_start(geometry) + f * s for f in range(geometry.frames)]
    straddled = [(begin % block + s - 1) // block + 1 for begin in begins]
    spoken = straddled if shrink == "any" else [-(-s // block)] * (geometry.frames - 1) + straddled[-1:]
    for i, top in enumerate(begins):
        for j, left in enumerate(begins):
            band = s if sink and j == 0 else bands[abs(i - j)]
            if band < 0:
                continue
            offsets, counts = (top % block, left % block), (spoken[i], spoken[j])
            if shrink == "any":
                pair = _pair(s, block, offsets, counts, min(band, s))
            else:
                pair = _pair_strict(s, block, offsets, counts, min(band, s))
            a, b = top // block, left // block
            kept[a : a + counts[0], b : b + counts[1]] |= pair
    return dense_text(kept, geometry, block)


def radial_token_mask(
    geometry: Geometry, *, decay: float = 1.0, block: int = BLOCK, threshold: int | None = None, sink: bool = False
) -> torch.Tensor:
    """[N, N] boolean mask over tokens as they come."""
    s, v = geometry.frame, geometry.video
    bands = torch.tensor(_bands(geometry, decay, block, block if threshold is None else threshold))
    frame, place = torch.arange(v) // s, torch.arange(v) % s
    seen = (place[:, None] - place[None]).abs() <= bands[(frame[:, None] - frame[None]).abs()]
    if sink:
        seen[:, :s] = True
    mask = torch.ones(geometry.tokens, geometry.tokens, dtype=torch.bool)
    start = video_start(geometry)
    mask[start : start + v, start : start + v] = seen
    return mask


def least_density(geometry: Geometry, *, block: int = BLOCK) -> float:
    """The density at the least decay, with the sink as the family has it."""
    kept = radial_map(geometry, decay=2.0 ** (DECAYS[0] / DECAY_STEPS), block=block, sink=geometry.frame_sink)
    return density_of(kept.fill_diagonal_(True), geometry.tokens, block)


def decay_for(
    geometry: Geometry,
    density: float,
    *,
    block: int = BLOCK,
    threshold: int | None = None,
    shrink: Shrink = "strict",
    sink: bool = False,
) -> float:
    """The largest decay whose plan keeps at most `density` of the pairs.

    Neighbouring frames and the sink are always whole, so there is a least density; where it is above the one asked
    for, the least decay.
    """

    def fits(step: int) -> bool:
        decay = 2.0 ** (step / DECAY_STEPS)
        kept = radial_map(geometry, decay=decay, block=block, threshold=threshold, shrink=shrink, sink=sink)
        return density_of(kept.fill_diagonal_(True), geometry.tokens, block) <= density

    return float(2.0 ** (largest(fits, *DECAYS) / DECAY_STEPS))


def radial_plan(
    geometry: Geometry,
    *,
    decay: float = 1.0,
    block: int = BLOCK,
    threshold: int | None = None,
    shrink: Shrink = "strict",
    sink: bool = False,
) -> BlockPlan:
    """`radial_map` as a plan; a block always sees itself, which the strict rule alone does not promise."""
    kept = radial_map(geometry, decay=decay, block=block, threshold=threshold, shrink=shrink, sink=sink)
    kept.fill_diagonal_(True)
    blocks = Blocks.even(geometry.tokens, block)
    return BlockPlan.of_mask(kept, blocks, blocks)


# ---- the config -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Radial:
    """Radial attention: bands that narrow with the distance of frames. Static.

    Attributes:
        density: finds the decay. Neighbouring frames and the sink are always whole, so short videos have a least one.
        decay: the paper's gamma, instead of density. With neither: 1.0.
        shrink: "strict" (the reference's rule for blocks) or "any" (every block with a kept pair).
        sink: all see frame 0; None: as the family has it.
        threshold: bands narrower than this drop frames; None: the block.
        block: tokens.
    """

    density: float | None = None
    decay: float | None = None
    shrink: Shrink = "strict"
    sink: bool | None = None
    threshold: int | None = None
    block: int = BLOCK

    name: ClassVar[str] = "radial"
    static: ClassVar[bool] = True

    def __post_init__(self) -> None:
        take(self, SHARE.or_none(), "density")
        take(self, POSITIVE.or_none(), "decay")
        either(self.density, "decay", self.decay)
        one_of("shrink", self.shrink, ("any", "strict"))
        take(self, BOOLEAN.or_none(), "sink")
        take(self, COUNT.or_none(), "threshold")
        take(self, COUNT, "block")

    def _options(self, geometry: Geometry) -> dict[str, Any]:
        sink = geometry.frame_sink if self.sink is None else self.sink
        return {"block": self.block, "threshold": self.threshold, "shrink": self.shrink, "sink": sink}

    def _decay(self, geometry: Geometry) -> float:
        if self.density is not None:
            return decay_for(geometry, self.density, **self._options(geometry))
        return 1.0 if self.decay is None else float(self.decay)

    def plan(self, query: Query) -> HeadPlans:
        """One plan for all heads."""
        return kept(self, query.geometry)

    def build(self, geometry: Geometry) -> HeadPlans:
        """The plan, made anew."""
        if self.density == 1.0:
            return full(geometry.tokens, self.block)
        return HeadPlans((radial_plan(geometry, decay=self._decay(geometry), **self._options(geometry)),))

    def describe(self, geometry: Geometry) -> dict[str, Any]:
        """{decay, sink, density}."""
        sink = self._options(geometry)["sink"]
        return {"decay": self._decay(geometry), "sink": sink, "density": kept(self, geometry).density}
