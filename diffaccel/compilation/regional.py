"""Regional compilation: each transformer block becomes one compiled graph, and hooks stay outside of it.

Blocks of one class share their graphs, so that a model of 57 blocks compiles two; a cache that decides between
blocks (data-dependent, hence never in a graph) costs no graph break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..core.accelerator import Edit, Fidelity, Site, Slot, Target, Verdict
from ..core.chain import PREFIX, compiled_body, set_compiled, whole_in_graph
from ..core.compat import REGISTRY, compile_backends, compile_counts, no_duck_shape, unwrap_module
from ..core.listener import Listener
from ..core.options import BOOLEAN, GOT, short, take
from ..core.run import Call, Run
from ..core.state import PerRun
from ..core.wrappers import in_a_graph, sharded
from ..errors import IncompatibleError, InvalidOptionError, MissingDependencyError, nearest
from .toolchain import lacks

MODES = ("default", "max-autotune-no-cudagraphs")
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # CUDA graphs: one block's output is the next one's to overwrite
OURS = "_diffaccel_compiled"  # mark on a compiled `__call__` that this lever made


@dataclass(frozen=True)
class RegionalCompile:
    """Compile the forward of every transformer block of the denoisers with `torch.compile`.

    The first call with a new shape compiles before it runs. Blocks the user compiled stay as they are.

    Attributes:
        backend: a backend of torch.compile; "inductor" (the default) needs a C++ compiler on a CPU, Triton on CUDA.
        mode: None, "default" or "max-autotune-no-cudagraphs" (only for "inductor").
        dynamic: None compiles the first shape as it is and a second, general one when another size comes; True
            compiles the general one at once; False one per size.
        fullgraph: raise where a block cannot be one graph. Off, such a block is compiled in pieces; `stats` counts
            the breaks.

    Raises:
        InvalidOptionError: a value of the wrong type, or a mode this lever does not take.
    """

    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False

    name: ClassVar[str] = "compile"
    slot: ClassVar[Slot] = Slot.MODULE
    fidelity: ClassVar[Fidelity] = Fidelity.EQUIVALENT

    def __post_init__(self) -> None:
        if not isinstance(self.backend, str):
            raise InvalidOptionError(f"compile_backend must be a name, got {short(self.backend)}")
        if self.backend != "inductor" and self.backend not in compile_backends():  # the usual one needs no import
            near = nearest(self.backend, compile_backends())
            raise InvalidOptionError(f"compile_backend={short(self.backend)}: {near}")
        if self.mode in GRAPH_MODES:
            raise InvalidOptionError(
                f"compile_mode={self.mode!r} uses CUDA graphs, whose outputs the next block overwrites; allowed: "
                f"{', '.join(MODES)}"
            )
        if self.mode is not None and self.mode not in MODES:
            raise InvalidOptionError(f"compile_mode={self.mode!r}: {nearest(str(self.mode), MODES)}")
        if self.mode is not None and self.backend != "inductor":
            raise InvalidOptionError(f"compile_mode={self.mode!r} is of inductor; the backend is {self.backend!r}")
        take(self, BOOLEAN.or_none(), "dynamic", prefix="compile_", form=GOT)
        take(self, BOOLEAN, "fullgraph", prefix="compile_", form=GOT)

    def check(self, target: Target) -> Verdict:
        """Needs a known stack of blocks, a denoiser that is not compiled as a whole, and the backend's tools."""
        spec = target.spec
        if not spec.stack:
            return Verdict.no(f"{spec.family}: {spec.no_stack}; there are no blocks to compile one by one")
        whole = next((name for name, module in _denoisers(target) if whole_in_graph(module)), None)
        if whole is not None:
            return Verdict.refuse(
                f"{whole} is compiled as a whole already (torch.compile): its blocks are inside that graph. Give the "
                "pipeline the plain model, or leave compile off",
                IncompatibleError,
            )
        cut = next((name for name, module in _denoisers(target) if sharded(module) is not None), None)
        if cut is not None:
            return Verdict.refuse(
                f"{cut} is cut into shards by FSDP, gathered inside of what would be compiled: leave it off",
                IncompatibleError,
            )
        missing = lacks(self.backend, target.hardware)
        if missing is not None:
            return Verdict.no(missing, MissingDependencyError)
        foreign = _foreign_hook(target) if self.fullgraph else None
        if foreign is not None:
            return Verdict.refuse(
                f"compile_fullgraph=True: {foreign} inside a block breaks its graph", IncompatibleError
            )
        return self._say(target)

    @staticmethod
    def _say(target: Target) -> Verdict:
        blocks = list(_blocks(target))
        free = [block for block in blocks if not _users(block)]
        if not free:
            return Verdict.no(f"all {len(blocks)} blocks are compiled already (not by diffaccel), and stay so")
        kinds = len({type(block) for block in free})
        kept = f"; {len(blocks) - len(free)} stay as you compiled them" if len(free) < len(blocks) else ""
        return Verdict.yes(
            f"{len(free)} blocks of {kinds} kind{'s' * (kinds > 1)}{kept}; the first call of each shape compiles first"
        )

    def predict(self, target: Target) -> Mapping[str, Any]:
        """Nothing is promised without a measurement."""
        return {"origin": "unmeasured"}

    def attach(self, target: Target, site: Site) -> Edit:
        """Give every block that has none a compiled `__call__`."""
        undos: list[Callable[[], None]] = []
        done: list[torch.nn.Module] = []

        def undo() -> None:
            while undos:
                undos.pop()()

        if self.dynamic:
            undos += [root.add(_NoDuckShape(), site.rank) for root in site.roots.values()]
        try:
            for block in _blocks(target):
                if not _users(block):
                    compiled = self._compile(block)
                    setattr(compiled, OURS, True)
                    undos.append(set_compiled(block, compiled))
                    done.append(block)
        except BaseException:
            undo()
            raise

        def begin_run(run: Run) -> None:
            run.state[self.name] = PerRun(zip(("graphs", "breaks"), compile_counts(), strict=True))

        def stats(run: Run) -> dict[str, Any]:
            graphs, breaks = compile_counts()
            before = run.state.get(self.name, PerRun())
            return {
                "graphs_compiled": graphs - before.get("graphs", graphs),
                "graph_breaks": breaks - before.get("breaks", breaks),
            }

        def displaced() -> str:
            return _displaced(target, done)

        return Edit(self.name, undo, begin_run=begin_run, stats=stats, displaced=displaced)

    def _compile(self, block: torch.nn.Module) -> Any:
        return torch.compile(
            block._call_impl, backend=self.backend, mode=self.mode, dynamic=self.dynamic, fullgraph=self.fullgraph
        )


class _NoDuckShape(Listener):
    """While a denoiser runs, equal sizes are not taken for one size.

    With `dynamic=True` PyTorch else gives a token count that happens to equal the channel count the same symbol,
    and compiles again when only the token count changes (huggingface/diffusers#14297).
    """

    def __init__(self) -> None:
        self.patches: list[Any] = []

    def begin_call(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The denoiser is about to run (under its root hook's lock)."""
        patch = no_duck_shape()
        patch.__enter__()
        self.patches.append(patch)

    def end_call(self, call: Call) -> None:
        """The denoiser returned or raised."""
        self.patches.pop().__exit__(None, None, None)


def _denoisers(target: Target) -> Iterator[tuple[str, torch.nn.Module]]:
    for name in target.spec.denoisers:
        module = getattr(target.pipe, name, None)
        if module is not None:
            yield name, module


def _blocks(target: Target) -> Iterator[torch.nn.Module]:
    """Every block of every denoiser's stack, each once."""
    seen: set[int] = set()
    for _, module in _denoisers(target):
        for row in target.spec.stack:
            for block in getattr(unwrap_module(module), row.attribute, ()):
                if id(block) not in seen:
                    seen.add(id(block))
                    yield block


def _users(block: torch.nn.Module) -> bool:
    """Did somebody else compile this block?"""
    if in_a_graph(block):
        return True
    compiled = compiled_body(block)
    return compiled is not None and not getattr(compiled, OURS, False)


def _displaced(target: Target, done: list[torch.nn.Module]) -> str:
    """What of the blocks that we compiled is not ours any more, in a clause."""
    whole = next((name for name, module in _denoisers(target) if whole_in_graph(module)), None)
    if whole is not None:
        return f"{whole} was compiled as a whole since, and its blocks are inside that graph"
    present = {id(block) for block in _blocks(target)}
    theirs = sum(1 for block in done if id(block) not in present or _users(block))
    if not theirs:
        return ""
    return f"{theirs} of {len(done)} blocks were compiled or replaced by somebody else since, and stay so"


def _foreign_hook(target: Target) -> str | None:
    """The first hook of another library inside a block, by name."""
    for block in _blocks(target):
        for child in block.modules():
            for name in getattr(getattr(child, REGISTRY, None), "hooks", {}):
                if not name.startswith(PREFIX):
                    return f"the hook {name!r}"
            if hasattr(child, "_hf_hook"):
                return f"accelerate's {type(child._hf_hook).__name__}"
    return None
