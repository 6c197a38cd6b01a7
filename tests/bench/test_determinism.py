"""`determinism`: equal where it is equal, and where it is not, the place of an error that was put there is named."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffaccel import accelerate
from diffaccel.bench import child, determinism
from diffaccel.bench.contender import Contender
from diffaccel.bench.lab import Lab
from diffaccel.bench.same import table
from diffaccel.bench.tracing import digest, part, tracing
from diffaccel.errors import DiffaccelError, InvalidOptionError
from tests import fingerprint, tiny

CALL = {"height": 16, "width": 16, "max_sequence_length": 16, "num_inference_steps": 3}
PROMPTS = ["red ring", "blue square"]


def test_the_same_seed_gives_the_same_bits_and_nothing_is_left_behind() -> None:
    pipe = tiny.build("flux")
    tiny.run(pipe, "flux", **CALL)
    before = fingerprint.snapshot_pipe(pipe)
    threads = torch.get_num_threads()
    found = determinism(pipe, PROMPTS, checks=("repeat", "position", "threads"), **CALL)
    assert [one.equal for one in found[:2]] == [True, True] and found[2].equal is not None
    assert torch.get_num_threads() == threads
    fingerprint.assert_same(before, fingerprint.snapshot_pipe(pipe))
    assert "same seed twice" in table(found) and "bit-equal" in table(found)


def test_a_batch_is_the_same_up_to_rounding() -> None:
    (found,) = determinism(tiny.build("sd3"), PROMPTS, checks=("batch",), height=8, width=8, num_inference_steps=3)
    assert found.equal or (found.largest < 1e-4 and found.site is not None)


@pytest.mark.slow
def test_compiled_blocks_part_in_a_block_of_the_first_step_or_not_at_all() -> None:
    """With a backend that changes nothing they are bit-equal; what cannot be compiled is not run, with the reason."""
    (found,) = determinism(
        tiny.build("flux"), PROMPTS, checks=("compile",), compile_options={"compile_backend": "eager"}, **CALL
    )
    assert found.equal is True or "compile" in found.reason or found.largest < 1e-4


@pytest.mark.parametrize("block", ["transformer_blocks.1", "single_transformer_blocks.0"])
def test_where_it_starts_is_named(block: str) -> None:
    """A block that adds something else at every run, from its second step on."""
    pipe = tiny.build("flux")
    attribute, at = block.split(".")
    module = getattr(pipe.transformer, attribute)[int(at)]
    calls = itertools.count()

    def shake(module: Any, args: Any, output: Any) -> Any:
        number = next(calls)
        step, run = number % CALL["num_inference_steps"], number // CALL["num_inference_steps"]
        shift = 0.125 * (run % 2) if step >= 1 else 0.0
        return (output[0], output[1] + shift) if isinstance(output, tuple) else output + shift

    handle = module.register_forward_hook(shake)
    (found,) = determinism(pipe, PROMPTS, checks=("repeat",), **CALL)
    handle.remove()
    assert (found.equal, found.step, found.site) == (False, 1, f"transformer.{block}")
    assert found.at_start == pytest.approx(0.125, abs=1e-5) and 0 < found.largest <= 1
    assert f"step 2, transformer.{block}" in str(found)


def test_a_decoder_that_parts_is_outside_of_the_loop() -> None:
    pipe = tiny.build("flux")
    counted = itertools.count()
    handle = pipe.vae.decoder.register_forward_hook(lambda module, args, output: output + 0.25 * next(counted))
    (found,) = determinism(pipe, PROMPTS, checks=("repeat",), **CALL)
    handle.remove()
    assert (found.equal, found.step, found.site) == (False, None, "vae.decoder") and "outside of the loop" in str(
        found
    )


def test_a_plan_is_looked_at_and_an_acceleration_comes_back() -> None:
    pipe = accelerate(tiny.build("flux"), None, cache="interval", cache_min_steps=0)
    handle = pipe.acceleration
    (found,) = determinism(pipe, PROMPTS, checks=("repeat",), wish="cache=interval,cache_min_steps=0", **CALL)
    assert found.equal and pipe.acceleration is handle


@pytest.fixture
def source(tmp_path: Path) -> str:
    root = str(Path(__file__).parents[2])
    text = f"import sys\nsys.path.insert(0, {root!r})\nfrom tests import tiny\n\nbuild = lambda: tiny.build('flux')\n"
    (tmp_path / "mine.py").write_text(text)
    return str(tmp_path / "mine.py")


@pytest.mark.slow
def test_another_process_builds_the_pipeline_by_its_source(source: str) -> None:
    pipe = tiny.build("flux")
    (found,) = determinism(pipe, PROMPTS, checks=("processes",), source=source, **CALL)
    assert found.equal is True, found
    (broken,) = determinism(pipe, PROMPTS, checks=("processes",), source=source.replace("mine", "not"), **CALL)
    assert broken.equal is None and "no Python file" in broken.reason


def test_what_another_process_does_gives_the_same_trace(source: str, tmp_path: Path) -> None:
    """Its `main`, in this process; without a source, or with arguments that cannot be written down, it is not run."""
    pipe = tiny.build("flux")
    job = {"source": source, "prompt": PROMPTS[0], "seed": 3, "call": CALL, "wish": {}, "keep": 5, "threads": 1}
    (tmp_path / "file.json").write_text(json.dumps({**job, "out": str(tmp_path)}))
    child.main(str(tmp_path / "file.json"))
    picture, trace = Lab(pipe, (PROMPTS[0], PROMPTS[0]), 3, CALL, Contender("plain")).run(5)
    assert np.array_equal(np.load(tmp_path / "picture.npy"), picture)
    rows = json.loads((tmp_path / "marks.json").read_text())
    assert rows == [[mark.step, mark.site, mark.digest] for mark in trace.marks] and len(rows) > 12
    assert all(map(torch.equal, torch.load(tmp_path / "kept.pt"), trace.kept)) and trace.kept
    (absent,) = determinism(pipe, PROMPTS, checks=("processes",), **CALL)
    assert absent.equal is None and "source" in absent.reason
    with pytest.raises(DiffaccelError, match="cannot be handed"):
        child.in_a_process({"call": {"image": picture}}, None)


def test_digests_see_one_bit_and_a_part_of_a_batch() -> None:
    ours = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    theirs = ours.clone()
    theirs[0, 0] = torch.nextafter(theirs[0, 0], torch.tensor(2.0))
    assert digest([ours]) != digest([theirs]) and digest([ours]) == digest([ours.clone()])
    assert digest([ours.bfloat16()]) != digest([ours.half()])
    assert torch.equal(part(ours, (1, 2)), ours[[1, 3]])  # two branches of a batch of two
    assert part(ours, (0, 3)) is ours and part(ours, (0, 1)) is ours


def test_tracing_takes_its_hooks_off() -> None:
    pipe = tiny.build("sdxl")
    tiny.run(pipe, "sdxl", num_inference_steps=1)  # transformers' own hooks come with the first run
    before = [len(module._forward_hooks) for _, one in tiny.component_modules(pipe) for module in one.modules()]
    with tracing(pipe) as trace:
        tiny.run(pipe, "sdxl", num_inference_steps=1)
    names = {mark.site for mark in trace.marks}
    assert {"text_encoder", "unet", "unet.mid_block", "unet.up_blocks.0", "vae.decoder"} <= names
    after = [len(module._forward_hooks) for _, one in tiny.component_modules(pipe) for module in one.modules()]
    assert after == before


@pytest.mark.parametrize(
    ("given", "said"),
    [({"checks": ("repeet",)}, "repeat"), ({"wish": "plain,steps=2"}, "without steps"), ({"heigth": 8}, "height")],
)
def test_bad_input_is_refused_before_anything_runs(given: dict[str, Any], said: str) -> None:
    pipe = tiny.build("flux")
    pipe.transformer.forward = lambda *_, **__: pytest.fail("something ran")
    with pytest.raises(InvalidOptionError, match=said):
        determinism(pipe, PROMPTS, **given)
