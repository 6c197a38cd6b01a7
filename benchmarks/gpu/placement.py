"""Stage offload on a GPU: peak memory and time against everything resident.

`python benchmarks/gpu/placement.py --model black-forest-labs/FLUX.1-dev --out placement.json`. Every round attaches
anew (not timed), so that encoders are brought in and called each time; what a kept prompt saves is not in here. Not
run on a GPU by us. The bundled testbed is too small to show anything but that the script works.
"""

from __future__ import annotations

from measure import arguments, compare

SETTINGS = {
    "stage, host": {"offload": "stage"},
    "stage, host, not pinned": {"offload": "stage", "offload_pin": False},
    "stage, host, nothing kept": {"offload": "stage", "offload_text_cache_bytes": 0},
    "stage, disk": {"offload": "stage", "offload_store": "disk"},
    "stage, host, vae stays": {"offload": "stage", "offload_keep": ("vae",)},
}

if __name__ == "__main__":
    compare(arguments(__doc__), SETTINGS)
