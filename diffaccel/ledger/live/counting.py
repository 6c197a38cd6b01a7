"""The ledger of a pipeline that is there: modules of its classes and configs are counted on meta, computing nothing.

Its own modules are only read: a fresh module of the same class and config, made on meta, is run instead, so that no
weight is touched, no hook called and nothing computed. Layers that are quantized in the pipeline so count as linear
layers of their shape. Where the pipeline's own layers differ from what its config says (blocks taken out, projections
fused), the ledger's notes say so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from ...errors import InvalidPipelineError, UnsupportedModelError, nearest
from ..arithmetic import latents_of, request_of
from ..book import Flops, Forward, Ledger
from ..closed.decoders import DECODERS
from ..closed.denoisers import BF16, DENOISERS
from ..closed.encoders import ENCODERS
from ..closed.shape import Latents
from ..hardware import Hardware, named
from ..models import Encoder, Model, encoder_tokens, nearest_model
from ..timing import predict
from .inputs import INPUTS, Call
from .memory import PeakMemory
from .meter import Counts, Meter

_DENOISERS = ("transformer", "unet")


def from_pipeline(
    pipe: object,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    text_tokens: int | Sequence[int] | None = None,
    hardware: str | Hardware | None = None,
    mfu: float | None = None,
    execution: str = "eager",
) -> Ledger:
    """The ledger of one generation by this pipeline; arguments as those of `estimate`.

    Args:
        pipe: a diffusers pipeline, on meta or with weights, on any device.

    Raises:
        InvalidPipelineError: not a pipeline with a denoiser.
        UnsupportedModelError: a denoiser whose inputs are not known.
    """
    part, denoiser = _denoiser(pipe)
    model = describe(pipe, part, denoiser)
    request = request_of(model, height, width, frames, steps, guidance, text_tokens)
    latents = latents_of(model, request)
    counts, peak, parameters, notes = _forward(model.denoiser, denoiser, latents)
    decode, decode_peak, decoder, vae = _decode(getattr(pipe, "vae", None), latents)
    texts = [(e.name, ENCODERS[e.kind](e.config, e.tokens)) for e in model.encoders]
    forward = Forward(counts.linear, counts.attention, counts.conv)
    names = ["transformer", *(f"transformer_{n + 1}" for n in range(1, model.experts))]
    step = forward.total * request.branches
    image = DENOISERS[model.denoiser](model.config, latents).rows["image"]
    encode = request.branches * sum(t.total for _, t in texts)
    book = Ledger(
        model=model.name,
        origin=model.origin,
        request=request,
        params={name: parameters for name in names}
        | {"vae": vae, "vae_decoder": decoder, "text_encoders": {name: t.parameters for name, t in texts}},
        tokens=max((keys for queries, keys in counts.sequences if queries == keys), default=image),
        image_tokens=image,
        per_token=_per_token(counts, image),
        flops=Flops(forward, step, step * request.steps, encode, decode),
        weights_bytes={name: BF16 * parameters for name in names}
        | {"vae": BF16 * vae, "text_encoders": BF16 * sum(t.parameters for _, t in texts)},
        activation_bytes=peak,
        vae_peak_bytes=decode_peak,
        notes=tuple(notes),
    )
    if hardware is None:
        return book
    machine = hardware if isinstance(hardware, Hardware) else named(hardware)
    return replace(book, seconds=predict(book, machine, execution, mfu))


# ---- reading the pipeline -------------------------------------------------------------------------------------------


def _denoiser(pipe: object) -> tuple[str, torch.nn.Module]:
    for part in _DENOISERS:
        module = getattr(pipe, part, None)
        module = getattr(module, "_orig_mod", module)
        if isinstance(module, torch.nn.Module) and hasattr(module, "config"):
            return part, module
    raise InvalidPipelineError(f"{type(pipe).__name__} has no transformer or unet with a config to count")


def _class(module: torch.nn.Module, known: Mapping[str, object], what: str) -> str:
    """The class of a module by the name it has in diffusers or transformers."""
    for kind in type(module).__mro__:
        if kind.__name__ in known:
            return kind.__name__
    name = type(module).__name__
    raise UnsupportedModelError(f"the inputs of the {what} {name!r} are not known: {nearest(name, known)}")


def describe(pipe: object, part: str, denoiser: torch.nn.Module) -> Model:
    """The pipeline as configs; what no config says is as in the bundled model that is nearest."""
    kind = _class(denoiser, INPUTS, part)
    config = dict(denoiser.config)  # type: ignore[arg-type]
    twin = nearest_model(kind, config)
    encoders: list[Encoder] = []
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        module = getattr(pipe, name, None)
        if isinstance(module, torch.nn.Module):
            encoder = _class(module, ENCODERS, name)
            settings = module.config.to_dict()  # type: ignore[operator, union-attr]
            settings |= settings.get("text_config", {})
            encoders.append(Encoder(name, encoder, encoder_tokens(encoder, len(encoders), twin), settings))
    vae = getattr(pipe, "vae", None)
    return Model(
        name=next(k.__name__ for k in type(pipe).__mro__ if not k.__module__.startswith("diffaccel.")),
        denoiser=kind,
        config=config,
        vae=_class(vae, DECODERS, "vae") if isinstance(vae, torch.nn.Module) else twin.vae,
        vae_config=dict(vae.config) if isinstance(vae, torch.nn.Module) else twin.vae_config,  # type: ignore[arg-type]
        encoders=tuple(encoders),
        defaults=twin.defaults,
        experts=2 if isinstance(getattr(pipe, f"{part}_2", None), torch.nn.Module) else 1,
        origin=f"live pipeline, defaults as {twin.name}",
    )


# ---- counting on meta -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Autocast knows no meta device, and is of no consequence there."""
    with mock.patch.object(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext()), torch.no_grad():
        yield


def _fresh(module: torch.nn.Module, dtype: torch.dtype) -> Any:
    """A module of the same class and config on meta."""
    kind: Any = next(k for k in type(module).__mro__ if k.__module__.startswith("diffusers."))
    with torch.device("meta"):
        made = kind.from_config(module.config)
    return torch.nn.Module.to(made, dtype).eval()  # diffusers' own would warn of layers that it keeps in fp32


def _forward(kind: str, module: torch.nn.Module, z: Latents) -> tuple[Counts, int, int, list[str]]:
    """(counts, peak in bytes, parameters, notes) of one forward."""
    copy = _fresh(module, torch.bfloat16)
    given = INPUTS[kind](copy.config, Call(z.frames, z.rows, z.columns, z.text, z.audio))
    peak = PeakMemory(given).hold(copy)
    with _on_meta(), Meter(copy) as meter, peak:
        copy(**given)
    return meter.counts, peak.peak_bytes, _parameters(copy), _differences(module, copy)


def _decode(vae: Any, z: Latents) -> tuple[int | None, int | None, int, int]:
    """(FLOPs, peak in bytes, parameters of the decoder, of all) of one decode in fp32."""
    if not isinstance(vae, torch.nn.Module):
        return None, None, 0, 0
    copy = _fresh(vae, torch.float32)
    config = copy.config
    channels = config.get("latent_channels") or config.get("z_dim")
    shape = (z.rows, z.columns) if type(copy).__name__ in ("AutoencoderKL", "AutoencoderKLFlux2") else None
    latents = torch.empty(1, channels, *(shape or (z.frames, z.rows, z.columns)), device="meta")
    more = {"temb": torch.empty(1, device="meta")} if config.get("timestep_conditioning") else {}
    peak = PeakMemory(latents).hold(copy)
    with _on_meta(), Meter(copy) as meter, peak:
        copy.decode(latents, **more)
    return meter.counts.total, peak.peak_bytes, _parameters(copy.decoder), _parameters(copy)


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _differences(live: torch.nn.Module, copy: torch.nn.Module) -> list[str]:
    """A sentence where the pipeline's own layers are not those of its config."""
    ours, theirs = _shapes(copy), _shapes(live)
    strange = sorted({name for name in ours.keys() ^ theirs.keys()} | {n for n in ours if ours[n] != theirs.get(n)})
    if not strange:
        return []
    return [f"{len(strange)} layers differ from the config, such as {strange[0]}: counted is what the config says"]


def _shapes(module: torch.nn.Module) -> dict[str, tuple[int, int]]:
    return {
        name: (part.in_features, part.out_features)
        for name, part in module.named_modules()
        if isinstance(getattr(part, "in_features", None), int) and isinstance(getattr(part, "out_features", None), int)
    }


def _per_token(counts: Counts, image: int) -> dict[str, int]:
    """Parameters that an image token, all others, and the condition (one row) pass through."""
    joint = sum(size for rows, size in counts.weights_by_rows.items() if rows > image)
    one = counts.weights_by_rows[1]
    own = counts.weights_by_rows[image] if image > 1 else 0
    text = sum(size for rows, size in counts.weights_by_rows.items() if 1 < rows < image)
    return {"image": own + joint, "text": text + joint, "condition": one}
