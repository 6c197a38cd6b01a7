"""Guidance reuse on a GPU, alone and with a cache; for models with two guidance branches. Not run on a GPU by us."""

from __future__ import annotations

from measure import arguments, compare

CACHE = {"cache": "taylorseer", "cache_interval": 2}
SETTINGS = {
    "every 2nd": {"guidance": "reuse", "guidance_interval": 2},
    "every 4th": {"guidance": "reuse", "guidance_interval": 4},
    "every 4th, order 1": {"guidance": "reuse", "guidance_interval": 4, "guidance_order": 1},
    "interval 0.1 to 0.8": {"guidance": "reuse", "guidance_interval": 1, "guidance_start": 0.1, "guidance_end": 0.8},
    "every 4th and a cache": {"guidance": "reuse", "guidance_interval": 4, **CACHE},
}

if __name__ == "__main__":
    compare(arguments(__doc__), SETTINGS)
