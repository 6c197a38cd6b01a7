"""MagCache: resampling, retained steps, calibration."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from diffaccel import accelerate
from diffaccel.caching.gates.magcache import MagnitudeGate, calibrate_ratios, nearest_indices, resample_by_sigma
from diffaccel.caching.step import Ruling, Step
from diffaccel.caching.tables import load_table, magnitude_gate
from diffaccel.errors import InvalidOptionError, UnsupportedModelError
from tests.models.families.table import build, run

RATIOS = (1.0, 0.9, 0.8, 1.1, 0.7)
SIGMAS = (1.0, 0.8, 0.6, 0.4, 0.2)


@pytest.mark.parametrize(("rounding", "steps"), [("down", 5), ("half_up", 6), ("up", 6)])
def test_retained_steps(rounding: str, steps: int) -> None:
    gate = MagnitudeGate(0.1, RATIOS, retention=0.2, rounding=rounding)
    assert gate.retained(28) == steps  # 5.6
    assert gate.retained(26) == (6 if rounding == "up" else 5)  # 5.2


def test_nearest_indices_round_in_float64() -> None:
    assert nearest_indices(28, 28) == list(range(28))
    assert nearest_indices(28, 1) == [27]
    assert nearest_indices(3, 5) == [0, 0, 1, 2, 2], "halves go to the even neighbour"
    for count in (39, 77, 103):
        exact = [round(j * 27 / (count - 1)) for j in range(count)]
        assert nearest_indices(28, count) == exact


def test_resampling_by_sigma_keeps_products() -> None:
    assert resample_by_sigma(RATIOS, SIGMAS, SIGMAS) == pytest.approx(RATIOS)
    every_second = resample_by_sigma(RATIOS, SIGMAS, SIGMAS[::2])
    assert every_second == pytest.approx([1.0, 0.9 * 0.8, 1.1 * 0.7])
    fine = resample_by_sigma(RATIOS, SIGMAS, [1 - 0.1 * t for t in range(9)])
    assert math.prod(fine) == pytest.approx(math.prod(RATIOS))
    assert resample_by_sigma(RATIOS, SIGMAS, [1.2, 1.1, 0.1]) == pytest.approx([1, 1, math.prod(RATIOS)])
    with pytest.raises(InvalidOptionError, match="as many source sigmas"):
        resample_by_sigma(RATIOS, SIGMAS[:3], SIGMAS)


def test_fit_uses_sigmas_where_both_sides_have_them() -> None:
    gate = MagnitudeGate(0.1, RATIOS, source_sigmas=SIGMAS)
    assert gate.fit(3, sigmas=(1.0, 0.6, 0.2, 0.0)).ratios == pytest.approx((1.0, 0.72, 0.77))
    assert gate.fit(3).ratios == (1.0, 0.8, 0.7), "by index without them"


def test_fit_picks_the_branch_and_maps_excluded_steps() -> None:
    gate = MagnitudeGate(0.1, RATIOS, ratios_uncond=(1.0, 2.0, 2.0, 2.0, 2.0), exclude=(2,))
    assert gate.fit(5, "uncond").ratios == (1.0, 2.0, 2.0, 2.0, 2.0)
    assert gate.fit(5, "cond").ratios == RATIOS
    assert gate.fit(9).exclude == (3, 4, 5), "2 of 5 stands for three of nine"
    with pytest.raises(InvalidOptionError, match="number of steps"):
        gate.fit(None)


def test_a_forced_step_starts_afresh() -> None:
    gate = MagnitudeGate(0.5, RATIOS, retention=0.0)
    _, state = gate.decide(gate.start(), None, Step(1, 5))
    assert (state.ratio, state.steps) == (0.9, 1)
    _, state = gate.decide(state, None, Step(2, 5), Ruling.COMPUTE)
    assert (state.ratio, state.error, state.steps) == (1.0, 0.0, 0)


def test_off_at_zero_even_where_ratios_are_one() -> None:
    gate = MagnitudeGate(0.0, (1.0,) * 5, retention=0.0)
    assert not gate.decide(gate.start(), None, Step(1, 5))[0]


def test_calibration_is_a_mean_of_ratios() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(1, 6, 4, dtype=torch.float64, generator=generator)
    scale = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0], dtype=torch.float64)[None, :, None]
    assert calibrate_ratios([base, base * scale, base * scale]) == pytest.approx([1.0, 2.0, 1.0])


def test_tables() -> None:
    gate = magnitude_gate("auto", "Wan-AI/Wan2.1-T2V-14B-Diffusers")
    assert (gate.rounding, gate.strict, len(gate.ratios)) == ("down", True, 50)
    assert gate.fit(50, "uncond").ratios[1] == 1.03017 and gate.fit(50).ratios[1] == 1.02504
    flux = magnitude_gate("auto", "black-forest-labs/FLUX.1-dev", threshold=0.1)
    assert flux.threshold == 0.1 and flux.exclude == (11,) and flux.max_steps == 5
    assert magnitude_gate((1.0, 0.9), threshold=0.1).ratios == (1.0, 0.9)
    with pytest.raises(UnsupportedModelError, match=r"stabilityai/sdxl.*calibrate_ratios"):
        magnitude_gate("auto", "stabilityai/sdxl")
    with pytest.raises(InvalidOptionError, match=r"did you mean 'Wan2.1-T2V-14B'"):
        magnitude_gate("Wan2.1-T2V-14")
    with pytest.raises(InvalidOptionError, match="threshold"):
        magnitude_gate((1.0, 0.9))


@pytest.mark.parametrize(
    "options", [{"retention": 1.5}, {"rounding": "near"}, {"ratios": ()}, {"ratios": (1.0, -1.0)}]
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError):
        MagnitudeGate(**{"threshold": 0.1, "ratios": RATIOS, **options})  # type: ignore[arg-type]


# Computed steps of 40, as the published script has them: each expert starts anew and computes its own first share
# (half up of 0.4 x 26 and 0.4 x 14, and of 0.1 x 25), the comparison is strict, and from a picture the high-noise
# expert reuses nothing.
A14B = {
    "Wan2.2-I2V-A14B": (0.9, 5.0, 15, [*range(18), 20, 23, 26, 28, 30, 32, 34, 35, 36, 37, 38, 39]),
    "Wan2.2-T2V-A14B": (0.875, 12.0, 26, [*range(10), 12, 15, 18, 21, 24, *range(26, 32), 33, 35, 37, 38, 39]),
}


def by_hand(name: str, switch: int, branch: str) -> list[int]:
    """Written from the description of the published script, apart from the gate."""
    row = load_table("magcache")["models"][name]
    ratios = row["ratios_uncond" if branch == "uncond" else "ratios"]
    computed: list[int] = []
    for expert, (first, end) in enumerate(((0, switch), (switch, 40))):
        kept = math.floor(row["retention"] * (end - first) + 0.5)
        product, error, count = 1.0, 0.0, 0
        for step in range(first, end):
            product, count = product * ratios[step], count + 1
            error += abs(1 - product)
            reuse = step >= first + kept and error < row["threshold"] and count <= row["max_steps"]
            if not reuse or ("I2V" in name and expert == 0):
                computed.append(step)
            if computed[-1] == step:
                product, error, count = 1.0, 0.0, 0
    return computed


@pytest.mark.parametrize("name", A14B)
def test_two_experts_follow_the_source(name: str) -> None:
    share, shift, switch, wanted = A14B[name]
    assert by_hand(name, switch, "cond") == by_hand(name, switch, "uncond") == wanted
    pipe = build("wan22")
    pipe.register_to_config(boundary_ratio=share)
    pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config, flow_shift=shift)
    accelerate(pipe, None, strict=True, cache="magcache", cache_ratios=name)
    run(pipe, "wan22", num_inference_steps=40)
    report = pipe.acceleration.report
    assert {step.index for step in report.steps if step.component == "transformer"} == set(range(switch))
    for branch in ("cond", "uncond"):
        assert [s.index for s in report.steps if s.branch == branch and s.computed] == wanted
    assert len(wanted) == (30 if "I2V" in name else 26)


def test_one_denoiser_keeps_one_loop() -> None:
    """The same ratios on a pipeline with one denoiser: no switch, so the share is that of the whole loop."""
    pipe = build("wan")
    accelerate(pipe, None, strict=True, cache="magcache", cache_ratios="Wan2.2-T2V-A14B")
    run(pipe, "wan", num_inference_steps=40)
    assert pipe.acceleration.report.strip()["cond"][:17] == "C" * 16 + "."
