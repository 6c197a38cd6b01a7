"""A whole search on the image testbed at few steps: what it writes can be used, checked, stopped and gone on with."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EulerAncestralDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from diffaccel import Budget, InvalidOptionError, accelerate, plan, quality, restore, testbed, tune
from diffaccel.cli import main
from diffaccel.errors import IncompatibleError
from diffaccel.planner.presets import load
from diffaccel.quality.measurement import generate
from diffaccel.tune.calibrate import Calibration
from diffaccel.tune.response import require_deterministic, response
from tests import tiny

STEPS, COMPUTED = 10, 5
CALL = {**testbed.call_kwargs("image"), "height": 48, "width": 48, "num_inference_steps": STEPS}
PROMPTS = testbed.prompts("train", 2)
ARGUMENTS: dict[str, Any] = {"budgets": COMPUTED, "batch": 2, "runs": 2, "rivals": ("own",),
    "tolerances": (0.01, 0.03), **CALL,
}  # fmt: skip


@pytest.fixture(scope="module")
def pipe() -> Any:
    found = testbed.load("image")
    found.set_progress_bar_config(disable=True)
    return found


@pytest.fixture(scope="module")
def searched(pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One search, with what it said and wrote; the tests below look at it."""
    out, said = tmp_path_factory.mktemp("tuned"), []
    before = dict(vars(pipe)), dict(vars(pipe.scheduler))
    found = tune.search(pipe, PROMPTS, journal=out / "journal.json", out=out, say=said.append, **ARGUMENTS)
    assert (dict(vars(pipe)), dict(vars(pipe.scheduler))) == before and "forward" not in vars(pipe.transformer)
    return found, said, out


def test_it_says_the_expected_minutes_first_and_then_the_best_so_far(searched: Any) -> None:
    _, said, _ = searched
    assert said[0].startswith("about ") and "minutes" in said[0] and "2 plain runs, up to 3 of 2 prompt(s)" in said[0]
    runs = [line for line in said if ", run " in line]
    assert len(runs) == 2 and all("; best " in line for line in runs)
    assert any(line.startswith(f"{COMPUTED} steps of own: ") for line in said)
    assert said[-1].startswith("tolerance 0.03: ")


def test_the_preset_gives_the_pictures_that_it_was_measured_on(pipe: Any, searched: Any) -> None:
    found, _, out = searched
    [path] = out.glob("*.toml")
    assert path.name == f"tuned-flux-{COMPUTED}-of-{STEPS}.toml" and path.read_text() == found.preset()
    table = tomllib.loads(path.read_text())
    plain = generate(pipe, PROMPTS, [0, 1], CALL)
    accelerate(pipe, preset=str(path), strict=True)
    try:
        ours = generate(pipe, PROMPTS, [0, 1], CALL)
        assert sum(step.computed for step in pipe.acceleration.report.steps) == COMPUTED
        assert any(note.startswith("tuned: ") for note in pipe.acceleration.plan.notes)
    finally:
        restore(pipe)
    assert table["measured"]["psnr_db"] == pytest.approx(quality.psnr(plain, ours), abs=0.02)
    assert table["measured"]["psnr_interval_db"][0] <= table["measured"]["psnr_db"]
    assert table["measured"]["prompts"] == 2 and table["measured"]["held_out"] is False
    assert table["origin"]["prompts"] == PROMPTS and table["origin"]["seeds"] == [0, 1]
    assert set(table["origin"]["versions"]) == {"diffaccel", "diffusers", "torch"}


def test_it_competes_with_fewer_steps(pipe: Any, searched: Any) -> None:
    found, _, _ = searched
    [setting] = found.settings
    plain = generate(pipe, PROMPTS, [0, 1], CALL)
    fewer = generate(pipe, PROMPTS, [0, 1], {**CALL, "num_inference_steps": COMPUTED})
    assert setting.rivals["own"].mean_db == pytest.approx(quality.psnr(plain, fewer), abs=1e-3)
    assert setting.winner == (None if setting.trial.mean_db >= setting.rivals["own"].mean_db else "own")
    assert (setting.winner is None) == ("instead" not in tomllib.loads(found.preset()))


def test_it_calibrates_the_adaptive_cache(pipe: Any, searched: Any) -> None:
    """Every prompt by itself; the table of the preset has what a run by hand has."""
    _, _, out = searched
    table = load(str(next(out.glob("*.toml")))).calibration
    assert list(table["tolerances"]) == [0.01, 0.03]
    plain = generate(pipe, PROMPTS[1:], [1], CALL)
    accelerate(pipe, None, strict=True, cache="adaptive", cache_tolerance=0.03)
    try:
        ours = generate(pipe, PROMPTS[1:], [1], CALL)
    finally:
        restore(pipe)
    assert table["psnr_db"][1][1] == pytest.approx(quality.psnr(plain, ours), abs=0.05)
    assert table["computed_steps"][0] > table["computed_steps"][1]
    assert Calibration.read(table).tolerance_for(40.0, miss=None) > 0


def test_schedules_for_all_numbers_of_steps_come_with_it(searched: Any) -> None:
    found, _, out = searched
    rows = load(str(next(out.glob("*.toml")))).schedules
    assert [row["computed_steps"] for row in rows] == list(range(2, STEPS))
    assert all(str(row["steps"]).count("1") == row["computed_steps"] for row in rows)
    assert rows[-1]["estimate_db"] > rows[0]["estimate_db"]
    assert json.loads(json.dumps(found.to_dict()))["curve"] == [dict(row) for row in rows]


def test_a_search_goes_on_from_its_journal_without_running_what_it_knows(pipe: Any, searched: Any) -> None:
    found, _, out = searched
    pipe.transformer.forward = None  # nothing can run
    try:
        again = tune.search(pipe, PROMPTS, journal=out / "journal.json", say=None, **ARGUMENTS)
    finally:
        del pipe.transformer.forward
    assert again.preset() == found.preset()
    with pytest.raises(InvalidOptionError, match="another prompts") as caught:
        tune.search(pipe, PROMPTS[:1], journal=out / "journal.json", say=None, **ARGUMENTS)
    assert len(str(caught.value)) <= 300


def test_an_interrupt_leaves_what_is_done(pipe: Any, tmp_path: Path) -> None:
    def say(line: str) -> None:
        if "run 1 of" in line:
            raise KeyboardInterrupt

    pixels = generate(pipe, PROMPTS[:1], [0], {**CALL, "num_inference_steps": 2})
    with pytest.raises(KeyboardInterrupt):
        tune.search(pipe, PROMPTS, journal=tmp_path / "journal.json", out=tmp_path, say=say, **ARGUMENTS)
    table = tomllib.loads(next(tmp_path.glob("*.toml")).read_text())
    assert table["origin"]["complete"] is False and table["wishes"]["cache"] == "schedule"
    assert len(json.loads((tmp_path / "journal.json").read_text())["rows"]) == 2  # the plain runs, and one real run
    assert (generate(pipe, PROMPTS[:1], [0], {**CALL, "num_inference_steps": 2}) == pixels).all()


def test_no_run_begins_after_the_last_minute(pipe: Any) -> None:
    found = tune.search(pipe, PROMPTS[:1], max_minutes=0, say=None, **ARGUMENTS)
    assert found.complete is False and found.settings == () and len(found.curve) == STEPS - 2
    with pytest.raises(InvalidOptionError, match="was not searched"):
        found.preset()


def test_the_command_is_the_same_search(searched: Any, capsys: Any) -> None:
    """It goes on from the journal of the search above, which has everything, and prints one document."""
    found, _, out = searched
    words = ["tune", "testbed:image", "--prompts", "2", "--computed", str(COMPUTED), "--steps", str(STEPS), "--size",
             "48x48", "--batch", "2", "--runs", "2", "--rivals", "own", "--out", str(out), "--json"]  # fmt: skip
    assert main(words) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["settings"] == found.to_dict()["settings"] and len(document["written"]) == 1
    assert "going on with " in captured.err and ", run " not in captured.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "PIPELINE"),
        (["testbed:image", "--computed", "1"], 2, "at least 2"),
        (["testbed:image", "--call", "guidance"], 2, "NAME=VALUE"),
        (["testbed:image", "--max-minutes", "-1"], 2, "at least 0"),
        (["no-such-folder"], 1, "--prompts FILE is missing"),
        (["no-such-folder", "--prompts", "4"], 1, "a number is for testbed:KIND"),
    ],
)
def test_the_command_refuses(words: list[str], code: int, said: str, capsys: Any) -> None:
    assert main(["tune", *words]) == code
    assert said in capsys.readouterr().err


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"budgets": 1}, "budgets"),
        ({"budgets": STEPS}, "budgets"),
        ({"budgets": Budget()}, "min_psnr_db"),
        ({"runs": 0}, "runs"),
        ({"batch": 0}, "batch"),
        ({"max_minutes": -1}, "max_minutes"),
        ({"rivals": ("heun",)}, "rivals"),
        ({"eta": 0.5}, "takes no 'eta'"),
        ({"generator": torch.Generator()}, "sets generator itself"),
        ({"num_inference_steps": 2}, "num_inference_steps"),
    ],
)
def test_bad_input_is_refused_before_anything_is_run(arguments: dict[str, Any], said: str) -> None:
    pipe = tiny.build("flux")
    pipe.text_encoder.forward = None
    with pytest.raises(InvalidOptionError, match=said) as caught:
        tune.search(pipe, ["a"], say=None, **{**CALL, **arguments})
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize(
    "scheduler",
    [
        DDPMScheduler(),
        EulerAncestralDiscreteScheduler(),
        FlowMatchHeunDiscreteScheduler(),
        FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
    ],
    ids=lambda s: type(s).__name__,
)
def test_schedulers_that_cannot_be_tuned_are_refused_by_name(scheduler: Any) -> None:
    pipe = tiny.build("flux")
    pipe.scheduler, pipe.text_encoder.forward = scheduler, None
    with pytest.raises(IncompatibleError, match=type(scheduler).__name__):
        tune.search(pipe, ["a"], say=None, **CALL)


# ---- what a scheduler makes of an output ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduler",
    [
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        DDIMScheduler(clip_sample=False),
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ],
    ids=lambda s: type(s).__name__,
)
def test_the_response_of_a_scheduler_predicts_its_latents(scheduler: Any) -> None:
    """x_N of random outputs is linear in them, with the weights that `response` reads off."""
    require_deterministic(scheduler)
    scheduler.set_timesteps(9)
    weights = torch.as_tensor(response(scheduler))
    outputs = 0.01 * torch.randn(9, 1, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    sample = torch.zeros(1, 4, 2, 2)
    for timestep, output in zip(scheduler.timesteps, outputs, strict=True):
        sample = scheduler.step(output, timestep, sample, return_dict=False)[0]
    told = torch.einsum("n,n...->...", weights, outputs.double())
    assert (sample - told).abs().max() < 2e-3 * told.abs().max()


def test_a_preset_that_was_beaten_says_so(pipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(
        'description = "d"\n[wishes]\ncache = "schedule"\ncache_steps = "1010101010"\n[measured]\npsnr_db = 30.0\n'
        '[instead]\nscheduler = "unipc"\nsteps = 5\npsnr_db = 31.5\n'
    )
    notes = plan(pipe, str(path)).notes
    assert notes[0] == "tuned: d" and "5 steps of the scheduler 'unipc' alone were better" in notes[1]
