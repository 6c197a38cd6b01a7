"""The 8-bit kernels behind one signature, each with what it needs around it. Pure: tensors in, tensors out.

What the kernels cannot do is data (`backends.SAGE`); here is what they can be made to do: K is never written to
(versions 1 and 3 would), masks are never handed over (all of them ignore them), a scale of its own reaches version 3.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ...core.compat import hub_kernel
from ..backends import SAGE
from ..calls import Inputs
from ..kernels.triton_sparse import on
from .int8 import int8_attention_reference

Kernel = Callable[..., Any]
Answer = Any  # [B, Nq, H, D], or with inputs.lse also the log-sum-exp [B, H, Nq]

ALWAYS_SMOOTH = ("2", "3", "hub")  # their public functions take K's mean out and know no switch


def kernel_of(variant: str) -> Kernel:
    """The kernel's function (of others' packages: their own one). Raises what the import raises."""
    if variant in ("1", "2"):
        found: Kernel = importlib.import_module("sageattention").sageattn
        return found
    if variant == "3":
        found = importlib.import_module("sageattn3").sageattn3_blackwell
        return found
    if variant == "hub":
        found = hub_kernel(SAGE["hub"].diffusers_name)
        return found
    if variant == "triton":
        from ..kernels.triton_int8 import int8_attention

        return int8_attention
    return int8_attention_reference


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _version_1(kernel: Kernel, inputs: Inputs, smooth_k: bool) -> Answer:
    q, k, v = (_dense(x) for x in (inputs.q, inputs.k, inputs.v))
    if smooth_k:  # here rather than there, which would subtract from the caller's K, and in half precision
        k = (k - k.mean(1, keepdim=True, dtype=torch.float32)).to(k.dtype)
    return kernel(q, k, v, tensor_layout="NHD", is_causal=inputs.causal, sm_scale=inputs.scale, smooth_k=False)


def _version_2(kernel: Kernel, inputs: Inputs, smooth_k: bool) -> Answer:
    q, k, v = (_dense(x) for x in (inputs.q, inputs.k, inputs.v))
    more = {"is_causal": inputs.causal, "sm_scale": inputs.scale, "return_lse": inputs.lse}
    found = kernel(q=q, k=k, v=v, tensor_layout="NHD", **more)
    return tuple(found[:2]) if inputs.lse else found


def _version_3(kernel: Kernel, inputs: Inputs, smooth_k: bool) -> Answer:
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    if inputs.scale is not None:  # the kernel always divides by sqrt(D)
        q = q * (inputs.scale * q.shape[-1] ** 0.5)
    k = k.clone(memory_format=torch.contiguous_format)  # the kernel subtracts from it
    return kernel(q.contiguous(), k, v.contiguous(), is_causal=False).transpose(1, 2)


def _ours(kernel: Kernel, inputs: Inputs, smooth_k: bool) -> Answer:
    q, k, v = inputs.q.transpose(1, 2), inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    found = kernel(q, k, v, scale=inputs.scale, smooth_k=smooth_k, return_lse=inputs.lse)
    return (found[0].transpose(1, 2), found[1]) if inputs.lse else found.transpose(1, 2)


_RUN: dict[str, Callable[[Kernel, Inputs, bool], Answer]] = {
    "1": _version_1,
    "2": _version_2,
    "3": _version_3,
    "hub": _version_2,
    "reference": _ours,
    "triton": _ours,
}


def attend(variant: str, kernel: Kernel, inputs: Inputs, valid: tuple[int, ...], smooth_k: bool = True) -> Answer:
    """One attention call in 8 bits.

    Args:
        variant: a name of `backends.SAGE`; the call must fit it (`unfit_call`).
        kernel: `kernel_of(variant)`.
        inputs: the call; its mask may hide padding at the end and nothing else.
        valid: number of keys that are not padding, per sample (from `padding.valid_prefix`); hidden keys are cut
            off, which is exact, sample by sample where the numbers differ.
        smooth_k: take K's mean out first, where the variant has the choice.

    Returns:
        [B, Nq, H, D]; with `inputs.lse` (output, log-sum-exp [B, H, Nq] float32).
    """
    keys = inputs.k.shape[1]
    if len(set(valid)) > 1:
        parts = [attend(variant, kernel, _sample(inputs, i), (n,), smooth_k) for i, n in enumerate(valid)]
        if inputs.lse:
            return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
        return torch.cat(parts)
    n = valid[0]
    if n == keys:
        return _launch(variant, kernel, replace(inputs, mask=None), smooth_k)
    rows = inputs.mask is not None and inputs.mask.shape[2] > 1  # padded queries are hidden as well
    cut = replace(inputs, mask=None, k=inputs.k[:, :n], v=inputs.v[:, :n], q=inputs.q[:, :n] if rows else inputs.q)
    found = _launch(variant, kernel, cut, smooth_k)
    return torch.cat([found, _padded(inputs, n)], 1) if rows else found


def _launch(variant: str, kernel: Kernel, inputs: Inputs, smooth_k: bool) -> Answer:
    with on(inputs.q.device):
        return _RUN[variant](kernel, inputs, smooth_k)


def _sample(inputs: Inputs, i: int) -> Inputs:
    part = slice(i, i + 1)
    mask = inputs.mask if inputs.mask is None or inputs.mask.shape[0] == 1 else inputs.mask[part]
    return replace(inputs, q=inputs.q[part], k=inputs.k[part], v=inputs.v[part], mask=mask)


def _padded(inputs: Inputs, first: int) -> torch.Tensor:
    """The padded queries as the plain pipeline computes them (nobody reads them)."""
    assert inputs.mask is not None
    q, k, v = (x.transpose(1, 2) for x in (inputs.q[:, first:], inputs.k, inputs.v))
    mask = inputs.mask[:, :, first:]
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=inputs.scale, enable_gqa=inputs.gqa)
    return out.transpose(1, 2)
