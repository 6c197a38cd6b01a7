"""A plan before any weight is there: for a name, for a folder of configs, for a pipeline on meta."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    """Its modules on meta; weights that two layers share stay one (`to_empty` would make two of them)."""
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.to_empty(device="meta")
            getattr(part, "tie_weights", lambda: None)()
    return pipe


WISHES: list[dict[str, Any]] = [
    {"cache": "first_block", "quantization": "fp8", "offload": "layerwise"},
    {"offload": "stage", "quantization": "int8", "vae_tiling": "exact"},
    {"quantization": "svdquant", "cache": "dbcache", "attention": "radial"},
    {"vae_tiling": "blended", "attention": "sage", "guidance": "reuse", "compile": True, "cache": "adaptive"},
]


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("hardware", ["4090", "cpu"])
def test_a_pipeline_on_meta_gets_the_plan_of_the_one_with_weights(family: str, hardware: str) -> None:
    """Word for word: states, reasons, parameters, predicted bytes, notes."""
    dtype = torch.bfloat16 if hardware == "4090" else torch.float32
    loaded, empty = tiny.build(family, dtype=dtype), on_meta(tiny.build(family, dtype=dtype))
    for wishes in WISHES:
        assert plan(empty, None, hardware=hardware, **wishes) == plan(loaded, None, hardware=hardware, **wishes)


def test_what_they_say_is_something() -> None:
    decided = plan(on_meta(tiny.build("flux")), None, hardware="4090", **WISHES[0])
    assert set(decided.enabled) == {"cache.first_block", "offload.layerwise", "quantization.fp8"}
    assert decided.item("offload.layerwise").predicted["moved_bytes_per_pass"]
    [quantized] = plan(on_meta(tiny.build("flux")), None, hardware="4090", quantization="svdquant").items
    assert quantized.status == "enabled" and "34 layers" in quantized.reason


class Made(TorchDispatchMode):
    """Bytes of tensors that come to be in memory (those on meta take none)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self.bytes += leaf.numel() * leaf.element_size()
        return out


def test_a_plan_by_name_reads_and_makes_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps it quick, without a clock: of 22 GiB of weights nothing is read and nothing allocated."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights are read")

    monkeypatch.setattr("safetensors.safe_open", refuse)
    monkeypatch.setattr("safetensors.torch.load_file", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    with Made() as made:
        decided = plan("flux.1-dev", hardware="4090")
    assert decided.enabled and made.bytes < 2**20
    with Made() as made:
        torch.ones(2**20)
    assert made.bytes == 4 * 2**20  # it would be seen


def test_accelerate_still_wants_weights() -> None:
    with pytest.raises(InvalidPipelineError, match="on the meta device"):
        accelerate(on_meta(tiny.build("flux")), None, cache="first_block")
    with pytest.raises(InvalidPipelineError, match="must be a diffusers pipeline"):
        accelerate("flux.1-dev")
    with pytest.raises(InvalidOptionError, match=r"did you mean 'flux\.1-dev'"):
        plan("flux.1-dve")
