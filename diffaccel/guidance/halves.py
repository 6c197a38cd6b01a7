"""One half of a doubled batch: which arguments of a denoiser carry the batch, and both halves put together again.

Many pipelines run both guidance branches in one call, their rows stacked along the batch. To run one half alone,
every argument that carries the batch must be cut, and none that does not: a table of rotary angles may have as many
rows by accident. Arguments are told by name; one that cannot be told is a refusal, not a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# Arguments of diffusers' denoisers (and keys of their nested dicts) whose tensors have the batch along dim 0.
BATCHED = frozenset(
    {
        "aspect_ratio", "attention_mask", "audio_coords", "audio_encoder_attention_mask",
        "audio_encoder_hidden_states", "audio_hidden_states", "audio_sigma", "audio_timestep",
        "block_controlnet_hidden_states", "cap_feats", "class_labels", "controlnet_block_samples",
        "down_block_additional_residuals", "down_intrablock_additional_residuals", "encoder_attention_mask",
        "encoder_hidden_states", "guidance", "hidden_states", "image_embeds", "image_noise_mask",
        "ip_adapter_image_embeds", "ip_hidden_states", "mid_block_additional_residual", "perturbation_mask",
        "pooled_projections", "resolution", "sample", "siglip_feats", "sigma", "t", "text_embeds", "time_ids",
        "timestep", "timestep_cond", "video_coords", "video_keyframes_mask", "video_self_attention_mask", "x",
    }
)  # fmt: skip


class Unclear(Exception):
    """An argument of which it cannot be told whether it carries the batch; the text says which and why."""


def rows(value: Any) -> int:
    """How many samples the main input holds: a tensor's rows, or the elements of a list (Z-Image)."""
    return len(value) if isinstance(value, list) else int(value.shape[0])


def likeness(value: Any) -> Any:
    """What must stay the same for stored tensors to be of use: shapes, dtype and device of the main input."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.device
    return tuple([likeness(item) for item in value])


def repeats(value: Any) -> bool:
    """Are both halves of the main input equal, as they are where latents were repeated? Waits for the device."""
    middle = rows(value) // 2
    first, second = value[:middle], value[middle:]
    if isinstance(value, torch.Tensor):
        return torch.equal(first, second)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _cut(value: Any, second: bool) -> Any:
    middle = len(value) // 2
    return value[middle:] if second else value[:middle]


def half_of_inputs(
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    second: bool,
    batchless: Sequence[str] = (),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call on one half of the batch alone; the originals are left as they are.

    `names` are the denoiser's parameters in order, the first being the main input; `batchless` those without a batch
    dimension whose size could be mistaken for one. Raises Unclear.
    """
    main = args[0] if args else kwargs[names[0]]
    count, samples = rows(main), isinstance(main, list)

    def part(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _cut(value, second) if _carries(name, value, count, batchless) else value
        if samples and isinstance(value, list) and name in BATCHED and len(value) == count:
            return _cut(value, second)  # one element for each sample
        if type(value) in (list, tuple):
            return type(value)([part(name, item) for item in value])
        if isinstance(value, dict):
            return {key: part(_name(key, name, batchless), item) for key, item in value.items()}
        return value

    halved = tuple([part(name, value) for name, value in zip(names, args, strict=False)])
    return halved, {name: part(name, value) for name, value in kwargs.items()}


def _name(key: Any, outer: str, batchless: Sequence[str]) -> str:
    """What an entry of a nested dict is known as: by its own key, else as part of the argument it is in."""
    return key if key in BATCHED or key in batchless or outer not in BATCHED else outer


def _carries(name: str, value: torch.Tensor, count: int, batchless: Sequence[str]) -> bool:
    if name in batchless or value.ndim == 0 or value.shape[0] == 1:
        return False
    if name in BATCHED:
        if value.shape[0] != count:
            raise Unclear(f"{name} has {value.shape[0]} rows, and the doubled batch has {count}")
        return True
    if value.shape[0] % count == 0:
        raise Unclear(f"it is not known whether {name}, of {value.shape[0]} rows, carries the batch")
    return False


def half_of_output(value: Any, count: int, second: bool) -> Any:
    """One half of what a call on a doubled batch of `count` rows returned. Raises Unclear."""
    if isinstance(value, (torch.Tensor, list)):
        if len(value) != count:
            raise Unclear(f"an output has {len(value)} rows, and the doubled batch has {count}")
        return _cut(value, second)
    if isinstance(value, tuple):
        return tuple([half_of_output(item, count, second) for item in value])
    if isinstance(value, Mapping):  # diffusers' output classes
        return type(value)(**{key: half_of_output(item, count, second) for key, item in value.items()})
    return value


def join(first: Any, second: Any) -> Any:
    """Two outputs put together along the batch; a list holds one sample an element."""
    if isinstance(first, torch.Tensor):
        return torch.cat([first, second])
    if isinstance(first, list):
        return [*first, *second]
    if isinstance(first, tuple):
        return tuple([join(a, b) for a, b in zip(first, second, strict=True)])
    if isinstance(first, Mapping):
        return type(first)(**{key: join(first[key], second[key]) for key in first})
    return first
