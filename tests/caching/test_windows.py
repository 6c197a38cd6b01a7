"""What a cache with a window holds: nothing before and behind it, but for what the first reuse needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import accelerate
from diffaccel.caching import Guards, ProbeGate
from tests import tiny
from tests.caching.settings import tensors_in

STEPS = 10
START, END = 0.4, 0.7  # steps 4, 5 and 6 may be reused
NO_GUARDS: dict[str, Any] = {"cache_min_steps": 0, "cache_last_steps": 0}
METHODS: dict[str, dict[str, Any]] = {
    "adacache": {"cache_codebook": {1e9: 9}},
    "dicache": {"cache_threshold": 1e9},
    "easycache": {"cache_threshold": 1e9, "cache_warmup_steps": 0},
    "first_block": {"cache_threshold": 1e9},
    "first_block order 2": {"cache_threshold": 1e9, "cache_order": 2, "cache_probe_order": 1},
    "interval": {"cache_interval": 9},
    "magcache": {"cache_ratios": [1.0] * STEPS, "cache_threshold": 1.0, "cache_max_steps": 9, "cache_retention": 0.1},
    "schedule": {"cache_steps": [0]},
    "schedule correct": {"cache_steps": [0], "cache_correct": 1},
    "seacache": {"cache_threshold": 1e9, "cache_max_consecutive": None},
    "taylorseer": {"cache_interval": 9, "cache_first_enhance": 1},
    "teacache": {"cache_coefficients": (1.0, 0.0), "cache_threshold": 1e9},
}
# How many computed steps before a reuse are of use: those of the forecast, or of the gate.
DEPTH = {"adacache": 2, "dicache": 2, "easycache": 2, "first_block order 2": 3, "schedule": 2, "schedule correct": 2,
         "seacache": 2, "taylorseer": 2}  # fmt: skip


def held(pipe: Any) -> list[tuple[int, int]]:
    """(bytes said to be held, bytes of all tensors in the run's state), after every step of a run."""
    found: list[tuple[int, int]] = []

    def look(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        run = pipe.acceleration.run_in_progress()
        [states] = [state for name, state in run.state.items() if not name.endswith((".conditions", ".follow"))]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for s in states.values()
                 for t in tensors_in(s.memory)}  # fmt: skip
        found.append((sum(run.bytes_held.values()), sum(sizes.values())))
        return {}

    tiny.run(pipe, "flux", num_inference_steps=STEPS, output_type="latent", callback_on_step_end=look)
    return found


def cached(method: str, **more: Any) -> Any:
    return accelerate(
        tiny.build("flux"), None, strict=True, cache=method.split()[0], **NO_GUARDS | METHODS[method] | more
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_window(method: str) -> None:
    pipe = cached(method, cache_start=START, cache_end=END)
    reported, real = zip(*held(pipe), strict=True)
    assert pipe.acceleration.report.strip() == {"cond": "CCCC...CCC"}
    first = 4 - DEPTH.get(method, 1)
    assert real[:first] == (0,) * first, "nothing is of use yet"
    assert real[3] > 0 and reported[3] > 0, "negative control: the step before the first reuse is remembered"
    end = 7 if method == "schedule correct" else 6  # a correction looks back from the next computed step
    assert real[end:] == (0,) * (STEPS - end) and reported[6 + (end == 7) :] == (0,) * (STEPS - end)
    assert pipe.acceleration.report.cache_bytes_peak == max(reported) >= max(real) - 64, "scalars apart"


@pytest.mark.parametrize("method", METHODS)
def test_what_is_let_go_changes_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same latents, bit for bit, as with everything held."""
    options = {"cache_start": START, "cache_end": END}
    pipe = cached(method, **options)
    found = tiny.run(pipe, "flux", num_inference_steps=STEPS, output_type="latent")
    monkeypatch.setattr("diffaccel.caching.branches.holding", lambda *args: None)
    other = cached(method, **options)
    wanted = tiny.run(other, "flux", num_inference_steps=STEPS, output_type="latent")
    assert torch.equal(found, wanted) and pipe.acceleration.report.strip() == other.acceleration.report.strip()
    assert pipe.acceleration.report.cache_bytes_peak <= other.acceleration.report.cache_bytes_peak


def test_a_window_of_noise_levels() -> None:
    pipe = tiny.build("flux")
    accelerate(pipe, None, strict=True, cache="custom", cache_gate=ProbeGate(1e9, tested=True),
               cache_guard=Guards(sigma_high=0.65, sigma_low=0.35))  # fmt: skip
    _, real = zip(*held(pipe), strict=True)
    strip = pipe.acceleration.report.strip()["cond"]
    first, last = strip.index("."), strip.rindex(".")
    assert real[: first - 1] == (0,) * (first - 1) and real[first - 1] > 0 and real[last:] == (0,) * (STEPS - last)
    assert 1 < first < last < STEPS - 1


def test_what_a_reuse_would_have_missed_is_told_where_no_window_forbids_it() -> None:
    pipe = cached("first_block", cache_warmup_steps=4, cache_last_steps=3)
    held(pipe)
    errors = [step.forecast_error is not None for step in pipe.acceleration.report.steps]
    assert errors == [False, True, True, True, False, False, False, True, True, True]


def test_both_branches_and_samples() -> None:
    for more in ({"cache_per_sample": True}, {"cache_branches": "first"}):
        pipe = accelerate(tiny.build("wan"), None, strict=True, cache="first_block", cache_threshold=1e9,
                          cache_start=START, cache_end=END, **NO_GUARDS, **more)  # fmt: skip
        tiny.run(pipe, "wan", num_inference_steps=STEPS, output_type="latent")
        assert set(pipe.acceleration.report.strip().values()) == {"CCCC...CCC"}, more
