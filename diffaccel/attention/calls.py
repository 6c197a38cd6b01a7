"""What one attention call is: its tensors, where in the model and in the run it stands, and who may answer it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..core.run import Call
from .geometry import Geometry


@dataclass(frozen=True)
class Inputs:
    """The arguments of one attention call.

    Attributes:
        q: [B, Nq, H, D]. k, v: [B, Nk, Hkv, D]. May be views of other layouts.
        mask: broadcastable to [B, H, Nq, Nk] (boolean: True attends; else added to the scores), or None.
        scale: factor of the scores; None is 1 / sqrt(D).
        causal, gqa: as in PyTorch's scaled_dot_product_attention.
        lse: whether the answer is (output, log-sum-exp [B, H, Nq] in float32, natural logarithm). The pipelines of
            this version never ask; `with_lse` gives it to a handler that joins parts of a sequence.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    scale: float | None = None
    causal: bool = False
    gqa: bool = False
    lse: bool = False


@dataclass(frozen=True)
class Where:
    """Which attention call this is.

    Attributes:
        layer, layers: index of the transformer block in running order and their number; layer is -1 for attention
            outside of the blocks (a text refiner), or counts attention modules where no block stack is known.
        name: path of the attention module in the denoiser.
        cross: queries and keys come from different sequences.
        geometry: how the video's tokens lie in this sequence; None where they do not (another sequence, images).
        call: the denoiser call this belongs to (step, branch, component, run).
    """

    layer: int
    layers: int
    name: str
    cross: bool
    geometry: Geometry | None
    call: Call


Handler = Callable[[Where, Inputs, Callable[[], Any]], Any]
"""(where, inputs, plain) -> output [B, Nq, H, D]; `plain()` is what the untouched processor computes, bit by bit."""


def with_lse(inputs: Inputs, output: torch.Tensor, rows: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp [B, H, Nq] float32) where attention was computed without; scores in slices of rows."""
    q, k = inputs.q.transpose(1, 2).float(), inputs.k.transpose(1, 2).float()
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = inputs.scale if inputs.scale is not None else q.shape[-1] ** -0.5
    mask = inputs.mask
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2]) if mask.ndim == 4 else mask.expand(q.shape[2], k.shape[2])
    parts = []
    for start in range(0, q.shape[2], rows):
        scores = q[:, :, start : start + rows] @ k.transpose(-1, -2) * scale
        if mask is not None:
            part = mask[..., start : start + rows, :]
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        if inputs.causal:
            ahead = torch.arange(k.shape[2], device=q.device) > torch.arange(
                start, start + scores.shape[2], device=q.device
            ).unsqueeze(1)
            scores = scores.masked_fill(ahead, -torch.inf)
        parts.append(scores.logsumexp(-1))
    return output, torch.cat(parts, -1)


class Counts:
    """What a handler did in one run: calls by kind, and fallbacks by reason."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.fallbacks: dict[str, int] = {}

    def fork(self) -> Counts:
        """For another run."""
        other = Counts()
        other.calls, other.fallbacks = dict(self.calls), dict(self.fallbacks)
        return other

    def add(self, kind: str) -> None:
        """One more call of a kind."""
        self.calls[kind] = self.calls.get(kind, 0) + 1

    def fall_back(self, where: Where, name: str, reason: str) -> None:
        """One more call computed as the plain pipeline does; the first of a reason is said once."""
        if reason not in self.fallbacks:
            where.call.run.note(f"{name} fell back to plain attention: {reason} (first at {where.name})")
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        self.add("fallback")

    def stats(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {"calls": dict(self.calls), "fallbacks": dict(self.fallbacks)}
