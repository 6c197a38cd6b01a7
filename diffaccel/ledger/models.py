"""Which architecture: a bundled config by name, or a folder of a diffusers pipeline, with or without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import InvalidOptionError, UnsupportedModelError, nearest, unknown
from .closed.decoders import DECODERS
from .closed.denoisers import DENOISERS
from .closed.encoders import ENCODERS
from .closed.shape import Config


@dataclass(frozen=True)
class Encoder:
    """A text encoder: its class in transformers, its config, and the tokens it is given."""

    name: str
    kind: str
    tokens: int
    config: Config


@dataclass(frozen=True)
class Defaults:
    """What the pipeline does unless told otherwise.

    Attributes:
        branches: forwards a step (2: with classifier-free guidance).
        guidance: "two branches", "embedded" (an input of the model) or "none" (distilled away).
        text_tokens: per stream of text that enters the denoiser.
        audio_per_s, frame_rate: tokens of audio and frames in a second, where sound is made with the video.
    """

    steps: int
    branches: int
    guidance: str
    height: int
    width: int
    frames: int | None
    text_tokens: tuple[int, ...]
    audio_per_s: float = 0.0
    frame_rate: float = 24.0


@dataclass(frozen=True)
class Model:
    """All parts of a pipeline as configs; `experts` denoisers of one architecture take turns over the steps."""

    name: str
    denoiser: str
    config: Config
    vae: str
    vae_config: Config
    encoders: tuple[Encoder, ...]
    defaults: Defaults
    experts: int = 1
    origin: str = "bundled config"
    uncertain: tuple[str, ...] = ()
    repository: str = ""  # on the hub, of a bundled model

    @property
    def video(self) -> bool:
        """Whether it makes clips."""
        return self.defaults.frames is not None

    @property
    def compression(self) -> tuple[int, int]:
        """(pixels to a latent in a row, frames to a latent frame) of the autoencoder."""
        return compression(self.vae, self.vae_config)


def compression(kind: str, c: Config) -> tuple[int, int]:
    """Spatial and temporal compression of an autoencoder class with this config."""
    if kind in ("AutoencoderKL", "AutoencoderKLFlux2"):
        return 2 ** (len(c["block_out_channels"]) - 1), 1
    if kind == "AutoencoderKLMochi":
        temporal = spatial = 1
        for in_time, in_space in zip(c["temporal_expansions"], c["spatial_expansions"], strict=True):
            temporal, spatial = temporal * in_time, spatial * in_space
        return spatial, temporal
    if kind == "AutoencoderKLWan":
        return c.get("scale_factor_spatial", 8), c.get("scale_factor_temporal", 4)
    if kind == "AutoencoderKLQwenImage":
        return 2 ** len(c["temperal_downsample"]), 2 ** sum(c["temperal_downsample"])
    if kind == "AutoencoderKLCogVideoX":
        return 2 ** (len(c["block_out_channels"]) - 1), c["temporal_compression_ratio"]
    if kind in ("AutoencoderKLLTXVideo", "AutoencoderKLLTX2Video"):
        halvings = sum(c["decoder_spatio_temporal_scaling"])
        return (
            c.get("spatial_compression_ratio") or c["patch_size"] * 2**halvings,
            c.get("temporal_compression_ratio") or c["patch_size_t"] * 2**halvings,
        )
    return c["spatial_compression_ratio"], c["temporal_compression_ratio"]


# ---- bundled --------------------------------------------------------------------------------------------------------

_FOLDER = files(__package__) / "configs"


@cache
def names() -> tuple[str, ...]:
    """All bundled models."""
    return tuple(sorted(path.name.removesuffix(".json") for path in _FOLDER.iterdir() if path.name.endswith(".json")))


@cache
def bundled(name: str) -> Model:
    """A bundled model by its exact name."""
    data = json.loads((_FOLDER / f"{name}.json").read_text())
    given = data["defaults"]
    defaults = Defaults(
        steps=given["steps"],
        branches=given["branches"],
        guidance=given["guidance"],
        height=given["height"],
        width=given["width"],
        frames=given["frames"],
        text_tokens=tuple(given["text_tokens"]),
        audio_per_s=given.get("audio_tokens_per_second", 0.0),
        frame_rate=given.get("frame_rate", 24.0),
    )
    return Model(
        name=data["name"],
        denoiser=data["denoiser"]["class"],
        config=data["denoiser"]["config"],
        vae=data["vae"]["class"],
        vae_config=data["vae"]["config"],
        encoders=tuple(Encoder(e["name"], e["class"], e["tokens"], e["config"]) for e in data["text_encoders"]),
        defaults=defaults,
        experts=data["denoiser"]["experts"],
        uncertain=tuple(data["uncertain"]),
        repository=data["repository"],
    )


def resolve(model: str | Path | Model) -> Model:
    """The model of this name ("flux.1-dev", any case, or the repository's last part), or in this folder."""
    if isinstance(model, Model):
        return model
    if isinstance(model, Path) or (isinstance(model, str) and ("/" in model or Path(model).is_dir())):
        folder = Path(model)
        if folder.is_dir():
            return from_folder(folder)
        model = folder.name
    if not isinstance(model, str):
        raise InvalidOptionError(f"model must be a name or a folder, got {type(model).__name__}")
    key = _plain(model)
    for name in names():
        if key == _plain(name):
            return bundled(name)
    raise unknown("model", model, names())


def knows(name: str) -> bool:
    """Is there a bundled model of that name, in any case?"""
    return _plain(name) in map(_plain, names())


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


# ---- a folder -------------------------------------------------------------------------------------------------------


def from_folder(folder: Path) -> Model:
    """The model in a folder as diffusers saves it; configs alone are enough.

    What no config says (steps, guidance, lengths of text) is that of the bundled model of the same class that is
    nearest in width and depth. Raises UnsupportedModelError for a class that is not written out in `closed`.
    """
    index = _json(folder / "model_index.json")
    part = next((name for name in ("transformer", "unet") if name in index), None)
    if part is None:
        raise UnsupportedModelError(f"{folder / 'model_index.json'} names neither a transformer nor a unet")
    kind, config = _component(folder, part, DENOISERS)
    vae, vae_config = _component(folder, "vae", DECODERS)
    twin = nearest_model(kind, config)
    encoders: list[Encoder] = []
    for name in sorted(key for key in index if key.startswith("text_encoder") and _there(index[key])):
        encoder, settings = _component(folder, name, ENCODERS)
        settings = {**settings, **settings.get("text_config", {})}
        encoders.append(Encoder(name, encoder, encoder_tokens(encoder, len(encoders), twin), settings))
    defaults = twin.defaults
    if kind == "FluxTransformer2DModel":
        defaults = replace(defaults, guidance="embedded" if config.get("guidance_embeds") else "none")
    return Model(
        name=folder.resolve().name,
        denoiser=kind,
        config=config,
        vae=vae,
        vae_config=vae_config,
        encoders=tuple(encoders),
        defaults=defaults,
        experts=2 if _there(index.get(f"{part}_2")) else 1,
        origin=f"folder, defaults as {twin.name}",
    )


def _there(entry: Any) -> bool:
    return isinstance(entry, list) and any(entry)


def _component(folder: Path, name: str, known: Mapping[str, object]) -> tuple[str, Config]:
    config = _json(folder / name / "config.json")
    kind = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
    if kind not in known:
        raise UnsupportedModelError(
            f"no closed form for the {name} {kind!r} (ledger.from_pipeline counts a live one): "
            f"{nearest(str(kind), known)}"
        )
    return str(kind), config


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise FileNotFoundError(f"no {path.name} in {path.parent}") from error
    except ValueError as error:
        raise InvalidOptionError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidOptionError(f"{path} holds no JSON object")
    return found


def nearest_model(kind: str, config: Config) -> Model:
    """The bundled model of the same class whose config has most entries in common."""
    twins = [found for found in map(bundled, names()) if found.denoiser == kind]
    return max(twins, key=lambda twin: sum(twin.config[key] == config.get(key) for key in twin.config))


def encoder_tokens(kind: str, index: int, twin: Model) -> int:
    """Tokens that the encoder at this place is given, as the bundled model's are."""
    same = [encoder.tokens for encoder in twin.encoders if encoder.kind == kind]
    if same:
        return same[0]
    if kind.startswith("CLIP"):
        return 77
    return twin.encoders[index].tokens if index < len(twin.encoders) else max(twin.defaults.text_tokens)
