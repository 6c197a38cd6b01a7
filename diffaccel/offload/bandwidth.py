"""Is it free? Moving the weights of a layer costs nothing where the device computes for as long anyway.

Pure numbers: bytes, FLOPs (two per multiply-add), bytes per second, FLOP per second; seconds come out. With enough
buffers the transfers of a pass follow one another without a gap, so that a pass takes
`max(sum of compute, sum of bytes / bandwidth)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ledger.hardware import Hardware

# Assumed: matrix products in bf16 reach this share of the data sheet's peak (120 of 165 TFLOP/s on a 4090).
REACHED = 0.7264


@dataclass(frozen=True)
class Bandwidth:
    """How fast weights come in and how fast the device computes; `origin` says where the numbers are from."""

    bytes_per_s: float
    flops_per_s: float
    origin: str = ""


def host_bandwidth(hardware: Hardware) -> Bandwidth | None:
    """Host memory to that device; None where the machine is not in the table."""
    if hardware.bf16_tflops is None or hardware.host_gb_s is None:
        return None
    return Bandwidth(hardware.host_gb_s * 1e9, REACHED * hardware.bf16_tflops * 1e12, "assumed")


@dataclass(frozen=True)
class Layer:
    """One layer: its weights, its work in one pass, and whether its weights stay on the device."""

    name: str
    nbytes: float
    flops: float
    resident: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    nbytes: float
    transfer_s: float
    compute_s: float

    @property
    def free(self) -> bool:
        """Does the transfer fit behind the layer's own compute?"""
        return self.transfer_s <= self.compute_s


@dataclass(frozen=True)
class Pass:
    """One pass over all layers."""

    compute_s: float
    transfer_s: float
    resident_bytes_needed: float

    @property
    def seconds(self) -> float:
        """`max(compute, transfer)`."""
        return max(self.compute_s, self.transfer_s)

    @property
    def free(self) -> bool:
        """Is the pass no longer than with all weights resident?"""
        return self.transfer_s <= self.compute_s

    @property
    def slowdown(self) -> float:
        """Time of the pass over that with all weights resident."""
        return self.seconds / self.compute_s if self.compute_s else float("inf")


def table(layers: Sequence[Layer], link: Bandwidth) -> list[Row]:
    """Transfer and compute seconds of every layer (a resident one moves nothing)."""
    return [
        Row(one.name, one.nbytes, 0.0 if one.resident else one.nbytes / link.bytes_per_s, one.flops / link.flops_per_s)
        for one in layers
    ]


def whole_pass(layers: Sequence[Layer], link: Bandwidth) -> Pass:
    """A pass over all layers, and the bytes that must stay for it to be free."""
    rows = table(layers, link)
    compute_s = sum(row.compute_s for row in rows)
    total = sum(one.nbytes for one in layers)
    return Pass(compute_s, sum(row.transfer_s for row in rows), max(0.0, total - link.bytes_per_s * compute_s))


def break_even_tokens(nbytes: float, flops_per_token: float, link: Bandwidth) -> float:
    """Tokens from which on a layer's matrix products alone take as long as its transfer (attention not counted)."""
    return nbytes * link.flops_per_s / (flops_per_token * link.bytes_per_s)


def transformer_flops(
    per_token: float, tokens: int, width: int, context: int = 0, per_context_token: float = 0.0
) -> float:
    """FLOPs of a transformer layer in one pass.

    Args:
        per_token: weights that each token is multiplied with.
        tokens: tokens that attend to one another.
        width: channels of queries, keys and values together over all heads.
        context: tokens of a text that is attended to besides (cross-attention).
        per_context_token: weights that each token of that text is multiplied with.
    """
    linear = 2.0 * (per_token * tokens + per_context_token * context)
    return linear + 4.0 * tokens * (tokens + context) * width


def sentence(layers: Sequence[Layer], link: Bandwidth, what: str) -> str:
    """Is it free, in words. `what` names the case: "FLUX.1 at 1024 px on a 4090"."""
    whole = whole_pass(layers, link)
    fact = f"{what}: weights move in {_ms(whole.transfer_s)}, compute takes {_ms(whole.compute_s)} a pass"
    if whole.free:
        return f"{fact}: free"
    return f"{fact}: {whole.slowdown:.1f}x the time, free with {whole.resident_bytes_needed / 1e9:.1f} GB resident"


def token_sentence(nbytes: float, flops_per_token: float, link: Bandwidth, hardware: str) -> str:
    """The same where the number of tokens is not known yet: from how many on it is free at the latest."""
    tokens = break_even_tokens(nbytes, flops_per_token, link)
    return (
        f"free from about {round(tokens, -2):,.0f} tokens a call on at the latest (attention not counted; {hardware}: "
        f"{link.bytes_per_s / 1e9:g} GB/s, {link.flops_per_s / 1e12:.0f} TFLOP/s{', ' * bool(link.origin)}"
        f"{link.origin}); below that, transfers set the pace"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
