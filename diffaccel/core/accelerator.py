"""What an accelerator is: a frozen config that checks, attaches and returns its own undo."""

from __future__ import annotations

import weakref
from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, cast, runtime_checkable

from ..errors import DiffaccelError, UnsupportedModelError
from .place import LAST, Rank
from .slots import Fidelity as Fidelity
from .slots import Slot as Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..ledger.hardware import Hardware
    from ..models.spec import ModelSpec
    from .protocols import Pipeline
    from .root import RootHook
    from .run import Run


DEVICE = "_diffaccel_device"  # instance attribute of a pipeline whose weights are away: where it computes
PLAIN = "_diffaccel_plain"  # class attribute of an accelerated pipeline's class: the pipeline's own class


@dataclass(frozen=True)
class Verdict:
    """The answer of `check`: yes, or no with a reason, an error class for strict use, and a plan status."""

    ok: bool
    reason: str
    error: type[DiffaccelError] = UnsupportedModelError
    status: str = "skipped"  # status of the plan item when not ok: "skipped" or "refused"
    satisfied: bool = False  # nothing to do because it is so already: no reason to raise, even when strict

    @classmethod
    def yes(cls, reason: str = "") -> Verdict:
        """An item that can act."""
        return cls(True, reason)

    @classmethod
    def no(cls, reason: str, error: type[DiffaccelError] = UnsupportedModelError) -> Verdict:
        """An item that has nothing to act on here (plan status `skipped`)."""
        return cls(False, reason, error)

    @classmethod
    def already(cls, reason: str) -> Verdict:
        """An item that asks for what is there already (plan status `skipped`; fine with `strict`)."""
        return cls(False, reason, satisfied=True)

    @classmethod
    def refuse(cls, reason: str, error: type[DiffaccelError]) -> Verdict:
        """An item that clashes with something present (plan status `refused`)."""
        return cls(False, reason, error, "refused")


class Target:
    """What an accelerator is asked to act on. Refers to the pipeline weakly: hooks on a shared model that outlive
    their pipeline must not keep it alive."""

    __slots__ = ("_pipe", "hardware", "quantized_bytes", "spec")

    def __init__(self, pipe: Pipeline, spec: ModelSpec, hardware: Hardware) -> None:
        self._pipe = cast("Callable[[], Pipeline]", weakref.ref(pipe))
        self.spec, self.hardware = spec, hardware
        # By component, bytes of its weights once the quantization that is wished for is on (the planner says).
        self.quantized_bytes: Mapping[str, int] = {}

    @property
    def pipe(self) -> Pipeline:
        """The pipeline (None once it is gone, which only an undo can meet)."""
        return self._pipe()


@dataclass
class Edit:
    """One attached accelerator: its undo, and what it wants to see of each run.

    `undo` must put everything back, in any state the run was left in, and touch nothing of its neighbours: edits come
    and go in any order. `begin_run` / `end_run` frame a run; `end_run` is called on success, exception and interrupt
    alike and must free all per-run state. `no_undo` is asked before anything is undone, and says why this edit cannot
    be ("": it can). `displaced` says who has taken this edit's place since, in a clause ("": nobody): what a user sets
    last wins, and stays at undo. `on_weights`: it holds what the weights are (their bytes, the classes of their
    layers), so that it is taken off and put on anew around a change of weights below it. `weights`: the components
    whose weights it changed itself.
    """

    name: str
    undo: Callable[[], None]
    begin_run: Callable[[Run], None] | None = None
    end_run: Callable[[Run], None] | None = None
    relink: Callable[[], None] | None = None
    bytes_held: Callable[[Run], int] | None = None
    preemptible: bool = True
    no_undo: Callable[[], str] | None = None
    stats: Callable[[Run], Mapping[str, object]] | None = None
    displaced: Callable[[], str] | None = None
    on_weights: bool = False
    weights: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Site:
    """What the stack offers to `attach`: the root hooks (one per denoiser), and where the edit stands among others.

    Listeners go on with `roots[component].add(listener, rank)`, hooks with `install(module, hook, name, rank=rank)`.
    """

    roots: Mapping[str, RootHook]
    rank: Rank = LAST


class Accelerator(Protocol):
    """The spine of every lever: frozen config -> `check` -> `attach` (returns its undo)."""

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    @property
    def name(self) -> str:
        """Plan item name, `place.METHOD`, e.g. `cache.first_block`."""

    @property
    def fidelity(self) -> Fidelity:
        """What it does to the picture."""

    def check(self, target: Target) -> Verdict:
        """Can this act on the target? Reads only; touches nothing."""

    def predict(self, target: Target) -> Mapping[str, object]:
        """Expected gain with its `origin`: "computed", "measured", "published", or "unmeasured" and nothing else."""

    def attach(self, target: Target, site: Site) -> Edit:
        """Edit the target in place. Raises with nothing changed when it cannot."""


@runtime_checkable
class ChangesWeights(Protocol):
    """An accelerator of slot WEIGHT."""

    def weights(self, target: Target) -> frozenset[str]:
        """The components whose weights it changes when it is attached."""


class Placed(NamedTuple):
    """An accelerator and where its edit stands."""

    rank: Rank
    accelerator: Accelerator
