"""One quantized matrix in nunchaku's layout: tensors as its kernels read them, to and from our plain matrices.

Rows and input channels are filled up to multiples of 128, ranks to multiples of 16. Values are not changed: what is
unpacked is what was packed, bit by bit. `nunchaku_files.py` has the names that whole files use.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...errors import InvalidOptionError
from . import packing as p
from .formats import GROUP, Codes, pack_nibbles, unpack_nibbles
from .math import Layer, Part

Tensor = torch.Tensor

# Names of the same tensors in files of the two generations: raw (FLUX.1 files) and by module (Qwen-Image, Lite, ...).
RAW = {"smooth_factor": "smooth", "smooth_factor_orig": "smooth_orig", "proj_down": "lora_down", "proj_up": "lora_up"}
FIELDS = (
    "qweight",
    "wscales",
    "wcscales",
    "wtscale",
    "smooth_factor",
    "smooth_factor_orig",
    "proj_down",
    "proj_up",
    "bias",
)
AWQ_GROUP = 64


def pack_part(part: Part, bias: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A part and its bias (corrected; None is packed as zeros) -> tensors by the names of FIELDS.

    Args:
        dtype: of scales, factors and bias, bfloat16 or float16 (they are held in it already unless the file was made
            for another one).
    """
    codes = part.codes
    plain = p.pad(unpack_nibbles(codes.packed).to(torch.int16), p.TILE, p.TILE)
    rows, columns = plain.shape
    groups = columns // GROUP[codes.precision]
    scales = _filled(codes.scales.float(), rows, groups, 1.0)
    found = {
        "qweight": p.pack_codes(plain),
        "smooth_factor": p.pack_vector(_vector(part.smooth, columns, 1.0).to(dtype)),
        "proj_down": p.pack_down(_filled(part.down, _rank(part.rank), columns, 0.0).to(dtype)),
        "proj_up": p.pack_up(_filled(part.up, rows, _rank(part.rank), 0.0).to(dtype)),
        "bias": p.pack_vector(_vector(torch.zeros(rows) if bias is None else bias, rows, 0.0).to(dtype)),
    }
    found["smooth_factor_orig"] = found["smooth_factor"].clone()
    if codes.channel is None:
        found["wscales"] = p.pack_scales(scales.to(dtype))
    else:
        found["wscales"] = p.pack_micro_scales(scales.to(torch.float8_e4m3fn))
        found["wcscales"] = p.pack_vector(_vector(codes.channel, rows, 1.0).to(dtype))
    return found


def unpack_part(
    tensors: Mapping[str, Tensor], rows: int, columns: int, unsigned: bool = False
) -> tuple[Part, Tensor | None]:
    """The inverse of `pack_part`: the part, and the bias as it is in the file ([rows] or None).

    Args:
        tensors: by the names of FIELDS or RAW; `wcscales` and `wtscale` count as 1 where they are missing.
        rows, columns: of the layer, without the filling.
        unsigned: the kernel is told that its input comes out of a GELU (the bias holds the correction).

    Raises:
        InvalidOptionError: a tensor is missing or of a shape that does not fit.
    """
    get = {name: tensors[name] if name in tensors else tensors.get(RAW.get(name, name)) for name in FIELDS}
    missing = [n for n in ("qweight", "wscales", "smooth_factor", "proj_down", "proj_up") if get[n] is None]
    if missing:
        raise InvalidOptionError(f"a nunchaku layer lacks {', '.join(missing)}; it has {', '.join(sorted(tensors))}")
    qweight, wscales = get["qweight"], get["wscales"]
    assert qweight is not None and wscales is not None
    shape = (qweight.shape[0], qweight.shape[1] * 2)
    if shape != (_up(rows, p.TILE), _up(columns, p.TILE)):
        raise InvalidOptionError(f"a nunchaku layer of {rows}x{columns} cannot have codes of {shape[0]}x{shape[1]}")
    precision = "nvfp4" if wscales.dtype == torch.float8_e4m3fn else "int4"
    held = _up(columns, GROUP[precision])
    groups = held // GROUP[precision]
    packed = pack_nibbles(p.unpack_codes(qweight)[:rows, :held])
    channel = None
    if precision == "nvfp4":
        scales = p.unpack_micro_scales(wscales).view(torch.uint8)[:rows, :groups].contiguous().view(wscales.dtype)
        channel = _channel(get["wcscales"], get["wtscale"], rows, get["proj_up"])
    else:
        scales = p.unpack_scales(wscales)[:rows, :groups].contiguous()
    part = Part(
        Codes(precision, packed, scales, channel, columns),
        p.unpack_vector(get["smooth_factor"])[:columns].clone(),  # type: ignore[arg-type]
        p.unpack_down(get["proj_down"])[:, :columns].contiguous(),  # type: ignore[arg-type]
        p.unpack_up(get["proj_up"])[:rows].contiguous(),  # type: ignore[arg-type]
        unsigned and precision == "int4",
    )
    bias = get["bias"]
    return part, None if bias is None else p.unpack_vector(bias)[:rows].clone()


def _channel(wcscales: Tensor | None, wtscale: Tensor | None, rows: int, like: Tensor | None) -> Tensor:
    """The scale per row of nvfp4: the file's, times the one for the whole tensor where that is not 1."""
    assert like is not None
    found = torch.ones(rows, dtype=like.dtype) if wcscales is None else p.unpack_vector(wcscales)[:rows].clone()
    if wtscale is not None and float(wtscale) != 1.0:
        return found.float() * wtscale.float()
    return found


def quantize_awq(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A matrix [N, K] as W4A16: codes 0..15 in groups of 64, W ~ codes * wscales + wzeros."""
    grouped = weight.float().unflatten(-1, (-1, AWQ_GROUP))
    low, high = grouped.amin(-1), grouped.amax(-1)
    zeros = low.to(dtype)
    scales = ((high - zeros.float()) / 15).clamp(min=torch.finfo(dtype).tiny).to(dtype)
    codes = ((grouped - zeros.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 15)
    packed = p.pack_awq(codes.flatten(-2).to(torch.uint8))
    return {"qweight": packed, "wscales": scales.T.contiguous(), "wzeros": zeros.T.contiguous()}


def dequantize_awq(tensors: Mapping[str, Tensor]) -> Tensor:
    """The matrix [N, K] of an AWQ layer, float32."""
    codes = p.unpack_awq(tensors["qweight"]).float().unflatten(-1, (-1, AWQ_GROUP))
    groups = codes.shape[1]  # files may have the scales filled up to more
    scales, zeros = (tensors[name][:groups].T.float()[..., None] for name in ("wscales", "wzeros"))
    weight: Tensor = codes * scales + zeros
    return weight.flatten(-2)


def pack_adaln(weight: Tensor, bias: Tensor, splits: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """An adaLN layer (rows: `splits` chunks of shift, scale, gate, ...) as nunchaku's FLUX files have it: rows in
    turns instead of chunks, W4A16, and the 1 of (1 + scale) in the bias of the scales."""
    plus = torch.zeros(splits)
    plus[1] = plus[-2] = 1
    shifted = bias.float() + plus.to(bias.device).repeat_interleave(len(bias) // splits)
    return {
        **quantize_awq(p.interleave_rows(weight, splits), dtype),
        "bias": p.interleave_rows(shifted, splits).to(dtype),
    }


def unpack_adaln(tensors: Mapping[str, Tensor], splits: int) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_adaln` but for the rounding: (weight [N, K], bias [N]) float32, as diffusers has them."""
    bias = p.chunk_rows(tensors["bias"].float(), splits)
    plus = torch.zeros(splits)
    plus[1] = plus[-2] = 1
    return p.chunk_rows(dequantize_awq(tensors), splits), bias - plus.repeat_interleave(len(bias) // splits)


def join_rows(layers: list[Layer]) -> Layer:
    """Layers that share smoothing and low-rank input, as one with their rows on top of each other.

    Raises:
        InvalidOptionError: they do not share them.
    """
    first = layers[0]
    parts = []
    for index, part in enumerate(first.parts):
        same = [layer.parts[index] for layer in layers]
        if any(not torch.equal(part.smooth, s.smooth) or not torch.equal(part.down, s.down) for s in same):
            raise InvalidOptionError(
                "fused layers need one smoothing and one low-rank input: quantize with layout='nunchaku'"
            )
        codes = [s.codes for s in same]
        scales = torch.cat([c.scales.view(torch.uint8) for c in codes]).view(part.codes.scales.dtype)
        channel = None if part.codes.channel is None else torch.cat([c.channel for c in codes])  # type: ignore[misc]
        joined = Codes(part.codes.precision, torch.cat([c.packed for c in codes]), scales, channel, part.codes.columns)
        parts.append(Part(joined, part.smooth, part.down, torch.cat([s.up for s in same]), part.unsigned))
    biases = [layer.bias for layer in layers]
    filled = [b if b is not None else torch.zeros(layer.out_features) for b, layer in zip(biases, layers, strict=True)]
    return Layer(tuple(parts), torch.cat(filled) if any(b is not None for b in biases) else None)


def _filled(x: Tensor, rows: int, columns: int, value: float) -> Tensor:
    out = x.new_full((rows, columns), value)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def _vector(x: Tensor, length: int, value: float) -> Tensor:
    out = x.new_full((length,), value)
    out[: len(x)] = x
    return out


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _rank(rank: int) -> int:
    return max(_up(rank, p.RANK_TILE), p.RANK_TILE)
