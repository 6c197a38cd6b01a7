"""What a denoiser does with its blocks, recorded as plain data: the ground that `infer` reasons on.

`record` watches direct calls of a module: which block of which list ran, what it was given and returned, which of
its results was used outside of the blocks, and which results were put together. Tensors appear as numbers only,
so a trace can be written by hand; recording keeps none of them alive and changes nothing.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..core.compat import COMPILED, unwrap_module
from ..ledger.hardware import widest

_SAMPLE = 65_536  # elements of a tensor that its content number is made of
_JOINS = {"cat", "concat", "concatenate"}
_READ = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"}  # read data, return no tensor


@dataclass(frozen=True)
class Value:
    """A tensor: `key` tells objects apart; `content` is what was in it at that moment (0 if nobody will ask)."""

    key: int
    shape: tuple[int, ...]
    content: float


@dataclass(frozen=True)
class BlockCall:
    """One call of a block: tensors it was given, by parameter name, and what it returned, in order.

    `form` is "tensor" or "tuple", else the name of a type that is neither; `returned` has None for what is no
    tensor.
    """

    attribute: str
    index: int
    given: dict[str, Value]
    returned: tuple[Value | None, ...]
    form: str


@dataclass(frozen=True)
class Join:
    """Results of blocks were concatenated along tokens into a new tensor."""

    made: Value
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Touch:
    """A result of a block was used outside of the blocks."""

    key: int


Event = BlockCall | Join | Touch


@dataclass(frozen=True)
class ListInfo:
    """A ModuleList of the denoiser whose modules are all of one class."""

    attribute: str
    block: str
    count: int
    parameters: tuple[str, ...]


@dataclass
class Trace:
    """Recorded calls of one denoiser."""

    model: str
    parameters: tuple[str, ...]
    lists: tuple[ListInfo, ...]
    calls: list[tuple[Event, ...]] = field(default_factory=list)
    note: str = ""  # why nothing could be recorded


def describe(module: torch.nn.Module) -> Trace:
    """An empty trace of a module: its lists of like blocks."""
    module = unwrap_module(module)
    lists = []
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ModuleList) and len({type(block) for block in child}) == 1:
            block = type(child[0])
            lists.append(ListInfo(name, block.__name__, len(child), _parameters(block.forward)))
    return Trace(type(module).__name__, _parameters(type(module).forward), tuple(lists))


def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


@contextmanager
def record(module: torch.nn.Module) -> Iterator[Trace]:
    """Record the calls of `module` made inside; a call that raises is left out.

    A compiled model is left alone: watching it would compile it anew, and its tensors are not to be seen.
    """
    trace = describe(module)
    inner = unwrap_module(module)
    if inner is not module or any(getattr(part, COMPILED, None) is not None for part in inner.modules()):
        trace.note = "it is compiled, and can only be recorded before that"
        yield trace
        return
    recorder = _Recorder(trace)
    handles = [
        inner.register_forward_pre_hook(recorder.begin),
        inner.register_forward_hook(recorder.end, always_call=True),
    ]
    for row in trace.lists:
        for index, block in enumerate(getattr(inner, row.attribute)):
            handles.append(block.register_forward_pre_hook(recorder.enter))
            handles.append(block.register_forward_hook(recorder.leave(row, index), with_kwargs=True, always_call=True))
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
        recorder.stop()


class _Recorder(TorchFunctionMode):
    """Writes the events of one call after another. Between block calls, it sees every torch function."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.events: list[Event] = []
        self.known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by id(); a dead reference is no match
        self.results: set[int] = set()  # keys of what blocks returned, and of what was joined from that
        self.keys = 0
        self.depth = 0  # of block calls
        self.watching = False

    # ---- the denoiser ----------------------------------------------------------------------------------

    def begin(self, module: torch.nn.Module, args: Any) -> None:
        """A call starts."""
        self.events, self.depth = [], 0
        self.known.clear()
        self.results.clear()
        self.watching = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """A call is over; without an output it has failed."""
        self.stop()
        if output is not None:
            self.trace.calls.append(tuple(self.events))

    def stop(self) -> None:
        """Stop watching torch functions."""
        if self.watching:
            self.watching = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # ---- blocks ----------------------------------------------------------------------------------------

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """A block starts: what it does inside is its own affair."""
        self.depth += 1

    def leave(self, row: ListInfo, index: int) -> Callable[..., None]:
        """The hook for the end of one block."""

        def left(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # Still one level deep, so that the torch functions used here are not taken for the denoiser's.
            self._note(row, index, dict(zip(row.parameters, args, strict=False)) | kwargs, output)
            self.depth -= 1

        return left

    def _note(self, row: ListInfo, index: int, given: dict[str, Any], output: Any) -> None:
        form = {torch.Tensor: "tensor", tuple: "tuple", list: "tuple"}.get(type(output), type(output).__name__)
        values = output if form == "tuple" else (output,) if form == "tensor" else ()
        taken = {name: self._given(value) for name, value in given.items() if isinstance(value, torch.Tensor)}
        returned = tuple([self._value(value) if isinstance(value, torch.Tensor) else None for value in values])
        self.results.update(value.key for value in returned if value is not None)
        self.events.append(BlockCall(row.attribute, index, taken, returned, form))

    # ---- tensors ---------------------------------------------------------------------------------------

    def _key(self, tensor: torch.Tensor) -> int | None:
        entry = self.known.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def _value(self, tensor: torch.Tensor) -> Value:
        return Value(self._named(tensor), tuple(tensor.shape), _content(tensor))

    def _given(self, tensor: torch.Tensor) -> Value:
        key = self._named(tensor)  # only results are compared, and a content costs a host sync
        return Value(key, tuple(tensor.shape), _content(tensor) if key in self.results else 0.0)

    def _named(self, tensor: torch.Tensor) -> int:
        key = self._key(tensor)
        if key is None:
            key = self.keys = self.keys + 1
            self.known[id(tensor)] = (weakref.ref(tensor), key)
        return key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.depth == 0 and self.results:
            used = [key for key in map(self._key, _tensors((args, kwargs))) if key in self.results]
            if used:
                self._outside(func, args, kwargs, used, result)
        return result

    def _outside(self, func: Any, args: Any, kwargs: Any, used: list[Any], result: Any) -> None:
        name = getattr(func, "__name__", "")
        if not _tensors(result) and name not in _READ:
            return  # a shape, a dtype, a device
        whole = len(used) == len(_tensors((args, kwargs)))
        if whole and name in _JOINS and _dimension(args, kwargs) in (1, 1 - result.dim()):
            made = self._value(result)
            self.results.add(made.key)
            self.events.append(Join(made, tuple(used)))
            return
        self.events.extend(Touch(key) for key in dict.fromkeys(used))


def _dimension(args: Any, kwargs: Any) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _content(tensor: torch.Tensor) -> float:
    """A number that changes with any usual edit of the tensor, made of evenly spaced elements in their places."""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, math.ceil(flat.numel() / _SAMPLE))].to(widest(flat.device)).nan_to_num()
    places = torch.arange(1, sample.numel() + 1, device=sample.device, dtype=sample.dtype)
    return float((sample * places.sin()).sum())
