"""The blocks of an AutoencoderKL, layer by layer in row strips, equal to the blocks themselves but for rounding.

Every convolution is the real module, called on a strip with one row more on each side; what its zero padding spoils
where the map goes on is cut off. Every group norm sees the statistics of the whole map: first a pass (or the pass that
writes the map) adds up its moments, then the strips are normalised with them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...core.hooked_forward import run_hooked
from ..tiles import Rows, below_doubling, below_halving, halved, strips, with_halo
from . import group_norm
from .group_norm import Moments


class WholeMap:
    """A map [1, C, H, W] that is there. Written from the top, it still reads back the last rows it overwrote."""

    def __init__(self, tensor: torch.Tensor, behind: int = 0) -> None:
        self.tensor, self.behind = tensor, behind
        self.height = tensor.shape[2]
        self.done = 0  # rows above are overwritten
        self.tail: torch.Tensor | None = None  # as they were: the last `behind` rows above `done`

    def read(self, rows: Rows) -> torch.Tensor:
        """These rows as they were before they were overwritten."""
        first, end = rows
        if first >= self.done:
            return self.tensor[:, :, first:end]
        assert self.tail is not None
        old = self.tail[:, :, self.tail.shape[2] - (self.done - first) :]
        return torch.cat([old, self.tensor[:, :, self.done : end]], dim=2)

    def write(self, rows: Rows, strip: torch.Tensor) -> None:
        """Overwrite the rows that follow the ones overwritten last."""
        first, end = rows
        if self.behind:
            self.tail = self.read((max(end - self.behind, 0), end)).clone()
        self.done = end
        self.tensor[:, :, first:end] = strip


class Doubled:
    """A map as an upsampler would make it, computed anew for each strip that is read."""

    def __init__(self, below: WholeMap, upsampler: Any) -> None:
        self.below, self.upsampler = below, upsampler
        self.height = 2 * below.height

    def read(self, rows: Rows) -> torch.Tensor:
        """These rows; the real upsampler runs on the rows of the smaller map that they come from."""
        wide = with_halo(rows, 1, self.height)
        first, end = below_doubling(wide, self.below.height)
        made = self.upsampler(self.below.read((first, end)))
        found: torch.Tensor = made[:, :, rows[0] - 2 * first : rows[1] - 2 * first]
        return found


Source = WholeMap | Doubled


def new_map(like: torch.Tensor, height: int) -> torch.Tensor:
    """An empty map of `height` rows, otherwise as the strip `like` is."""
    size = (*like.shape[:2], height, like.shape[3])
    packed = like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    kind = torch.channels_last if packed else torch.contiguous_format
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=kind)


def moments(source: Source, groups: int, rows: int) -> Moments:
    """The moments of a whole map."""
    found = Moments(groups)
    for strip in strips(source.height, rows):
        found.add(source.read(strip))
    return found


def convolved(conv: Any, strip: torch.Tensor, given: Rows, wanted: Rows) -> torch.Tensor:
    """Rows `wanted` of a 3x3 convolution whose input rows `given` are in `strip`."""
    made: torch.Tensor = conv(strip)
    return made[:, :, wanted[0] - given[0] : wanted[1] - given[0]]


def activated(norm: Any, activation: Any, seen: Moments, strip: torch.Tensor) -> torch.Tensor:
    """A strip behind a group norm with the moments of the whole map, and an activation."""
    autocast = torch.is_autocast_enabled(strip.device.type)
    dtype = torch.float32 if autocast else strip.dtype  # group norms leave an autocast region in float32

    def normed(x: torch.Tensor) -> torch.Tensor:
        # Within the norm's own hooks: offloaded, it has its weights only for the length of a call.
        return group_norm.apply(x, *seen.scale_and_shift(norm.weight, norm.bias, norm.eps, norm.num_channels), dtype)

    made: torch.Tensor = run_hooked(norm, normed, strip)
    if type(activation) is torch.nn.SiLU:
        return F.silu(made, inplace=True)
    result: torch.Tensor = activation(made)
    return result


class Resnet:
    """One ResnetBlock2D over a source, in strips of `rows`."""

    def __init__(self, block: Any, source: Source, rows: int) -> None:
        self.block, self.source, self.rows = block, source, rows
        self.height = source.height
        self.first = moments(source, block.norm1.num_groups, rows)
        self.second = Moments(block.norm2.num_groups)
        self.hidden: WholeMap | None = None

    def run(self, again: bool) -> WholeMap:
        """The block's output. It takes the place of the input, or of the hidden map where the input does not fit.

        `again` computes hidden rows twice instead of keeping them (only for an input that is there and fits).
        """
        over_input = self.block.conv_shortcut is None and isinstance(self.source, WholeMap)
        again = again and over_input
        if again:
            for strip in strips(self.height, self.rows):
                self.second.add(self.hidden_rows(strip))
        else:
            self.hidden = self.keep_hidden()
        target = self.source if over_input else self.hidden
        assert isinstance(target, WholeMap)
        target.behind = 2 if again else 0 if over_input else 1
        for strip in strips(self.height, self.rows):
            self.output_rows(strip, target)
        return WholeMap(target.tensor)

    def keep_hidden(self) -> WholeMap:
        """The map between the two convolutions; its moments are added up on the way."""
        tensor: torch.Tensor | None = None
        for strip in strips(self.height, self.rows):
            made = self.hidden_rows(strip)
            self.second.add(made)
            if tensor is None:
                tensor = new_map(made, self.height)
            tensor[:, :, strip[0] : strip[1]] = made
            del made
        assert tensor is not None
        return WholeMap(tensor)

    def hidden_rows(self, rows: Rows) -> torch.Tensor:
        """Rows of the map between the two convolutions."""
        if self.hidden is not None:
            return self.hidden.read(rows)
        block, wide = self.block, with_halo(rows, 1, self.height)
        before = activated(block.norm1, block.nonlinearity, self.first, self.source.read(wide))
        return convolved(block.conv1, before, wide, rows)

    def output_rows(self, rows: Rows, target: WholeMap) -> None:
        """Compute rows of the output and write them."""
        block, wide = self.block, with_halo(rows, 1, self.height)
        before = activated(block.norm2, block.nonlinearity, self.second, self.hidden_rows(wide))
        made = convolved(block.conv2, block.dropout(before), wide, rows)
        del before
        straight = self.source.read(rows)
        if block.conv_shortcut is not None:
            straight = block.conv_shortcut(straight)
        made = made.add_(straight) if made.dtype == straight.dtype else made + straight
        if block.output_scale_factor != 1:
            made = made / block.output_scale_factor
        target.write(rows, made)


def resnet(block: Any, source: Source, rows: int, again: bool) -> WholeMap:
    """`block(x)` in strips, within the block's own offload hooks."""

    made: WholeMap = run_hooked(block, lambda: Resnet(block, source, rows).run(again))
    return made


def upsampled(upsampler: Any, below: WholeMap, rows: int) -> WholeMap:
    """The upsampler's output as a whole, made in strips."""
    source = Doubled(below, upsampler)
    tensor: torch.Tensor | None = None
    for strip in strips(source.height, rows):
        made = source.read(strip)
        if tensor is None:
            tensor = new_map(made, source.height)
        tensor[:, :, strip[0] : strip[1]] = made
        del made
    assert tensor is not None
    return WholeMap(tensor)


def downsampled(downsampler: Any, above: WholeMap, rows: int) -> WholeMap:
    """The downsampler's output, made in strips."""
    height = halved(above.height)
    tensor: torch.Tensor | None = None
    for strip in strips(height, rows):
        made = downsampler(above.read(below_halving(strip, above.height)))
        if tensor is None:
            tensor = new_map(made, height)
        tensor[:, :, strip[0] : strip[1]] = made
        del made
    assert tensor is not None
    return WholeMap(tensor)


def tail(norm: Any, activation: Any, conv: Any, source: WholeMap, rows: int) -> torch.Tensor:
    """The last norm, activation and convolution [1, C, H, W], in strips."""
    seen = moments(source, norm.num_groups, rows)
    tensor: torch.Tensor | None = None
    for strip in strips(source.height, rows):
        wide = with_halo(strip, 1, source.height)
        before = activated(norm, activation, seen, source.read(wide))
        made = convolved(conv, before, wide, strip)
        del before
        if tensor is None:
            tensor = new_map(made, source.height)
        tensor[:, :, strip[0] : strip[1]] = made
        del made
    assert tensor is not None
    return tensor
