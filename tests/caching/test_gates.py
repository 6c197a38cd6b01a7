"""Content gates: baselines, rulings, reads from the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diffaccel.caching.gates import base as gates
from diffaccel.caching.gates import easycache as probing
from diffaccel.caching.gates.adacache import CODEBOOK_100, RatesGate, adacache_rate
from diffaccel.caching.gates.base import ProbeGate, SumGate, reduce_decision, relative_l1, worst_relative_l1
from diffaccel.caching.gates.dicache import ProbeAligned, ProbeSumGate, dicache_gamma
from diffaccel.caching.gates.easycache import RateGate
from diffaccel.caching.gates.seacache import SpectralGate, sea_filter, sea_gain
from diffaccel.caching.gates.teacache import PolynomialGate, fit_polynomial
from diffaccel.caching.step import Ruling, Step
from diffaccel.errors import InvalidOptionError
from diffaccel.extrapolation.forecast import Forecast, Sample

ONE = torch.ones(2, 3, 4, dtype=torch.float64)
CONTENT_GATES: list[tuple[Any, Any]] = [
    (ProbeGate(0.1), ONE),
    (SumGate(0.1), ONE),
    (PolynomialGate(0.1, coefficients=(2.0, 0.0)), ONE),
    (SpectralGate(0.1), torch.ones(2, 3, 4, 1, dtype=torch.float64)),
    (RateGate(0.1), ONE),
    (ProbeSumGate(0.1), (ONE, ONE)),
    (ProbeSumGate(0.1, measure_of="difference"), (ONE, 2 * ONE)),
]


def scaled(seen: Any, factor: float) -> Any:
    return tuple(scaled(part, factor) for part in seen) if isinstance(seen, tuple) else seen * factor


def walk(gate: Any, observations: list[Any], ruling: Ruling = Ruling.FREE) -> list[bool]:
    state, hits = gate.start(), []
    for t, seen in enumerate(observations):
        hit, state = gate.decide(state, seen, Step(t, len(observations), sigma=0.5), ruling if t else Ruling.COMPUTE)
        if not hit:
            state = gate.record(state, seen, seen[0] if isinstance(seen, tuple) else seen, Step(t))
        hits.append(hit)
    return hits


def test_relative_l1_of_the_worst_sample() -> None:
    now = torch.stack([1.1 * ONE[0], 1.5 * ONE[0]])
    assert float(relative_l1(now, ONE)) == pytest.approx(0.3)
    assert float(worst_relative_l1(now, ONE)) == pytest.approx(0.5)
    assert [walk(ProbeGate(0.4, distance=d), [ONE, now])[1] for d in ("mean", "worst")] == [True, False]


def test_the_probe_gate_compares_with_the_last_computed_step() -> None:
    drift = [ONE * (1 + 0.04 * t) for t in range(6)]
    assert walk(ProbeGate(0.1), drift) == [False, True, True, False, True, True]


def test_the_sum_gate_compares_with_the_step_before_and_adds_up() -> None:
    shake = [ONE, 1.04 * ONE, ONE, 1.04 * ONE, ONE, 1.04 * ONE]
    assert walk(SumGate(0.1), shake) == [False, True, True, False, True, True], "a shake adds up"
    assert walk(ProbeGate(0.1), shake) == [False, True, True, True, True, True], "but stays near the start"


def test_a_probe_gate_may_measure_the_forecast_error() -> None:
    line = [ONE * (1 + 0.5 * t) for t in range(8)]
    assert walk(ProbeGate(0.01, Forecast(1)), line) == [False] * 3 + [True] * 5, "a line is foretold exactly"
    assert not any(walk(ProbeGate(0.01), line)), "order 0 sees only that it moves"


@pytest.mark.parametrize(("gate", "seen"), CONTENT_GATES, ids=lambda value: type(value).__name__)
def test_a_threshold_of_zero_never_hits(gate: Any, seen: Any) -> None:
    slow = [scaled(seen, 1 + 0.001 * t) for t in range(6)]
    assert any(walk(gate, slow)), "little change hits at 0.1"
    assert not any(walk(replace(gate, threshold=0.0), slow))
    assert not any(walk(replace(gate, threshold=0.0), [seen] * 6)), "nor does none at all"


def test_a_threshold_of_zero_never_hits_under_a_negative_polynomial() -> None:
    assert not any(walk(PolynomialGate(0.0, coefficients=(-1.0,)), [ONE] * 4))
    assert all(walk(PolynomialGate(0.1, coefficients=(-1.0,)), [ONE] * 4)[1:]), "the sum falls, and the sign is kept"
    assert not any(walk(PolynomialGate(0.1, coefficients=(-1.0,), use_abs=True), [ONE] * 4))


@pytest.mark.parametrize(("gate", "seen"), CONTENT_GATES, ids=lambda value: type(value).__name__)
def test_one_read_per_compared_step_and_none_where_ruled(
    gate: Any, seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def counting(distance: torch.Tensor, group: Any = None) -> float:
        reads.append(1)
        return reduce_decision(distance, group)

    monkeypatch.setattr(gates, "reduce_decision", counting)
    monkeypatch.setattr(probing, "reduce_decision", counting)
    moving = [scaled(seen, 1 + 0.01 * t) for t in range(6)]
    for ruling, hit in ((Ruling.COMPUTE, False), (Ruling.REUSE, True)):
        assert walk(gate, moving, ruling)[1:] == [hit] * 5
        assert reads == []
    walk(gate, moving)
    assert 4 <= len(reads) <= 5  # EasyCache knows no rate before two computed steps


@pytest.mark.parametrize(("gate", "seen"), CONTENT_GATES, ids=lambda value: type(value).__name__)
def test_not_a_number_is_a_miss(gate: Any, seen: Any) -> None:
    assert not any(walk(gate, [seen, scaled(seen, float("nan")), scaled(seen, float("nan"))])[1:])


def test_states_are_values() -> None:
    """The same state and step give the same answer again, whatever was asked in between."""
    gate = SumGate(0.1)
    _, first = gate.decide(gate.start(), ONE, Step(0))
    answers = [gate.decide(first, 1.05 * ONE, Step(1)) for _ in range(3)]
    assert [(hit, state.value) for hit, state in answers] == [(True, pytest.approx(0.05))] * 3
    with pytest.raises(AttributeError):
        first.total = 1.0  # type: ignore[misc]


def test_decisions_of_a_process_group_are_reduced() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        distance = torch.tensor(0.25)
        assert reduce_decision(distance, dist.group.WORLD) == reduce_decision(distance) == 0.25
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf"), "0.1", True])
def test_bad_thresholds_are_refused(threshold: Any) -> None:
    for kind in (ProbeGate, SumGate, RateGate):
        with pytest.raises(InvalidOptionError, match="threshold"):
            kind(threshold)


def test_fit_polynomial_finds_the_polynomial() -> None:
    x = torch.linspace(0.01, 0.3, 60).tolist()
    fit = fit_polynomial(x, [2 * v**2 + 0.5 * v + 0.1 for v in x], degree=2)
    assert fit.coefficients == pytest.approx((2, 0.5, 0.1), abs=1e-6)
    assert fit.r_squared == pytest.approx(1) and fit.points == 60
    with pytest.raises(InvalidOptionError, match="distinct"):
        fit_polynomial([0.1] * 10, [0.2] * 10)


def test_the_spectral_filter() -> None:
    gain = sea_gain((3, 4, 5), 0.6)
    assert float(gain.mean()) == pytest.approx(1) and gain.argmax() == 0, "low frequencies pass"
    assert torch.allclose(sea_gain((3, 4, 5), 0.0), torch.ones(3, 4, 5, dtype=torch.float64), atol=1e-4)
    x = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    batched = sea_filter(x, 0.6)
    assert torch.allclose(batched[1], sea_filter(x[1], 0.6), atol=1e-6), "a batch is filtered sample by sample"
    flat = sea_filter(x[0], 1.0)
    mean = flat.mean((0, 1, 2), keepdim=True).expand_as(flat)
    assert torch.isfinite(flat).all() and torch.allclose(flat, mean, atol=1e-3), "pure noise keeps only the mean"
    with pytest.raises(InvalidOptionError, match="noise levels"):
        SpectralGate(0.1).decide(SpectralGate(0.1).start(), x, Step(0))


def test_easycache_needs_two_computed_steps() -> None:
    assert walk(RateGate(10.0), [ONE * (1 + t) for t in range(5)]) == [False, False, True, True, True]


def test_dicache_alignment() -> None:
    probes = [ONE, 2 * ONE, 2.2 * ONE]
    assert float(dicache_gamma(probes[2], probes[1], probes[0])) == pytest.approx(1.2)
    assert float(dicache_gamma(9 * ONE, probes[1], probes[0])) == 1.5
    assert float(dicache_gamma(1.1 * ONE, probes[1], probes[0])) == 1.0
    assert float(dicache_gamma(ONE, ONE, ONE)) == 1.0, "probes that do not move: reuse"
    samples = [Sample(0, (ONE,), probes[0]), Sample(1, (3 * ONE,), probes[1])]
    assert torch.allclose(ProbeAligned().predict(samples, 2, probes[2])[0], 3.4 * ONE)
    assert ProbeAligned().predict(samples[-1:], 2, probes[2])[0] is samples[-1].values[0]


def test_adacache() -> None:
    assert [adacache_rate(c, CODEBOOK_100) for c in (0.0, 0.03, 0.0999, 5.0)] == [12, 10, 4, 3]
    gate = RatesGate(tuple(CODEBOOK_100.items()))
    steady = walk(gate, [ONE] * 16)
    assert steady == [False, False] + [True] * 11 + [False] + [True] * 2, "no change buys 12 steps"
