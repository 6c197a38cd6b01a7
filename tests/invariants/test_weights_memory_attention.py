"""Invariants 1, 2, 3 and 5 of the levers on weights, memory and attention, each alone and several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import restore
from tests import fingerprint, tiny

from . import stacks
from .levers import Stop, at_step, plain, raise_at, second_prompt
from .stacks import ALL, apart, changed_call, fresh, put_on


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """One accelerated pipeline per row for all tests of isolation: whatever came before, the next run is as fresh."""
    made: dict[str, Any] = {}

    def pipe(name: str) -> Any:
        if name not in made:
            made[name] = put_on(tiny.build(ALL[name].family), ALL[name], tmp_path_factory.mktemp("offload"))
        return made[name]

    yield pipe
    for one in made.values():
        restore(one)


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> Iterator[None]:
    """A clean compiler, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Compiling another stack, or looking through a video VAE at each decision, takes seconds each time.
SLOW = ("vae video", "wan stack", "sd3 stack")
EVERY = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ALL]


# ---- 1: undo -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_restore_leaves_no_trace(name: str, tmp_path: Path) -> None:
    """Attached twice in a row, run, broken off in a run: same fingerprint, same bits, no file."""
    row = ALL[name]
    pipe = tiny.build(row.family)
    assert torch.equal(tiny.run(pipe, row.family), plain(row.family))
    before = fingerprint.snapshot_pipe(pipe)
    put_on(pipe, row, tmp_path)
    for place in row.places:
        stacks.enable(pipe, row, place, tmp_path)
    assert torch.equal(tiny.run(pipe, row.family), fresh(name)), "twice is once"
    with pytest.raises(Stop):
        tiny.run(pipe, row.family, callback_on_step_end=raise_at(2, Stop("stop")))
    assert bool(list(tmp_path.iterdir())) == ("offload" in row.on)
    assert restore(pipe) is pipe
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(tiny.run(pipe, row.family), plain(row.family))


# ---- 2: what it does to the picture --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_picture_is_the_plain_one_or_another_as_promised(name: str) -> None:
    """Exact rows are bit-equal, equivalent ones near; the others change it, so that the tests here can fail."""
    row, here = ALL[name], fresh(name)
    if row.near == 0:
        assert torch.equal(here, plain(row.family))
    else:
        distance = apart(here, plain(row.family))
        assert distance <= row.near if row.near is not None else distance > 1e-6
    assert torch.isfinite(here).all()


NEUTRAL: dict[str, dict[str, Any]] = {
    "flux": {"cache": "first_block", "attention": "native"} | stacks.COMPILE | stacks.LAYERWISE,
    "wan": {"cache": "first_block"} | stacks.sparse(attention_method="svg", attention_density=1.0) | stacks.STAGE,
    "sd3": {"cache": "first_block"} | stacks.STAGE,
}


@pytest.mark.parametrize("family", NEUTRAL)
def test_several_at_their_neutral_settings(family: str, tmp_path: Path) -> None:
    """Threshold 0, density 1, a LoRA of strength 0, offload: bit-equal to plain."""
    on = NEUTRAL[family] | {"cache_threshold": 0.0, "cache_min_steps": 0}
    pipe = put_on(tiny.build(family), stacks.Row(family, on, lora=0.0), tmp_path)
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, family), plain(family))
    assert pipe.acceleration.report.hit_rate == 0


# ---- 3: isolation --------------------------------------------------------------------------------------------------


def broken(pipe: Any, family: str, error: BaseException) -> None:
    """A run that ends in the middle."""
    with pytest.raises(type(error)):
        tiny.run(pipe, family, callback_on_step_end=raise_at(2, error), **second_prompt())


def other_call(pipe: Any, name: str) -> None:
    """Another size, batch, prompt and number of steps, as on a fresh pipeline."""
    call = changed_call(ALL[name])
    assert torch.equal(tiny.run(pipe, ALL[name].family, **call), fresh(name, **call))


EVENTS: dict[str, Callable[[Any, str], None]] = {
    "a run": lambda pipe, name: None,
    "exception": lambda pipe, name: broken(pipe, ALL[name].family, Stop("stop")),
    "interrupt": lambda pipe, name: broken(pipe, ALL[name].family, KeyboardInterrupt()),
    "another call": other_call,
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", EVERY)
def test_whatever_came_before(pipes: Callable[[str], Any], name: str, event: str) -> None:
    """The next run is that of a fresh pipeline, and no lever stood down in it."""
    pipe = pipes(name)
    EVENTS[event](pipe, name)
    assert torch.equal(tiny.run(pipe, ALL[name].family), fresh(name))
    report = pipe.acceleration.report
    assert not [note for note in report.notes if "stood down" in note]
    if "vae_tiling" in ALL[name].on:
        assert report.stats["vae.tiling"]["exact"] == report.stats["vae.tiling"]["decodes"] == 1


@pytest.mark.parametrize("name", EVERY)
def test_a_run_inside_a_run(pipes: Callable[[str], Any], name: str) -> None:
    """Of the same pipeline, with another call: both are as alone."""
    family, call = ALL[name].family, changed_call(ALL[name])
    pipe = pipes(name)
    nested: list[torch.Tensor] = []
    act = at_step(2, lambda _: nested.append(tiny.run(pipe, family, **call)))
    assert torch.equal(tiny.run(pipe, family, callback_on_step_end=act), fresh(name))
    assert torch.equal(nested[0], fresh(name, **call))


DTYPES = ("sparse", "sage", "fp8 weight-only", "int8", "svdquant", "lora", "layerwise", "vae")


@pytest.mark.parametrize("name", DTYPES)
def test_another_dtype_in_between(name: str, tmp_path: Path) -> None:
    """To bfloat16 and back: each run is that of a pipeline that was cast with the lever on, and never ran before."""
    row = ALL[name]
    pipe, twin = (put_on(tiny.build(row.family), row, tmp_path) for _ in range(2))
    tiny.run(pipe, row.family)
    for dtype in (torch.bfloat16, torch.float32):
        pipe.to(dtype)
        twin.to(dtype)
        assert tiny.denoiser(pipe).dtype == dtype
        found = tiny.run(pipe, row.family)
        assert torch.isfinite(found).all() and (dtype == torch.float32 or not torch.equal(found, fresh(name)))
    assert torch.equal(found, tiny.run(twin, row.family))
    restore(pipe), restore(twin)


@pytest.mark.parametrize("name", EVERY)
def test_two_pipelines_at_once(pipes: Callable[[str], Any], name: str, tmp_path: Path) -> None:
    """A second one with the row runs inside a run of the first; a third is never touched; the second is restored."""
    row = ALL[name]
    first, second = pipes(name), put_on(tiny.build(row.family), row, tmp_path)
    seen: list[torch.Tensor] = []
    third = tiny.build(row.family)

    def act(_: Any) -> None:
        seen.append(tiny.run(second, row.family, **second_prompt()))
        seen.append(tiny.run(third, row.family))

    assert torch.equal(tiny.run(first, row.family, callback_on_step_end=at_step(2, act)), fresh(name))
    assert torch.equal(seen[0], fresh(name, **second_prompt())) and torch.equal(seen[1], plain(row.family))
    restore(second)
    assert torch.equal(tiny.run(second, row.family), plain(row.family))
    assert torch.equal(tiny.run(first, row.family), fresh(name))


# ---- 5: snapshot ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_run_that_was_given_up_is_resumed(pipes: Callable[[str], Any], name: str) -> None:
    """Snapshot, raise, another run, resume: the undisturbed picture."""
    family, pipe = ALL[name].family, pipes(name)
    states: list[Any] = []

    def pause(_: Any) -> None:
        states.append(pipe.acceleration.snapshot())
        raise Stop("preempted")

    with pytest.raises(Stop):
        tiny.run(pipe, family, callback_on_step_end=at_step(2, pause))
    call = changed_call(ALL[name])
    assert torch.equal(tiny.run(pipe, family, **call), fresh(name, **call))
    assert torch.equal(tiny.output(pipe.acceleration.resume(states[0])), fresh(name))
