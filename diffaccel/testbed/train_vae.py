"""Train an autoencoder on drawn scenes: the loop, the same for pictures and clips."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .tasks import AutoencoderTask
from .training import Average, Clock, learning_rate, load_checkpoint, save_checkpoint, say, split_gradients

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderKLWan


def train_vae(
    vae: AutoencoderKL | AutoencoderKLWan,
    task: AutoencoderTask,
    minutes: float,
    checkpoint: Path,
    resume: bool,
    max_steps: int | None = None,
    threads: int = 2,
) -> dict[str, float]:
    """Train in place, leave averaged weights, set scale and shift; returns seconds and images."""
    import torch

    torch.set_num_threads(1)  # one core for each of the `threads` batch parts
    workers = ThreadPoolExecutor(threads)
    parameters = list(vae.requires_grad_(True).train().parameters())
    optimizer = torch.optim.AdamW(parameters, lr=task.peak_rate, betas=(0.9, 0.98), weight_decay=1e-3)
    average = Average(parameters, 0.995)
    step, images, elapsed_s, done = 0, 0, 0.0, False
    if resume and checkpoint.exists():
        saved = load_checkpoint(checkpoint)
        vae.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        average.load(saved["average"])
        step, images, elapsed_s, done = saved["step"], saved["images"], saved["elapsed_s"], saved["done"]
        say(f"vae: resumed at step {step}, {elapsed_s / 60:.1f} min")
    clock = Clock(minutes * 60, elapsed_s)

    def save(done: bool) -> None:
        state = {"model": vae.state_dict(), "optimizer": optimizer.state_dict(), "average": average.state()}
        save_checkpoint(
            checkpoint, {**state, "step": step, "images": images, "elapsed_s": clock.elapsed_s, "done": done}
        )

    last_save = last_say = time.monotonic()
    last_step = step + max_steps if max_steps is not None else None
    while not done and clock.fraction < 1.0 and step != last_step:
        shape, count = task.batches[step % len(task.batches)]
        count = max(threads, count)
        x, _ = task.draw("train", shape, range(images, images + count))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(task.peak_rate, step, clock.fraction, warmup_steps=100, hold=task.hold)
        parts = [
            partial(task.loss_of, vae, x[k::threads], torch.Generator().manual_seed(2 * step + k))
            for k in range(threads)
        ]
        loss = split_gradients(parts, parameters, workers)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        average.update()
        step, images = step + 1, images + count

        now = time.monotonic()
        if now - last_say > 20:
            last_say = now
            say(f"vae: {clock.fraction:4.0%} step {step} images {images} loss {loss:.4f}")
        if now - last_save > 90:
            last_save = now
            save(done=False)

    if not done:
        average.swap()
        done = clock.fraction >= 1.0
        if not done:  # stopped by max_steps: keep the live weights in the checkpoint
            average.swap()
            save(done=False)
            average.swap()
        else:
            save(done=True)
    vae.requires_grad_(False).eval()
    task.set_scale(vae)
    return {
        "seconds": clock.elapsed_s if not resume else max(elapsed_s, min(clock.elapsed_s, minutes * 60)),
        "images": images,
    }
