"""The machines a plan can be made for: by name, or what is here, and what each kind of device may use.

The numbers, and where they come from, are in hardware.toml.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidOptionError, unknown

if TYPE_CHECKING:
    import torch

GIB = 1024**3
CUDA_LIKE = "cuda"  # torch's device type of NVIDIA's and of AMD's GPUs
# Assumed: page-locked host memory over 16 lanes brings about 80 % of the bus (31.5 GB/s for generation 4, 63 for 5).
HOST_GB_S = {4: 25.0, 5: 50.0}


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
        float64: torch has numbers of 64 bits there.
    """

    device: str
    inductor: str = ""
    kernels: bool = False
    fp8: str = "weight_only"
    int8: str = "weight_only"
    own_memory: bool = True
    pinned: bool = False
    float64: bool = True


# rocm: FP8 of AMD's GPUs is another format (fnuz) up to MI300. mps: torch has no float8 there; memory is shared.
# other: npu, hpu and whatever torch comes to name; its own operations only.
# cpu: 8-bit products have the numbers of a GPU, for comparison.
KINDS: dict[str, Abilities] = {
    "cpu": Abilities("cpu", inductor="cpp", fp8="dynamic", int8="dynamic", own_memory=False),
    "cuda": Abilities("cuda", inductor="triton", kernels=True, fp8="dynamic", int8="dynamic", pinned=True),
    "mps": Abilities("mps", fp8="", own_memory=False, float64=False),
    "other": Abilities("other"),
    "rocm": Abilities("cuda", inductor="triton", pinned=True),
    "xpu": Abilities("xpu", inductor="triton"),
}


@dataclass(frozen=True)
class Hardware:
    """A device: `kind` is a key of `KINDS`, `capability` that of CUDA (None on all others).

    `arch` is AMD's name of an architecture (gfx942).

    Peaks are dense, `bandwidth_gb_s` that of its own memory, `pcie` the generation of its 16 lanes to the host. What
    is None has no source at hand, and nothing is predicted from it.
    """

    name: str
    kind: str
    memory_gib: float | None = None
    capability: tuple[int, int] | None = None
    bf16_tflops: float | None = None
    pcie: int | None = None
    fp8_tflops: float | None = None
    int8_tops: float | None = None
    fp4_tflops: float | None = None
    bandwidth_gb_s: float | None = None
    usd_per_hour: float | None = None
    arch: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of hardware", self.kind, KINDS)

    def __str__(self) -> str:
        memory = f" {self.memory_gib:g} GiB" if self.memory_gib else ""
        arch = f" ({self.arch})" if self.arch else ""
        return f"{self.name}{arch}{memory}"

    @property
    def ridge(self) -> float | None:
        """FLOPs per byte above which bf16 arithmetic, and not memory, is what takes the time."""
        if self.bf16_tflops is None or self.bandwidth_gb_s is None:
            return None
        return self.bf16_tflops * 1e3 / self.bandwidth_gb_s

    @property
    def host_gb_s(self) -> float | None:
        """GB/s from page-locked host memory; None where the link is not known."""
        return None if self.pcie is None else HOST_GB_S.get(self.pcie)

    @property
    def may(self) -> Abilities:
        """What is used on such a device."""
        return KINDS[self.kind]


def _table() -> dict[str, Hardware]:
    data = tomllib.loads((files(__package__) / "hardware.toml").read_text())
    return {
        name: Hardware(name, **{**row, "capability": tuple(row["capability"]) if "capability" in row else None})
        for name, row in data.items()
    }


HARDWARE: dict[str, Hardware] = _table()

# Other names of a machine, as `named` writes them: the same chip, or one that differs in its links to others alone.
ALIASES: dict[str, str] = {
    "306012": "3060",
    "306012gb": "3060",
    "a10080gb": "a100",
    "a100sxm480gb": "a100",
    "a800": "a100",
    "h100sxm": "h100",
    "h100sxm80gb": "h100",
    "h800": "h100",
}


def named(name: str) -> Hardware:
    """The hardware of that name (`4090`, `rtx4090`, `H100`, `cpu`, ...)."""
    key = name.lower().replace(" ", "").replace("-", "").removeprefix("nvidia").removeprefix("geforce")
    key = key.removeprefix("rtx")
    key = ALIASES.get(key, key)
    if key not in HARDWARE:
        raise unknown("hardware", name, HARDWARE)
    return HARDWARE[key]


def with_prices(path: str) -> dict[str, Hardware]:
    """The machines with prices of your own: a TOML file with a line `h100 = 2.10` (dollars an hour) for each."""
    try:
        data = tomllib.loads(Path(path).read_text())
    except tomllib.TOMLDecodeError as error:
        raise InvalidOptionError(f"{path} is no TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"prices: {path} cannot be read ({type(error).__name__})") from error
    table = dict(HARDWARE)
    for name, price in data.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or price < 0:
            raise InvalidOptionError(f"{path}: the price of {name} must be a number of dollars, got {price!r}")
        machine = named(name)
        table[machine.name] = replace(machine, usd_per_hour=float(price))
    return table


def detect(device: str | torch.device) -> Hardware:
    """The hardware behind a torch device ("cuda:1"; a bare type is the current one of its kind).

    A GPU of AMD has torch's device type "cuda" too, and a "capability" that is a version of its own: it is told by
    `torch.version.hip`, and gets none.
    """
    import torch

    name, _, number = str(device).partition(":")  # torch knows no npu before its package is imported
    index = int(number) if number else None
    if name == CUDA_LIKE:
        here = torch.cuda.current_device() if index is None else index
        properties: Any = torch.cuda.get_device_properties(here)
        memory = round(properties.total_memory / GIB, 1)
        if torch.version.hip is not None:
            arch = getattr(properties, "gcnArchName", "").partition(":")[0]
            return Hardware(properties.name, "rocm", memory, arch=arch)
        return Hardware(properties.name, "cuda", memory, (properties.major, properties.minor))
    if name == "xpu":
        here = torch.xpu.current_device() if index is None else index
        properties = torch.xpu.get_device_properties(here)
        return Hardware(properties.name, "xpu", round(properties.total_memory / GIB, 1))
    if name == "mps":
        return Hardware("Apple GPU", "mps", round(torch.mps.recommended_max_memory() / GIB, 1))
    return HARDWARE["cpu"] if name in ("cpu", "meta") else Hardware(name, "other")


def widest(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype that sums may be kept in on this device: float64, but on mps."""
    import torch

    known = KINDS.get(device.type)
    return torch.float64 if known is None or known.float64 else torch.float32
