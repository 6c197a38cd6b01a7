"""Inference: known families give their own cards; toys give what they are made of, or a refusal that says why."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from diffaccel import attach
from diffaccel.models import ModelSpec, lookup
from diffaccel.models.infer import Refusal, infer, record
from diffaccel.models.spec import BlockList
from diffaccel.models.trace import BlockCall, ListInfo, Touch, Trace, Value
from tests import fingerprint

from .families.table import FAMILIES, build, run
from .test_families import assert_bits, plain

INFERABLE = sorted(name for name in FAMILIES if not FAMILIES[name].stands_down)


def shape_of(spec: ModelSpec) -> tuple[Any, ...]:
    """What inference can find out: lists, streams and their places, what is read, what acts from outside."""
    stack = [
        (row.attribute, row.outputs, row.joins, [row.inputs.index(name) for name in row.outputs]) for row in spec.stack
    ]
    return stack, spec.stream, spec.reads, set(spec.stand_down)


@pytest.mark.parametrize("name", INFERABLE)
def test_a_known_family_gives_its_card(name: str) -> None:
    pipe = build(name)
    with record(pipe.transformer) as trace:
        assert_bits(run(pipe, name), plain(name))  # recording changes no bit
    found = infer(trace)
    assert isinstance(found, ModelSpec), found
    assert shape_of(found) == shape_of(lookup(pipe))
    assert found.classes == (type(pipe.transformer).__name__,)


@pytest.mark.parametrize("name", ["sana", "qwen"])
def test_recording_changes_no_bit_on_two_threads(name: str) -> None:
    """The two operations whose sums hang on the number of threads (see `plain`): the same number, the same bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pipe = build(name)
        with record(pipe.transformer):
            assert_bits(run(pipe, name), plain(name))
    finally:
        torch.set_num_threads(threads)


def test_recording_leaves_no_trace() -> None:
    pipe = build("flux2")
    run(pipe, "flux2")
    before = fingerprint.snapshot_pipe(pipe)
    with record(pipe.transformer) as trace:
        run(pipe, "flux2")
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert len(trace.calls) == 4


def test_recording_an_attached_pipeline() -> None:
    """With diffaccel's own hook around the denoiser, as when an unknown model is met at its first run."""
    pipe = attach(build("ltx2"))
    with record(pipe.transformer) as trace:
        assert_bits(run(pipe, "ltx2"), plain("ltx2"))
    found = infer(trace)
    assert isinstance(found, ModelSpec) and shape_of(found) == shape_of(lookup(pipe))


def test_blocks_changed_from_outside_are_refused() -> None:
    """ControlNet residuals are added between the blocks."""
    pipe = build("flux_controlnet")
    with record(pipe.transformer) as trace:
        run(pipe, "flux_controlnet")
    found = infer(trace)
    assert isinstance(found, Refusal)
    assert "is not a stream of block 1" in found.reason and "FluxTransformer2DModel" in found.reason
    assert "transformer_blocks (2 x FluxTransformerBlock)" in found.seen


# ---- toys --------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A block of two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, time: torch.Tensor, picture: torch.Tensor, words: torch.Tensor) -> Any:
        return words + self.mix(words), picture + self.mix(picture) * time + words.mean(1, keepdim=True)


class Single(nn.Module):
    """A block of one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, picture: torch.Tensor, time: torch.Tensor) -> Any:
        return picture + self.mix(picture) * time


class Toy(nn.Module):
    """An unknown DiT: refiners, pairs, then singles over both streams joined, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.refiners = nn.ModuleList([Single() for _ in range(2)])
        self.pairs = nn.ModuleList([Pair() for _ in range(2)])
        self.singles = nn.ModuleList([Single() for _ in range(3)])
        self.head = nn.Linear(4, 4)

    def forward(self, picture: torch.Tensor, words: torch.Tensor, time: torch.Tensor, skip_layers: Any = None) -> Any:
        for block in self.refiners:
            words = block(words, time)
        words = words * 2
        for pair in self.pairs:
            words, picture = pair(time, picture, words=words)
        both = torch.cat([words, picture], dim=1)
        return self.head(self.run_singles(both, time)[:, words.shape[1] :])

    def run_singles(self, both: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        for block in self.singles:
            both = block(both, time)
        return both


def traced(model: nn.Module, calls: int = 2) -> ModelSpec | Refusal:
    with record(model) as trace, torch.inference_mode():
        for seed in range(calls):
            generator = torch.Generator().manual_seed(seed)
            sizes = ((2, 6, 4), (2, 3, 4), (1,))
            model(*(torch.randn(size, generator=generator) for size in sizes))
    return infer(trace)


def refusal(model: nn.Module) -> str:
    found = traced(model)
    assert isinstance(found, Refusal), found
    return str(found)


def test_an_unknown_model() -> None:
    """The refiners' result is used otherwise, so they stay outside; roles follow the tensors, not the names."""
    found = traced(Toy())
    assert isinstance(found, ModelSpec)
    pairs, singles = found.stack
    assert (pairs.attribute, pairs.inputs) == ("pairs", ("time", "picture", "words"))
    assert (pairs.outputs, pairs.joins) == (("words", "picture"), ())
    assert (singles.attribute, singles.inputs, singles.outputs) == ("singles", ("picture",), ("picture",))
    assert singles.joins == ("words", "picture")
    assert (found.stream, found.reads, found.stand_down) == ("picture", (), ("skip_layers",))
    assert found.denoisers == ("transformer",) and found.family == "inferred from Toy"


class BothRead(Toy):
    """Two streams are read, by plain functions without a module."""

    def forward(self, picture: torch.Tensor, words: torch.Tensor, time: torch.Tensor, skip_layers: Any = None) -> Any:
        for pair in self.pairs:
            words, picture = pair(time, picture, words)
        return picture * 2 + words.mean()


class TwoListsRead(Toy):
    """The text of the first list is read after the second, so the first one cannot be skipped."""

    def forward(self, picture: torch.Tensor, words: torch.Tensor, time: torch.Tensor, skip_layers: Any = None) -> Any:
        for pair in self.pairs:
            words, picture = pair(time, picture, words)
        return self.run_singles(picture, time) + words.mean()


def test_streams_that_are_read() -> None:
    both, later = traced(BothRead()), traced(TwoListsRead())
    assert isinstance(both, ModelSpec) and isinstance(later, ModelSpec)
    assert both.reads == ("picture", "words")
    assert [row.attribute for row in later.stack] == ["singles"]


class OutOfOrder(Toy):
    def run_singles(self, both: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        for index in (0, 2, 1):
            both = self.singles[index](both, time)
        return both


class Tapped(Toy):
    def run_singles(self, both: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        taps = []
        for block in self.singles:
            both = block(both, time)
            taps.append(both.mean())
        return both * sum(taps)


class Edited(Toy):
    def run_singles(self, both: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        for block in self.singles:
            both = block(both, time)
            both += 1
        return both


class InPlace(Single):
    def forward(self, picture: torch.Tensor, time: torch.Tensor) -> Any:
        return picture.mul_(time)


class Extra(Single):
    def forward(self, picture: torch.Tensor, time: torch.Tensor) -> Any:
        return picture + time, picture.mean()


class Named(Single):
    def forward(self, picture: torch.Tensor, time: torch.Tensor) -> Any:
        return {"picture": picture + time}


class OnlySingles(Toy):
    """Nothing but the last list, of some other blocks."""

    def __init__(self, block: type[nn.Module] = Single) -> None:
        super().__init__()
        self.refiners, self.pairs = nn.ModuleList(), nn.ModuleList()
        self.singles = nn.ModuleList([block() for _ in range(3)])

    def run_singles(self, both: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        for block in self.singles:
            both = block(both, time)
            both = both[0] if isinstance(both, tuple) else both["picture"] if isinstance(both, dict) else both
        return both


class Interleaved(Toy):
    def run_singles(self, both: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        for one, other in zip(self.refiners, self.singles, strict=False):
            both = other(one(both, time), time)
        return both


class Unread(OnlySingles):
    def forward(self, picture: torch.Tensor, words: torch.Tensor, time: torch.Tensor, skip_layers: Any = None) -> Any:
        self.run_singles(picture, time)
        return picture


class Moody(OnlySingles):
    """Runs its list in the second call only."""

    called = False

    def run_singles(self, both: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        seen, self.called = self.called, True
        return super().run_singles(both, time) if seen else both


class Skips(OnlySingles):
    """What a block in the middle returns goes into a list after the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList([Pair()])

    def run_singles(self, both: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        taken = []
        for block in self.singles:
            taken.append(both := block(both, time))
        words, both = self.ups[0](time, both, taken[1])
        return both + words


class NoLists(nn.Module):
    def forward(self, picture: torch.Tensor, words: torch.Tensor, time: torch.Tensor) -> Any:
        return picture * time


REFUSED = [
    (OutOfOrder, "blocks of singles ran in the order 0, 2, 1"),
    (Tapped, "what blocks of singles return is also used outside of them"),
    (Edited, "result 0 of singles 0 was changed in place"),
    (Interleaved, "blocks of singles ran in the order 0"),
    (lambda: OnlySingles(InPlace), "was changed in place"),
    (lambda: OnlySingles(Extra), "result 1 of singles 0 is not a stream of block 1"),
    (lambda: OnlySingles(Named), "blocks of singles return dict"),
    (Unread, "nothing that the last block of singles returns is used afterwards"),
    (Moody, "no list of at least two like blocks ran"),
    (Skips, "ups 0 is given what a block in the middle of the stack returned"),
    (NoLists, "no list of like blocks"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_refusals(make: Any, reason: str) -> None:
    assert reason in refusal(make())


def test_a_bad_list_does_not_spoil_a_longer_good_one() -> None:
    model = Tapped()
    model.pairs = nn.ModuleList([Pair() for _ in range(4)])
    found = traced(model)
    assert isinstance(found, ModelSpec) and [row.attribute for row in found.stack] == ["pairs"]
    assert found.reads == ("picture", "words")  # the singles take both


def test_one_call_is_not_enough() -> None:
    found = traced(Toy(), calls=1)
    assert isinstance(found, Refusal) and "the second is needed to verify the first" in found.reason
    assert "singles (3 x Single)" in found.seen and "pairs 0, 1" in found.seen


def test_a_failed_call_is_left_out() -> None:
    model = Toy()
    with record(model) as trace:
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 6, 4), torch.ones(2, 3, 5), torch.ones(1))
        assert torch.overrides._get_current_function_mode_stack() == []
    assert trace.calls == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_model_is_left_alone(whole: bool) -> None:
    model = Toy()
    if not whole:
        model.singles[1].compile(backend="eager")
    target: Any = torch.compile(model, backend="eager") if whole else model
    with record(target) as trace:
        assert not model._forward_hooks and not model._forward_pre_hooks
    found = infer(trace)
    assert isinstance(found, Refusal) and "it is compiled" in found.reason


# ---- by hand -----------------------------------------------------------------------------------------


def _call(keys: tuple[int, ...]) -> tuple[Any, ...]:
    """Blocks that hand `x` from key to key; the last one is used."""
    values = [Value(key, (1, 2, 3), float(key)) for key in keys]
    blocks = [
        BlockCall("layers", index, {"x": given}, (made,), "tensor")
        for index, (given, made) in enumerate(itertools.pairwise(values))
    ]
    return (*blocks, Touch(keys[-1]))


def test_a_trace_is_plain_data() -> None:
    """A trace written by hand, and what happens to it when the second call tells another story."""
    info = ListInfo("layers", "Block", 2, ("x", "mask"))
    trace = Trace("ByHand", ("x",), (info,), [_call((1, 2, 3)), _call((4, 5, 6))])
    found = infer(trace, "prior")
    assert isinstance(found, ModelSpec)
    assert (found.denoisers, found.stream) == (("prior",), "x")
    assert found.stack == (BlockList("layers", ("x",), ("x",)),)

    other = ListInfo("others", "Block", 2, ("x",))
    renamed = tuple(
        dataclasses.replace(event, attribute="others") if isinstance(event, BlockCall) else event
        for event in _call((4, 5, 6))
    )
    refused = infer(Trace("ByHand", ("x",), (info, other), [_call((1, 2, 3)), renamed]))
    assert isinstance(refused, Refusal) and "call 2 ran other blocks" in refused.reason
