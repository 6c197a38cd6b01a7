"""Scaled 8-bit numbers: how a weight or an activation becomes codes and scales, and products of them.

Pure functions over tensors. A value is `code * scale`; codes are float8_e4m3fn (E4M3, largest 448) or int8 (-127 to
127). A cast without a scale would lose everything below 2^-9 (weights of .004 lose a fifth, of .0004 all): there is
none here. Formats: Micikevicius et al. 2022, "FP8 formats for deep learning"; products as in `torch._scaled_mm`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

FP8 = torch.float8_e4m3fn
LARGEST = {FP8: 448.0, torch.int8: 127.0}
_TINY = 2.0**-100  # scale of an all-zero row: 0 / _TINY is 0, and no row of ordinary numbers needs a smaller one
# Elements of a weight that are quantized at a time: small on the host, where large temporaries fragment the heap.
_PIECE = {"cpu": 2**17}
_LARGE_PIECE = 2**24
_INT_MM_ROWS = 17  # CUDA's _int_mm wants more than 16 rows


def quantize(
    values: torch.Tensor, kind: torch.dtype, rows: bool, exact_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a tensor.

    Args:
        values: [N, ...], any floating-point dtype.
        kind: dtype of the codes, FP8 or torch.int8.
        rows: one scale per index of the first axis ([N, 1, ...]), else one for all ([1, 1, ...]).
        exact_scale: leave the scale as it is. Else it is rounded up to a bfloat16 number, so that products in
            bfloat16 lose nothing by it (the range used shrinks by less than 1 %).

    Returns:
        (codes of the shape of `values`, scales in float32).
    """
    dims = tuple(range(1 if rows else 0, values.dim()))
    wide = values.float()
    largest = wide.abs().amax(dim=dims, keepdim=True) if dims else wide.abs()
    scale = (largest / LARGEST[kind]).clamp(min=_TINY)
    if not exact_scale:
        scale = (scale * (1 + 2.0**-8)).to(torch.bfloat16).float()
    return _encode(wide, scale, kind), scale


def _encode(wide: torch.Tensor, scale: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    scaled = (wide / scale).clamp(-LARGEST[kind], LARGEST[kind])
    return (scaled.round() if kind is torch.int8 else scaled).to(kind)


def quantize_weight(weight: torch.Tensor, kind: torch.dtype, rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` in pieces of rows: the float32 copies it works on stay small, however large the weight is."""
    piece = _PIECE.get(weight.device.type, _LARGE_PIECE)
    step = max(1, piece // max(1, weight[0].numel())) if weight.dim() and len(weight) else 1
    if weight.dim() == 0 or len(weight) <= step:
        return quantize(weight, kind, rows)
    codes = torch.empty_like(weight, dtype=kind, memory_format=torch.contiguous_format)
    if rows:
        scales = []
        for start in range(0, len(weight), step):
            codes[start : start + step], scale = quantize(weight[start : start + step], kind, rows)
            scales.append(scale)
        return codes, torch.cat(scales)
    largest = torch.stack([weight[i : i + step].abs().amax().float() for i in range(0, len(weight), step)]).amax()
    scale = quantize(largest.reshape([1] * weight.dim()), kind, False)[1]
    for start in range(0, len(weight), step):
        codes[start : start + step] = _encode(weight[start : start + step].float(), scale, kind)
    return codes, scale


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`code * scale` in `dtype`."""
    return (codes.float() * scale).to(dtype)


def weight_only(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] times a quantized weight (codes [N, K], scale [N, 1] or [1, 1]): computed in the dtype of x.

    The codes are exact in bfloat16 and float32, so the scales are applied to the product; in float16 the product of
    codes could overflow, and the weight is rebuilt first.
    """
    if x.dtype is torch.float16:
        return functional.linear(x, dequantize(codes, scale, x.dtype), bias)
    product = functional.linear(x, codes.to(x.dtype))
    factors = scale.to(x.dtype).reshape(-1)  # [N] or [1]
    return product * factors if bias is None else torch.addcmul(bias, product, factors)


def dynamic(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same with activations quantized on the way: both factors are 8 bits wide.

    With a scale per row of the weight, every token of x has its own; with one for all, x has one for all (then the
    samples of a batch depend on each other in their last bits).
    """
    flat = x.reshape(-1, x.shape[-1])  # [M, K]
    if flat.shape[0] == 0:
        return functional.linear(x, dequantize(codes, scale, x.dtype), bias)
    product = (_int8_product if codes.dtype is torch.int8 else _fp8_product)(flat, codes, scale)
    if bias is not None:
        product = product + bias
    return product.to(x.dtype).reshape(*x.shape[:-1], codes.shape[0])


def _fp8_product(flat: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows = scale.numel() > 1
    left, left_scale = quantize(flat, FP8, rows, exact_scale=True)
    # CUDA's kernel for scales per row writes bfloat16 only.
    out = torch.bfloat16 if flat.is_cuda and rows else flat.dtype
    right_scale = scale.reshape(1, -1) if rows else scale.reshape(())
    left_scale = left_scale if rows else left_scale.reshape(())
    return torch._scaled_mm(left, codes.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=out)


def _int8_product(flat: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    left, left_scale = quantize(flat, torch.int8, scale.numel() > 1, exact_scale=True)
    missing = _INT_MM_ROWS - left.shape[0] if left.is_cuda and left.shape[0] < _INT_MM_ROWS else 0
    if missing:
        left = functional.pad(left, (0, 0, 0, missing))
    product = torch._int_mm(left, codes.t())  # [M, N] int32
    if missing:
        product = product[: flat.shape[0]]
    return product.float() * left_scale * scale.reshape(1, -1)
