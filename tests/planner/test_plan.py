"""Plans are plain data: round trips, strict keys, tables."""

from __future__ import annotations

import pickle

import pytest

from diffaccel import Budget, InvalidOptionError, Plan
from diffaccel.planner.plan import PlanItem

ITEM = PlanItem(
    "cache.first_block", "call", "enabled", 'says "why", \\ and\nmore', "lossy",
    {"threshold": 0.1, "min_steps": 9, "flag": True}, {"parameters_skipped": 0.8, "origin": "computed"},
)  # fmt: skip
PLAN = Plan(
    "cpu-demo", "FluxPipeline", "flux", "cpu",
    (ITEM, PlanItem("compile", "module", "skipped", "not in this version", "unknown")),
    Budget(memory_gib=12.5, fidelity="equivalent"), ("a note",),
)  # fmt: skip


def test_round_trips() -> None:
    assert Plan.from_dict(PLAN.to_dict()) == PLAN
    assert Plan.from_toml(PLAN.to_toml()) == PLAN
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN
    assert Plan.from_toml(Plan("none", "P", "flux", "cpu").to_toml()) == Plan("none", "P", "flux", "cpu")


@pytest.mark.parametrize(
    ("path", "wrong", "meant"),
    [((), "familly", "family"), (("items", 0), "statu", "status"), (("budget",), "memory_gb", "memory_gib")],
)
def test_unknown_keys_name_the_nearest(path: tuple[str | int, ...], wrong: str, meant: str) -> None:
    data = PLAN.to_dict()
    place = data
    for key in path:
        place = place[key]
    place[wrong] = 1
    with pytest.raises(InvalidOptionError, match=f"{wrong}.*{meant}"):
        Plan.from_dict(data)


def test_bad_status_and_missing_keys() -> None:
    data = PLAN.to_dict()
    data["items"][0]["status"] = "on"
    with pytest.raises(InvalidOptionError, match="status"):
        Plan.from_dict(data)
    with pytest.raises(InvalidOptionError, match="incomplete plan"):
        Plan.from_dict({"preset": "x"})
    with pytest.raises(InvalidOptionError, match="not valid TOML"):
        Plan.from_toml("preset = ")


def test_table_says_state_and_reason() -> None:
    text = str(PLAN)
    assert "cache.first_block" in text and "unmeasured" in text and "threshold=0.1" in text
    assert "not in this version" in text and "note: a note" in text
    html = PLAN._repr_html_()
    assert html.startswith("<table>") and "&quot;why&quot;" in html and html.count("<tr>") == 3


@pytest.mark.parametrize(
    "bad", [{"memory_gib": 0}, {"min_psnr_db": -3}, {"fidelity": "losless"}, {"max_seconds": "1"}]
)
def test_budget_is_checked(bad: dict[str, object]) -> None:
    [name] = bad
    with pytest.raises(InvalidOptionError, match=name):
        Budget(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"items": 5}, "plan: items=5 must be a list, got int"),
        ({"items": {"name": "x"}}, "must be a list, got dict"),
        ({"notes": "abc"}, "plan: notes='abc' must be a list, got str"),
        ({"budget": 5}, "plan: budget=5 must be a table of names and values, got int"),
        ({"budget": [1]}, "plan: budget=[1] must be a table of names and values, got list"),
        ({"preset": 5}, "plan: preset=5 must be text, got int"),
        ({"items": [{"name": "x", "params": 5}]}, "plan item: params=5 must be a table of names and values, got int"),
        ({"items": [{"name": 5}]}, "plan item: name=5 must be text, got int"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(change: dict[str, object], words: str) -> None:
    plain = {"preset": "auto", "pipeline": "FluxPipeline", "family": "flux", "hardware": "cpu"}
    assert Plan.from_dict(plain).items == ()
    with pytest.raises(InvalidOptionError) as error:
        Plan.from_dict(plain | change)
    assert words in str(error.value)
