"""Our own settings: every registered method at several strengths, as a user would ask for them.

A setting is a set of override keys of `accelerate`. A method that is not registered, or that refuses the pipeline,
shows up in the results with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cache_calibrate import Context, even_steps

from diffaccel import accelerate

KINDS = ("image", "video")

# Found by search_schedule.py on 4 to 16 training prompts of a testbed: (kind, computed steps, order of Newton's
# forecast, order of the correction behind it or 0, axis, schedule of 28 steps, 1 = computed). Good for this testbed,
# step count and sigma schedule only.
SEARCHED: tuple[tuple[str, int, int, int, str, str], ...] = (
    ("image", 14, 2, 0, "sigma", "1010010101010101001010101011"),
    ("image", 14, 2, 0, "step", "1010010100101001010101010111"),
    ("image", 14, 1, 1, "sigma", "1101010010010010001011011011"),
    ("image", 14, 2, 2, "sigma", "1010010110101001001001011011"),
    ("image", 14, 2, 2, "sigma", "1101010110010010011001001011"),
    ("image", 9, 3, 0, "sigma", "1010001000010001001001001001"),
    ("image", 9, 2, 0, "step", "1010001000100010001000100101"),
    ("image", 9, 2, 2, "sigma", "1001000100010001001000100101"),
    ("image", 9, 1, 2, "sigma", "1001000100010010001001000101"),
    ("video", 14, 1, 0, "sigma", "1010101010010100101010101110"),
    ("video", 14, 1, 2, "sigma", "1010101010001001001010101111"),
    ("video", 9, 1, 0, "sigma", "1000100010001010001001001010"),
)
STACK_TOO = (0, 5)  # rows that are tried in the scope "stack" as well

ADAPTIVE = frozenset(
    {"first_block", "teacache", "dbcache", "seacache", "easycache", "dicache", "adacache"}
)  # methods whose hits depend on the picture: run one prompt at a time, as a user would


@dataclass(frozen=True)
class Setting:
    """One setting of one of our methods."""

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)  # override keys of `accelerate`
    calibrated: Mapping[str, str] = field(default_factory=dict)  # override key -> what of the Context is its value
    kinds: tuple[str, ...] = ("image", "video")
    steps: tuple[int, ...] = ()  # step counts it is for; empty: any

    @property
    def adaptive(self) -> bool:
        return self.options["cache"] in ADAPTIVE

    def apply(self, pipe: Any, context: Context) -> None:
        """Accelerate `pipe`; DiffaccelError where the method is not there or cannot act."""
        measured = {key: getattr(context, name) for key, name in self.calibrated.items()}
        accelerate(pipe, preset=None, strict=True, **self.options, **measured)


def _one(method: str, tag: str, calibrated: Mapping[str, str] | None = None, **parameters: Any) -> Setting:
    options = {"cache": method, **{f"cache_{key}": value for key, value in parameters.items()}}
    curve = f"{method}-order{parameters['order']}" if parameters.get("order") else method
    return Setting(f"{method}-{tag}", curve, options, calibrated or {})


def _schedule(tag: str, kind: str, steps: str, order: int, correct: int = 0, **more: Any) -> Setting:
    """Our step schedule; `correct`: the order at which skipped steps are made good (see search_schedule.py)."""
    options = {"cache": "schedule", "cache_steps": steps, "cache_order": order}
    options |= {f"cache_{key}": value for key, value in more.items()}
    if correct:
        options["cache_correct"] = correct
    method = f"schedule-order{order}" + (f"-correct{correct}" if correct else "")
    return Setting(f"schedule-{tag}", method, options, kinds=(kind,), steps=(28,))


def _searched(
    kind: str,
    computed: int,
    order: int,
    correct: int,
    coordinate: str,
    steps: str,
    scope: str = "denoiser",
    number: int = 0,
) -> Setting:
    tag = f"searched{number}-{computed}-order{order}" + (f"-correct{correct}" if correct else "")
    tag += f"-{coordinate}" + ("" if scope == "denoiser" else f"-{scope}")
    return _schedule(tag, kind, steps, order, correct, coordinate=coordinate, scope=scope)


def settings() -> list[Setting]:
    """The table, methods of one name together."""
    ratios, polynomial = {"cache_ratios": "magnitude_ratios"}, {"cache_coefficients": "polynomial"}
    even = {k: "".join(map(str, even_steps(28, k))) for k in (14, 9)}
    front = {"front_blocks": 1, "warmup_steps": 4, "order": 1}
    return [
        *(_one("first_block", f"{t:g}", threshold=t) for t in (0.06, 0.12, 0.2)),
        *(_one("first_block", f"{t:g}-order1", threshold=t, order=1) for t in (0.12, 0.2)),
        *(_one("dbcache", f"{t:g}-order1", threshold=t, **front) for t in (0.14, 0.28)),
        *(_one("teacache", f"{t:g}", polynomial, threshold=t) for t in (0.02, 0.05)),
        *(_one("magcache", f"{t:g}k{k}", ratios, threshold=t, max_steps=k) for t, k in ((0.12, 4), (0.3, 8))),
        *(_one("easycache", f"{t:g}", threshold=t) for t in (0.05, 0.1)),
        *(_one("dicache", f"{t:g}", threshold=t) for t in (0.1, 0.2)),
        *(_one("seacache", f"{t:g}", threshold=t) for t in (0.1, 0.25)),
        _one("adacache", "two", codebook={1.0: 2}),
        _one("delta_dit", "n2", interval=2),
        *(_one("taylorseer", f"n{n}o1", interval=n, order=1) for n in (2, 3, 4)),
        _one("interval", "n2", interval=2),
        *(_schedule(f"even{k}-order1", kind, even[k], 1, coordinate="sigma") for k in even for kind in KINDS),
        *(_schedule(f"even{k}-correct2", kind, even[k], 1, 2, coordinate="sigma") for k in even for kind in KINDS),
        *(_searched(*row, number=i) for i, row in enumerate(SEARCHED)),
        *(_searched(*SEARCHED[i], scope="stack", number=i) for i in STACK_TOO),
    ]


def searched_mask(kind: str, computed: int) -> str:
    """The first searched schedule of so many computed steps; LookupError where there is none."""
    found = [row[5] for row in SEARCHED if row[:2] == (kind, computed)]
    if not found:
        raise LookupError(f"no schedule was searched for {computed} steps of the {kind} testbed")
    return found[0]
