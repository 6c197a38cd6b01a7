"""Attention backends on a GPU. Not run on a GPU by us."""

from __future__ import annotations

from measure import arguments, compare

SETTINGS = {name: {"attention": name} for name in ("native", "flash", "flex")}

if __name__ == "__main__":
    compare(arguments(__doc__), SETTINGS)
