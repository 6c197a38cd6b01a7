"""Any gate with any predictor under any guards; and the pure machine against the real hooks."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from diffaccel.caching.gates.adacache import RatesGate
from diffaccel.caching.gates.base import ProbeGate, SumGate
from diffaccel.caching.gates.dicache import ProbeAligned, ProbeSumGate
from diffaccel.caching.gates.easycache import RateGate
from diffaccel.caching.gates.magcache import MagnitudeGate
from diffaccel.caching.gates.schedule import ScheduleGate
from diffaccel.caching.gates.seacache import SpectralGate
from diffaccel.caching.gates.teacache import TimePolynomialGate
from diffaccel.caching.guards import Guards, ReuseCounts, rule
from diffaccel.caching.policy import Policy, bytes_held, forecast_error, foresee
from diffaccel.caching.step import Ruling, Step
from diffaccel.errors import InvalidOptionError
from diffaccel.extrapolation import schedule
from diffaccel.extrapolation.forecast import REUSE, Forecast
from tests.caching.golden_drivers import loop
from tests.caching.scripted import drive_first_block

TOTAL = 14
SIGMAS = [1 - t / TOTAL for t in range(TOTAL)]


def smooth(seed: int, *shape: int) -> torch.Tensor:
    """A smooth random walk [step, *shape]."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    return torch.stack([2 + a * torch.cos(0.2 * t + b) for t in torch.arange(TOTAL)])


PROBES, VALUES = smooth(0, 2, 3, 4), smooth(1, 2, 3, 4)
GATES: dict[str, tuple[Any, Any]] = {
    "adacache": (RatesGate(), None),
    "dicache": (ProbeSumGate(0.1), [(p, v) for p, v in zip(PROBES, VALUES, strict=True)]),
    "easycache": (RateGate(0.1), PROBES),
    "first_block": (ProbeGate(0.1), PROBES),
    "forecast_probe": (ProbeGate(0.02, Forecast(1)), PROBES),
    "magcache": (MagnitudeGate(0.2, (1.0,) + (0.97,) * 27), None),
    "schedule": (ScheduleGate(lambda total: schedule.fora(total, 3)), None),
    "seacache": (SpectralGate(0.2), smooth(2, 2, 3, 4, 1)),
    "teacache": (SumGate(0.1), PROBES),
}
PREDICTORS = {
    "aligned": ProbeAligned(),
    "hermite": Forecast(2, "hermite"),
    "ladder": Forecast(2, "ladder"),
    "newton": Forecast(2, max_gain=7.0),
    "reuse": REUSE,
    "sigma": Forecast(1, coordinate="sigma"),
}


@pytest.mark.parametrize("predictor", sorted(PREDICTORS))
@pytest.mark.parametrize("gate", sorted(GATES))
def test_any_gate_with_any_predictor(gate: str, predictor: str) -> None:
    machine, seen = GATES[gate]
    guards = Guards(warmup_steps=2, last_steps=1, max_consecutive=3)
    policy = Policy(machine, PREDICTORS[predictor], guards)
    done = loop(policy, VALUES, seen, SIGMAS, outputs=VALUES)
    hits = done.hits
    assert any(hits) and not all(hits[2:-1]) and not (hits[0] or hits[1] or hits[-1])
    assert "TTTT" not in "".join("T" if hit else "." for hit in hits)
    used = torch.stack(done.used)
    assert torch.isfinite(used).all()
    assert all(torch.equal(used[t], VALUES[t]) for t in range(TOTAL) if not hits[t])


def test_forecasting_beats_reuse_on_smooth_features() -> None:
    mask = ScheduleGate([t % 3 == 0 for t in range(TOTAL)])

    def worst(predictor: Forecast) -> float:
        return float((torch.stack(loop(Policy(mask, predictor), VALUES).used[6:]) - VALUES[6:]).abs().max())

    assert worst(Forecast(2)) < worst(Forecast(1)) < worst(REUSE)


@pytest.mark.parametrize("threshold", [0.0, 0.03, 0.1, 0.3])
@pytest.mark.parametrize(("warmup", "most"), [(0, None), (4, None), (2, 1)])
def test_the_policy_agrees_with_the_hooks(threshold: float, warmup: int, most: int | None) -> None:
    """The block cache that pipelines use, and the pure machine: same hits, same gate values, same outputs."""
    x = smooth(3, 2, 3, 4)
    driven = drive_first_block(x, PROBES, VALUES, threshold, Guards(warmup_steps=warmup, max_consecutive=most))
    guards = Guards(warmup_steps=warmup, max_consecutive=most)
    done = loop(Policy(ProbeGate(threshold), guards=guards), VALUES, PROBES)
    assert driven.hits == done.hits
    assert [m.value for m in done.memories] == [g if g is None else pytest.approx(g) for g in driven.gates]
    assert torch.allclose(driven.y, x + PROBES + torch.stack(done.used), atol=1e-12)


def test_nothing_stored_is_always_computed() -> None:
    policy = Policy(ScheduleGate("10"), guards=Guards(mask=(False, False), policy="static")).fit(2)
    assert policy.decide(policy.start(), None, Step(0, 2))[0] is False


def test_content_free_gates_are_foreseen() -> None:
    times = [torch.full((1, 8), 1 - 0.05 * t) for t in range(TOTAL)]
    for gate, seen in (
        (MagnitudeGate(0.2, (1.0,) + (0.97,) * 27), None),
        (ScheduleGate(lambda total: schedule.taylorseer(total, 4)), None),
        (TimePolynomialGate(0.2), times),
    ):
        policy = Policy(gate, guards=Guards(last_steps=1)).fit(TOTAL)
        ahead = foresee(policy, TOTAL, seen).hits
        assert ahead == loop(policy, VALUES, seen).hits
        assert any(ahead) and not all(ahead)
    with pytest.raises(ValueError, match="not known before the loop"):
        foresee(Policy(ProbeGate(0.1)), TOTAL)


def test_a_paused_loop_goes_on_as_if_nothing_had_happened() -> None:
    policy = Policy(SumGate(0.1), Forecast(2)).fit(TOTAL)
    whole = loop(policy, VALUES, PROBES)
    memory = whole.memories[6]
    loop(policy, -VALUES, PROBES.flip(0))  # another run in between
    for t in range(7, TOTAL):
        hit, memory = policy.decide(memory, PROBES[t], Step(t, TOTAL))
        assert hit == whole.hits[t]
        if not hit:
            memory = policy.store(memory, Step(t, TOTAL), (VALUES[t],), PROBES[t])


def test_the_history_is_no_longer_than_needed() -> None:
    for predictor in (REUSE, Forecast(1), Forecast(3), ProbeAligned()):
        done = loop(Policy(ProbeGate(0.0), predictor), VALUES, PROBES)
        assert len(done.memories[-1].history) == predictor.depth
    held = bytes_held(
        loop(Policy(ProbeGate(0.0), Forecast(2)), list(VALUES.unbind()), list(PROBES.unbind())).memories[-1]
    )
    assert held == 2 * VALUES.nbytes, "all steps are views of one storage each"
    apart = loop(Policy(ProbeGate(0.0), Forecast(2)), [v.clone() for v in VALUES], [p.clone() for p in PROBES])
    assert bytes_held(apart.memories[-1]) == 4 * VALUES[0].nbytes, "three residuals and one probe"


def test_a_byte_cap_lowers_the_order_and_then_turns_the_cache_off() -> None:
    def run(most: int) -> tuple[int, bool]:
        policy = Policy(ScheduleGate([True] * 4 + [False] * (TOTAL - 4)), Forecast(3), Guards(max_bytes=most))
        done = loop(policy, [v.clone() for v in VALUES])
        return len(done.memories[-1].history), any(done.hits)

    size = VALUES[0].nbytes
    assert [run(most) for most in (4 * size, 3 * size - 1, size, size - 1)] == [
        (4, True),
        (2, True),
        (1, True),
        (0, False),
    ]


def test_a_branch_that_was_absent_is_computed() -> None:
    policy = Policy(ProbeGate(0.9)).fit(TOTAL)
    memory = policy.start()
    hits = []
    for t in (0, 1, 2, 5, 6):
        hit, memory = policy.decide(memory, PROBES[0], Step(t, TOTAL))
        memory = memory if hit else policy.store(memory, Step(t, TOTAL), (VALUES[t],))
        hits.append(hit)
    assert hits == [False, True, True, False, True]


def test_the_pure_part_needs_no_diffusers() -> None:
    code = "import sys, diffaccel.caching.policy, diffaccel.caching.tables; sys.exit('diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_forecast_error_is_known_at_computed_steps() -> None:
    policy = Policy(ProbeGate(0.0), Forecast(1))
    memory = policy.start()
    assert forecast_error(policy, memory, Step(0), (VALUES[0],)) is None
    for t in range(2):
        memory = policy.store(memory, Step(t + 1), (torch.full((2, 3), 1.0 + t),))
    truth = torch.stack([torch.full((3,), 3.0), torch.full((3,), 4.0)])
    error = forecast_error(policy, memory, Step(3), (truth,))
    assert error is not None and error.tolist() == pytest.approx([0.0, 0.25])


@pytest.mark.parametrize(
    ("guards", "tally", "step", "ruling"),
    [
        (Guards(), ReuseCounts(), Step(3), Ruling.FREE),
        (Guards(warmup_steps=4, mask=(False,) * 9, policy="static"), ReuseCounts(), Step(3, 9), Ruling.COMPUTE),
        (Guards(warmup_steps=4, warmup_interval=2), ReuseCounts(), Step(3, 9), Ruling.FREE),
        (Guards(last_steps=2), ReuseCounts(), Step(7, 9), Ruling.COMPUTE),
        (Guards(last_steps=2), ReuseCounts(), Step(6, 9), Ruling.FREE),
        (Guards(mask=(True, False), policy="static", max_total=0), ReuseCounts(), Step(1, 2), Ruling.REUSE),
        (Guards(mask=(True, False), policy="static"), ReuseCounts(), Step(0, 2), Ruling.COMPUTE),
        (Guards(mask=(True, False), max_total=0), ReuseCounts(), Step(1, 2), Ruling.COMPUTE),
        (Guards(mask=(True, False)), ReuseCounts(), Step(1, 2), Ruling.FREE),
        (Guards(max_consecutive=2), ReuseCounts(consecutive=2), Step(3), Ruling.COMPUTE),
        (Guards(max_total=2), ReuseCounts(reused=2), Step(3), Ruling.COMPUTE),
        (Guards(max_accumulated=0.3), ReuseCounts(error=0.3), Step(3), Ruling.COMPUTE),
        (Guards(max_accumulated=0.3), ReuseCounts(error=0.29), Step(3), Ruling.FREE),
        (Guards(start=0.2, end=0.8), ReuseCounts(), Step(1, 10), Ruling.COMPUTE),
        (Guards(start=0.2, end=0.8), ReuseCounts(), Step(2, 10), Ruling.FREE),
        (Guards(start=0.2, end=0.8), ReuseCounts(), Step(8, 10), Ruling.COMPUTE),
        (Guards(sigma_high=0.9, sigma_low=0.1), ReuseCounts(), Step(1, sigma=0.95), Ruling.COMPUTE),
        (Guards(sigma_high=0.9, sigma_low=0.1), ReuseCounts(), Step(1, sigma=0.5), Ruling.FREE),
        (Guards(sigma_high=0.9, sigma_low=0.1), ReuseCounts(), Step(1, sigma=0.05), Ruling.COMPUTE),
    ],
)
def test_guards(guards: Guards, tally: ReuseCounts, step: Step, ruling: Ruling) -> None:
    assert rule(guards, tally, step) is ruling


def test_guards_that_do_not_fit_the_loop_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="mask has 3 entries, and the loop has 4 steps"):
        Policy(ProbeGate(0.1), guards=Guards(mask=(True,) * 3)).fit(4)
    with pytest.raises(InvalidOptionError, match="number of steps"):
        Policy(ProbeGate(0.1), guards=Guards(last_steps=1)).fit(None)
    with pytest.raises(InvalidOptionError, match="noise levels"):
        rule(Guards(sigma_low=0.1), ReuseCounts(), Step(1))
    for options in ({"warmup_steps": -1}, {"max_total": 1.5}, {"policy": "dinamic"}, {"start": 0.9, "end": 0.1}):
        with pytest.raises(InvalidOptionError):
            Guards(**options)  # type: ignore[arg-type]
