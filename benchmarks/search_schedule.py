"""Find good static step schedules: which k of N steps to compute when the others are forecast.

    python benchmarks/search_schedule.py                                  # 14 and 9 of 28, orders 1 and 2, with and
                                                                          # without correction: the committed one
    python benchmarks/search_schedule.py --kind video --orders 1 --correct 0 --prompts 4 --test-prompts 8
    python benchmarks/search_schedule.py --computed 14 --orders 3 --coordinates sigma step

A skipped step takes Newton's forecast of the denoiser's output from the last computed ones
(`diffaccel.extrapolation.forecast.Forecast`). The search runs on TRAINING prompts of a testbed; only the held-out
figures are measured on others. Three stages:

1. Plain trajectories give the velocities v_t (with guidance applied). To first order, a schedule's error in the
   final latents is sum_t s_t dsigma_t (forecast of v_t - v_t) = sum_j c_j v_j, a linear combination with host
   numbers c_j, so its square is c' G c with the Gram matrix G of the velocities: thousands of schedules a second,
   without the model. s_t, how much of an error made at step t is left at the end, is measured by forecasting one
   step alone.
   With --correct N the next computed step also makes good what the forecasts before it got wrong: the skipped
   velocities are now interpolated (order N) instead of extrapolated, and the difference is added to the output,
   divided by that step's own length. Right for Euler, where a step is x + dsigma v. (A corrector, as in UniPC.)
2. Descent by swapping one computed for one skipped step, from several starts, on that surrogate.
3. The best few of each predictor are run through the real pipeline, and the best of those is improved by swaps
   judged by the decoded pictures, within --evaluations pipeline runs.

Prints one JSON document (masks as strings of 0 and 1, 1 = computed; every argument, the seed among them) and writes it
to search_schedule_KIND.json in --out, from where cache_settings.py takes its masks. The masks belong to this testbed,
step count and sigma schedule.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cache_runs import World, psnr_each, world, yardstick

from diffaccel import testbed
from diffaccel.extrapolation.forecast import Forecast, Sample

Mask = tuple[bool, ...]
FEEDBACK = 0.2  # share of a forecast's error that a correction leaves: the denoiser saw latents that were off


# ---- one schedule through the real pipeline ------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How skipped steps are answered: a forecast, and the order of the correction behind them (0: none)."""

    forecast: Forecast
    correct: int = 0

    def corrector(self) -> Forecast:
        return Forecast(order=self.correct, coordinate=self.forecast.coordinate)

    @property
    def depth(self) -> int:
        return max(self.forecast.depth, self.correct + 1)


@contextmanager
def scheduled(
    pipe: Any, mask: Mask, plan: Plan, branches: int = 1, record: list[torch.Tensor] | None = None
) -> Iterator[None]:
    """Within it, the denoiser of `pipe` is computed where `mask` says so and forecast elsewhere.

    For runs of len(mask) steps with `branches` denoiser calls per step. `record` receives every computed output.
    """
    forward, calls = pipe.transformer.forward, [0]
    histories: list[list[Sample]] = [[] for _ in range(branches)]
    skipped: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(branches)]

    def masked(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        index, branch = calls[0] // branches % len(mask), calls[0] % branches
        calls[0] += 1
        history, open_steps = histories[branch], skipped[branch]
        if index == 0:
            history.clear()
            open_steps.clear()
        sigmas = [float(s) for s in pipe.scheduler.sigmas]
        axis = sigmas if plan.forecast.coordinate == "sigma" else [float(t) for t in range(len(mask))]
        if not mask[index]:
            answer = plan.forecast.predict(history, axis[index])
            open_steps.append((index, answer[0]))
            return answer
        output = forward(*args, **kwargs)
        history.append(Sample(axis[index], (output[0],)))
        del history[: -plan.depth]
        if record is not None:
            record.append(output[0])
        total = output[0]
        if plan.correct and len(history) > 1:
            for t, told in open_steps:
                length = (sigmas[t + 1] - sigmas[t]) / (sigmas[index + 1] - sigmas[index])
                total = total + length * (plan.corrector().predict(history, axis[t])[0] - told)
        open_steps.clear()
        return (total, *output[1:])

    pipe.transformer.forward = masked
    try:
        yield
    finally:
        del pipe.transformer.forward


@dataclass
class Trial:
    """Where schedules are tried: prompts, a plain pipeline, its calls per step and its plain pictures."""

    place: World
    pipe: Any
    branches: int
    total: int
    batch: int
    reference: np.ndarray

    def psnr(self, mask: Mask, plan: Plan) -> np.ndarray:
        """PSNR in dB of each prompt's picture to the plain one."""
        with scheduled(self.pipe, mask, plan, self.branches):
            return psnr_each(self.reference, self.place.generate(self.pipe, self.total, batch=self.batch))

    def latents(self, mask: Mask, plan: Plan) -> np.ndarray:
        """Final latents, [P, ...]."""
        with scheduled(self.pipe, mask, plan, self.branches):
            return self.place.generate(self.pipe, self.total, batch=self.batch, output_type="latent")


def guided(outputs: Sequence[torch.Tensor], branches: int, scale: float) -> torch.Tensor:
    """The velocities that the scheduler got, [N, P, ...], from the outputs of every call (cond before uncond)."""
    calls = torch.stack(list(outputs)).unflatten(0, (-1, branches))
    return calls[:, 0] if branches == 1 else calls[:, 1] + scale * (calls[:, 0] - calls[:, 1])


# ---- the surrogate -------------------------------------------------------------------------------------------------


class Surrogate:
    """First-order error of a schedule, from plain trajectories alone."""

    def __init__(self, velocities: torch.Tensor, sigmas: Sequence[float]) -> None:
        """velocities: [N, P, T, C] of P prompts; sigmas: N + 1 falling noise levels."""
        flat = velocities.flatten(2).double()  # [N, P, T * C]
        self.gram = torch.einsum("npd,mpd->pnm", flat, flat).numpy() / flat.shape[-1]  # [P, N, N]
        self.sigmas = [float(s) for s in sigmas]
        self.steps = np.diff(self.sigmas)
        self.survival = np.ones(len(self.steps))

    def axis(self, predictor: Forecast) -> list[float]:
        return self.sigmas[:-1] if predictor.coordinate == "sigma" else [float(t) for t in range(len(self.steps))]

    def combination(self, mask: Mask, plan: Plan) -> np.ndarray:
        """c_j, [N]: how much of each computed velocity is in the final error."""
        axis = self.axis(plan.forecast)
        place = {at: t for t, at in enumerate(axis)}
        combination, history = np.zeros(len(mask)), []
        open_steps: list[int] = []

        def add(t: int, share: float, predictor: Forecast) -> None:
            weight = self.steps[t] * self.survival[t] * share
            combination[t] -= weight
            samples, weights = predictor.pick(history, axis[t])
            for sample, part in zip(samples, weights, strict=True):
                combination[place[sample.at]] += weight * part

        for t, computed in enumerate(mask):
            if not computed:
                corrected = plan.correct and any(mask[t:])
                add(t, FEEDBACK if corrected else 1.0, plan.forecast)
                open_steps += [t] if corrected else []
                continue
            history = [*history, Sample(axis[t], ())][-plan.depth :]
            for skipped in open_steps:
                add(skipped, 1 - FEEDBACK, plan.corrector())
            open_steps.clear()
        return combination

    def error(self, mask: Mask, plan: Plan) -> np.ndarray:
        """Mean squared error of the final latents per prompt, [P]."""
        c = self.combination(mask, plan)
        return np.maximum(np.einsum("n,pnm,m->p", c, self.gram, c), 1e-20)

    def loss(self, mask: Mask, plan: Plan) -> float:
        """Mean over prompts of the error in dB: lower is better, and 1 is 1 dB of the picture's PSNR or so."""
        return float(10 * np.log10(self.error(mask, plan)).mean())


def survivals(trial: Trial, surrogate: Surrogate) -> np.ndarray:
    """s_t, [N]: norm of the final error over its first-order estimate when step t alone is forecast, order 1.

    Steps 0 and 1 have no order-1 forecast; they get their neighbour's.
    """
    plan, out = Plan(Forecast(order=1, coordinate="sigma")), np.ones(trial.total)
    plain = trial.latents((True,) * trial.total, plan)
    for t in range(2, trial.total):
        mask = tuple(i != t for i in range(trial.total))
        true = ((trial.latents(mask, plan) - plain) ** 2).reshape(len(plain), -1).mean(axis=1)
        estimate = surrogate.error(mask, plan)[: len(true)]
        out[t] = float(np.sqrt(np.exp(np.log(np.maximum(true, 1e-20) / estimate).mean())))
    out[:2] = out[2]
    return out


# ---- search --------------------------------------------------------------------------------------------------------


def starts(total: int, computed: int, seed: int, count: int) -> list[Mask]:
    """Evenly spaced steps, steps crowded at either end, and random ones; all compute step 0."""
    out = []
    for power in (1.0, 0.7, 1.4, 2.0):
        places = {round((total - 1) * (i / (computed - 1)) ** power) for i in range(computed)}
        spare = [t for t in range(total) if t not in places]
        places |= set(spare[: computed - len(places)])
        out.append(tuple(t in places for t in range(total)))
    rng = np.random.default_rng(seed)
    while len(out) < count:
        places = {0, *(int(t) for t in rng.choice(np.arange(1, total), computed - 1, replace=False))}
        out.append(tuple(t in places for t in range(total)))
    return out


def swaps(mask: Mask) -> Iterator[Mask]:
    """Every schedule that differs in one computed and one skipped step; step 0 stays computed."""
    for off in (t for t, flag in enumerate(mask) if flag and t):
        for on in (t for t, flag in enumerate(mask) if not flag):
            yield tuple((flag and t != off) or t == on for t, flag in enumerate(mask))


def descend(surrogate: Surrogate, mask: Mask, plan: Plan) -> dict[Mask, float]:
    """Steepest descent by swaps until none helps; every local optimum's near misses are kept too."""
    loss = surrogate.loss(mask, plan)
    while True:
        around = {other: surrogate.loss(other, plan) for other in swaps(mask)}
        best = min(around, key=around.__getitem__)
        if around[best] >= loss:
            return {mask: loss, **dict(sorted(around.items(), key=lambda pair: pair[1])[:3])}
        mask, loss = best, around[best]


def text(mask: Mask) -> str:
    return "".join("1" if flag else "0" for flag in mask)


def search(args: argparse.Namespace) -> dict[str, Any]:
    """The whole document."""
    began = time.perf_counter()
    total, train = args.steps, world(args.kind, args.prompts, "train")
    pipe = train.load()
    branches = yardstick(train, pipe).branches
    record: list[torch.Tensor] = []
    with scheduled(pipe, (True,) * total, Plan(Forecast(order=0)), branches, record):
        reference = train.generate(pipe, total, batch=args.prompts)
    scale = testbed.call_kwargs(args.kind)["guidance_scale"]
    surrogate = Surrogate(guided(record, branches, scale), pipe.scheduler.sigmas.tolist())
    trial = Trial(train, pipe, branches, total, args.prompts, reference)
    if args.survival_prompts:
        few = World(args.kind, train.prompts[: args.survival_prompts])
        surrogate.survival = survivals(replace(trial, place=few, batch=args.survival_prompts), surrogate)
    say(f"trajectories and survival: {time.perf_counter() - began:.0f} s")
    found = [row for computed in args.computed for row in search_one(args, trial, surrogate, computed)]

    test = world(args.kind, args.test_prompts, "test")
    plain = test.generate(pipe, total)
    held_out = replace(trial, place=test, batch=8, reference=plain)
    for row in found:
        plan = Plan(Forecast(order=row["order"], coordinate=row["coordinate"]), row["correct"])
        each = held_out.psnr(tuple(c == "1" for c in row["mask"]), plan)
        row |= {"held_out_psnr_db": round(float(each.mean()), 2), "held_out_lowest_db": round(float(each.min()), 2)}
        say(json.dumps(row))
    return {
        "label": "testbed only",
        "kind": args.kind,
        "steps": total,
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
        "dtype": "float32",
        "torch": torch.__version__,
        "train_prompts": args.prompts,
        "held_out_prompts": args.test_prompts,
        "survival": [round(float(s), 3) for s in surrogate.survival],
        "schedules": found,
        "seconds": round(time.perf_counter() - began),
    }


def search_one(args: argparse.Namespace, trial: Trial, surrogate: Surrogate, computed: int) -> list[dict[str, Any]]:
    """For one number of computed steps: the best of each predictor, and the best of all, improved."""
    tried: list[tuple[float, Mask, Plan]] = []
    choices = itertools.product(args.coordinates, args.orders, args.correct)
    for plan in [Plan(Forecast(order=order, coordinate=axis), correct) for axis, order, correct in choices]:
        pool: dict[Mask, float] = {}
        for start in starts(trial.total, computed, args.seed, args.starts):
            pool |= descend(surrogate, start, plan)
        for mask in sorted(pool, key=pool.__getitem__)[: args.finalists]:
            psnr = float(trial.psnr(mask, plan).mean())
            tried.append((psnr, mask, plan))
            say(f"{entry(computed, plan, mask, psnr)} surrogate {pool[mask]:.2f}")
    best = [max((t for t in tried if t[2] == p), key=lambda t: t[0]) for p in dict.fromkeys(t[2] for t in tried)]
    rows = [entry(computed, plan, mask, psnr) for psnr, mask, plan in best]
    if args.evaluations:
        psnr, mask, plan = max(best, key=lambda t: t[0])
        mask, psnr = refine(trial, surrogate, mask, plan, psnr, args.evaluations)
        rows.append(entry(computed, plan, mask, psnr, refined=True))
    return rows


def entry(computed: int, plan: Plan, mask: Mask, psnr: float, refined: bool = False) -> dict[str, Any]:
    return {
        "computed": computed,
        "order": plan.forecast.order,
        "coordinate": plan.forecast.coordinate,
        "correct": plan.correct,
        "mask": text(mask),
        "refined": refined,
        "train_psnr_db": round(psnr, 2),
    }


def refine(trial: Trial, surrogate: Surrogate, mask: Mask, plan: Plan, psnr: float, runs: int) -> tuple[Mask, float]:
    """Swaps judged by real pictures, those first that the surrogate likes; the first that helps is taken."""
    seen = {mask}
    while runs:
        order = sorted(set(swaps(mask)) - seen, key=lambda other: surrogate.loss(other, plan))
        for other in order[:runs]:
            seen.add(other)
            runs -= 1
            value = float(trial.psnr(other, plan).mean())
            if value > psnr:
                mask, psnr = other, value
                say(f"refined: {text(mask)} {psnr:.2f} dB, {runs} runs left")
                break
        else:
            break
    return mask, psnr


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Search static step schedules for a testbed.")
    parser.add_argument("--kind", default="image", choices=["image", "video"])
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--computed", type=int, nargs="+", default=[14, 9])
    parser.add_argument("--orders", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--coordinates", nargs="+", default=["sigma"], choices=["sigma", "step"])
    parser.add_argument("--correct", type=int, nargs="+", default=[0, 2], help="orders of the correction; 0: none")
    parser.add_argument("--prompts", type=int, default=8, help="training prompts, one batch")
    parser.add_argument("--test-prompts", type=int, default=32)
    parser.add_argument("--survival-prompts", type=int, default=2, help="0: take every error to survive in full")
    parser.add_argument("--starts", type=int, default=12)
    parser.add_argument("--finalists", type=int, default=3, help="per predictor, run through the real pipeline")
    parser.add_argument("--evaluations", type=int, default=30, help="pipeline runs to improve the best with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder")
    args = parser.parse_args()
    document = json.dumps(search(args), indent=1, allow_nan=False)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"search_schedule_{args.kind}.json").write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
