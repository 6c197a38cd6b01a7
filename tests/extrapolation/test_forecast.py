"""Forecasts: what they are exact on, and what they are not."""

from __future__ import annotations

import pytest
import torch

from diffaccel.caching.step import Step, coordinate
from diffaccel.errors import InvalidOptionError
from diffaccel.extrapolation.forecast import BASES, REUSE, Forecast, Sample, combine
from diffaccel.extrapolation.hermite import hermite_polynomial, hermite_weights
from diffaccel.extrapolation.ladder import ladder_weights
from diffaccel.extrapolation.newton import newton_weights

STEPS = (0.0, 1.0, 4.0, 6.0)  # irregular on purpose
SIGMAS = (1.0, 0.97, 0.81, 0.66)  # falling, irregular


def history(coordinates: tuple[float, ...], degree: int) -> tuple[list[Sample], torch.Tensor]:
    """Samples of a random polynomial of this degree with tensors [B, T, C] as coefficients."""
    factors = torch.randn(degree + 1, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(degree))
    return [Sample(c, (value(factors, c),)) for c in coordinates], factors


def value(factors: torch.Tensor, at: float) -> torch.Tensor:
    return sum((f * at**k for k, f in enumerate(factors)), torch.zeros_like(factors[0]))


def error(forecast: Forecast, coordinates: tuple[float, ...], degree: int, at: float) -> float:
    samples, factors = history(coordinates, degree)
    return float((forecast.predict(samples, at)[0] - value(factors, at)).abs().max())


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize(("coordinates", "at"), [(STEPS, 9.0), (SIGMAS, 0.31)])
def test_newton_is_exact_on_polynomials_for_irregular_steps(
    order: int, coordinates: tuple[float, ...], at: float
) -> None:
    for degree in range(order + 1):
        assert error(Forecast(order), coordinates, degree, at) < 1e-9
    assert error(Forecast(order), coordinates, order + 1, at) > 1e-2, "not on the next degree"


@pytest.mark.parametrize("order", [2, 3])
def test_the_ladder_is_not_exact_beyond_order_one(order: int) -> None:
    assert error(Forecast(order, "ladder"), STEPS, 2, 9.0) > 1e-2
    assert error(Forecast(order, "ladder"), (0.0, 1.0, 2.0, 3.0), 2, 4.0) > 1e-2, "nor with equal gaps"


def test_ladder_and_newton_agree_up_to_order_one() -> None:
    for count in (1, 2):
        assert ladder_weights(STEPS[:count], 9.0) == pytest.approx(newton_weights(STEPS[:count], 9.0))


def test_ladder_is_the_published_recursion() -> None:
    """Kept factors updated at each computed step, as the published code does it."""
    samples, _ = history(STEPS, 3)
    factors: list[torch.Tensor] = []
    last = 0.0
    for at, (tensor,), *_ in samples:
        fresh = [tensor]
        for old in factors[:3]:
            fresh.append((fresh[-1] - old) / (at - last))
        factors, last = fresh, at
    distance = 2.0
    want = sum(f * distance**k / (1, 1, 2, 6)[k] for k, f in enumerate(factors))
    [got] = Forecast(3, "ladder").predict(samples, STEPS[-1] + distance)
    assert torch.allclose(got, want, atol=1e-12)


def test_hermite() -> None:
    assert [hermite_polynomial(n, 0.3) for n in range(4)] == pytest.approx(
        [1, 0.6, 4 * 0.09 - 2, 8 * 0.027 - 12 * 0.3]
    )
    slope = ladder_weights((0.0, 1.0), 3.0)[1] - 1
    assert hermite_weights((0.0, 1.0), 3.0)[1] - 1 == pytest.approx(slope / 2), "half the slope at sigma 0.5"


@pytest.mark.parametrize("basis", sorted(BASES))
def test_weights_sum_to_one(basis: str) -> None:
    for count in range(1, 5):
        assert sum(BASES[basis](STEPS[:count], 8.5)) == pytest.approx(1)


def test_order_zero_returns_the_stored_tensor_itself() -> None:
    samples, _ = history(STEPS, 2)
    assert REUSE.predict(samples, 9.0)[0] is samples[-1].values[0]
    assert Forecast(2).predict(samples[:1], 9.0)[0] is samples[0].values[0], "one sample is all there is"


def test_fewer_samples_give_a_lower_order() -> None:
    samples, factors = history(STEPS[:2], 1)
    assert torch.allclose(Forecast(3).predict(samples, 5.0)[0], value(factors, 5.0))


def test_of_equal_coordinates_the_newest_counts() -> None:
    samples, factors = history((0.0, 2.0), 1)
    stale = Sample(2.0, (torch.full((2, 3, 4), 99.0, dtype=torch.float64),))
    [got] = Forecast(1).predict([samples[0], stale, samples[1]], 3.0)
    assert torch.allclose(got, value(factors, 3.0))


def test_the_gain_guard_lowers_the_order() -> None:
    """Equal gaps, one step ahead: gains 1, 3, 7, 15."""
    samples, _ = history((0.0, 1.0, 2.0, 3.0), 3)
    for order, gain in enumerate((1, 3, 7, 15)):
        _, weights = Forecast(order).pick(samples, 4.0)
        assert sum(map(abs, weights)) == pytest.approx(gain)
    for limit, order in ((1, 0), (3, 1), (6.9, 1), (7, 2), (14, 2), (15, 3)):
        assert len(Forecast(3, max_gain=limit).pick(samples, 4.0)[0]) == order + 1
    crowded, _ = history((0.0, 1.0, 2.0, 3.0), 3)
    assert len(Forecast(3, max_gain=15).pick(crowded, 9.0)[0]) < 4, "far ahead of crowded steps"


def test_half_precision_is_summed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [(100 + torch.randn(64, generator=generator)).to(torch.bfloat16) for _ in range(4)]
    weights = newton_weights((0.0, 1.0, 2.0, 3.0), 4.0)
    exact = sum(w * t.double() for w, t in zip(weights, tensors, strict=True))
    got = combine(tensors, weights)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.to(torch.bfloat16))


def test_streams_are_predicted_alike() -> None:
    samples, _ = history(STEPS, 2)
    both = [Sample(s.at, (s.values[0], 2 * s.values[0][:, :1])) for s in samples]
    first, second = Forecast(2).predict(both, 8.0)
    assert torch.allclose(second, 2 * first[:, :1])


@pytest.mark.parametrize(
    "options", [{"order": 4}, {"order": True}, {"basis": "newtn"}, {"coordinate": "time"}, {"max_gain": 0.5}]
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError):
        Forecast(**options)  # type: ignore[arg-type]


def test_coordinates() -> None:
    step = Step(3, 28, timestep=800.0, sigma=0.8)
    assert [coordinate(step, kind) for kind in ("step", "timestep", "sigma")] == [3.0, 800.0, 0.8]
    with pytest.raises(InvalidOptionError, match="use coordinate='step'"):
        coordinate(Step(3), "sigma")
    with pytest.raises(InvalidOptionError, match="did you mean 'sigma'"):
        coordinate(step, "sigmas")
