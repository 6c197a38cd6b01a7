"""Blended VAE tiling: diffusers' own, behind checked sizes, with an undo and a word where it does nothing.

Each tile is decoded by itself and neighbours are blended linearly: less memory, another picture. Statistics that
the decoder takes over the whole picture (group norms, attention) become those of a tile, which shifts its tone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.options import take, whole
from ...errors import IncompatibleError, InvalidOptionError, UnsupportedModelError
from ...models.vae import vae_card
from ..layout import Sizes, Tiling, compression, compression_of_time, tiling, untileable, vae_of
from .attached import Holder, TilingAttached, holder_of
from .frames import frame_tiling

LATE = "diffusers joins decoded tiles one frame late here; they are joined where they belong"


@dataclass(frozen=True)
class VaeTiling:
    """Decode (and encode) in overlapping, linearly blended tiles.

    A picture not larger than a tile is decoded whole. Calls of `pipe.vae` by hand are tiled as well; another pipeline
    that shares the VAE goes on as before, and a second accelerated one is refused.

    Attributes:
        tile_height, tile_width: size of a tile in pixels, multiples of the VAE's compression; None keeps the VAE's.
        stride_height, stride_width: pixels from one tile to the next; None keeps the VAE's share of overlap.
        tile_frames, stride_frames: the same along time, in frames of the video; None leaves time as the VAE has it.
            What cannot act (a VAE that goes frame by frame, or takes all frames at once) is an error.

    Raises:
        InvalidOptionError: a size that is not a whole number above 0.
    """

    tile_height: int | None = None
    tile_width: int | None = None
    stride_height: int | None = None
    stride_width: int | None = None
    tile_frames: int | None = None
    stride_frames: int | None = None

    name: ClassVar[str] = "vae.tiling"
    slot: ClassVar[Slot] = Slot.MODULE
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    def __post_init__(self) -> None:
        for field in fields(self):
            take(self, whole(1, f"a whole number of {_unit(field.name)}").or_none(), field.name)

    def sizes(self) -> Sizes:
        """The sizes asked for, as (height, width) pairs."""
        return Sizes((self.tile_height, self.tile_width), (self.stride_height, self.stride_width))

    def check(self, target: Target) -> Verdict:
        """Needs a VAE that diffusers can tile, sizes that give the right picture, and nobody else at it."""
        vae = vae_of(target.pipe)
        if vae is None:
            return Verdict.no(f"{type(target.pipe).__name__} has no vae")
        why = untileable(vae)
        if why is not None:
            return Verdict.no(f"{type(vae).__name__}: {why}", UnsupportedModelError)
        holder = holder_of(vae)
        other = None if holder is None else holder.pipe()
        if other is not None and other is not target.pipe:
            return Verdict.refuse(
                f"the vae ({type(vae).__name__}) is shared with a pipeline that tiles it already: restore that one "
                "first, or leave its tiling to it",
                IncompatibleError,
            )
        try:
            made = self.tiling(vae, holder)
        except InvalidOptionError as error:
            return Verdict.no(f"{type(vae).__name__}: {error}", InvalidOptionError)
        encode = "; to encode a picture larger than a tile raises in diffusers"
        return Verdict.yes(_say(made) + (encode if vae_card(vae).encode_raises else ""))

    def tiling(self, vae: Any, holder: Holder | None) -> Tiling | None:
        """Sound sizes for a VAE (as it was before `holder` tiled it); None where its tiles cannot be told.

        Raises:
            InvalidOptionError: a size that was asked for is not sound; names the nearest.
        """
        own = vars(vae) if holder is None else {**vars(vae), **holder.before}
        made = tiling(own, compression(vae), self.sizes())
        card = vae_card(vae)
        frames = frame_tiling(card, own, compression_of_time(vae), self.tile_frames, self.stride_frames)
        if made is not None:
            settings = {**made.settings, **frames.settings}
            made = replace(
                made,
                settings=settings,
                notes=(*made.notes, *frames.notes),
                latents=frames.latents,
                along_time=f"{frames.words} ({LATE})" if frames.words and card.joins_late else frames.words,
            )
        if made is not None and not hasattr(vae, "tiled_decode"):  # AutoencoderTiny asks for no size
            made = replace(made, always=True)
        return made

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Nothing is promised without a measurement."""
        return {"origin": "unmeasured"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Switch the VAE's tiling on; follow the pipeline when its VAE is replaced."""
        state = TilingAttached(self, target)
        state.attach()
        return Edit(
            self.name,
            state.detach,
            begin_run=state.begin_run,
            end_run=state.end_run,
            relink=state.follow,
            stats=state.stats,
            displaced=state.displaced,
        )


def _unit(name: str) -> str:
    return "frames" if name.endswith("_frames") else "pixels"


def _say(made: Tiling | None) -> str:
    if made is None:
        return "tiles of the size the VAE came with"
    height, width = made.tile
    moved = "".join(f"; {note}" for note in made.notes)
    floor = "" if made.always else f"; does nothing up to {width}x{height} px"
    time = f"; along time {made.along_time}" if made.along_time else ""
    return f"tiles of {width}x{height} px, one every {made.stride[1]}x{made.stride[0]} px{floor}{time}{moved}"
