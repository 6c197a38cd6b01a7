"""Bytes beside the weights: what fits where, caches, keys and values of causal video, tiles and strips, loading."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from ..errors import InvalidOptionError
from .arithmetic import latents_of
from .book import GIB, Ledger
from .closed.decoders import DECODERS
from .closed.shape import width_of
from .models import Model, resolve

BF16 = 2
CONTEXT_GIB = 0.6  # a CUDA context with its libraries, and what the allocator cannot use; assumed
DISK_GB_S = 2.0  # an NVMe disk read through the page cache, once; assumed


@dataclass(frozen=True)
class Need:
    """GiB on the device.

    Attributes:
        weights: of all components in bf16.
        encode, denoise, decode: weights and working memory of one stage alone; decoding in bf16.
        resident: all weights and the largest working memory.
        by_stage: the largest stage, where components take turns on the device.
    """

    weights: float
    encode: float
    denoise: float
    decode: float
    working: float

    def to_dict(self) -> dict[str, float]:
        """Plain data, for JSON."""
        return {**asdict(self), "resident": self.resident, "by_stage": self.by_stage}

    @property
    def resident(self) -> float:
        """Everything stays on the device."""
        return self.weights + self.working + CONTEXT_GIB

    @property
    def by_stage(self) -> float:
        """Components take turns."""
        return max(self.encode, self.denoise, self.decode) + CONTEXT_GIB


def need(ledger: Ledger) -> Need:
    """What the stages of a generation need. Two experts are both resident, and take turns by stage."""
    weights = ledger.weights_bytes
    denoise, decode = ledger.activation_bytes or 0, (ledger.vae_peak_bytes or 0) // 2
    return Need(
        weights=sum(weights.values()) / GIB,
        encode=weights.get("text_encoders", 0) / GIB,
        denoise=(ledger.denoiser_bytes + denoise) / GIB,
        decode=(weights.get("vae", 0) + decode) / GIB,
        working=max(denoise, decode) / GIB,
    )


def kept_bytes(ledger: Ledger, width: int) -> int:
    """One residual or output of all image tokens in bf16, per guidance branch: what a step cache keeps at least."""
    return BF16 * width * ledger.image_tokens * ledger.request.branches


def kv_bytes_per_token(model: str | Model) -> int:
    """Keys and values of all layers for one token of a causal video model, bf16."""
    config = resolve(model).config
    return 2 * BF16 * int(config["num_layers"]) * width_of(config)


def kv_bytes(model: str | Model, height: int, width: int, latent_frames: int) -> int:
    """Keys and values that a causal video model keeps of so many latent frames, bf16."""
    found = resolve(model)
    spatial, _ = found.compression
    patch = found.config["patch_size"]
    patch = patch[1] if isinstance(patch, (list, tuple)) else patch
    tokens: int = (height // spatial // patch) * (width // spatial // patch) * latent_frames
    return tokens * kv_bytes_per_token(found)


def tiled_peak_bytes(model: str | Model, ledger: Ledger, tile: int) -> int:
    """Peak of decoding in square tiles of so many pixels, fp32; the whole clip's output on top."""
    found = resolve(model)
    if tile < 2 * found.compression[0]:
        raise InvalidOptionError(f"tile must be at least {2 * found.compression[0]} pixels, got {tile}")
    request = ledger.request
    part = replace(request, height=min(tile, request.height), width=min(tile, request.width))
    whole = 4 * 3 * (request.frames or 1) * request.height * request.width
    return DECODERS[found.vae](found.vae_config, latents_of(found, part)).peak_bytes + whole


# What exact strips hold at least, as a part of a plain decode's peak: (at once, and times the part of the lines that a
# strip has). Counted on the strips of diffaccel's own VAE lever on meta, `mode="low"`.
_STRIPS: dict[str, tuple[float, float]] = {
    "AutoencoderKL": (0.25, 0.83),
    "AutoencoderKLFlux2": (0.25, 0.83),
    "AutoencoderKLHunyuanVideo15": (0.17, 0.80),
    "AutoencoderKLLTX2Video": (0.42, 0.45),
    "AutoencoderKLLTXVideo": (0.50, 0.35),
    "AutoencoderKLQwenImage": (0.33, 0.0),
    "AutoencoderKLWan": (0.20, 0.95),
    "residual": (0.40, 0.85),  # Wan 2.2's
}


def strips_peak_bytes(model: str | Model, ledger: Ledger, rows: int | None = None) -> int | None:
    """Peak of decoding in exact strips, fp32; None where they do not decode this autoencoder.

    Args:
        rows: lines of latents in a strip (pictures: rows; clips: along the longer side). None: the lever's default.
    """
    found, whole = resolve(model), ledger.vae_peak_bytes
    key = "residual" if found.vae_config.get("is_residual") else found.vae
    if key not in _STRIPS or whole is None:
        return None
    request, spatial = ledger.request, found.compression[0]
    sides = (request.height // spatial, request.width // spatial)
    picture = key in ("AutoencoderKL", "AutoencoderKLFlux2")
    lines = sides[0] if picture else max(sides)
    usual = min(max(lines // 16, 2), 8) if picture else -(-lines // 4)
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise InvalidOptionError(f"rows must be a whole number of at least 1, got {rows!r}")
    least, more = _STRIPS[key]
    return round(whole * min(1.0, least + more * min((rows or usual) / lines, 1.0)))


def load_s(ledger: Ledger, gb_s: float = DISK_GB_S) -> float:
    """Seconds to read all weights from a disk of that many GB/s."""
    return sum(ledger.weights_bytes.values()) / (gb_s * 1e9)
