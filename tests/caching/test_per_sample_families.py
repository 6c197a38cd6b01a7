"""`per_sample` in every family: a batch of two gives the latents of its two single runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate
from tests.models.families.table import FAMILIES, build

STEPS = 5
METHODS: dict[str, dict[str, Any]] = {
    "easycache": {"cache_threshold": 0.3, "cache_warmup_steps": 0},
    "first_block": {"cache_threshold": 0.6},
}
# One pipeline of every card; wan22 has two experts, z_image takes lists.
CARDS = (
    "chroma", "cogvideox", "flux_cfg", "flux2_klein", "hunyuan_video", "hunyuan_video15", "ltx", "ltx2", "mochi",
    "pixart_alpha", "qwen", "sana", "sd3", "wan22", "z_image",
)  # fmt: skip
# Arguments of which one call has one, however many samples there are.
ALONE = ("num_frames", "height", "width")

LARGE = {"z_image": 1e9}  # families whose tiny models change more from step to step

Latents = tuple[torch.Tensor, ...]


def batched(name: str, value: Any, count: int) -> Any:
    """An argument of a call on one sample, for `count` of them."""
    if isinstance(value, torch.Tensor) and value.ndim:
        return value.repeat(count, *[1] * (value.ndim - 1))
    if isinstance(value, list) and name not in ALONE:
        return value * count
    return [value] * count if isinstance(value, str) and name.endswith(("prompt", "prompt_2")) else value


def run(pipe: Any, family: str, seeds: tuple[int, ...], **more: Any) -> Latents:
    """Latents of as many samples as there are seeds."""
    call = {name: batched(name, value, len(seeds)) for name, value in FAMILIES[family].call().items()}
    call |= {"generator": [torch.Generator().manual_seed(seed) for seed in seeds], "num_inference_steps": STEPS}
    result = pipe(**call | {"output_type": "latent", "return_dict": False} | more)
    return tuple(part for part in result if isinstance(part, torch.Tensor))


def row(latents: Latents, index: int, count: int) -> Latents:
    """One sample's share."""
    return tuple(part[index * len(part) // count : (index + 1) * len(part) // count] for part in latents)


def near(found: Latents, wanted: Latents) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max())) for a, b in zip(found, wanted, strict=True)
    )


def cached(family: str, method: str, **changes: Any) -> Any:
    options = {"cache": method, "cache_min_steps": 0, "cache_last_steps": 0, **METHODS[method], **changes}
    options["cache_threshold"] = LARGE.get(family, options["cache_threshold"])
    return accelerate(build(family), None, strict=True, **options)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("family", CARDS)
def test_a_batch_is_its_single_runs(family: str, method: str) -> None:
    pipe = cached(family, method, cache_per_sample=True)
    both = run(pipe, family, (1, 2))
    reused = pipe.acceleration.report.hit_rate
    singles = [run(pipe, family, (seed,)) for seed in (1, 2)]
    assert reused > 0 or pipe.acceleration.report.hit_rate > 0 or "flux2" in family, "nothing is tested"
    assert near(row(both, 0, 2), singles[0]) and near(row(both, 1, 2), singles[1])
    assert not near(singles[0], singles[1]), "negative control: the samples differ"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_lists_without_guidance(method: str) -> None:
    """Z-Image's denoiser takes a list; without guidance every picture is a sample of its own."""
    pipe = cached("z_image", method, cache_per_sample=True)
    both = run(pipe, "z_image", (1, 2), guidance_scale=0.0)
    singles = [run(pipe, "z_image", (seed,), guidance_scale=0.0) for seed in (1, 2)]
    assert near(row(both, 0, 2), singles[0]) and near(row(both, 1, 2), singles[1])


@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_a_pipeline_that_keeps_its_guidance_to_itself(scale: float) -> None:
    """PixArt does not say whether its one call holds both branches: without guidance, rows are samples."""
    pipe = cached("pixart_alpha", "first_block", cache_per_sample=True)
    both = run(pipe, "pixart_alpha", (1, 2), guidance_scale=scale)
    singles = [run(pipe, "pixart_alpha", (seed,), guidance_scale=scale) for seed in (1, 2)]
    assert near(row(both, 0, 2), singles[0]) and near(row(both, 1, 2), singles[1])


def test_a_residual_of_lists_is_one() -> None:
    """EasyCache on Z-Image remembers output minus input, as on every family: by hand, from what the denoiser saw."""
    pipe = build("z_image")
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(module: torch.nn.Module, args: Any, output: Any) -> None:
        seen.append((torch.stack(list(args[0])), torch.stack(list(output[0]))))

    handle = pipe.transformer.register_forward_hook(note)
    options = {"cache_threshold": 1e9, "cache_warmup_steps": 0, "cache_min_steps": 0, "cache_last_steps": 0}
    accelerate(pipe, None, cache="easycache", **options)
    run(pipe, "z_image", (1, 2))
    handle.remove()
    (_, _), (x1, v1), (x2, v2), *_ = seen
    assert torch.allclose(v2, x2 + (v1 - x1), atol=1e-6) and not torch.allclose(v2, v1, atol=1e-3)
