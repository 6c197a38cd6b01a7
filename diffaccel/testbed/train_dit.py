"""Train the denoiser and its text encoders by rectified flow, through the pipeline's own encode path.

x_t = (1 - s) * x_0 + s * noise, target noise - x_0, with the noise level s drawn around the scheduler's own
shift. One caption in ten is empty, so true classifier-free guidance is real.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tasks import DenoiserTask, Shape, pack_seeds
from .training import Average, Clock, learning_rate, load_checkpoint, save_checkpoint, say, split_gradients

if TYPE_CHECKING:
    import torch

    from .bundle import Pipeline

_FURTHER = 1.5  # extra shift exponent of the high noise levels


class Latents:
    """Encoded scenes of every bucket: float16 latents [N, ...] as the denoiser sees them, and their scenes."""

    def __init__(self, pipe: Pipeline, task: DenoiserTask, counts: dict[Shape, int], threads: int = 2) -> None:
        import torch

        torch.set_num_threads(1)
        self.values: dict[Shape, torch.Tensor] = {}
        self.scenes: dict[Shape, list[Any]] = {}
        seed = 10_000_000
        for shape, count in counts.items():
            with ThreadPoolExecutor(threads) as workers:
                parts = list(workers.map(partial(task.encode, pipe, shape), pack_seeds(seed, count, 32)))
            self.values[shape] = torch.cat([packed for packed, _ in parts])
            self.scenes[shape] = list(itertools.chain(*(chosen for _, chosen in parts)))
            seed += count
            say(f"latents: {count} of {'x'.join(map(str, shape))}")


def noise_levels(count: int, mu: float, high: float, generator: torch.Generator) -> torch.Tensor:
    """Noise levels s in (0, 1], [B]: logit-normal, every fourth uniform, shifted by mu; 2 % are 1.

    A share `high` is shifted further up: what the caption decides is decided at high noise.
    """
    import torch

    def uniform() -> torch.Tensor:
        return torch.rand(count, generator=generator)

    level = torch.sigmoid(torch.randn(count, generator=generator))
    level = torch.where(uniform() < 0.25, uniform(), level)
    ratio = torch.where(uniform() < high, math.exp(mu + _FURTHER), math.exp(mu))
    level = ratio * level / (1.0 + (ratio - 1.0) * level)
    return torch.where(uniform() < 0.02, torch.ones(count), level.clamp(1e-3, 1.0))


def train_dit(
    pipe: Pipeline,
    task: DenoiserTask,
    latents: Latents,
    minutes: float,
    checkpoint: Path,
    resume: bool,
    on_check: Callable[[float], None] | None = None,
    max_steps: int | None = None,
    batch_scale: float = 1.0,
    decay: float = 0.998,
    threads: int = 2,
) -> dict[str, float]:
    """Train in place and leave averaged weights; `on_check(elapsed_s)` sees them now and then."""
    import numpy as np
    import torch

    modules = {name: getattr(pipe, name) for name in task.modules}
    if not (resume and checkpoint.exists()):
        task.prepare(pipe, 0)
    parameters = list(itertools.chain(*(m.requires_grad_(True).train().parameters() for m in modules.values())))
    optimizer = torch.optim.AdamW(parameters, lr=task.peak_rate, betas=(0.9, 0.98), weight_decay=0.01)
    average = Average(parameters, decay)
    step, images, elapsed_s = 0, 0, 0.0
    if resume and checkpoint.exists():
        saved = load_checkpoint(checkpoint)
        for name, module in modules.items():
            module.load_state_dict(saved["modules"][name])
        optimizer.load_state_dict(saved["optimizer"])
        average.load(saved["average"])
        step, images, elapsed_s = saved["step"], saved["images"], saved["elapsed_s"]
        say(f"dit: resumed at step {step}, {elapsed_s / 60:.1f} min")
    clock = Clock(minutes * 60, elapsed_s)

    def save() -> None:
        state = {"modules": {name: module.state_dict() for name, module in modules.items()}}
        state |= {"optimizer": optimizer.state_dict(), "average": average.state()}
        save_checkpoint(checkpoint, {**state, "step": step, "images": images, "elapsed_s": clock.elapsed_s})

    torch.set_num_threads(1)  # one core for each of the `threads` batch parts
    workers = ThreadPoolExecutor(threads)
    buckets = list(latents.values)
    last_save = last_say = time.monotonic()
    next_check_s = (clock.elapsed_s // task.check_s + 1) * task.check_s
    last_step = step + max_steps if max_steps is not None else None
    losses: list[float] = []
    while clock.fraction < 1.0 and step != last_step:
        draw = np.random.default_rng((step, 2))
        late = int(clock.fraction >= task.early)
        shares = np.array([task.buckets[b][late] for b in buckets])
        bucket = buckets[draw.choice(len(buckets), p=shares / shares.sum())]
        count = max(threads, round(task.buckets[bucket][2] * batch_scale))
        index = draw.integers(len(latents.scenes[bucket]), size=count)
        chosen = [latents.scenes[bucket][i] for i in index]
        captions = [
            "" if draw.random() < task.empty else scene.caption(draw.choice(3, p=(0.7, 0.15, 0.15)))
            for scene in chosen
        ]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(task.peak_rate, step, clock.fraction, warmup_steps=150, hold=task.hold)
        x0 = latents.values[bucket][index].float()
        parts = [
            partial(
                task.loss_of,
                pipe,
                x0[k::threads],
                captions[k::threads],
                bucket,
                task.high_noise[late],
                torch.Generator().manual_seed(2 * step + k),
            )
            for k in range(threads)
        ]
        loss = split_gradients(parts, parameters, workers)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.update()
        step, images = step + 1, images + count
        losses.append(loss)

        now = time.monotonic()
        if now - last_say > 30:
            last_say = now
            say(f"dit: {clock.fraction:4.0%} step {step} images {images} loss {sum(losses) / len(losses):.4f}")
            losses.clear()
        if now - last_save > 120:
            last_save = now
            save()
        if on_check is not None and clock.elapsed_s > next_check_s:
            next_check_s += task.check_s
            average.swap()
            on_check(clock.elapsed_s)
            average.swap()

    if step:
        save()
    average.swap()
    for module in modules.values():
        module.requires_grad_(False).eval()
    return {"seconds": min(clock.elapsed_s, max(elapsed_s, minutes * 60)), "images": images, "steps": step}
