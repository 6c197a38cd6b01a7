"""Exact strips at work on one pipeline's autoencoder: in its runs, and where users call the autoencoder by hand.

`decode` and `encode` of diffusers stay as they are, with slicing, offload hooks and the posterior around them; what
they call inside, `_decode` and `_encode`, is stood in for. Another pipeline that shares the autoencoder gets its own.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from ...core.accelerator import Target
from ...core.method_layers import add_layer
from ...core.run import Run, current_run
from ..callers import called_by_another
from ..layout import TAKE_BACK, vae_of
from .backends import find_backend, itemsize_of
from .budget import Choice, Limits, choose_strips, expected


class Config(Limits, Protocol):
    """What is asked of the lever's config."""

    @property
    def name(self) -> str:
        """The plan item."""

    @property
    def encode(self) -> bool:
        """Also when pictures are encoded?"""


class ExactAttached:
    """One lever on one pipeline's autoencoder."""

    def __init__(self, lever: Config, target: Target) -> None:
        self.lever, self.target = lever, target
        self.vae: Any = None
        self.why_not = ""
        self.tiled = False  # was diffusers' tiling on when we came? Then we stand in for it.
        # Beside `run.state`, whose values a snapshot copies and puts into another run.
        self.works: weakref.WeakKeyDictionary[Run, StripWork] = weakref.WeakKeyDictionary()
        self.undos: list[Callable[[], object]] = []
        self.by_hand = 0

    # ---- on and off ----------------------------------------------------------------------------------------

    def attach(self, vae: Any) -> None:
        """Stand in for the coder methods of this autoencoder."""

        def decode(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._call(False, below, args, kwargs)

        def encode(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._call(True, below, args, kwargs)

        self.vae, self.why_not, self.tiled = vae, "", bool(getattr(vae, "use_tiling", False))
        self.undos = [add_layer(vae, "_decode", decode), add_layer(vae, "_encode", encode)]
        gone = weakref.finalize(self.target.pipe, self.detach)  # without restore: plain again all the same
        gone.atexit = False
        self.undos.append(gone.detach)

    def detach(self) -> None:
        """The autoencoder's own methods again."""
        for undo in self.undos:
            undo()
        self.vae, self.undos = None, []

    def displaced(self) -> str:
        """Was diffusers' tiling switched on since? In a clause; "" where it was not."""
        if self.vae is None or self.tiled or not getattr(self.vae, "use_tiling", False):
            return ""
        return f"the VAE's own tiling was switched on since (vae.enable_tiling()), and decodes; {TAKE_BACK}"

    def follow(self) -> None:
        """Before a run: if the pipeline has another autoencoder by now, go on with that one."""
        vae = vae_of(self.target.pipe)
        if vae is self.vae and vae is not None:
            return
        self.detach()
        backend, why = find_backend(vae) if vae is not None else (None, "the pipeline has no vae any more")
        if backend is None:
            self.why_not = why
        else:
            self.attach(vae)

    # ---- calls ---------------------------------------------------------------------------------------------

    def _call(self, encode: bool, below: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = current_run()
        work = self.works.get(run) if run is not None else self._by_hand()
        if work is None or self.displaced():
            return below(*args, **kwargs)
        return work.call(encode, below, args, kwargs)

    def _by_hand(self) -> StripWork | None:
        """What takes a call that no run of ours surrounds; None where it is another pipeline's."""
        pipe = self.target.pipe
        if vae_of(pipe) is not self.vae or called_by_another(pipe):
            return None
        backend, why = find_backend(self.vae)
        if backend is None:
            self._warn(f"{self.lever.name} stood down: {why}")
            return None
        self.by_hand += 1
        return StripWork(self.lever, backend, self.vae, self._warn)

    def _warn(self, text: str) -> None:
        warnings.warn(f"pipe.vae, called by hand: {text}", stacklevel=2)

    # ---- runs ----------------------------------------------------------------------------------------------

    def begin_run(self, run: Run) -> None:
        """Judge the budget at the size that is asked for, before anything is computed.

        Raises:
            BudgetError: no strips are low enough; names the least possible.
        """
        if self.vae is None:
            run.note(f"{self.lever.name} stood down: {self.why_not}")
            return
        backend, why = find_backend(self.vae)
        if backend is None:
            run.note(f"{self.lever.name} stood down: {why}")
            return
        known = self.lever.max_bytes is not None and run.request is not None
        shape = expected(run.pipe, self.vae, run.request) if known else None
        if shape is not None:
            choose_strips(self.lever, backend, self.vae, shape, itemsize_of(self.vae))
        self.works[run] = StripWork(self.lever, backend, self.vae, run.note)

    def end_run(self, run: Run) -> None:
        """Nothing of the run is kept."""
        self.works.pop(run, None)

    def stats(self, run: Run) -> dict[str, Any]:
        """Counts of the run; `by_hand`, where there were any: calls outside of runs since the lever came on."""
        work = self.works.get(run)
        found = {"decodes": 0, "encodes": 0, "exact": 0} if work is None else work.stats()
        return found | ({"by_hand": self.by_hand} if self.by_hand else {})


class StripWork:
    """Decodes and encodes of one run, or one by hand. `note` takes the reason where one is left to the VAE."""

    def __init__(self, lever: Config, backend: Any, vae: Any, note: Callable[[str], None]) -> None:
        self.lever, self.backend, self.vae, self.note = lever, backend, vae, note
        self.counts = {"decodes": 0, "encodes": 0, "exact": 0}
        self.last: Choice | None = None

    def call(self, encode: bool, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`own(*args, **kwargs)` in strips, or as it is with a note of the reason."""
        self.counts["encodes" if encode else "decodes"] += 1
        method = type(self.vae)._encode if encode else type(self.vae)._decode
        form = inspect.signature(method)
        given = form.bind(self.vae, *args, **kwargs).arguments
        (_, x), *rest = list(given.items())[1:]
        more = {key: value for key, value in rest if key != "return_dict" and value is not None}
        why = self.why_not(x, more, encode)
        if why is not None:
            if why:
                self.note(f"{self.lever.name} stood down: {why}")
            return own(*args, **kwargs)
        choice = choose_strips(self.lever, self.backend, self.vae, tuple(x.shape), x.element_size(), encode=encode)
        work = self.backend.encode if encode else self.backend.decode
        with torch.no_grad():
            made = work(self.vae, x, rows=choice.rows, mode=choice.mode, **more)
        self.counts["exact"] += 1
        self.last = choice
        if encode or "return_dict" not in form.parameters:  # HunyuanVideo-1.5: `decode` wraps what `_decode` returns
            return made
        return _output(made) if given.get("return_dict", True) else (made,)

    def why_not(self, x: torch.Tensor, more: Mapping[str, Any], encode: bool) -> str | None:
        """Why this call is left to the VAE: None where it is not, "" where that was asked for."""
        if encode and not self.lever.encode:
            return ""
        if encode and not getattr(self.backend, "ENCODES", True):
            return f"{type(self.vae).__name__}: encoding in strips is not in this version"
        takes = inspect.signature(self.backend.encode if encode else self.backend.decode).parameters
        anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
        for name in more:
            if name not in takes and not anything:
                return f"the VAE was called with {name}="
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.vae.parameters())):
            return "gradients are wanted, which strips do not keep: call it under torch.no_grad()"
        standing = getattr(self.backend, "standing", None)
        return standing(self.vae, "encoder" if encode else "decoder") if standing is not None else None

    def stats(self) -> dict[str, Any]:
        """Counts, and what the last one was done with."""
        last = self.last
        chosen = {} if last is None else {"mode": last.mode, "rows": last.rows, "predicted_peak_bytes": last.bytes}
        return {**self.counts, **chosen}


def _output(sample: torch.Tensor) -> Any:
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample)
