"""Cards that are no CUDA devices but read like some: what torch says of them is faked, all that is decided is asked.

A GPU of AMD answers to "cuda" with the version of its HIP architecture in the place of a compute capability (9.0 reads
like Hopper, 12.0 like Blackwell); what is neither was taken for a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffaccel import plan
from diffaccel.attention import backends
from diffaccel.attention.backends import BACKENDS, SAGE, unfit
from diffaccel.attention.kernels import KERNELS
from diffaccel.attention.sparse.svg2 import size_weighted_density
from diffaccel.caching.gates.seacache import sea_filter
from diffaccel.ledger import hardware as ledger
from diffaccel.ledger.hardware import Hardware, detect, widest
from diffaccel.models.trace import _content
from diffaccel.quantization.lora.branch import RowLengths
from diffaccel.quantization.svdquant import backends as svdquant
from diffaccel.quantization.svdquant.math import low_rank
from tests import tiny

GIB = 1024**3
AMD = {  # what torch.cuda.get_device_properties says: (name, architecture, major, minor)
    "MI300X": ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 9, 4),
    "MI250X": ("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", 9, 0),
    "RX 7900 XTX": ("AMD Radeon RX 7900 XTX", "gfx1100", 11, 0),
    "RX 9070 XT": ("AMD Radeon RX 9070 XT", "gfx1201", 12, 0),
}
OTHERS = ("mps", "xpu", "npu", "hpu")


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.build("flux")


@pytest.fixture(params=[*AMD, *OTHERS])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """One of them, found by `detect`; every package is there."""
    monkeypatch.setattr(backends, "absent", lambda package: None)
    monkeypatch.setattr(svdquant, "installed_nunchaku", lambda: svdquant.REAL)
    if request.param in AMD:
        name, arch, major, minor = AMD[request.param]
        said = SimpleNamespace(name=name, gcnArchName=arch, major=major, minor=minor, total_memory=24 * GIB)
        monkeypatch.setattr(torch.version, "hip", "6.4.43482")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: said)
        return detect("cuda:0")
    said = SimpleNamespace(name="Intel Arc B580", total_memory=12 * GIB)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: said)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 48 * GIB)
    return detect(f"{request.param}:0")


def test_it_is_told_apart(card: Hardware, pipe: Any) -> None:
    """The plan names it, never as a CPU nor by a compute capability."""
    assert card.kind in ("rocm", "mps", "xpu", "other") and card.capability is None
    assert plan(pipe, None, hardware=card).hardware == str(card) != "cpu"
    assert (card.arch.startswith("gfx") and card.arch in str(card)) == (card.kind == "rocm")


def test_no_kernel_of_cuda_and_no_arithmetic_in_8_bits(card: Hardware, pipe: Any) -> None:
    for table, allowed in ((BACKENDS, {"native"}), (SAGE, {"reference"})):
        assert {name for name, row in table.items() if unfit(row, card, "bfloat16", 128) is None} == allowed
    assert {name for name, row in KERNELS.items() if row.needs(card) is None} == {"torch"}
    chosen = svdquant.choose("auto", "int4", card, "bfloat16")
    assert not isinstance(chosen, str) and chosen.backend == "torch" and "Hopper" not in chosen.reason
    fp8 = plan(pipe, None, hardware=card, quantization="fp8").item("quantization.fp8")
    assert "FP8 dynamic" not in fp8.reason
    assert fp8.status == ("refused" if card.kind == "mps" else "enabled")
    int8 = plan(pipe, None, hardware=card, quantization="int8").item("quantization.int8")
    assert "INT8 weight_only" in int8.reason


def test_what_acts_everywhere_acts_there(card: Hardware, pipe: Any) -> None:
    for options in (
        {"cache": "first_block"},
        {"guidance": "reuse"},
        {"solver": "abm"},
        {"vae_tiling": "exact"},
        {"attention": "native"},
        {"quantization": "svdquant"},
    ):
        [item] = plan(pipe, None, hardware=card, **options).items
        assert item.status == "enabled", item.reason
    for offload in ("stage", "layerwise"):
        [item] = plan(pipe, None, hardware=card, offload=offload, offload_store="host").items
        assert (item.status == "enabled") == (card.kind != "mps"), item.reason


def test_the_device_that_the_pipeline_is_on_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the current one."""
    cards = [SimpleNamespace(name=f"GPU {i}", major=8, minor=i, total_memory=24 * GIB) for i in (6, 9)]
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    assert [detect(name).capability for name in ("cuda", "cuda:0", "cuda:1")] == [(8, 6), (8, 6), (8, 9)]


class NoFloat64(TorchDispatchMode):
    """As mps: no tensor of float64 may come about."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, torch.Tensor) and one.dtype is torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return found


def sums() -> Iterator[Any]:
    """Everything of ours that sums in float64 where it can."""
    x = torch.rand(4, 6)
    yield lambda: _content(x)
    yield lambda: sea_filter(torch.rand(1, 2, 4, 4, 3), 0.5)
    yield lambda: size_weighted_density(torch.ones(1, 2, 2, dtype=torch.bool), torch.ones(1, 2), torch.ones(1, 2))
    yield lambda: RowLengths(x, x).at(0.5)
    yield lambda: low_rank(x, 2, svd="high")


def test_no_float64_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert widest(torch.device("mps")) is torch.float32 and widest(torch.device("cpu")) is torch.float64
    for each in sums():
        with NoFloat64(), pytest.raises(TypeError, match="MPS"):
            each()
    monkeypatch.setitem(ledger.KINDS, "cpu", ledger.KINDS["mps"])
    for each in sums():
        with NoFloat64():
            each()
