"""All adapters of one layer as one branch: y -> row * y + shift + up (down x), or as one sum with its weight.

Adapters act in their order, as in peft: a DoRA scales the rows of all that came before it, and measures their length
on the base weight plus its own product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...ledger.hardware import widest
from .pairs import Pair, Tensor, padded

Loaded = Sequence[tuple[str, Pair, float]]  # (adapter, pair, strength)


class RowLengths:
    """The length of each row of W + f * D for any f, without keeping W or D.

    Args:
        weight: W, [out, ...].
        delta: D, [out, n].
    """

    def __init__(self, weight: Tensor, delta: Tensor) -> None:
        rows = weight.float().flatten(1)
        delta = delta.to(rows.device)
        self.whole: Tensor = torch.linalg.vector_norm(
            (rows + delta).view(weight.shape), dim=tuple(range(1, weight.ndim))
        )
        wide = widest(rows.device)
        self.terms = torch.stack([(a * b).sum(1, dtype=wide) for a, b in ((rows, rows), (rows, delta))])
        self.square = (delta * delta).sum(1, dtype=wide)

    def at(self, factor: float) -> Tensor:
        """[out]; for a factor of 1 in float32, as peft measures it."""
        if factor == 1.0:
            return self.whole
        whole: Tensor = self.terms[0] + 2 * factor * self.terms[1] + factor * factor * self.square
        return whole.clamp(min=0).sqrt()


class Branch:
    """What acts beside a layer in every call.

    One adapter in float32 computes what peft computes, operation by operation, so that the bits agree: its strength
    comes last. In all other cases strengths and scales lie in `up`.

    Attributes:
        down: [R, in, ...] of all adapters, one below the other.
        up: [out, R, ...].
        row: [out] float32, or None where no adapter is a DoRA.
        shift: [out] float32, or None where the output needs none.
        factor: [], what the product (`last`) or the inner values are multiplied with.
        bias: [out] of the layer where there is a DoRA, which scales the output without it.
    """

    def __init__(
        self,
        loaded: Loaded,
        dtype: torch.dtype,
        device: torch.device,
        width: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """`width`: inputs of the layer. `weight` [out, ...], `bias` [out]: of the layer, needed for DoRA alone."""
        self._loaded = tuple((pair, strength) for _, pair, strength in loaded)
        self._lengths: list[RowLengths | None] = []
        for pair, strength in self._loaded:
            if pair.magnitude is None:
                self._lengths.append(None)
            else:
                assert weight is not None, "a DoRA needs the weight of its layer"
                self._lengths.append(RowLengths(weight, pair.delta(strength, width)))
        dora = any(lengths is not None for lengths in self._lengths)
        self.bias = None if bias is None or not dora else bias.detach().float()
        self.last = len(self._loaded) == 1 and dtype == torch.float32
        self._whole = self._loaded[0][0].scale * self._loaded[0][1] if self.last else 1.0
        self.down = torch.cat([padded(pair.down, width) for pair, _ in self._loaded]).to(device, dtype)
        up, row, shift = self._at(1.0)
        self.up = up.to(device, dtype)
        self.row = None if row is None else row.to(device)
        self.shift = None if shift is None else shift.to(device)
        self.factor = torch.full((), self._whole, device=device)

    def rescale(self, value: float) -> None:
        """Multiply all strengths by this, in place of the factor before."""
        if self.last or self.row is None:
            self.factor.fill_(self._whole * value)
        if self.row is None:
            return
        up, row, shift = self._at(value)
        for held, new in ((self.up, up), (self.row, row), (self.shift, shift)):
            if held is not None and new is not None:
                held.copy_(new)

    def move(self, device: torch.device) -> None:
        """Follow the layer's input to another device."""
        if self.down.device != device:
            self.down, self.up, self.factor = (t.to(device) for t in (self.down, self.up, self.factor))
            self.row = None if self.row is None else self.row.to(device)
            self.shift = None if self.shift is None else self.shift.to(device)
            self.bias = None if self.bias is None else self.bias.to(device)

    def add(self, output: Tensor, low: Tensor, product: Callable[..., Tensor]) -> Tensor:
        """The layer's output with the adapters.

        Args:
            output: of the layer alone, [..., out], or [B, out, ...] of a convolution.
            low: down x, [..., R], or [B, R, ...].
            product: (low, up, bias or None) -> up low + bias.
        """
        shape = (-1, *(1,) * (self.up.ndim - 2))
        if self.last:
            extra = product(low, self.up, self.shift)
            if self.row is None:
                return output + (extra * self.factor).to(output.dtype)
            row = self.row.view(shape)
            bare = output if self.bias is None else output - self.bias.view(shape)
            return output + ((row - 1) * bare + row * extra * self.factor).to(output.dtype)
        if self.shift is not None:
            shift = self.shift.view(shape)
            scaled = output + shift * self.factor if self.row is None else output * self.row.view(shape) + shift
            output = scaled.to(output.dtype)
        return output + product(low * self.factor, self.up, None).to(output.dtype)

    def _at(self, factor: float) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(up [out, R, ...] float64, row [out], shift [out]) for strengths times `factor`."""
        ups: list[Tensor] = []
        row: Tensor | None = None
        added: Tensor | None = None
        for (pair, strength), lengths in zip(self._loaded, self._lengths, strict=True):
            times = 1.0 if self.last else pair.scale * strength * factor
            ups.append(pair.up.cpu().double() * times)
            if pair.bias is not None:
                new = pair.bias.cpu().double() * times
                added = new if added is None else added + new
            if lengths is not None and pair.magnitude is not None:
                length = lengths.at(factor).cpu()
                turn = (pair.magnitude.cpu().to(length.dtype) / length).double()
                row = turn if row is None else row * turn
                if not self.last:
                    ups = [up * turn.view(-1, *(1,) * (up.ndim - 1)) for up in ups]
                    added = None if added is None else added * turn
        shift = added
        if row is not None and not self.last:  # the layer's own bias has no part in the rows' lengths
            own = torch.zeros_like(row) if self.bias is None else self.bias.cpu().double() * (1 - row)
            shift = own if added is None else own + added
        row, shift = (None if vector is None else vector.float() for vector in (row, shift))
        return torch.cat(ups, 1), row, shift


def summed(weight: Tensor, loaded: Loaded) -> tuple[Tensor, Tensor | None]:
    """The weight [out, ...] with all adapters in it, and what is added to the bias [out] (None: nothing), float32."""
    base = weight.float()
    total, flat = base, base.flatten(1)
    added: Tensor | None = None
    for _, pair, strength in loaded:
        on_device = Pair(pair.down.to(base.device), pair.up.to(base.device), pair.scale)
        delta = on_device.delta(strength, base.shape[1])
        total = total + delta.view(base.shape)
        if pair.bias is not None:
            new = pair.bias.to(base.device).float() * (pair.scale * strength)
            added = new if added is None else added + new
        if pair.magnitude is not None:
            turn = pair.magnitude.to(base.device).float() / (flat + delta).norm(dim=1)
            total = total * turn.view(-1, *(1,) * (base.ndim - 1))
            added = None if added is None else added * turn
    return total, added
