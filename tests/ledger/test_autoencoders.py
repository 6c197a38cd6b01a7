"""What the closed form says of autoencoders beside a plain decode: their encoders, and decoding in exact strips."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
import torch

from diffaccel import InvalidOptionError
from diffaccel.ledger import estimate
from diffaccel.ledger.closed.vae_encoders import encoder_parameters
from diffaccel.ledger.memory import strips_peak_bytes
from diffaccel.ledger.models import bundled
from diffaccel.vae.exact import causal, kl

LTX_095 = {
    "block_out_channels": [64, 128, 128, 256, 256],
    "down_block_types": ["LTXVideo095DownBlock3D"] * 4,
    "layers_per_block": [2, 1, 1, 1, 2],
    "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
    "spatio_temporal_scaling": [True, True, True, True],
}
CHANGED: list[tuple[str, dict[str, Any]]] = [
    (
        "AutoencoderKLCogVideoX",
        {"use_quant_conv": True, "use_post_quant_conv": True, "layers_per_block": 2, "latent_channels": 8},
    ),
    ("AutoencoderKLCogVideoX", {"block_out_channels": [64, 64, 128, 128], "layers_per_block": 1}),
    (
        "AutoencoderKLHunyuanVideo15",
        {"block_out_channels": [32, 64, 64, 128], "spatial_compression_ratio": 8, "downsample_match_channel": False},
    ),
    ("AutoencoderKLLTXVideo", LTX_095),
    ("AutoencoderKLLTXVideo", {"block_out_channels": [32, 64, 64, 96], "layers_per_block": [1, 2, 1, 1, 2]}),
    (
        "AutoencoderKLLTX2Video",
        {
            "block_out_channels": [64, 128, 128, 256],
            "layers_per_block": [1, 2, 1, 1, 2],
            "spatio_temporal_scaling": [True, True, False, True],
            "downsample_type": ["conv", "temporal", "spatial", "spatial"],
            "latent_channels": 64,
        },
    ),
    (
        "AutoencoderKLMochi",
        {
            "encoder_block_out_channels": [32, 64, 64, 96],
            "add_attention_block": [True, False, True, False, True],
            "layers_per_block": [1, 2, 1, 1, 2],
        },
    ),
]


@pytest.mark.parametrize(("kind", "changes"), CHANGED)
def test_encoders_are_counted_by_their_config(kind: str, changes: dict[str, Any]) -> None:
    """Against the class on meta, with settings that are not its defaults; the defaults differ, as a control."""
    made = getattr(diffusers, kind)
    defaults = {
        name: row.default
        for name, row in inspect.signature(made.__init__).parameters.items()
        if name != "self" and row.default is not inspect.Parameter.empty
    }
    config = defaults | changes
    with torch.device("meta"):
        vae = made.from_config(config)
    beside = sum(p.numel() for p in vae.parameters()) - sum(p.numel() for p in vae.decoder.parameters())
    assert encoder_parameters(kind, config) == beside != encoder_parameters(kind, defaults)


def on_meta(name: str) -> Any:
    model = bundled(name)
    with torch.device("meta"):
        return getattr(diffusers, model.vae).from_config(dict(model.vae_config)).eval()


@pytest.mark.parametrize(
    ("name", "size", "rows"),
    [
        ("flux.1-dev", (768, 1280, None), 4),
        ("flux.1-dev", (1536, 1536, None), None),
        ("sdxl", (640, 640, None), 20),
        ("qwen-image", (1328, 1328, None), None),
        pytest.param("wan2.1-t2v-1.3b", (480, 640, 33), 10, marks=pytest.mark.slow),
        pytest.param("wan2.2-ti2v-5b", (512, 960, 49), None, marks=pytest.mark.slow),
        pytest.param("ltx-video-2b", (480, 960, 97), 12, marks=pytest.mark.slow),
    ],
)
def test_strips_hold_what_the_lever_says(name: str, size: tuple[int, int, int | None], rows: int | None) -> None:
    """Within the 40 % that peaks are good for, of what the lever counts on the class itself."""
    height, width, frames = size
    model, book = bundled(name), estimate(name, height, width, frames, hardware=None)
    backend = causal if frames or name == "qwen-image" else kl
    spatial, temporal = model.compression
    channels = model.vae_config.get("latent_channels") or model.vae_config["z_dim"]
    z = (height // spatial, width // spatial)
    long = () if backend is kl else (1 if frames is None else (frames - 1) // temporal + 1,)
    counted = backend.peak_bytes(on_meta(name), (1, channels, *long, *z), rows=rows, mode="low", itemsize=4)
    ours = strips_peak_bytes(name, book, rows)
    assert ours == pytest.approx(counted, rel=0.4)
    assert ours is not None and ours < (book.vae_peak_bytes or 0)


def test_strips_grow_with_their_lines_and_end_at_the_whole() -> None:
    book = estimate("wan2.1-t2v-14b", hardware=None)
    sizes = [strips_peak_bytes("wan2.1-t2v-14b", book, rows) or 0 for rows in (4, 16, 40, 10**4)]
    assert sizes == sorted(sizes) and sizes[-1] == book.vae_peak_bytes
    assert strips_peak_bytes("hunyuanvideo", estimate("hunyuanvideo", hardware=None)) is None
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(InvalidOptionError, match="rows must be a whole number"):
            strips_peak_bytes("flux.1-dev", estimate("flux.1-dev"), wrong)  # type: ignore[arg-type]
