"""The strength one call asks for: `joint_attention_kwargs={"scale": 0.5}` and its relatives.

Diffusers multiplies the strength of every adapter with it, for the length of one forward of the denoiser (and of one
`encode_prompt` for text encoders). Here the factor is a tensor without dimensions that all branches of a component
share: compiled code takes it as an input, so a new value neither compiles again nor stays behind.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from ...core.chain import Hook, Link, install
from ...core.place import LAST, Rank
from ...errors import IncompatibleError, InvalidOptionError

KWARGS = ("joint_attention_kwargs", "attention_kwargs", "cross_attention_kwargs")  # where callers put "scale"
HOOK = "lora_scale"


class Scaled(Protocol):
    """What acts with the factor of a call."""

    def rescale(self, value: float) -> None:
        """Use this factor from now on."""


class CallScale:
    """The factor of one component: 1 between calls."""

    def __init__(self, merged: tuple[str, ...] = ()) -> None:
        self.value = 1.0
        self.followers: list[Scaled] = []
        self.merged = merged  # adapters in weights, which no call can rescale

    def require(self, value: float) -> None:
        """Raise where a merged adapter would not follow."""
        if self.merged and value != 1.0:
            raise IncompatibleError(
                f"scale={value:g}: {', '.join(self.merged)} was loaded with merge=True and lies in the weights, which "
                "a call cannot rescale. Load it with merge=False, or use pipe.acceleration.loras.set"
            )

    @contextlib.contextmanager
    def at(self, value: float) -> Iterator[None]:
        """Everything inside computes with this factor."""
        self.require(value)
        before = self.value
        self._set(value)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, value: float) -> None:
        if value != self.value:
            self.value = value
            for follower in self.followers:
                follower.rescale(value)


def asked(value: Any) -> float:
    """A caller's scale as a number.

    Raises:
        InvalidOptionError: it is none, or not finite.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidOptionError(f"scale={value!r}: must be a finite number (the LoRA's strength in this call)")
    return float(value)


def scale_in(kwargs: Mapping[str, Any]) -> float | None:
    """The scale in the arguments of a pipeline or a denoiser, or None."""
    for name in KWARGS:
        found = kwargs.get(name)
        if isinstance(found, Mapping) and "scale" in found:
            return asked(found["scale"])
    return None


class ScaleHook(Hook):
    """On a denoiser with branches: reads the scale of each call, within a run and outside of one.

    The scale does not go further, and where it was all there was, what goes further is what a call without a scale
    passes (None or an empty dict, as the pipeline has it), so that compiled code sees the same arguments.
    """

    def __init__(self, scale: CallScale) -> None:
        super().__init__()
        self.scale = scale
        self.nothing: dict[str, Any] = {}  # by name: what the last call without a scale passed

    def call(self, ref: Any, *args: Any, **kwargs: Any) -> Any:
        """The forward, with the factor that its arguments ask for."""
        body: Callable[..., Any] = ref.body
        value = scale_in(kwargs)
        if value is None:
            self.nothing.update({name: kwargs[name] for name in KWARGS if not kwargs.get(name, True)})
            return body(*args, **kwargs)
        with self.scale.at(value):
            return body(*args, **self._without_scale(kwargs))

    def _without_scale(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        made = dict(kwargs)
        for name in KWARGS:
            found = made.get(name)
            if isinstance(found, Mapping) and "scale" in found:
                rest = {key: value for key, value in found.items() if key != "scale"}
                made[name] = rest or self.nothing.get(name, {})
        return made


def watch(module: torch.nn.Module, scale: CallScale, rank: Rank = LAST) -> Link:
    """Let the scale in a denoiser's arguments act; the link's `remove` is the undo."""
    hook = ScaleHook(scale)
    return install(module, hook, HOOK, rank=rank).around(hook.call)
