"""What a paused run will look like, cheaply: its way drawn on straight to no noise, and decoded small."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

SIDE = 256  # pixels: previews are about so large


def straight(scheduler: Any) -> bool:
    """Do latents go straight to the picture where the denoiser's output stays, along the scheduler's sigmas?

    So for flow matching, x = (1 - sigma) x0 + sigma noise, and for Euler's steps over x = x0 + sigma noise; not where
    the sample is scaled besides.
    """
    config = getattr(scheduler, "config", {})
    flow = config.get("use_flow_sigmas") or config.get("prediction_type") == "flow_prediction"
    return bool(flow) or type(scheduler).__name__ in (
        "EulerAncestralDiscreteScheduler",
        "EulerDiscreteScheduler",
        "FlowMatchEulerDiscreteScheduler",
        "FlowMatchHeunDiscreteScheduler",
        "HeunDiscreteScheduler",
    )


def drawn_on(
    before: torch.Tensor | None, latents: torch.Tensor, sigmas: Sequence[float], step: int, scheduler: Any
) -> torch.Tensor:
    """x0 = x - sigma dx/dsigma, from the latents of this step and of the one before; the latents themselves where one
    of these is not known.

    Args:
        before, latents: after `step - 1` and after `step` steps, of one shape.
        sigmas: noise levels of the loop, the first step's first.
    """
    if before is None or not straight(scheduler) or step >= len(sigmas) or before.shape != latents.shape:
        return latents
    length = sigmas[step] - sigmas[step - 1]
    return latents if length == 0 else latents - (latents - before) * (sigmas[step] / length)


def pooled(latents: torch.Tensor, factor: int) -> torch.Tensor:
    """[..., H, W] averaged over squares of factor x factor (a rest at the edges is left out)."""
    if factor < 2 or min(latents.shape[-2:]) < factor:
        return latents
    flat: torch.Tensor = functional.avg_pool2d(latents.flatten(0, -3)[:, None].float(), factor)
    return flat.to(latents.dtype).view(*latents.shape[:-2], *flat.shape[-2:])


@contextlib.contextmanager
def decoding_small(vae: Any, scale: int, side: int = SIDE) -> Iterator[None]:
    """In here the VAE decodes latents that were pooled first, so that pictures are about `side` pixels; whole where it
    cannot take the smaller ones. `scale`: pixels per latent."""
    if vae is None:
        yield
        return
    before, plain = vars(vae).get("decode"), vae.decode

    def decode(latents: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        small = pooled(latents, max(1, min(latents.shape[-2:]) * scale // side))
        try:
            return plain(small, *args, **kwargs)
        except RuntimeError:
            if small is latents:
                raise
            return plain(latents, *args, **kwargs)

    _set(vae, decode)
    try:
        yield
    finally:
        _set(vae, before)


def _set(vae: Any, decode: Callable[..., Any] | None) -> None:
    if decode is None:
        vars(vae).pop("decode", None)
    else:
        vars(vae)["decode"] = decode


def first_of(output: Any) -> Any:
    """The first picture, or the frames of the first video, of a pipeline's output (None: there is none)."""
    for name in ("images", "frames"):
        found = getattr(output, name, None)
        if found is not None:
            return found[0]
    return output[0][0] if isinstance(output, tuple) and len(output) else None
