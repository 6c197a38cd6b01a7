"""nunchaku's layouts: bijections, and positions by the closed form of the tensor-core tiles."""

from __future__ import annotations

import pytest
import torch

from diffaccel.quantization.svdquant import packing as p


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def codes(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(128, 128), (256, 384)])
def test_codes_round_trip_and_lie_where_the_tiles_say(shape):
    n, k = shape
    plain = codes(n, k)
    qweight = p.pack_codes(plain)
    assert qweight.dtype == torch.int8 and qweight.shape == (n, k // 2)
    assert torch.equal(p.unpack_codes(qweight), plain.to(torch.uint8))
    words = qweight.reshape(-1).view(torch.int32)
    for row, column in [(0, 0), (1, 0), (9, 8), (17, 33), (n - 1, k - 1), (n // 2 + 5, k // 2 + 43)]:
        tile_n, pack, half_n, lane_n = row // 128, row % 128 // 16, row % 16 // 8, row % 8
        tile_k, half_k, lane_k, nibble = column // 64, column % 64 // 32, column % 32 // 8, column % 8
        at = (((((tile_n * (k // 64) + tile_k) * 8 + pack) * 8 + lane_n) * 4 + lane_k) * 2 + half_n) * 2 + half_k
        assert (int(words[at]) >> 4 * nibble) & 15 == int(plain[row, column])


def test_scales_round_trip_and_lie_where_the_lanes_say():
    scales = draw(256, 6).bfloat16()
    packed = p.pack_scales(scales)
    assert packed.shape == (6, 256) and torch.equal(p.unpack_scales(packed), scales)
    flat = packed.view(-1)
    for row, group in [(0, 0), (1, 0), (2, 3), (13, 5), (130, 2), (255, 5)]:
        tile, inside = row // 128, row % 128
        eighth, pair, quarter, one = inside // 16, inside % 16 // 8, inside % 8 // 2, inside % 2
        at = (((((tile * 6 + group) * 8 + eighth) * 4 + quarter) * 2 + pair) * 2) + one
        assert flat[at] == scales[row, group]
    vector = draw(384).half()
    assert torch.equal(p.unpack_vector(p.pack_vector(vector)), vector)


def test_micro_scales_round_trip():
    scales = draw(256, 24).abs().to(torch.float8_e4m3fn)
    packed = p.pack_micro_scales(scales)
    assert packed.shape == (24, 256) and packed.dtype == torch.float8_e4m3fn
    assert torch.equal(p.unpack_micro_scales(packed).view(torch.uint8), scales.view(torch.uint8))
    flat = packed.view(torch.uint8).reshape(-1)
    for row, group in [(0, 0), (1, 0), (8, 1), (40, 6), (255, 23)]:
        tile, inside = row // 128, row % 128
        pack, quarter, lane = inside // 32, inside % 32 // 8, inside % 8
        at = (((((tile * 6 + group // 4) * 8 + lane) * 4 + quarter) * 4 + pack) * 4) + group % 4
        assert flat[at] == scales.view(torch.uint8)[row, group]


def test_low_rank_factors_round_trip_and_lie_in_tiles():
    up = draw(256, 32)
    packed = p.pack_up(up)
    assert packed.shape == up.shape and torch.equal(p.unpack_up(packed), up)
    down = draw(48, 128)
    assert p.pack_down(down).shape == (128, 48) and torch.equal(p.unpack_down(p.pack_down(down)), down)
    flat = packed.reshape(-1)
    for row, column in [(0, 0), (1, 2), (9, 13), (37, 30)]:
        tile = (row // 16) * 2 + column // 16
        inside = row % 8 * 32 + column % 8 // 2 * 8 + row % 16 // 8 * 4 + column % 16 // 8 * 2 + column % 2
        assert flat[tile * 256 + inside] == up[row, column]


def test_awq_codes_round_trip_and_lie_where_tinychat_has_them():
    plain = codes(8, 128)
    qweight = p.pack_awq(plain)
    assert qweight.dtype == torch.int32 and qweight.shape == (2, 64)
    assert torch.equal(p.unpack_awq(qweight), plain.to(torch.uint8))
    words = qweight.reshape(-1).view(torch.int16).to(torch.int32) & 0xFFFF
    for row, column in [(0, 0), (0, 8), (1, 31), (5, 70), (7, 127)]:
        run, nibble, place = column // 32, column % 32 // 8, column % 8
        at = ((row // 4 * 2 + column // 64) * 4 + row % 4) * 16 + run % 2 * 8 + place
        assert (int(words[at]) >> 4 * nibble) & 15 == int(plain[row, column])


def test_adaln_rows_in_turns():
    rows = torch.arange(12)[:, None]
    turns = p.interleave_rows(rows, 3)
    assert turns.view(-1).tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert torch.equal(p.chunk_rows(turns, 3), rows)


def test_padding_adds_at_the_end():
    x = draw(3, 5)
    filled = p.pad(x, 4, 4, 1.0)
    assert filled.shape == (4, 8) and torch.equal(filled[:3, :5], x) and bool((filled[3] == 1).all())
    assert p.pad(x, 3, 5) is x
