"""From a model and a request to its ledger, by arithmetic alone: no torch, no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import InvalidOptionError, UnsupportedModelError
from .book import Flops, Forward, Ledger, Request
from .closed.decoders import DECODERS
from .closed.denoisers import BF16, DENOISERS, activation_bytes
from .closed.encoders import ENCODERS
from .closed.shape import Latents
from .closed.tally import ONE, Tally
from .hardware import Hardware, named
from .models import Model, resolve
from .timing import predict

MOST = 10**6  # of any size, count or length; above it is a slip


def estimate(
    model: str | Path | Model,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    text_tokens: int | Sequence[int] | None = None,
    hardware: str | Hardware | None = "h100",
    mfu: float | None = None,
    execution: str = "eager",
) -> Ledger:
    """The ledger of one generation with batch 1.

    Args:
        model: a bundled name such as "flux.1-dev", or a folder of a diffusers pipeline; weights are not needed.
        height, width: pixels; frames: of a clip. None: the model's usual ones.
        steps: of the sampler. None: the model's default.
        guidance: scale of classifier-free guidance; at 1 or below only one branch runs. None: the model's default.
            Models with embedded guidance always run one.
        text_tokens: length of the prompt as the denoiser gets it, or one for each of its streams.
        hardware: the machine that `seconds` are predicted for; None: no seconds.
        mfu: part of the bf16 peak that the denoiser reaches. None: as published times have it.
        execution: "eager", "compiled" or "tuned" (a serving engine).

    Raises:
        InvalidOptionError: a name or number that cannot be.
        UnsupportedModelError: a folder with a class that is not written out.
    """
    found = resolve(model)
    request = request_of(found, height, width, frames, steps, guidance, text_tokens)
    latents = latents_of(found, request)
    try:
        tally = DENOISERS[found.denoiser](found.config, latents)
        decoding = DECODERS[found.vae](found.vae_config, latents)
        encoders = [(e.name, ENCODERS[e.kind](e.config, e.tokens)) for e in found.encoders]
    except KeyError as error:
        raise UnsupportedModelError(f"a config of {found.name} has no entry {error}, which the count needs") from error
    forward = Forward(tally.linear_flops, tally.attention_flops, tally.conv_flops)
    step = forward.total * request.branches
    parts = ["transformer", *(f"transformer_{n + 1}" for n in range(1, found.experts))]
    text = sum(t.parameters for _, t in encoders)
    tokens = tally.rows.get("joint", tally.rows["image"])
    book = Ledger(
        model=found.name,
        origin=found.origin,
        request=request,
        params={name: tally.parameters for name in parts}
        | {
            "vae": decoding.parameters,
            "vae_decoder": decoding.decoder_parameters,
            "text_encoders": {name: t.parameters for name, t in encoders},
        },
        tokens=tokens,
        image_tokens=tally.rows["image"],
        per_token=per_token(tally),
        flops=Flops(
            forward,
            step,
            step * request.steps,
            request.branches * sum(t.total for _, t in encoders),
            decoding.flops,
        ),
        weights_bytes={name: BF16 * tally.parameters for name in parts}
        | {"vae": BF16 * decoding.parameters, "text_encoders": BF16 * text},
        activation_bytes=activation_bytes(
            found.denoiser, found.config, latents, tally.rows["image"] + sum(request.text_tokens)
        ),
        vae_peak_bytes=decoding.peak_bytes,
        uncertain=found.uncertain,
    )
    if hardware is None:
        return book
    machine = hardware if isinstance(hardware, Hardware) else named(hardware)
    return replace(book, seconds=predict(book, machine, execution, mfu))


def per_token(tally: Tally) -> dict[str, int]:
    """Parameters by what passes through them: an image token, a text token, the condition alone."""
    joint = tally.weights["joint"]
    text = sum(size for stream, size in tally.weights.items() if stream not in ("image", "joint", "audio", ONE))
    return {"image": tally.weights["image"] + joint, "text": text + joint, "condition": tally.weights[ONE]}


def latents_of(model: Model, request: Request) -> Latents:
    """What the denoiser is given for a request; as in diffusers, sizes are rounded down to whole latents."""
    spatial, temporal = model.compression
    frames = 1 if request.frames is None else (request.frames - 1) // temporal + 1
    seconds = (request.frames or 0) / model.defaults.frame_rate
    audio = round(model.defaults.audio_per_s * seconds)
    return Latents(frames, request.height // spatial, request.width // spatial, request.text_tokens, audio)


def request_of(
    model: Model,
    height: int | None,
    width: int | None,
    frames: int | None,
    steps: int | None,
    guidance: float | None,
    text_tokens: int | Sequence[int] | None,
) -> Request:
    """The request with the model's usual numbers where none are given, checked."""
    usual = model.defaults
    if frames not in (None, 1) and not model.video:
        raise InvalidOptionError(f"frames={frames}: {model.name} makes pictures (leave frames out)")
    spatial = model.compression[0]
    return Request(
        height=_whole("height", usual.height if height is None else height, 2 * spatial),
        width=_whole("width", usual.width if width is None else width, 2 * spatial),
        frames=_whole("frames", usual.frames if frames is None else frames, 1) if usual.frames else None,
        steps=_whole("steps", usual.steps if steps is None else steps, 1),
        branches=branches(model, guidance),
        text_tokens=_lengths(model, text_tokens),
    )


def branches(model: Model, guidance: float | None) -> int:
    """Forwards a step."""
    if guidance is None or model.defaults.guidance != "two branches":
        return model.defaults.branches
    if isinstance(guidance, bool) or not isinstance(guidance, (int, float)) or not 0 <= guidance <= MOST:
        raise InvalidOptionError(f"guidance must be a number of at least 0, got {guidance!r}")
    return 2 if guidance > 1 else 1


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise InvalidOptionError(f"{name} must be a whole number from {least} to {MOST}, got {value!r}")
    return value


def _lengths(model: Model, given: int | Sequence[int] | None) -> tuple[int, ...]:
    usual = model.defaults.text_tokens
    if given is None:
        return usual
    lengths = (given,) if isinstance(given, int) else tuple(given)
    if len(lengths) == 1 and len(usual) > 1:
        lengths += usual[1:]  # the prompt's length; what else there is stays padded
    if len(lengths) != len(usual):
        raise InvalidOptionError(f"text_tokens: {model.name} takes {len(usual)} lengths, got {len(lengths)}")
    return tuple(_whole("text_tokens", length, 0) for length in lengths)
