"""Published numbers of step caches, from tables/*.json: coefficients, ratios, masks, presets, each with its source."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..errors import InvalidOptionError, UnsupportedModelError, clipped, few, unknown
from ..extrapolation.schedule import Mask, parse_schedule
from .gates.magcache import MagnitudeGate
from .gates.teacache import PolynomialGate, TimePolynomialGate

HOW_TEACACHE = "coefficients=(...) of your own (docs/caching.md: fit_polynomial)"
HOW_MAGCACHE = "ratios=(...) of your own (docs/caching.md: calibrate_ratios)"


@functools.cache
def load_table(name: str) -> Mapping[str, Any]:
    """One table: "magcache", "steps_masks" or "teacache"."""
    text = resources.files(__package__).joinpath("tables", f"{name}.json").read_text("utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


def _plain(model: str) -> str:
    """A model's bare name in lower case: "black-forest-labs/FLUX.1-dev" and "FLUX.1-dev" are one."""
    return model.rstrip("/").rsplit("/", 1)[-1].lower().removesuffix("-diffusers")


def find_set(table: str, model: str) -> str | None:
    """The table's own name for a model or a set of numbers, or None."""
    data = load_table(table)
    names = {_plain(name): name for name in data["models"]}
    names |= {_plain(alias): name for alias, name in data["aliases"].items()}
    return model if model in data["models"] else names.get(_plain(model))


def named_set(table: str, model: str) -> tuple[str, Mapping[str, Any]]:
    """(name, numbers) of a set that the user names; the nearest name where there is none."""
    name = find_set(table, model)
    if name is None:
        raise unknown(f"{table} set", model, load_table(table)["models"])
    return name, load_table(table)["models"][name]


def _letters(name: str) -> str:
    return "".join(c for c in _plain(name) if c.isalnum())


def _of_family(names: Iterable[str], family: str | None, option: str) -> str:
    """The words that name the sets for models of this family, as the first way out; "" where there are none."""
    from ..models.registry import CARDS

    def owner(name: str) -> str:
        return max((card for card in CARDS if _letters(name).startswith(_letters(card))), key=len, default="")

    listed = [repr(name) for name in names if family is not None and owner(name) == family]
    return f"{option}= the name of a set of this family ({few(listed, 70)}), or " if listed else ""


def _floats(name: str, values: Any) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise InvalidOptionError(f"{name} must be numbers, a table's name or 'auto', got {values!r}") from None


# ---- TeaCache ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolynomialSet:
    """A polynomial and what goes with it; `name` is its table entry ("given" for numbers of the user's own)."""

    coefficients: tuple[float, ...]
    name: str = "given"
    use_abs: bool = False
    observes: str = "modulated"
    first_steps: int = 1
    last_steps: int = 1
    default_threshold: float | None = None
    source: str = ""
    projected: bool = False  # whether the time embedding is taken behind its last projection (Wan's "ret_steps" sets)

    def gate(self, threshold: float) -> PolynomialGate:
        """The gate with these numbers."""
        if self.observes == "time":
            return TimePolynomialGate(
                threshold, coefficients=self.coefficients, use_abs=self.use_abs, projected=self.projected
            )
        return PolynomialGate(threshold, coefficients=self.coefficients, use_abs=self.use_abs)


def polynomial_set(
    coefficients: str | Sequence[float] = "auto", model: str | None = None, family: str | None = None
) -> PolynomialSet:
    """`coefficients`: "auto" (the model's own calibrated set or a refusal), a table name, or the numbers.

    `model` is the name of its weights; a refusal names the sets of its `family`.
    """
    if not isinstance(coefficients, str):
        numbers = _floats("coefficients", coefficients)
        PolynomialGate(0.0, coefficients=numbers)  # refuses what is not a polynomial
        return PolynomialSet(numbers)
    if coefficients != "auto":
        return _polynomial(*named_set("teacache", coefficients))
    name = find_set("teacache", model) if model else None
    if name is None:
        absent = {
            _plain(key): f" ({why.split(';')[0]}): give " for key, why in load_table("teacache")["absent"].items()
        }
        why = absent.get(_plain(model or ""))
        known = [key for key, row in load_table("teacache")["models"].items() if row["calibrated"]]
        raise UnsupportedModelError(
            f"TeaCache has no calibrated coefficients for {clipped(model or 'a model without a name')}"
            f"{why or ': give ' + _of_family(known, family, 'coefficients')}{HOW_TEACACHE}"
        )
    row = load_table("teacache")["models"][name]
    if not row["calibrated"]:
        raise UnsupportedModelError(
            f"TeaCache has no calibrated coefficients for {clipped(str(model))}: the published set is "
            f"{row['why_not']}. Give coefficients={name!r} all the same, or your own (docs/caching.md: fit_polynomial)"
        )
    return _polynomial(name, row)


def _polynomial(name: str, row: Mapping[str, Any]) -> PolynomialSet:
    return PolynomialSet(
        tuple(row["coefficients"]),
        name,
        row.get("use_abs", False),
        row["observes"],
        row.get("first_steps", 1),
        row.get("last_steps", 1),
        row.get("default_threshold"),
        row["source"],
        row.get("gate_tensor", "").startswith("projected"),
    )


# ---- MagCache ------------------------------------------------------------------------------------------------------


def magnitude_gate(
    ratios: str | Sequence[float] = "auto", model: str | None = None, family: str | None = None, **options: Any
) -> MagnitudeGate:
    """MagCache's gate from "auto" (the model's own ratios or a refusal), a table name, or the ratios themselves.

    `model` is the name of its weights; a refusal names the sets of its `family`. `options` are fields of
    `MagnitudeGate` and go before the table's.
    """
    if not isinstance(ratios, str):
        given = _floats("ratios", ratios)
        MagnitudeGate(0.0, given)  # refuses what cannot be ratios
        if "threshold" not in options:
            raise InvalidOptionError("ratios of your own need a threshold (published ones use 0.02 to 0.24)")
        return MagnitudeGate(ratios=given, **options)
    if ratios == "auto":
        name = find_set("magcache", model) if model else None
        if name is None:
            raise UnsupportedModelError(
                f"MagCache has no ratios for {clipped(model or 'a model without a name')}: give "
                f"{_of_family(load_table('magcache')['models'], family, 'ratios')}{HOW_MAGCACHE}"
            )
        row = load_table("magcache")["models"][name]
    else:
        name, row = named_set("magcache", ratios)
    fields = {
        "threshold": row["threshold"],
        "ratios": tuple(row["ratios"]),
        "ratios_uncond": tuple(row["ratios_uncond"]) if "ratios_uncond" in row else None,
        "max_steps": row["max_steps"],
        "retention": row["retention"],
        "rounding": row["rounding"],
        "strict": row["strict"],
        "exclude": tuple(row.get("exclude", ())),
        "experts": tuple(row["experts"]) if "experts" in row else None,
    }
    return MagnitudeGate(**{**fields, **options})


# ---- masks ---------------------------------------------------------------------------------------------------------


def steps_mask(preset: str, total: int) -> Mask:
    """A published steps mask ("slow", "medium", "fast", "ultra") for a loop of `total` steps, True = computed.

    Source: cache-dit 1.5.3, as generated there, for the listed numbers of steps only.
    """
    masks = load_table("steps_masks")["masks"]
    if str(total) not in masks:
        raise InvalidOptionError(
            f"no published steps mask for {total} steps (there are some for {', '.join(masks)}): give a mask yourself"
        )
    rows = masks[str(total)]
    if preset not in rows:
        raise unknown("steps mask", preset, rows)
    return parse_schedule(rows[preset], total)
