"""Is it free? The published table of FLUX and Wan on a 4090 in closed form, and what a plan says about it."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock

from diffaccel import BudgetError, IncompatibleError, accelerate, plan
from diffaccel.ledger.hardware import HARDWARE
from diffaccel.offload.bandwidth import (
    Bandwidth,
    Layer,
    break_even_tokens,
    host_bandwidth,
    sentence,
    table,
    transformer_flops,
    whole_pass,
)
from diffaccel.offload.layerwise.blocks import work_per_token
from diffaccel.offload.layerwise.partition import by_bytes, by_layers, divide, spread
from tests import tiny

RTX_4090 = Bandwidth(25e9, 120e12)
TOKENS = 4096 + 512  # FLUX at 1024 px
WIDTH = 3072
DOUBLE, SINGLE = 339.8e6, 141.6e6  # weights of a block
PER_TOKEN = 12 * WIDTH**2  # of those, what one token is multiplied with: attention and MLP of its own stream


def flux(bytes_per_weight: float) -> list[Layer]:
    """The 57 blocks of FLUX.1."""
    flops = transformer_flops(PER_TOKEN, TOKENS, WIDTH)
    double = Layer("double", DOUBLE * bytes_per_weight, flops)
    return [double] * 19 + [Layer("single", SINGLE * bytes_per_weight, flops)] * 38


def wan(width: int, feed_forward: int, tokens: int) -> Layer:
    """A block of Wan 2.1 in bf16: self-attention, cross-attention to 512 text tokens, feed-forward."""
    square, wide = width**2, 2 * width * feed_forward
    flops = transformer_flops(6 * square + wide, tokens, width, 512, 2 * square)
    return Layer("block", 2 * (8 * square + wide), flops)


@pytest.mark.parametrize(
    ("layer", "megabytes", "transfer_ms", "compute_ms"),
    [
        (flux(2)[0], 679, 27.2, 10.9),
        (flux(1)[0], 340, 13.6, 10.9),
        (flux(2)[-1], 283, 11.3, 10.9),
        (flux(1)[-1], 142, 5.7, 10.9),
        (wan(5120, 13824, 75600), 703, 28, 1359),
        (wan(1536, 8960, 32760), 93, 3.7, 78),
    ],
)
def test_blocks_of_the_table(layer: Layer, megabytes: float, transfer_ms: float, compute_ms: float) -> None:
    """Bytes, transfer and compute of one block, as the table of the background has them."""
    [row] = table([layer], RTX_4090)
    assert row.nbytes / 1e6 == pytest.approx(megabytes, rel=0.01)
    assert row.transfer_s * 1e3 == pytest.approx(transfer_ms, rel=0.02)
    assert row.compute_s * 1e3 == pytest.approx(compute_ms, rel=0.02)
    assert row.free == (transfer_ms <= compute_ms)


@pytest.mark.parametrize(
    ("width", "transfer_ms", "free", "resident_gb"), [(2, 946, False, 8.1), (1, 473, True, 0), (0.56, 265, True, 0)]
)
def test_whole_step_of_flux(width: float, transfer_ms: float, free: bool, resident_gb: float) -> None:
    """bf16 is half as slow again or wants 8.1 GB resident; 8 and 4 bits are free."""
    found = whole_pass(flux(width), RTX_4090)
    assert found.compute_s * 1e3 == pytest.approx(621, rel=0.01)
    assert found.transfer_s * 1e3 == pytest.approx(transfer_ms, rel=0.02)
    assert found.free is free and found.seconds == max(found.compute_s, found.transfer_s)
    assert found.resident_bytes_needed / 1e9 == pytest.approx(resident_gb, abs=0.1)
    keep = [Layer(x.name, x.nbytes, x.flops, resident=i < 13) for i, x in enumerate(flux(width))]
    assert whole_pass(keep, RTX_4090).free  # 13 double blocks are 8.8 GB


def test_sentences() -> None:
    """What the table says, in words."""
    said = sentence(flux(2), RTX_4090, "FLUX at 1024 px on a 4090")
    assert "947 ms" in said and "620 ms" in said and "1.5x" in said and "8.2 GB resident" in said
    assert sentence([wan(5120, 13824, 75600)] * 40, RTX_4090, "Wan").endswith("free")


def test_break_even_on_real_blocks() -> None:
    """Counted on diffusers' blocks: a FLUX double block is free from 14.4 thousand tokens on, a single from 6.0."""
    with torch.device("meta"):
        double = FluxTransformerBlock(WIDTH, 24, 128)
        single = FluxSingleTransformerBlock(WIDTH, 24, 128)
    for block, weights, tokens in ((double, DOUBLE, 14.4e3), (single, SINGLE, 6.0e3)):
        assert sum(p.numel() for p in block.parameters()) == pytest.approx(weights, rel=1e-3)
        per_token = work_per_token(block)
        assert per_token == PER_TOKEN
        assert break_even_tokens(2 * weights, 2 * per_token, RTX_4090) == pytest.approx(tokens, rel=0.005)


def test_numbers_of_the_machines() -> None:
    """The 4090 is taken for 25 GB/s and 120 TFLOP/s; every card has some."""
    link = host_bandwidth(HARDWARE["4090"])
    assert link is not None and link.bytes_per_s == 25e9 and link.flops_per_s == pytest.approx(120e12, rel=1e-3)
    assert link.origin == "assumed"
    known = {name for name, machine in HARDWARE.items() if host_bandwidth(machine) is not None}
    assert known == {name for name, machine in HARDWARE.items() if machine.may.pinned}


def test_plan_for_another_machine_says_it() -> None:
    """plan(hardware="4090") on a CPU: bytes, and from how many tokens on it is free; attaching it here is refused."""
    pipe = tiny.build("flux")
    item = plan(pipe, preset=None, hardware="4090", offload="layerwise").item("offload.layerwise")
    assert item.status == "enabled" and "free from about" in item.reason and "25 GB/s, 120 TFLOP/s" in item.reason
    before = tiny.run(pipe, "flux")
    with pytest.raises(IncompatibleError, match="on the CPU, where store='host' moves nothing"):
        accelerate(pipe, preset=None, hardware="4090", offload="layerwise")
    assert torch.equal(tiny.run(pipe, "flux"), before)


# ---- who stays ---------------------------------------------------------------------------------------------


def test_division_by_layers() -> None:
    """One of the resident ones computes; the others stay, spread from the first block on."""
    sizes = [10] * 12
    found = by_layers(sizes, 3, resident_layers=4, prefetch=2)
    assert found.kept == (0, 4, 8) and found.buffers == 3
    assert found.resident_bytes == (4 + 2) * 10 + 3 and found.moved_bytes == 90
    assert by_layers(sizes, 0, 1, 0).resident_bytes == 10
    assert by_layers(sizes, 0, 11, 1).moving == ()
    assert [len(set(spread(n, 7))) for n in range(8)] == list(range(8))


def test_division_by_bytes() -> None:
    """As many stay as fit, never more; too little says the least there is."""
    sizes = [30, 10, 10, 10, 10]
    for budget in range(30, 130):
        try:
            found = by_bytes(sizes, 0, budget, 1)
        except BudgetError as error:
            assert budget < 60 and "needs 30 bytes" in str(error) and "needs 60" in str(error)
            continue
        assert found.resident_bytes <= budget
        more = divide(sizes, 0, len(found.kept) + 1, 1)
        assert not found.moving or more.resident_bytes > budget
    assert by_bytes(sizes, 0, 70, 1).moving == ()
