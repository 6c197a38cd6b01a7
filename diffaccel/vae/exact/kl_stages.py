"""What each stage of an AutoencoderKL's decoder or encoder holds at once, and in which form it is to run.

Plain numbers read off the modules' shapes, no tensors. A stage can run in up to three forms, here from the fastest to
the leanest:

* WHOLE: the module itself on the whole map, as diffusers calls it;
* STRIPS: layer by layer in strips, each layer's output kept whole (in the place of its input where it can be);
* AGAIN: as STRIPS, but what lies between two block outputs (a hidden map, a doubled map) is computed again for every
  strip instead of being kept.

Mode "fast" never computes anything twice; mode "low" takes the form that holds least wherever it decides the peak.
Bytes are those of one picture of a batch (pictures go one by one) and of live tensors; workspace of kernels is not
in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..tiles import halved, tallest

WHOLE, STRIPS, AGAIN = "whole", "strips", "again"
FORMS = {"fast": (WHOLE, STRIPS), "low": (WHOLE, STRIPS, AGAIN)}


@dataclass(frozen=True)
class Stage:
    """One step of the walk.

    Attributes:
        kind: "mid", "resnet", "rise" (upsampler and the resnet behind it), "fall" (downsampler), "lift" (first
            convolution of an encoder) or "tail" (last norm and convolution).
        modules: what runs, in order.
        height, width: of the map that comes out.
        bytes: form -> bytes held at once, what comes in and what goes out included.
        beside: bytes that a plain run holds beside WHOLE: diffusers keeps a block's input until the block is done.
        owners: the blocks whose layers it runs without calling them.
    """

    kind: str
    modules: tuple[Any, ...]
    height: int
    width: int
    bytes: Mapping[str, int]
    beside: int = 0
    owners: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Shape:
    """The measures that bytes follow from: rows per strip, bytes per element."""

    rows: int
    itemsize: int

    def whole(self, channels: int, height: int, width: int) -> int:
        """Bytes of a map."""
        return channels * height * width * self.itemsize

    def strip(self, channels: int, height: int, width: int, halo: int = 2) -> int:
        """Bytes of the tallest strip with its halo rows."""
        return channels * min(tallest(height, self.rows) + halo, height) * width * self.itemsize

    @property
    def rounding(self) -> int:
        """A strip is normalised in float32: strips more, of the map's own type, that this takes for a moment."""
        return 4 // self.itemsize if self.itemsize < 4 else 0


def decoder_stages(decoder: Any, height: int, width: int, shape: Shape) -> list[Stage]:
    """The stages of `Decoder` for latents of `height` x `width`."""
    mid = decoder.conv_in.out_channels
    stages = [Stage("mid", (decoder.conv_in, decoder.mid_block), height, width, _mid(shape, mid, height, width))]
    last: Any = None  # the block before, where its upsampler is still to run
    for block in decoder.up_blocks:
        beside = 0
        for resnet in block.resnets:
            if last is None:
                stage = _resnet(shape, resnet, height, width)
                stages.append(replace(stage, beside=beside, owners=(block,)))
            else:
                height, width = 2 * height, 2 * width
                stage = _rise(shape, last.upsamplers[0], resnet, height, width)
                stages.append(replace(stage, owners=(last, block)))
                last = None
            beside = beside or shape.whole(resnet.conv1.in_channels, height, width)
        last = block if block.upsamplers is not None else None
    stages.append(_tail(shape, decoder, height, width))
    return stages


def encoder_stages(encoder: Any, height: int, width: int, shape: Shape) -> list[Stage]:
    """The stages of `Encoder` for a picture of `height` x `width`."""
    first = encoder.conv_in.out_channels
    stages = [Stage("lift", (encoder.conv_in,), height, width, {WHOLE: shape.whole(first, height, width)})]
    for block in encoder.down_blocks:
        beside = 0
        for resnet in block.resnets:
            stages.append(replace(_resnet(shape, resnet, height, width), beside=beside, owners=(block,)))
            beside = beside or shape.whole(resnet.conv1.in_channels, height, width)
        if block.downsamplers is not None:
            fall = _fall(shape, block.downsamplers[0], height, width)
            stages.append(replace(fall, beside=beside, owners=(block,)))
            height, width = halved(height), halved(width)
    channels = encoder.conv_out.in_channels
    stages.append(Stage("mid", (encoder.mid_block,), height, width, _mid(shape, channels, height, width)))
    stages.append(_tail(shape, encoder, height, width))
    return stages


def choose_forms(stages: list[Stage], mode: str) -> Iterator[tuple[Stage, str, int]]:
    """(stage, form, bytes) for each stage: the fastest form within the peak that the mode cannot avoid."""
    allowed = FORMS[mode]
    within = [{form: size for form, size in stage.bytes.items() if form in allowed} for stage in stages]
    target = max(min(forms.values()) for forms in within)
    for stage, forms in zip(stages, within, strict=True):
        form = next(form for form in allowed if forms.get(form, target + 1) <= target)
        yield stage, form, forms[form]


# ---- bytes of each kind of stage ------------------------------------------------------------------------


def _mid(shape: Shape, channels: int, height: int, width: int) -> dict[str, int]:
    """Around its attention eight maps live at once: residual, normed input, queries, keys, values and their like."""
    return {WHOLE: 8 * shape.whole(channels, height, width)}


def _resnet_whole(come: int, go: int, shortcut: bool) -> int:
    """The module itself: input, normed, activated; at the end both summands, the sum and the scaled sum."""
    return max(3 * come, 2 * come + go, come + (4 if shortcut else 3) * go)


def _resnet(shape: Shape, resnet: Any, height: int, width: int) -> Stage:
    channels, out = resnet.conv1.in_channels, resnet.conv1.out_channels
    shortcut = resnet.conv_shortcut is not None
    come, go = shape.whole(channels, height, width), shape.whole(out, height, width)
    first, second = (shape.strip(c, height, width) for c in (channels, out))
    forward = first * (1 + shape.rounding) + (second if not shape.rounding else 0)
    back = second * (2 + shape.rounding) + (second if shortcut else 0)
    forms = {
        WHOLE: _resnet_whole(come, go, shortcut),
        STRIPS: come + go + max(forward, back),
    }
    if not shortcut:
        taller = shape.strip(channels, height, width, 4)
        forms[AGAIN] = come + (3 + shape.rounding) * taller
    return Stage("resnet", (resnet,), height, width, forms)


def _rise(shape: Shape, upsampler: Any, resnet: Any, height: int, width: int) -> Stage:
    low = shape.whole(upsampler.channels, height // 2, width // 2)
    channels, out = resnet.conv1.in_channels, resnet.conv1.out_channels
    come, go = shape.whole(channels, height, width), shape.whole(out, height, width)
    shortcut = resnet.conv_shortcut is not None
    strip, hidden = shape.strip(channels, height, width, 4), shape.strip(out, height, width)
    kept = _resnet(shape, resnet, height, width).bytes[STRIPS]
    again = max(2 * strip, strip * (2 + shape.rounding), strip + hidden * (3 + shape.rounding))
    forms = {
        WHOLE: max(low + 2 * come, _resnet_whole(come, go, shortcut)),
        STRIPS: max(low + come + 2 * strip, kept),
        AGAIN: low + go + again,
    }
    return Stage("rise", (upsampler, resnet), height, width, forms)


def _fall(shape: Shape, downsampler: Any, height: int, width: int) -> Stage:
    come = shape.whole(downsampler.channels, height, width)
    go = shape.whole(downsampler.out_channels, halved(height), halved(width))
    strip = 2 * shape.strip(downsampler.channels, halved(height), width, 1)
    made = shape.strip(downsampler.out_channels, halved(height), halved(width), 0)
    forms = {WHOLE: 2 * come + go, STRIPS: come + go + strip + made}
    return Stage("fall", (downsampler,), halved(height), halved(width), forms)


def _tail(shape: Shape, coder: Any, height: int, width: int) -> Stage:
    channels, out = coder.conv_out.in_channels, coder.conv_out.out_channels
    come, go = shape.whole(channels, height, width), shape.whole(out, height, width)
    strip = shape.strip(channels, height, width)
    forms = {
        WHOLE: 3 * come + go,
        STRIPS: come + go + strip * (1 + shape.rounding) + shape.strip(out, height, width),
    }
    return Stage("tail", (coder.conv_norm_out, coder.conv_act, coder.conv_out), height, width, forms)
