"""`pipe.acceleration.measure`: what it says is what two runs by hand say, and the pipeline is afterwards as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import InvalidOptionError, Plan, accelerate, attach, quality, restore
from diffaccel.quality.measurement import Measurement
from tests import tiny
from tests.fingerprint import Ref

PROMPTS = list(tiny.PROMPTS[:3])
CALL = {"num_inference_steps": 5, "height": 16, "width": 16, "max_sequence_length": tiny.TEXT_TOKENS}
SCHEDULE = {"cache": "schedule", "cache_steps": "10101", "cache_min_steps": 0}


@pytest.fixture
def pipe() -> Any:
    return tiny.build("flux")


def by_hand(pipe: Any, at: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 + at)
    return tiny.output(pipe(PROMPTS[at], generator=generator, output_type="pt", **CALL))


def test_it_says_what_two_runs_by_hand_say(pipe: Any) -> None:
    plain = [by_hand(pipe, at) for at in range(3)]
    accelerate(pipe, None, strict=True, attention="native", **SCHEDULE)
    ours = [by_hand(pipe, at) for at in range(3)]
    assert "unmeasured" in str(pipe.acceleration)
    plan = pipe.acceleration.measure(PROMPTS, seeds=7, **CALL)
    said = plan.item("cache.schedule").measured
    each = [quality.compare(a, b) for a, b in zip(plain, ours, strict=True)]
    assert said["psnr_db"] == pytest.approx(sum(row["psnr"] for row in each) / 3, abs=0.01)
    assert said["psnr_lowest_db"] == pytest.approx(min(row["psnr"] for row in each), abs=0.01)
    assert said["ssim"] == pytest.approx(sum(row["ssim"] for row in each) / 3, abs=1e-4)
    assert said["speed"] > 0 and said["prompts"] == 3 and said["hit_rate"] == 0.4
    # Both items are on in the measured runs.
    assert said["items_together"] == 2 and plan.item("attention.native").measured["psnr_db"] == said["psnr_db"]
    assert all(row[3].endswith("(measured)") and "unmeasured" not in row[3] for row in plan.rows()[1:])
    assert Plan.from_toml(plan.to_toml()) == plan


def test_everything_is_afterwards_as_before(pipe: Any) -> None:
    accelerate(pipe, None, strict=True, **SCHEDULE)
    before = by_hand(pipe, 0)
    state = {name: Ref(value) for owner in (pipe, pipe.scheduler) for name, value in vars(owner).items()}
    random = torch.random.get_rng_state()
    pipe.acceleration.measure(PROMPTS[:2], **CALL)
    assert {name: Ref(value) for owner in (pipe, pipe.scheduler) for name, value in vars(owner).items()} == state
    assert torch.random.get_rng_state().equal(random)
    assert by_hand(pipe, 0).equal(before) and pipe.acceleration.plan.enabled == ("cache.schedule",)
    assert by_hand(restore(pipe), 0).equal(by_hand(tiny.build("flux"), 0))


def test_an_interrupt_leaves_the_acceleration_on_and_the_plan_unmeasured(pipe: Any) -> None:
    accelerate(pipe, None, strict=True, **SCHEDULE)
    before = by_hand(pipe, 0)

    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    for _ in range(2):  # in the plain run
        with pytest.raises(KeyboardInterrupt):
            pipe.acceleration.measure(PROMPTS, **CALL, callback_on_step_end=stop)
    assert "psnr_db" not in (pipe.acceleration.plan.item("cache.schedule").measured or {})
    assert by_hand(pipe, 0).equal(before)


def test_nothing_on_is_identical_and_a_change_of_plan_forgets_the_measurement(pipe: Any) -> None:
    attach(pipe)
    assert pipe.acceleration.measure(PROMPTS[0], **CALL).items == ()
    accelerate(pipe, None, strict=True, **{**SCHEDULE, "cache_steps": "11111"})
    said = pipe.acceleration.measure(PROMPTS[:2], **CALL).item("cache.schedule").measured
    assert said["identical"] == 2 and "psnr_db" not in said and said["ssim"] == pytest.approx(1.0)
    pipe.enable_step_schedule(steps="10111", min_steps=0)
    assert "identical" not in (pipe.acceleration.plan.item("cache.schedule").measured or {})


@pytest.mark.parametrize(
    ("prompts", "call", "said"),
    [
        ([], {}, "prompts must be a text or a list of texts"),
        (["a", 3], {}, "prompts must be a text or a list of texts"),
        (["a", "b"], {"seeds": [1]}, "one for each of the 2 prompts"),
        (["a"], {"seeds": -1}, "the first seed"),
        (["a"], {"generator": torch.Generator()}, "sets generator itself"),
        (["a"], {"output_type": "pil"}, "sets output_type itself"),
        (["a"], {"num_inference_step": 4}, "num_inference_steps"),
        (["a"], {"num_images_per_prompt": 2}, "must be 1"),
    ],
)
def test_bad_input_is_refused_before_anything_is_run(pipe: Any, prompts: Any, call: Any, said: str) -> None:
    accelerate(pipe, None, strict=True, **SCHEDULE)
    pipe.text_encoder.forward = None  # anything run would fail differently
    with pytest.raises(InvalidOptionError, match=said) as caught:
        pipe.acceleration.measure(prompts, **call)
    assert len(str(caught.value)) <= 300


def test_speed_is_the_median_of_ratios_without_the_first_pair() -> None:
    made = Measurement((40.0,) * 4, (0.9,) * 4, (9.0, 2.0, 4.0, 9.0), (1.0, 1.0, 1.0, 3.0))
    assert made.speed == 3.0  # of 2, 4 and 3; the first pair warmed up
    assert Measurement((40.0,), (None,), (9.0,), (3.0,)).summary() == {
        "psnr_db": 40.0, "psnr_lowest_db": 40.0, "speed": 3.0, "prompts": 1,
    }  # fmt: skip
