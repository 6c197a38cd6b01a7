"""Any gate with any predictor in any scope, on a real pipeline; and a forecast against a hand-written loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffaccel import attach, restore
from diffaccel.caching import (
    Denoiser,
    Forecast,
    Guards,
    Halves,
    MagnitudeGate,
    Modules,
    PolynomialGate,
    ProbeAligned,
    ProbeGate,
    ProbeSumGate,
    RateGate,
    RatesGate,
    ScheduleGate,
    SpectralGate,
    Stack,
)
from diffaccel.errors import UnsupportedModelError
from tests import tiny
from tests.invariants.levers import pattern, plain

STEPS = 6
GATES: dict[str, Any] = {
    "magnitude": MagnitudeGate(1.0, (1.0,) * 6, retention=0.0),
    "polynomial": PolynomialGate(5.0),
    "probe": ProbeGate(0.99),
    "probe_sum": ProbeSumGate(5.0),
    "rate": RateGate(5.0),
    "rates": RatesGate(),
    "schedule": ScheduleGate("110101"),
    "spectral": SpectralGate(5.0),
}
SCOPES: dict[str, Any] = {
    "denoiser": Denoiser(front=1),
    "halves": Halves(0.5),
    "modules": Modules(front=1),
    "residual": Denoiser(residual=True, front=1),
    "stack": Stack(1, 1),
}
PREDICTORS = [Forecast(0), Forecast(1), Forecast(2, coordinate="sigma", max_gain=5.0), ProbeAligned()]
IN_BLOCKS = ("polynomial", "probe", "probe_sum")
PAIRS = [(gate, scope) for gate in sorted(GATES) for scope in sorted(SCOPES)]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return attach(tiny.build("flux"))


@pytest.mark.parametrize(("gate", "scope"), PAIRS)
def test_any_gate_in_any_scope(pipe: Any, gate: str, scope: str) -> None:
    predictor = PREDICTORS[PAIRS.index((gate, scope)) % len(PREDICTORS)]
    parts = {"gate": GATES[gate], "predictor": predictor, "scope": SCOPES[scope]}
    if scope == "halves" and gate in IN_BLOCKS:
        with pytest.raises(UnsupportedModelError, match="decides before the blocks run"):
            pipe.enable_cache(**parts, guard=Guards(last_steps=1))
        return
    pipe.enable_cache(**parts, guard=Guards(last_steps=1))
    output = tiny.run(pipe, "flux", num_inference_steps=STEPS)
    computed = pattern(pipe)
    assert computed[0] and computed[-1] and torch.isfinite(output).all()
    if gate != "rates":  # its code book may ask for every step
        assert not all(computed), (gate, scope, computed)
        assert not torch.equal(output, plain("flux", num_inference_steps=STEPS))
    errors = [step.forecast_error for step in pipe.acceleration.report.steps]
    assert errors[0] is None
    assert all((error is not None) == kept for error, kept in zip(errors[1:], computed[1:], strict=True))
    assert pipe.acceleration.report.cache_bytes_held == 0
    # Never reusing is bit-equal to plain, whatever the parts.
    pipe.enable_cache(**parts, guard=Guards(max_total=0))
    assert torch.equal(tiny.run(pipe, "flux", num_inference_steps=STEPS), plain("flux", num_inference_steps=STEPS))
    assert all(pattern(pipe))


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_forecast_of_the_output_is_that_of_a_hand_written_loop(order: int) -> None:
    """The plain pipeline once, with its denoiser replaced by a function that extrapolates over sigma by itself."""
    mask = "11010110"
    pipe = tiny.build("flux")
    original, sigmas = pipe.transformer.forward, []
    kept: list[tuple[float, torch.Tensor]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        step = len(sigmas)
        sigmas.append(float(pipe.scheduler.sigmas[step]))
        if mask[step] == "1":
            output = original(*args, **kwargs)
            kept.append((sigmas[-1], output[0]))
            return output
        young = len(kept) == 2 and order > 0  # the slope of the first two steps alone is not trusted
        points = kept[1:] if young else kept[-(order + 1) :]
        guess = torch.zeros_like(points[0][1], dtype=torch.float64)
        for i, (at, value) in enumerate(points):  # Lagrange, in float64
            weight = 1.0
            for j, (other, _) in enumerate(points):
                weight *= 1.0 if i == j else (sigmas[-1] - other) / (at - other)
            guess += weight * value.double()
        return (guess.float(),)

    pipe.transformer.forward = forward
    expected = tiny.run(pipe, "flux", num_inference_steps=len(mask))
    del pipe.transformer.forward

    attach(pipe).enable_cache(
        gate=ScheduleGate(mask), predictor=Forecast(order, coordinate="sigma"), guard=Guards(), scope=Denoiser()
    )
    output = tiny.run(pipe, "flux", num_inference_steps=len(mask))
    assert "".join("1" if computed else "0" for computed in pattern(pipe)) == mask
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(output, plain("flux", num_inference_steps=len(mask)), rtol=1e-4, atol=1e-4)
    restore(pipe)
