"""The clothes of an accelerated pipeline: one shared subclass per class, with the verbs.

`pipe.__class__` becomes a subclass of the same name, so that `isinstance`, `save_pretrained` and everything else
of diffusers go on as before; the class of diffusers itself is never written to.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from dataclasses import fields
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar

import torch

from .caching.levers import VERBS
from .core.accelerator import DEVICE, PLAIN
from .core.options import BOOLEAN, confirm
from .core.run import current_run
from .errors import IncompatibleError, UnknownVerbError, clipped, closest, nearest
from .handle import HANDLE, Acceleration, handle_of
from .planner.levers import PLACES

if TYPE_CHECKING:
    from .core.compat import Argument, Component, Forward, Output
    from .core.protocols import Pipeline

P = TypeVar("P", bound="Accelerated")

LORA_VERBS = (
    "load_lora_weights", "unload_lora_weights", "set_adapters", "disable_lora", "enable_lora", "delete_adapters",
    "get_active_adapters", "get_list_adapters", "fuse_lora", "unfuse_lora", "set_lora_device", "enable_lora_hotswap",
    "encode_prompt",
)  # fmt: skip

_CLASSES: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


class Accelerated:
    """What an accelerated pipeline can do more. Every verb returns the pipeline, and raises where it cannot act."""

    @property
    def acceleration(self) -> Acceleration:
        """The handle: `.plan`, `.report`, `.restore()`, `.snapshot()`, `.resume(state)`."""
        handle = handle_of(self)
        if handle is None:
            raise AttributeError(f"this {type(self).__name__} is not accelerated: call diffaccel.accelerate(pipe)")
        return handle

    def __getattr__(self, name: str) -> Component:
        if not name.startswith(("enable_", "disable_")):
            return super().__getattr__(name)  # type: ignore[misc]
        start = name[: name.index("_") + 1]  # who wants to switch on is not told how to switch off
        every = [verb for verb in dir(type(self)) if verb.startswith(("enable_", "disable_"))]
        verbs = [verb for verb in every if verb.startswith(start)]
        stem = name.rpartition("_")[0] + "_"  # enable_guidance_reuse: what is there for guidance?
        likely = closest(name, verbs) or [verb for verb in verbs if verb.startswith(stem) and stem != start][:3]
        likely = likely or closest(name, every)  # enable_quantization: its opposite at least
        raise UnknownVerbError(f"{type(self).__name__} has no {clipped(name)}: {nearest(name, verbs, likely)}")

    @property
    def device(self) -> torch.device:
        """Diffusers' own; while an offload lever has the weights elsewhere, where the components compute."""
        found = vars(self).get(DEVICE)
        device: torch.device = super().device if found is None else found  # type: ignore[misc]
        return device

    @property
    def _execution_device(self) -> torch.device:
        found = vars(self).get(DEVICE)
        device: torch.device = super()._execution_device if found is None else found  # type: ignore[misc]
        return device

    def to(self, *args: Argument, **kwargs: Argument) -> Self:
        """Diffusers' own; where an offload lever moves the components, they compute on this device from now on."""
        moved: Self = super().to(*args, **kwargs)  # type: ignore[misc]
        for value in (*args, *kwargs.values()) if DEVICE in vars(self) else ():
            if isinstance(value, (str, torch.device)):
                vars(self)[DEVICE] = torch.device(value)
        return moved

    def save_pretrained(self, *args: Argument, **kwargs: Argument) -> None:
        """Diffusers' own; refused while weights are quantized or LoRAs are on, which its files cannot hold."""
        if self.acceleration.has_loras:
            from .quantization.lora.verbs import require_no_loras

            require_no_loras(self)
        on = [name for name in self.acceleration.plan.enabled if name.startswith("quantization.")]
        if on:
            raise IncompatibleError(
                f"save_pretrained: {on[0]} is on, and diffusers' files cannot hold its weights. Call "
                "pipe.disable_quantization() or diffaccel.restore(pipe) first"
            )
        from .quantization.weights import holds_scaled

        if any(holds_scaled(part) for part in self.components.values()):
            raise IncompatibleError(
                "save_pretrained: the weights came from load_quantized, and diffusers' files cannot hold them; keep "
                "the checkpoint that they were read from"
            )
        super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def __copy__(self) -> Self:
        clone = object.__new__(type(self))
        vars(clone).update(vars(self))
        return clone

    def __deepcopy__(self, memo: dict[int, object]) -> Component:
        """A pipeline of its own, weights and all, with the same levers on. While it is made the levers are off here;
        an edit that cannot be undone refuses, with nothing changed."""
        handle = self.acceleration
        if not handle.owns(self):
            raise IncompatibleError(
                "copy.deepcopy of a shallow copy of an accelerated pipeline: copy the pipeline itself, or call "
                "diffaccel.restore(pipe) first"
            )
        with handle.aside("copy.deepcopy") as decision:
            made: Component = copy.deepcopy(self, memo)
        again = Acceleration(made, decision)
        again.adopt(again.decide_again(dict(decision.wishes)))
        dress(made, again)
        return made

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise IncompatibleError(
            "pickle of an accelerated pipeline: call diffaccel.restore(pipe) first, then pickle it"
        )

    # Verbs whose place has no method registry.

    def enable_attention(self, backend: str = "auto") -> Self:
        """Choose the attention backend of the denoisers: "auto", "native", "flash", "flash3", "cudnn", "xformers",
        "flex" or "sage"."""
        return _enable(self, "attention", backend, {})

    def enable_sage_attention(self, variant: str = "auto", **parameters: object) -> Self:
        """8-bit attention; keywords are those of `attention.sage.config.SageAttention`."""
        return _enable(self, "attention", "sage", {"variant": variant, **parameters})

    def enable_sparse_attention(self, method: object = "auto", **parameters: object) -> Self:
        """Block-sparse self-attention for video: "radial", "sta", "svg", "svg2", "topk", "auto" (by geometry and
        length), or a callable that makes the plan; keywords are those of `attention.sparse.config.SparseAttention`."""
        if not isinstance(method, str):
            return _enable(self, "attention", "custom", {"method": method, **parameters})
        return _enable(self, "attention", "sparse_auto" if method == "auto" else method, parameters)

    def disable_attention(self) -> Self:
        """Back to the attention the pipeline came with."""
        return _disable(self, "attention")

    def enable_fp8(self, **parameters: object) -> Self:
        """8-bit floating-point weights (and activations); keywords are those of `quantization.fp8_int8.Fp8`."""
        return _enable(self, "quantization", "fp8", parameters)

    def enable_int8(self, **parameters: object) -> Self:
        """8-bit integer weights (and activations); keywords are those of `quantization.fp8_int8.Int8`."""
        return _enable(self, "quantization", "int8", parameters)

    def enable_svdquant(self, **parameters: object) -> Self:
        """4-bit weights and activations with a low-rank branch; keywords are those of
        `quantization.svdquant.SvdQuant`."""
        return _enable(self, "quantization", "svdquant", parameters)

    def disable_quantization(self) -> Self:
        """Back to the weights the pipeline came with, bit by bit; refused where it came with quantized ones."""
        from .quantization.base import require_originals

        require_originals(self)
        return _disable(self, "quantization")

    def enable_layerwise_offload(self, **parameters: object) -> Self:
        """Few blocks resident, the rest on the host or on disk; keywords are those of
        `offload.layerwise.config.LayerwiseOffload`."""
        return _enable(self, "offload", "layerwise", parameters)

    def enable_stage_offload(self, **parameters: object) -> Self:
        """Encoders, denoiser and decoder take turns on the device; keywords are those of
        `offload.stage.config.StageOffload`."""
        return _enable(self, "offload", "stage", parameters)

    def disable_offload(self) -> Self:
        """Everything back to the device it was on."""
        return _disable(self, "offload")

    def enable_cache(
        self, gate: object, predictor: object = None, guard: object = None, scope: object = None, **more: object
    ) -> Self:
        """A step cache put together from its parts, all importable from `diffaccel.caching`; see docs/caching.md.

        `predictor` is reuse as it is and `scope` all blocks behind the first one unless told. `guard` (Guards) takes
        the place of the guard keywords (min_steps=9, last_steps=1, ...); `more` are the parameters that all caches
        share (branches, per_sample, float32) and `process_group`.
        """
        parts = {"gate": gate, "predictor": predictor, "guard": guard, "scope": scope, **more}
        return _enable(self, "cache", "custom", parts)

    def disable_cache(self) -> Self:
        """Take the step cache off."""
        return _disable(self, "cache")

    def enable_solver(self, method: str = "abm", **parameters: object) -> Self:
        """Take the scheduler's steps with a solver of the package: "abm" (variable-step Adams-Bashforth-Moulton).
        Keywords (order, corrector, grid, tolerance) are those of `solvers.config.AbmSolver`. A step cache that is
        on is switched off."""
        return _enable(self, "solver", method, parameters)

    def disable_solver(self) -> Self:
        """Back to the scheduler's own steps."""
        return _disable(self, "solver")

    def enable_compile(self, **parameters: object) -> Self:
        """Compile the denoisers' blocks one by one; keywords are those of `compilation.regional.RegionalCompile`."""
        return _enable(self, "compile", True, parameters)

    def disable_compile(self) -> Self:
        """Back to uncompiled blocks (those the user compiled stay compiled)."""
        return _disable(self, "compile")

    def enable_guidance_cache(self, **parameters: object) -> Self:
        """Skip the unconditional branch on chosen steps; keywords are those of `guidance.reuse.GuidanceReuse`."""
        return _enable(self, "guidance", "reuse", parameters)

    def disable_guidance_cache(self) -> Self:
        """Back to both guidance branches in every step."""
        return _disable(self, "guidance")

    def enable_vae_tiling(self, exact: bool = False, **sizes: object) -> Self:
        """Decode (and encode) in parts. `exact=True`: strips that keep the picture but for rounding, keywords (mode,
        max_bytes, rows, encode) are those of `vae.exact.config.ExactVae`. Otherwise blended tiles, keywords
        (tile_height, tile_width, stride_height, stride_width in pixels, tile_frames, stride_frames) are those of
        `vae.blended.config.VaeTiling`."""
        exact = confirm("exact", exact, BOOLEAN)
        return _enable(self, "vae_tiling", "exact" if exact else "blended", sizes)

    def disable_vae_tiling(self) -> Self:
        """Back to the tiling (or none) that the VAE came with."""
        return _disable(self, "vae_tiling")


def _enable(pipe: P, key: str, value: str | bool, parameters: dict[str, object]) -> P:
    pipe.acceleration.change(key, value, parameters)
    return pipe


def _disable(pipe: P, key: str) -> P:
    pipe.acceleration.change(key, None)
    return pipe


def cache_verb_name(value: str) -> str:
    """The verb of a cache method: `enable_first_block_cache`, `enable_teacache`, `enable_step_schedule`."""
    return f"enable_{VERBS.get(value, value)}"


class _CacheVerb:
    """`enable_VALUE_cache(**parameters)` for one method of the registry. Its module is loaded when it is asked for."""

    def __init__(self, value: str) -> None:
        self.value = value

    @functools.cached_property
    def function(self) -> Forward:
        """The verb, with the method's own words about its keywords."""
        value, method = self.value, PLACES["cache"].levers[self.value].config()

        def verb(self: P, **parameters: object) -> P:
            return _enable(self, "cache", value, parameters)

        knobs = ", ".join(f"{f.name}={f.default!r}" for f in fields(method))
        verb.__name__ = cache_verb_name(value)
        verb.__qualname__ = f"Accelerated.{verb.__name__}"
        verb.__doc__ = f"{method.__doc__}\n\nKeywords: {knobs}."
        return verb

    def __get__(self, pipe: Accelerated | None, owner: type) -> Forward:
        return self.function if pipe is None else types.MethodType(self.function, pipe)


class _LoraVerb:
    """Diffusers' verb of this name; while LoRAs of ours are loaded, the one of `quantization.lora.verbs`."""

    def __init__(self, cls: type, name: str) -> None:
        self.cls, self.name = cls, name
        self.plain = inspect.getattr_static(cls, name)  # a function, as a rule; whatever it is, it binds itself

    @functools.cached_property
    def acting(self) -> Forward:
        """The verb for LoRAs of ours, made when it is first asked for."""
        from .quantization.lora.verbs import lora_verbs

        found: Forward = lora_verbs(self.cls).get(self.name, self.plain)
        return found

    def __get__(self, pipe: Accelerated | None, owner: type) -> Forward:
        handle = None if pipe is None else handle_of(pipe)
        verb = self.acting if handle is not None and handle.has_loras else self.plain
        bound: Forward = verb.__get__(pipe, owner)
        return bound


def _verbs() -> dict[str, _CacheVerb]:
    return {cache_verb_name(value): _CacheVerb(value) for value in PLACES["cache"].levers}


def _with_bar(cls: type) -> dict[str, object]:
    """Diffusers' own bar; during an accelerated run its postfix counts the cached calls. Nothing where the class has
    none: that of a modular pipeline belongs to its loop block."""
    plain: Forward | None = getattr(cls, "progress_bar", None)
    if plain is None:
        return {}

    @functools.wraps(plain)
    def progress_bar(self: Pipeline, iterable: Argument = None, total: int | None = None) -> Output:
        bar = plain(self, iterable, total)
        run = current_run()
        if run is not None and run.pipe is self and not getattr(bar, "disable", True):
            run.bar = bar
        return bar

    return {"progress_bar": progress_bar}


def accelerated_class(cls: type) -> type:
    """The one subclass that all accelerated instances of `cls` share."""
    if issubclass(cls, Accelerated):
        return cls
    found = _CLASSES.get(cls)
    if found is None:
        plain_call = cls.__call__

        @functools.wraps(plain_call)
        def __call__(self: Pipeline, *args: Argument, **kwargs: Argument) -> Output:
            handle = handle_of(self)
            if handle is None:
                return plain_call(self, *args, **kwargs)
            return handle.call(self, plain_call, args, kwargs)

        body = {
            "__call__": __call__,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            PLAIN: cls,
            **_with_bar(cls),
            **_verbs(),
            **{name: _LoraVerb(cls, name) for name in LORA_VERBS if hasattr(cls, name)},
        }
        found = _CLASSES[cls] = type(cls.__name__, (Accelerated, cls), body)
    return found


def dress(pipe: object, handle: Acceleration) -> None:
    """Make `pipe` an accelerated instance of its class (`acceleration.undress` is the inverse)."""
    object.__setattr__(pipe, "__class__", accelerated_class(type(pipe)))
    vars(pipe)[HANDLE] = handle
