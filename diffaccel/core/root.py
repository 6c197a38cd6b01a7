"""The root hook: one per denoiser. It announces every call to the run in progress and to the levers that listen."""

from __future__ import annotations

import weakref
from bisect import insort
from collections.abc import Callable
from threading import RLock, get_ident
from typing import TYPE_CHECKING

import torch

from ..errors import IncompatibleError
from .chain import PREFIX, AroundReference, Hook, install
from .clock import CURRENT
from .compat import REGISTRY, Argument, Output, StateManager, host_edit, unwrap_module
from .listener import Listener
from .place import LAST, Rank

if TYPE_CHECKING:
    from .protocols import Context, Owner

ROOT = PREFIX + "root"


class _ContextProbe(StateManager):
    """Remembers the context a pipeline opened through `cache_context`, per thread; holds no other state."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.by_thread: dict[int, Context] = {}  # pipelines in other threads may share the denoiser

    def set_context(self, context: Context | None) -> None:
        """Diffusers announces the context (None: closed)."""
        if context is None:
            self.by_thread.pop(get_ident(), None)
        else:
            self.by_thread[get_ident()] = context

    def reset(self, *args: object, **kwargs: object) -> None:
        """Diffusers resets caches at the end of a pipeline call."""
        self.by_thread.pop(get_ident(), None)


class RootHook(Hook):
    """One per denoiser: announces every call to the active run and to the levers that asked.

    A lock keeps the calls of one denoiser apart, since a skip is a short-lived edit of the module's chain.
    """

    _is_stateful = True

    def __init__(self, component: str, owner: Owner) -> None:
        super().__init__()
        self.component = component
        self.owner = weakref.ref(owner)
        self.context = _ContextProbe()
        self.lock = RLock()
        self.listeners: tuple[Listener, ...] = ()  # deepest first
        self._ranked: list[tuple[Rank, int, Listener]] = []
        self._count = 0
        self.undo_all: Callable[[], None] = lambda: None

    def add(self, listener: Listener, rank: Rank = LAST) -> Callable[[], None]:
        """Let `listener` see this denoiser's calls. Returns what takes it off again (once; later calls do nothing)."""
        self._count += 1
        row = (rank, self._count, listener)  # of one rank, the first to come is the first to be told
        insort(self._ranked, row, key=lambda other: other[:2])
        self.listeners = tuple(other for _, _, other in self._ranked)

        def remove() -> None:
            if row in self._ranked:
                self._ranked.remove(row)
                self.listeners = tuple(other for _, _, other in self._ranked)

        return remove

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """Diffusers calls this at the end of a pipeline call; our state belongs to the run, not to the hook."""
        self.context.reset()
        return module

    def call(self, ref: AroundReference, *args: Argument, **kwargs: Argument) -> Output:
        """The denoiser's forward, seen by the run of this thread (if any)."""
        run = CURRENT.get()
        with self.lock:
            if run is None or run.owner is not self.owner():
                return ref.body(*args, **kwargs)
            context = self.context.by_thread.get(get_ident())
            call = run.begin_call(self.component, None if context is None else context.name)
            if call.replay is not None:
                return call.replay
            observer = run.observer
            if observer is not None:
                observer.begin_call(call)
            listeners, begun, output = self.listeners, 0, None
            try:
                for listener in listeners:
                    begun += 1
                    listener.begin_call(call, args, kwargs)
                    if call.inputs is not None:
                        args, kwargs = call.inputs
                output = call.output = ref.body(*args, **kwargs) if call.answer is None else call.answer
                if call.finish is not None:
                    output = call.finish(output)
            finally:
                for listener in listeners[:begun]:
                    listener.end_call(call)
                call.inputs = call.answer = call.finish = call.output = None
            run.end_call(call, output)
            if observer is not None:
                observer.end_call(call)
            return output


@host_edit
def install_root(module: torch.nn.Module, component: str, owner: Owner) -> RootHook:
    """Install the root hook of a denoiser for `owner` (an `Acceleration`).

    A hook left behind by a pipeline that was garbage-collected without `restore` is cleared away first;
    a living owner is a refusal.
    """
    registry = getattr(unwrap_module(module), REGISTRY, None)
    other = registry.hooks.get(ROOT) if registry is not None else None
    if other is not None:
        holder = other.owner()
        if holder is not None and holder is not owner and holder.alive():
            raise IncompatibleError(
                f"{component} ({type(unwrap_module(module)).__name__}) is shared with a pipeline that is already "
                f"accelerated ({holder.describe()}). Restore that one first, or accelerate only one of them: the "
                "other runs plain and exact."
            )
        other.undo_all()
    hook = RootHook(component, owner)
    install(module, hook, ROOT).around(hook.call)
    invalidate(module)
    return hook


def invalidate(module: torch.nn.Module) -> None:
    """Make diffusers look again for hooks below `module` (it keeps a list once a cache context was opened)."""
    registry = getattr(unwrap_module(module), REGISTRY, None)
    if registry is not None:
        registry.invalidate_child_registries_cache()
