"""The bundled weights: load them as an ordinary pipeline, or write a trained pipeline into the package."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

if TYPE_CHECKING:
    import torch
    from diffusers import FluxPipeline, StableDiffusion3Pipeline, WanPipeline

Pipeline: TypeAlias = "FluxPipeline | WanPipeline | StableDiffusion3Pipeline"
KINDS: tuple[str, ...] = ("image", "video", "scenes")
_USUAL: dict[str, dict[str, Any]] = {
    "image": {"height": 96, "width": 96, "guidance_scale": 3.5},
    "video": {"height": 64, "width": 64, "num_frames": 9, "guidance_scale": 4.0},
    "scenes": {"height": 64, "width": 64, "guidance_scale": 7.0, "max_sequence_length": 8},
}
WEIGHTS = Path(__file__).parent / "weights"
ELSEWHERE = "DIFFACCEL_TESTBED_WEIGHTS"  # environment variable: a folder of kinds that come before the bundled ones


def folder_of(kind: str) -> Path:
    """Where the weights of a kind lie: below the folder that the environment names if they are there, else bundled."""
    named = Path(os.environ.get(ELSEWHERE) or WEIGHTS) / kind
    return named if (named / "model_index.json").exists() else WEIGHTS / kind


def check(kind: str) -> None:
    """Raise InvalidOptionError unless there is such a testbed."""
    if kind not in KINDS:
        from ..errors import InvalidOptionError

        raise InvalidOptionError(f"the testbed has no kind {kind!r}; choose one of: {', '.join(KINDS)}")


def call_kwargs(kind: str = "image") -> dict[str, Any]:
    """Arguments of a usual call: size in pixels and frames, text length in tokens, guidance; not the step count."""
    from .tokenizers import TEXT_LENGTH

    check(kind)
    return {"max_sequence_length": TEXT_LENGTH, **_USUAL[kind]}


@overload
def load(
    kind: Literal["image"] = "image", *, torch_dtype: torch.dtype | None = None, random: bool = False, seed: int = 0
) -> FluxPipeline: ...
@overload
def load(
    kind: Literal["video"], *, torch_dtype: torch.dtype | None = None, random: bool = False, seed: int = 0
) -> WanPipeline: ...
@overload
def load(
    kind: Literal["scenes"], *, torch_dtype: torch.dtype | None = None, random: bool = False, seed: int = 0
) -> StableDiffusion3Pipeline: ...
@overload
def load(kind: str, *, torch_dtype: torch.dtype | None = None, random: bool = False, seed: int = 0) -> Pipeline: ...
def load(
    kind: str = "image", *, torch_dtype: torch.dtype | None = None, random: bool = False, seed: int = 0
) -> Pipeline:
    """A FluxPipeline ("image"), WanPipeline ("video") or StableDiffusion3Pipeline ("scenes") with its trained weights.

    `random=True` draws the same architecture from `seed` instead of reading weights. `torch_dtype` is float32
    unless told; the weights lie on disk as float16; nothing is downloaded.
    """
    import torch

    check(kind)
    dtype = torch_dtype or torch.float32
    if random:
        pipe = untrained(kind, seed)
        if dtype is not torch.float32:
            pipe = pipe.to(dtype)
    else:
        folder = folder_of(kind)
        if not (folder / "model_index.json").exists():
            raise FileNotFoundError(
                f"the trained weights are missing from {folder}: reinstall the package, or train them with "
                f"'python -m diffaccel.testbed.train {kind}', or use load({kind!r}, random=True)"
            )
        pipe = read(kind, folder, dtype)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).eval()
    return pipe


def untrained(kind: str, seed: int, size: Any = None) -> Pipeline:
    """The untrained pipeline of one kind; `size` is its `Size`, the bundled one unless told."""
    from . import build, build_scenes, build_video

    if kind == "scenes":
        return build_scenes.pipeline(size, seed)
    return build_video.pipeline(size, seed) if kind == "video" else build.pipeline(size, seed)


def read(kind: str, folder: Path, dtype: torch.dtype) -> Pipeline:
    """The pipeline that `export` wrote to `folder`."""
    import diffusers

    classes = {"video": diffusers.WanPipeline, "scenes": diffusers.StableDiffusion3Pipeline}
    absent = {"text_encoder_3": None, "tokenizer_3": None} if kind == "scenes" else {}
    cls = classes.get(kind, diffusers.FluxPipeline)
    return cls.from_pretrained(str(folder), dtype=dtype, local_files_only=True, use_safetensors=True, **absent)


def export(pipe: Pipeline, folder: Path) -> None:
    """Write `pipe` to `folder` as float16 safetensors in diffusers format, replacing it whole."""
    from safetensors.torch import load_file, save_file

    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    pipe.save_pretrained(str(fresh))
    for path in fresh.rglob("*.safetensors"):
        halves = {name: value.half() for name, value in load_file(path).items()}
        save_file(halves, path, metadata={"format": "pt"})
    for path in fresh.rglob("*.json"):
        config = json.loads(path.read_text())
        if config.pop("_name_or_path", None) is not None:  # the folder it was loaded from, of no use elsewhere
            path.write_text(json.dumps(config, indent=2) + "\n")
    for path in fresh.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    if folder.exists():
        os.rename(folder, old)
    os.rename(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)
