"""Step caches on a GPU: `python benchmarks/gpu/caches.py --model black-forest-labs/FLUX.1-dev --out caches.json`.

Not run on a GPU by us. Settings whose numbers belong to a model are left out with the reason where there are none.
"""

from __future__ import annotations

from measure import arguments, compare

SETTINGS = {
    "first_block 0.08": {"cache": "first_block", "cache_threshold": 0.08},
    "first_block 0.12 order 1": {"cache": "first_block", "cache_threshold": 0.12, "cache_order": 1},
    "dbcache F4 0.12": {"cache": "dbcache", "cache_threshold": 0.12, "cache_front_blocks": 4, "cache_warmup_steps": 4},
    "teacache": {"cache": "teacache"},
    "magcache": {"cache": "magcache"},
    "seacache 0.25": {"cache": "seacache"},
    "easycache 0.05": {"cache": "easycache"},
    "taylorseer lite 3": {"cache": "taylorseer", "cache_interval": 3},
    "taylorseer lite 3 corrected": {"cache": "taylorseer", "cache_interval": 3, "cache_coordinate": "sigma",
                                    "cache_correct": 2},
    "deepcache 3": {"cache": "deepcache"},
}  # fmt: skip

if __name__ == "__main__":
    compare(arguments(__doc__), SETTINGS)
