"""Video autoencoders in parts: exact strips, strips that see too little, diffusers' tiles, and tiles along time.

Per way: largest error and PSNR against the plain decode, peak bytes of live tensors (measured, and as predicted where
it is), and time as a ratio to plain. Strips with a halo of 13 latents see all that Wan's decoder sees; a smaller one
is no offer of diffaccel, it shows what the halo is for. Random weights and the testbed's trained autoencoder.
`--quick` leaves the wider one out. Prints one JSON document and writes it to benchmarks/results/vae_video.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch

from diffaccel import testbed
from diffaccel.vae.exact import causal as exact_causal
from diffaccel.vae.exact.causal_cost import Choice
from diffaccel.vae.exact.live_bytes import LiveBytes
from diffaccel.vae.tiles import strips

OUT = Path(__file__).parent / "results" / "vae_video.json"
Way = tuple[str, Callable[[], torch.Tensor], int | None]  # (name, decode, predicted bytes)


def wan(base_dim: int) -> Any:
    """A Wan 2.1 autoencoder of random weights; the real one has base_dim 96."""
    torch.manual_seed(0)
    return diffusers.AutoencoderKLWan(base_dim=base_dim).eval()


def hunyuan() -> Any:
    """A HunyuanVideo autoencoder of random weights, narrow; it cuts along time unless told otherwise."""
    torch.manual_seed(0)
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=16, block_out_channels=(16, 32, 64, 64), norm_num_groups=8
    ).eval()


def noise(*shape: int) -> torch.Tensor:
    """Latents."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def spatial(vae: Any, z: torch.Tensor, rows: int, halos: tuple[int, ...]) -> Iterator[Way]:
    """Plain, the exact modes, strips cut in front of the first up block with several halos, diffusers' tiles."""
    shape = tuple(z.shape)
    yield "plain", lambda: vae._decode(z).sample, exact_causal.plain_bytes(vae, shape)
    for mode in exact_causal.MODES:
        said = exact_causal.peak_bytes(vae, shape, rows=rows, mode=mode)
        yield f"exact, {mode}", lambda mode=mode: exact_causal.decode(vae, z, rows=rows, mode=mode), said
    axis = -2 if shape[-2] >= shape[-1] else -1
    choice = Choice(0, axis, tuple(strips(shape[axis], rows)), 0, 0)
    for halo in halos:
        yield f"halo {halo}", lambda halo=halo: exact_causal.decode_strips(vae, z, choice, halo, {}), None
    ratio = vae.spatial_compression_ratio
    size = 2 * rows * ratio
    vae.enable_tiling(size, size, size * 3 // 4, size * 3 // 4)
    yield f"diffusers tiles of {size} px", lambda: vae._decode(z).sample, None
    vae.disable_tiling()


def temporal(vae: Any, z: torch.Tensor) -> Iterator[Way]:
    """All frames at once, then diffusers' tiles along time."""
    vae.use_framewise_decoding = False
    yield "plain", lambda: vae._decode(z).sample, None
    vae.use_framewise_decoding = True
    for tile, stride in ((16, 12), (16, 8), (8, 4)):
        vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames = tile, stride
        yield f"{tile} frames per tile, one every {stride}", lambda: vae._decode(z).sample, None


def measure(ways: Iterator[Way], rounds: int) -> list[dict[str, Any]]:
    """One row per way, the first of which is the reference."""
    rows: list[dict[str, Any]] = []
    reference = torch.empty(0)
    for name, decode, said in ways:
        with LiveBytes() as live:
            made = decode()
        seconds = min(_timed(decode) for _ in range(rounds))
        if not rows:
            reference = made
        error, span = (made - reference).abs(), float(reference.max() - reference.min())
        deviation = float((made - reference).square().mean().sqrt())
        rows.append(
            {
                "way": name,
                "max_error_of_range": float(error.max()) / span,
                "psnr_db": round(20 * float(torch.log10(torch.tensor(span / deviation))), 1) if deviation else None,
                "bit_equal": torch.equal(made, reference),
                "peak_mib": round(live.peak_bytes / 2**20, 1),
                "predicted_mib": None if said is None else round(said / 2**20, 1),
                "seconds": round(seconds, 2),
            }
        )
        rows[-1]["peak_of_plain"] = round(rows[-1]["peak_mib"] / rows[0]["peak_mib"], 2)
        rows[-1]["time_of_plain"] = round(seconds / rows[0]["seconds"], 2)
    return rows


def _timed(decode: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    decode()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave the wider autoencoder out")
    parser.add_argument("--rounds", type=int, default=1, help="timed rounds per way")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    cases: dict[str, Any] = {}
    small = wan(8)
    cases["Wan base_dim 8, 5 frames of 384x288"] = spatial(small, noise(1, 16, 2, 48, 36), 16, (13, 8, 4))
    cases["Wan base_dim 8, 5 frames of 1280x128"] = spatial(small, noise(1, 16, 2, 16, 160), 40, (13,))
    video = testbed.load("video").vae
    cases["testbed video, 5 frames"] = spatial(video, noise(1, video.config.z_dim, 5, 48, 12), 8, (4,))
    cases["HunyuanVideo, narrow, 33 frames of 64x64, along time"] = temporal(hunyuan(), noise(1, 16, 9, 8, 8))
    if not arguments.quick:
        cases["Wan base_dim 16, 81 frames of 256x256"] = spatial(wan(16), noise(1, 16, 21, 32, 32), 8, ())
    found = {name: measure(ways, arguments.rounds) for name, ways in cases.items()}
    document = {"torch": torch.__version__, "machine": platform.machine(), "device": "cpu", "cases": found}
    OUT.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
