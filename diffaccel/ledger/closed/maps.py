"""Decoders as sums over feature maps: a tally that also remembers the largest map, for the peak of memory."""

from __future__ import annotations

from dataclasses import dataclass

from .tally import Tally

Grid = tuple[int, int, int]  # frames, rows, columns


def places(grid: Grid) -> int:
    """Elements of one channel."""
    frames, rows, columns = grid
    return frames * rows * columns


def larger(grid: Grid, factor: int = 2) -> Grid:
    """Rows and columns times `factor`."""
    return grid[0], grid[1] * factor, grid[2] * factor


@dataclass
class Maps(Tally):
    """Layers over feature maps.

    Attributes:
        largest: elements of the largest map that a layer took or made.
        kept: elements that stay for the next frames (causal convolutions decoded frame by frame).
    """

    largest: int = 0
    kept: int = 0

    def layer(self, grid: Grid, inner: int, outer: int, kernel: int, *, bias: bool = True) -> None:
        """A convolution whose result lies on `grid`."""
        self.conv(places(grid), inner, outer, kernel, bias=bias)
        self.largest = max(self.largest, places(grid) * max(inner, outer))

    def residual(self, grid: Grid, inner: int, outer: int, kernel: int, norm: int = 2) -> None:
        """Two convolutions, each behind a norm of `norm` parameters a channel, and a shortcut if the width changes."""
        self.held(norm * (inner + outer))
        self.layer(grid, inner, outer, kernel)
        self.layer(grid, outer, outer, kernel)
        if inner != outer:
            self.layer(grid, inner, outer, 1)

    def attend(self, grid: Grid, width: int, norm: int, *, frame_by_frame: bool, linear: bool = False) -> None:
        """One head over all places of a frame, or of all frames, between projections."""
        self.held(norm * width)
        if linear:
            stream = f"places {places(grid)}"
            self.rows[stream] = places(grid)
            self.linear(stream, width, width, 4)
        else:
            self.conv(places(grid), width, width, 1, 4)
        frames, sequence = (grid[0], places(grid) // grid[0]) if frame_by_frame else (1, places(grid))
        self.attention_flops += 4 * frames * sequence**2 * width


@dataclass(frozen=True)
class Decoding:
    """What decoding costs as diffusers does it by default: no spatial tiles, frames as the class chunks them.

    Attributes:
        flops: of one decode.
        peak_bytes: live tensors at most, in fp32 (half of it in bf16).
        decoder_parameters: of the decoder module.
        parameters: of the whole autoencoder.
    """

    flops: int
    peak_bytes: int
    decoder_parameters: int
    parameters: int
