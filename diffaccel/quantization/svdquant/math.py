"""SVDQuant as pure functions: smoothing, a low-rank branch, and a 4-bit residual.

Li et al., "SVDQuant: Absorbing Outliers by Low-Rank Components for 4-Bit Diffusion Models" (2024). For a linear
layer y = x W^T + b with W [N, K]:

    s     = max|x_k|^alpha / max|W_:k|^(1-alpha)          one factor per input channel
    W * s ~ U D                                           the r largest singular directions, in 16 bits
    R     = W * s - U D                                   what is left, in 4 bits
    y     = q(x / s) q(R)^T + (x D'^T) U^T + b,  D' = D / s

The low-rank branch reads x itself, hence D'. Factors are rounded to 16 bits *before* R is taken, so that their
rounding ends up in R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...ledger.hardware import widest
from .formats import SHIFT, Codes, quantize_activation, quantize_weight

Tensor = torch.Tensor

ALPHAS = (0.2, 0.35, 0.5, 0.65, 0.8)  # what a search tries


@dataclass(frozen=True)
class Part:
    """One quantized matrix with its branch; reads K input channels in a row.

    Attributes:
        codes: q(R), [N, K].
        smooth: s, [K]; activations are divided by it.
        down: D', [r, K].
        up: U, [N, r].
        unsigned: the input comes out of a GELU: it is shifted by SHIFT, and quantized without sign. The bias of the
            layer must hold the correction that `shift_correction` gives.
    """

    codes: Codes
    smooth: Tensor
    down: Tensor
    up: Tensor
    unsigned: bool = False

    @property
    def rank(self) -> int:
        """r."""
        return self.down.shape[0]


@dataclass(frozen=True)
class Layer:
    """A linear layer: parts side by side along the input channels, and the bias ([N], corrected) or None."""

    parts: tuple[Part, ...]
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        """K of all parts."""
        return sum(part.codes.columns for part in self.parts)

    @property
    def out_features(self) -> int:
        """N."""
        return self.parts[0].codes.rows


@dataclass(frozen=True)
class Recipe:
    """How to quantize a layer.

    Attributes:
        precision: "int4" or "nvfp4".
        rank: of the branch; 0 for none.
        alpha: strength of the smoothing, one value or several to choose from by the output error.
        refine: rounds in which the branch is fitted again to what the 4-bit codes miss (0: none; 3 take 4 times as
            long and take off some 5 % of a layer's error, 20 % where activations are not quantized).
        svd: "low" (randomised, seeded) or "high" (exact, in float64).
        dtype: of scales and factors, torch.bfloat16 or torch.float16.
    """

    precision: str = "int4"
    rank: int = 32
    alpha: tuple[float, ...] = ALPHAS
    refine: int = 0
    svd: str = "low"
    dtype: torch.dtype = torch.bfloat16


def smoothing(x_absmax: Tensor, w_absmax: Tensor, alpha: float) -> Tensor:
    """s [K] from the largest |x| and |W| of each input channel; 1 where the formula has no positive finite value."""
    s = x_absmax.float() ** alpha / w_absmax.float() ** (1 - alpha)
    return torch.where(torch.isfinite(s) & (s > 0), s, torch.ones_like(s))


def low_rank(weight: Tensor, rank: int, svd: str = "low", seed: int = 0) -> tuple[Tensor, Tensor]:
    """(U [N, r], D [r, K]), float32, with U D close to `weight`; r is at most min(N, K).

    "low": randomised range finder with power iterations (Halko, Martinsson and Tropp 2011), seeded, so that a
    layer always gets the same branch. "high": full decomposition in float64.
    """
    rank = min(rank, *weight.shape)
    if rank == 0:
        return weight.new_zeros(weight.shape[0], 0).float(), weight.new_zeros(0, weight.shape[1]).float()
    if svd == "high":
        u, s, vt = torch.linalg.svd(weight.to(widest(weight.device)), full_matrices=False)
        return (u[:, :rank] * s[:rank]).float(), vt[:rank].float()
    matrix = weight.float()
    width = min(rank + 10, *weight.shape)
    draw = torch.randn(weight.shape[1], width, generator=torch.Generator().manual_seed(seed)).to(matrix)
    basis = torch.linalg.qr(matrix @ draw).Q
    for _ in range(4):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    u, s, vt = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ (u[:, :rank] * s[:rank]), vt[:rank]


def decompose(
    weight: Tensor, smooth: Tensor, recipe: Recipe, unsigned: bool = False, sample: Tensor | None = None
) -> Part:
    """Quantize one matrix [N, K] under a given smoothing.

    With `recipe.refine` the branch is fitted again to W*s - q(R) and R taken anew from W*s (not from the target of
    the fit); the round with the least error wins, measured on the smoothed weight, or on `sample` [T, K] where there
    is one (on outlier models the same rounds win, at twice the cost).
    """
    smooth = _rounded(smooth, recipe.dtype)
    smoothed = weight.float() * smooth.float()
    best = part = _part(smoothed, smoothed, smooth, recipe, unsigned)
    least = _error(weight, part, sample) if recipe.refine else 0.0
    for _ in range(recipe.refine):
        part = _part(smoothed, smoothed - part.codes.dequantize(), smooth, recipe, unsigned)
        error = _error(weight, part, sample)
        if error < least:
            best, least = part, error
    return best


def _part(smoothed: Tensor, target: Tensor, smooth: Tensor, recipe: Recipe, unsigned: bool) -> Part:
    up, down = low_rank(target, recipe.rank, recipe.svd)
    up, down = up.to(recipe.dtype), (down / smooth.float()).to(recipe.dtype)
    residual = smoothed - up.float() @ (down.float() * smooth.float())
    return Part(quantize_weight(residual, recipe.precision, recipe.dtype), smooth, down, up, unsigned)


def quantize_part(
    weight: Tensor,
    recipe: Recipe,
    x_absmax: Tensor | None = None,
    sample: Tensor | None = None,
    unsigned: bool = False,
) -> tuple[Part, float | None]:
    """Quantize a matrix [N, K]; returns the part and the alpha taken (None: no smoothing).

    Args:
        x_absmax: [K] largest |x| of each input channel; None leaves the activations as they are (s = 1).
        sample: [T, K] inputs on which several alphas are compared; without one the middle alpha is taken.
    """
    unsigned = unsigned and recipe.precision == "int4"
    if x_absmax is None:
        ones = torch.ones(weight.shape[1], device=weight.device)
        return decompose(weight, ones, recipe, unsigned), None
    w_absmax = weight.float().abs().amax(0)
    alphas: Sequence[float] = recipe.alpha
    if sample is None or len(alphas) == 1:
        alphas = (alphas[len(alphas) // 2],)
    tried = [(decompose(weight, smoothing(x_absmax, w_absmax, a), recipe, unsigned), a) for a in alphas]
    return min(tried, key=lambda one: _error(weight, one[0], sample)) if len(tried) > 1 else tried[0]


def shift_correction(part: Part) -> Tensor:
    """[N] float32: what the shift of an unsigned part adds to the output, to be taken off the bias."""
    return part.codes.dequantize() @ (SHIFT / part.smooth.float())


def quantize_layer(
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    x_absmax: Tensor | None = None,
    sample: Tensor | None = None,
    splits: Sequence[tuple[int, bool]] = (),
) -> tuple[Layer, tuple[float | None, ...]]:
    """Quantize a linear layer; returns it and the alpha of every part.

    Args:
        splits: (columns, comes out of a GELU) of each part, from the first channel on; empty: one part, signed.
    """
    parts: list[Part] = []
    alphas: list[float | None] = []
    start = 0
    for columns, unsigned in splits or ((weight.shape[1], False),):
        here = slice(start, start + columns)
        part, alpha = quantize_part(
            weight[:, here],
            recipe,
            None if x_absmax is None else x_absmax[here],
            None if sample is None else sample[:, here],
            unsigned,
        )
        parts.append(part)
        alphas.append(alpha)
        start += columns
    if start != weight.shape[1]:
        raise ValueError(f"splits cover {start} input channels, the weight has {weight.shape[1]}")
    return Layer(tuple(parts), corrected_bias(bias, parts)), tuple(alphas)


def corrected_bias(bias: Tensor | None, parts: Sequence[Part]) -> Tensor | None:
    """The bias less the corrections of the unsigned parts, float32 (or None)."""
    total = None if bias is None else bias.detach().float().clone()
    for part in parts:
        if part.unsigned:
            correction = shift_correction(part)
            total = -correction if total is None else total - correction
    return total


def effective_weight(layer: Layer) -> Tensor:
    """The matrix [N, K] that the layer multiplies with when activations are not quantized, float32."""
    return torch.cat([p.codes.dequantize() / p.smooth.float() + p.up.float() @ p.down.float() for p in layer.parts], 1)


def forward_part(x: Tensor, part: Part, act: bool = True) -> Tensor:
    """One part's output for x [..., K], without bias, float32. `act=False` leaves the activations unquantized."""
    x = x.float()
    smoothed = (x + SHIFT if part.unsigned else x) / part.smooth.float()
    kept = quantize_activation(smoothed, part.codes.precision, part.unsigned) if act else smoothed
    return kept @ part.codes.dequantize().T + (x @ part.down.float().T) @ part.up.float().T


def reference_forward(x: Tensor, layer: Layer, act: bool = True) -> Tensor:
    """The layer's output for x [..., K], float32: what every backend is compared with."""
    out: Tensor | int = 0
    start = 0
    for part in layer.parts:
        stop = start + part.codes.columns
        out, start = out + forward_part(x[..., start:stop], part, act), stop
    return out if layer.bias is None else out + layer.bias.float()  # type: ignore[return-value]


def _error(weight: Tensor, part: Part, sample: Tensor | None) -> float:
    """Squared error of the output on `sample`, or of the smoothed weight without one."""
    if sample is None:
        back = part.codes.dequantize() + part.up.float() @ (part.down.float() * part.smooth.float())
        return float((weight.float() * part.smooth.float() - back).square().sum())
    out = forward_part(sample, part)
    if part.unsigned:
        out = out - shift_correction(part)
    return float((sample.float() @ weight.float().T - out).square().sum())


def _rounded(smooth: Tensor, dtype: torch.dtype) -> Tensor:
    """s in a 16-bit dtype, 1 where it would not be a positive finite number there."""
    s = smooth.to(dtype)
    return torch.where(torch.isfinite(s) & (s > 0), s, torch.ones_like(s))
