"""Where a video autoencoder may be cut, and how many lines of its neighbours a strip needs there.

A cut is a module: what lies before it runs over the whole map and what lies behind it strip by strip (decoding), or
the other way round (encoding). The reach of the part in strips is read off one run under fake tensors: nothing is
computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from ...core.compat import fake_tensors, vae_decode, vae_encode
from ...errors import UnsupportedModelError
from ..layout import compression, compression_of_time
from .receptive_field import HEIGHT, WIDTH, ReceptiveField
from .replace_input import STUB, ReplaceInput, Untouched, stub


@dataclass(frozen=True)
class Reached:
    """How far a cut's strips must see: `halo` lines (rows, columns) of the map at the cut, of which `scale` make one
    latent and of which each makes `ratio` lines of the picture. Encoding: scale 1, ratio in pixels per latent."""

    halo: tuple[int, int]
    scale: int
    ratio: int


def gates(vae: Any, encode: bool) -> list[torch.nn.Module]:
    """The modules in front of which it may be cut: blocks of the decoder, or the mid block of the encoder."""
    return [vae.encoder.mid_block] if encode else list(vae.decoder.up_blocks)


def reached(vae: Any, cut: int, encode: bool, more: Mapping[str, Any]) -> Reached:
    """The halo of a cut, an index into `gates`; `more` are arguments that the decoder cannot do without.

    Raises:
        UnsupportedModelError: something in the strips sees more than a few pixels; the reason follows the class name.
    """
    table = _REACHED.setdefault(vae, {})
    if encode not in table:
        table[encode] = _read_encoder(vae) if encode else _read_decoder(vae, more)
    found = table[encode][cut]
    if isinstance(found, str):
        raise UnsupportedModelError(f"{type(vae).__name__}: {found}")
    return found


_REACHED: weakref.WeakKeyDictionary[Any, dict[bool, list[Reached | str]]] = weakref.WeakKeyDictionary()


def weights_of(vae: Any) -> tuple[torch.dtype, torch.device]:
    """Data type and device of the weights."""
    parameter = next(vae.parameters())
    return parameter.dtype, parameter.device


def _channels(vae: Any, encode: bool) -> int:
    config = vae.config
    names = ("in_channels", "input_channels") if encode else ("z_dim", "latent_channels")
    found = next((getattr(config, name) for name in names if hasattr(config, name)), 3)
    patch = getattr(config, "patch_size", None)
    return 3 if encode and patch and found == 3 * patch**2 else int(found)


def _read_decoder(vae: Any, more: Mapping[str, Any]) -> list[Reached | str]:
    """One run with a stub up to the first gate and the measured map from there on, reaches booked by block."""
    blocks = gates(vae, encode=False)
    reaches, scales = [ReceptiveField() for _ in blocks], [1] * len(blocks)
    dtype, device = weights_of(vae)

    def at_gate(index: int) -> Any:
        def swap(call: int, x: torch.Tensor) -> torch.Tensor:
            reaches[index - 1].on = False
            if index == 0:
                x = x.new_empty((*x.shape[:-2], HEIGHT, WIDTH))
            scales[index] = x.shape[-1] // WIDTH
            reaches[index].start()
            reaches[index].on = True
            return x

        return swap

    def enter(call: int, x: torch.Tensor) -> torch.Tensor:
        reaches[-1].on = False
        return x

    with torch.no_grad(), Untouched(vae), fake_tensors(), ExitStack() as stack:
        x = torch.empty(1, _channels(vae, False), 2, STUB, STUB, dtype=dtype, device=device)
        stack.enter_context(ReplaceInput(vae.decoder, enter))
        for index, block in enumerate(blocks):
            stack.enter_context(ReplaceInput(block, at_gate(index)))
        for reach in reaches:
            stack.enter_context(reach)
        width = vae_decode(vae, x, **more).shape[-1] // WIDTH
    found: list[Reached | str] = []
    for index, scale in enumerate(scales):
        why = next((reach.why for reach in reaches[index:] if reach.why), None)
        rows, columns = (sum(reach.total()[i] for reach in reaches[index:]) for i in (0, 1))
        halo = (ceil(rows * scale), ceil(columns * scale))
        found.append(f"what follows the mid block runs {why}" if why else Reached(halo, scale, width // scale))
    return found


def _read_encoder(vae: Any) -> list[Reached | str]:
    """One run with the measured picture up to the mid block, and a stub from there on."""
    reach, ratio = ReceptiveField(), compression(vae)
    dtype, device = weights_of(vae)

    def at_gate(call: int, x: torch.Tensor) -> torch.Tensor:
        reach.on = False
        return stub(x)

    def enter(call: int, x: torch.Tensor) -> torch.Tensor:
        reach.start()
        reach.on = True
        return x

    with torch.no_grad(), Untouched(vae), fake_tensors():
        shape = (1, _channels(vae, True), 1 + compression_of_time(vae), HEIGHT * ratio, WIDTH * ratio)
        x = torch.empty(shape, dtype=dtype, device=device)
        reach.on = True
        with ReplaceInput(vae.encoder, enter), ReplaceInput(vae.encoder.mid_block, at_gate), reach:
            vae_encode(vae, x)
    rows, columns = reach.total()
    return [f"its encoder runs {reach.why}" if reach.why else Reached((ceil(rows), ceil(columns)), 1, ratio)]
