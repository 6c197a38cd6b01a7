"""Tiles along time: which values are sound for an autoencoder (`models.vae` has the classes).

Four kinds: overlapping, blended tiles behind a switch; batches of frames joined by the convolutions' caches; decoders
that go frame by frame by definition; and those that take all frames at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidOptionError
from ...models.vae import FrameAttributes, VaeCard
from ..tiles import multiple


@dataclass(frozen=True)
class FrameTiling:
    """Sound frames per tile, the attributes that hold them, what to tell, and what had to be changed."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    latents: int | None = None  # longest video that is not cut, in latent frames; None: not cut along time
    words: str = ""
    notes: tuple[str, ...] = ()


def frame_tiling(
    card: VaeCard, attributes: Mapping[str, Any], ratio: int, tile: int | None, stride: int | None
) -> FrameTiling:
    """Sound tiles along time for an autoencoder with these attributes, at `ratio` frames per latent frame.

    With neither size given, the class's own stay as they are, moved to sound ones where its tiles are on.

    Raises:
        InvalidOptionError: a size that cannot act or would give a video of the wrong length.
    """
    layout = card.frames
    given = "tile_frames" if tile is not None else "stride_frames"
    if layout is None:
        if tile is None and stride is None:
            return FrameTiling()
        why = card.whole or "it has no tiles along time in diffusers"
        raise InvalidOptionError(f"{given}={tile if tile is not None else stride}: {why}")
    unit = ratio * layout.multiple
    for label, value in (("tile_frames", tile), ("stride_frames", stride)):
        if value is not None and (value % unit or value < unit):
            low = multiple(value, unit)
            of = f"{layout.multiple} latent frames" if layout.multiple > 1 else "frames per latent frame"
            raise InvalidOptionError(
                f"{label}={value}: must be a multiple of {unit} ({of}), e.g. {low} or {low + unit}"
            )
    if layout.batch is not None:
        return _batches(layout, attributes, ratio, tile, stride)
    return _blended(layout, attributes, ratio, tile, stride)


def _batches(
    layout: FrameAttributes, attributes: Mapping[str, Any], ratio: int, tile: int | None, stride: int | None
) -> FrameTiling:
    assert layout.batch is not None and layout.latent_batch is not None
    if stride is not None and stride != (tile or attributes[layout.batch]):
        raise InvalidOptionError(
            f"stride_frames={stride}: its batches of frames do not overlap (the convolutions hand on their last "
            "frames), so leave it out"
        )
    if tile is None:
        return FrameTiling()
    settings = {layout.batch: tile, layout.latent_batch: tile // ratio}
    return FrameTiling(settings, tile // ratio, f"{tile} frames at a time")


def _blended(
    layout: FrameAttributes, attributes: Mapping[str, Any], ratio: int, tile: int | None, stride: int | None
) -> FrameTiling:
    assert layout.tile is not None and layout.stride is not None
    own_tile, own_stride = attributes[layout.tile], attributes[layout.stride]
    asked = tile is not None or stride is not None
    if not asked and not any(attributes.get(name) for name in layout.switches):
        return FrameTiling()
    sound = multiple(own_tile, ratio) if tile is None else tile
    if stride is None:
        wanted = own_stride if sound == own_tile else own_stride * sound / own_tile  # the same share of overlap
        step = min(multiple(wanted, ratio), sound)
    elif stride > sound:
        raise InvalidOptionError(f"stride_frames={stride} is more than the tile of {sound}: frames would be missing")
    else:
        step = stride
    settings: dict[str, Any] = {layout.tile: sound, layout.stride: step}
    if asked:
        settings |= dict.fromkeys(layout.switches, True)
    notes = tuple(
        f"{name} {own} -> {new}, a multiple of {ratio} within the tile"
        for name, own, new, free in (
            (layout.tile, own_tile, sound, tile is None),
            (layout.stride, own_stride, step, stride is None and sound == own_tile),
        )
        if free and own != new
    )
    return FrameTiling(settings, sound // ratio, f"{sound} frames per tile, one every {step}", notes)
