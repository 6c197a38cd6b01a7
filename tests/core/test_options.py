"""The checks that all configs share, alone and on every config of every lever."""

import dataclasses
import math
from dataclasses import dataclass, fields

import numpy as np
import pytest

from diffaccel import Budget
from diffaccel.core import options
from diffaccel.errors import InvalidOptionError
from diffaccel.planner.levers import PLACES


@dataclass(frozen=True)
class Config:
    value: object = 1


@pytest.mark.parametrize(
    "value, expected",
    [
        (np.float32(0.5), 0.5), (np.float64(0.1), 0.1), (np.float16(2), 2.0), (np.int64(7), 7), (np.uint8(7), 7),
        (np.bool_(True), True), (np.array(0.5), 0.5), (np.array(3), 3), (np.str_("step"), "step"),
        ((np.int64(1), 2), (1, 2)), ([np.float32(0.5)], [0.5]), (np.array([0, 2]), [0, 2]),
        (((np.float64(0.5), np.int64(2)),), ((0.5, 2),)), (None, None), ("a", "a"),
    ],
)  # fmt: skip
def test_plain_python_comes_out(value, expected):
    def types(x):
        return (type(x), *(types(y) for y in x)) if isinstance(x, (list, tuple)) else type(x)

    made = options.plain(value)
    assert made == expected
    assert types(made) == types(expected)


@pytest.mark.parametrize(
    "check, good, bad",
    [
        (options.BOOLEAN, [True, np.bool_(False)], [1, 0, None, "yes", np.int64(1)]),
        (options.whole(1), [1, 5, np.int32(3), np.array(3)], [0, True, np.bool_(True), 1.0, np.float32(2), "2", None]),
        (options.whole(0).or_none(), [0, None], [-1, False, math.nan]),
        (options.number(0), [0, 0.0, 2, np.float32(0.1)], [-1e-9, True, math.nan, math.inf, np.float32("nan"), "1"]),
        (options.number(0, 1), [0, 1, 0.5], [1.01, -0.1]),
        (options.above(0), [1e-9, 3], [0, -1, math.inf, None]),
        (options.one_of(0, 1, 2), [0, np.int64(2)], [3, True, 1.0, None]),
        (options.NUMBER, [-1, 0.5], [math.nan, math.inf, True, None]),
        (options.LIMIT, [math.inf, -2], [math.nan, False]),
    ],
)  # fmt: skip
def test_what_a_check_lets_through(check, good, bad):
    for value in good:
        config = Config(value)
        options.take(config, check, "value")
        assert type(config.value).__module__ == "builtins"
        assert config.value == value
    for value in bad:
        with pytest.raises(InvalidOptionError, match=r"^value="):
            options.take(Config(value), check, "value")


def test_a_sentence_stays_short_whatever_was_given():
    for value in ("x" * 5000, list(range(9000)), {str(i): i for i in range(900)}, np.ones(5000), object()):
        with pytest.raises(InvalidOptionError) as error:
            options.confirm("steps", value, options.whole(1), options.GOT)
        assert len(str(error.value)) <= 200
        assert str(error.value).startswith("steps must be a whole number of at least 1, got ")


# ---- every config --------------------------------------------------------------------------------------------------

SAMPLES = {"switch": 0.5, "refine": 0, "max_gain": 3.0, "retention": 0.2, "order": 1, "density": 0.5, "probe_order": 1}


def numeric_fields():
    """(config class, fixed fields, field) of all numbers and switches of every lever."""
    seen = set()
    for rows in (place.levers for place in PLACES.values()):
        for row in rows.values():
            config = row.config()
            if config.__name__ in ("Lora", "CustomCache"):
                continue  # made by the package, not by a user: their parts have tests of their own
            for field in fields(config):
                kind = str(field.type).removesuffix(" | None")
                known = (config, field.name) in seen or field.name in row.fixed or not field.init
                known = known or (config.__name__, field.name) == ("AdaptiveCache", "max_bytes")  # refused by name
                if kind in ("int", "float", "bool") and not known:
                    seen.add((config, field.name))
                    yield pytest.param(config, dict(row.fixed), field, kind, id=f"{config.__name__}-{field.name}")


def required(config):
    """Values for fields without a default."""
    return {"steps": "1" * 9} if config.__name__ == "StepSchedule" else {}


@pytest.mark.parametrize("config, fixed, field, kind", list(numeric_fields()))
def test_numpy_values_are_taken_and_stand_as_python_in_the_config(config, fixed, field, kind):
    default = None if field.default is dataclasses.MISSING else field.default
    value = default if default is not None else SAMPLES.get(field.name, {"int": 4, "float": 0.5, "bool": True}[kind])
    given = {**fixed, **required(config)}
    plain = config(**{**given, field.name: value})
    for made in (np.array(value), {"int": np.int64, "float": np.float64, "bool": np.bool_}[kind](value)):
        other = config(**{**given, field.name: made})
        assert other == plain
        assert type(getattr(other, field.name)) is type(getattr(plain, field.name))


@pytest.mark.parametrize("config, fixed, field, kind", list(numeric_fields()))
def test_wrong_kinds_are_refused_by_name(config, fixed, field, kind):
    wrong = {"int": (True, 1.5, "3", math.nan), "float": (True, "0.1", math.nan, 1j), "bool": (1, "yes", 0.0)}[kind]
    if not str(field.type).endswith("None"):
        wrong += (None,)
    for value in wrong:
        with pytest.raises(InvalidOptionError) as error:
            config(**{**fixed, **required(config), field.name: value})
        assert field.name in str(error.value), str(error.value)
        assert len(str(error.value)) <= 300


def test_a_budget_takes_numpy_and_refuses_what_is_no_number():
    assert Budget(memory_gib=np.float32(16), min_psnr_db=np.int64(30)) == Budget(memory_gib=16.0, min_psnr_db=30)
    for value in (True, math.nan, math.inf, 0, "16"):
        with pytest.raises(InvalidOptionError, match=r"Budget\(memory_gib="):
            Budget(memory_gib=value)
