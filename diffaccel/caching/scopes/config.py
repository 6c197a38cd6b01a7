"""Scopes: which part of the denoiser a reused step leaves out. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.options import GOT, number, one_of, take, whole
from ...errors import InvalidOptionError


@dataclass(frozen=True)
class Stack:
    """The block stack, but for `front` blocks at its start and `back` blocks at its end, which always run.

    What is remembered is the residual of the blocks between, per stream, [B, T, C]; it is added to what the front
    blocks give at the step at hand. Gates that look at a probe need at least one front block.
    """

    front: int = 0
    back: int = 0

    def __post_init__(self) -> None:
        take(self, whole(0), "front", "back", form=GOT)


@dataclass(frozen=True)
class Denoiser:
    """The whole denoiser: nothing of it runs on a reused step, so embedders and the final layer are left out too.

    What is remembered is its output, or with `residual` output minus input (EasyCache); inputs with more channels
    than the output (image-to-video, inpainting) count with their leading channels, which are the latents. A gate that
    looks at the blocks has them run up to there (`front` blocks), and the final layer as well. `correct` of 1 to 3
    is the order with which a computed step makes good what forecasts before it missed (`correction.corrected`):
    for Euler schedulers, at most one above the forecast's own order.
    """

    residual: bool = False
    front: int = 0
    correct: int = 0

    def __post_init__(self) -> None:
        take(self, whole(0), "front", form=GOT)
        take(self, one_of(0, 1, 2, 3), "correct", form=GOT)
        if self.correct and self.residual:
            raise InvalidOptionError("correct is for forecasts of the output, not of its residual")


@dataclass(frozen=True)
class Modules:
    """The attention and feed-forward modules of every block but the first `front`, each remembered by itself.

    Norms, modulation and residual additions still run on a reused step (TaylorSeer, FORA).
    """

    front: int = 0

    def __post_init__(self) -> None:
        take(self, whole(0), "front", form=GOT)


@dataclass(frozen=True)
class Halves:
    """One half of the block stack: the rear one before step `switch`, the front one from it on (Delta-DiT).

    `switch` is a share of the loop.
    """

    switch: float = 0.5

    def __post_init__(self) -> None:
        take(self, number(0, 1, "a share between 0 and 1"), "switch", form=GOT)


@dataclass(frozen=True)
class Deep:
    """All of a U-Net that lies deeper than its skip connection `branch` (DeepCache).

    Skip connections count from 0, the shallowest, which is the entry layer's output. On a reused step only the layers
    run that make the connections 0 to `branch`, and those that take them; what is remembered is the feature
    [B, C, H, W] that enters the first of the latter.
    """

    branch: int = 0

    def __post_init__(self) -> None:
        take(self, whole(0), "branch", form=GOT)


Scope = Stack | Denoiser | Modules | Halves | Deep

BEHIND_FIRST_BLOCK = Stack(1)
