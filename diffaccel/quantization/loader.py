"""Load a pipeline with its weights quantized on the way in: the full model never lies in memory.

The model is made without weights; its files are then read tensor by tensor, and each weight that the policy chooses
is quantized before the next one is read. Peak memory is that of the quantized model and one file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ..core.compat import convert_single_file, host_edit
from ..errors import InvalidOptionError, UnsupportedModelError, nearest
from ..ledger.hardware import detect
from ..models.registry import CARDS
from ..models.spec import ModelSpec
from .backends import Recipe
from .base import ENCODERS, QuantizedWeights
from .fp8_int8 import Fp8, Int8
from .policy import Policy, select, select_encoder

SCHEMES: dict[str, QuantizedWeights] = {
    "fp8": Fp8(),
    "fp8_dynamic": Fp8(),
    "fp8_storage": Fp8("storage"),
    "fp8_weight_only": Fp8("weight_only"),
    "int8": Int8(),
    "int8_dynamic": Int8(),
    "int8_weight_only": Int8("weight_only"),
}
Tensors = Iterable[tuple[str, torch.Tensor]]


@host_edit
def load_quantized(
    path: str | Path,
    scheme: str | QuantizedWeights = "fp8",
    *,
    pipeline_class: type | None = None,
    config: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    **components: Any,
) -> Any:
    """A pipeline (or a bare model) whose denoisers are quantized while they are read.

    Args:
        path: a diffusers folder (of a pipeline, or of one model), or one .safetensors file of a denoiser, in the
            layout of diffusers or of the model's authors (where diffusers can convert it).
        scheme: one of SCHEMES, or a config (`Fp8("weight_only", text_encoders=True, ff_out=True)`).
        pipeline_class: instead of the class that model_index.json names.
        config: for a single file, the folder of a pipeline of the same kind (its weights of the denoiser are not
            read), or of the model (the bare model is returned).
        dtype: of everything that is not quantized, and of computation.
        device: where the quantized models go.
        components: components to use instead of those in the folder.

    Returns:
        The pipeline, not accelerated: `accelerate(pipe, ...)` sees that its weights are quantized already.

    Raises:
        InvalidOptionError: no such path, scheme or class, or a single file without `config`.
        UnsupportedModelError: a model whose blocks diffaccel has no card for, or weights that do not fit it.
    """
    lever = _lever(scheme)
    if not isinstance(path, (str, Path)):
        raise InvalidOptionError(f"path={path!r}: must be the path of a folder or a file")
    source = Path(path)
    if not source.exists():
        raise InvalidOptionError(f"path={str(path)!r}: no such file or folder (download it first)")
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise InvalidOptionError(f"dtype={dtype}: must be a floating-point dtype of at least 16 bits")
    single = source if source.is_file() else None
    folder = source if single is None else _folder(config)
    target = torch.device(device)
    if (folder / "model_index.json").is_file():
        return _pipeline(folder, single, lever, pipeline_class, dtype, target, components)
    if (folder / "config.json").is_file():
        name = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("_class_name", "")
        return _denoiser(_diffusers_class(name), folder, single, lever, dtype, target)
    raise InvalidOptionError(f"{folder}: holds neither model_index.json (a pipeline) nor config.json (a model)")


def _lever(scheme: str | QuantizedWeights) -> QuantizedWeights:
    if isinstance(scheme, QuantizedWeights):
        return scheme
    if scheme not in SCHEMES:
        raise InvalidOptionError(f"scheme={scheme!r}: {nearest(str(scheme), SCHEMES)}, or a config such as Fp8()")
    return SCHEMES[scheme]


def _folder(config: str | Path | None) -> Path:
    if config is None or not Path(config).is_dir():
        raise InvalidOptionError(
            f"config={config!r}: a single file needs the folder of a pipeline or a model of the same kind, for its "
            "configuration"
        )
    return Path(config)


def _diffusers_class(name: str) -> Any:
    import diffusers

    found = getattr(diffusers, name, None)
    if found is None:
        raise InvalidOptionError(f"diffusers has no class {name!r}")
    return found


def _card(class_name: str) -> ModelSpec | None:
    found = [card for card in CARDS.values() if class_name in card.classes]
    return next((card for card in found if card.stack or card.unet), None)


def _pipeline(
    folder: Path,
    single: Path | None,
    lever: QuantizedWeights,
    pipeline_class: Any,
    dtype: torch.dtype,
    device: torch.device,
    components: dict[str, Any],
) -> Any:
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    cls = pipeline_class or _diffusers_class(index.get("_class_name", ""))
    made = dict(components)
    parts = {name: row for name, row in index.items() if isinstance(row, list) and None not in row}
    denoisers = [name for name, (_, kind) in parts.items() if _card(kind) is not None and name not in made]
    if not denoisers:
        raise UnsupportedModelError(
            f"{folder}: none of {', '.join(parts)} is a denoiser that diffaccel has a card for"
        )
    if single is not None and len(denoisers) > 1:
        raise InvalidOptionError(f"{single}: one file, but the pipeline has {' and '.join(denoisers)}")
    for name in denoisers:
        made[name] = _denoiser(_diffusers_class(parts[name][1]), folder / name, single, lever, dtype, device)
    for name in ENCODERS if lever.text_encoders else ():
        if name in parts and name not in made:
            made[name] = _encoder(parts[name], folder / name, lever, dtype, device)
    return cls.from_pretrained(folder, torch_dtype=dtype, **made)


def _denoiser(
    cls: Any, folder: Path, single: Path | None, lever: QuantizedWeights, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    spec = _card(cls.__name__)
    if spec is None:
        raise UnsupportedModelError(f"diffaccel has no card with the blocks of {cls.__name__}")
    config = cls.load_config(folder)
    with _empty(dtype):
        model: nn.Module = cls.from_config(config)
    hardware = detect(device)
    recipe = lever.recipe(hardware)
    chosen = select(model, spec, lever.policy(recipe, hardware)).quantized
    wide = _wide(model, dtype)
    tensors = _read(folder) if single is None else _read_single(single, model, config)
    _fill(model, tensors, chosen, recipe, dtype, device, wide)
    model.register_to_config(_name_or_path=str(folder if single is None else single))  # type: ignore[operator]
    return model.eval()


def _encoder(
    row: list[str], folder: Path, lever: QuantizedWeights, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    import transformers

    cls = getattr(transformers, row[1], None)
    if row[0] != "transformers" or cls is None:
        raise UnsupportedModelError(f"{folder}: {'.'.join(row)} is no text encoder of transformers")
    with _empty(dtype):
        model: nn.Module = cls(cls.config_class.from_pretrained(folder))
    hardware = detect(device)
    recipe = lever.recipe(hardware)
    multiple = lever.policy(recipe, hardware).multiple_of
    chosen = select_encoder(model, Policy(multiple_of=multiple)).quantized
    _fill(model, _read(folder), chosen, recipe, dtype, device, _wide(model, dtype), model.tie_weights)
    return model.eval()


def _wide(model: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Parts of names whose tensors stay in float32, as loading with diffusers and transformers has it."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    usual = getattr(model, "_keep_in_fp32_modules", None) or ()
    if "transformers." in type(model).__module__ + "." and not type(model).__module__.startswith("diffusers"):
        usual = usual if dtype is torch.float16 else ()  # transformers: in bfloat16 only the strict ones
    return (*([usual] if isinstance(usual, str) else usual), *strict)


@contextlib.contextmanager
def _empty(dtype: torch.dtype) -> Iterator[None]:
    """Models made inside have parameters on the meta device, and buffers in `dtype` where they follow the default."""
    from accelerate import init_empty_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights():
            yield
    finally:
        torch.set_default_dtype(before)


def _read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every tensor in a model's safetensors files, one file open at a time."""
    # Of several variants in one folder (.fp16.safetensors), the one without a mark, whose name is the shortest.
    found = sorted((p.name for p in folder.glob("*.safetensors.index.json")), key=len)
    if found:
        index: Mapping[str, Any] = json.loads((folder / found[0]).read_text(encoding="utf-8"))
        shards = sorted(set(index["weight_map"].values()))
    else:
        shards = sorted((p.name for p in folder.glob("*.safetensors")), key=len)[:1]
    if not shards:
        raise InvalidOptionError(f"{folder}: holds no .safetensors file")
    for shard in shards:
        with safe_open(folder / shard, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - not a dict
                yield name, handle.get_tensor(name)


def _read_single(path: Path, model: nn.Module, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of one file, converted where it has its authors' names (tensors are views of the mapped file)."""
    with safe_open(path, framework="pt") as handle:
        names = list(handle.keys())
        if set(names) & set(model.state_dict()):
            for name in names:
                yield name, handle.get_tensor(name)
            return
        tensors = {name: handle.get_tensor(name) for name in names}
    unfit = f"{path}: its tensors ({names[0]}, ...) are not those of {type(model).__name__}, and diffusers "
    try:
        converted = convert_single_file(type(model).__name__, config, tensors)
    except (IndexError, KeyError, RuntimeError) as error:
        raise UnsupportedModelError(f"{unfit}cannot convert them ({type(error).__name__}: {error})") from error
    if converted is None:
        raise UnsupportedModelError(f"{unfit}has no conversion for it")
    del tensors
    for name in list(converted):
        yield name, converted.pop(name)


def _fill(
    model: nn.Module,
    tensors: Tensors,
    chosen: Iterable[str],
    recipe: Recipe,
    dtype: torch.dtype,
    device: torch.device,
    wide: tuple[str, ...],
    tie: Any = None,
) -> None:
    quantized = {f"{name}.weight" for name in chosen}
    expected, foreign = model.state_dict(), []
    for name, tensor in tensors:
        if name not in expected:
            foreign.append(name)
            continue
        if expected[name].shape != tensor.shape:
            raise UnsupportedModelError(
                f"{name} has the shape {tuple(tensor.shape)}, but {type(model).__name__} wants "
                f"{tuple(expected[name].shape)}"
            )
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        kind = torch.float32 if set(wide) & set(name.split(".")) else dtype
        kind = kind if tensor.is_floating_point() else tensor.dtype
        # What is not quantized is copied: a view would hold the whole file.
        value = recipe.convert(tensor.to(device, kind)) if name in quantized else tensor.to(device, kind, copy=True)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value
        del tensor, value
    if tie is not None:
        tie()
    missing = [name for name, value in model.state_dict().items() if value.device.type == "meta"]
    if missing:
        unknown = f"; it has {', '.join(foreign[:3])} instead" if foreign else ""
        raise UnsupportedModelError(
            f"the checkpoint lacks {len(missing)} tensors of {type(model).__name__} ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}){unknown}"
        )
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = buffer.to(device)
