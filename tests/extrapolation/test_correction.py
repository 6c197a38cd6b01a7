"""A computed step makes good what forecasts before it missed: closed form, and a hand-written loop on a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import attach
from diffaccel.errors import DiffaccelError, InvalidOptionError
from diffaccel.extrapolation.correction import corrected, correction_weights
from diffaccel.extrapolation.forecast import Forecast, Sample
from tests import tiny
from tests.invariants.levers import pattern, plain

SIGMAS = [1.0, 0.93, 0.81, 0.7, 0.52, 0.4, 0.21, 0.0]


def velocity(sigma: float, degree: int) -> torch.Tensor:
    """A polynomial of the noise level that does not depend on the latents."""
    coefficients = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.3, 1.0, -4.0, 2.0]], dtype=torch.float64)
    return sum(coefficients[:, k] * sigma**k for k in range(degree + 1))  # type: ignore[return-value]


def euler(mask: str, degree: int, order: int, correct: int) -> torch.Tensor:
    """An Euler loop over SIGMAS in which `mask` says where the velocity is looked at."""
    x, forecast = torch.zeros(2, dtype=torch.float64), Forecast(order, coordinate="sigma")
    history: list[Sample] = []
    missed: dict[float, float] = {}
    for t, flag in enumerate(mask):
        sigma, length = SIGMAS[t], SIGMAS[t + 1] - SIGMAS[t]
        if flag == "0":
            missed[sigma] = length
            [v] = forecast.predict(history, sigma)
        else:
            now = Sample(sigma, (velocity(sigma, degree),))
            [v] = corrected(history, now, missed, length, forecast, correct) if correct and missed else now.values
            history = [*history, now][-3:]
            missed = {}
        x = x + length * v
    return x


@pytest.mark.parametrize(("order", "degree"), [(1, 2), (2, 3)])
def test_the_gap_closes_exactly_where_interpolation_is_exact(order: int, degree: int) -> None:
    plain_end = euler("1111111", degree, order, 0)
    assert not torch.allclose(euler("1110101", degree, order, 0), plain_end, atol=1e-6), "the forecast alone misses"
    assert torch.allclose(euler("1110101", degree, order, order + 1), plain_end, atol=1e-12)
    # The gap at the very end is closed by nothing.
    assert not torch.allclose(euler("1110110", degree, order, order + 1), plain_end, atol=1e-6)


def test_weights_sum_to_nothing_and_an_exact_forecast_is_left_alone() -> None:
    weights = correction_weights(
        [Sample(1.0, ()), Sample(0.8, ())], 0.4, {0.6: -0.2, 0.5: -0.1}, Forecast(1, coordinate="sigma"), 2
    )
    assert sum(weights) == pytest.approx(0.0, abs=1e-12) and any(abs(w) > 1e-3 for w in weights)
    history = [Sample(s, (velocity(s, 1),)) for s in (1.0, 0.8)]
    now = Sample(0.4, (velocity(0.4, 1),))
    [v] = corrected(history, now, {0.6: -0.2}, -0.4, Forecast(1, coordinate="sigma"), 2)
    assert torch.allclose(v, now.values[0], atol=1e-12)


def test_on_a_pipeline_as_in_a_hand_written_loop() -> None:
    mask, order, correct = "11101011", 1, 2
    pipe = tiny.build("flux")
    original, kept, missed, calls = pipe.transformer.forward, [], [], [0]

    def forward(*args: Any, **kwargs: Any) -> Any:
        sigmas = [float(s) for s in pipe.scheduler.sigmas]
        t = calls[0]
        calls[0] += 1
        forecast = Forecast(order, coordinate="sigma")
        if mask[t] == "0":
            [guess] = forecast.predict(kept, sigmas[t])
            missed.append((t, guess))
            return (guess,)
        value = original(*args, **kwargs)[0]
        history, total = [*kept, Sample(sigmas[t], (value,))], value
        for s, guess in missed:
            between = Forecast(correct, coordinate="sigma").predict(history, sigmas[s])[0]
            total = total + (between - guess) * (sigmas[s + 1] - sigmas[s]) / (sigmas[t + 1] - sigmas[t])
        missed.clear()
        kept[:] = history[-3:]
        return (total,)

    pipe.transformer.forward = forward
    expected = tiny.run(pipe, "flux", num_inference_steps=len(mask))
    del pipe.transformer.forward

    attach(pipe).enable_step_schedule(steps=mask, order=order, coordinate="sigma", correct=correct, min_steps=0)
    output = tiny.run(pipe, "flux", num_inference_steps=len(mask))
    assert "".join("1" if computed else "0" for computed in pattern(pipe)) == mask
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(tiny.run(pipe, "flux", num_inference_steps=len(mask)), output), "nothing is left over"
    pipe.enable_step_schedule(steps=mask, order=order, coordinate="sigma", min_steps=0)
    assert not torch.allclose(tiny.run(pipe, "flux", num_inference_steps=len(mask)), output, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_is_refused() -> None:
    pipe = attach(tiny.build("flux"))
    for bad in ({"correct": 4}, {"correct": True}, {"correct": 1, "scope": "stack"}):
        with pytest.raises(InvalidOptionError, match="correct"):
            pipe.enable_step_schedule(steps="1101", **bad)
    with pytest.raises(DiffaccelError, match="order 2 or more"):
        pipe.enable_step_schedule(steps="1101", order=1, correct=3)
    assert torch.equal(tiny.run(pipe, "flux"), plain("flux"))
