"""Blended tiles at work on one pipeline's autoencoder: for the pipeline's calls and those by hand, not for others."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol

from ...core.accelerator import Target, Verdict
from ...core.method_layers import add_layer
from ...core.run import Run, current_run
from ...core.state import PerRun
from ...errors import DiffaccelError
from ...models.vae import vae_card
from ..callers import called_by_another
from ..layout import TAKE_BACK, Tiling, vae_of
from .join_frames import decode_in_frame_tiles


class Config(Protocol):
    """What is asked of the lever's config."""

    @property
    def name(self) -> str:
        """The plan item."""

    def check(self, target: Target) -> Verdict:
        """Can it act?"""

    def tiling(self, vae: Any, holder: Holder | None) -> Tiling | None:
        """Sound sizes."""


@dataclass
class Holder:
    """Who tiles an autoencoder, how its tile attributes were before, and what the lever set them to."""

    pipe: weakref.ref[Any]
    before: dict[str, Any]
    set: dict[str, Any]

    def changed(self, vae: Any) -> dict[str, Any]:
        """Tile attributes that somebody has set otherwise since."""
        return {name: value for name, value in _tile_attributes(vae).items() if self.set.get(name, _NOT) != value}

    def without(self, vae: Any) -> dict[str, Any]:
        """The tile attributes as they would be without the lever: those of before, and what was set since."""
        return {**self.before, **self.changed(vae)}


_NOT = object()
_HOLDERS: weakref.WeakKeyDictionary[Any, Holder] = weakref.WeakKeyDictionary()


def holder_of(vae: Any) -> Holder | None:
    """Who tiles this autoencoder now."""
    return _HOLDERS.get(vae)


def _is_tile_attribute(name: str) -> bool:
    return name.startswith(("use_tiling", "use_framewise_", "tile_")) or name.endswith("_frames_batch_size")


def _tile_attributes(vae: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(vae).items() if _is_tile_attribute(name)}


def _put_back(vae: Any, before: Mapping[str, Any]) -> None:
    attributes = vars(vae)
    for name in [n for n in attributes if _is_tile_attribute(n) and n not in before]:
        del attributes[name]
    attributes.update(before)


class TilingAttached:
    """One lever on one pipeline's autoencoder. A lock keeps calls apart, since others' decode with other settings."""

    def __init__(self, lever: Config, target: Target) -> None:
        self.lever, self.target = lever, target
        self.lock = RLock()
        self.vae: Any = None  # the one that is tiled
        self.made: Tiling | None = None
        self.runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self.undos: list[Callable[[], object]] = []
        self.for_others = False  # is a call of another pipeline in progress?
        self.why_not = ""

    # ---- on and off ----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Tile the pipeline's autoencoder. Raises with nothing changed where that cannot be."""
        vae = vae_of(self.target.pipe)
        left = holder_of(vae) if vae is not None else None
        if left is not None and left.pipe() is None:  # a pipeline that went without restore
            _put_back(vae, left.without(vae))
            del _HOLDERS[vae]
        verdict = self.lever.check(self.target)
        if not verdict.ok:
            raise verdict.error(f"{self.lever.name}: {verdict.reason}")
        before = _tile_attributes(vae)
        made = self.lever.tiling(vae, None)
        vae.enable_tiling()
        for name, value in (made.settings if made is not None else {}).items():
            setattr(vae, name, value)
        _HOLDERS[vae] = Holder(weakref.ref(self.target.pipe), before, _tile_attributes(vae))
        self.vae, self.made, self.why_not = vae, made, ""
        self.undos = [add_layer(vae, "decode", self._decode), add_layer(vae, "encode", self._encode)]
        if vae_card(vae).joins_late:
            self.undos.append(add_layer(vae, "_temporal_tiled_decode", self._join))
        gone = weakref.finalize(self.target.pipe, self.detach)  # without restore: plain again all the same
        gone.atexit = False
        self.undos.append(gone.detach)

    def detach(self) -> None:
        """Give the autoencoder back the tiling it came with; what was set by others since stays."""
        if self.vae is None:
            return
        for undo in self.undos:
            undo()
        _put_back(self.vae, _HOLDERS.pop(self.vae).without(self.vae))
        self.vae, self.made, self.undos = None, None, []

    def displaced(self) -> str:
        """What of the tiling was set otherwise since, in a clause; "" where nothing was."""
        holder = None if self.vae is None or self.for_others else holder_of(self.vae)
        changed = {} if holder is None else holder.changed(self.vae)
        if not changed:
            return ""
        if not getattr(self.vae, "use_tiling", True):
            return f"the VAE's tiling was switched off since (vae.disable_tiling()); {TAKE_BACK}"
        return f"the VAE was given other tiles since ({', '.join(sorted(changed))}), and goes by these; {TAKE_BACK}"

    def follow(self) -> None:
        """Before a run: if the pipeline has another autoencoder by now, tile that one."""
        if vae_of(self.target.pipe) is not self.vae:
            self.detach()
            try:
                self.attach()
            except DiffaccelError as error:
                self.why_not = str(error)

    # ---- calls ---------------------------------------------------------------------------------------------

    def _decode(self, below: Callable[..., Any], z: Any, *args: Any, **kwargs: Any) -> Any:
        with self._settings():
            if not self.for_others:
                self._count(z)
            return below(z, *args, **kwargs)

    def _encode(self, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._settings():
            return below(*args, **kwargs)

    def _join(self, below: Callable[..., Any], z: Any, *args: Any, **kwargs: Any) -> Any:
        return below(z, *args, **kwargs) if self.for_others else decode_in_frame_tiles(self.vae, z, *args, **kwargs)

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """The tiles, for this pipeline and for calls by hand; for another pipeline the settings of before."""
        run = current_run()
        others = run not in self.runs if run is not None else called_by_another(self.target.pipe)
        with self.lock:
            outer, self.for_others = self.for_others, others
            ours = _tile_attributes(self.vae)
            if others:
                _put_back(self.vae, _HOLDERS[self.vae].without(self.vae))
            try:
                yield
            finally:
                self.for_others = outer
                if others:
                    _put_back(self.vae, ours)

    # ---- runs ----------------------------------------------------------------------------------------------

    def begin_run(self, run: Run) -> None:
        """Watch the decodes of this run."""
        run.state[self.lever.name] = PerRun(decodes=0, tiled=0)
        self.runs.add(run)

    def end_run(self, run: Run) -> None:
        """Say where tiling did nothing."""
        self.runs.discard(run)
        if self.vae is None:
            run.note(f"{self.lever.name} stood down: {self.why_not}")
            return
        seen = run.state.get(self.lever.name, PerRun())
        if seen.get("decodes") and not seen["tiled"]:
            run.note(f"{self.lever.name} stood down: {seen['why']}")

    def stats(self, run: Run) -> dict[str, Any]:
        """Decodes of the run, and how many of them were tiled."""
        seen = run.state.get(self.lever.name, PerRun())
        return {key: seen.get(key, 0) for key in ("decodes", "tiled")}

    def _count(self, z: Any) -> None:
        """A decode of latents `z` [..., H, W] begins: was it larger than a tile?"""
        run = current_run()
        seen = run.state.get(self.lever.name) if run is not None else None
        if seen is None:
            return
        seen["decodes"] += 1
        made = self.made
        if not getattr(self.vae, "use_tiling", True):
            seen["why"] = self.displaced()
            return
        if made is None or made.always or made.cuts(z.shape):
            seen["tiled"] += 1
            return
        ratio, (tile_height, tile_width), (height, width) = made.ratio, made.tile, z.shape[-2:]
        seen["why"] = (
            f"{width * ratio}x{height * ratio} px is not larger than a tile of {tile_width}x{tile_height} px, so the "
            "picture was decoded whole"
        )
