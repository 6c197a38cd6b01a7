"""Regional compile on a GPU, alone and under caches. Not run on a GPU by us."""

from __future__ import annotations

from measure import arguments, compare

SETTINGS = {
    "compile": {"compile": True},
    "compile and first_block": {"compile": True, "cache": "first_block", "cache_threshold": 0.1},
    "compile and taylorseer lite": {"compile": True, "cache": "taylorseer", "cache_interval": 3},
}

if __name__ == "__main__":
    compare(arguments(__doc__), SETTINGS)
