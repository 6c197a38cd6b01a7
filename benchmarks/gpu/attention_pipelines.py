"""Attention backends and 8-bit attention in a whole pipeline on a GPU. Not run on a GPU by us.

Settings whose package is not installed, or that do not fit the GPU, are left out with the reason (`left_out`).
"""

from __future__ import annotations

from measure import arguments, compare

BACKENDS = ("native", "flash", "flash3", "cudnn", "xformers", "flex")
SAGE = ("auto", "1", "2", "3", "hub", "triton")
SETTINGS = {name: {"attention": name} for name in BACKENDS} | {
    f"sage {variant}": {"attention": "sage", "attention_variant": variant} for variant in SAGE
}

if __name__ == "__main__":
    compare(arguments(__doc__), SETTINGS)
