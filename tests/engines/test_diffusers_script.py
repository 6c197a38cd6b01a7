"""The script for diffusers alone runs, and makes the picture that diffusers makes when it is told so by hand."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FirstBlockCacheConfig, hooks

from diffaccel.cli import main
from diffaccel.engines import export
from diffaccel.engines.request import Request
from diffaccel.planner.plan import Plan, PlanItem
from tests import tiny

SMALL = {"height": 64, "width": 64, "steps": 4}


def plan_of(*items: tuple[str, dict[str, Any]]) -> Plan:
    rows = tuple(PlanItem(name, "call", "enabled", "", "lossy", params) for name, params in items)
    return Plan("made", "FluxPipeline", "flux", "cpu", rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small pipeline on disk."""
    path = tmp_path_factory.mktemp("flux")
    tiny.build("flux", dtype=torch.bfloat16).save_pretrained(path)
    return path


def ran(text: str, at: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `result` of the script is."""
    monkeypatch.chdir(at)
    space: dict[str, Any] = {}
    exec(compile(text, "script", "exec"), space)
    return space


def by_hand(folder: Path, config: Any) -> Any:
    pipe = DiffusionPipeline.from_pretrained(str(folder), torch_dtype=torch.bfloat16)
    if config is not None:
        pipe.transformer.enable_cache(config)
    generator = torch.Generator("cpu").manual_seed(0)
    return pipe("a red ring", height=64, width=64, num_inference_steps=4, generator=generator).images[0]


@pytest.mark.parametrize(
    ("items", "config"),
    [((), None), ((("cache.first_block", {"threshold": 10.0}),), FirstBlockCacheConfig(10.0))],
    ids=["plain", "cached"],
)
def test_it_runs(folder: Path, items: Any, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = export(plan_of(*items, ("attention.native", {})), "diffusers", Request(str(folder), **SMALL)).text
    space = ran(text, tmp_path, monkeypatch)
    assert (tmp_path / "out.png").is_file()
    picture = space["result"].images[0]
    assert picture.tobytes() == by_hand(folder, config).tobytes()
    if config is not None:
        assert picture.tobytes() != by_hand(folder, None).tobytes()


def test_offload_tiles_and_compile_are_said_in_words_that_run(folder: Path, monkeypatch: Any, tmp_path: Path) -> None:
    """On a CPU there is nothing to offload to; the lines stand behind a question for the device."""
    items = (("offload.stage", {}), ("vae.tiling", {}), ("compile", {}))
    text = export(plan_of(*items), "diffusers", Request(str(folder), **SMALL)).text
    told: list[str] = []
    kind = type(tiny.build("flux").transformer)
    monkeypatch.setattr(kind, "compile_repeated_blocks", lambda self: told.append("compiled"))
    space = ran(text, tmp_path, monkeypatch)
    assert told == ["compiled"] and space["pipe"].vae.use_tiling
    assert "enable_model_cpu_offload()" in text


def test_what_the_script_names_is_in_diffusers() -> None:
    """Each config with the arguments it is given, as far as it needs no GPU to be made."""
    for name, params in (("first_block", {}), ("taylorseer", {"interval": 3, "order": 2}), ("seacache", {})):
        text = export(plan_of((f"cache.{name}", params)), "diffusers", Request("folder")).text
        [line] = [line for line in text.splitlines() if "enable_cache(" in line]
        made = eval(line.strip().removeprefix("denoiser.enable_cache(")[:-1], vars(hooks))
        assert type(made).__name__ in text
    offload = inspect.signature(DiffusionPipeline.enable_group_offload).parameters
    assert {"onload_device", "offload_type", "use_stream"} <= set(offload)


def test_quantization_names_what_torchao_has() -> None:
    import diffusers
    import torchao.quantization

    for kind in ("fp8", "int8"):
        text = export(plan_of((f"quantization.{kind}", {})), "diffusers", Request("folder")).text
        [line] = [line for line in text.splitlines() if "quantization_config=" in line]
        config = line.partition("TorchAoConfig(")[2].partition("(")[0]
        assert hasattr(torchao.quantization, config)
        space = {**vars(diffusers), config: getattr(torchao.quantization, config)}
        space |= {name: getattr(diffusers, name) for name in ("PipelineQuantizationConfig", "TorchAoConfig")}
        assert eval(line.strip().removeprefix("quantization_config=").rstrip(","), space).quant_mapping


@pytest.mark.slow
def test_the_verb_s_script_runs_as_a_program(folder: Path, tmp_path: Path, capsys: Any) -> None:
    script = tmp_path / "run.py"
    words = ["export", str(folder), "--engine", "diffusers", "--preset", "lossless", "--hardware", "cpu"]
    assert main([*words, "--size", "64x64", "--steps", "2", "--out", str(script)]) == 0
    capsys.readouterr()
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out.png").is_file()
