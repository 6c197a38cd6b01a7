"""Exact decode and encode of video autoencoders in spatial strips, frame by frame within a strip.

The part that sees the whole map (attention in the mid block) runs over the whole map and its result is kept, which
is small. The rest runs strip by strip, each with as many lines of its neighbours as it can reach: strips outside,
frames inside, so that one strip's frame cache lives at a time. Every layer runs in the autoencoder's own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...core.compat import COMPILED, REGISTRY, vae_decode, vae_encode
from ...core.hooked_forward import HF_HOOK, has_foreign_hooks
from ...errors import InvalidOptionError, UnsupportedModelError
from ...models.vae import VAES, vae_card
from ..layout import compression
from ..tiles import with_halo
from .causal_cost import Choice, choose_cut, costs
from .causal_cuts import Reached, gates, reached, weights_of
from .replace_input import STUB, ReplaceInput, Untouched, stub

NAME = "causal"
MODES = ("fast", "low")
PITCH_NOTE = "strips with as many lines of their neighbours as the decoder can see, the frame cache kept per strip"

STATISTICS = (torch.nn.GroupNorm, torch.nn.modules.batchnorm._NormBase)


def supports(vae: Any) -> str | None:
    """None where strips are exact; else why not, in words that follow the class name. Reads only."""
    decoder, encoder = getattr(vae, "decoder", None), getattr(vae, "encoder", None)
    blocks = getattr(decoder, "up_blocks", None)
    if decoder is None or not isinstance(blocks, torch.nn.ModuleList) or not hasattr(decoder, "mid_block"):
        return "its decoder is not a mid block and then up blocks"
    norms = sum(isinstance(module, STATISTICS) for block in blocks for module in block.modules())
    if norms:
        return (
            f"{norms} norms of its up blocks take their statistics over the whole map, each after the one before it: "
            "strips would have to be run once per norm"
        )
    if type(vae).__name__ not in VAES or vae_card(vae).strips != NAME:
        return "strips have not been tested with its class"
    if not hasattr(encoder, "mid_block"):
        return "its encoder has no mid block"
    for name, module in vae.named_modules():
        if getattr(module, COMPILED, None) is not None or hasattr(module, "_orig_mod"):
            return f"{name or 'the autoencoder'} is compiled, and a compiled graph runs past the cut"
        if module is not vae and has_foreign_hooks(module):
            return f"{name} carries a forward hook, which would see strips"
        if module is not vae and (HF_HOOK in vars(module) or getattr(vars(module).get(REGISTRY), "hooks", None)):
            return f"hooks move the weights of {name} (offload), and would once for every frame of every strip"
    try:
        for cut in range(len(blocks)):
            reached(vae, cut, False, _defaults(vae))
    except UnsupportedModelError as error:
        return str(error).partition(": ")[2]
    return None


def _defaults(vae: Any) -> dict[str, Any]:
    """What the decoder cannot do without, where only shapes matter."""
    return {"temb": torch.zeros(1)} if getattr(vae.config, "timestep_conditioning", False) else {}


def default_rows(vae: Any, shape: Any, *, encode: bool = False) -> int:
    """A quarter of the longer side, in latent lines; `shape` is that of z [B, C, T, H, W], or of x when encoding."""
    return int(max(1, -(-max(shape[-2:]) // (compression(vae) if encode else 1) // 4)))


def peak_bytes(
    vae: Any, shape: Any, *, rows: int | None = None, mode: str = "fast", itemsize: int = 4, encode: bool = False
) -> int:
    """Most bytes of tensors that `decode` (or `encode`) holds at once: the result counted, z and the weights not."""
    return _choice(vae, shape, rows, mode, itemsize, encode, _defaults(vae)).peak_bytes


def plain_bytes(vae: Any, shape: Any, *, itemsize: int = 4, encode: bool = False) -> int:
    """Most bytes of tensors that a plain decode (or encode) holds at once."""
    more = {} if encode else _defaults(vae)
    return costs(vae, tuple(shape), encode, more)[0].whole * itemsize // weights_of(vae)[0].itemsize


def _choice(
    vae: Any, shape: Any, rows: int | None, mode: str, itemsize: int, encode: bool, more: Mapping[str, Any]
) -> Choice:
    rows = default_rows(vae, shape, encode=encode) if rows is None else rows
    if rows < 1:
        raise InvalidOptionError(f"rows={rows}: must be a whole number above 0")
    if mode not in MODES:
        raise InvalidOptionError(f"mode={mode!r}: must be one of {', '.join(MODES)}")
    return choose_cut(vae, tuple(shape), min(rows, max(shape[-2:])), mode, itemsize, encode, more)


def decode(vae: Any, z: torch.Tensor, *, rows: int | None = None, mode: str = "fast", **more: Any) -> torch.Tensor:
    """The picture [B, 3, F, H, W] that the class decodes latents `z` [B, C, T, h, w] to, with tiling off.

    Args:
        rows: latent lines per strip at most, along the longer side; None takes a quarter of it.
        mode: "fast" (least work at three quarters of the plain peak) or "low" (least peak).
        more: further arguments of the class's `_decode` (LTX: temb).

    Raises:
        InvalidOptionError: rows or mode of another kind.
        UnsupportedModelError: what follows the cut sees more than a few pixels.
    """
    choice = _choice(vae, z.shape, rows, mode, z.element_size(), False, _defaults(vae) | more)
    return decode_strips(vae, z, choice, None, more)


def decode_strips(
    vae: Any, z: torch.Tensor, choice: Choice, halo: int | None, more: Mapping[str, Any]
) -> torch.Tensor:
    """Decode along a choice; `halo` (lines of the map at the cut) below the true reach gives an approximation."""
    with Untouched(vae):
        if choice.cut is None:
            return vae_decode(vae, z, **more)
        reach, gate = reached(vae, choice.cut, False, _defaults(vae) | dict(more)), gates(vae, False)[choice.cut]
        maps = _maps(vae, z, gate, more)
        result: torch.Tensor | None = None
        for span in choice.spans:
            strip, first = _strip(vae, z, gate, maps, reach, choice.axis, span, halo, more)
            if result is None:
                shape = list(strip.shape)
                shape[choice.axis] = z.shape[choice.axis] * reach.scale * reach.ratio
                result = strip.new_empty(shape)
            result.narrow(choice.axis, first, strip.shape[choice.axis]).copy_(strip)
            del strip
    assert result is not None
    return result


def _maps(vae: Any, z: torch.Tensor, gate: torch.nn.Module, more: Mapping[str, Any]) -> list[torch.Tensor]:
    """The maps at the cut, one per call of the decoder."""
    maps: list[torch.Tensor] = []

    def keep(call: int, x: torch.Tensor) -> torch.Tensor:
        maps.append(x)
        return stub(x)

    with ReplaceInput(gate, keep):
        vae_decode(vae, z, **more)
    return maps


def _strip(
    vae: Any, z: torch.Tensor, gate: torch.nn.Module, maps: list[torch.Tensor], reach: Reached, axis: int,
    span: tuple[int, int], halo: int | None, more: Mapping[str, Any],
) -> tuple[torch.Tensor, int]:  # fmt: skip
    """(the part of the picture that belongs to latent lines `span`, the line it begins at)."""
    lines = (span[0] * reach.scale, span[1] * reach.scale)
    first, end = with_halo(lines, reach.halo[axis] if halo is None else halo, maps[0].shape[axis])

    def cut(call: int, x: torch.Tensor) -> torch.Tensor:
        return maps[call].narrow(axis, first, end - first).contiguous()

    with ReplaceInput(gate, cut):
        picture = vae_decode(vae, stub(z), **more)
    if picture.shape[axis] != (end - first) * reach.ratio:
        raise UnsupportedModelError(f"{type(vae).__name__}: {end - first} lines gave {picture.shape[axis]} pixels")
    core = picture.narrow(axis, (lines[0] - first) * reach.ratio, (lines[1] - lines[0]) * reach.ratio)
    return core, lines[0] * reach.ratio


def encode(vae: Any, x: torch.Tensor, *, rows: int | None = None, mode: str = "fast", **more: Any) -> torch.Tensor:
    """The moments [B, 2C, T, h, w] that the class encodes pictures `x` [B, 3, F, H, W] to, with tiling off.

    Arguments and errors as for `decode`.
    """
    choice = _choice(vae, x.shape, rows, mode, x.element_size(), True, more)
    with Untouched(vae):
        if choice.cut is None:
            return vae_encode(vae, x, **more)
        reach, gate = reached(vae, choice.cut, True, more), gates(vae, True)[choice.cut]
        parts = [_encoded(vae, x, gate, reach, choice.axis, span, more) for span in choice.spans]

        def join(call: int, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([part[call] for part in parts], dim=choice.axis)

        with ReplaceInput(gate, join):
            size = STUB * reach.ratio
            return vae_encode(vae, x[..., :size, :size], **more)


def _encoded(
    vae: Any, x: torch.Tensor, gate: torch.nn.Module, reach: Reached, axis: int, span: tuple[int, int],
    more: Mapping[str, Any],
) -> list[torch.Tensor]:  # fmt: skip
    """The maps in front of the mid block, one per call of the encoder, cut down to latent lines `span`."""
    total = x.shape[axis] // reach.ratio
    first, end = with_halo(span, reach.halo[axis], total)
    pixels = (first * reach.ratio, x.shape[axis] if end == total else end * reach.ratio)
    maps: list[torch.Tensor] = []

    def keep(call: int, y: torch.Tensor) -> torch.Tensor:
        if y.shape[axis] != end - first:
            raise UnsupportedModelError(f"{type(vae).__name__}: {pixels} pixels gave {y.shape[axis]} latents")
        maps.append(y.narrow(axis, span[0] - first, span[1] - span[0]).clone())
        return stub(y)

    with ReplaceInput(gate, keep):
        vae_encode(vae, x.narrow(axis, pixels[0], pixels[1] - pixels[0]), **more)
    return maps
