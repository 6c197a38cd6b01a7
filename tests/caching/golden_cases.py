"""Golden cases of step caches (KIND caches of tests/golden.py): the keys that each kind knows, and the check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.caching import golden_drivers as drivers
from tests.golden import Mismatch, compare

Data = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A driver and the keys that it knows."""

    driver: Callable[[Data, Data], Data]
    inputs: frozenset[str]
    params: frozenset[str]


def _kind(driver: Callable[[Data, Data], Data], inputs: str = "", params: str = "") -> Kind:
    return Kind(driver, frozenset(inputs.split()), frozenset(params.split()))


KINDS = {
    "adacache": _kind(drivers.adacache, "c", "codebook"),
    "dbcache": _kind(
        drivers.dbcache,
        "x F_res M_res B_res",
        "threshold Bn warmup max_cont max_total acc_thr mask policy calibrator",
    ),
    "dicache": _kind(drivers.dicache, "probe_res_prev2 probe_res_prev1 probe_res_cur res_prev2 res_prev1"),
    "easycache": _kind(drivers.easycache, "x v", "threshold first last"),
    "hicache": _kind(drivers.hicache, "feature full_steps", "order sigma"),
    "interp": _kind(drivers.interp, "src_len"),
    "magcache": _kind(drivers.magcache, "mag_ratios", "num_steps threshold K retention_ratio exclude half_up strict"),
    "magcache_calibration": _kind(drivers.magcache_calibration, "prev_residual cur_residual"),
    "sea_filter": _kind(drivers.sea_filter_case, "x sigma power_exp"),
    "seacache": _kind(
        drivers.seacache,
        "layout latents sigma x R",
        "threshold residual_order retention_steps cache_end_steps max_consecutive power_exp",
    ),
    "schedule": _kind(lambda inputs, params: {}),
    "steps_mask": _kind(drivers.steps_masks),
    "taylorseer": _kind(drivers.taylorseer, "feature full_steps", "order"),
    "teacache": _kind(drivers.teacache, "mod x R", "coefficients threshold first last use_abs"),
}
CASE_KEYS = {"kind", "inputs", "params", "expected", "note"}


def check(case: Data) -> None:
    """Raise what is wrong with this case; every key in it must be known."""
    name = case["kind"]
    if name not in KINDS:
        raise Mismatch(f"unknown kind {name!r}")
    kind = KINDS[name]
    _known(case, CASE_KEYS | ({"index_expected"} if name == "interp" else set()), "the case")
    inputs, params, expected = case.get("inputs") or {}, case.get("params") or {}, case["expected"]
    _known(inputs, kind.inputs, "inputs")
    _known(params, kind.params, "params")
    if params.get("calibrator"):
        _known(params["calibrator"], {"taylor_order"}, "calibrator")
    if not expected:
        raise Mismatch("nothing is expected")
    actual = drivers.schedules(expected) if name == "schedule" else kind.driver(inputs, params)
    compare(expected, actual, "expected")
    if name == "interp":
        compare(case.get("index_expected"), actual, "index_expected")


def _known(data: Data, allowed: set[str] | frozenset[str], where: str) -> None:
    unknown = sorted(set(data) - allowed)
    if unknown:
        raise Mismatch(f"unknown key {unknown[0]!r} in {where}")
