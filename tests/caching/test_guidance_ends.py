"""Guidance that ends in mid-run: the half that goes on reuses what the doubled batch computed of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate
from tests import tiny
from tests.models.families import table

STEPS = 8
ENDS = 3  # the first step without guidance
NO_GUARDS = {"cache_min_steps": 0, "cache_last_steps": 0}
METHODS: dict[str, dict[str, Any]] = {
    "adaptive": {"cache_tolerance": 1e9, "cache_max_gap": 2},
    "easycache": {"cache_threshold": 1e9, "cache_warmup_steps": 0},
    "first_block": {"cache_threshold": 1e9},
    "interval": {"cache_interval": 2},
    "schedule": {"cache_steps": "10101010"},
    "schedule order 1": {"cache_steps": "11010010", "cache_order": 1},
    "taylorseer": {"cache_interval": 3, "cache_first_enhance": 2},
}
EXPECTED = {
    "adaptive": "CC.CC.C.",  # begins anew: what the pipeline makes of its branches is another thing now
    "easycache": "CC......",
    "first_block": "C.......",
    "interval": "C.C.C.CC",
    "schedule": "C.C.C.C.",
    "schedule order 1": "CC.C..C.",
    "taylorseer": "CC..C..C",
}
# One-batch pipelines whose guidance a callback can end. (Of the others, Z-Image ends it itself, LTX, LTX-2 and Mochi
# keep masks of the doubled batch that no callback reaches, CogVideoX and PixArt ask once whether there is guidance.)
BY_CALLBACK = ("sana", "sd3")


def build(family: str) -> Any:
    return tiny.build("sdxl") if family == "sdxl" else table.build(family)


def cut(pipe: Any, step: int, timestep: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """End guidance: scale 0, and of what carries both branches the conditional half."""
    if step != ENDS - 1:
        return {}
    rows = len(given["latents"])
    pipe._guidance_scale = 0.0
    return {name: value[rows:] for name, value in given.items() if len(value) == 2 * rows}


def run(pipe: Any, family: str, **others: Any) -> torch.Tensor:
    if family == "z_image":  # guidance ends where sigma is below 0.8
        more: dict[str, Any] = {"sigmas": [1.0, 0.95, 0.9, 0.7, 0.6, 0.5, 0.4, 0.2], "cfg_truncation": 0.2} | others
        pipe.scheduler.register_to_config(shift=1.0, use_dynamic_shifting=False)
        pipe.scheduler.set_shift(1.0)
    else:
        allowed = type(pipe)._callback_tensor_inputs
        names = [name for name in allowed if name == "latents" or "prompt" in name or name.startswith("add_")]
        names = [name for name in names if not name.startswith("negative")]
        more = {"callback_on_step_end": cut, "callback_on_step_end_tensor_inputs": names}
    if family == "sdxl":
        return tiny.run(pipe, "sdxl", num_inference_steps=STEPS, output_type="latent", **more)
    return table.run(pipe, family, num_inference_steps=STEPS, **more)[0]


def strip(pipe: Any) -> str:
    """Computed and reused calls in the order of steps, whatever the branch is called."""
    steps = pipe.acceleration.report.steps
    assert [step.index for step in steps] == list(range(STEPS))
    return "".join("C" if step.computed else "." for step in steps)


def cached(family: str, method: str, **more: Any) -> Any:
    return accelerate(
        build(family), None, strict=True, cache=method.split()[0], **NO_GUARDS, **METHODS[method], **more
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", [*BY_CALLBACK, "z_image"])
def test_no_step_more_is_computed(family: str, method: str) -> None:
    pipe = cached(family, method)
    run(pipe, family)
    assert strip(pipe) == EXPECTED[method]
    run(pipe, family)
    assert strip(pipe) == EXPECTED[method], "nothing of the first run is left"


@pytest.mark.parametrize("method", ["easycache", "schedule"])
def test_on_a_unet(method: str) -> None:
    pipe = cached("sdxl", method)
    run(pipe, "sdxl")
    assert strip(pipe) == EXPECTED[method]


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("family", [*BY_CALLBACK, "z_image", "sdxl"])
def test_the_half_is_the_conditional_one(family: str, per_sample: bool) -> None:
    """With only step 0 computed, every later answer is step 0's, and behind the end its conditional half."""
    pipe = build(family)
    seen: list[torch.Tensor] = []
    module = pipe.unet if family == "sdxl" else pipe.transformer
    options = {"cache_scope": "denoiser", "cache_order": 0, "cache_per_sample": per_sample}
    handle = module.register_forward_hook(lambda module, args, output: seen.append(_stacked(output)))
    accelerate(pipe, None, strict=True, cache="schedule", cache_steps=[0], **NO_GUARDS, **options)
    run(pipe, family)
    handle.remove()
    whole = [answer for answer in seen if len(answer) == 2]
    half = [answer for answer in seen if len(answer) == 1]
    assert len(whole) == ENDS and len(half) == STEPS - ENDS
    mine, other = (0, 1) if family == "z_image" else (1, 0)
    assert all(torch.equal(answer[0], whole[0][mine]) for answer in half)
    assert not torch.equal(whole[0][mine], whole[0][other]), "the halves differ"


def _stacked(output: Any) -> torch.Tensor:
    first = output[0]
    return torch.stack(list(first)) if isinstance(first, list) else first.clone()


@pytest.mark.parametrize("method", ["delta_dit", "first_block", "interval", "schedule"])
def test_captions_of_other_lengths(method: str) -> None:
    """Z-Image pads both branches to the longer caption; alone, the conditional one has fewer tokens."""
    pipe = build("z_image")
    config = dict(pipe.transformer.config) | {"axes_lens": [512, 64, 64]}
    weights = pipe.transformer.state_dict()
    pipe.transformer = type(pipe.transformer).from_config(config).eval()
    pipe.transformer.load_state_dict(weights)
    more = METHODS.get(method, {"cache_interval": 2}) | ({"cache_scope": "stack"} if method == "schedule" else {})
    accelerate(pipe, None, strict=True, cache=method, **NO_GUARDS, **more)
    negative = table.FAMILIES["z_image"].call()["negative_prompt_embeds"]
    run(pipe, "z_image", negative_prompt_embeds=[torch.cat([embeds] * 20) for embeds in negative])
    assert strip(pipe)[:-1] == EXPECTED.get(method, EXPECTED["schedule"])[:-1]
