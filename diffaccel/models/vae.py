"""What is known of the autoencoder classes of diffusers, as data: one row per class, by the class's name.

A class without a row decodes as diffusers decodes it; blended tiles along height and width need no row, where the
class names its tiles in one of the ways of TILE_ATTRIBUTES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Pair = tuple[str, str]  # (vertical, horizontal) attribute; the same name twice where one value serves both

_TILE: Pair = ("tile_sample_min_height", "tile_sample_min_width")
_LATENT: Pair = ("tile_latent_min_height", "tile_latent_min_width")


@dataclass(frozen=True)
class TileAttributes:
    """How a class names its tiles: size in pixels, size in latents, and a stride in pixels or an overlap (0 to 1)."""

    tile: Pair
    latent: Pair
    stride: Pair | None = None
    overlap: Pair | None = None

    def matches(self, attributes: Mapping[str, Any]) -> bool:
        """Does an autoencoder with these instance attributes follow this naming?"""
        return all(name in attributes for name in (*self.tile, *(self.stride or ()), *(self.overlap or ())))


TILE_ATTRIBUTES = (
    # Wan, Qwen-Image, HunyuanVideo, LTX, LTX2, Mochi, Magvit, DC
    TileAttributes(_TILE, _LATENT, stride=("tile_sample_stride_height", "tile_sample_stride_width")),
    # CogVideoX, VidTok
    TileAttributes(_TILE, _LATENT, overlap=("tile_overlap_factor_height", "tile_overlap_factor_width")),
    # HunyuanVideo 1.5
    TileAttributes(_TILE, _LATENT, overlap=("tile_overlap_factor", "tile_overlap_factor")),
    # AutoencoderKL (FLUX, SD, SDXL), FLUX.2, KVAE, Tiny
    TileAttributes(
        ("tile_sample_min_size", "tile_sample_min_size"),
        ("tile_latent_min_size", "tile_latent_min_size"),
        overlap=("tile_overlap_factor", "tile_overlap_factor"),
    ),
)


@dataclass(frozen=True)
class FrameAttributes:
    """How a class names its tiles along time: frames per tile and per step (of the video), or per batch.

    Attributes:
        switches: attributes that turn overlapping tiles on.
        batch, latent_batch: frames of the video and latent frames that go through at once, without overlap.
        multiple: latent frames that a size must be a multiple of.
    """

    tile: str | None = None
    stride: str | None = None
    switches: tuple[str, ...] = ()
    batch: str | None = None
    latent_batch: str | None = None
    multiple: int = 1


_BLENDED = FrameAttributes(
    tile="tile_sample_min_num_frames",
    stride="tile_sample_stride_num_frames",
    switches=("use_framewise_decoding", "use_framewise_encoding"),
)
_BATCHES = FrameAttributes(batch="num_sample_frames_batch_size", latent_batch="num_latent_frames_batch_size")
# A single latent frame alone would make one frame of the video, so CogVideoX takes them in pairs.
_PAIRS = FrameAttributes(batch="num_sample_frames_batch_size", latent_batch="num_latent_frames_batch_size", multiple=2)
_BY_FRAME = "it takes one latent frame after the other by definition, so there is nothing left to cut along time"


@dataclass(frozen=True)
class VaeCard:
    """What is known of one class.

    Attributes:
        strips: how exact strips go through it: "kl" (Encoder and Decoder of diffusers' AutoencoderKL, group norms
            included) or "causal" (the decoder is a mid block and then `up_blocks`, the encoder is blocks and then a
            `mid_block`, and only the mid blocks see the whole map); "": they are not known to be exact.
        frames: its tiles along time.
        whole: why it cannot be cut along time, after the class's name.
        broken: what is wrong with its tiled decoder at any setting.
        encode_raises: its tiled encoder raises.
        joins_late: diffusers joins its decoded tiles along time one frame late (it drops the last frame of every
            tile but the first, where the first repeats one of the tile before).
    """

    strips: str = ""
    frames: FrameAttributes | None = None
    whole: str = ""
    broken: str = ""
    encode_raises: bool = False
    joins_late: bool = False


VAES: dict[str, VaeCard] = {
    "AutoencoderKL": VaeCard(strips="kl"),
    "AutoencoderKLCogVideoX": VaeCard(frames=_PAIRS),
    "AutoencoderKLFlux2": VaeCard(strips="kl"),
    "AutoencoderKLHunyuanImage": VaeCard(encode_raises=True),  # it indexes pictures as if they were videos
    "AutoencoderKLHunyuanImageRefiner": VaeCard(
        broken="its tiled decoder crops pixels by a size in latents and returns a picture of the wrong size "
        "(huggingface/diffusers#13605)"
    ),
    "AutoencoderKLHunyuanVideo": VaeCard(frames=_BLENDED),
    "AutoencoderKLHunyuanVideo15": VaeCard(
        strips="causal", whole="it takes all frames at once, and diffusers has no tiles along time for it"
    ),
    "AutoencoderKLLTX2Video": VaeCard(strips="causal", frames=_BLENDED, joins_late=True),
    "AutoencoderKLLTXVideo": VaeCard(strips="causal", frames=_BLENDED, joins_late=True),
    "AutoencoderKLMagvit": VaeCard(frames=_BATCHES),
    "AutoencoderKLMochi": VaeCard(
        whole="its frame batches need another padding in every convolution, a switch of diffusers without a way "
        "back, and its encoder attends over all frames"
    ),
    "AutoencoderKLQwenImage": VaeCard(strips="causal", whole=_BY_FRAME),
    "AutoencoderKLWan": VaeCard(strips="causal", whole=_BY_FRAME),
}

UNKNOWN = VaeCard()


def vae_card(vae: Any) -> VaeCard:
    """The row of an autoencoder: that of the class whose `_decode` (or `decode`) it runs."""
    for name in ("_decode", "decode"):
        owner = next((cls for cls in type(vae).__mro__ if name in vars(cls)), None)
        if owner is not None:
            return VAES.get(owner.__name__, UNKNOWN)
    return UNKNOWN
