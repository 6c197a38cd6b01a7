"""Stage offload and text encoders: outputs kept per prompt, in memory or in files, and never of other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import accelerate
from tests import tiny
from tests.invariants.levers import plain
from tests.offload.stages import calls_of, staged, stats


def test_a_known_prompt_neither_calls_nor_loads_an_encoder() -> None:
    pipe = staged("flux")
    counts = [calls_of(pipe.text_encoder), calls_of(pipe.text_encoder_2)]
    first = tiny.run(pipe, "flux")
    assert counts == [[1], [1]] and stats(pipe)["text_misses"] == 2
    again = tiny.run(pipe, "flux")
    assert counts == [[1], [1]] and stats(pipe)["text_hits"] == 2 and stats(pipe)["encode_in_bytes"] == 0
    assert torch.equal(first, again)
    other = tiny.run(pipe, "flux", prompt=tiny.PROMPTS[1])
    assert counts == [[2], [2]] and torch.equal(other, plain("flux", prompt=tiny.PROMPTS[1]))
    longer = tiny.run(pipe, "flux", max_sequence_length=12)
    assert counts == [[2], [3]], "another length of the long prompt, the same short one"
    assert torch.equal(longer, plain("flux", max_sequence_length=12))


def test_the_cap_in_bytes() -> None:
    """Two prompts do not fit where the cap is that of one; 0 keeps nothing."""
    pipe = staged("flux")
    tiny.run(pipe, "flux")
    one = stats(pipe)["text_bytes"]
    assert one > 0
    pipe = staged("flux", text_cache_bytes=one)
    for number in (0, 1, 1, 0):
        out = tiny.run(pipe, "flux", prompt=tiny.PROMPTS[number])
        assert torch.equal(out, plain("flux", prompt=tiny.PROMPTS[number]))
        assert stats(pipe)["text_bytes"] <= one
    assert stats(pipe)["text_hits"] == 0
    pipe = staged("flux", text_cache_bytes=0)
    counts = calls_of(pipe.text_encoder)
    assert all(torch.equal(tiny.run(pipe, "flux"), plain("flux")) for _ in range(2)) and counts == [2]


def _load(encoder: torch.nn.Module) -> None:
    encoder.load_state_dict({name: tensor * 1.5 for name, tensor in encoder.state_dict().items()})


def _merge(encoder: torch.nn.Module) -> None:
    for parameter in encoder.parameters():
        parameter.data += 0.1  # how an adapter is merged: PyTorch counts no write


def _replace(encoder: torch.nn.Module) -> None:
    for child in encoder.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None:
                child._parameters[name] = torch.nn.Parameter(parameter.detach() * 0.5)


def _set(encoder: torch.nn.Module) -> None:
    for child in encoder.modules():
        if hasattr(child, "eps"):
            child.eps = 0.5
        if hasattr(child, "variance_epsilon"):
            child.variance_epsilon = 0.5


@pytest.mark.parametrize("change", [_load, _merge, _replace, _set])
def test_changed_encoders_are_noticed(change: Callable[[torch.nn.Module], None]) -> None:
    """After a change between runs, the picture is that of a plain pipeline so changed."""
    twin = tiny.build("flux")
    for encoder in (twin.text_encoder, twin.text_encoder_2):
        change(encoder)
    pipe = staged("flux")
    tiny.run(pipe, "flux")
    for encoder in (pipe.text_encoder, pipe.text_encoder_2):
        change(encoder)
    changed = tiny.run(twin, "flux")
    assert not torch.equal(changed, plain("flux"))
    assert torch.equal(tiny.run(pipe, "flux"), changed) and stats(pipe)["text_hits"] == 0
    assert torch.equal(tiny.run(pipe, "flux"), changed) and stats(pipe)["text_hits"] == 2


def test_an_adapter_on_a_text_encoder() -> None:
    """A LoRA put on between runs, its scale, and switching it off: each picture is that of a plain pipeline."""
    peft = pytest.importorskip("peft")

    def adapt(pipe: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
            peft.inject_adapter_in_model(config, pipe.text_encoder)

    def layers(pipe: Any) -> list[Any]:
        return [child for child in pipe.text_encoder.modules() if hasattr(child, "lora_A")]

    def scale(pipe: Any) -> None:
        for layer in layers(pipe):
            layer.scaling["default"] = 3.0

    def disable(pipe: Any) -> None:
        for layer in layers(pipe):
            layer.enable_adapters(False)

    pipe, twin = staged("flux"), tiny.build("flux")
    seen = [tiny.run(pipe, "flux")]
    for change in (adapt, scale, disable):
        for each in (pipe, twin):
            change(each)
        seen.append(tiny.run(pipe, "flux"))
        assert torch.equal(seen[-1], tiny.run(twin, "flux"))
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[0], seen[3])


def test_a_store_outlives_the_pipeline(tmp_path: Path) -> None:
    """Another pipeline of equal weights calls no encoder; one of other weights does, and both are right."""
    tiny.run(staged("flux", text_store=tmp_path), "flux")
    assert len(list(tmp_path.iterdir())) == 2
    twin = staged("flux", text_store=tmp_path, text_cache_bytes=0)
    counts = calls_of(twin.text_encoder_2)
    assert torch.equal(tiny.run(twin, "flux"), plain("flux")) and counts == [0]
    other = accelerate(tiny.build("flux", seed=1), None, offload="stage", offload_text_store=str(tmp_path))
    counts = calls_of(other.text_encoder_2)
    assert torch.equal(tiny.run(other, "flux"), tiny.run(tiny.build("flux", seed=1), "flux")) and counts == [1]


def test_what_the_caller_writes_into_stays_his() -> None:
    pipe = staged("flux")
    first = pipe.encode_prompt(tiny.PROMPTS[0], None, max_sequence_length=tiny.TEXT_TOKENS)
    first[0].zero_()
    again = pipe.encode_prompt(tiny.PROMPTS[0], None, max_sequence_length=tiny.TEXT_TOKENS)
    plainly = tiny.build("flux").encode_prompt(tiny.PROMPTS[0], None, max_sequence_length=tiny.TEXT_TOKENS)
    assert all(map(torch.equal, again, plainly))
