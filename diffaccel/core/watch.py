"""`pipe.acceleration.watch`: who is told of every run of one pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import InvalidOptionError
from .compat import unwrap_module

if TYPE_CHECKING:
    import torch

    from .observer import Observer, Progress
    from .run import Run
    from .stack import Stack


class Watch:
    """Who watches. They are told of runs that begin after they came; while there are none, runs cost nothing more."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._observers: tuple[Observer, ...] = ()

    def progress(self, callback: Callable[[Progress], object]) -> Callable[[], None]:
        """Call `callback(progress)` after every step of every run; see `core.observer.Progress`.

        Returns what ends it. What the callback raises ends the run; runs are isolated, and the next one is clean.
        Raises InvalidOptionError where it cannot be called.
        """
        from .observer import ProgressObserver

        if not callable(callback):
            raise InvalidOptionError(f"watch.progress: callback must be a function of one argument, got {callback!r}")
        return self.add(ProgressObserver(callback))

    @contextmanager
    def profiling(self) -> Iterator[None]:
        """Inside, runs have named ranges in torch.profiler's timeline: stage, step, call, block and lever.

        with pipe.acceleration.watch.profiling(), torch.profiler.profile() as profile:
            pipe(...)
        """
        from .profiling import Profiling

        remove = self.add(Profiling(self._stack.roots, self._blocks()))
        try:
            yield
        finally:
            remove()

    def add(self, observer: Observer) -> Callable[[], None]:
        """Tell `observer` of every run to come; returns what ends that (once; later calls do nothing)."""
        self._observers = (*self._observers, observer)

        def remove() -> None:
            self._observers = tuple(one for one in self._observers if one is not observer)

        return remove

    def open(self, run: Run) -> Observer | None:
        """Who is told of this run (None: nobody)."""
        if not self._observers:
            return None
        from .observer import Several

        run.observer = self._observers[0] if len(self._observers) == 1 else Several(self._observers)
        run.observer.begin_run(run)
        return run.observer

    def _blocks(self) -> list[tuple[str, torch.nn.Module]]:
        """The blocks of the denoisers' stacks, by name."""
        found = []
        for component, module in self._stack.modules.items():
            for row in self._stack.target.spec.stack:
                for index, block in enumerate(getattr(unwrap_module(module), row.attribute, ())):
                    found.append((f"{component}.{row.attribute}.{index}", block))
        return found
