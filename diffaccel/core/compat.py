"""Every private name of diffusers and PyTorch that diffaccel leans on, in one place.

`drift()` says which of them the installed versions no longer have; a test keeps it empty.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
from diffusers.hooks.hooks import (
    HookFunctionReference,
    HookRegistry,
    ModelHook,
    StateManager,
)
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
)
from diffusers.models.attention_dispatch import dispatch_attention_fn as dispatch_attention

# set_eval_frame(None) keeps torch.compile out of everything that is called until the value it returned is set again.
from torch._C._dynamo.eval_frame import set_eval_frame

from .wrappers import sharded, unwrap_module

__all__ = [
    "AttentionBackendName",
    "HookFunctionReference",
    "HookRegistry",
    "ModelHook",
    "StateManager",
    "attention_backends",
    "attention_default",
    "compile_backends",
    "compile_counts",
    "convert_single_file",
    "copies_held",
    "dispatch_attention",
    "drift",
    "eager",
    "expand_lora_scales",
    "fake_tensors",
    "host_edit",
    "hub_kernel",
    "int8_units",
    "leaves",
    "lora_control_norms",
    "lora_file",
    "native_cache",
    "no_duck_shape",
    "num_timesteps",
    "record_range",
    "set_eval_frame",
    "unwrap_module",
    "vae_decode",
    "vae_encode",
    "vmap_allowed",
]

# What comes from diffusers (and PyTorch) without types, by name. Core, planner, api and handle say these, never `Any`.
Argument: TypeAlias = Any  # one argument of a call of a pipeline, a model or a scheduler
Args: TypeAlias = tuple[Any, ...]  # all that stand by place
Kwargs: TypeAlias = dict[str, Any]  # all that stand by name
Output: TypeAlias = Any  # what such a call returns: a tensor, a tuple, one of diffusers' output classes
Component: TypeAlias = Any  # a part of a pipeline (a model, a tokenizer, a scheduler, a config), or None
Forward: TypeAlias = Callable[..., Any]
Wrapper: TypeAlias = Any  # a forward that somebody put around another, which is its `__wrapped__`
HookPair: TypeAlias = tuple[Any, Any]  # (pre_forward, post_forward) of a hook; (None, None) where it replaces forward
Range: TypeAlias = Any  # a range of torch.profiler, open from its `__enter__` to its `__exit__`
record_range: Any = torch._C._profiler._RecordFunctionFast  # (name) -> Range; none of its methods is a Python call
Kept: TypeAlias = Any  # a key or a value of what a lever keeps for a run, whose form only that lever knows

REGISTRY = "_diffusers_hook"  # attribute of a module that holds its HookRegistry
COMPILED = "_compiled_call_impl"  # set by nn.Module.compile()
GROUP_OFFLOAD = "group_offloading"  # name of the hook of diffusers' group offload
CASTING = "layerwise_casting"  # name of the hook of diffusers' layerwise casting
OLD_FORWARD = "_old_forward"  # set by accelerate's add_hook_to_module

# Hook names of diffusers' own step caches (their `apply_*` functions leave no config behind).
NATIVE_CACHE_HOOKS = (
    "fbc_leader_block_hook",
    "fbc_block_hook",
    "mag_cache_leader_block_hook",
    "mag_cache_block_hook",
    "sea_cache_root",
    "sea_cache_leader_block",
    "taylorseer_cache",
    "pyramid_attention_broadcast",
    "faster_cache_denoiser",
    "faster_cache_block",
    "text_kv_cache_transformer",
)

F = TypeVar("F", bound=Callable[..., Any])


def host_edit(fn: F) -> F:
    """Run `fn` outside inference mode, so that what it creates stays usable in later, ordinary calls."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False):
            return fn(*args, **kwargs)

    return cast(F, wrapper)


def eager(fn: F) -> F:
    """Keep `fn` out of compiled graphs, at no cost where nothing is compiled; what it calls is not kept out.

    `torch.compiler.disable` does more with a wrapper of several Python calls per call; see `set_eval_frame`.
    """
    from torch._dynamo.decorators import skip

    return cast(F, skip(fn))


def native_cache(module: torch.nn.Module) -> str | None:
    """The name of a diffusers step cache that is on in `module`, or None."""
    model = unwrap_module(module)
    config = getattr(model, "_cache_config", None)
    if config is not None:
        return type(config).__name__
    for child in model.modules():
        registry = getattr(child, REGISTRY, None)
        for name in getattr(registry, "hooks", {}):
            if name in NATIVE_CACHE_HOOKS:
                return str(name)
    return None


def foreign_offload(module: torch.nn.Module) -> str | None:
    """Whose offload (not ours) moves the weights of `module`, or None.

    A device map says where a model was loaded: with one device in it (`from_single_file`, `device_map="cuda"`) nothing
    moves. What moves is seen by its hooks, or by more devices than one.
    """
    places = {str(place) for place in (getattr(unwrap_module(module), "hf_device_map", None) or {}).values()}
    if len(places) > 1 or "disk" in places:
        return "a device_map"
    for child in module.modules():
        if hasattr(child, "_hf_hook"):
            return "accelerate's offload (enable_model_cpu_offload, enable_sequential_cpu_offload or a device_map)"
        if GROUP_OFFLOAD in getattr(getattr(child, REGISTRY, None), "hooks", {}):
            return "diffusers' group offload (enable_group_offload)"
    return None if sharded(module) is None else "FSDP (whose shards are gathered for each call)"


def copies_held(module: torch.nn.Module) -> str:
    """Why weights of `module` cannot be exchanged now, or "": a group offload that moves through copies of its own
    (pinned ones of a stream, files) would bring the old ones back."""
    for child in unwrap_module(module).modules():
        hook = getattr(getattr(child, REGISTRY, None), "hooks", {}).get(GROUP_OFFLOAD)
        group = getattr(hook, "group", None)
        if group is not None and (group.stream is not None or group.offload_to_disk_path is not None):
            return (
                "diffusers' group offload (use_stream or offload_to_disk_path) keeps copies of the weights and would "
                "bring them back: take it off first, or load the pipeline anew"
            )
    return ""


def num_timesteps(pipe: Any) -> int | None:
    """The number of denoiser steps the running loop announced, or None where the pipeline says nothing."""
    value = vars(pipe).get("_num_timesteps")
    return value if isinstance(value, int) else None


def attention_backends() -> dict[str, Any]:
    """Diffusers' attention backend names -> their enum member."""
    return {member.value: member for member in AttentionBackendName}


def hub_kernel(backend: str) -> Any:
    """The function of a diffusers backend that lives on the hub, fetched the first time under diffusers' rules."""
    dispatch: Any = importlib.import_module("diffusers.models.attention_dispatch")
    member = AttentionBackendName(backend)
    dispatch._maybe_download_kernel_for_backend(member)
    return dispatch._HUB_KERNELS_REGISTRY[member].kernel_fn


def compile_backends() -> list[str]:
    """The names torch.compile takes as `backend`."""
    import torch._dynamo

    return list(torch._dynamo.list_backends(exclude_tags=()))


def attention_default() -> tuple[str, str]:
    """(diffusers' process-wide attention backend as it is, as it was when the process began)."""
    began: str = importlib.import_module("diffusers.models.attention_dispatch").DIFFUSERS_ATTN_BACKEND
    return AttentionBackendName(_AttentionBackendRegistry._active_backend).value, AttentionBackendName(began).value


def compile_counts() -> tuple[int, int]:
    """(graphs compiled, graph breaks) in this process so far."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def no_duck_shape() -> Any:
    """A context manager in which torch.compile does not take equal dynamic sizes for one size."""
    config: Any = importlib.import_module("torch.fx.experimental._config")
    return config.patch(use_duck_shape=False)


VMAP_KEYS = (
    "FuncTorchBatched", "FuncTorchVmapMode", "FuncTorchGradWrapper", "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
)  # fmt: skip


def vmap_allowed() -> contextlib.AbstractContextManager[Any]:
    """In here torch.vmap works, as it does anywhere but in a custom op that a new graph of torch.compile calls.

    At a graph's first call PyTorch looks whether custom ops alias their inputs, with these dispatch keys shut off;
    flex_attention makes its block masks by vmap.
    """
    core: Any = torch._C
    shut = core._dispatch_tls_local_exclude_set()
    keys = [getattr(core.DispatchKey, name) for name in VMAP_KEYS]
    if not any(shut.has(key) for key in keys):
        return contextlib.nullcontext()
    for key in keys:
        shut = shut.remove(key)
    guard: contextlib.AbstractContextManager[Any] = core._ForceDispatchKeyGuard(
        core._dispatch_tls_local_include_set(), shut
    )
    return guard


@contextlib.contextmanager
def fake_tensors() -> Iterator[None]:
    """In here operations compute shapes only, on tensors without memory; dispatch modes that are on see nothing."""
    fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
    dispatch: Any = importlib.import_module("torch.utils._python_dispatch")
    with dispatch._disable_current_modes(), fake.FakeTensorMode(allow_non_fake_inputs=True):
        yield


def is_fake(value: Any) -> bool:
    """Is this a tensor without memory (see `fake_tensors`)?"""
    fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
    return isinstance(value, fake.FakeTensor)


def vae_decode(vae: Any, z: torch.Tensor, **more: Any) -> torch.Tensor:
    """What the class of this autoencoder decodes latents to, whatever stands in for `_decode` on the instance."""
    output: Any = type(vae)._decode(vae, z, **more)
    picture: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return picture


def vae_encode(vae: Any, x: torch.Tensor, **more: Any) -> torch.Tensor:
    """What the class of this autoencoder encodes pictures to (the moments), whatever stands in for `_encode`."""
    moments: torch.Tensor = type(vae)._encode(vae, x, **more)
    return moments


def leaves(output: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """(the tensors of a model's output, a function that builds such an output from other tensors).

    Tuples, lists, dicts and diffusers' output classes are looked into.
    """
    if type(output) is tuple:  # as denoisers answer with return_dict=False
        for leaf in output:
            if not isinstance(leaf, torch.Tensor):
                break
        else:
            return list(output), tuple

    from torch.utils import _pytree as tree

    flat, form = tree.tree_flatten(output)
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        whole = list(rest)
        for place, tensor in zip(places, tensors, strict=True):
            whole[place] = tensor
        return tree.tree_unflatten(whole, form)

    return [flat[place] for place in places], rebuild


def convert_single_file(model_class: str, config: Any, tensors: dict[str, Any]) -> dict[str, Any] | None:
    """A checkpoint under its authors' names as diffusers' state dict of `model_class`; None without a conversion."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    convert = SINGLE_FILE_LOADABLE_CLASSES.get(model_class, {}).get("checkpoint_mapping_fn")
    return None if convert is None else dict(convert(config=config, checkpoint=tensors))


def lora_file(source: Any, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None, bool]:
    """A LoRA file as it is: (its tensors by name, diffusers' adapter metadata in its header, whether the header names
    an alpha, which some loaders read). `options` are those of `load_lora_weights`."""
    base = importlib.import_module("diffusers.loaders.lora_base")
    names = ("weight_name", "local_files_only", "cache_dir", "force_download", "proxies", "token", "revision")
    given: dict[str, Any] = dict.fromkeys((*names, "subfolder", "use_safetensors")) | dict(options)
    given.pop("unet_config", None)
    allow_pickle = given["use_safetensors"] is None
    given |= {"use_safetensors": allow_pickle or given["use_safetensors"], "allow_pickle": allow_pickle}
    given["user_agent"] = {"file_type": "attn_procs_weights", "framework": "pytorch"}
    state, metadata, header = base._fetch_state_dict(source, return_file_metadata=True, **given)
    return dict(state), metadata, "alpha" in (header or {})


def lora_control_norms(pipe: Any) -> tuple[str, ...] | None:
    """The norms that Control LoRAs of this pipeline bring anew; None where its loader takes no Control LoRAs."""
    names = getattr(type(pipe), "_control_lora_supported_norm_keys", None)
    return None if names is None else tuple(names)


def expand_lora_scales(module: torch.nn.Module, scales: Any) -> dict[str, float]:
    """The dict that `set_adapters` takes for one component, by part of a layer's name (U-Nets: by block)."""
    from diffusers.loaders.peft import _SET_ADAPTER_SCALE_FN_MAPPING as expand

    found: dict[str, float] = expand[type(module).__name__](module, [dict(scales)])[0]
    return found


def int8_units() -> bool:
    """Has this processor INT8 matrix units (AMX or VNNI)?"""
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_vnni_supported())


def drift() -> list[str]:
    """What the installed diffusers / torch no longer offer of the names used here; empty when all is well."""
    missing: list[str] = []

    def need(owner: Any, *names: str) -> None:
        missing.extend(f"{getattr(owner, '__name__', owner)}.{n}" for n in names if not hasattr(owner, n))

    probe = torch.nn.Linear(1, 1)
    registry = HookRegistry.check_if_exists_or_initialize(probe)
    need(HookRegistry, "register_hook", "remove_hook", "invalidate_child_registries_cache")
    need(registry, "hooks", "_hook_order", "_fn_refs", "_module_ref")
    need(HookFunctionReference(), "pre_forward", "post_forward", "forward", "original_forward")
    need(StateManager(dict), "_context", "set_context", "reset")
    need(_AttentionBackendRegistry, "_active_backend")
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    need(dispatch, "_maybe_download_kernel_for_backend", "_HUB_KERNELS_REGISTRY")
    need(torch._C, "_dispatch_tls_local_exclude_set", "_dispatch_tls_local_include_set", "_ForceDispatchKeyGuard")
    need(torch._C.DispatchKey, *VMAP_KEYS)
    need(torch.nn.Module, COMPILED, "_call_impl")
    need(importlib.import_module("torch._dynamo.utils"), "counters")
    need(torch._C._profiler, "_RecordFunctionFast")
    need(dispatch, "DIFFUSERS_ATTN_BACKEND")
    need(importlib.import_module("torch.fx.experimental._config"), "use_duck_shape", "patch")
    need(importlib.import_module("torch._dynamo.decorators"), "skip")
    need(importlib.import_module("torch._subclasses.fake_tensor"), "FakeTensorMode", "FakeTensor")
    need(importlib.import_module("torch.utils._python_dispatch"), "_disable_current_modes")
    for name in ("AutoencoderKLWan", "AutoencoderKLQwenImage", "AutoencoderKLLTXVideo", "AutoencoderKL"):
        need(getattr(importlib.import_module("diffusers"), name), "_decode", "_encode")
    need(importlib.import_module("diffusers.loaders.single_file_model"), "SINGLE_FILE_LOADABLE_CLASSES")
    need(importlib.import_module("diffusers.loaders.lora_base"), "_fetch_state_dict")
    need(
        importlib.import_module("diffusers.loaders.lora_pipeline").FluxLoraLoaderMixin,
        "_control_lora_supported_norm_keys",
    )
    need(importlib.import_module("diffusers.loaders.peft"), "_SET_ADAPTER_SCALE_FN_MAPPING")
    need(torch.cpu, "_is_amx_tile_supported", "_is_vnni_supported")
    group = importlib.import_module("diffusers.hooks.group_offloading")
    if getattr(group, "_GROUP_OFFLOADING", None) != GROUP_OFFLOAD:
        missing.append("group_offloading._GROUP_OFFLOADING")
    if not hasattr(probe, REGISTRY):
        missing.append(f"module.{REGISTRY}")
    if "recurse" not in inspect.signature(HookRegistry.remove_hook).parameters:
        missing.append("HookRegistry.remove_hook(recurse)")
    return missing
