"""Decoding a picture in parts: what it holds at once, what it costs, and what it does to the picture.

For each autoencoder: the plain decode against exact strips (modes fast and low), the blended tiling of diffaccel and
diffusers' own tiling at the same tile. Largest error (of the plain picture's range), PSNR, PSNR within 8 pixels of the
seams, peak bytes of live tensors (plain = 1), and time (plain = 1; median of interleaved rounds; processor time as
well, which a busy machine disturbs less). Autoencoders with group norms get one row more, "tiles, statistics of the
whole picture": diffusers' tiles with the group-norm statistics of the plain decode, which shows how much of the tiles'
error comes from their own statistics. The largest cases leave the tiles out.

Random weights and latents of varying local contrast, and the testbed's trained autoencoder on a mosaic of its own
pictures. `--quick` leaves the default widths out; `--large` adds them at 1024 px. Prints one JSON document and writes
it to benchmarks/results/vae.json.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLWan

from diffaccel import attach, restore, testbed
from diffaccel.testbed.build import pipeline
from diffaccel.vae.exact.backends import find_backend
from diffaccel.vae.exact.live_bytes import LiveBytes
from diffaccel.vae.layout import compression

OUT = Path(__file__).parent / "results" / "vae.json"
AIMS = {"exact, fast": (0.75, 1.3), "exact, low": (0.45, 2.5)}  # most of the plain bytes, most of the plain time
Decode = Callable[[], torch.Tensor]


def contrasted(*shape: int) -> torch.Tensor:
    """Noise whose contrast differs from place to place (a factor of about 1/4 to 4), as in a picture."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(*shape, generator=generator)
    field = torch.randn(1, 1, 4, 4, generator=generator).mul(0.7).exp()
    return noise * torch.nn.functional.interpolate(field, size=shape[-2:], mode="bicubic").clamp(0.2).reshape(
        *(1,) * (len(shape) - 2), *shape[-2:]
    )


def kl(*widths: int) -> Any:
    """An AutoencoderKL of random weights."""
    torch.manual_seed(0)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=widths,
        layers_per_block=2,
        latent_channels=4,
        norm_num_groups=min(32, widths[0] // 2),
        sample_size=512,
    ).eval()


def wan() -> Any:
    """A Wan 2.1 autoencoder of random weights, a twelfth as wide."""
    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2).eval()


def trained() -> tuple[Any, torch.Tensor]:
    """The testbed's autoencoder and the latents of a mosaic of 4x4 pictures that it made."""
    pipe = testbed.load("image")
    pipe.set_progress_bar_config(disable=True)
    call = testbed.call_kwargs("image") | {"num_inference_steps": 8, "output_type": "pt"}
    made = pipe(testbed.prompts("test", 4), generator=torch.Generator().manual_seed(0), **call).images
    row = torch.cat([*made], dim=-1)
    mosaic = torch.cat([row, row.flip(-1), row.roll(48, -1), row.flip(-2)], dim=-2)[None] * 2 - 1
    return pipe.vae.eval(), pipe.vae.encode(mosaic).latent_dist.mode()


# ---- the ways to decode ---------------------------------------------------------------------------------


def ways(vae: Any, z: torch.Tensor, tile: int) -> Iterator[tuple[str, Decode]]:
    """(name, decode) of every way; `tile` is the side of a tile in latents. Without it the exact ways alone."""
    backend, _ = find_backend(vae)
    yield "plain", lambda: vae._decode(z).sample
    for mode in backend.MODES if backend is not None else ():
        yield f"exact, {mode}", lambda mode=mode: backend.decode(vae, z, rows=None, mode=mode)
    if not tile:
        return
    _holder()  # built before anything is measured
    yield "blended", lambda: blended(vae, z, tile)
    yield "diffusers tiling", lambda: diffusers_tiles(vae, z, tile)
    if isinstance(vae, AutoencoderKL):
        frozen = statistics_of(vae, z)
        yield "tiles, statistics of the whole picture", lambda: frozen_tiles(vae, z, tile, frozen)


def _tile_settings(vae: Any, tile: int) -> dict[str, Any]:
    size = tile * compression(vae)
    if "tile_sample_min_size" in vars(vae):
        return {"tile_sample_min_size": size, "tile_latent_min_size": tile}
    both = {f"tile_sample_min_{side}": size for side in ("height", "width")}
    return both | {f"tile_sample_stride_{side}": size * 3 // 4 for side in ("height", "width")}


@contextlib.contextmanager
def _tiled(vae: Any, tile: int) -> Iterator[None]:
    settings = _tile_settings(vae, tile) | {"use_tiling": True}
    before = {name: getattr(vae, name) for name in settings}
    vars(vae).update(settings)
    try:
        yield
    finally:
        vars(vae).update(before)


def diffusers_tiles(vae: Any, z: torch.Tensor, tile: int) -> torch.Tensor:
    """Diffusers' own tiling."""
    with _tiled(vae, tile):
        made: torch.Tensor = vae._decode(z).sample
    return made


def blended(vae: Any, z: torch.Tensor, tile: int) -> torch.Tensor:
    """The blended tiling of diffaccel, through a pipeline that holds the autoencoder."""
    size = tile * compression(vae)
    pipe = _holder()
    pipe.vae = vae
    attach(pipe).enable_vae_tiling(tile_height=size, tile_width=size)
    try:
        made: torch.Tensor = vae._decode(z).sample
    finally:
        restore(pipe)
    return made


@functools.cache
def _holder() -> Any:
    """Any pipeline."""
    return pipeline()


def statistics_of(vae: Any, z: torch.Tensor) -> dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Mean and reciprocal deviation of every group, per group norm of the decoder, in a plain decode."""
    found: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(norm: Any, inputs: Any, _: Any) -> None:
        variance, mean = torch.var_mean(inputs[0].reshape(len(inputs[0]), norm.num_groups, -1), -1, correction=0)
        found[norm] = mean, torch.rsqrt(variance + norm.eps)

    norms = [module for module in vae.decoder.modules() if isinstance(module, torch.nn.GroupNorm)]
    handles = [norm.register_forward_hook(note) for norm in norms]
    vae._decode(z)
    for handle in handles:
        handle.remove()
    return found


def frozen_tiles(vae: Any, z: torch.Tensor, tile: int, frozen: Any) -> torch.Tensor:
    """Diffusers' tiles, every group norm with the statistics of the whole picture."""

    def normalise(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        mean, scale = frozen[norm]

        def forward(x: torch.Tensor) -> torch.Tensor:
            grouped = x.reshape(len(x), norm.num_groups, -1)
            normed = ((grouped - mean[..., None]) * scale[..., None]).reshape(x.shape)
            tail = (1,) * (x.dim() - 2)
            return normed * norm.weight.view(-1, *tail) + norm.bias.view(-1, *tail)

        return forward

    for norm in frozen:
        norm.forward = normalise(norm)
    try:
        return diffusers_tiles(vae, z, tile)
    finally:
        for norm in frozen:
            del norm.forward


# ---- measures -------------------------------------------------------------------------------------------


def psnr(error: torch.Tensor, span: float) -> float | None:
    """PSNR in dB over the plain picture's range; None where there is no error."""
    mse = float(error.double().pow(2).mean())
    return None if mse == 0 else round(10 * float(torch.tensor(span * span / mse).log10()), 1)


def near_seams(shape: torch.Size, tile: int, ratio: int, overlap: float = 0.25) -> torch.Tensor:
    """Which pixels [H, W] lie within 8 of where a tile begins or its blend ends."""
    height, width = shape[-2:]
    near = torch.zeros(height, width, dtype=torch.bool)
    step, blend = int(tile * (1 - overlap)) * ratio, int(tile * overlap) * ratio
    for size, mark in ((height, lambda a, b: near[a:b].fill_(True)), (width, lambda a, b: near[:, a:b].fill_(True))):
        for start in range(step, size, step):
            for seam in (start, start + blend):
                mark(max(seam - 8, 0), min(seam + 8, size))
    return near


def compare(made: torch.Tensor, plain: torch.Tensor, seams: torch.Tensor) -> dict[str, Any]:
    """Errors against the plain picture."""
    if made.shape != plain.shape:
        return {"wrong_shape": list(made.shape)}
    error, span = made - plain, float(plain.max() - plain.min())
    found = {"max_error": float(error.abs().max()) / span, "psnr_db": psnr(error, span)}
    return found | ({"seam_psnr_db": psnr(error[..., seams], span)} if seams.any() else {})


def measure(vae: Any, z: torch.Tensor, tile: int, rounds: int) -> dict[str, Any]:
    """Every way on one autoencoder, in turn."""
    listed = dict(ways(vae, z, tile))
    rows: dict[str, dict[str, Any]] = {name: {} for name in listed}
    seconds: dict[str, list[float]] = {name: [] for name in listed}
    cpu: dict[str, list[float]] = {name: [] for name in listed}
    plain: Any = None
    for number in range(rounds):
        for name, decode in listed.items():
            # The tracker slows small operations down: it is on in the first round, which counts only if it is alone.
            if number == 1:
                seconds[name].clear()
                cpu[name].clear()
            with LiveBytes() if not number else contextlib.nullcontext() as live:
                started, cpu_started = time.perf_counter(), time.process_time()
                made = decode()
                seconds[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - cpu_started)
            if number:
                continue
            assert live is not None
            rows[name]["peak_bytes"] = live.peak_bytes
            if name == "plain":
                plain = made
                seams = (
                    near_seams(plain.shape, tile, compression(vae)) if tile else torch.zeros(plain.shape[-2:]).bool()
                )
            else:
                rows[name] |= compare(made, plain, seams)
            del made
    for name, row in rows.items():
        row["bytes_of_plain"] = round(row["peak_bytes"] / rows["plain"]["peak_bytes"], 3)
        row["time_of_plain"] = round(median(a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)), 2)
        row["cpu_time_of_plain"] = round(median(a / b for a, b in zip(cpu[name], cpu["plain"], strict=True)), 2)
        row["seconds"] = round(median(seconds[name]), 2)
        if name in AIMS and isinstance(vae, AutoencoderKL):
            most_bytes, most_time = AIMS[name]
            row["within_aims"] = {
                "max_error <= 1e-5": row["max_error"] <= 1e-5,
                f"bytes <= {most_bytes}": row["bytes_of_plain"] <= most_bytes,
                f"time <= {most_time}": row["time_of_plain"] <= most_time,
            }
    return {"rounds": rounds, "tile_px": tile * compression(vae), "rows": rows}


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Any, torch.Tensor, int, int]]:
    """(name, autoencoder, latents, tile in latents, rounds)."""
    yield "kl 32-64-64-64, 256 px", kl(32, 64, 64, 64), contrasted(1, 4, 32, 32), 16, 3
    yield "kl 32-64-64-64, 424x296 px", kl(32, 64, 64, 64), contrasted(1, 4, 37, 53), 16, 1
    yield "wan 8-16-32-32, 256x192 px, 5 frames", wan(), contrasted(1, 16, 2, 32, 24), 16, 1
    if not args.only_random:
        yield "testbed image (trained), 384 px", *trained(), 24, 3
    if not args.quick:
        yield "kl 128-256-512-512, 128 px", kl(128, 256, 512, 512), contrasted(1, 4, 16, 16), 8, 1
        yield "kl 128-256-512-512, 512 px", kl(128, 256, 512, 512), contrasted(1, 4, 64, 64), 0, 1
    if args.large:
        yield "kl 128-256-512-512, 1024 px", kl(128, 256, 512, 512), contrasted(1, 4, 128, 128), 0, 1


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small widths only")
    parser.add_argument("--large", action="store_true", help="the default widths at 1024 px as well (minutes, 4 GiB)")
    parser.add_argument("--only-random", action="store_true", help="leave the trained autoencoder out")
    parser.add_argument("--only", help="only cases whose name has this in it")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    document: dict[str, Any] = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cases": {},
    }
    with torch.no_grad():
        for name, vae, z, tile, rounds in cases(args):
            if args.only is None or args.only in name:
                started = time.perf_counter()
                document["cases"][name] = measure(vae, z, tile, rounds)
                print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
                args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
