"""What core and planner ask of the objects of diffusers, as types: a pipeline, its denoisers, its scheduler.

Classes of diffusers have these attributes as they are; nothing here is looked at while a program runs. What has no
type at all (an argument, an output, a component) goes by a name of `compat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .compat import Argument, Component, Output


class Scheduler(Protocol):
    """What steps a pipeline through its noise levels. Everything else a scheduler may have is asked for by name
    (`clock.schedule_of`, `clock.position`), since not every one has it."""

    order: int

    @property
    def config(self) -> Component:
        """Its settings, by key and by attribute."""

    def step(self, *args: Argument, **kwargs: Argument) -> Output:
        """From one noise level to the next."""


class Pipeline(Protocol):
    """A diffusers pipeline. Its denoisers are found by name (`spec.denoisers`), as each class has its own."""

    scheduler: Scheduler

    @property
    def components(self) -> Mapping[str, Component]:
        """Name -> models, scheduler, tokenizers; None where one is not loaded."""

    def __call__(self, *args: Argument, **kwargs: Argument) -> Output:
        """From a prompt to pictures."""


class Context(Protocol):
    """What a pipeline opens with `cache_context`: the guidance branch by name."""

    @property
    def name(self) -> str:
        """ "cond", "uncond" and the like."""


class ProgressBar(Protocol):
    """The bar over the steps, as tqdm has it."""

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> object:
        """Show a text behind the bar."""


class Owner(Protocol):
    """Whom hooks and runs belong to: the handle of an accelerated pipeline."""

    def alive(self) -> bool:
        """Does its pipeline still exist?"""

    def describe(self) -> str:
        """Its pipeline and what is on, for messages."""
