"""What transfers and compute of a machine are taken to reach: numbers for the question "is it free?"."""

from __future__ import annotations

from ..ledger.hardware import Hardware
from .bandwidth import Bandwidth

# Assumed: pinned host memory over 16 lanes brings about 80 % of the bus (31.5 GB/s for generation 4, 63 for 5).
HOST_BYTES_PER_S = {4: 25e9, 5: 50e9}
# Assumed: matrix products in bf16 reach this share of the data sheet's peak (120 of 165 TFLOP/s on a 4090).
REACHED = 0.7264
ORIGIN = "assumed"


def host_bandwidth(hardware: Hardware) -> Bandwidth | None:
    """Host memory to that device; None where the machine is not in the table."""
    if hardware.bf16_tflops is None or hardware.pcie not in HOST_BYTES_PER_S:
        return None
    return Bandwidth(HOST_BYTES_PER_S[hardware.pcie], REACHED * hardware.bf16_tflops * 1e12, ORIGIN)
