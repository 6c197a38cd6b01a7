"""Blended VAE tiling on a GPU: peak memory against what it does to the picture. Not run on a GPU by us."""

from __future__ import annotations

from measure import arguments, compare

SETTINGS = {
    "tiles of 512": {"vae_tiling": "blended", "vae_tiling_tile_height": 512, "vae_tiling_tile_width": 512},
    "tiles of 256": {"vae_tiling": "blended", "vae_tiling_tile_height": 256, "vae_tiling_tile_width": 256},
}

if __name__ == "__main__":
    compare(arguments(__doc__), SETTINGS)
