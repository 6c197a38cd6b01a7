"""The order, the clock and the clean-up of the demo's measuring, on a pipeline that only keeps a diary."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import diffaccel
from diffaccel.cli.contest import nearest, runs
from diffaccel.cli.native import by_step
from diffaccel.cli.rounds import BATCH, PLAIN, Strength, computed_steps, measure


class DiaryPipe:
    """By its own clock a run takes 10 s plain and 4 s accelerated, and 100 s more the first time."""

    def __init__(self, fails_on: str | None = None) -> None:
        self.now, self.diary, self.noises, self.fails_on = 0.0, [], [], fails_on
        self.acceleration: SimpleNamespace | None = None

    def clock(self) -> float:
        return self.now

    def __call__(self, prompts, *, generator, num_inference_steps, **kwargs):
        name = self.acceleration.name if self.acceleration else "plain"
        if name == self.fails_on:
            raise RuntimeError("no")
        self.noises.append([g.initial_seed() for g in generator])
        self.now += (100.0 if name not in self.diary else 0.0) + (4.0 if self.acceleration else 10.0)
        self.diary.append(name)
        return SimpleNamespace(images=[f"{prompt} {name} {kwargs}" for prompt in prompts])


@pytest.fixture(autouse=True)
def fake_api(monkeypatch):
    def accelerate(pipe, preset, **overrides):
        steps = [SimpleNamespace(index=i, computed=i % 2 == 0) for i in range(6)]
        pipe.now += 1000.0  # attaching must not be timed
        pipe.acceleration = SimpleNamespace(
            name=f"{preset}{overrides.get('cache_threshold', '')}",
            report=SimpleNamespace(steps=steps),
            plan=SimpleNamespace(to_dict=lambda: {"preset": preset}),
        )

    monkeypatch.setattr(diffaccel, "accelerate", accelerate)
    monkeypatch.setattr(diffaccel, "restore", lambda pipe: setattr(pipe, "acceleration", None))


THREE = (PLAIN, Strength("soft", "p", {"cache_threshold": 1}), Strength("hard", "p", {"cache_threshold": 2}))


def run(pipe, **kwargs):
    return measure(pipe, ["a", "b"], {"height": 8}, steps=6, strengths=THREE, clock=pipe.clock, **kwargs)


def test_runs_are_interleaved_and_the_warm_up_is_left_out():
    pipe = DiaryPipe()
    outcomes = run(pipe, rounds=2)
    assert pipe.diary == ["plain", "p1", "p2"] * 3
    assert [outcome.seconds for outcome in outcomes] == [[10, 10], [4, 4], [4, 4]]
    assert [outcome.median_s for outcome in outcomes] == [10, 4, 4]


def test_every_run_starts_from_the_same_noise():
    pipe = DiaryPipe()
    run(pipe, rounds=1, seed=7)
    assert pipe.noises == [[7, 8]] * 6


def test_outcomes_carry_pictures_steps_and_plan():
    plain, soft, _ = run(DiaryPipe(), rounds=1)
    assert plain.images == ["a plain {'height': 8}", "b plain {'height': 8}"]
    assert plain.computed == (True,) * 6 and plain.plan is None and plain.table == ""
    assert soft.computed == (True, False) * 3 and soft.plan == {"preset": "p"} and soft.table


def test_tick_counts_every_run():
    ticks = []
    run(DiaryPipe(), rounds=2, tick=lambda: ticks.append(1))
    assert len(ticks) == 9


def test_the_pipeline_is_plain_afterwards_even_if_a_run_fails():
    pipe = DiaryPipe(fails_on="p2")
    with pytest.raises(RuntimeError, match="no"):
        run(pipe)
    assert pipe.diary == ["plain", "p1"]
    assert pipe.acceleration is None


def test_a_step_is_computed_if_any_of_its_branches_is():
    def record(index, computed):
        return SimpleNamespace(index=index, computed=computed)

    calls = [(0, True), (0, True), (1, False), (1, True), (2, False), (2, False)]
    report = SimpleNamespace(steps=[record(*call) for call in calls])
    assert computed_steps(report) == (True, True, False)


def test_fewer_steps_are_run_and_counted():
    pipe = DiaryPipe()
    [fewer] = measure(pipe, ["a"], {}, steps=6, rounds=1, strengths=[Strength("f", steps=4)], clock=pipe.clock)
    assert fewer.computed == (True,) * 4 and fewer.mean_computed == 4


def test_without_a_warm_up_every_round_counts():
    pipe = DiaryPipe()
    outcomes = run(pipe, rounds=1, warm_up=0)
    assert [outcome.seconds for outcome in outcomes] == [[110], [104], [104]]
    assert [outcome.mean_computed for outcome in outcomes] == [6, 3, 3]


def test_calls_of_a_peer_become_steps():
    assert by_step([True, False, True, True], 4) == (True, False, True, True)
    assert by_step([True, True, False, False, False, True], 3) == (True, False, True), "two branches a step"


def test_the_threshold_nearest_in_computed_steps_is_taken():
    counts = {0.1: 20.0, 0.2: 12.0, 0.3: 10.0, 0.4: 6.0}
    assert [nearest(counts, count) for count in (28, 13, 11, 7)] == [0.1, 0.2, 0.2, 0.4], "ties go to more steps"
    assert runs(["a", "b"], 3) - runs(["a", "b"], 2) == 7


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_many_prompts_go_through_in_bounded_batches(batch):
    """Every prompt once, in order, from its own noise, whatever the batch; the seconds of a round are its calls'."""
    pipe = DiaryPipe()
    prompts = [f"prompt {i}" for i in range(5)]
    outcomes = measure(pipe, prompts, {}, steps=6, rounds=1, seed=7, batch=batch, strengths=THREE, clock=pipe.clock)
    assert all(len(seeds) <= batch for seeds in pipe.noises)
    calls = -(-len(prompts) // batch)
    assert len(pipe.noises) == calls * 6
    assert [seed for seeds in pipe.noises[:calls] for seed in seeds] == [7, 8, 9, 10, 11]
    for outcome, seconds in zip(outcomes, (10, 4, 4), strict=True):
        assert [image.split(" {")[0].rsplit(" ", 1)[0] for image in outcome.images] == prompts
        assert outcome.seconds == [calls * seconds]
        assert len(outcome.computed) == 6


def test_the_demo_is_bounded_unless_told_otherwise():
    pipe = DiaryPipe()
    measure(pipe, ["a"] * 40, {}, steps=2, rounds=1, strengths=(PLAIN,), clock=pipe.clock)
    assert max(len(seeds) for seeds in pipe.noises) == BATCH <= 16
