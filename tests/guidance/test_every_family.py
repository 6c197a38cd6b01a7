"""Every family: half a batch is the half of the whole, what is skipped is not run, and off is off."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from diffaccel import plan
from diffaccel.core.compat import leaves
from diffaccel.guidance.halves import half_of_inputs, half_of_output, rows
from diffaccel.models import CARDS
from tests.models.families.table import COND, FAMILIES, STEPS, build, run

from .helpers import done, reuse, stood_down, strips

GUIDED = sorted(name for name, family in FAMILIES.items() if family.branches != COND)
BATCHED = [name for name in GUIDED if FAMILIES[name].branches[0] == "cond_uncond"]
NEVER = ("flux_fill", "flux2", "flux2_klein_kv")  # their pipelines take no negative prompt

Outputs = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared, so every run adds up in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def plain(name: str) -> Outputs:
    """The latents of a pipeline never touched."""
    return run(build(name), name)


def same(a: Outputs, b: Outputs) -> bool:
    """Equal to the last bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", BATCHED)
def test_half_a_batch_is_half_of_the_whole(name: str) -> None:
    """Both halves, run alone, return what they are in the doubled call (up to rounding), and not the other half."""
    pipe = build(name)
    calls: list[Any] = []

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(copy.deepcopy((args, kwargs)))

    handle = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    run(pipe, name)
    handle.remove()
    card = CARDS[FAMILIES[name].card]
    names = list(inspect.signature(type(pipe.transformer).forward).parameters)[1:]
    for args, kwargs in (calls[0], calls[len(FAMILIES[name].branches)]):
        with torch.no_grad():
            whole = pipe.transformer(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            count = rows(args[0] if args else kwargs[names[0]])
            halves = []
            for second in (False, True):
                half_args, half_kwargs = half_of_inputs(names, args, kwargs, second, card.batchless)
                alone = leaves(pipe.transformer(*half_args, **half_kwargs))[0]
                halves.append(leaves(half_of_output(whole, count, second))[0])
                for found, expected in zip(alone, halves[-1], strict=True):
                    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert any((a - b).abs().max() > 1e-4 for a, b in zip(*halves, strict=True)), "the halves differ"


@pytest.mark.parametrize("name", GUIDED)
def test_every_second_step(name: str) -> None:
    """The unconditional branch is run at steps 0 and 2 of four, in every denoiser; other branches are left alone."""
    family, pipe = FAMILIES[name], reuse(build(name))
    found = run(pipe, name)
    assert stood_down(pipe) == "" and not same(found, plain(name))
    assert all(a.shape == b.shape and a.isfinite().all() for a, b in zip(found, plain(name), strict=True))
    assert pipe.acceleration.report.cache_bytes_peak > 0 == pipe.acceleration.report.cache_bytes_held
    if name in BATCHED:
        extra = {branch: "C" * STEPS for branch in family.branches[1:]}
        assert strips(pipe) == {"cond_uncond": "CC", "cond": "CC"} | extra and done(pipe) == (2, 2, 0)
    elif name == "wan22":  # its second expert starts anew
        assert strips(pipe) == {"cond": "CCCC", "uncond": "C.C."} or done(pipe)[1] >= 1
    else:
        cond, uncond = family.branches
        assert strips(pipe) == {cond: "CCCC", uncond: "C.C."} and done(pipe) == (2, 2, 0)
    assert same(run(pipe, name), found), "the second run is like the first"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_interval_one_is_off(name: str) -> None:
    pipe = reuse(build(name), interval=1)
    assert same(run(pipe, name), plain(name))
    assert pipe.acceleration.report.cache_bytes_peak == 0 and pipe.acceleration.report.hit_rate == 0


@pytest.mark.parametrize("name", [*BATCHED, "chroma", "flux_cfg", "hunyuan_video15", "wan22"])
def test_guidance_off_in_the_first_steps(name: str) -> None:
    """No guidance in the first half (the first call of all is a half one), then both branches."""
    family, pipe = FAMILIES[name], reuse(build(name), interval=1, start=0.5)
    found = run(pipe, name)
    assert stood_down(pipe) == "" and not same(found, plain(name))
    assert done(pipe) == (2, 0, 2)
    if name not in BATCHED:
        assert strips(pipe)[family.branches[1]] == "..CC"


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(GUIDED)))
def test_families_without_a_second_branch(name: str) -> None:
    """Where the pipeline never has one, the plan says so; where this call has none, the report does."""
    decided = plan(build(name), preset=None, guidance="reuse").items[0]
    pipe = reuse(build(name))
    assert same(run(pipe, name), plain(name))
    if name in NEVER:
        assert decided.status == "skipped" and "takes no negative prompt" in decided.reason
    else:
        assert decided.status == "enabled" and "true guidance" in decided.reason
        assert "without an unconditional branch" in stood_down(pipe)


@pytest.mark.parametrize("name", ["pixart_sigma", "cogvideox", "ltx", "z_image"])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_a_batch_that_is_not_doubled(name: str, start: float) -> None:
    """Without guidance two samples are no two halves, also where the pipeline calls its one call cond_uncond."""
    call = FAMILIES[name].call()
    off: dict[str, Any] = {"guidance_scale": 0.0 if name == "z_image" else 1.0}
    for key in call:
        if key.startswith("prompt_"):
            off[key] = call[key] * 2 if isinstance(call[key], list) else torch.cat([call[key]] * 2)
        elif key.startswith("negative_prompt_"):
            off[key] = None
    expected = run(build(name), name, **off)
    pipe = reuse(build(name), interval=2 if start == 0 else 1, start=start)
    assert same(run(pipe, name, **off), expected)
    assert "without an unconditional branch" in stood_down(pipe) and done(pipe) == (0, 0, 0)
    assert pipe.acceleration.report.cache_bytes_held == 0
