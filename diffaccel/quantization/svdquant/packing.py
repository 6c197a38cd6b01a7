"""The order in which nunchaku's kernels keep their tensors: permutations between it and plain matrices.

Everything here only moves values; `pack` and `unpack` of a kind are inverse to each other. Shapes are those of
tensor-core tiles: 128 output channels (8 packs of 2 x 8 lanes) by 64 input channels (2 x 4 lanes of 8 nibbles);
low-rank factors go by tiles of 16 x 16. The AWQ layout (adaLN layers) is TinyChat's.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

TILE = 128  # rows, and input channels as well (kernels unroll two tiles of 64)
RANK_TILE = 16


def pad(x: Tensor, rows: int, columns: int = 1, value: float = 0.0) -> Tensor:
    """`x` [R, C] filled up at the end to multiples of `rows` and `columns`."""
    more = (-x.shape[0] % rows, -x.shape[1] % columns)
    if more == (0, 0):
        return x
    out = torch.full((x.shape[0] + more[0], x.shape[1] + more[1]), value, dtype=torch.float32, device=x.device)
    out = out.to(x.dtype)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def pack_codes(codes: Tensor) -> Tensor:
    """Codes 0..15 [N, K] (multiples of 128) -> qweight [N, K/2] int8."""
    n, k = codes.shape
    tiles = codes.to(torch.int64).view(n // 128, 8, 2, 8, 1, k // 64, 1, 2, 4, 8)
    tiles = tiles.permute(0, 5, 6, 1, 3, 8, 2, 7, 4, 9)
    words = (tiles << torch.arange(0, 32, 4, device=codes.device)).sum(-1)  # 0 .. 2^32 - 1
    return _to_int32(words).contiguous().view(torch.int8).view(n, k // 2)


def unpack_codes(qweight: Tensor) -> Tensor:
    """qweight [N, K/2] int8 -> codes 0..15 [N, K] uint8."""
    n, k = qweight.shape[0], qweight.shape[1] * 2
    words = qweight.contiguous().view(torch.int32).view(n // 128, k // 64, 1, 8, 8, 4, 2, 2, 1)
    nibbles = (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32, device=qweight.device)) & 15
    return nibbles.permute(0, 3, 6, 4, 8, 1, 2, 7, 5, 9).reshape(n, k).to(torch.uint8)


def pack_scales(scales: Tensor) -> Tensor:
    """16-bit scales [N, G] (N a multiple of 128) -> wscales [G, N]."""
    n, groups = scales.shape
    tiles = scales.reshape(n // 128, 1, 8, 2, 4, 2, groups).permute(0, 6, 1, 2, 4, 3, 5)
    return tiles.contiguous().view(groups, n)


def unpack_scales(packed: Tensor) -> Tensor:
    """wscales [G, N] -> scales [N, G]."""
    groups, n = packed.shape
    tiles = packed.contiguous().view(n // 128, groups, 1, 8, 4, 2, 2).permute(0, 2, 3, 5, 4, 6, 1)
    return tiles.reshape(n, groups)


def pack_vector(vector: Tensor) -> Tensor:
    """bias, smooth factor or channel scale [N] (a multiple of 128) in kernel order."""
    return pack_scales(vector[:, None]).view(-1)


def unpack_vector(packed: Tensor) -> Tensor:
    """The inverse of `pack_vector`."""
    return unpack_scales(packed[None]).view(-1)


def pack_micro_scales(scales: Tensor) -> Tensor:
    """float8 scales [N, G] of groups of 16 (N a multiple of 128, G of 4) -> wscales [G, N]."""
    n, groups = scales.shape
    tiles = (
        scales.contiguous().view(torch.uint8).view(n // 128, 1, 4, 4, 8, groups // 4, 4).permute(0, 5, 1, 4, 3, 2, 6)
    )
    return tiles.contiguous().view(groups, n).view(torch.float8_e4m3fn)


def unpack_micro_scales(packed: Tensor) -> Tensor:
    """The inverse of `pack_micro_scales`."""
    groups, n = packed.shape
    tiles = packed.contiguous().view(torch.uint8).view(n // 128, groups // 4, 1, 8, 4, 4, 4)
    return tiles.permute(0, 2, 5, 4, 3, 1, 6).reshape(n, groups).view(torch.float8_e4m3fn)


def pack_up(up: Tensor) -> Tensor:
    """U [N, r] (multiples of 16) -> proj_up [N, r]."""
    n, rank = up.shape
    return _pack_tiles(up.reshape(n // 16, 16, rank // 16, 16).permute(0, 2, 1, 3)).view(n, rank)


def unpack_up(packed: Tensor) -> Tensor:
    """The inverse of `pack_up`."""
    n, rank = packed.shape
    return _unpack_tiles(packed, n // 16, rank // 16).permute(0, 2, 1, 3).reshape(n, rank)


def pack_down(down: Tensor) -> Tensor:
    """D' [r, K] (multiples of 16) -> proj_down [K, r]."""
    rank, k = down.shape
    return _pack_tiles(down.reshape(rank // 16, 16, k // 16, 16).permute(2, 0, 1, 3)).view(k, rank)


def unpack_down(packed: Tensor) -> Tensor:
    """The inverse of `pack_down`."""
    k, rank = packed.shape
    return _unpack_tiles(packed, k // 16, rank // 16).permute(1, 2, 0, 3).reshape(rank, k)


def _pack_tiles(tiles: Tensor) -> Tensor:
    a, b = tiles.shape[:2]
    return tiles.reshape(a, b, 2, 8, 1, 2, 4, 2).permute(0, 1, 3, 6, 2, 5, 4, 7).contiguous()


def _unpack_tiles(packed: Tensor, a: int, b: int) -> Tensor:
    tiles = packed.contiguous().view(a, b, 8, 4, 2, 2, 1, 2).permute(0, 1, 4, 2, 6, 5, 3, 7)
    return tiles.reshape(a, b, 16, 16)


def pack_awq(codes: Tensor) -> Tensor:
    """Codes 0..15 [N, K] (N a multiple of 4, K of 64) -> qweight [N/4, K/2] int32.

    Of 32 input channels, those 8 apart share a 16-bit word; the words of 4 rows lie in turns of 64 channels.
    """
    n, k = codes.shape
    runs = codes.to(torch.int64).view(-1, 4, 8)
    words = runs[:, 0] | runs[:, 1] << 4 | runs[:, 2] << 8 | runs[:, 3] << 12  # 0 .. 65535
    words = words.view(n // 4, 4, k // 64, 16).permute(0, 2, 1, 3).reshape(n // 4, k // 2, 2)
    return _to_int32(words[..., 0] | words[..., 1] << 16)


def unpack_awq(qweight: Tensor) -> Tensor:
    """The inverse of `pack_awq`: codes [N, K] uint8."""
    n, k = qweight.shape[0] * 4, qweight.shape[1] * 2
    pairs = torch.stack((qweight & 0xFFFF, (qweight >> 16) & 0xFFFF), dim=-1)
    words = pairs.view(n // 4, k // 64, 4, 16).permute(0, 2, 1, 3).reshape(-1, 1, 8)
    nibbles = (words >> torch.arange(0, 16, 4, dtype=torch.int32, device=qweight.device).view(1, 4, 1)) & 15
    return nibbles.reshape(n, k).to(torch.uint8)


def interleave_rows(x: Tensor, splits: int) -> Tensor:
    """adaLN rows from chunks (all shifts, all scales, ...) to turns (shift, scale, ... of channel 0, ...)."""
    parts: Tensor = x.unflatten(0, (splits, -1))
    return parts.transpose(0, 1).flatten(0, 1).contiguous()


def chunk_rows(x: Tensor, splits: int) -> Tensor:
    """The inverse of `interleave_rows`."""
    parts: Tensor = x.unflatten(0, (-1, splits))
    return parts.transpose(0, 1).flatten(0, 1).contiguous()


def _to_int32(words: Tensor) -> Tensor:
    """Unsigned 32-bit values in int64 -> the same bits as int32."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
