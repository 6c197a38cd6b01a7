"""`per_sample`: every sample of a batch gets the picture of its single run (C09, nunchaku#596)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import attach
from diffaccel.caching import Denoiser, Forecast, Guards, Modules, ProbeGate
from diffaccel.caching.grouped import groups_of, select_rows
from diffaccel.errors import UnsupportedModelError
from tests import tiny
from tests.caching.settings import cached
from tests.invariants.levers import pattern

# Thresholds at which the calm and the restless picture need different steps.
THRESHOLDS = {
    "dbcache": {"flux": 0.3, "sd3": 0.3, "wan": 0.1},
    "dicache": {"flux": 0.05, "sd3": 0.05, "wan": 0.05},
    "easycache": {"flux": 0.1, "sd3": 0.1, "wan": 0.3},
    "first_block": {"flux": 0.3, "sd3": 0.3, "wan": 0.1},
}
ORDER = {"dbcache": {"cache_order": 1}}
SHAPES = {"flux": (16, 16), "sd3": (4, 8, 8), "wan": (16, 3, 4, 4)}
STEPS = 8


def noise(family: str) -> torch.Tensor:
    """A calm picture and a restless one, [2, ...]."""
    made = torch.stack([torch.randn(SHAPES[family], generator=torch.Generator().manual_seed(3 + i)) for i in range(2)])
    return made * torch.tensor([1.0, 6.0]).reshape(2, *([1] * len(SHAPES[family])))


def run(pipe: Any, family: str, samples: slice) -> tuple[torch.Tensor, dict[str, str]]:
    """Latents of the chosen samples, and the strip of every branch."""
    prompts = list(tiny.PROMPTS[:2])[samples]
    more = {"negative_prompt": ["blurry"] * len(prompts)} if family != "flux" else {}
    call = {
        "prompt": prompts,
        "latents": noise(family)[samples],
        "num_inference_steps": STEPS,
        "output_type": "latent",
    }
    return tiny.run(pipe, family, **call, **more), pipe.acceleration.report.strip()


def pipe_with(method: str, family: str = "flux", **changes: Any) -> Any:
    threshold = THRESHOLDS[method][family]
    return cached(family, method, cache_threshold=threshold, **ORDER.get(method, {}), **changes)


@pytest.mark.parametrize("method", sorted(THRESHOLDS))
@pytest.mark.parametrize("family", sorted(SHAPES))
def test_a_batch_gives_the_pictures_of_single_runs(family: str, method: str) -> None:
    singles = [run(pipe_with(method, family), family, slice(i, i + 1)) for i in range(2)]
    assert singles[0][1] != singles[1][1], "the two need different steps, or nothing is tested here"
    batch, strips = run(pipe_with(method, family, cache_per_sample=True), family, slice(0, 2))

    def equal(found: torch.Tensor, i: int) -> bool:
        alone = singles[i][0]
        return torch.allclose(found[i : i + 1], alone, rtol=1e-4, atol=1e-5 * float(alone.abs().max()))

    assert equal(batch, 0) and equal(batch, 1)
    for branch, strip in strips.items():  # computed where any sample was
        alone_strips = [single[branch] for _, single in singles]
        assert strip == "".join("C" if "C" in marks else "." for marks in zip(*alone_strips, strict=True))
    joint, _ = run(pipe_with(method, family), family, slice(0, 2))
    assert not (equal(joint, 0) and equal(joint, 1)), "negative control: one decision for both"


def test_groups() -> None:
    assert groups_of(3, False) == ((0,), (1,), (2,)) and groups_of(4, True) == ((0, 2), (1, 3))
    pair = (torch.arange(4), torch.arange(4) * 10)
    assert [t.tolist() for t in select_rows(pair, (1, 3))] == [[1, 3], [10, 30]]


def test_memory_is_freed_and_capped() -> None:
    pipe = pipe_with("first_block", cache_per_sample=True)
    run(pipe, "flux", slice(0, 2))
    report = pipe.acceleration.report
    assert report.cache_bytes_held == 0 and report.cache_bytes_peak > 0
    errors = [step.forecast_error for step in report.steps if step.forecast_error is not None]
    assert errors and all(len(error) == 2 for error in errors)
    cap = report.cache_bytes_peak // 4
    capped = pipe_with("first_block", cache_per_sample=True, cache_max_bytes=cap)
    run(capped, "flux", slice(0, 2))
    assert capped.acceleration.report.cache_bytes_peak <= cap and all(pattern(capped))


def test_scopes_without_it_say_so() -> None:
    pipe = attach(tiny.build("flux"))
    parts = {"gate": ProbeGate(0.5), "predictor": Forecast(0), "guard": Guards(), "per_sample": True}
    with pytest.raises(UnsupportedModelError, match="per_sample needs the scope"):
        pipe.enable_cache(**parts, scope=Modules(front=1))
    pipe.enable_cache(**parts, scope=Denoiser(front=1))
    output, _ = run(pipe, "flux", slice(0, 2))
    assert torch.isfinite(output).all()
