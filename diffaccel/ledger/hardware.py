"""The machines a plan can be made for: by name, or what is here.

Memory is the vendor's figure in GiB; compute capability as in CUDA. Sources: NVIDIA data sheets.

`bf16_tflops` is the data sheet's dense bf16 peak with fp32 accumulation, `pcie` the generation of its 16 lanes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import unknown

GIB = 1024**3


@dataclass(frozen=True)
class Hardware:
    """A device: `kind` is "cpu" or "cuda", `capability` the CUDA compute capability (None on a CPU)."""

    name: str
    kind: str
    memory_gib: float | None = None
    capability: tuple[int, int] | None = None
    bf16_tflops: float | None = None
    pcie: int | None = None

    def __str__(self) -> str:
        memory = f" {self.memory_gib:g} GiB" if self.memory_gib else ""
        return f"{self.name}{memory}"


HARDWARE: dict[str, Hardware] = {
    h.name: h
    for h in (
        Hardware("3060", "cuda", 12, (8, 6), 25.5, 4),
        Hardware("4090", "cuda", 24, (8, 9), 165.2, 4),
        Hardware("5090", "cuda", 32, (12, 0), 209.5, 5),
        Hardware("a100", "cuda", 80, (8, 0), 312, 4),
        Hardware("b200", "cuda", 180, (10, 0), 2250, 5),
        Hardware("cpu", "cpu"),
        Hardware("h100", "cuda", 80, (9, 0), 989, 5),
        Hardware("h200", "cuda", 141, (9, 0), 989, 5),
        Hardware("l20", "cuda", 48, (8, 9), 119.5, 4),
        Hardware("l40s", "cuda", 48, (8, 9), 362, 4),
    )
}


def named(name: str) -> Hardware:
    """The hardware of that name (`4090`, `rtx4090`, `H100`, `cpu`, ...)."""
    key = name.lower().replace(" ", "").replace("-", "").removeprefix("nvidia").removeprefix("geforce")
    key = key.removeprefix("rtx")
    if key not in HARDWARE:
        raise unknown("hardware", name, HARDWARE)
    return HARDWARE[key]


def detect(device: str) -> Hardware:
    """The hardware behind a torch device type: the current GPU for "cuda", else the CPU."""
    if device != "cuda":
        return HARDWARE["cpu"]
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Hardware(
        properties.name, "cuda", round(properties.total_memory / GIB, 1), (properties.major, properties.minor)
    )
