"""What a first-block cache costs per step, counted rather than timed.

Counts Python calls (sys.setprofile) and host syncs (aten::_local_scalar_dense: every .item(), float(tensor)
or bool(tensor) ends there, and on a GPU each waits for the device) of one step of the untrained testbed, for
    plain    no accelerator,
    missed   the gate compared and the denoiser was computed (threshold next to nothing),
    hit      the gate compared and the cache answered (threshold huge).
"forward" is the denoiser's call alone; "step" runs from one denoiser call to the next, so it has the
scheduler and the run's clock in it too. Prints one JSON document; exits 1 where a limit is broken: a missed
step may make 28 + 4 per block more Python calls than a plain one, and exactly one host sync more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffaccel import accelerate, restore, testbed

STEPS = 12
THRESHOLDS = {"plain": None, "missed": 1e-9, "hit": 1e9}


class CallCounter:
    """A profile function: Python calls inside each forward of `denoiser`, and from each to the next."""

    def __init__(self, denoiser: torch.nn.Module) -> None:
        self.denoiser = denoiser
        self.forward: list[int] = []
        self.step: list[int] = []
        self._inside: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame is self._inside:
            self._inside = None
        elif event == "call":
            if self._inside is None and self._starts_forward(frame):
                self._inside = frame
                self.forward.append(0)
                self.step.append(0)
            elif self.step:
                self.step[-1] += 1
                self.forward[-1] += self._inside is not None

    def _starts_forward(self, frame: FrameType) -> bool:
        is_call = frame.f_code is torch.nn.Module._wrapped_call_impl.__code__
        return is_call and frame.f_locals["self"] is self.denoiser


class SyncCounter(TorchDispatchMode):
    """Host syncs inside each forward of the denoiser, and from each to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[int] = []
        self.step: list[int] = []
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self.step:
            self.step[-1] += 1
            self.forward[-1] += self._inside
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self, denoiser: torch.nn.Module) -> Iterator[None]:
        """Count, with the denoiser's calls as the marks."""

        def enter(*_: Any) -> None:
            self.forward.append(0)
            self.step.append(0)
            self._inside = True

        def leave(*_: Any) -> None:
            self._inside = False

        handles = denoiser.register_forward_pre_hook(enter), denoiser.register_forward_hook(leave)
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()


def count(pipe: Any, threshold: float | None) -> dict[str, Any]:
    """Calls and syncs per step at one threshold (None: plain), over the steps of the kind it is about."""
    if threshold is not None:
        guards = {"cache_min_steps": 0, "cache_last_steps": 0}
        accelerate(pipe, preset=None, cache="first_block", cache_threshold=threshold, **guards)
    try:
        run(pipe)  # whatever happens only once per pipeline
        calls, syncs = CallCounter(pipe.transformer), SyncCounter()
        sys.setprofile(calls)
        try:
            run(pipe)
        finally:
            sys.setprofile(None)
        with syncs.watching(pipe.transformer):
            run(pipe)
        records = pipe.acceleration.report.steps if threshold is not None else None
    finally:
        restore(pipe)
    # The first step compares with nothing, the second follows it, and the decoder runs in the last.
    steps = range(2, STEPS - 1)
    if records is not None:
        computed = threshold < 1
        assert all(records[i].computed == computed and records[i].gate is not None for i in steps), records
    return {
        "steps": len(steps),
        "calls_forward": median(calls.forward[i] for i in steps),
        "calls_step": median(calls.step[i] for i in steps),
        "syncs_forward": sorted({syncs.forward[i] for i in steps}),
        "syncs_step": sorted({syncs.step[i] for i in steps}),
    }


def run(pipe: Any) -> None:
    generator = torch.Generator("cpu").manual_seed(0)
    pipe(
        testbed.prompts("test", 1),
        num_inference_steps=STEPS,
        generator=generator,
        output_type="latent",
        **testbed.call_kwargs("image"),
    )


def measure() -> dict[str, Any]:
    """The whole document."""
    pipe = testbed.load("image", random=True)
    pipe.set_progress_bar_config(disable=True)
    config = pipe.transformer.config
    blocks = config.num_layers + config.num_single_layers
    counts = {name: count(pipe, threshold) for name, threshold in THRESHOLDS.items()}
    plain, missed = counts["plain"], counts["missed"]
    more_calls = missed["calls_step"] - plain["calls_step"]
    more_syncs = missed["syncs_step"][-1] - plain["syncs_step"][0]
    return {
        "blocks": blocks,
        **counts,
        "missed_minus_plain": {
            "calls_forward": missed["calls_forward"] - plain["calls_forward"],
            "calls_step": more_calls,
            "calls_step_allowed": 28 + 4 * blocks,
            "syncs_step": more_syncs,
            "syncs_step_allowed": 1,
        },
        "within_limits": more_calls <= 28 + 4 * blocks and more_syncs == 1,
    }


if __name__ == "__main__":
    result = measure()
    print(json.dumps(result, indent=1))
    sys.exit(not result["within_limits"])
