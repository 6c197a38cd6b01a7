"""VAE tiling on a GPU: exact strips and blended tiles, peak memory and time against what they do to the picture.

Strips change the algorithm that cuDNN picks for a convolution, so that even in float32 the exact modes are equal but
for rounding only (set `torch.backends.cuda.matmul.allow_tf32` and `torch.backends.cudnn.allow_tf32` to False to see
float32 rounding rather than that of TF32). Not run on a GPU by us.
"""

from __future__ import annotations

from measure import arguments, compare

SETTINGS = {
    "exact, fast": {"vae_tiling": "exact", "vae_tiling_mode": "fast"},
    "exact, low": {"vae_tiling": "exact", "vae_tiling_mode": "low"},
    "exact, low, strips of 2": {"vae_tiling": "exact", "vae_tiling_mode": "low", "vae_tiling_rows": 2},
    "tiles of 512": {"vae_tiling": "blended", "vae_tiling_tile_height": 512, "vae_tiling_tile_width": 512},
    "tiles of 256": {"vae_tiling": "blended", "vae_tiling_tile_height": 256, "vae_tiling_tile_width": 256},
}

if __name__ == "__main__":
    compare(arguments(__doc__), SETTINGS)
