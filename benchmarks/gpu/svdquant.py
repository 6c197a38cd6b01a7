"""SVDQuant on a GPU: nunchaku's kernels where they are, Triton kernels, dequantized weights. Not run on a GPU by us.

Quantizes live without calibration unless --checkpoint names a file of `diffaccel quantize` (or of nunchaku): speed is
the same, pictures are worse. On Hopper compare with benchmarks of FP8: nunchaku has no kernels there.
"""

from __future__ import annotations

import sys
from typing import Any

from measure import arguments, compare


def settings(checkpoint: str | None) -> dict[str, dict[str, Any]]:
    """One setting per backend; those that cannot be are skipped with the reason in their plan."""
    base: dict[str, Any] = {"quantization": "svdquant"}
    if checkpoint is not None:
        base["quantization_checkpoint"] = checkpoint
    else:
        base["quantization_alpha"] = 0.5
    found = {
        f"svdquant {b}": {**base, "quantization_backend": b} for b in ("nunchaku", "triton", "triton_int8", "torch")
    }
    found["svdquant triton, compiled"] = {**base, "quantization_backend": "triton", "compile": True}
    found["svdquant auto, first_block"] = {**base, "cache": "first_block", "cache_threshold": 0.1}
    if checkpoint is None:
        found["svdquant nvfp4"] = {**base, "quantization_precision": "nvfp4"}
    return found


if __name__ == "__main__":
    given = None
    if "--checkpoint" in sys.argv:
        at = sys.argv.index("--checkpoint")
        given = sys.argv[at + 1]
        del sys.argv[at : at + 2]
    compare(arguments(__doc__), settings(given))
