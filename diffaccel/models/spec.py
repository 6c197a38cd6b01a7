"""ModelSpec: everything the accelerators need to know about a family, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..core.protocols import Pipeline

# Guidance forms
EMBEDDED = "embedded"  # one call a step; guidance is an input (a second call only for true CFG)
TWO_CALLS = "two_calls"  # conditional and unconditional in two calls
BATCHED = "batched"  # both in one call, concatenated along the batch


@dataclass(frozen=True)
class BlockList:
    """One ModuleList of transformer blocks, in running order.

    `inputs` names the leading parameters of a block's forward that carry streams, in their positional order;
    `outputs` says which stream each element of the returned tuple is (one name: the bare tensor is returned).
    `joins` is for a list whose one stream is made by the model from several of the list before (FLUX.2 puts text
    and image tokens together before its single blocks): their names, in the order of concatenation along tokens.
    `modules` are the attention and feed-forward modules whose outputs can be remembered one by one; `idle` those
    whose outputs matter to nothing else, so that nothing need be remembered of them when `modules` are reused.
    """

    attribute: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    joins: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()


@dataclass(frozen=True)
class UNet:
    """The parts of a U-Net by the names of their attributes, for leaving out the deep ones.

    Its forward runs an entry layer, the blocks of `down`, `middle` and the blocks of `up`. A layer of a block is one
    module out of each list of `layers`, in this order (a block may lack the later lists); those named in `tuples`
    return their tensor in a tuple. The entry, every layer of `down` and every one of the `samplers` that end a block
    of `down` give one skip connection; the layers of `up` take one each, the latest first. `blocks` are the class
    names of the blocks for which all this holds.
    """

    down: str
    middle: str
    up: str
    layers: tuple[str, ...]
    tuples: tuple[str, ...]
    samplers: str
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class ModelSpec:
    """A family.

    Attributes:
        family: name used in plans, presets and messages.
        denoisers: pipeline attributes that may hold a denoiser, first the main one.
        boundary: entry of the pipeline's config with the share of the training timesteps at and above which the
            first denoiser runs, and the second below (Wan 2.2); empty: one denoiser runs in every step.
        classes: class names of the denoisers that this card describes.
        config: (key, value) pairs that the denoiser's config must have as well.
        stack: the block lists in the order in which they run (empty: no transformer stack, see `no_stack`).
        stream: the main stream, whose change a first-block probe watches.
        reads: the streams that the layers after the stack read (empty: only `stream`).
        guidance: EMBEDDED, TWO_CALLS or BATCHED.
        conditional_first: whether a BATCHED call has its conditional half first (most have it second).
        stand_down: keyword arguments of the denoiser that, when given, change what blocks do or see from
            outside (skipped layers, ControlNet residuals): a block cache steps aside for such a call.
        batchless: arguments of the denoiser (or keys of its nested dicts) whose tensors have no batch dimension,
            although their size could be mistaken for one, for running one half of a BATCHED call alone.
        no_stack: why there is no block stack to cache, in words that can end a refusal.
        unet: the parts of a denoiser that is a U-Net.
        no_resume: why a paused run cannot be gone on with later (empty: it can), in words that can end a refusal.
        input: name of the denoiser's main argument, which may also come first in position.
        layout: how the main argument's axes lie: "BCFHW", "BFCHW", "BCHW", "tokens" ([B, N, C]) or "list" (of CFHW).
        grid: (args, kwargs) of a denoiser call -> (frames, rows, columns) of its tokens; for the layout "tokens".
        time_embedding: (denoiser, timesteps [N], projected) -> embeddings [N, ...], the same for every prompt.
        modulated: (first block, its args, its kwargs) -> its input after the modulated norm, [B, T, C].
        vae: kind of the decoder ("kl", "kl_causal_3d", "dc").
        token_layout: order of the tokens a block sees, for attention masks.
        frame_sink: whether all tokens attend to the first frame, where a sparse method leaves that to the family.
    """

    family: str
    denoisers: tuple[str, ...]
    classes: tuple[str, ...]
    config: tuple[tuple[str, Any], ...] = ()
    stack: tuple[BlockList, ...] = ()
    stream: str = "hidden_states"
    reads: tuple[str, ...] = ()
    guidance: str = TWO_CALLS
    conditional_first: bool = False
    stand_down: tuple[str, ...] = ()
    batchless: tuple[str, ...] = ()
    boundary: str = ""
    no_stack: str = ""
    unet: UNet | None = None
    no_resume: str = ""
    input: str = "hidden_states"
    layout: str = "tokens"
    grid: Callable[[tuple[Any, ...], dict[str, Any]], tuple[int, int, int] | None] | None = None
    time_embedding: Callable[[torch.nn.Module, torch.Tensor, bool], torch.Tensor] | None = None
    modulated: Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], torch.Tensor] | None = None
    vae: str = "kl"
    token_layout: str = ""
    frame_sink: bool = False

    def branch_name(self, pipe: Pipeline, call: int) -> str:
        """Name of the `call`-th denoiser call of a step, for pipelines that open no cache context."""
        if self.guidance == BATCHED:
            # PixArt keeps its guidance to itself; diffusers' own contexts say cond_uncond for any single call.
            silent = not hasattr(type(pipe), "do_classifier_free_guidance")
            guided = silent or bool(getattr(pipe, "do_classifier_free_guidance", False))
            return ("cond_uncond" if guided else "cond") if call == 0 else f"extra_{call}"
        return ("cond", "uncond")[call] if call < 2 else f"extra_{call}"
