"""Masks that only hide padding at the end: read once, then cut off exactly instead of being applied."""

from __future__ import annotations

import torch


def valid_prefix(mask: torch.Tensor, queries: int, keys: int) -> tuple[int, ...] | None:
    """Number of valid keys per sample, where a mask says no more than "keys behind these are padding"; else None.

    Args:
        mask: boolean (True attends) or additive (0 attends, -inf or the type's lowest value does not), of shape
            [B or 1, 1, 1, Nk], or [B or 1, 1, Nq, Nk] with rows of padded queries hidden as well.
        queries, keys: Nq and Nk.

    Reads the mask, which makes a GPU wait.
    """
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[3] != keys or mask.shape[2] not in (1, queries):
        return None
    attends = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((attends | (mask <= torch.finfo(mask.dtype).min)).all()):
        return None
    if mask.shape[2] == 1:
        valid = attends[:, 0, 0]
    else:
        if queries != keys:
            return None
        valid = attends[:, 0].diagonal(dim1=-2, dim2=-1)
        if not bool((attends[:, 0] == (valid[:, :, None] & valid[:, None, :])).all()):
            return None
    counts = valid.sum(-1)
    prefix = torch.arange(keys, device=mask.device) < counts[:, None]
    return tuple(counts.tolist()) if bool((prefix == valid).all()) else None


class PaddingReader:
    """Remembers the answer for the mask of one denoiser call: all its layers are given the same one."""

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None
        self.answer: tuple[int, ...] | None = None

    def read(self, mask: torch.Tensor | None, batch: int, queries: int, keys: int) -> tuple[int, ...] | None:
        """Valid keys of each of `batch` samples; None where the mask says more than that."""
        if mask is None:
            return (keys,) * batch
        if self.mask is not mask:
            self.mask, self.answer = mask, valid_prefix(mask, queries, keys)
        answer = self.answer
        return answer * batch if answer is not None and len(answer) == 1 else answer

    def forget(self) -> None:
        """Let go of the mask."""
        self.mask = self.answer = None
