"""The only thing that edits a pipeline: accelerators in slot order, all or nothing, each put in or taken out alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import IncompatibleError
from .accelerator import ChangesWeights, Edit, Placed, Site, Target
from .chain import Link
from .compat import host_edit, unwrap_module
from .root import RootHook, install_root, invalidate

if TYPE_CHECKING:
    from ..models.spec import ModelSpec
    from .protocols import Owner


class Stack:
    """The edits that are in force on one pipeline, deepest first. The root hooks live as long as it is attached."""

    def __init__(self, target: Target, owner: Owner) -> None:
        self.target, self.owner = target, owner
        self.attached = False
        self.modules: dict[str, torch.nn.Module] = {}  # the denoisers, by component
        self.roots: dict[str, RootHook] = {}
        self._rows: list[tuple[Placed, Edit]] = []

    @property
    def edits(self) -> list[Edit]:
        """In slot order."""
        return [edit for _, edit in self._rows]

    @property
    def placed(self) -> list[Placed]:
        """What the edits are of, in slot order."""
        return [placed for placed, _ in self._rows]

    # ---- from one set of levers to another -------------------------------------------------------------

    @host_edit
    def put(self, target: Target, wanted: Sequence[Placed]) -> list[str]:
        """Make `wanted` what is on. Returns remarks for the plan.

        Edits whose accelerator stays as it is (equal config, equal place) are left alone, wherever they stand, unless
        they lie on weights that change. Where the model or the machine is another one, all is put on anew. On an error
        what was on before is on again, and the error raised.
        """
        if self.attached and self._same(target):
            return self._change(target, wanted)
        old, before = (self.target, self.placed) if self.attached else (None, [])
        if old is not None:
            self.undo()
        try:
            self._open(target)
            return self._change(target, wanted)
        except BaseException:
            if self.attached:
                self.undo()
            if old is not None:
                self._open(old)
                self._change(old, before)
            raise

    def _same(self, target: Target) -> bool:
        return self.fits(target.spec) and self.target.hardware == target.hardware

    def _open(self, target: Target) -> None:
        """A root hook on every denoiser."""
        self.target, self.attached = target, True
        try:
            for component in target.spec.denoisers:
                module = getattr(target.pipe, component, None)
                if module is not None:
                    self.modules[component] = module
                    root = self.roots[component] = install_root(module, component, self.owner)
                    root.undo_all = self._leave
        except BaseException:
            self.undo()
            raise

    def _change(self, target: Target, wanted: Sequence[Placed]) -> list[str]:
        go = [row for row in self._rows if row[0] not in wanted]
        come = [placed for placed in wanted if all(placed != row[0] for row in self._rows)]
        self._require_undo(edit for _, edit in go)
        weights, lowest = _changed_weights(target, go, come)
        over = [row for row in self._rows if row not in go and row[1].on_weights and row[0].rank > lowest and weights]
        self._require_undo(edit for _, edit in over)
        before, self.target = list(self._rows), target
        try:
            for row in sorted((*go, *over), key=lambda row: row[0].rank, reverse=True):
                self._take_out(row)
            for placed in sorted((*come, *(row[0] for row in over)), key=lambda placed: placed.rank):
                self._put_in(target, placed)
        except BaseException:
            self._back(before)
            raise
        for module in self.modules.values():
            invalidate(module)
        names = ", ".join(sorted(weights))
        return [f"{edit.name}: put on anew, as the weights of {names} changed" for _, edit in over]

    def _put_in(self, target: Target, placed: Placed) -> None:
        edit = placed.accelerator.attach(target, Site(self.roots, placed.rank))
        self._rows.append((placed, edit))
        self._rows.sort(key=lambda row: row[0].rank)

    def _take_out(self, row: tuple[Placed, Edit]) -> None:
        self._rows.remove(row)
        row[1].undo()

    def _back(self, before: list[tuple[Placed, Edit]]) -> None:
        """Something could not be put on: take out what has come since `before`, put in again what has gone."""
        lost = [row for row in before if row not in self._rows]
        with contextlib.ExitStack() as undos:
            for row in [row for row in self._rows if row not in before]:
                undos.callback(self._take_out, row)
        for placed, _ in lost:
            self._put_in(self.target, placed)

    @staticmethod
    def _require_undo(edits: Iterable[Edit]) -> None:
        why = {edit.name: edit.no_undo() for edit in edits if edit.no_undo is not None}
        fixed = {name: reason for name, reason in why.items() if reason}
        if fixed:
            raise IncompatibleError("; ".join(f"{name} cannot be undone: {reason}" for name, reason in fixed.items()))

    # ---- off -------------------------------------------------------------------------------------------

    @host_edit
    def undo(self, orphaned: bool = False) -> None:
        """Undo every edit, last first; each is tried even if another fails, and a failure is raised.

        An edit that cannot be undone is a refusal, with nothing changed; where the pipeline is gone (`orphaned`) it
        just stays.
        """
        edits = self.edits
        if not orphaned:
            self._require_undo(edits)
        with contextlib.ExitStack() as undos:
            for link in self._links():
                undos.callback(link.remove)
            for edit in edits:
                if not (orphaned and edit.no_undo is not None and edit.no_undo()):
                    undos.callback(edit.undo)
        for module in self.modules.values():
            invalidate(module)
        self._rows, self.roots, self.modules, self.attached = [], {}, {}, False

    def _leave(self) -> None:
        """Undo what can be: the pipeline went without `restore`."""
        self.undo(orphaned=True)

    def _links(self) -> list[Link]:
        return [root.link for root in self.roots.values() if root.link is not None]

    # ---- between runs ----------------------------------------------------------------------------------

    def current(self) -> bool:
        """Are the pipeline's denoisers still the ones the edits are on?"""
        pipe = self.target.pipe
        return all(getattr(pipe, name, None) is module for name, module in self.modules.items()) and all(
            getattr(pipe, name, None) is None or name in self.modules for name in self.target.spec.denoisers
        )

    def displaced(self) -> dict[str, str]:
        """By edit that something else has taken the place of since: what."""
        asked = {edit.name: edit.displaced() for edit in self.edits if edit.displaced is not None}
        return {name: why for name, why in asked.items() if why}

    def fits(self, spec: ModelSpec) -> bool:
        """Are the edits on these denoisers, and made for this model?"""
        return self.attached and self.current() and self.target.spec == spec

    @host_edit
    def relink(self) -> None:
        """Put back hooks that another library dropped since the last run (innermost first)."""
        for link in self._links():
            link.relink()
        for edit in self.edits:
            if edit.relink is not None:
                edit.relink()


def _changed_weights(
    target: Target, go: Sequence[tuple[Placed, Edit]], come: Sequence[Placed]
) -> tuple[frozenset[str], tuple[int, ...]]:
    """(components whose weights are going to change, the place of the deepest edit that changes them)."""
    rows = [(placed.rank, edit.weights) for placed, edit in go]
    for placed in come:
        if isinstance(placed.accelerator, ChangesWeights):
            rows.append((placed.rank, placed.accelerator.weights(target)))
    rows = [row for row in rows if row[1]]
    return frozenset().union(*(weights for _, weights in rows)), min((rank for rank, _ in rows), default=())


def weights_on_meta(module: torch.nn.Module) -> tuple[int, int]:
    """(parameters on the meta device without an offload hook to fill them, all parameters)."""
    total = missing = 0
    for child in unwrap_module(module).modules():
        offloaded = hasattr(child, "_hf_hook")
        for parameter in child.parameters(recurse=False):
            total += 1
            missing += parameter.device.type == "meta" and not offloaded
    return missing, total
