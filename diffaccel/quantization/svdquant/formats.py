"""The two 4-bit number formats: INT4 in groups of 64 and NVFP4 (E2M1) in groups of 16.

Weights are quantized once, activations per token and group while running. Everything is a pure function of tensors.
Codes are held two in a byte, row-major: the low nibble is the even column.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

Tensor = torch.Tensor

PRECISIONS = ("int4", "nvfp4")
GROUP = {"int4": 64, "nvfp4": 16}  # input channels that share a scale
SHIFT = 0.171875  # added after GELU (minimum -0.17), so that 4 unsigned bits hold it
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of the codes 0..7; bit 3 is the sign
FP8_MAX = 448.0  # of float8_e4m3fn
FP4_MAX = E2M1[-1]


@dataclass(frozen=True)
class Codes:
    """A quantized matrix [N, K].

    Attributes:
        precision: "int4" or "nvfp4".
        packed: [N, K'/2] uint8, K' being K rounded up to whole groups.
        scales: [N, K'/group], 16-bit floats (int4) or float8_e4m3fn (nvfp4).
        channel: [N] a second scale per row (nvfp4), or None.
        columns: K.
    """

    precision: str
    packed: Tensor
    scales: Tensor
    channel: Tensor | None
    columns: int

    @property
    def rows(self) -> int:
        """N."""
        return self.packed.shape[0]

    def float_scales(self) -> Tensor:
        """The factor of every group, [N, K'/group] float32 (exact products)."""
        scales = self.scales.float()
        return scales if self.channel is None else scales * self.channel.float()[:, None]

    def dequantize(self) -> Tensor:
        """The matrix that the codes stand for, [N, K] float32."""
        values = code_values(unpack_nibbles(self.packed), self.precision)
        grouped = values.view(self.rows, -1, GROUP[self.precision]) * self.float_scales()[..., None]
        return grouped.reshape(self.rows, -1)[:, : self.columns]


def pack_nibbles(codes: Tensor) -> Tensor:
    """4-bit codes [N, K] (any integer dtype, low four bits count) -> [N, K/2] uint8."""
    low, high = codes[:, 0::2] & 15, codes[:, 1::2] & 15
    return (low | (high << 4)).to(torch.uint8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[N, K/2] uint8 -> codes 0..15 [N, K] uint8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).reshape(packed.shape[0], -1)


def code_values(codes: Tensor, precision: str) -> Tensor:
    """What the codes 0..15 stand for, float32: two's complement, or E2M1."""
    if precision == "int4":
        return ((codes.to(torch.int8) ^ 8) - 8).float()
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=codes.device)
    return table[codes.int()]


def e2m1_codes(values: Tensor) -> Tensor:
    """The nearest E2M1 codes (ties to the even code, beyond 6 to 6), uint8."""
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)], device=values.device)
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros((), device=values.device))  # these ties go up
    magnitude = torch.bucketize(values.float().abs().contiguous(), middles).to(torch.uint8)
    return magnitude | ((values < 0) & (magnitude > 0)).to(torch.uint8) << 3


def quantize_weight(weight: Tensor, precision: str, scale_dtype: torch.dtype = torch.bfloat16) -> Codes:
    """Quantize a matrix [N, K]: the codes use the scales as they are stored (rounded), not as they were computed."""
    rows, columns = weight.shape
    grouped = _in_groups(weight.float(), GROUP[precision])  # [N, G, group]
    top = grouped.abs().amax(-1)  # [N, G]
    if precision == "int4":
        scales = _no_zeros(top / 7).to(scale_dtype)
        codes = (grouped / _no_zeros(scales.float())[..., None]).round().clamp(-8, 7).to(torch.int8).view(torch.uint8)
        return Codes(precision, pack_nibbles(codes.reshape(rows, -1)), scales, None, columns)
    channel = _no_zeros(top.amax(-1) / (FP8_MAX * FP4_MAX)).to(scale_dtype)
    channel = _no_zeros(channel)  # too small for the dtype
    scales = (top / (FP4_MAX * channel.float()[:, None])).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    step = _no_zeros(scales.float() * channel.float()[:, None])
    codes = e2m1_codes(grouped / step[..., None])
    return Codes(precision, pack_nibbles(codes.reshape(rows, -1)), scales, channel, columns)


def quantize_activation(x: Tensor, precision: str, unsigned: bool = False) -> Tensor:
    """What 4-bit activations keep of `x` [..., K]: quantized per token and group, and back; float32.

    `unsigned` (int4): 15 levels above zero instead of 7 on either side; negative values become zero.
    """
    grouped = _in_groups(x.float(), GROUP[precision])
    if precision == "int4":
        low, high = (0, 15) if unsigned else (-8, 7)
        top = grouped.amax(-1, keepdim=True).clamp(min=0) if unsigned else grouped.abs().amax(-1, keepdim=True)
        scale = _no_zeros(top / high)
        kept = (grouped / scale).round().clamp(low, high) * scale
    else:
        top = grouped.abs().amax(-1, keepdim=True)
        scale = (top / FP4_MAX).clamp(max=FP8_MAX).to(torch.float8_e4m3fn).float()
        kept = code_values(e2m1_codes(grouped / _no_zeros(scale)), precision) * scale
    return kept.flatten(-2)[..., : x.shape[-1]]


def _in_groups(x: Tensor, group: int) -> Tensor:
    """[..., K] -> [..., G, group], filled up with zeros."""
    short = -x.shape[-1] % group
    padded = torch.nn.functional.pad(x, (0, short)) if short else x
    grouped: Tensor = padded.unflatten(-1, (-1, group))
    return grouped


def _no_zeros(scale: Tensor) -> Tensor:
    """Scales of all-zero groups become 1, so that nothing is divided by zero."""
    return torch.where(scale > 0, scale, torch.ones_like(scale))
