"""Which sizes of tiles are sound for an autoencoder, whatever it calls them (`models.vae.TILE_ATTRIBUTES`).

diffusers checks none of them; a class that names its tiles in no known way can be tiled with its own sizes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.compat import unwrap_module
from ..errors import InvalidOptionError
from ..models.vae import TILE_ATTRIBUTES, Pair, TileAttributes, vae_card
from .tiles import multiple, nearest_overlap

if TYPE_CHECKING:
    from ..core.protocols import Pipeline

AXES = ("height", "width")

TAKE_BACK = "disable_vae_tiling() and enable it again to take its place"  # the way out, where the user set tiles since


@dataclass(frozen=True)
class Sizes:
    """What the user asked for, in pixels; None leaves it to the autoencoder."""

    tile: tuple[int | None, int | None] = (None, None)  # (height, width)
    stride: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True)
class Tiling:
    """Sound sizes in pixels, (height, width), the attributes that hold them, and what had to be changed."""

    tile: tuple[int, int]
    stride: tuple[int, int]
    ratio: int
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    always: bool = False  # tiles a picture of any size
    latents: int | None = None  # longest video, in latent frames, that is not cut along time; None: none is
    along_time: str = ""  # what to tell of it

    def cuts(self, shape: Sequence[int]) -> bool:
        """Are latents of this shape [..., H, W] (a video: [B, C, T, H, W]) larger than a tile?"""
        height, width = (size // self.ratio for size in self.tile)
        longer = self.latents is not None and len(shape) == 5 and shape[2] > self.latents
        return longer or shape[-2] > height or shape[-1] > width


def vae_of(pipe: Pipeline) -> Any:
    """The pipeline's autoencoder, out of any torch.compile wrapper; None where it has none."""
    vae = getattr(pipe, "vae", None)
    return None if vae is None else unwrap_module(vae)


def untileable(vae: Any) -> str | None:
    """Why this autoencoder cannot be tiled, in words after its class name; None when it can."""
    broken = vae_card(vae).broken
    if broken:
        return broken
    if not hasattr(vae, "enable_tiling") or "use_tiling" not in vars(vae):
        return "it has no tiling in diffusers"
    if not (hasattr(vae, "tiled_decode") or hasattr(vae, "_tiled_decode")):
        return "its enable_tiling has no effect: there is no tiled decoder behind it"
    return None


def compression(vae: Any) -> int:
    """Pixels per latent along one side."""
    for name in ("spatial_compression_ratio", "spatial_scale_factor"):
        value = vars(vae).get(name)
        if isinstance(value, int):
            return value
    levels = getattr(getattr(vae, "config", None), "block_out_channels", None)
    if levels:
        return int(2 ** (len(levels) - 1))
    sample, latent = vars(vae).get("tile_sample_min_size"), vars(vae).get("tile_latent_min_size")
    return max(1, round(sample / latent)) if sample and latent else 8


def compression_of_time(vae: Any) -> int:
    """Frames per latent frame."""
    for name in ("temporal_compression_ratio", "time_compression_ratio"):
        value = vars(vae).get(name)
        if isinstance(value, int):
            return value
    halvings = getattr(vae, "temperal_downsample", None)
    return 2 ** sum(halvings) if halvings is not None else 4


def tiling(attributes: Mapping[str, Any], ratio: int, sizes: Sizes) -> Tiling | None:
    """Sound sizes for an autoencoder with these tile attributes; None where its naming is unknown.

    Given sizes are taken as they are or refused; the autoencoder's own are moved to the nearest sound ones.

    Raises:
        InvalidOptionError: a given size that would return a picture of the wrong size, with the nearest sound ones.
    """
    layout = next((row for row in TILE_ATTRIBUTES if row.matches(attributes)), None)
    if layout is None:
        if sizes != Sizes():
            raise InvalidOptionError("the sizes of its tiles are fixed; call without sizes")
        return None
    notes: list[str] = []
    tile = _tiles(layout, attributes, ratio, sizes, notes)
    if layout.stride is not None:
        stride = _strides(layout.stride, layout, attributes, ratio, sizes, tile, notes)
        settings: dict[str, Any] = dict(zip(layout.stride, stride, strict=True))
    else:
        assert layout.overlap is not None
        factors = _overlaps(layout.overlap, attributes, ratio, sizes, tile, notes)
        stride = _pair(int(t // ratio * (1 - f)) * ratio for t, f in zip(tile, factors, strict=True))
        settings = dict(zip(layout.overlap, factors, strict=True))
    settings |= dict(zip(layout.tile, tile, strict=True))
    latents = zip(layout.latent, tile, strict=True)
    settings |= {name: size // ratio for name, size in latents if name in attributes}
    return Tiling(tile, stride, ratio, settings, tuple(dict.fromkeys(notes)))


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return first, second


def _check(name: str, value: int, ratio: int, most: int | None = None) -> int:
    """`value` itself, if it is a whole number of latents (and at most `most`)."""
    if value % ratio or value < ratio:
        low = multiple(value, ratio)
        raise InvalidOptionError(
            f"{name}={value}: must be a multiple of {ratio} (pixels per latent), e.g. {low} or {low + ratio}; any "
            "other value gives a picture of the wrong size"
        )
    if most is not None and value > most:
        raise InvalidOptionError(f"{name}={value} is more than the tile of {most}: pixels between would be missing")
    return value


def _tiles(
    layout: TileAttributes, attributes: Mapping[str, Any], ratio: int, sizes: Sizes, notes: list[str]
) -> tuple[int, int]:
    given = sizes.tile
    if layout.tile[0] == layout.tile[1]:
        if None not in given and given[0] != given[1]:
            raise InvalidOptionError(
                f"tile_height={given[0]} and tile_width={given[1]}: its tiles are square, give one size"
            )
        given = (given[0] or given[1], given[1] or given[0])
    found = []
    for axis, name, size in zip(AXES, layout.tile, given, strict=True):
        if size is not None:
            found.append(_check(f"tile_{axis}", size, ratio))
            continue
        own = attributes[name]
        own = own[0] if isinstance(own, (list, tuple)) else own
        sound = multiple(own, ratio)
        if sound != own:
            notes.append(f"{name} {own} -> {sound}, a multiple of {ratio}")
        found.append(sound)
    return _pair(found)


def _strides(
    names: Pair,
    layout: TileAttributes,
    attributes: Mapping[str, Any],
    ratio: int,
    sizes: Sizes,
    tile: tuple[int, int],
    notes: list[str],
) -> tuple[int, int]:
    found = []
    for i, axis in enumerate(AXES):
        given = sizes.stride[i]
        if given is not None:
            found.append(_check(f"stride_{axis}", given, ratio, most=tile[i]))
            continue
        own_tile, own = attributes[layout.tile[i]], attributes[names[i]]
        wanted = own if tile[i] == own_tile else own * tile[i] / own_tile  # the same share of overlap
        sound = min(multiple(wanted, ratio), tile[i])
        if sound != wanted and tile[i] == own_tile:
            notes.append(f"{names[i]} {own} -> {sound}, a multiple of {ratio} within the tile")
        found.append(sound)
    return _pair(found)


def _overlaps(
    names: Pair, attributes: Mapping[str, Any], ratio: int, sizes: Sizes, tile: tuple[int, int], notes: list[str]
) -> tuple[float, float]:
    shared = names[0] == names[1]
    given = [
        None if size is None else _check(f"stride_{AXES[i]}", size, ratio, most=tile[i])
        for i, size in enumerate(sizes.stride)
    ]
    wanted = [attributes[n] if s is None else (t - s) / t for n, s, t in zip(names, given, tile, strict=True)]
    if shared:
        asked = {w for w, s in zip(wanted, given, strict=True) if s is not None}
        if len(asked) > 1:
            raise InvalidOptionError(
                f"stride_height={given[0]} and stride_width={given[1]}: it has one overlap for both axes, so the "
                "strides must be the same share of the tile"
            )
        wanted = [*asked, *asked] if asked else wanted
    axes = [(size // ratio, ratio) for size in tile]
    factors = [nearest_overlap(axes if shared else [axes[i]], wanted[i]) for i in range(2)]
    for i, axis in enumerate(AXES):
        sound = int(axes[i][0] * (1 - factors[i])) * ratio
        if given[i] is not None and sound != given[i]:
            raise InvalidOptionError(
                f"stride_{axis}={given[i]} with a tile of {tile[i]} gives a picture of the wrong size; the nearest "
                f"that does not is {sound}"
            )
        if factors[i] != wanted[i] and given[i] is None and not (shared and i):
            notes.append(f"{names[i]} {wanted[i]:g} -> {factors[i]:g}, so that the picture has its size")
    return factors[0], factors[1]
