"""What a search is asked for, checked before anything is run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.options import GOT, above, confirm, number, one_of, whole
from ..errors import InvalidOptionError
from ..planner.options import Budget
from ..quality.measurement import require_call, seeds_of, texts_of
from .response import require_deterministic
from .rivals import RIVALS

RECORDED = 8  # plain runs at most
RUNS = 24  # real runs at most


@dataclass(frozen=True)
class Request:
    """The arguments of `search`, in plain form; `steps` are those of the plain loop."""

    call: Mapping[str, Any]
    prompts: Sequence[str]
    seeds: Sequence[int]
    every: Sequence[tuple[str, int]]  # prompts and seeds, those beyond the search's too: for calibration
    held_out: Sequence[str]
    steps: int
    budgets: Sequence[int | Budget]
    batch: int
    runs: int
    max_minutes: float | None
    rivals: tuple[str, ...]
    tolerances: tuple[float, ...]
    orders: tuple[int, ...]
    corrections: tuple[int, ...]

    @classmethod
    def of(
        cls, pipe: Any, call: Mapping[str, Any], *, prompts: object, budgets: object, seeds: object, held_out: object,
        batch: int, runs: int, max_minutes: float | None, rivals: Sequence[str], tolerances: Sequence[float],
        orders: Sequence[int], corrections: Sequence[int],
    ) -> Request:  # fmt: skip
        """Refuses bad input, and schedulers that cannot be tuned, in a sentence. Runs no model."""
        texts = texts_of(prompts, "tune")
        given = seeds_of(seeds, len(texts), "tune")
        others = texts_of(held_out, "tune") if held_out else []
        require_call(pipe, call, "tune")
        batch, runs = confirm("batch", batch, whole(1), GOT), confirm("runs", runs, whole(1), GOT)
        max_minutes = confirm("max_minutes", max_minutes, number(0).or_none(), GOT)
        for name in rivals:
            if name not in RIVALS:
                raise InvalidOptionError(f"tune: rivals must be of {', '.join(RIVALS)}, got {name!r}")
        require_deterministic(pipe.scheduler)
        if call.get("eta"):
            raise InvalidOptionError(f"tune: eta={call['eta']!r} draws noise at the steps: leave it at 0")
        steps = _steps_of(pipe, call)
        return cls(
            call={**call, "num_inference_steps": steps},
            prompts=texts[:RECORDED],
            seeds=given[:RECORDED],
            every=tuple(zip(texts, given, strict=True)),
            held_out=others,
            steps=steps,
            budgets=_wanted(budgets, steps),
            batch=batch,
            runs=runs,
            max_minutes=max_minutes,
            rivals=tuple(rivals),
            tolerances=tuple(confirm("tolerances", value, above(0), GOT) for value in tolerances),
            orders=_orders("orders", orders),
            corrections=_orders("corrections", (0, *corrections)),
        )

    def heading(self, pipe: Any) -> dict[str, Any]:
        """What makes one search another."""
        config = pipe.scheduler.config
        return {
            "pipeline": type(pipe).__name__,
            "scheduler": {k: repr(v) for k, v in sorted(config.items()) if not k.startswith("_")},
            "dtype": str(getattr(pipe, "dtype", None)),
            "call": {name: repr(value)[:80] for name, value in sorted(self.call.items())},
            "prompts": list(self.prompts),
            "seeds": list(self.seeds),
            "held_out": list(self.held_out),
            **({"calibrated_on": [text for text, _ in self.every]} if self.tolerances else {}),
            "orders": list(self.orders),
            "corrections": list(self.corrections),
        }


def _orders(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Each of 0 to 3, once, smallest first; at least one."""
    if not values:
        raise InvalidOptionError(f"tune: {name} must hold numbers of 0 to 3, got none")
    return tuple(sorted({confirm(name, value, one_of(0, 1, 2, 3), GOT) for value in values}))


def _steps_of(pipe: Any, call: Mapping[str, Any]) -> int:
    """Steps of the loop: those of the call, or the pipeline's own number."""
    known = inspect.signature(type(pipe).__call__).parameters
    default = known["num_inference_steps"].default if "num_inference_steps" in known else None
    steps: int = confirm("num_inference_steps", call.get("num_inference_steps", default), whole(3), GOT)
    return steps


def _wanted(budgets: object, steps: int) -> list[int | Budget]:
    """What was asked for, as a list."""
    listed: list[Any] = list(budgets) if isinstance(budgets, Sequence) else [] if budgets is None else [budgets]
    out: list[int | Budget] = []
    for one in listed or list(dict.fromkeys([steps // 2, -(-steps // 3)])):
        most = getattr(one, "max_steps", None) if isinstance(one, Budget) else one
        if isinstance(one, Budget) and most is None and one.min_psnr_db is not None:
            out.append(one)
        elif most is None:
            raise InvalidOptionError(f"tune: {one!r} asks for no min_psnr_db: give it one, or numbers of steps")
        else:
            out.append(confirm("budgets", most, number(2, steps - 1, "numbers of steps from {least} to {most}"), GOT))
    return out
