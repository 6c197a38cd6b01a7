"""The scope `Modules`: attention and feed-forward modules answer from what they said before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...core.chain import Hook, compiled_body, install
from ...core.compat import eager, leaves
from ...core.options import GOT, take, whole
from ...core.run import Call
from ...errors import IncompatibleError
from ...models.spec import BlockList, ModelSpec
from ..engine import Engine, Scope
from ..policy import Policy
from .stack import StackHooks, blocks_of, unfit_stack
from .stand_ins import StandIns

# Where a module's tensors lie among all, their dtypes (what is remembered may be wider), and how its output is built.
Form = tuple[slice, list[torch.dtype], Callable[..., Any]]


def modules_of(block: torch.nn.Module, row: BlockList) -> list[tuple[str, torch.nn.Module]]:
    """The modules of one block that the card names and that this block has (the last one may lack its text's)."""
    found = ((name, getattr(block, name, None)) for name in (*row.modules, *row.idle))
    return [(name, module) for name, module in found if isinstance(module, torch.nn.Module)]


@dataclass(frozen=True)
class Modules(Scope):
    """The attention and feed-forward modules of every block but the first `front`, each remembered by itself.

    Norms, modulation and residual additions still run on a reused step (TaylorSeer, FORA).
    """

    front: int = 0

    def __post_init__(self) -> None:
        take(self, whole(0), "front", form=GOT)

    def unfit(self, policy: Policy, module: torch.nn.Module, spec: ModelSpec) -> str | None:
        """Needs a card that names the modules."""
        lacking = [row.attribute for row in spec.stack if not row.modules]
        if lacking:
            return f"the card of the family {spec.family} does not name the modules of {', '.join(lacking)}"
        return unfit_stack(self.front, 0, policy, module, spec)

    def left_out(self, module: torch.nn.Module, spec: ModelSpec) -> list[torch.nn.Module]:
        """The modules themselves."""
        blocks = blocks_of(module, spec)[self.front :]
        return [module for block, row in blocks for _, module in modules_of(block, row)]

    def install(self, engine: Engine) -> ModuleHooks:
        """Hook the modules."""
        return ModuleHooks(engine, self)


class _OutputRecorder(Hook):
    """Records what a module gives on a computed step."""

    def __init__(self, hooks: ModuleHooks, index: int) -> None:
        super().__init__()
        self.hooks, self.index = hooks, index

    @eager
    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self.hooks.engine.computing:
            self.hooks.outputs[self.index] = output
        return output


def _blank(like: tuple[torch.Size, torch.dtype, torch.device], main: Any, rows: int) -> torch.Tensor:
    """Zeros that take no memory, for the batch at hand (`like` was seen in one of `rows`)."""
    shape, dtype, device = like
    return torch.zeros((), dtype=dtype, device=device).expand(shape[0] * len(main) // rows, *shape[1:])


class ModuleHooks(StandIns):
    """Hooks `modules` and `idle` of every block row (see `models.spec.BlockList`) but the first `front` blocks'."""

    def __init__(self, engine: Engine, scope: Modules) -> None:
        super().__init__()
        self.engine = engine
        self.watch: StackHooks | None = None
        self.outputs: dict[int, Any] = {}
        self.idle: list[bool] = []
        self.padded = engine.spec.layout == "list"  # see `Engine.cut_tokens`
        blocks = blocks_of(engine.module, engine.spec)
        if any(compiled_body(block) is not None for block, _ in blocks):
            raise IncompatibleError(
                f"{engine.name} leaves modules out of blocks that are compiled as a whole (compile): take the scope "
                "'stack' or 'denoiser' (TaylorSeer: use_lite_mode=True), or leave compile off"
            )
        try:
            if not engine.at_root:
                self.watch = StackHooks(engine, scope.front, len(blocks), label=".watch", watch=True)
            for block, row in blocks[scope.front :]:
                for name, module in modules_of(block, row):
                    hook = _OutputRecorder(self, len(self.links))
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
            self.stand_in(link, self._blank(form) if idle else self._recall(form))

    def _recall(self, form: Form) -> Callable[..., Any]:
        part, dtypes, repack = form

        def recall(*args: Any, **kwargs: Any) -> Any:
            if self.padded:
                self.engine.cut_tokens((args[0] if args else next(iter(kwargs.values()))).shape[1])
            return repack([value.to(d) for value, d in zip(self.engine.forecast(part), dtypes, strict=True)])

        return recall

    def _blank(self, form: Any) -> Callable[..., Any]:
        likes, repack, rows = form
        return lambda *args, **kwargs: repack([_blank(like, self.engine.main, rows) for like in likes])

    def release(self, call: Call) -> None:
        """Give the modules their forwards back; remember what they gave on a computed step."""
        self.put_back()
        if self.watch is not None:
            self.watch.release(call)
        outputs, self.outputs = self.outputs, {}
        branch = self.engine.branch
        if not self.engine.computing or call.output is None or branch is None:
            return
        if len(outputs) < len(self.links):
            call.run.note(f"{self.engine.name} stood down in some calls: they leave out some of the blocks' modules")
        else:
            values: list[torch.Tensor] = []
            forms: list[Any] = []
            for index, idle in enumerate(self.idle):
                tensors, repack = leaves(outputs[index])
                if idle:
                    forms.append(([(t.shape, t.dtype, t.device) for t in tensors], repack, len(self.engine.main)))
                else:
                    part = slice(len(values), len(values) + len(tensors))
                    forms.append((part, [tensor.dtype for tensor in tensors], repack))
                    values += tensors
            branch.template = forms
            if self.padded:
                self.engine.cut_tokens(values[0].shape[1])
            self.engine.store(tuple(values))

    def relink(self) -> None:
        """Put back what others dropped since the last run; stay outermost."""
        super().relink()
        if self.watch is not None:
            self.watch.relink()

    def undo(self) -> None:
        """Leave the model as it was found."""
        super().undo()
        if self.watch is not None:
            self.watch.undo()
