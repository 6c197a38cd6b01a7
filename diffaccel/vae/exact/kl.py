"""Exact strips for AutoencoderKL: the picture of a plain decode (or encode) at a fraction of its peak memory.

The backend of `ExactVae` for autoencoders built from diffusers' `Encoder` and `Decoder` (SD, SDXL, SD3, FLUX, FLUX.2,
Z-Image and many others). Halo rows at every convolution, group-norm statistics of the whole map, and the middle block
with its attention over the whole map, which is small. The pictures of a batch go one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ...core.hooked_forward import run_hooked, why_call_needed
from ...models.vae import vae_card
from . import kl_blocks, kl_stages
from .kl_blocks import WholeMap
from .kl_stages import AGAIN, WHOLE, Shape, Stage

NAME = "kl"
MODES = ("fast", "low")
ENCODES = True
PITCH_NOTE = (
    "row strips with halo rows and whole-picture group-norm statistics; equal to the plain decode but for rounding"
)


def supports(vae: Any) -> str | None:
    """None where the strips reproduce this autoencoder; else why not. Reads only."""
    if vae_card(vae).strips != NAME:
        return "its decode is none that exact strips know"
    return _coder(vae.decoder, "Decoder", "up_blocks") or _coder(vae.encoder, "Encoder", "down_blocks")


def decode(vae: Any, z: torch.Tensor, *, rows: int | None, mode: str) -> torch.Tensor:
    """What `vae._decode(z, return_dict=False)[0]` returns without tiling.

    Args:
        z: latents [B, C, h, w] as `_decode` gets them, before `post_quant_conv`. Not written to.
        rows: height of a strip in latent rows, at least 1; None: `default_rows`.
        mode: "fast" (nothing computed twice) or "low" (least memory).
    """
    picked = rows or default_rows(vae, tuple(z.shape))
    parts, walk = [], functools.partial(_walk, vae, "decoder", picked, mode)
    for latent in z.split(1):
        if vae.post_quant_conv is not None:
            latent = vae.post_quant_conv(latent)
        parts.append(run_hooked(vae.decoder, walk, latent))
    return _joined(parts)


def encode(vae: Any, x: torch.Tensor, *, rows: int | None, mode: str) -> torch.Tensor:
    """What `vae._encode(x)` returns without tiling: the moments, for pictures x [B, C, H, W]."""
    picked = rows or default_rows(vae, tuple(x.shape), encode=True)
    parts, walk = [], functools.partial(_walk, vae, "encoder", picked, mode)
    for picture in x.split(1):
        parts.append(run_hooked(vae.encoder, walk, picture))
        if vae.quant_conv is not None:
            parts.append(vae.quant_conv(parts.pop()))
    return _joined(parts)


def default_rows(vae: Any, shape: tuple[int, ...], *, encode: bool = False) -> int:
    """A strip of about a sixteenth of the picture, 2 to 8 latent rows: smaller ones spend their time on halo rows."""
    height = shape[-2] // ratio(vae) if encode else shape[-2]
    return min(max(height // 16, 2), 8)


def peak_bytes(
    vae: Any, shape: tuple[int, ...], *, rows: int | None, mode: str, itemsize: int, encode: bool = False
) -> int:
    """Most bytes of live tensors, the result included, weights and input not; for z (or pictures) of `shape`."""
    picked = rows or default_rows(vae, shape, encode=encode)
    name = "encoder" if encode else "decoder"
    stages = _stages(vae, name, shape[-2], shape[-1], Shape(picked * ratio(vae), itemsize))
    peak = max(size for _, _, size in kl_stages.choose_forms(stages, mode))
    last = stages[-1]
    one = last.modules[-1].out_channels * last.height * last.width * itemsize
    batch = shape[0]
    return peak if batch == 1 else max(peak + (batch - 1) * one, 2 * batch * one)


def plain_bytes(vae: Any, shape: tuple[int, ...], *, itemsize: int, encode: bool = False) -> int:
    """The same for the plain decode (or encode)."""
    stages = _stages(vae, "encoder" if encode else "decoder", shape[-2], shape[-1], Shape(1, itemsize))
    return shape[0] * max(stage.bytes[WHOLE] + stage.beside for stage in stages)


def standing(vae: Any, name: str) -> str | None:
    """Why strips must not stand in for `vae.encoder` or `vae.decoder` now (hooks that they would pass by), or None."""
    coder = getattr(vae, name)
    blocks = coder.up_blocks if name == "decoder" else coder.down_blocks
    passed = [(name, coder), *((f"a block of the {name}", block) for block in blocks)]
    passed += [(f"a resnet of the {name}", resnet) for block in blocks for resnet in block.resnets]
    passed += [(f"a norm of the {name}", norm) for _, r in passed[1 + len(blocks) :] for norm in (r.norm1, r.norm2)]
    return why_call_needed([*passed, (f"the last norm of the {name}", coder.conv_norm_out)])


def ratio(vae: Any) -> int:
    """Pixels per latent along one side."""
    return int(2 ** sum(block.upsamplers is not None for block in vae.decoder.up_blocks))


# ---- the walk -------------------------------------------------------------------------------------------


def _stages(vae: Any, name: str, height: int, width: int, shape: Shape) -> list[Stage]:
    if name == "decoder":
        return kl_stages.decoder_stages(vae.decoder, height, width, shape)
    return kl_stages.encoder_stages(vae.encoder, height, width, shape)


def _walk(vae: Any, name: str, rows: int, mode: str, x: torch.Tensor) -> torch.Tensor:
    """One picture or latent [1, C, h, w] through the encoder or decoder."""
    shape = Shape(rows * ratio(vae), x.element_size())
    stages = _stages(vae, name, x.shape[2], x.shape[3], shape)
    held = WholeMap(x)
    for stage, form, _ in kl_stages.choose_forms(stages, mode):
        held = _within(stage.owners, stage, form, held, shape.rows)
    return held.tensor


def _within(owners: tuple[Any, ...], stage: Stage, form: str, held: WholeMap, rows: int) -> WholeMap:
    """The stage, within the offload hooks of every block that its layers belong to."""
    if not owners:
        return _run(stage, form, held, rows)
    made: WholeMap = run_hooked(owners[0], lambda: _within(owners[1:], stage, form, held, rows))
    return made


def _run(stage: Stage, form: str, held: WholeMap, rows: int) -> WholeMap:
    modules = stage.modules
    if form == WHOLE:
        return WholeMap(_whole(stage, held))
    if stage.kind == "resnet":
        return kl_blocks.resnet(modules[0], held, rows, form == AGAIN)
    if stage.kind == "rise":
        if form == AGAIN:
            return kl_blocks.resnet(modules[1], kl_blocks.Doubled(held, modules[0]), rows, False)
        made = kl_blocks.upsampled(modules[0], held, rows)
        del held.tensor  # not needed beside what was made of it
        return kl_blocks.resnet(modules[1], made, rows, False)
    if stage.kind == "fall":
        return kl_blocks.downsampled(modules[0], held, rows)
    assert stage.kind == "tail", stage.kind
    norm, activation, conv = modules
    return WholeMap(kl_blocks.tail(norm, activation, conv, held, rows))


def _whole(stage: Stage, held: WholeMap) -> torch.Tensor:
    """The stage's modules, called one after the other; blocks take the (absent) time embedding as well."""
    made = held.tensor
    del held.tensor
    for module in stage.modules:
        block = stage.kind == "mid" and not isinstance(module, torch.nn.Conv2d)
        made = module(made, None) if block or hasattr(module, "norm1") else module(made)
    return made


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# ---- what the structure must be -------------------------------------------------------------------------


def _coder(coder: Any, kind: str, blocks: str) -> str | None:
    from diffusers.models.autoencoders import vae as parts

    if type(coder) is not getattr(parts, kind):
        return f"its {kind.lower()} is a {type(coder).__name__}"
    if type(coder.mid_block).__name__ != "UNetMidBlock2D":
        return f"the middle of its {kind.lower()} is a {type(coder.mid_block).__name__}"
    for what, module in _pieces(coder, blocks):
        why = _piece(module)
        if why is not None:
            return f"the {what} of its {kind.lower()} {why}"
    return None


def _pieces(coder: Any, blocks: str) -> Iterator[tuple[str, Any]]:
    yield "first convolution", coder.conv_in
    yield "last norm", coder.conv_norm_out
    yield "last convolution", coder.conv_out
    for i, block in enumerate(getattr(coder, blocks)):
        yield f"{blocks}.{i}", block
        for resnet in block.resnets:
            yield f"{blocks}.{i}.resnets", resnet
            yield from ((f"{blocks}.{i}.resnets", part) for part in (resnet.norm1, resnet.norm2))
            yield from ((f"{blocks}.{i}.resnets", part) for part in (resnet.conv1, resnet.conv2))
        for sampler in getattr(block, "upsamplers", None) or getattr(block, "downsamplers", None) or ():
            yield f"{blocks}.{i}.samplers", sampler


def _piece(module: Any) -> str | None:
    """Why a piece is none that the strips know, in words after its place."""
    name = type(module).__name__
    sound: bool
    if name == "Conv2d":
        sound = _same(module)
    elif name in ("UpDecoderBlock2D", "DownEncoderBlock2D"):
        samplers = getattr(module, "upsamplers", None) or getattr(module, "downsamplers", None)
        sound = len(module.resnets) > 0 and (samplers is None or len(samplers) == 1)
    elif name == "ResnetBlock2D":
        shortcut = module.conv_shortcut
        plain = module.time_emb_proj is None and module.upsample is None and module.downsample is None
        pointwise = shortcut is None or (type(shortcut) is torch.nn.Conv2d and shortcut.kernel_size == (1, 1))
        # With no time embedding these two norms are one and the same; decoders say "group".
        sound = plain and pointwise and module.time_embedding_norm in ("default", "group")
    elif name == "Upsample2D":
        plain = module.norm is None and module.interpolate and not module.use_conv_transpose
        sound = plain and module.use_conv and _same(module.conv)
    elif name == "Downsample2D":
        conv = module.conv
        right = type(conv) is torch.nn.Conv2d and (conv.kernel_size, conv.stride) == ((3, 3), (2, 2))
        sound = right and module.norm is None and module.padding == 0 and conv.padding == (0, 0)
    else:
        sound = name == "GroupNorm"
    return None if sound else f"({name}) is none that exact strips know"


def _same(conv: Any) -> bool:
    """Is it a 3x3 convolution that keeps the size, padded with zeros?"""
    if type(conv) is not torch.nn.Conv2d or conv.padding_mode != "zeros":
        return False
    return (conv.kernel_size, conv.stride, conv.padding, conv.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
