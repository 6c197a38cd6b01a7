"""The engine of stage offload on one pipeline: sees components being called, and lets them take turns."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...core.accelerator import DEVICE, Target, Verdict
from ...core.chain import Hook, Link, install
from ...core.compat import foreign_offload, is_fake, unwrap_module
from ...core.holders import Holders
from ...core.hooked_forward import LoadHook
from ...core.method_layers import add_layer
from ...core.place import LAST, Rank
from ...core.run import Run, current_run
from ...core.state import PerRun
from ...errors import DiffaccelError
from ..components import component_groups, component_sizes, is_text_encoder, modules_of
from ..host_memory import trim_heap
from ..store import DiskStore, HostStore
from .embeddings import FileStore, MemoryStore
from .peak import MOMENTS, Component, Peak, Placement
from .residency import Group, Moved, Residency, indexed
from .text_cache import TextCache

if TYPE_CHECKING:
    from ...core.protocols import Pipeline

HOOK = "offload.stage"
# Methods by which pipelines call components other than as a whole. What is called by none of these (a submodule,
# say) is seen by the modules inside, which bring their component in as well.
METHODS = ("encode", "decode", "generate", "get_text_features", "get_image_features")
# A StageAttached lives as long as the hooks that call it; held here, it would keep its modules alive.
_HOLDERS: Holders[StageAttached] = Holders()


def _attached_to(module: torch.nn.Module) -> StageAttached | None:
    return _HOLDERS.of(unwrap_module(module))


def holder(pipe: Pipeline, keep: Collection[str]) -> str | None:
    """The first component (but for the kept ones) that another living pipeline offloads, or None."""
    for name, module in modules_of(pipe):
        if name in keep:
            continue
        owner = _attached_to(module)
        other = None if owner is None else owner.target.pipe
        if other is not None and other is not pipe:
            return name
    return None


def attached(pipe: Pipeline) -> bool:
    """Are components of this pipeline offloaded by stages now?"""
    found = [_attached_to(module) for _, module in modules_of(pipe)]
    return any(owner is not None and owner.target.pipe is pipe for owner in found)


class Config(Protocol):
    """What is asked of the lever's config."""

    @property
    def name(self) -> str:
        """The plan item."""

    @property
    def keep(self) -> tuple[str, ...]:
        """Components that stay."""

    @property
    def folder(self) -> str | None:
        """Where files go."""

    @property
    def pin(self) -> bool:
        """Lock host memory?"""

    @property
    def text_cache_bytes(self) -> int:
        """Host memory for outputs of text encoders."""

    @property
    def text_store(self) -> str | None:
        """A folder in which these outlive the process."""

    def check(self, target: Target) -> Verdict:
        """Can it act?"""

    def compute_device(self, pipe: Pipeline) -> torch.device:
        """Where components work."""

    def place(self, found: list[Component], compute: str) -> tuple[Placement, Peak]:
        """Where the weights go."""


@dataclass
class StageRecord:
    """What one run saw: costs per moment, and who was called in which loop."""

    moved: dict[str, Moved] = field(default_factory=lambda: {moment: Moved() for moment in MOMENTS})
    peaks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MOMENTS, 0))
    moment: str = "encode"
    loop: int = 0
    order: list[Group] = field(default_factory=list)  # called in this loop since it began, each once in a row
    text: tuple[int, int] = (0, 0)  # hits and misses of the text cache before this run

    def note(self, group: Group, run: Run) -> list[Group]:
        """A group is called; returns those that turn out to work between the calls of a denoiser."""
        if run.loop != self.loop:
            self.loop, self.order = run.loop, []
        if group.stage == "denoise":
            self.moment = "denoise"
        elif self.moment == "denoise":
            self.moment = "decode"
        if self.order and self.order[-1] is group:
            return []
        back = self.order.index(group) if group.stage == "denoise" and group in self.order else None
        between = [] if back is None else self.order[back + 1 :]
        self.order.append(group)
        return list(dict.fromkeys(between))


class StageAttached:
    """One lever on one pipeline. A lock keeps calls of its components apart: they take turns."""

    def __init__(self, lever: Config, target: Target, rank: Rank = LAST) -> None:
        self.lever, self.target, self.rank = lever, target, rank
        self.lock = RLock()
        self.depth = 0  # runs in progress
        self.in_turn = False
        self.residency: Residency | None = None
        self.modules: dict[str, torch.nn.Module] = {}  # as they were when it was put on
        self.undos: list[Callable[[], None]] = []
        self.links: list[Link] = []
        self.cache = TextCache(MemoryStore(lever.text_cache_bytes), None)
        self.why_not = ""

    # ---- on and off ------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Evict every component and watch for calls. Raises with nothing changed where that cannot be."""
        lever, pipe = self.lever, self.target.pipe
        for _, module in modules_of(pipe):
            left = _attached_to(module)
            if left is not None and left.target.pipe is None:
                left.detach()  # of a pipeline that went without restore
        verdict = lever.check(self.target)
        if not verdict.ok:
            raise verdict.error(f"{lever.name}: {verdict.reason}")
        if lever.text_store is not None:
            self.cache = TextCache(self.cache.memory, FileStore(lever.text_store))
        device = indexed(lever.compute_device(pipe))
        placement, _ = lever.place(
            component_sizes(pipe, self.target.spec, lever.keep, self.target.quantized_bytes), device.type
        )
        store = (
            DiskStore(lever.folder) if placement.store == "disk" else HostStore(lever.pin and device.type == "cuda")
        )
        self.in_turn = placement.in_turn
        self.residency = Residency(component_groups(pipe, self.target.spec, lever.keep), store, device)
        self.modules = dict(modules_of(pipe))
        try:
            for group in self.residency.groups:
                self._watch(group, pipe)
            vars(pipe)[DEVICE] = device
            for group in self.residency.groups:
                for name in group.names if lever.text_store is not None else ():
                    if is_text_encoder(name):
                        self.cache.learn(name, group, unwrap_module(self.modules[name]))
                self.residency.evict(group)
            trim_heap()
        except BaseException:
            self.detach()
            raise
        self.why_not = ""

    def detach(self) -> None:
        """Everything back where it was, files gone."""
        residency, self.residency = self.residency, None
        if residency is None:
            return
        for undo in reversed(self.undos):
            undo()
        self.undos.clear()
        self.links.clear()
        pipe = self.target.pipe
        if pipe is not None:
            vars(pipe).pop(DEVICE, None)
        with contextlib.ExitStack() as last:  # one that fails keeps no other evicted
            last.callback(residency.store.close)
            for group in residency.groups:
                last.callback(residency.give_back, group)
        self.cache.memory.clear()
        self.modules = {}

    def _watch(self, group: Group, pipe: Pipeline) -> None:
        for name in group.names:
            component = getattr(pipe, name)
            module = unwrap_module(component)
            link = install(component, Hook(), HOOK, rank=self.rank)
            link.around(functools.partial(self._forward, group, name, module))
            self.links.append(link)
            self.undos.append(link.remove)
            _HOLDERS.take(module, self)
            self.undos.append(functools.partial(_HOLDERS.release, module))
            for method in METHODS if group.stage != "denoise" else ():
                if callable(getattr(type(module), method, None)):
                    self.undos.append(self._wrap(group, module, method))
            if group.stage != "denoise":
                self._watch_modules(group, module)

    def _watch_modules(self, group: Group, module: torch.nn.Module) -> None:
        def load(args: tuple[Any, ...]) -> None:
            if not group.resident and not any(map(is_fake, args)):  # shapes alone need no weights
                with self.lock:
                    self._enter(group)

        for child in module.modules():
            if child is not module and (child._parameters or child._buffers):
                self.undos.append(child.register_forward_pre_hook(LoadHook(load)).remove)

    def _wrap(self, group: Group, module: torch.nn.Module, method: str) -> Callable[[], None]:
        def resident(below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._call(group, functools.partial(below, *args, **kwargs))

        return add_layer(module, method, resident)

    # ---- calls -----------------------------------------------------------------------------------------

    def _forward(self, group: Group, name: str, module: torch.nn.Module, ref: Any, *args: Any, **kwargs: Any) -> Any:
        compute = functools.partial(self._call, group, functools.partial(ref.body, *args, **kwargs))
        residency = self.residency
        if residency is None or not is_text_encoder(name) or not self._keeps_text:
            return compute()
        with self.lock:
            residency.see_changes(group, deeply=not group.resident)
            return self.cache.answer(name, group, module, residency.device, args, kwargs, compute)

    @property
    def _keeps_text(self) -> bool:
        return self.lever.text_cache_bytes > 0 or self.cache.files is not None

    def _call(self, group: Group, compute: Callable[[], Any]) -> Any:
        if self.residency is None:
            return compute()
        with self.lock:
            self._enter(group)
            group.busy += 1
            try:
                return compute()
            finally:
                group.busy -= 1
                if not self.depth and self.residency is not None:
                    self._evict_all()

    def _enter(self, group: Group) -> None:
        """Load a group, after evicting those that do not belong beside it."""
        residency = self.residency
        if residency is None:
            return
        run = current_run()
        seen = None if run is None else run.state.get(self.lever.name, PerRun()).get("seen")
        moved = Moved()
        if seen is not None and run is not None:
            for other in seen.note(group, run):
                if other.stage != "denoise" or other.alternates:
                    other.stage, other.alternates = "denoise", False
                    run.note(
                        f"{self.lever.name}: {other.name} is called between denoiser calls, so it stays in with it"
                    )
        if not group.resident:
            for other in residency.groups:
                if other.resident and not other.busy and self._apart(other, group):
                    moved.add(residency.evict(other))
            moved.add(residency.load(group))
        if seen is not None:
            seen.moved[seen.moment].add(moved)
            seen.peaks[seen.moment] = max(seen.peaks[seen.moment], residency.resident_bytes)

    def _apart(self, other: Group, group: Group) -> bool:
        """Must `other` leave when `group` comes in?"""
        if other.stage != group.stage:
            return True
        if group.stage == "denoise":
            return other.alternates and group.alternates
        return self.in_turn

    def _evict_all(self) -> Moved:
        moved = Moved()
        assert self.residency is not None
        for group in self.residency.groups:
            if not group.busy and not self.residency.is_evicted(group):
                moved.add(self.residency.evict(group))
        return moved

    # ---- runs ------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Before a run: another component, another library's offload, a pipeline that was moved."""
        pipe = self.target.pipe
        now = dict(modules_of(pipe))
        foreign = next((why for module in now.values() if (why := foreign_offload(module)) is not None), None)
        if self.residency is not None and (foreign is not None or now != self.modules):
            self.detach()
        if foreign is not None:
            self.why_not = f"the pipeline is moved by {foreign}"
            return
        if self.residency is None:
            try:
                self.attach()
            except DiffaccelError as error:
                self.why_not = str(error)
            return
        for link in self.links:
            link.relink()
        moved_to = vars(pipe).get(DEVICE)
        foreign_device = self.residency.foreign_device()
        if foreign_device is not None:
            moved_to = vars(pipe)[DEVICE] = foreign_device
        if moved_to is not None:
            self.residency.device = vars(pipe)[DEVICE] = indexed(moved_to)

    def begin_run(self, run: Run) -> None:
        """Evict what was loaded, replaced or moved since the last run."""
        run.state[self.lever.name] = PerRun(seen=StageRecord(text=(self.cache.hits, self.cache.misses)))
        self.depth += 1
        if self.depth == 1 and self.residency is not None:
            with self.lock:
                self._evict_all()

    def end_run(self, run: Run) -> None:
        """Everything is evicted, however the run ended."""
        if self.lever.name not in run.state:
            return
        self.depth -= 1
        if self.residency is None:
            run.note(f"{self.lever.name} stood down: {self.why_not}")
        elif not self.depth:
            try:
                with self.lock:
                    self._evict_all()
            except DiffaccelError as error:  # weights that changed and find no room: they stay in memory
                run.note(f"{self.lever.name}: {error}")

    def stats(self, run: Run) -> dict[str, Any]:
        """Per moment: bytes brought in and written, seconds waited, the most weight bytes in; and the text cache."""
        seen = run.state.get(self.lever.name, PerRun()).get("seen")
        if seen is None:
            return {}
        found: dict[str, Any] = {}
        for moment in MOMENTS:
            moved = seen.moved[moment]
            found |= {f"{moment}_in_bytes": moved.in_bytes, f"{moment}_written_bytes": moved.out_bytes}
            found |= {f"{moment}_wait_s": round(moved.wait_s, 4), f"{moment}_peak_bytes": seen.peaks[moment]}
        hits, misses = self.cache.hits - seen.text[0], self.cache.misses - seen.text[1]
        return {**found, "text_hits": hits, "text_misses": misses, "text_bytes": self.cache.memory.size_bytes}
