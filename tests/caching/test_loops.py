"""Several loops in one run, and shapes that change within a loop: nothing remembered of the one acts in the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate
from tests import tiny

STEPS = 6
NO_GUARDS: dict[str, Any] = {"cache_min_steps": 0, "cache_last_steps": 0}
# Settings at which what an earlier loop left would be seen: older samples in a forecast, sums and baselines of gates,
# caps that count.
METHODS: dict[str, dict[str, Any]] = {
    "adacache": {"cache_codebook": {1e9: 2}},
    "dicache": {"cache_threshold": 0.15, "cache_start": 0.0},
    "easycache": {"cache_threshold": 0.6, "cache_warmup_steps": 0},
    "first_block": {"cache_threshold": 1e9, "cache_max_total": 2},
    "first_block order 1": {"cache_threshold": 1e9, "cache_order": 1},
    "interval": {"cache_interval": 3, "cache_order": 2},
    "schedule": {"cache_steps": [0, 3], "cache_order": 2},
    "schedule correct": {"cache_steps": [0, 3], "cache_order": 1, "cache_correct": 1},
    "teacache": {"cache_coefficients": (1.0, 0.0), "cache_threshold": 9.0},
}


def built(method: str, **more: Any) -> Any:
    return accelerate(
        tiny.build("wan"), None, strict=True, cache=method.split()[0], **NO_GUARDS | METHODS[method] | more
    )


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def denoise(pipe: Any, latents: torch.Tensor, steps: int = STEPS, grow: int | None = None) -> torch.Tensor:
    """A loop of the user's own over one branch; at step `grow` the one sample becomes two."""
    pipe.scheduler.set_timesteps(steps)
    for index, timestep in enumerate(pipe.scheduler.timesteps):
        if index == grow:
            latents = torch.cat([latents, draw(9, *latents.shape)])
        text = draw(1, 1, tiny.TEXT_TOKENS, 32).repeat(len(latents), 1, 1)
        noise = pipe.transformer(
            hidden_states=latents,
            timestep=timestep.repeat(len(latents)),
            encoder_hidden_states=text,
            return_dict=False,
        )[0]
        latents = pipe.scheduler.step(noise, timestep, latents, return_dict=False)[0]
    return latents


def start(pipe: Any, seed: int) -> torch.Tensor:
    return draw(seed, 1, pipe.transformer.config.in_channels, 2, 4, 4)


def strip(pipe: Any, first: int = 0) -> str:
    return "".join("C" if step.computed else "." for step in pipe.acceleration.report.steps[first:])


@pytest.mark.parametrize("method", METHODS)
def test_a_second_loop_is_a_loop_of_its_own(method: str) -> None:
    alone = built(method)
    with torch.no_grad(), alone.acceleration.run():
        wanted = denoise(alone, start(alone, 5))
    pipe = built(method)
    with torch.no_grad(), pipe.acceleration.run():
        denoise(pipe, 3 * start(pipe, 4))
        found = denoise(pipe, start(pipe, 5))
    assert strip(pipe, STEPS) == strip(alone) and "." in strip(alone)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("method", METHODS)
def test_a_loop_whose_batch_grows_begins_anew(method: str) -> None:
    """One remembered sample fits two by broadcasting: nothing raises, so only the values tell."""
    pipe, plain = built(method), tiny.build("wan")
    seen: dict[str, list[torch.Tensor]] = {}
    for name, one in (("cached", pipe), ("plain", plain)):
        inputs = seen.setdefault(name, [])
        handle = one.transformer.register_forward_hook(
            lambda module, args, kwargs, output, inputs=inputs: inputs.append(output[0].clone()), with_kwargs=True
        )
        with torch.no_grad():
            if one is pipe:
                with pipe.acceleration.run():
                    denoise(pipe, start(pipe, 5), grow=2)
            else:
                denoise(plain, start(plain, 5), grow=2)
        handle.remove()
    marks = strip(pipe)
    assert marks[2] == "C", "nothing is known of two samples"
    assert [len(output) for output in seen["cached"]] == [1, 1, *[2] * (STEPS - 2)]


def test_a_forecast_takes_no_sample_of_another_shape() -> None:
    """Only steps 0 and 2 are computed and the batch grows at 2: step 3 reuses step 2's output as it is."""
    pipe = built("schedule", cache_steps=[0, 2], cache_order=1)
    outputs: list[torch.Tensor] = []
    handle = pipe.transformer.register_forward_hook(lambda module, args, output: outputs.append(output[0].clone()))
    with torch.no_grad(), pipe.acceleration.run():
        denoise(pipe, start(pipe, 5), grow=2)
    handle.remove()
    assert strip(pipe) == "C.C..." and torch.equal(outputs[3], outputs[2])


def test_a_loop_that_sits_out_is_judged_by_itself() -> None:
    """Four steps are too few and twelve are not, in either order, within one run."""
    for counts, wanted in (((4, 12), "C" * 4 + "C" + "." * 11), ((12, 4), "C" + "." * 11 + "C" * 4)):
        pipe = built("first_block order 1", cache_order=0, cache_min_steps=9)
        with torch.no_grad(), pipe.acceleration.run():
            for count in counts:
                denoise(pipe, start(pipe, 5), count)
        assert strip(pipe) == wanted
