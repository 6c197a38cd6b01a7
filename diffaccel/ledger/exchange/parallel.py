"""Several GPUs: bytes that each one sends in a forward, and the seconds of a step. Formulas alone; nothing here runs.

A layer's map is tokens x width x 2 bytes. Sources: xDiT (arXiv 2411.01738), DeepSpeed Ulysses (arXiv 2309.14509), Ring
Attention (arXiv 2310.01889), Megatron-LM (arXiv 1909.08053), PipeFusion (arXiv 2405.14430).
"""

from __future__ import annotations

BF16 = 2


def map_bytes(tokens: int, width: int) -> int:
    """One activation of all tokens."""
    return BF16 * tokens * width


def ulysses_bytes(tokens: int, width: int, layers: int, degree: int) -> float:
    """Queries, keys, values and output change from tokens to heads and back: 4 maps, of which each holds 1/p."""
    return layers * 4 * map_bytes(tokens, width) * (degree - 1) / degree / degree


def ring_bytes(tokens: int, width: int, layers: int, degree: int) -> float:
    """Keys and values go round: 2 maps, all but its own share."""
    return layers * 2 * map_bytes(tokens, width) * (degree - 1) / degree


def tensor_bytes(tokens: int, width: int, layers: int, degree: int, sums: int = 2) -> float:
    """`sums` all-reduces a layer, each of which sends twice the map but its own share."""
    return layers * sums * 2 * map_bytes(tokens, width) * (degree - 1) / degree


def pipefusion_bytes(tokens: int, width: int, degree: int) -> float:
    """A patch's activation goes from one stage to the next: the whole map once, however many layers there are."""
    return float(map_bytes(tokens, width)) if degree > 1 else 0.0


def guidance_bytes(latent_elements: int) -> float:
    """The two branches on two groups of GPUs: one exchange of the prediction a step."""
    return float(BF16 * latent_elements)


def step_seconds(compute: float, degree: int, sent_bytes: float, gb_s: float, hidden: float = 0.0) -> float:
    """A forward over `degree` GPUs: compute shared evenly, and what of the transfers is not hidden behind it.

    No launch, no waiting and no unevenness is in it: a lower bound.
    """
    return compute / degree + (1 - hidden) * sent_bytes / (gb_s * 1e9)
