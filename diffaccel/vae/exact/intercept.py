"""Where an exact decode takes a VAE over: its `_decode` and `_encode`, for the length of runs and for those runs only.

`decode` and `encode` of diffusers stay as they are, with slicing, offload hooks and the posterior around them. The
stand-ins ask which run the calling thread is in: a plain pipeline that shares the VAE, another thread or a call
outside of any run gets the VAE's own function.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import Lock
from typing import Any, Protocol

from ...core.run import Run, current_run

NAMES = ("_decode", "_encode")
_ABSENT = object()


class Job(Protocol):
    """What a run wants done in the place of a VAE's `_decode` and `_encode`."""

    vae: Any

    def call(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `own(*args, **kwargs)`, made another way or by calling `own`."""


# The job of each run in progress: beside `run.state`, whose values a snapshot copies and puts into another run.
JOBS: weakref.WeakKeyDictionary[Run, Any] = weakref.WeakKeyDictionary()


class Seam:
    """The stand-ins of one VAE, there while any run wants them."""

    def __init__(self, vae: Any) -> None:
        self.vae = weakref.ref(vae)
        self.lock = Lock()
        self.depth = 0
        self.before: dict[str, Any] = {}

    def open(self) -> None:
        """A run begins."""
        with self.lock:
            self.depth += 1
            if self.depth > 1:
                return
            vae = self.vae()
            attributes = vars(vae)
            self.before = {name: attributes.get(name, _ABSENT) for name in NAMES}
            attributes.update({name: _stand_in(self.vae, name, getattr(vae, name)) for name in NAMES})

    def close(self) -> None:
        """A run ended."""
        with self.lock:
            self.depth -= 1
            vae = self.vae()
            if self.depth or vae is None:
                return
            attributes = vars(vae)
            for name, value in self.before.items():
                if value is _ABSENT:
                    del attributes[name]
                else:
                    attributes[name] = value
            self.before = {}


def _stand_in(vae: weakref.ref[Any], name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        job: Job | None = JOBS.get(run) if run is not None else None
        if job is None or job.vae is not vae():
            return own(*args, **kwargs)
        return job.call(name, own, args, kwargs)

    return stand_in


_SEAMS: weakref.WeakKeyDictionary[Any, Seam] = weakref.WeakKeyDictionary()


def seam(vae: Any) -> Seam:
    """The one seam of a VAE."""
    return _SEAMS.setdefault(vae, Seam(vae))
