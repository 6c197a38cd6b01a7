"""The machines a plan can be made for: by name, or what is here, and what each kind of device may use.

Memory is the vendor's figure in GiB; compute capability as in CUDA. Sources: NVIDIA data sheets.

`bf16_tflops` is the data sheet's dense bf16 peak with fp32 accumulation, `pcie` the generation of its 16 lanes; None
where we have no source at hand, and nothing is then predicted from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import unknown

GIB = 1024**3
CUDA_LIKE = "cuda"  # torch's device type of NVIDIA's and of AMD's GPUs


@dataclass(frozen=True)
class Abilities:
    """What diffaccel uses on a kind of device. What nobody here has run there is off, and says so.

    Attributes:
        device: torch's device type.
        inductor: what torch.compile generates: "cpp", "triton", or "" (not used there).
        kernels: our own and other packages' GPU kernels (Triton, FlashAttention, SageAttention, nunchaku) are made for
            it; further limits are in compute capabilities.
        fp8: 8-bit floating point "dynamic" (products of 8-bit factors), "weight_only", or "" (torch has no such dtype
            there).
        int8: 8-bit integers "dynamic" or "weight_only".
        own_memory: its memory is not the host's, so weights that are moved to the host free some.
        pinned: copies from page-locked host memory on a stream of their own.
    """

    device: str
    inductor: str = ""
    kernels: bool = False
    fp8: str = "weight_only"
    int8: str = "weight_only"
    own_memory: bool = True
    pinned: bool = False


# rocm: FP8 of AMD's GPUs is another format (fnuz) up to MI300. mps: torch has no float8 there; memory is shared.
# cpu: 8-bit products have the numbers of a GPU, for comparison.
KINDS: dict[str, Abilities] = {
    "cpu": Abilities("cpu", inductor="cpp", fp8="dynamic", int8="dynamic", own_memory=False),
    "cuda": Abilities("cuda", inductor="triton", kernels=True, fp8="dynamic", int8="dynamic", pinned=True),
    "mps": Abilities("mps", fp8="", own_memory=False),
    "rocm": Abilities("cuda", inductor="triton", pinned=True),
    "xpu": Abilities("xpu", inductor="triton"),
}


@dataclass(frozen=True)
class Hardware:
    """A device: `kind` is a key of `KINDS`, `capability` that of CUDA (None on all others)."""

    name: str
    kind: str
    memory_gib: float | None = None
    capability: tuple[int, int] | None = None
    bf16_tflops: float | None = None
    pcie: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of hardware", self.kind, KINDS)

    def __str__(self) -> str:
        memory = f" {self.memory_gib:g} GiB" if self.memory_gib else ""
        return f"{self.name}{memory}"

    @property
    def may(self) -> Abilities:
        """What is used on such a device."""
        return KINDS[self.kind]


HARDWARE: dict[str, Hardware] = {
    h.name: h
    for h in (
        Hardware("3060", "cuda", 12, (8, 6)),
        Hardware("4090", "cuda", 24, (8, 9), 165.2, 4),
        Hardware("5090", "cuda", 32, (12, 0), 209.5, 5),
        Hardware("a100", "cuda", 80, (8, 0), 312, 4),
        Hardware("b200", "cuda", 180, (10, 0), 2250, 5),
        Hardware("cpu", "cpu"),
        Hardware("h100", "cuda", 80, (9, 0), 989, 5),
        Hardware("h200", "cuda", 141, (9, 0), 989, 5),
        Hardware("l20", "cuda", 48, (8, 9), 119.5),
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
    """The hardware behind a torch device type: the current GPU where it is one, else the CPU.

    A GPU of AMD has torch's device type "cuda" too, and a "capability" that is a version of its own: it is told by
    `torch.version.hip`, and gets none.
    """
    import torch

    if device == CUDA_LIKE:
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        memory = round(properties.total_memory / GIB, 1)
        if torch.version.hip is not None:
            return Hardware(properties.name, "rocm", memory)
        return Hardware(properties.name, "cuda", memory, (properties.major, properties.minor))
    if device == "xpu":
        properties = torch.xpu.get_device_properties(torch.xpu.current_device())
        return Hardware(properties.name, "xpu", round(properties.total_memory / GIB, 1))
    if device == "mps":
        return Hardware("Apple GPU", "mps", round(torch.mps.recommended_max_memory() / GIB, 1))
    return HARDWARE["cpu"]
