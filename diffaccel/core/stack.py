"""The only thing that edits a pipeline: accelerators in slot order, all or nothing, undone in reverse."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import IncompatibleError
from .accelerator import Accelerator, Edit, Site, Target
from .chain import RootHook, install_root, invalidate
from .compat import host_edit, unwrap_module


class Stack:
    """The edits that are in force on one pipeline."""

    def __init__(self, target: Target, owner: Any) -> None:
        self.target, self.owner = target, owner
        self.edits: list[Edit] = []
        self.site = Site()
        self.modules: dict[str, torch.nn.Module] = {}
        self.attached = False

    @host_edit
    def attach(self, accelerators: Sequence[Accelerator], kept: Sequence[Edit] = ()) -> None:
        """Attach in the given order. On any error everything done so far is undone and the error raised.

        `kept` are the edits of the first accelerators, which are in force already (and stay so on an error).
        """
        self.edits = list(kept)
        try:
            for component in self.target.spec.denoisers:
                module = getattr(self.target.pipe, component, None)
                if module is not None:
                    self.modules[component] = module
                    root = install_root(module, component, self.owner)
                    root.undo_all = self._leave
                    self.site.roots[component] = root
            for accelerator in accelerators[len(kept) :]:
                self.edits.append(accelerator.attach(self.target, self.site))
            for module in self.modules.values():
                invalidate(module)
            self.attached = True
        except BaseException:
            self.undo(keep=len(kept))
            raise

    @host_edit
    def undo(self, keep: int = 0, orphaned: bool = False) -> list[Edit]:
        """Undo every edit, last first; each is tried even if another fails, and a failure is raised.

        The first `keep` edits stay in force and are returned, for the next stack. An edit that cannot be undone is a
        refusal, with nothing changed; where the pipeline is gone (`orphaned`) it just stays.
        """
        why = {edit.name: edit.no_undo() for edit in self.edits[keep:] if edit.no_undo is not None}
        fixed = {name: reason for name, reason in why.items() if reason}
        if fixed and not orphaned:
            raise IncompatibleError("; ".join(f"{name} cannot be undone: {reason}" for name, reason in fixed.items()))
        kept = self.edits[:keep]
        with contextlib.ExitStack() as undos:
            for root in self.site.roots.values():
                if root.link is not None:
                    undos.callback(root.link.remove)
            for edit in self.edits[keep:]:
                if edit.name not in fixed:
                    undos.callback(edit.undo)
        for module in self.modules.values():
            invalidate(module)
        self.edits, self.site, self.modules, self.attached = [], Site(), {}, False
        return kept

    def _leave(self) -> None:
        """Undo what can be: the pipeline went without `restore`."""
        self.undo(orphaned=True)

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

    @host_edit
    def relink(self) -> None:
        """Put back hooks that another library dropped since the last run (innermost first)."""
        for root in self.site.roots.values():
            if root.link is not None:
                root.link.relink()
        for edit in self.edits:
            if edit.relink is not None:
                edit.relink()

    def root(self, component: str) -> RootHook:
        """The root hook of a denoiser."""
        return self.site.roots[component]


def weights_on_meta(module: torch.nn.Module) -> tuple[int, int]:
    """(parameters on the meta device without an offload hook to fill them, all parameters)."""
    total = missing = 0
    for child in unwrap_module(module).modules():
        offloaded = hasattr(child, "_hf_hook")
        for parameter in child.parameters(recurse=False):
            total += 1
            missing += parameter.device.type == "meta" and not offloaded
    return missing, total
