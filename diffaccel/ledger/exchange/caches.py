"""How many steps a step cache computes, where that can be said beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .account import Account
from .adaptive import LEAST, expected
from .formulas import interval_steps
from .outcome import number

Params = Mapping[str, object]
Counted = tuple[float, float, str]  # computed steps, a reused step's part of a forward, how
Count = Callable[[Account, Params, Params], Counted | None]


def _reused(predicted: Params) -> float:
    """What a reused step costs, by the parameters that it does not touch."""
    skipped = number(predicted.get("parameters_skipped"))
    return 0.0 if skipped is None else 1 - skipped


def adaptive(account: Account, params: Params, predicted: Params) -> Counted:
    """Expected from the trained testbeds."""
    most = number(params.get("max_steps"))
    seconds = number(params.get("max_seconds"))
    if seconds is not None and account.unit == "s":  # from the call to the last step
        step = account.branches * max(account.compute, account.transfer)
        fits = max(LEAST, (seconds - account.encode - account.moved) // step)
        most = fits if most is None else min(fits, most)
    found = expected(account.steps, number(params.get("tolerance")), account.branches > 1)
    computed, low, high = (min(value, most or account.steps) for value in found)
    world = "guided testbeds" if account.branches > 1 else "testbeds"
    how = f"{computed:.1f} of {account.steps} steps, as on the {world} ({low:.0f} to {high:.0f})"
    return computed, 0.0, how


@dataclass(frozen=True)
class Every:
    """Every `interval`-th step, after `first` ones; both by the names of parameters, with their defaults."""

    interval: int
    first: str = "warmup_steps"
    first_default: int = 1
    part: float = 1.0  # what of a skipped step is left out, where nothing was found on the model

    def __call__(self, account: Account, params: Params, predicted: Params) -> Counted:
        """Known before the loop."""
        interval = int(number(params.get("interval")) or self.interval)
        first = max(1, int(number(params.get(self.first)) or self.first_default))
        last = int(number(params.get("last_steps", 1)) or 0)
        computed = interval_steps(account.steps, interval, first, last)
        reused = _reused(predicted) if "parameters_skipped" in predicted else 1 - self.part
        return computed, reused, f"{computed} of {account.steps} steps"


def schedule(account: Account, params: Params, predicted: Params) -> Counted | None:
    """The steps of the list or mask that was given; None for a mask by name."""
    steps = params.get("steps")
    if isinstance(steps, str):
        marks = steps.replace(" ", "").replace("_", "")
        computed = marks.count("1") if set(marks) <= {"0", "1"} else 0
    else:
        listed = tuple(steps) if isinstance(steps, (list, tuple)) else ()
        flags = set(listed) <= {0, 1} and (len(set(listed)) < len(listed) or isinstance(listed[0], bool))
        computed = sum(map(bool, listed)) if flags else len(listed)
    if not computed:
        return None
    computed = min(computed, account.steps)
    return computed, _reused(predicted), f"{computed} of {account.steps} steps"


CACHES: dict[str, Count] = {
    "adaptive": adaptive,
    "deepcache": Every(3),
    "delta_dit": Every(2, part=0.5),
    "interval": Every(2),
    "schedule": schedule,
    "taylorseer": Every(4, first="first_enhance", first_default=3),
}
