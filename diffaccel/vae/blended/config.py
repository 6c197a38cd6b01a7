"""Blended VAE tiling: diffusers' own, behind checked sizes, with an undo and a word where it does nothing.

Each tile is decoded by itself and neighbours are blended linearly: less memory, another picture. Statistics that
the decoder takes over the whole picture (group norms, attention) become those of a tile, which shifts its tone.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from ...core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ...core.compat import unwrap_module
from ...core.options import take, whole
from ...core.run import Run
from ...errors import DiffaccelError, IncompatibleError, InvalidOptionError, UnsupportedModelError
from ..exact.causal_cuts import compression_of_time
from ..layout import ENCODE_RAISES, Sizes, Tiling, compression, tiling, untileable
from .decode_watch import DecodeWatch
from .frames import frame_tiling


@dataclass(frozen=True)
class VaeTiling:
    """Decode (and encode) in overlapping, linearly blended tiles.

    A picture not larger than a tile is decoded whole. The tiling is a state of the VAE: a plain pipeline that shares
    the VAE decodes in tiles too; a second accelerated one is refused.

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
        vae = _vae(target.pipe)
        if vae is None:
            return Verdict.no(f"{type(target.pipe).__name__} has no vae")
        why = untileable(vae)
        if why is not None:
            return Verdict.no(f"{type(vae).__name__}: {why}", UnsupportedModelError)
        holder = _holder(vae)
        other = None if holder is None else holder.pipe()
        if other is not None and other is not target.pipe:
            return Verdict.refuse(
                f"the vae ({type(vae).__name__}) is shared with a pipeline that tiles it already: restore that one "
                "first, or leave its tiling to it",
                IncompatibleError,
            )
        try:
            made = self._tiling(vae, holder)
        except InvalidOptionError as error:
            return Verdict.no(f"{type(vae).__name__}: {error}", InvalidOptionError)
        encode = "; to encode a picture larger than a tile raises in diffusers"
        return Verdict.yes(_say(made) + (encode if type(vae).__name__ in ENCODE_RAISES else ""))

    def _tiling(self, vae: Any, holder: _Holder | None) -> Tiling | None:
        own = vars(vae) if holder is None else {**vars(vae), **holder.before}
        made = tiling(own, compression(vae), self.sizes())
        frames = frame_tiling(type(vae).__name__, own, compression_of_time(vae), self.tile_frames, self.stride_frames)
        if made is not None:
            settings = {**made.settings, **frames.settings}
            made = replace(
                made,
                settings=settings,
                notes=(*made.notes, *frames.notes),
                latents=frames.latents,
                along_time=frames.words,
            )
        if made is not None and not hasattr(vae, "tiled_decode"):  # AutoencoderTiny asks for no size
            made = replace(made, always=True)
        return made

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Nothing is promised without a measurement."""
        return {"origin": "unmeasured"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Switch the VAE's tiling on; follow the pipeline when its VAE is replaced."""
        state = _Attached(self, target)
        state.put_on()
        return Edit(
            self.name,
            state.take_off,
            begin_run=state.begin_run,
            end_run=state.end_run,
            relink=state.follow,
            stats=state.stats,
        )


def _vae(pipe: Any) -> Any:
    vae = getattr(pipe, "vae", None)
    return None if vae is None else unwrap_module(vae)


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


@dataclass
class _Holder:
    """Who tiles a VAE, and how its tile attributes were before."""

    pipe: weakref.ref[Any]
    before: dict[str, Any]


_HOLDERS: weakref.WeakKeyDictionary[Any, _Holder] = weakref.WeakKeyDictionary()


def _holder(vae: Any) -> _Holder | None:
    return _HOLDERS.get(vae)


def _is_tile_attribute(name: str) -> bool:
    return name.startswith(("use_tiling", "use_framewise_", "tile_")) or name.endswith("_frames_batch_size")


def _put_back(vae: Any, before: Mapping[str, Any]) -> None:
    attributes = vars(vae)
    for name in [n for n in attributes if _is_tile_attribute(n) and n not in before]:
        del attributes[name]
    attributes.update(before)


class _Attached:
    """One lever on one pipeline's VAE."""

    def __init__(self, lever: VaeTiling, target: Target) -> None:
        self.lever, self.target = lever, target
        self.vae: Any = None  # the one that is tiled
        self.watch: DecodeWatch | None = None
        self.why_not = ""

    def put_on(self) -> None:
        """Tile the pipeline's VAE. Raises with nothing changed where that cannot be."""
        vae = _vae(self.target.pipe)
        left = _holder(vae) if vae is not None else None
        if left is not None and left.pipe() is None:  # a pipeline that went without restore
            _put_back(vae, left.before)
            del _HOLDERS[vae]
        verdict = self.lever.check(self.target)
        if not verdict.ok:
            raise verdict.error(f"{self.lever.name}: {verdict.reason}")
        before = {name: value for name, value in vars(vae).items() if _is_tile_attribute(name)}
        made = self.lever._tiling(vae, None)
        _HOLDERS[vae] = _Holder(weakref.ref(self.target.pipe), before)
        vae.enable_tiling()
        for name, value in (made.settings if made is not None else {}).items():
            setattr(vae, name, value)
        self.vae, self.watch, self.why_not = vae, DecodeWatch(vae, made), ""

    def take_off(self) -> None:
        """Give the VAE back the tiling it came with."""
        if self.vae is None:
            return
        if self.watch is not None:
            self.watch.stop()
        _put_back(self.vae, _HOLDERS.pop(self.vae).before)
        self.vae = self.watch = None

    def follow(self) -> None:
        """Before a run: if the pipeline has another VAE by now, tile that one."""
        if _vae(self.target.pipe) is not self.vae:
            self.take_off()
            try:
                self.put_on()
            except DiffaccelError as error:
                self.why_not = str(error)

    def begin_run(self, run: Run) -> None:
        """Watch the decodes of this run."""
        run.state[self.lever.name] = {"decodes": 0, "tiled": 0}
        if self.watch is not None:
            self.watch.start()

    def end_run(self, run: Run) -> None:
        """Say where tiling did nothing."""
        if self.watch is None:
            run.note(f"{self.lever.name} stood down: {self.why_not}")
            return
        self.watch.stop()
        seen = run.state.get(self.lever.name, {})
        if seen.get("decodes") and not seen["tiled"]:
            run.note(f"{self.lever.name} stood down: {seen['why']}")

    def stats(self, run: Run) -> dict[str, Any]:
        """Decodes of the run, and how many of them were tiled."""
        seen = run.state.get(self.lever.name, {})
        return {key: seen.get(key, 0) for key in ("decodes", "tiled")}
