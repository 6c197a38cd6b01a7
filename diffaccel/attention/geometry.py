"""How the tokens of a video lie in the sequence: frames, rows, columns, and text before or behind them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """Token n of the video is f*S + h*W + w with S = H*W (frame-major).

    Attributes:
        frames, rows, columns: F, H, W of the tokens (after patching, not of the latents).
        text: number of text tokens in the same sequence.
        text_first: whether the text stands before the video.
        frame_sink: whether the family's first frame is attended to by all (Wan), where a method leaves it to it.
    """

    frames: int
    rows: int
    columns: int
    text: int = 0
    text_first: bool = False
    frame_sink: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(frames, rows, columns)."""
        return self.frames, self.rows, self.columns

    @property
    def frame(self) -> int:
        """S: tokens of one frame."""
        return self.rows * self.columns

    @property
    def video(self) -> int:
        """F*S: tokens of the video."""
        return self.frames * self.frame

    @property
    def tokens(self) -> int:
        """N: all tokens of the sequence."""
        return self.video + self.text
