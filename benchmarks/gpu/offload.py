"""Layerwise offload on a GPU: seconds and peak memory against all weights resident, alone, compiled and under a cache.

`python benchmarks/gpu/offload.py --model black-forest-labs/FLUX.1-dev --height 1024 --width 1024 --out offload.json`.
Begins with all of the pipeline on the device, to have the plain run to compare with. Prints what the plan says
about each setting first (bytes resident, from how many tokens on it is free). Not run on a GPU by us; on a CPU the
settings that use host memory are left out, with the reason.
"""

from __future__ import annotations

import sys

from measure import arguments, compare, load

from diffaccel import plan

HOST = {"offload": "layerwise", "offload_store": "host"}
DISK = {"offload": "layerwise", "offload_store": "disk"}
SETTINGS = {
    "host, 2 layers, prefetch 1": HOST,
    "host, 1 layer, no prefetch": HOST | {"offload_resident_layers": 1, "offload_prefetch": 0},
    "host, 2 layers, prefetch 3": HOST | {"offload_prefetch": 3},
    "host, 16 layers, prefetch 1": HOST | {"offload_resident_layers": 16},
    "host, 4 GB": HOST | {"offload_max_bytes": 4_000_000_000},
    "host, not pinned": HOST | {"offload_pin": False},
    "host, compiled": HOST | {"compile": True},
    "host, first-block cache": HOST | {"cache": "first_block", "cache_threshold": 0.1},
    "host, every second step reused": HOST | {"cache": "interval", "cache_interval": 2},
    "disk, 2 layers, prefetch 1": DISK,
}

if __name__ == "__main__":
    args = arguments(__doc__)
    pipe, _ = load(args)
    for name, options in SETTINGS.items():
        print(f"{name}: {plan(pipe, preset=None, **options).item('offload.layerwise').reason}", file=sys.stderr)
    del pipe
    compare(args, SETTINGS)
