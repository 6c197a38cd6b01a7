"""A pipeline's components as groups that move: which share weights, and at which moment of a run each is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..core.compat import unwrap_module
from ..errors import InvalidOptionError
from ..models.spec import ModelSpec
from .packing import address, pack, tensors_of
from .stage.peak import Component
from .stage.residency import Group

if TYPE_CHECKING:
    from ..core.protocols import Pipeline

# Names of components in diffusers, by the moment they work in; what is in neither list and no denoiser encodes.
# This is the first guess: a component that turns out to be called between denoiser calls stays with the denoiser.
DECODERS = (
    "vae",
    "audio_vae",
    "vqvae",
    "vqgan",
    "movq",
    "image_decoder",
    "vocoder",
    "latent_upsampler",
    "safety_checker",
)
WITH_DENOISER = ("controlnet",)


def modules_of(pipe: Pipeline) -> Iterator[tuple[str, torch.nn.Module]]:
    """The components that are modules, by name."""
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            yield name, component


def stage_of(name: str, spec: ModelSpec) -> str:
    """The moment a component is first guessed to work in."""
    if name in spec.denoisers or name.startswith(WITH_DENOISER):
        return "denoise"
    return "decode" if name in DECODERS else "encode"


def is_text_encoder(name: str) -> bool:
    """Is this component one whose outputs depend on prompts alone?"""
    return name.startswith("text_encoder")


def sharing(pipe: Pipeline, keep: Collection[str] = ()) -> list[list[tuple[str, torch.nn.Module]]]:
    """Components in groups that share weights; a group with a kept component is left out as a whole."""
    made: list[tuple[list[tuple[str, torch.nn.Module]], set[tuple[str, int]]]] = []
    for name, module in modules_of(pipe):
        # By where each tensor begins: weights that were loaded lazily may lie in one mapped file and yet be apart.
        mine = {(str(t.device), address(t)) for _, t in tensors_of(unwrap_module(module))}
        shared = [group for group in made if group[1] & mine]
        made = [group for group in made if not group[1] & mine]
        members = [member for group in shared for member in group[0]] + [(name, module)]
        made.append((members, mine.union(*(group[1] for group in shared))))
    return [members for members, _ in made if not any(name in keep for name, _ in members)]


def component_groups(pipe: Pipeline, spec: ModelSpec, keep: Collection[str] = ()) -> list[Group]:
    """What moves, in the order of the pipeline's components."""
    made = []
    for members in sharing(pipe, keep):
        names = tuple(name for name, _ in members)
        stages = {stage_of(name, spec) for name in names}
        stage = stages.pop() if len(stages) == 1 else "denoise"  # shared between moments: with the denoiser
        modules = tuple({id(m): unwrap_module(m) for _, m in members}.values())
        group = Group(names, modules, stage, any(name in spec.denoisers for name in names))
        group.size_bytes, group.fingerprinted = bytes_of(group.tensors()), any(is_text_encoder(name) for name in names)
        if group.size_bytes:
            made.append(group)
    return made


def component_sizes(
    pipe: Pipeline, spec: ModelSpec, keep: Collection[str] = (), quantized_bytes: Mapping[str, int] | None = None
) -> list[Component]:
    """The same as sizes, for predictions; kept components are there "always".

    `quantized_bytes` are those of components whose weights will be quantized before they move.
    """
    moving, after = component_groups(pipe, spec, keep), quantized_bytes or {}
    found = [
        Component(
            group.name, group.stage, min(group.size_bytes, after.get(group.name, group.size_bytes)), group.alternates
        )
        for group in moving
    ]
    names = {name for group in moving for name in group.names}
    still = [module for name, module in modules_of(pipe) if name not in names]
    rest = bytes_of(pair for module in still for pair in tensors_of(unwrap_module(module)))
    return [*found, Component("kept", "always", rest)] if rest else found


def bytes_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Bytes of the memory behind named tensors, what overlaps counted once."""
    alone = {id(tensor): (name, tensor) for name, tensor in tensors}
    return sum(chunk.nbytes for chunk in pack(alone.values()).chunks)


def require_device(name: Any) -> None:
    """Raises InvalidOptionError where `name` is no device that can hold weights ("meta" holds none)."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InvalidOptionError(f"offload_device={name!r}: {error}") from None
    if device.type == "meta":
        raise InvalidOptionError(f"offload_device={name!r}: a device that holds no numbers")
