"""A pipeline with a ControlNet: no plan promises a cache that would step aside in every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline

from diffaccel import UnsupportedModelError, accelerate, plan
from diffaccel.planner.levers import PLACES
from tests import tiny
from tests.models.families.table import build

OPTIONS: dict[str, dict[str, Any]] = {
    "custom": {"cache_gate": None},
    "dbcache": {"cache_front_blocks": 1},
    "magcache": {"cache_ratios": (1.0, 0.9), "cache_threshold": 0.1},
    "schedule": {"cache_steps": [0, 2]},
    "teacache": {"cache_coefficients": (1.0, 0.0), "cache_threshold": 0.1},
}
METHODS = [str(value) for value in PLACES["cache"].ready if value not in ("custom", "deepcache")]


def sdxl_controlnet() -> Any:
    """A tiny SDXL pipeline with a ControlNet made from its own U-Net."""
    plain = tiny.build("sdxl")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        controlnet = ControlNetModel.from_unet(plain.unet, conditioning_embedding_out_channels=(16, 32))
    return StableDiffusionXLControlNetPipeline(**plain.components, controlnet=controlnet)


@pytest.fixture(scope="module")
def pipes() -> dict[str, Any]:
    return {"flux": build("flux_controlnet"), "sdxl": sdxl_controlnet(), "plain": tiny.build("flux")}


@pytest.mark.parametrize(("kind", "method"), [*(("flux", m) for m in METHODS), ("sdxl", "deepcache")])
def test_skipped_with_the_reason_and_raised_when_strict(pipes: dict[str, Any], kind: str, method: str) -> None:
    pipe, wishes = pipes[kind], {"cache": method, **OPTIONS.get(method, {})}
    item = plan(pipe, None, **wishes).item(f"cache.{method}")
    assert item.status == "skipped" and "controlnet" in item.reason and item.predicted == {}
    with pytest.raises(UnsupportedModelError, match="controlnet") as error:
        accelerate(pipe, None, strict=True, **wishes)
    assert len(str(error.value)) <= 300
    accelerate(pipe, None)
    before = pipe.acceleration.plan
    with pytest.raises(UnsupportedModelError, match="controlnet"):
        pipe.enable_step_schedule(steps=[0, 2])
    assert pipe.acceleration.plan == before


@pytest.mark.parametrize("method", METHODS)
def test_without_a_controlnet_nothing_changes(pipes: dict[str, Any], method: str) -> None:
    """The negative control."""
    assert "controlnet" not in plan(pipes["plain"], None, cache=method, **OPTIONS.get(method, {})).items[0].reason
