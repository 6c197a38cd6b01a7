"""MagCache: resampling, retained steps, calibration."""

from __future__ import annotations

import math

import pytest
import torch

from diffaccel.caching.gates.magcache import MagnitudeGate, calibrate_ratios, nearest_indices, resample_by_sigma
from diffaccel.caching.step import Ruling, Step
from diffaccel.caching.tables import magnitude_gate
from diffaccel.errors import InvalidOptionError, UnsupportedModelError

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
