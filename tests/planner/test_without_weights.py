"""A plan before any weight is there: for a name, for a folder of configs, for a pipeline on meta."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffaccel import InvalidOptionError, InvalidPipelineError, Plan, accelerate, plan
from diffaccel.planner.blueprint import pipeline_of
from tests import tiny
from tests.ledger.test_closed_form import save


def test_a_name_is_enough() -> None:
    decided = plan("flux.1-dev", hardware="4090")
    assert decided.model == "flux.1-dev (bundled config, no weights)" and decided.pipeline == "FluxPipeline"
    assert decided.preset == "auto (4090-flux)"
    assert {"quantization.fp8", "attention.sage"} <= set(decided.enabled)
    assert any(name.startswith("cache.") for name in decided.enabled)
    assert "meta" not in str(decided)
    assert Plan.from_dict(json.loads(json.dumps(decided.to_dict()))) == Plan.from_toml(decided.to_toml()) == decided


def test_nothing_is_allocated() -> None:
    pipe, _ = pipeline_of("wan2.2-t2v-a14b")
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    assert len(modules) == 4 and {p.device.type for m in modules for p in m.parameters()} == {"meta"}
    assert sum(p.numel() for p in pipe.transformer.parameters()) == 14288491584


def test_a_folder_of_configs(tmp_path: Path) -> None:
    decided = plan(save(tmp_path, num_layers=2, num_single_layers=2), hardware="h100")
    assert decided.model.startswith(f"{tmp_path.name} (folder") and decided.family == "flux"


def on_meta(pipe: Any) -> Any:
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.to_empty(device="meta")
    return pipe


def test_a_pipeline_on_meta_gets_the_plan_of_the_one_with_weights() -> None:
    wishes = {"cache": "first_block", "quantization": "fp8", "offload": "layerwise"}
    with_weights = plan(tiny.build("flux"), None, hardware="4090", **wishes)
    without = plan(on_meta(tiny.build("flux")), None, hardware="4090", **wishes)
    assert [(i.name, i.status, i.fidelity, i.params) for i in without.items] == [
        (i.name, i.status, i.fidelity, i.params) for i in with_weights.items
    ]
    assert set(without.enabled) == {"cache.first_block", "offload.layerwise", "quantization.fp8"}


def test_accelerate_still_wants_weights() -> None:
    with pytest.raises(InvalidPipelineError, match="on the meta device"):
        accelerate(on_meta(tiny.build("flux")), None, cache="first_block")
    with pytest.raises(InvalidPipelineError, match="must be a diffusers pipeline"):
        accelerate("flux.1-dev")
    with pytest.raises(InvalidOptionError, match=r"did you mean 'flux\.1-dev'"):
        plan("flux.1-dve")
