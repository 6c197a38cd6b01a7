"""Run, clock and report, driven by hand."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffaccel.core.run import Run, running


class Owner:
    """Stands for the handle."""


def make(scheduler: FlowMatchEulerDiscreteScheduler) -> Run:
    return Run(SimpleNamespace(scheduler=scheduler), lambda pipe, k: ("cond", "uncond")[k], Owner())


def loop(run: Run, scheduler: FlowMatchEulerDiscreteScheduler, steps: int, calls: int = 1) -> None:
    scheduler.set_timesteps(steps)
    x = torch.zeros(1, 4)
    for t in scheduler.timesteps:
        for _ in range(calls):
            run.end_call(run.begin_call("transformer", None), x)
        x = scheduler.step(x, t, x, return_dict=False)[0]


def test_steps_are_counted_and_the_scheduler_is_left_alone() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    before = set(vars(scheduler))
    run = make(scheduler)
    with running(run):
        assert list(inspect.signature(scheduler.step).parameters)[:3] == ["model_output", "timestep", "sample"]
        loop(run, scheduler, 50, calls=2)
    report = run.report(True, 0, {})
    assert [s.index for s in report.steps] == [i for i in range(50) for _ in range(2)]
    assert [s.branch for s in report.steps[:4]] == ["cond", "uncond"] * 2
    assert report.steps[0].timestep == 1000.0 and report.steps[0].sigma == 1.0
    assert [s.timestep for s in report.steps[::2]] == scheduler.timesteps.tolist()
    assert set(vars(scheduler)) - before <= {"num_inference_steps", "_step_index", "_begin_index", "_shift"}
    assert "step" not in vars(scheduler) and "set_timesteps" not in vars(scheduler)


def test_bf16_timesteps_collide_but_indexes_do_not() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    scheduler.set_timesteps(50)
    assert len(set(scheduler.timesteps.bfloat16().tolist())) < 50, "the case is real"
    run = make(scheduler)
    with running(run):
        loop(run, scheduler, 50)
    assert len({s.index for s in run.report(True, 0, {}).steps}) == 50


def test_a_second_schedule_is_a_second_loop() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    run = make(scheduler)
    with running(run):
        loop(run, scheduler, 3)
        first = scheduler.timesteps.tolist()
        loop(run, scheduler, 5)
    assert [c.loop for c in run.calls] == [0] * 3 + [1] * 5 and run.total == 5
    steps = run.report(True, 0, {}).steps
    assert [s.timestep for s in steps[:3]] == first
    assert [s.timestep for s in steps[3:]] == scheduler.timesteps.tolist()


def test_a_start_in_mid_schedule_reports_the_right_timesteps() -> None:
    """img2img: the loop runs over the tail of the schedule."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    run = make(scheduler)
    with running(run):
        scheduler.set_timesteps(10)
        scheduler.set_begin_index(6)
        x = torch.zeros(1, 4)
        for t in scheduler.timesteps[6:]:
            run.end_call(run.begin_call("transformer", None), x)
            x = scheduler.step(x, t, x, return_dict=False)[0]
    assert run.total == 4
    assert [s.timestep for s in run.report(True, 0, {}).steps] == scheduler.timesteps[6:].tolist()


def test_a_scheduler_copied_in_mid_run_steps_itself() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    run = make(scheduler)
    with running(run):
        scheduler.set_timesteps(4)
        other = copy.deepcopy(scheduler)
        x = torch.zeros(1, 4)
        other.step(x, other.timesteps[0], x)
    assert other.step_index == 1 and scheduler.step_index is None and run.ticks == 0


def test_no_scheduler_step_is_said() -> None:
    run = make(FlowMatchEulerDiscreteScheduler())
    for _ in range(3):
        run.end_call(run.begin_call("transformer", "cond"), None)
    report = run.report(True, 0, {})
    assert any("no scheduler step" in note for note in report.notes)
    assert [s.branch for s in report.steps] == ["cond", "cond#2", "cond#3"], "never one branch twice in a step"
