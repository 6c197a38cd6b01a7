"""What a denoiser is given: the extent of its latents, and the lengths of what conditions them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Latents:
    """Latent frames, rows and columns, text tokens by stream, and tokens of audio (0: none)."""

    frames: int
    rows: int
    columns: int
    text: tuple[int, ...]
    audio: int = 0

    def tokens(self, patch: int = 1, patch_frames: int = 1) -> int:
        """Tokens of patches of `patch_frames` x `patch` x `patch` latents."""
        return (self.frames // patch_frames) * (self.rows // patch) * (self.columns // patch)


def width_of(config: Config) -> int:
    """Heads x dimension of a head."""
    return int(config["num_attention_heads"] * config["attention_head_dim"])
