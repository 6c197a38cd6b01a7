"""The exchanges as formulas: numbers in, numbers out. Gains are times before over times after; shares are 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

# What quantizing activations and rescaling products takes, as a part of the bf16 time of the same layers. Fitted to
# one pair: FLUX.1 dev on a 4090, FP8 weights alone against FP8 products, 1.70 and 2.55 it/s (aredden/flux-fp8-api,
# README), where 80 % of a forward is linear and the FP8 peak is twice that of bf16.
REQUANTIZING = 0.0834


def cache_gain(steps: int, computed: float, reused: float = 0.0) -> float:
    """Of denoising: T / (T_full + T_hit x eps), where a reused step costs `reused` of a computed one."""
    return steps / (computed + (steps - computed) * reused)


def amdahl(share: float, saving: float) -> float:
    """Gain where `saving` of a part that is `share` of the whole goes away."""
    return 1 / (1 - share * saving)


def kept_pairs(density: float, dense: float) -> float:
    """Share of attention's pairs over a loop: all of them in the `dense` share of it, `density` of them elsewhere."""
    return dense + (1 - dense) * density


def attention_8bit(int8: float, fp8: float | None) -> float:
    """Time of attention with 8-bit products, as a part of its bf16 time.

    Scores are half of the FLOPs and go at `int8` times the bf16 peak; products with the values are the other half and
    go at `fp8` times it (None: in 16 bits). SageAttention 2 (arXiv 2411.10958); on a 5090 this gives 2.67, and its
    authors report 2.7.
    """
    return 0.5 / int8 + 0.5 / (fp8 or 1.0)


def quantized_linear(ratio: float, overhead: float = REQUANTIZING) -> float:
    """Time of linear layers at `ratio` times the bf16 peak, as a part of their bf16 time."""
    return 1 / ratio + overhead


def quantized_gib(parameters: int, condition: int, bits: float, rank_share: float = 0.0) -> float:
    """Weights of a denoiser of which only what depends on the condition alone (modulation) stays in 16 bits.

    `bits` a number, scales included; `rank_share`: numbers of low-rank factors in 16 bits, as a part of the quantized.
    """
    quantized = parameters - condition
    return (quantized * (bits / 8 + 2 * rank_share) + 2 * condition) / 1024**3


def overlapped(compute: Sequence[float], transfer: Sequence[float]) -> float:
    """Seconds of a forward whose layers' weights come in while others compute: max(compute, transfer) by layer."""
    return sum(max(pair) for pair in zip(compute, transfer, strict=True))


def strips(lines: int, count: int, halo: int) -> tuple[float, float]:
    """(part of the whole map that the largest strip is, work as a multiple of the whole) of a decode in strips.

    Each strip sees `halo` lines of its neighbours on every inner side.
    """
    cuts = [round(lines * n / count) for n in range(count + 1)]
    seen = [min(lines, end + halo) - max(0, start - halo) for start, end in pairwise(cuts)]
    return max(seen) / lines, sum(seen) / lines


def interval_steps(steps: int, interval: int, first: int = 1, last: int = 1) -> int:
    """Computed steps where the `first` and `last` ones are, and between them every `interval`-th."""
    computed = {step for step in range(steps) if step < first or step >= steps - last}
    return len(computed | set(range(max(first - 1, 0), steps, interval)))
