"""Sees the decodes of a run, and whether each was larger than a tile; installed only while a run is on."""

from __future__ import annotations

import functools
from typing import Any

from ...core.run import current_run
from ..layout import Tiling

KEY = "vae.tiling"  # where in `run.state` the counts are kept
_ABSENT = object()


class DecodeWatch:
    """Counts a VAE's decodes into the run of the calling thread: {"decodes", "tiled", "why"}.

    `made` of None (sizes unknown) counts every decode as tiled. Runs may be nested; each `start` needs its `stop`.
    """

    def __init__(self, vae: Any, made: Tiling | None) -> None:
        self.vae, self.made = vae, made
        self.depth = 0
        self.before: Any = _ABSENT

    def start(self) -> None:
        """A run begins."""
        self.depth += 1
        if self.depth > 1:
            return
        self.before = vars(self.vae).get("decode", _ABSENT)
        decode = self.vae.decode

        @functools.wraps(decode)
        def watched(z: Any, *args: Any, **kwargs: Any) -> Any:
            self.see(z)
            return decode(z, *args, **kwargs)

        vars(self.vae)["decode"] = watched

    def stop(self) -> None:
        """A run ended."""
        if not self.depth:
            return
        self.depth -= 1
        if self.depth:
            return
        if self.before is _ABSENT:
            del vars(self.vae)["decode"]
        else:
            vars(self.vae)["decode"] = self.before

    def see(self, z: Any) -> None:
        """A decode of latents `z` [..., H, W] begins."""
        run = current_run()
        seen = run.state.get(KEY) if run is not None else None
        if seen is None:
            return
        seen["decodes"] += 1
        height, width = z.shape[-2:]
        if self.made is None or self.made.always or self._larger(height, width) or self._longer(z):
            seen["tiled"] += 1
            return
        ratio, (tile_height, tile_width) = self.made.ratio, self.made.tile
        seen["why"] = (
            f"{width * ratio}x{height * ratio} px is not larger than a tile of {tile_width}x{tile_height} px, so the "
            "picture was decoded whole"
        )

    def _longer(self, z: Any) -> bool:
        assert self.made is not None
        return self.made.latents is not None and z.ndim == 5 and bool(z.shape[2] > self.made.latents)

    def _larger(self, height: int, width: int) -> bool:
        assert self.made is not None
        tile_height, tile_width = (size // self.made.ratio for size in self.made.tile)
        return bool(height > tile_height or width > tile_width)
