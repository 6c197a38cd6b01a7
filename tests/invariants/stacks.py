"""The levers on weights, memory and attention, one by one and several at once, with memoised outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diffaccel import accelerate
from diffaccel.attention.sparse.registry import make_method
from tests import tiny
from tests.quantization.loras import state_dict

from .levers import cache_options, guidance_options, second_prompt, second_size


@dataclass(frozen=True)
class Row:
    """What is on, on which family.

    Attributes:
        on: overrides of `accelerate`.
        lora: strength of a LoRA that is loaded on top; None loads none.
        merge: whether it is merged into the weights.
        near: largest distance to the plain picture, in its range: 0 for bit-equal, None for "another picture".
    """

    family: str
    on: Mapping[str, Any] = field(default_factory=dict)
    lora: float | None = None
    merge: bool = False
    near: float | None = None

    @property
    def places(self) -> list[str]:
        """The places of the pipeline that are taken."""
        found = [key for key in ENABLE if key in self.on]
        return found + ["lora"] * (self.lora is not None)

    def parameters(self, place: str) -> dict[str, Any]:
        """Keywords of the verb of a place."""
        return {k.removeprefix(f"{place}_"): v for k, v in self.on.items() if k.startswith(f"{place}_")}


def sparse(**more: Any) -> dict[str, Any]:
    """Overrides of sparse attention with blocks of two tokens, small enough for the tiny video."""
    method = more.pop("method", None) or make_method("svg", block=2, density=0.5)
    options = {"attention": "custom", "attention_method": method, "attention_dense_steps": 2}
    return options | {"attention_dense_layers": 1} | more


COMPILE = {"compile": True, "compile_backend": "eager"}
EXACT_VAE = {"vae_tiling": "exact", "vae_tiling_rows": 2}
LAYERWISE = {"offload": "layerwise", "offload_store": "disk", "offload_resident_layers": 1}
STAGE = {"offload": "stage", "offload_store": "disk"}
WEIGHT_ONLY = {"quantization_scheme": "weight_only"}
SVDQUANT = {"quantization": "svdquant", "quantization_rank": 4}

ROWS: dict[str, Row] = {
    "sparse": Row("wan", sparse(attention_dense_steps=0, attention_dense_layers=0)),
    "sage": Row("flux", {"attention": "sage", "attention_variant": "reference"}),
    "fp8 weight-only": Row("flux", {"quantization": "fp8", **WEIGHT_ONLY}),
    "fp8 dynamic": Row("sd3", {"quantization": "fp8", "quantization_scheme": "dynamic"}),
    "int8": Row("wan", {"quantization": "int8", "compile": False}),
    "svdquant": Row("sd3", SVDQUANT),
    "lora": Row("flux", lora=0.6),
    "lora merged": Row("wan", lora=0.6, merge=True),
    "layerwise": Row("wan", LAYERWISE, near=0.0),
    "stage": Row("sd3", STAGE, near=0.0),
    "vae": Row("flux", EXACT_VAE, near=1e-5),
    "vae video": Row("wan", EXACT_VAE, near=1e-5),
}
STACKS: dict[str, Row] = {
    "flux stack": Row(
        "flux",
        cache_options("flux")
        | {"attention": "flex", "quantization": "fp8", **WEIGHT_ONLY}
        | COMPILE | LAYERWISE | EXACT_VAE,
        lora=0.2,
    ),
    "wan stack": Row(
        "wan",
        cache_options("wan") | guidance_options() | sparse() | {"quantization": "int8"} | COMPILE | STAGE | EXACT_VAE,
        lora=0.2,
    ),
    "sd3 stack": Row(
        "sd3", cache_options("sd3") | {"attention": "flex"} | SVDQUANT | COMPILE | LAYERWISE | EXACT_VAE, lora=0.2
    ),
}  # fmt: skip
ALL = ROWS | STACKS

ENABLE = {
    "quantization": lambda pipe, value, keywords: getattr(pipe, f"enable_{value}")(**keywords),
    "compile": lambda pipe, value, keywords: pipe.enable_compile(**keywords) if value else pipe.disable_compile(),
    "offload": lambda pipe, value, keywords: getattr(pipe, f"enable_{value}_offload")(**keywords),
    "vae_tiling": lambda pipe, value, keywords: pipe.enable_vae_tiling(exact=value == "exact", **keywords),
    "attention": lambda pipe, value, keywords: _attention(pipe, value, keywords),
    "guidance": lambda pipe, value, keywords: pipe.enable_guidance_cache(**keywords),
    "cache": lambda pipe, value, keywords: getattr(pipe, f"enable_{value}_cache")(**keywords),
}
DISABLE = {"guidance": "disable_guidance_cache"}  # the others are called `disable_` and their place


def _attention(pipe: Any, value: str, keywords: dict[str, Any]) -> Any:
    if value == "custom":
        return pipe.enable_sparse_attention(**keywords)
    return pipe.enable_sage_attention(**keywords) if value == "sage" else pipe.enable_attention(value)


def enable(pipe: Any, row: Row, place: str, folder: Path) -> None:
    """Switch one lever of a row on by its verb; what is on already is switched on again."""
    if place == "lora":
        loras = pipe.acceleration.loras
        if "a" in loras.strengths:
            loras.set({"a": row.lora})
        else:
            loras.load(state_dict(pipe, row.family), "a", row.lora, merge=row.merge)
        return
    keywords = row.parameters(place) | ({"folder": str(folder)} if place == "offload" else {})
    assert ENABLE[place](pipe, row.on[place], keywords) is pipe


def disable(pipe: Any, place: str) -> None:
    """Switch one lever off by its verb."""
    if place == "lora":
        pipe.acceleration.loras.unload("a")
    else:
        assert getattr(pipe, DISABLE.get(place, f"disable_{place}"))() is pipe


def put_on(pipe: Any, row: Row, folder: Path | None = None, **changes: Any) -> Any:
    """Accelerate `pipe` with a row; files of offload go to `folder`."""
    on = dict(row.on) | changes
    if "offload" in on:
        on["offload_folder"] = str(folder or tempfile.gettempdir())
    accelerate(pipe, None, strict=True, **on)
    if row.lora is not None:
        enable(pipe, row, "lora", folder or Path())
    return pipe


def changed_call(row: Row) -> dict[str, Any]:
    """A call of another size, prompt, batch, seed and number of steps, under which nothing is the same."""
    number = "num_videos_per_prompt" if row.family == "wan" else "num_images_per_prompt"
    return second_prompt(num_inference_steps=5, **{number: 2}, **second_size(row.family))


_memo: dict[str, torch.Tensor] = {}


def fresh(name: str, **call: Any) -> torch.Tensor:
    """The output of the first run of a freshly accelerated pipeline."""
    key = f"{name} {sorted(call.items())}"
    if key not in _memo:
        with tempfile.TemporaryDirectory() as folder:
            pipe = put_on(tiny.build(ALL[name].family), ALL[name], Path(folder))
            _memo[key] = tiny.run(pipe, ALL[name].family, **call)
            pipe.acceleration.restore()
    return _memo[key].clone()


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, in units of the range."""
    return float((a - b).abs().max() / b.abs().max())
