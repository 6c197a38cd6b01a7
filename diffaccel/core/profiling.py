"""Ranges in torch.profiler's timeline: stage, step, call, block and lever, by name.

`diffaccel.encode`, `diffaccel.denoise`, `diffaccel.decode`; in the second `diffaccel.step 3`; in it
`diffaccel.call transformer cond`, in that one range per block (`diffaccel.block transformer_blocks.0`) and one per
lever that decides (`diffaccel.lever cache.first_block`). A call that a lever answered has `diffaccel.reused NAME` in
it. Ranges are opened by PyTorch's fast record functions, which cost next to nothing while no profiler runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .chain import compiled_body
from .compat import record_range
from .listener import Listener
from .observer import Observer

if TYPE_CHECKING:
    from .compat import Args, Argument, Kwargs, Output, Range
    from .root import RootHook
    from .run import Call, Run

PREFIX = "diffaccel."


def named(text: str) -> Range:
    """An open range."""
    opened = record_range(PREFIX + text)
    opened.__enter__()
    return opened


class TimedListener(Listener):
    """A lever's listener, in a range."""

    def __init__(self, inner: Listener, name: str) -> None:
        self.inner, self.name = inner, f"lever {name}"
        self.rewrites = inner.rewrites

    @property
    def deciding(self) -> bool:  # type: ignore[override]
        """As the listener inside says."""
        return self.inner.deciding

    def begin_call(self, call: Call, args: Args, kwargs: Kwargs) -> None:
        """In a range."""
        opened = named(self.name)
        try:
            self.inner.begin_call(call, args, kwargs)
        finally:
            opened.__exit__(None, None, None)

    def end_call(self, call: Call) -> None:
        """In a range."""
        opened = named(self.name)
        try:
            self.inner.end_call(call)
        finally:
            opened.__exit__(None, None, None)

    def will_compute(self, run: Run, step: int, component: str, branch: str) -> bool | None:
        """As the listener inside says."""
        return self.inner.will_compute(run, step, component, branch)


def lever_name(listener: Listener) -> str:
    """The plan item that a listener belongs to, or its room and class."""
    for owner in (listener, getattr(listener, "lever", None), getattr(listener, "engine", None)):
        name = owner if isinstance(owner, str) else getattr(owner, "name", None)
        if isinstance(name, str):
            return name
    return f"{type(listener).__module__.split('.')[1]}.{type(listener).__name__.lstrip('_')}"


class Profiling(Observer):
    """Opens and closes the ranges of one run at a time. `blocks`: by name within the denoiser."""

    def __init__(self, roots: Mapping[str, RootHook], blocks: Sequence[tuple[str, torch.nn.Module]]) -> None:
        self.roots, self.blocks = roots, blocks
        self.depth = 0
        self.stage: Range | None = None
        self.step: Range | None = None
        self.call: Range | None = None
        self.removers: list[Callable[[], None]] = []
        self.listeners: dict[str, tuple[Listener, ...]] = {}

    def begin_run(self, run: Run) -> None:
        """The stage "encode" begins; blocks and levers are watched. A run inside another stays within its range."""
        self.depth += 1
        if self.depth > 1:
            return
        self.stage = named("encode")
        for name, block in self.blocks:
            if compiled_body(block) is None:  # in a graph it would break that
                self._watch(f"block {name}", block)
        for component, root in self.roots.items():
            self.listeners[component] = root.listeners
            root.listeners = tuple(TimedListener(one, lever_name(one)) for one in root.listeners)

    def _watch(self, name: str, block: torch.nn.Module) -> None:
        """Put a range around its forward for this run. (Hooks of torch would cost five Python calls each time.)"""
        plain, own, title = block.forward, vars(block).get("forward"), PREFIX + name

        @functools.wraps(plain)
        def forward(*args: Argument, **kwargs: Argument) -> Output:
            opened = record_range(title)
            opened.__enter__()
            try:
                return plain(*args, **kwargs)
            finally:
                opened.__exit__(None, None, None)

        def undo() -> None:
            if vars(block).get("forward") is not forward:
                return  # somebody has come in between, and holds it
            if own is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = own

        vars(block)["forward"] = forward
        self.removers.append(undo)

    def begin_call(self, call: Call) -> None:
        """With the first one the stage "denoise" begins, with the first of a step that step."""
        if self.depth > 1:
            return
        if self.step is None:
            if call.run.ticks == 0:
                self._next_stage("denoise")
            self.step = named(f"step {call.step}")
        self.call = named(f"call {call.component} {call.branch}")

    def end_call(self, call: Call) -> None:
        """Who answered is said by an empty range."""
        if self.depth > 1:
            return
        if not call.computed:
            named(f"reused {call.by or 'a lever'}").__exit__(None, None, None)
        if self.call is not None:
            self.call.__exit__(None, None, None)
        self.call = None

    def end_step(self, run: Run) -> None:
        """With the last one the stage "decode" begins."""
        if self.depth > 1:
            return
        if self.step is not None:
            self.step.__exit__(None, None, None)
        self.step = None
        if run.total is not None and run.step >= run.total:
            self._next_stage("decode")

    def end_run(self, run: Run) -> None:
        """Close what is open, also after an exception; look no more."""
        self.depth -= 1
        if self.depth:
            return
        for opened in (self.call, self.step, self.stage):
            _close(opened)
        self.call = self.step = self.stage = None
        while self.removers:
            self.removers.pop()()
        for component, listeners in self.listeners.items():
            self.roots[component].listeners = listeners
        self.listeners.clear()

    def _next_stage(self, name: str) -> None:
        _close(self.stage)
        self.stage = named(name)


def _close(opened: Range | None) -> None:
    if opened is not None:
        opened.__exit__(None, None, None)
