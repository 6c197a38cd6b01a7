"""Drivers of golden step-cache cases: scripted inputs through the package's own functions.

A driver takes (inputs, params) as they are in the file and returns everything that `expected` may name. Whatever has
steps goes through the engine and its hooks on a scripted denoiser (`scripted.drive`); what is a formula of its own
(schedules, masks, filters, calibration, code books) is called as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from diffaccel.caching.engine import CacheRecipe
from diffaccel.caching.gates.adacache import adacache_rate
from diffaccel.caching.gates.base import ProbeGate
from diffaccel.caching.gates.dicache import ProbeAligned, ProbeSumGate, dicache_gamma
from diffaccel.caching.gates.easycache import RateGate
from diffaccel.caching.gates.magcache import MagnitudeGate, magnitude_ratio, nearest_indices
from diffaccel.caching.gates.schedule import ScheduleGate
from diffaccel.caching.gates.seacache import SpectralGate, sea_filter, sea_gain
from diffaccel.caching.gates.teacache import PolynomialGate
from diffaccel.caching.guards import Guards
from diffaccel.caching.policy import Memory, Policy
from diffaccel.caching.scopes.denoiser import Denoiser
from diffaccel.caching.scopes.stack import Stack
from diffaccel.caching.step import Step
from diffaccel.caching.tables import load_table, steps_mask
from diffaccel.extrapolation import schedule
from diffaccel.extrapolation.forecast import REUSE, Forecast
from diffaccel.extrapolation.schedule import computed_steps
from tests.caching.scripted import Scripted, drive, halves
from tests.golden import Mismatch, compare

Data = dict[str, Any]


def _tensors(inputs: Data, *names: str) -> list[torch.Tensor]:
    return [torch.tensor(inputs[name], dtype=torch.float64) for name in names]


def _scalar(value: torch.Tensor | float | None) -> float | None:
    return None if value is None else float(value)


class Loop(NamedTuple):
    """What a loop of one branch gave, one entry per step."""

    hits: list[bool]
    memories: list[Memory]
    used: list[torch.Tensor]  # the residual (or feature) that the step ended with


def loop(policy: Policy, values: Any, seen: Any = None, sigmas: Any = None, outputs: Any = None) -> Loop:
    """Steps of one branch through the pure machine: `values` are what computing would give, `seen` is for the gate."""
    total = len(values)
    policy = policy.fit(total)
    memory, done = policy.start(), Loop([], [], [])
    for t in range(total):
        step = Step(t, total, sigma=None if sigmas is None else sigmas[t])
        shown = None if seen is None else seen[t]
        hit, memory = policy.decide(memory, shown, step)
        if hit:
            done.used.append(policy.forecast(memory, step, shown)[0])
        else:
            memory = policy.store(memory, step, (values[t],), shown, None if outputs is None else outputs[t])
            done.used.append(values[t])
        done.hits.append(hit)
        done.memories.append(memory)
    return done


# ---- drivers -------------------------------------------------------------------------------------------------------


def teacache(inputs: Data, params: Data) -> Data:
    mod, x, residual = _tensors(inputs, "mod", "x", "R")
    gate = PolynomialGate(
        params["threshold"], coefficients=tuple(params["coefficients"]), use_abs=params.get("use_abs", False)
    )
    guards = Guards(warmup_steps=params.get("first", 1), last_steps=params.get("last", 1))
    recipe = CacheRecipe(Policy(gate, guards=guards), Stack(0))
    done = drive(Scripted(halves(residual), modulated=mod), x, recipe)
    return {
        "hit": done.hits,
        "raw": [_scalar(m.gate.distance) for m in done.memories],
        "accumulated_before_reset": [gate or 0.0 for gate in done.gates],  # a forced step sets the sum to 0
        "y": done.y.tolist(),
    }


def dbcache(inputs: Data, params: Data) -> Data:
    x, front, middle, back = _tensors(inputs, "x", "F_res", "M_res", "B_res")
    mask = params.get("mask")
    guards = Guards(
        warmup_steps=params.get("warmup", 0),
        max_consecutive=_cap(params.get("max_cont", -1)),
        max_total=_cap(params.get("max_total", -1)),
        max_accumulated=params.get("acc_thr"),
        mask=None if mask is None else tuple(bool(flag) for flag in mask),
        policy=params.get("policy", "dynamic"),
    )
    calibrator = params.get("calibrator")
    predictor = Forecast(calibrator["taylor_order"], "ladder") if calibrator else REUSE
    behind = max(params.get("Bn") or 0, int(bool(back.any())))
    policy = Policy(ProbeGate(params["threshold"]), predictor, guards, wary=False)
    recipe = CacheRecipe(policy, Stack(1, behind))
    done = drive(Scripted([front, *halves(middle), *[back / max(behind, 1)] * behind]), x, recipe)
    return {"hit": done.hits, "rel_l1": done.gates, "y": done.y.tolist()}


def _cap(value: int | None) -> int | None:
    return None if value is None or value < 0 else value


def _forecast(inputs: Data, predictor: Forecast) -> list[Any]:
    """The feature as a denoiser's output, and as the residual of its blocks: the two must agree."""
    [feature] = _tensors(inputs, "feature")
    feature = feature[:, None]  # a batch of one
    mask = [t == 0 or t in inputs["full_steps"] for t in range(len(feature))]
    policy, x = Policy(ScheduleGate(mask), predictor), torch.zeros_like(feature)
    done = drive(Scripted(answers=feature), x, CacheRecipe(policy, Denoiser()))
    as_residual = drive(Scripted(halves(feature)), x, CacheRecipe(policy, Stack(0)))
    compare(done.y.tolist(), as_residual.y.tolist(), "residual")
    return done.y[:, 0].tolist()


def taylorseer(inputs: Data, params: Data) -> Data:
    return {basis: _forecast(inputs, Forecast(params["order"], basis)) for basis in ("ladder", "newton")}


def hicache(inputs: Data, params: Data) -> Data:
    return {"y": _forecast(inputs, Forecast(params["order"], "hermite", sigma=params["sigma"]))}


def magcache(inputs: Data, params: Data) -> Data:
    gate = MagnitudeGate(
        params["threshold"],
        ratios=tuple(inputs["mag_ratios"]),
        max_steps=params["K"],
        retention=params["retention_ratio"],
        exclude=tuple(params.get("exclude") or ()),
        rounding="half_up" if params.get("half_up", True) else "down",
        strict=params.get("strict", False),
    )
    blank = torch.zeros(params["num_steps"], 1, 1, 1, dtype=torch.float64)
    done = drive(Scripted(halves(blank)), blank, CacheRecipe(Policy(gate), Stack(0)))
    pure = loop(Policy(gate), blank)  # the engine keeps a static gate's hits and numbers, not its other sums
    traces = [m.gate.trace for m in pure.memories]
    compare(pure.hits, done.hits, "hits foreseen")
    compare([m.value for m in pure.memories], done.gates, "errors foreseen")
    return {
        "hit": done.hits,
        "computed_steps": computed_steps([not hit for hit in done.hits]),
        "acc_err_k": [None if trace is None else list(trace) for trace in traces],
    }


def interp(inputs: Data, params: Data) -> Data:
    count = inputs["src_len"]
    flux = load_table("magcache")["models"]["FLUX.1-dev"]["ratios"]
    if count == len(flux):  # the places are the same that resampled ratios come from
        fitted = MagnitudeGate(0.1, tuple(flux)).fit(20).ratios
        compare([flux[i] for i in nearest_indices(count, 20)], list(fitted), "ratios")
    return _PerLength(count)


class _PerLength(dict[str, list[int]]):
    """{n: nearest calibrated index of each of n steps}, for any n asked for."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self.source = source

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.isdigit() and int(key) > 0

    def __missing__(self, key: str) -> list[int]:
        return nearest_indices(self.source, int(key))


def magcache_calibration(inputs: Data, params: Data) -> Data:
    before, now = _tensors(inputs, "prev_residual", "cur_residual")
    means = now.norm(dim=-1).mean() / before.norm(dim=-1).mean()
    return {"ratio": float(magnitude_ratio(now, before)), "wrong_ratio_of_means": float(means)}


def seacache(inputs: Data, params: Data) -> Data:
    latents, x, residual = _tensors(inputs, "latents", "x", "R")
    if inputs.get("layout", "T,H,W,C") != "T,H,W,C":
        raise Mismatch(f"unknown layout {inputs['layout']!r}")
    gate = SpectralGate(params["threshold"], power=params.get("power_exp", 3.0))
    guards = Guards(
        warmup_steps=params.get("retention_steps", 0),
        last_steps=params.get("cache_end_steps", 0),
        max_consecutive=params.get("max_consecutive") or None,  # 0 is no cap, as in diffusers
    )
    recipe = CacheRecipe(Policy(gate, Forecast(params.get("residual_order", 0)), guards), Stack(0))
    grids = latents.permute(0, 4, 1, 2, 3)[:, None]  # [step, B, C, F, H, W]
    done = drive(Scripted(halves(residual)), x, recipe, grids, inputs["sigma"])
    return {"hit": done.hits, "accumulated": done.gates, "y": done.y.tolist()}


def sea_filter_case(inputs: Data, params: Data) -> Data:
    [x] = _tensors(inputs, "x")
    sigma, power = inputs["sigma"], inputs["power_exp"]
    t, h, w, _ = x.shape
    return {"y": sea_filter(x, sigma, power).tolist(), "gain": sea_gain((t, h, w), sigma, power).tolist()}


def easycache(inputs: Data, params: Data) -> Data:
    x, v = _tensors(inputs, "x", "v")
    guards = Guards(warmup_steps=params.get("first", 0), last_steps=params.get("last", 0))
    recipe = CacheRecipe(Policy(RateGate(params["threshold"]), guards=guards), Denoiser(residual=True))
    done = drive(Scripted(answers=v), x, recipe)
    return {
        "hit": done.hits,
        "accumulated": done.gates,
        "k": [_scalar(m.gate.rate) for m in done.memories],
        "y": done.y.tolist(),
    }


def dicache(inputs: Data, params: Data) -> Data:
    """Two computed steps and a reused one, whose front block is the probe."""
    older, newest, now = _tensors(inputs, "probe_res_prev2", "probe_res_prev1", "probe_res_cur")
    before, last = _tensors(inputs, "res_prev2", "res_prev1")
    front, rest = torch.stack([older, newest, now]), torch.stack([before, last, torch.full_like(last, torch.nan)])
    policy = Policy(ProbeSumGate(1e9), ProbeAligned(), Guards(warmup_steps=2))
    done = drive(Scripted([front, *halves(rest)]), torch.zeros_like(front), CacheRecipe(policy, Stack(1)))
    compare([False, False, True], done.hits, "hits")
    kept = [sample.probe for sample in done.memories[-1].history]
    return {"gamma": float(dicache_gamma(now, kept[1], kept[0])), "residual": (done.y[-1] - now).tolist()}


def adacache(inputs: Data, params: Data) -> Data:
    codebook = {float(bound): rate for bound, rate in params["codebook"].items()}
    return {"rate": [adacache_rate(c, codebook) for c in inputs["c"]]}


def _pyramid(steps: int, interval: int, timestep_range: list[float], timestep_of_step: str) -> schedule.Mask:
    parts = re.fullmatch(r"(\d+)-(\d+)t", timestep_of_step)
    if parts is None:
        raise Mismatch(f"timestep_of_step {timestep_of_step!r} is not of the form a-bt")
    first, slope = (int(part) for part in parts.groups())
    return schedule.pyramid([first - slope * t for t in range(steps)], interval, *timestep_range)


SCHEDULES: dict[str, Callable[..., schedule.Mask]] = {
    "deepcache": schedule.uniform,
    "diffusers_taylorseer": schedule.diffusers_taylorseer,
    "fora": schedule.fora,
    "pab": _pyramid,
    "taylorseer": schedule.taylorseer,
    "uniform": schedule.uniform,
}


def schedules(expected: list[Data]) -> list[Data]:
    """Each expected entry with its `computed` replaced by ours; an unknown method or parameter raises."""
    rows = []
    for row in expected:
        options = {key: value for key, value in row.items() if key not in ("method", "computed")}
        if row["method"] not in SCHEDULES:
            raise Mismatch(f"unknown method {row['method']!r}")
        rows.append({**row, "computed": computed_steps(SCHEDULES[row["method"]](**options))})
    return rows


def steps_masks(inputs: Data, params: Data) -> Data:
    masks = {preset: steps_mask(preset, 28) for preset in load_table("steps_masks")["masks"]["28"]}
    return {preset: [int(flag) for flag in mask] for preset, mask in masks.items()}
