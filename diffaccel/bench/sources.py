"""Pipelines by name: a testbed, a folder that diffusers wrote, or a Python file of the user's that builds one."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InvalidOptionError, clipped

TESTBED = "testbed:"
BUILD = "build"  # the function of a Python file that is called unless another is named


@dataclass
class Source:
    """A pipeline, arguments of its call, and what scores a picture against its prompt where something can."""

    pipe: Any
    call: dict[str, Any] = field(default_factory=dict)
    score: Callable[[Any, str], float] | None = None


def load(name: str) -> Source:
    """The pipeline called "testbed:KIND", FOLDER, FILE.py or FILE.py:FUNCTION.

    The function takes no arguments and returns a pipeline, or a pipeline and a mapping of arguments of its call.
    Raises FileNotFoundError where there is nothing, and InvalidOptionError for a file that builds no pipeline.
    """
    if name.startswith(TESTBED):
        return _testbed(name.removeprefix(TESTBED))
    path, _, function = name.partition(".py:")
    source = _file(Path(f"{path}.py"), function) if function else None
    if source is None and name.endswith(".py"):
        source = _file(Path(name), BUILD)
    source = source or Source(folder(Path(name)))
    if hasattr(source.pipe, "set_progress_bar_config"):
        source.pipe.set_progress_bar_config(disable=True)
    return source


def folder(place: Path) -> Any:
    """The pipeline in a folder, with the dtype of its denoiser's weights."""
    from diffusers import DiffusionPipeline

    if not (place / "model_index.json").is_file():
        raise FileNotFoundError(f"no diffusers pipeline in {place} (no model_index.json there)")
    return DiffusionPipeline.from_pretrained(str(place), local_files_only=True, dtype=saved_dtype(place))


def saved_dtype(place: Path) -> Any:
    """The dtype of the denoiser's weights in their files; None where there are none of a kind that says so."""
    import torch
    from safetensors import safe_open

    names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    for path in sorted((*place.glob("transformer/*.safetensors"), *place.glob("unet/*.safetensors"))):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                return names.get(file.get_slice(key).get_dtype())
    return None


def _testbed(kind: str) -> Source:
    from .. import testbed

    pipe = testbed.load(kind)
    pipe.set_progress_bar_config(disable=True)
    return Source(pipe, testbed.call_kwargs(kind), functools.partial(_score))


def _score(picture: Any, prompt: str) -> float:
    from .. import testbed

    return testbed.score(picture[None].float(), [prompt])["score"]


def _file(path: Path, function: str) -> Source:
    """What the function of a Python file returns. The file is run as it stands, as `python FILE` would."""
    if not path.is_file():
        raise FileNotFoundError(f"no Python file {path}")
    spec = importlib.util.spec_from_file_location(f"diffaccel_source_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidOptionError(f"{path} cannot be read as Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build = getattr(module, function, None)
    if not callable(build):
        raise InvalidOptionError(
            f"{path} has no function {clipped(function)!r}: write `def {BUILD}(): return pipeline`, or name one as "
            f"{path.name}:FUNCTION"
        )
    made = build()
    pipe, call = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    if not callable(pipe) or not hasattr(pipe, "components") or not isinstance(call, Mapping):
        raise InvalidOptionError(
            f"{path.name}:{function} must return a diffusers pipeline, or one and a mapping of call arguments, got "
            f"{type(pipe).__name__}"
        )
    return Source(pipe, dict(call))
