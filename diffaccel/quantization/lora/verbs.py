"""Diffusers' own LoRA verbs on an accelerated pipeline: they act on the LoRAs of `pipe.acceleration.loras`.

One set of LoRAs at a time: while ours are loaded, `load_lora_weights`, `set_adapters`, `disable_lora` and the rest
mean ours, with diffusers' semantics (an adapter that is loaded becomes the active one, `set_adapters` names all that
act). Without any of ours they are diffusers' own, untouched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...core.compat import expand_lora_scales, unwrap_module
from ...errors import IncompatibleError, InvalidOptionError
from .call_scale import asked
from .lever import Parts
from .manager import Loras, strength_of

if TYPE_CHECKING:
    from ...core.protocols import Pipeline

Verb = Callable[..., Any]
MERGE = "diffaccel's LoRAs are merged by loading them so: pipe.acceleration.loras.load(source, name, merge=True)"
HOTSWAP = "Unload one and load the next: where layers and rank are the same, nothing is compiled again"


def ours(pipe: Pipeline) -> Loras | None:
    """The LoRAs of diffaccel on a pipeline; None where there are none, or the pipeline is not accelerated."""
    handle = getattr(pipe, "acceleration", None)
    loras: Loras | None = None if handle is None else handle.loras
    return loras if loras is not None and loras.alive else None


def require_no_loras(pipe: Pipeline) -> None:
    """Raise where diffusers' files would silently hold the weights without the LoRAs, or with them fused in."""
    loras = ours(pipe)
    if loras is not None and loras.report:
        raise IncompatibleError(
            f"save_pretrained: the LoRAs {', '.join(loras.strengths)} are on, and the files would hold the weights "
            "without them (or with them merged). Call pipe.unload_lora_weights() first, and keep the LoRAs' own files"
        )


def load_lora_weights(
    pipe: Pipeline, loras: Loras, source: Any, adapter_name: str | None = None, **options: Any
) -> None:
    """Load an adapter beside ours; as in diffusers it becomes the active one."""
    name = adapter_name or next(f"default_{i}" for i in itertools.count() if f"default_{i}" not in loras.strengths)
    options.pop("low_cpu_mem_usage", None)  # there is never a second copy here
    if options.pop("hotswap", False):
        raise IncompatibleError(f"load_lora_weights: hotswap=True is for diffusers' own LoRAs. {HOTSWAP}")
    if options.pop("load_into_transformer_2", False):
        options["component"] = "transformer_2"
    loras.load(source, name, **options)
    loras.activate({name: (1.0, {})})


def unload_lora_weights(pipe: Pipeline, loras: Loras, *args: Any, **kwargs: Any) -> None:
    """Take all adapters off."""
    loras.unload()


def set_adapters(
    pipe: Pipeline, loras: Loras, adapter_names: str | Sequence[str], adapter_weights: Any = None
) -> None:
    """Only the named adapters act: with a number each, or a dict of numbers by component (and block)."""
    names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
    weights = adapter_weights if isinstance(adapter_weights, (list, tuple)) else [adapter_weights] * len(names)
    if len(weights) != len(names):
        raise InvalidOptionError(f"set_adapters: {len(names)} names and {len(weights)} weights: give one weight each")
    loras.activate({name: _weight(pipe, value) for name, value in zip(names, weights, strict=True)})


def _weight(pipe: Pipeline, value: Any) -> tuple[float, Parts]:
    """(strength, factors by component) of a weight that `set_adapters` takes."""
    if not isinstance(value, Mapping):
        return 1.0 if value is None else strength_of(value), {}
    known = getattr(pipe, "_lora_loadable_modules", ())
    for component in value:
        if component not in known:
            raise InvalidOptionError(
                f"adapter_weights has {component!r}; allowed: {', '.join(known)}, each with a number or a dict"
            )
    return 1.0, {name: _part(pipe, name, part) for name, part in value.items() if part is not None}


def _part(pipe: Pipeline, component: str, value: Any) -> float | dict[str, float]:
    if not isinstance(value, Mapping):
        return strength_of(value)
    module = unwrap_module(getattr(pipe, component))
    return {name: strength_of(factor) for name, factor in expand_lora_scales(module, value).items()}


def disable_lora(pipe: Pipeline, loras: Loras) -> None:
    """Switch all adapters off; they stay loaded, with their strengths."""
    loras.mute(True)


def enable_lora(pipe: Pipeline, loras: Loras) -> None:
    """Switch the active adapters on again."""
    loras.mute(False)


def delete_adapters(pipe: Pipeline, loras: Loras, adapter_names: str | Sequence[str]) -> None:
    """Unload the named adapters. As in peft, where no active one is left the first that remains becomes active."""
    for name in [adapter_names] if isinstance(adapter_names, str) else list(adapter_names):
        loras.unload(name)
        if loras.adapters and not any(adapter.active for adapter in loras.adapters):
            first = loras.adapters[0]
            loras.activate({first.name: (first.strength, first.parts)})


def get_active_adapters(pipe: Pipeline, loras: Loras) -> list[str]:
    """Names of the adapters that act (also while `disable_lora` has them off, as in diffusers)."""
    return [adapter.name for adapter in loras.adapters if adapter.active]


def get_list_adapters(pipe: Pipeline, loras: Loras) -> dict[str, list[str]]:
    """Component -> names of the adapters loaded for it."""
    found: dict[str, list[str]] = {}
    for adapter in loras.adapters:
        for component in adapter.weights:
            found.setdefault(component, []).append(adapter.name)
    return found


def _refusal(verb: str, way: str) -> Verb:
    def refuse(pipe: Pipeline, loras: Loras, *args: Any, **kwargs: Any) -> None:
        raise IncompatibleError(f"{verb}: the LoRAs {', '.join(loras.strengths)} are diffaccel's. {way}")

    return refuse


ACTING: Mapping[str, Verb] = {
    "load_lora_weights": load_lora_weights,
    "unload_lora_weights": unload_lora_weights,
    "set_adapters": set_adapters,
    "disable_lora": disable_lora,
    "enable_lora": enable_lora,
    "delete_adapters": delete_adapters,
    "get_active_adapters": get_active_adapters,
    "get_list_adapters": get_list_adapters,
    "fuse_lora": _refusal("fuse_lora", MERGE),
    "unfuse_lora": _refusal("unfuse_lora", f"{MERGE}, and taken off by pipe.unload_lora_weights()"),
    "set_lora_device": _refusal(
        "set_lora_device",
        "They are where their layers compute; pipe.acceleration.loras.unload(name) frees their memory",
    ),
    "enable_lora_hotswap": _refusal("enable_lora_hotswap", HOTSWAP),
}


def lora_verbs(cls: type) -> dict[str, Any]:
    """What an accelerated pipeline of this class has in place of its own LoRA verbs (those it has)."""
    made: dict[str, Any] = {name: _verb(cls, name, act) for name, act in ACTING.items() if hasattr(cls, name)}
    encode = getattr(cls, "encode_prompt", None)
    if encode is not None and "lora_scale" in inspect.signature(encode).parameters:
        made["encode_prompt"] = _scaled_encode(encode)
    return made


def _verb(cls: type, name: str, act: Verb) -> Verb:
    plain: Verb = getattr(cls, name)

    @functools.wraps(plain)
    def verb(self: Any, *args: Any, **kwargs: Any) -> Any:
        loras = ours(self)
        if loras is None:
            return plain(self, *args, **kwargs)
        return act(self, loras, *args, **kwargs)

    return verb


def _scaled_encode(plain: Verb) -> Verb:
    """`encode_prompt` whose `lora_scale` acts on our branches in text encoders, for the length of the call."""
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def encode_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
        loras = ours(self)
        value = signature.bind(self, *args, **kwargs).arguments.get("lora_scale") if loras is not None else None
        if loras is None or value is None:
            return plain(self, *args, **kwargs)
        with contextlib.ExitStack() as stack:
            for component, scale in loras.scales.items():
                if component.startswith("text_encoder"):
                    stack.enter_context(scale.at(asked(value)))
            return plain(self, *args, **kwargs)

    return encode_prompt
