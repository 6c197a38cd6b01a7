"""Calling nunchaku's kernels for an `SvdQuantLinear`. Not run on a GPU here: written against the kernels' contract,
and checked with a PyTorch stand-in for them that reads the same packed tensors.

The standalone kernels quantize with signs only (inputs without sign are a matter of the fused GELU-MLP), so parts
after a GELU are given to them with signs, and the correction of their bias is taken back.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .backends import HUB_REPO
from .linear import SvdQuantLinear, suffix
from .math import Part, shift_correction
from .nunchaku import pack_part

Tensor = torch.Tensor
ROWS = 256  # activations are filled up to a multiple
HUB_VERSION = 2


@functools.cache
def kernels_of(source: str) -> Any:
    """The extension's `ops`: of the installed package, or of the hub's repository (downloads on first use)."""
    if source == "package":
        from nunchaku._C import ops

        return ops
    from kernels import get_kernel

    return get_kernel(HUB_REPO, version=HUB_VERSION).ops


def packed(linear: SvdQuantLinear, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The layer's parts in kernel layout; the last one has the bias and the extra branches, strengths included."""
    layer, found = linear.layer(), []
    bias = None if layer.bias is None else layer.bias.detach().float()
    for part in layer.parts:
        if part.unsigned and bias is not None:
            bias = bias + shift_correction(part)
    start, extra = 0, linear.extra(linear.proj_down.device)
    for index, part in enumerate(layer.parts):
        columns = slice(start, start + part.codes.columns)
        start = columns.stop
        down, up = part.down, part.up
        if extra is not None:
            down = torch.cat((down, extra.down[:, columns].to(down)))
            up = torch.cat((up, (extra.up * extra.scale).to(up)), 1)
        signed = Part(part.codes, part.smooth, down, up)
        tensors = pack_part(signed, bias if index == len(layer.parts) - 1 else None, dtype)
        del tensors["qweight"], tensors["smooth_factor_orig"]
        found.append(tensors)
    return found


def run_part(ops: Any, x: Tensor, tensors: dict[str, Tensor], nvfp4: bool, out_features: int) -> Tensor:
    """One part: quantize the activations and compute their low-rank input, then the product. x [M, K]."""
    rows = -(-len(x) // ROWS) * ROWS
    columns, rank = tensors["proj_down"].shape
    if x.shape[1] < columns:
        x = torch.nn.functional.pad(x, (0, columns - x.shape[1]))
    x = x.contiguous()
    device = x.device
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(
        columns // (16 if nvfp4 else 64), rows, dtype=torch.float8_e4m3fn if nvfp4 else x.dtype, device=device
    )
    low = torch.empty(rows, rank, dtype=torch.float32, device=device)
    ops.quantize_w4a4_act_fuse_lora(
        x, codes, scales, tensors["proj_down"], low, tensors["smooth_factor"], False, nvfp4
    )
    out = torch.empty(rows, len(tensors["qweight"]), dtype=x.dtype, device=device)
    # (act, wgt, out, qout, ascales, wscales, oscales, poolout, lora_act_in, lora_up, lora_down, lora_act_out, norm_q,
    # norm_k, rotary_emb, bias, smooth_factor, out_vk, out_linearattn, act_unsigned, lora_scales, fuse_silu, fp4,
    # alpha, wcscales, out_q, out_k, out_v, attn_tokens)
    ops.gemm_w4a4(
        codes, tensors["qweight"], out, None, scales, tensors["wscales"], None, None, low, tensors["proj_up"], None,
        None, None, None, None, tensors["bias"], None, None, None, False, [1.0] * (rank // 16), False, nvfp4, 1.0,
        tensors.get("wcscales"), None, None, None, 0,
    )  # fmt: skip
    return out[: len(x), :out_features]


def prepare(linear: SvdQuantLinear) -> None:
    """Put the codes into kernel order, in place of the plain ones."""
    from .formats import unpack_nibbles
    from .packing import TILE, pack_codes, pad

    if linear.svdq.kernel_layout:
        return
    for index in range(len(linear.svdq.parts)):
        plain = unpack_nibbles(linear.codes(index).packed)
        linear._buffers["qweight" + suffix(index)] = pack_codes(pad(plain, TILE, TILE))
    linear.svdq.kernel_layout = True


def run_nunchaku(linear: SvdQuantLinear, x: Tensor, ops: Any) -> Tensor:
    """The forward of a layer; what it needs besides the codes is packed at the first call and when a branch, the
    dtype or the device changes. x is float16 or bfloat16."""
    state = linear.svdq
    prepare(linear)
    key = (x.dtype, x.device)
    if state.packed is None or state.packed[0] != key:
        state.packed = (key, packed(linear, x.dtype))
    flat = x.reshape(-1, x.shape[-1])
    out, start = None, 0
    for index, (info, tensors) in enumerate(zip(state.parts, state.packed[1], strict=True)):
        piece = flat[:, start : start + info.columns]
        start += info.columns
        qweight = linear.tensor("qweight", index)
        one = run_part(ops, piece, {**tensors, "qweight": qweight}, info.precision == "nvfp4", linear.out_features)
        out = one if out is None else out + one
    assert out is not None
    return out.reshape(*x.shape[:-1], linear.out_features)


def run_package(linear: SvdQuantLinear, x: Tensor) -> Tensor:
    """By the installed package."""
    return run_nunchaku(linear, x, kernels_of("package"))


def run_hub(linear: SvdQuantLinear, x: Tensor) -> Tensor:
    """By the kernels of the hub."""
    return run_nunchaku(linear, x, kernels_of("hub"))
