"""A sum over layers: parameters, and FLOPs of linear layers, attention and convolutions, for one forward of batch 1.

Two FLOPs are a multiply and an add. Norms, activations, softmax and rotary embeddings are not counted. Attention is
dense, masked or not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

ONE = "one"  # the stream of what depends on the timestep and pooled text alone: one row


@dataclass
class Tally:
    """Filled by the description of an architecture.

    Attributes:
        rows: tokens of each stream, e.g. {"image": 4096, "text": 512, "joint": 4608, "one": 1}.
        parameters: of all layers, norms and tables.
        linear, attention, conv: FLOPs.
        weights: by stream, in x out of the linear layers that its rows pass through.
    """

    rows: dict[str, int]
    parameters: int = 0
    linear_flops: int = 0
    attention_flops: int = 0
    conv_flops: int = 0
    weights: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rows = {ONE: 1, **self.rows}

    @property
    def total(self) -> int:
        """FLOPs of all kinds."""
        return self.linear_flops + self.attention_flops + self.conv_flops

    def linear(self, stream: str, inner: int, outer: int, times: int = 1, bias: bool = True) -> None:
        """`times` layers [inner, outer] that the rows of a stream pass through."""
        self.parameters += times * (inner * outer + bias * outer)
        self.weights[stream] += times * inner * outer
        self.linear_flops += 2 * times * self.rows[stream] * inner * outer

    def mlp(self, stream: str, width: int, inner: int, times: int = 1, bias: bool = True) -> None:
        """width -> inner -> width."""
        self.linear(stream, width, inner, times, bias)
        self.linear(stream, inner, width, times, bias)

    def embed(self, stream: str, inner: int, outer: int, times: int = 1, bias: bool = True) -> None:
        """inner -> outer -> outer, as time steps, pooled text and captions are."""
        self.linear(stream, inner, outer, times, bias)
        self.linear(stream, outer, outer, times, bias)

    def attention(self, queries: str, keys: str, width: int, times: int = 1) -> None:
        """Scores and their product with the values; `width` is heads x head dimension."""
        self.attention_flops += 4 * times * self.rows[queries] * self.rows[keys] * width

    def conv(self, places: int, inner: int, outer: int, kernel: int, times: int = 1, bias: bool = True) -> None:
        """Convolutions with `places` outputs per channel; `kernel` is the number of elements of one."""
        self.parameters += times * (inner * outer * kernel + bias * outer)
        self.conv_flops += 2 * times * places * inner * outer * kernel

    def held(self, parameters: int, times: int = 1) -> None:
        """Parameters that multiply nothing that is counted: norms, tables, tokens."""
        self.parameters += times * parameters
