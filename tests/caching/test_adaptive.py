"""The adaptive cache against a loop written by hand, on real pipelines with schedulers of every kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from diffaccel import accelerate, plan, restore
from diffaccel.errors import DiffaccelError, InvalidOptionError
from tests import tiny

STEPS = 12
ON = {"cache": "adaptive", "cache_min_steps": 0, "cache_max_gap": 4}


def lagrange(nodes: list[float], at: float) -> list[float]:
    """Weights of the interpolating polynomial, the textbook formula."""
    return [
        torch.tensor([(at - other) / (own - other) for j, other in enumerate(nodes) if j != k]).double().prod().item()
        for k, own in enumerate(nodes)
    ]


def sigmas_of(scheduler: Any) -> list[float]:
    """The noise levels of a loop; of DDIM, which keeps none, from its alphas."""
    if hasattr(scheduler, "sigmas"):
        return [float(s) for s in scheduler.sigmas]
    alphas = scheduler.alphas_cumprod[scheduler.timesteps].double()
    return (((1 - alphas) / alphas) ** 0.5).tolist()


def by_hand(
    pipe: Any,
    family: str,
    computed: list[int],
    order: int,
    correct: int,
    nudge: float = 0.0,
    axis: str = "sigma",
    **call: Any,
) -> torch.Tensor:
    """A plain run whose scheduler is stepped by hand: forecasts where a step is not computed, then taken again.

    Step 4's latents are nudged.
    """
    outputs: dict[int, torch.Tensor] = {}
    scheduler = pipe.scheduler
    plain_step = type(scheduler).step.__get__(scheduler)
    held: dict[str, Any] = {"skipped": [], "index": 0}

    def combined(known: list[int], at: int) -> torch.Tensor:
        sigmas = sigmas_of(scheduler) if axis == "sigma" else list(map(float, range(STEPS)))
        weights = lagrange([sigmas[k] for k in known], sigmas[at])
        return sum(w * outputs[k].double() for w, k in zip(weights, known, strict=True)).float()

    def step(output: torch.Tensor, t: Any, sample: torch.Tensor, **more: Any) -> Any:
        i = held["index"]
        held["index"] += 1
        if i not in computed:
            if not held["skipped"]:
                held["state"] = copy.deepcopy({k: v for k, v in vars(scheduler).items() if k != "step"})
                held["sample"] = sample
            known = sorted(outputs)
            known = known[1:] if len(known) == 2 and known[0] == 0 and order else known
            held["skipped"].append((i, t))
            return plain_step(combined(known[-(order + 1) :], i), t, sample, **more)
        outputs[i] = output
        if held["skipped"] and correct:
            vars(scheduler).update(held["state"])
            sample = held["sample"]
            for j, at in held["skipped"]:
                better = combined(sorted(outputs)[-(correct + 1) :], j)
                sample = plain_step(better, at, sample, return_dict=False)[0] + (nudge if j == 4 else 0)
        held["skipped"] = []
        return plain_step(output, t, sample, **more)

    scheduler.step = step
    try:
        return tiny.run(pipe, family, output_type="latent", num_inference_steps=STEPS, **call)
    finally:
        del scheduler.step


def scheduler_of(name: str, pipe: Any) -> Any:
    """A scheduler by name, for a flow model."""
    import diffusers

    if name == "FlowMatchEulerDiscreteScheduler":
        return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return getattr(diffusers, name)(**flow)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(
    "name", ["FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler", "DPMSolverMultistepScheduler"]
)
def test_a_run_equals_the_loop_written_by_hand(name: str, order: int) -> None:
    pipe = tiny.build("wan")
    pipe.scheduler = scheduler_of(name, pipe)
    correct = min(order + 1, 2)
    accelerate(pipe, None, strict=True, **ON, cache_tolerance=0.3, cache_order=order, cache_correct=correct)
    ours = tiny.run(pipe, "wan", output_type="latent", num_inference_steps=STEPS)
    steps = pipe.acceleration.report.steps
    computed = sorted({step.index for step in steps if step.computed})
    assert 3 < len(computed) < STEPS and {0, 1} <= set(computed)
    restore(pipe)
    by = by_hand(pipe, "wan", computed, order, correct)
    plain = tiny.run(pipe, "wan", output_type="latent", num_inference_steps=STEPS)
    away = (by - plain).abs().max()
    assert (ours - by).abs().max() < 1e-4 * away.clamp(min=1.0) and away > 1e-3
    uncorrected = by_hand(pipe, "wan", computed, order, 0)
    assert (ours - uncorrected).abs().max() > 20 * (ours - by).abs().max(), "a run without correction is another one"


def test_a_scheduler_that_draws_noise_is_refused_by_name() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = tiny.build("wan")
    shipped, pipe.scheduler = pipe.scheduler, FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    torch.manual_seed(1)  # this scheduler draws from torch's own generator
    plain = tiny.run(pipe, "wan", num_inference_steps=STEPS)
    noisy, pipe.scheduler = pipe.scheduler, shipped
    accelerate(pipe, None, **ON, cache_tolerance=0.3)
    pipe.scheduler = noisy  # after the plan was made
    torch.manual_seed(1)
    assert tiny.run(pipe, "wan", num_inference_steps=STEPS).equal(plain)
    [note] = [note for note in pipe.acceleration.report.notes if "cache.adaptive stood down" in note]
    assert "FlowMatchEulerDiscreteScheduler adds fresh noise" in note


def test_a_plan_knows_schedulers_that_it_cannot_follow() -> None:
    """Said beforehand, with what would act; a scheduler that is put in later is looked at before the next run."""
    from diffusers import EulerAncestralDiscreteScheduler, HeunDiscreteScheduler

    pipe = tiny.build("sdxl")
    shipped = pipe.scheduler
    for scheduler, words in (
        (EulerAncestralDiscreteScheduler, "EulerAncestralDiscreteScheduler adds fresh noise"),
        (HeunDiscreteScheduler, "HeunDiscreteScheduler calls the denoiser more than once a step"),
    ):
        pipe.scheduler = scheduler.from_config(shipped.config)
        before = dict(vars(pipe.scheduler))
        item = plan(pipe).item("cache.adaptive")
        assert item.status == "skipped" and words in item.reason and "deepcache" in item.reason
        assert vars(pipe.scheduler) == before, "planning touches nothing"
        with pytest.raises(DiffaccelError, match=words):
            accelerate(pipe, None, strict=True, **ON)
    accelerate(pipe, None, **ON)
    assert pipe.acceleration.plan.enabled == ()
    pipe.scheduler = shipped
    tiny.run(pipe, "sdxl")
    assert pipe.acceleration.plan.enabled == ("cache.adaptive",)
    assert "planned anew: the scheduler was replaced" in pipe.acceleration.plan.notes


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("EulerDiscreteScheduler", {}),
        ("DDIMScheduler", {"prediction_type": "v_prediction"}),
        ("UniPCMultistepScheduler", {"prediction_type": "v_prediction"}),
        ("DPMSolverMultistepScheduler", {}),
    ],
)
def test_epsilon_and_v_prediction(name: str, config: dict[str, Any]) -> None:
    """In k-diffusion's sigma, guidance in one batch, by hand."""
    import diffusers

    pipe = tiny.build("sdxl")
    pipe.scheduler = getattr(diffusers, name)(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", **config
    )
    accelerate(pipe, None, strict=True, **ON, cache_tolerance=0.5, cache_order=1, cache_correct=2)
    ours = tiny.run(pipe, "sdxl", output_type="latent", num_inference_steps=STEPS)
    computed = sorted({step.index for step in pipe.acceleration.report.steps if step.computed})
    assert 3 < len(computed) < STEPS
    restore(pipe)
    by = by_hand(pipe, "sdxl", computed, 1, 2)
    uncorrected = by_hand(pipe, "sdxl", computed, 1, 0)
    assert (ours - by).norm() < 1e-4 * by.norm() and (ours - uncorrected).norm() > 20 * (ours - by).norm()


def nudge(pipe: Any, index: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return {"latents": tensors["latents"] + 0.5} if index == 4 else {}


def test_latents_that_a_callback_changes_stay_changed() -> None:
    """What others add between skipped steps is added again when the sampler goes back through them.

    With Euler: UniPC's corrector begins from the sample before, so that a plain run forgets such a change too.
    """
    pipe = tiny.build("wan")
    pipe.scheduler = scheduler_of("FlowMatchEulerDiscreteScheduler", pipe)
    accelerate(pipe, None, **ON, cache_tolerance=10.0, cache_order=0, cache_correct=1)
    call = {"output_type": "latent", "num_inference_steps": STEPS}
    still = tiny.run(pipe, "wan", **call)
    moved = tiny.run(pipe, "wan", **call, callback_on_step_end=nudge)
    computed = sorted({step.index for step in pipe.acceleration.report.steps if step.computed})
    assert not {4, 5} & set(computed), "the change falls between two skipped steps"
    restore(pipe)
    by = by_hand(pipe, "wan", computed, 0, 1, nudge=0.5, callback_on_step_end=nudge)
    assert (moved - by).abs().max() < 1e-4 and (moved - still).abs().mean() > 0.1


@pytest.mark.parametrize("most", [4, 6, 9])
def test_max_steps_is_kept_whatever_the_tolerance(most: int) -> None:
    pipe = accelerate(
        tiny.build("wan"), None, **ON | {"cache_max_gap": None}, cache_tolerance=1e-9, cache_max_steps=most
    )
    tiny.run(pipe, "wan", num_inference_steps=STEPS)
    computed = {step.index for step in pipe.acceleration.report.steps if step.computed}
    assert most - 1 <= len(computed) <= most and {0, 1} <= computed


def test_a_fit_finds_the_line_and_keeps_its_share() -> None:
    from diffaccel.caching.fidelity import Fit, fit

    generator = torch.Generator().manual_seed(0)
    prices = (10 ** (-3 + 2.5 * torch.rand(400, generator=generator, dtype=torch.float64))).tolist()
    noise = (3 * torch.randn(400, generator=generator, dtype=torch.float64)).tolist()
    truth = Fit(27.0, 13.0, 0.0)
    found = fit(prices[:200], [truth.estimate_db(p) + n for p, n in zip(prices[:200], noise, strict=False)])
    assert found.slope == pytest.approx(13.0, abs=1.0) and found.level == pytest.approx(27.0, abs=2.0)
    held = [truth.estimate_db(p) + n >= found.bound_db(p) for p, n in zip(prices[200:], noise[200:], strict=True)]
    assert 0.85 < sum(held) / 200 < 0.97
    assert found.bound_db(found.tolerance(35.0)) == pytest.approx(35.0) and found.bound_db(None) == 100.0


def test_min_psnr_takes_the_place_of_the_tolerance_and_says_what_to_expect() -> None:
    def run(**options: Any) -> Any:
        pipe = accelerate(tiny.build("wan"), None, **ON | {"cache_max_gap": None} | options)
        tiny.run(pipe, "wan", num_inference_steps=STEPS)
        return pipe.acceleration

    low, high = (run(cache_min_psnr_db=target, cache_calibration=(27.0, 13.0, 5.0)) for target in (20.0, 60.0))
    computed = [sum(step.computed for step in handle.report.steps) for handle in (low, high)]
    assert computed[0] < computed[1]
    [said], [bound] = (low.report.stats["cache.adaptive"][key] for key in ("estimate_db", "bound_db"))
    assert bound == pytest.approx(said - 5.0, abs=0.11) and "20 dB by this checkpoint" in next(
        i.reason for i in low.plan.items if i.name == "cache.adaptive"
    )


def test_max_seconds_leaves_steps_out_whatever_the_tolerance() -> None:
    pipe = accelerate(
        tiny.build("wan"), None, **ON | {"cache_max_gap": None}, cache_tolerance=1e-9, cache_max_seconds=1e-3
    )
    tiny.run(pipe, "wan", num_inference_steps=STEPS)
    assert len({step.index for step in pipe.acceleration.report.steps if step.computed}) <= 5


def test_a_cap_on_bytes_is_refused_by_name() -> None:
    with pytest.raises(InvalidOptionError, match="max_bytes is not for"):
        accelerate(tiny.build("wan"), None, **ON, cache_max_bytes=1000)


def test_its_gate_alone_is_refused_with_the_way_out() -> None:
    from diffaccel import attach
    from diffaccel.caching.gates.steered import SteeredGate
    from diffaccel.errors import DiffaccelError

    with pytest.raises(DiffaccelError, match="use cache='adaptive'"):
        attach(tiny.build("wan")).enable_cache(gate=SteeredGate())


def test_a_scheduler_is_tried_without_a_trace_on_its_class() -> None:
    """`copy.deepcopy` would leave `__slotnames__` there, the first time that anybody copies one."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    class Fresh(FlowMatchEulerDiscreteScheduler):
        pass

    pipe = tiny.build("wan")
    pipe.scheduler = Fresh(shift=3.0)
    before = set(vars(Fresh))
    accelerate(pipe, None, strict=True, **ON, cache_tolerance=0.3)
    tiny.run(pipe, "wan", num_inference_steps=STEPS)
    assert pipe.acceleration.report.hit_rate > 0 and set(vars(Fresh)) == before
    copy.deepcopy(pipe.scheduler)
    assert "__slotnames__" in vars(Fresh), "the control"
