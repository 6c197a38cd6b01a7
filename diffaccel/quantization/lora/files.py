"""From a LoRA file (or state dict) to what it adds to each layer; the file formats are diffusers' own to read."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils.state_dict_utils import (
    StateDictType,
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)

from ...core.compat import lora_control_norms, lora_file, unwrap_module
from ...core.wrappers import flattened, own_modules
from ...errors import IncompatibleError, InvalidOptionError, UnsupportedModelError, unknown
from .names import dropped, magnitudes, take_doras
from .pairs import Pair, Replaced, Tensor, Weights, kronecker, unfit
from .scales import Scales, scales

if TYPE_CHECKING:
    from ...core.protocols import Pipeline

FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
LONGEST = 300  # characters of an error
LOADER_OPTIONS = (  # what diffusers' loaders read of the keywords of load_lora_weights
    "weight_name", "subfolder", "revision", "token", "cache_dir", "force_download", "proxies", "local_files_only",
    "use_safetensors", "unet_config",
)  # fmt: skip
DENOISERS = ("transformer", "unet")
PARTS = {  # end of a key -> what it is
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_B.bias": "bias",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".alpha": "alpha",
    **{f".lokr_{part}": part for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")},
}


@dataclass
class Component:
    """What a file holds for one component.

    Attributes:
        scales: where alphas come from.
        layers: path -> what it is (a value of `PARTS`, or "value" of a parameter that is replaced) -> tensor.
        strange: keys that are none of these.
    """

    scales: Scales
    layers: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    strange: list[str] = field(default_factory=list)


def read(
    pipe: Pipeline, source: Any, component: str | None = None, layers: Sequence[str] | None = None, **options: Any
) -> dict[str, dict[str, Pair | Replaced]]:
    """Read an adapter with the pipeline's own loader and check every key against the pipeline's layers.

    Args:
        source: what `pipe.load_lora_weights` takes: a file, a folder, a hub name or a state dict (left as it is).
        component: put the denoiser's layers into this one instead ("transformer_2" of Wan 2.2).
        layers: patterns of the layers to take ("*.attn1.*", "transformer.*"); the others are not even checked.
        **options: those of `pipe.load_lora_weights` (weight_name, subfolder, revision, ...).

    Returns:
        component -> path of the layer in it -> what is added.

    Raises:
        UnsupportedModelError: the pipeline has no LoRA loader, or the file is of a kind that is not low-rank pairs.
        InvalidOptionError: not a source, or a file that is not there; a pattern that matches nothing; keys without a
            layer, of another shape, or that nothing here understands. The first are named.
    """
    loader = _loader(pipe)
    _require_source(source)
    for option in options:
        if option not in LOADER_OPTIONS:
            raise unknown("option of load_lora_weights", option, LOADER_OPTIONS)
    problems: list[str] = []
    parts = _components(pipe, loader, source, options, problems if layers is None else [])
    if component is not None:
        parts = {component if name in DENOISERS else name: part for name, part in parts.items()}
    if layers is not None:
        parts = _chosen(parts, layers)
    found = {name: _fitted(pipe, name, part, problems) for name, part in parts.items()}
    if problems:
        raise _misfit(problems, type(pipe).__name__)
    if not any(found.values()):
        raise InvalidOptionError("the LoRA holds no layers: are its names those of another model?")
    return found


def _loader(pipe: Pipeline) -> Callable[..., Any]:
    """The pipeline's own reader; where it has none but its denoiser takes adapters, files in peft's names are read."""
    loader: Callable[..., Any] | None = getattr(type(pipe), "lora_state_dict", None)
    if loader is not None:
        return loader
    if not any(hasattr(getattr(pipe, name, None), "load_lora_adapter") for name in DENOISERS):
        raise UnsupportedModelError(f"{type(pipe).__name__} has no LoRA loader in diffusers")
    return lambda given, **options: given


def _misfit(problems: Sequence[str], pipeline: str) -> InvalidOptionError:
    """As many of the problems as fit into one sentence, and the way out."""
    keys = "1 key of the LoRA does" if len(problems) == 1 else f"{len(problems)} keys of the LoRA do"
    start = f"{keys} not fit {pipeline}: "
    end = '. Nothing was applied; layers="PATTERN" takes a part'
    shown = [problems[0][: LONGEST - len(start) - len(end) - 20]]
    for problem in problems[1:]:
        if len(start) + len("; ".join([*shown, problem])) + len(end) > LONGEST - 20:
            break
        shown.append(problem)
    more = f", and {len(problems) - len(shown)} more" if len(problems) > len(shown) else ""
    return InvalidOptionError(f"{start}{'; '.join(shown)}{more}{end}")


def _require_source(source: Any) -> None:
    """A missing file would be taken for the name of a repository on the hub."""
    if isinstance(source, Mapping):
        return
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise InvalidOptionError(f"source={source!r}: must be a file, a folder, a hub name or a state dict")
    path = os.path.expanduser(os.fspath(source))
    if not os.path.exists(path) and (os.path.isabs(path) or path.endswith(FILES)):
        raise InvalidOptionError(f"source={source!r}: there is no such file")


def _components(
    pipe: Pipeline, loader: Callable[..., Any], source: Any, options: dict[str, Any], problems: list[str]
) -> dict[str, Component]:
    """The file by component and layer, in peft's names."""
    if isinstance(source, Mapping):
        held, metadata, header_alpha = {key: value.clone() for key, value in source.items()}, None, False
    else:
        try:
            held, metadata, header_alpha = lora_file(source, options)
        except OSError as error:
            raise InvalidOptionError(f"source={str(source)!r}: {' '.join(str(error).split())[:240]}") from error
    doras, strange = take_doras(held)
    problems += strange
    more = {"unet_config": pipe.unet.config} if hasattr(pipe, "unet") else {}
    more |= options

    def converted(given: Any) -> tuple[dict[str, Tensor], dict[str, float], Any]:
        return _converted(loader, given, more)

    def states(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return converted(given)[0]

    # (a header's alpha is read by the loader alone)
    by_loader = header_alpha and hasattr(type(pipe), "lora_state_dict")
    state, alphas, said = converted(source if by_loader else dict(held))
    lost = dropped(held, state, states) if not by_loader else []
    _report(lost, problems)
    if doras:
        turned = magnitudes(held, doras, states)
        if len(turned) < len(doras):
            problems.append(f"{next(iter(doras))}: diffusers' reader does not tell which layer its DoRA belongs to")
        for key, row in turned.items():
            state[key + DORA_OF_UP] = row
    return _split(pipe, state, metadata if metadata is not None else said, alphas)


DORA_OF_UP = ".dora"  # behind the key of an up matrix: its rows' magnitudes


def _report(lost: list[str], problems: list[str]) -> None:
    """Keys that diffusers' reader leaves out: differences of norms and biases with a warning (as good as every file
    of distilled video models has them, and diffusers applies none), all others are problems."""
    differences = [key for key in lost if key.endswith((".diff", ".diff_b"))]
    problems += [f"{key}: diffusers' reader leaves it out" for key in lost if key not in differences]
    if differences:
        some = ", ".join(differences[:2])
        warnings.warn(
            f"{len(differences)} keys of the LoRA are not applied, as in diffusers, which reads no differences of "
            f"norms and of biases without matrices: {some}{', ...' if len(differences) > 2 else ''}",
            UserWarning,
            stacklevel=6,
        )


def _converted(
    loader: Callable[..., Any], given: Any, options: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, float], Any]:
    """(state under diffusers' names, alphas, metadata) as the pipeline's own loader reads it."""
    options = {**options, "return_lora_metadata": True}
    if "return_alphas" in inspect.signature(loader).parameters:
        options["return_alphas"] = True
    try:
        found = loader(given, **options)
    except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidOptionError(f"diffusers' reader does not understand this LoRA ({why[:200]})") from error
    state, *rest = found if isinstance(found, tuple) else (found,)
    alphas = rest[0] if len(rest) == 2 and rest[0] else {}
    return dict(state), {key: float(value) for key, value in alphas.items()}, rest[-1] if rest else None


def _split(
    pipe: Pipeline, state: Mapping[str, Tensor], metadata: Mapping[str, Any] | None, alphas: Mapping[str, float]
) -> dict[str, Component]:
    """Keys by component, and by layer in it."""
    known = {*getattr(pipe, "_lora_loadable_modules", ()), *DENOISERS}
    own = "unet" if hasattr(pipe, "unet") else "transformer"
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        prefix, _, name = key.partition(".")
        if prefix not in known:  # a file of the denoiser alone
            prefix, name = own, key
        parts.setdefault(prefix, {})[name] = value
    norms = lora_control_norms(pipe) or ()
    made = {}
    for name, part in parts.items():
        names = _peft_names(name, part)
        start = f"{name}."
        of_file = {key.removeprefix(start): value for key, value in alphas.items() if key.startswith(start)}
        found = made[name] = Component(Scales())
        for key, old in names.items():
            _place(found, key, part[old], norms)
        found.scales = scales(name, metadata, _alphas(names, of_file, found))
    return made


def _peft_names(component: str, part: Mapping[str, Tensor]) -> dict[str, str]:
    """{peft's name of a key: the name it has}: diffusers' own older names are read too."""
    names: dict[str, Any] = {key: key for key in part}
    if any(".lora_A." in key or ".lokr_" in key for key in part):
        return names
    if component.startswith("text_encoder"):
        old = StateDictType.DIFFUSERS_OLD if any("_lora." in key for key in part) else None
        try:
            names = convert_state_dict_to_diffusers(names, old)
            names = convert_state_dict_to_peft(names)
        except ValueError:  # no name that diffusers knows: each is refused by name later
            return names
        return names
    return dict(convert_unet_state_dict_to_peft(names))


def _place(found: Component, key: str, value: Tensor, norms: Sequence[str]) -> None:
    dora = key.endswith(DORA_OF_UP)
    key = key.removesuffix(DORA_OF_UP)
    end = next((end for end in PARTS if key.endswith(end)), None)
    path = key.removesuffix(end or ".weight")
    if end is not None:
        what = "magnitude" if dora else PARTS[end]
        found.layers.setdefault(path, {})[what] = value.flatten() if what in ("bias", "magnitude") else value
    elif key.endswith(".weight") and path.rpartition(".")[2] in norms:
        found.layers.setdefault(path, {})["value"] = value
    else:
        found.strange.append(key)


def _alphas(names: Mapping[str, str], of_file: Mapping[str, float], found: Component) -> dict[str, float]:
    """Path -> alpha. Files name alphas after the layer, or after the key of its first matrix."""
    made = {path: float(held["alpha"]) for path, held in found.layers.items() if "alpha" in held}
    left = dict(of_file)
    for key, old in names.items():
        if not key.endswith(".lora_A.weight"):
            continue
        stems = {old, *(old.split(mark)[0] for mark in (".lora_A.", ".lora.", ".lora_linear_layer.")), *_stems(old)}
        for stem in stems:
            if f"{stem}.alpha" in left:
                made[key.removesuffix(".lora_A.weight")] = left.pop(f"{stem}.alpha")
    found.strange += left
    return made


def _stems(old: str) -> tuple[str, ...]:
    return (old.removesuffix(".weight"), old.removesuffix(".down.weight"))


def _chosen(parts: Mapping[str, Component], patterns: Sequence[str]) -> dict[str, Component]:
    """What the patterns select; keys that nothing here understands are selected by none."""
    names = [(component, layer) for component, part in parts.items() for layer in part.layers]

    def matches(component: str, layer: str, pattern: str) -> bool:
        return fnmatchcase(layer, pattern) or fnmatchcase(f"{component}.{layer}", pattern)

    for pattern in patterns:
        if not any(matches(*name, pattern) for name in names):
            first = ".".join(names[0]) + ", ..." if names else "none"
            raise InvalidOptionError(f"layers={pattern!r} matches none of the LoRA's {len(names)} layers ({first})")
    made = {}
    for component, part in parts.items():
        layers = {
            layer: held for layer, held in part.layers.items() if any(matches(component, layer, p) for p in patterns)
        }
        if layers:
            made[component] = Component(part.scales, layers)
    return made


def _fitted(pipe: Pipeline, name: str, part: Component, problems: list[str]) -> dict[str, Pair | Replaced]:
    """What is added to each layer of one component; what does not fit goes to `problems`."""
    module = getattr(pipe, name, None)
    if not isinstance(module, torch.nn.Module):
        problems.append(f"{name}: the pipeline has no such component ({len(part.layers)} layers)")
        return {}
    problems += [f"{name}.{key}: not one of a low-rank pair" for key in part.strange]
    if flattened(module):
        raise IncompatibleError(
            f"lora: {name} is cut into shards by FSDP (FullyShardedDataParallel), and its layers have no weights "
            "of their own: load the LoRA into the plain model, before it is wrapped"
        )
    module = unwrap_module(module)
    layers = own_modules(module)
    flat = name.startswith("text_encoder") and not hasattr(module, "text_model")  # older files have that level
    widens = lora_control_norms(pipe) is not None and name in DENOISERS
    made: dict[str, Pair | Replaced] = {}
    for path, held in part.layers.items():
        own = path.removeprefix("text_model.") if flat else path
        added = _added(layers.get(own), held, part.scales, path, widens)
        if isinstance(added, str):
            problems.append(f"{name}.{own}: {added}")
        else:
            made[own] = added
    return made


def _added(
    layer: torch.nn.Module | None, held: Mapping[str, Tensor], own: Scales, path: str, widens: bool
) -> Pair | Replaced | str:
    """What a file's tensors of one layer add to it, or why they do not."""
    if "value" in held:
        weight = getattr(layer, "weight", None)
        if layer is None or not isinstance(weight, Tensor) or weight.shape != held["value"].shape:
            return "no such layer" if layer is None else "its weight has another shape"
        return Replaced(held["value"])
    kron = {what: tensor for what, tensor in held.items() if what.startswith("w")}
    if kron:
        if not {"w1", "w1_a"} & kron.keys() or not {"w2", "w2_a"} & kron.keys():
            return "a part of its LoKr is missing"
        if any(tensor.ndim != 2 for tensor in kron.values()):
            return "a LoKr of a convolution"
        down, up = kronecker(kron)
        rank = 0 if own.config else next((kron[what].shape[1] for what in ("w2_a", "w1_a") if what in kron), None)
    elif "down" in held and "up" in held:
        down, up, rank = held["down"], held["up"], len(held["down"])
    elif "down" in held or "up" in held:
        return "its other half is missing"
    elif "bias" in held and isinstance(layer, torch.nn.Linear):
        down, up, rank = torch.zeros(0, layer.in_features), torch.zeros(layer.out_features, 0), 0
    else:
        return "no such layer" if layer is None else f"it has no matrices, only {', '.join(held)}"
    scale = 1.0 if rank is None else own.of(path, rank)  # (an alpha has no meaning for a LoKr of whole matrices)
    pair = Pair(down, up, scale, held.get("bias"), held.get("magnitude"))
    return unfit(layer, pair, widens) or pair


__all__ = ["Pair", "Replaced", "Weights", "read"]
