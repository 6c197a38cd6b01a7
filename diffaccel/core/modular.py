"""Modular pipelines: what they have in another place than the others.

Their loop is a block, so that the progress bar belongs to that block, their arguments are those of their blocks, and
guidance is a component (a guider), which hands out one batch for each condition. While a run lasts, guiders are
watched to name the branch of a denoiser call, and loop blocks to show in their bar what was cached. Instances only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compat import Argument, Component, Forward, Output
    from .protocols import Pipeline
    from .run import Run

IDENTIFIER = "__guidance_identifier__"  # attribute of a guider's batch: "pred_cond", "pred_uncond", "pred_cond_skip"
PREDICTION = "pred_"


def is_modular(pipe: object) -> bool:
    """Is it a modular pipeline of diffusers?"""
    from diffusers import ModularPipeline

    return isinstance(pipe, ModularPipeline)


def call_arguments(pipe: Pipeline) -> dict[str, object]:
    """What a call of this pipeline takes, by name, with the defaults."""
    if is_modular(pipe):
        found: dict[str, object] = {one.name: one.default for one in _blocks(pipe).inputs if one.name}
        return found
    return {name: one.default for name, one in inspect.signature(type(pipe).__call__).parameters.items()}


def guiders(pipe: Pipeline) -> dict[str, Component]:
    """The guiders of a modular pipeline, by name; none in any other."""
    if not is_modular(pipe):
        return {}
    return {name: part for name, part in pipe.components.items() if _guides(part)}


def has_second_branch(pipe: Pipeline) -> bool:
    """Can a call of this pipeline have an unconditional branch?"""
    return bool(guiders(pipe)) or any(name.startswith("negative_prompt") for name in call_arguments(pipe))


def _guides(part: Component) -> bool:
    return all(callable(getattr(part, name, None)) for name in _TAPS)


def _blocks(pipe: Pipeline) -> Component:
    return vars(pipe)["_blocks"]  # `pipe.blocks` is a copy


# ---- watched while a run lasts -------------------------------------------------------------------------


class _Tap:
    """Stands in for a bound method of a guider. Keeps name and signature; a copy of the guider is not watched."""

    def __init__(self, owner: Component, name: str, run: Run | None) -> None:
        self.owner, self.name, self.run = owner, name, run
        self.fn: Forward = getattr(type(owner), name).__get__(owner)
        functools.update_wrapper(self, self.fn)

    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
        return self.fn(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Argument]) -> _Tap:
        return type(self)(memo.get(id(self.owner), self.owner), self.name, None)


class _Batches(_Tap):
    """The guider hands out its batches: which conditions this step has, in the order in which they are run."""

    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
        batches = self.fn(*args, **kwargs)
        if self.run is not None:
            names = [getattr(batch, IDENTIFIER, "") for batch in batches]
            self.run.conditions[id(self.owner)] = [name.removeprefix(PREDICTION) for name in names]
        return batches


class _Begin(_Tap):
    """The guider makes the denoiser ready for one of them."""

    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
        if self.run is not None:
            names, at = self.run.conditions.get(id(self.owner), []), self.owner._count_prepared
            self.run.condition = names[at] if at < len(names) else None
        return self.fn(*args, **kwargs)


class _End(_Tap):
    """That call is over."""

    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
        if self.run is not None:
            self.run.condition = None
        return self.fn(*args, **kwargs)


_TAPS: dict[str, type[_Tap]] = {
    "prepare_inputs": _Batches,
    "prepare_inputs_from_block_state": _Batches,
    "prepare_models": _Begin,
    "cleanup_models": _End,
}


class _Bar(_Tap):
    """A loop block makes its progress bar."""

    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
        bar = self.fn(*args, **kwargs)
        if self.run is not None and not getattr(bar, "disable", True):
            self.run.bar = bar
        return bar


def _loops(block: Component) -> Iterator[Component]:
    """The blocks below this one that have a bar."""
    for inner in (getattr(block, "sub_blocks", None) or {}).values():
        yield from _loops(inner)
    if hasattr(type(block), "progress_bar"):
        yield block


@contextlib.contextmanager
def watched(run: Run) -> Iterator[None]:
    """Guiders and bars of the run's pipeline are watched inside; nothing where it is not modular."""
    pipe = run.pipe
    if not is_modular(pipe):
        yield
        return
    found = guiders(pipe)
    run.guided = bool(found)
    places: list[tuple[Component, str, type[_Tap]]] = [
        (guider, name, tap) for guider in found.values() for name, tap in _TAPS.items()
    ]
    places += [(loop, "progress_bar", _Bar) for loop in _loops(_blocks(pipe))]
    put: list[tuple[dict[str, object], str]] = []
    for owner, name, tap in places:
        own: dict[str, object] = owner.__dict__
        there = own.get(name)
        if there is None or (isinstance(there, _Tap) and there.run is None):  # not the user's, nor of an outer run
            own[name] = tap(owner, name, run)
            put.append((own, name))
    try:
        yield
    finally:
        for own, name in put:
            if isinstance(own.get(name), _Tap):
                del own[name]
