"""Making good, at a computed step, what the forecasts before it missed. Pure functions.

An Euler step adds length x output to the latents. Where outputs were forecast, the next computed one closes the gap:
with it, the skipped outputs can be interpolated instead of extrapolated, and what that changes is added to the
computed output in the proportion of the steps' lengths, so that the latents end up where the interpolated outputs
would have led. A predictor-corrector scheme, after the corrector of UniPC (arXiv 2302.04867); our own formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .forecast import Forecast, Sample


def correction_weights(
    history: Sequence[Sample], now: float, missed: Mapping[float, float], forecast: Forecast, order: int
) -> list[float]:
    """Weights on the outputs at (*history, now) whose sum is the correction times this step's length.

    `history` are the computed steps that `forecast` used, oldest first (their tensors are not looked at); `missed`
    maps the coordinate of each skipped step to its length.
    """
    known = [Sample(sample.at, (), first=sample.first) for sample in history]
    coordinates = [sample.at for sample in history]
    after = [*(Sample(at, ()) for at in coordinates), Sample(now, ())]  # between two samples any slope is right
    between = Forecast(order, "newton", forecast.coordinate)
    weights = dict.fromkeys((*coordinates, now), 0.0)
    for at, length in missed.items():
        for sign, method, history in ((1.0, between, after), (-1.0, forecast, known)):
            samples, factors = method.pick(history, at)
            for sample, factor in zip(samples, factors, strict=True):
                weights[sample.at] += sign * length * factor
    return [weights[at] for at in (*coordinates, now)]


def corrected(
    history: Sequence[Sample],
    now: Sample,
    missed: Mapping[float, float],
    length: float,
    forecast: Forecast,
    order: int,
) -> tuple[torch.Tensor, ...]:
    """The outputs of a computed step, per stream, with what forecasts since the last one missed made good.

    `history`: computed steps before it; `now`: this one; `missed`: coordinate -> length of the skipped steps;
    `length`: that of this step. Lengths are differences of noise levels. `order`: of the interpolation, 1 to 3.
    """
    weights = correction_weights(history, now.at, missed, forecast, order)
    out = []
    for column in zip(*(sample.values for sample in (*history, now)), strict=True):
        newest = column[-1]
        wide = newest.float() if newest.dtype in (torch.bfloat16, torch.float16) else newest
        total = wide
        for value, weight in zip(column[:-1], weights[:-1], strict=True):  # weights sum to 0
            total = torch.add(total, value.to(wide.dtype) - wide, alpha=weight / length)
        out.append(total.to(newest.dtype))
    return tuple(out)
