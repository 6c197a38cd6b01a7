"""The tap of the scope `Modules`: attention and feed-forward modules answer from what they said before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.compat import eager, leaves
from ..core.hooks import Hook, Link, install
from ..core.run import Call
from ..models.spec import BlockList
from .engine import Engine
from .scopes import Modules
from .stack_tap import StackTap, blocks_of

Form = tuple[slice, Callable[..., Any]]  # where a module's tensors lie among all, and how its output is built of them


def modules_of(block: torch.nn.Module, row: BlockList) -> list[tuple[str, torch.nn.Module]]:
    """The modules of one block that the card names and that this block has (the last one may lack its text's)."""
    found = ((name, getattr(block, name, None)) for name in (*row.modules, *row.idle))
    return [(name, module) for name, module in found if isinstance(module, torch.nn.Module)]


class _Ear(Hook):
    """Notes what a module says on a computed step."""

    def __init__(self, tap: ModuleTap, index: int) -> None:
        super().__init__()
        self.tap, self.index = tap, index

    @eager
    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self.tap.engine.computing:
            self.tap.said[self.index] = output
        return output


def _blank(like: tuple[torch.Size, torch.dtype, torch.device]) -> torch.Tensor:
    """Zeros that take no memory."""
    shape, dtype, device = like
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class ModuleTap:
    """Hooks `modules` and `idle` of every block row (see `models.spec.BlockList`) but the first `front` blocks'."""

    def __init__(self, engine: Engine, scope: Modules) -> None:
        self.engine = engine
        self.watch: StackTap | None = None
        self.said: dict[int, Any] = {}
        self.skipped: list[tuple[Any, Any]] = []
        self.links: list[Link] = []
        self.idle: list[bool] = []
        blocks = blocks_of(engine.module, engine.spec)
        try:
            if not engine.at_root:
                self.watch = StackTap(engine, scope.front, len(blocks), label=".watch", watch=True)
            for block, row in blocks[scope.front :]:
                for name, module in modules_of(block, row):
                    hook = _Ear(self, len(self.links))
                    self.links.append(install(module, hook, engine.name, outermost=True))
                    self.idle.append(name in row.idle)
        except BaseException:
            self.undo()
            raise

    def skip(self) -> None:
        """From here on every hooked module answers from the forecast."""
        branch = self.engine.branch
        assert branch is not None
        for link, idle, form in zip(self.links, self.idle, branch.template, strict=True):
            ref = link.hook.fn_ref
            self.skipped.append((ref, link.body))
            ref.forward = self._blank(form) if idle else self._recall(form)

    def _recall(self, form: Form) -> Callable[..., Any]:
        part, repack = form
        return lambda *args, **kwargs: repack(self.engine.forecast(part))

    def _blank(self, form: Any) -> Callable[..., Any]:
        likes, repack = form
        return lambda *args, **kwargs: repack([_blank(like) for like in likes])

    def release(self, call: Call) -> None:
        """Give the modules their forwards back; remember what they said on a computed step."""
        for ref, body in self.skipped:
            ref.forward = body
        self.skipped.clear()
        if self.watch is not None:
            self.watch.release(call)
        said, self.said = self.said, {}
        branch = self.engine.branch
        if not self.engine.computing or call.output is None or branch is None:
            return
        if len(said) < len(self.links):
            call.run.note(f"{self.engine.name} stood down in some calls: they leave out some of the blocks' modules")
        else:
            values: list[torch.Tensor] = []
            forms: list[Any] = []
            for index, idle in enumerate(self.idle):
                tensors, repack = leaves(said[index])
                if idle:
                    forms.append(([(t.shape, t.dtype, t.device) for t in tensors], repack))
                else:
                    forms.append((slice(len(values), len(values) + len(tensors)), repack))
                    values += tensors
            branch.template = forms
            self.engine.store(tuple(values))

    def relink(self) -> None:
        """Put back what others dropped since the last run; stay outermost."""
        for link in self.links:
            link.relink()
        if self.watch is not None:
            self.watch.relink()

    def undo(self) -> None:
        """Leave the model as it was found."""
        for link in reversed(self.links):
            link.remove()
        self.links.clear()
        if self.watch is not None:
            self.watch.undo()
