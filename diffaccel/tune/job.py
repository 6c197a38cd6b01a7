"""`search`: which steps to compute, on this pipeline, this number of steps, these prompts.

At most 8 plain runs are written down; from them comes, by dynamic programming, the best schedule for every number of
computed steps; at most 24 real runs refine those that were asked for; simply taking fewer steps competes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..caching.levels import why_never
from ..core.options import GOT, confirm, number
from ..handle import handle_of
from ..models.registry import lookup
from ..planner.options import Budget
from ..planner.resolve import require_pipeline
from ..quality.measurement import untouched
from .calibrate import Calibration, wishes_for
from .hunt import Hunt, in_turn
from .journal import Journal
from .outcome import Point, Setting, Tuned
from .record import Recording
from .request import RUNS, Request
from .rivals import RIVALS, schedulers
from .runs import Ground, Trial, mask_of, text_of
from .skips import Method
from .surrogate import Candidate, Surrogate, choices

Say = Callable[[str], None]


def search(
    pipe: Any,
    prompts: str | Sequence[str],
    budgets: int | Budget | Sequence[int | Budget] | None = None,
    *,
    seeds: int | Sequence[int] = 0,
    held_out: Sequence[str] = (),
    batch: int = 1,
    runs: int = RUNS,
    max_minutes: float | None = None,
    rivals: Sequence[str] = RIVALS,
    tolerances: Sequence[float] = (),
    orders: Sequence[int] = (0, 1, 2),
    corrections: Sequence[int] = (0, 1, 2),
    journal: str | Path | None = None,
    out: str | Path | None = None,
    say: Say | None = print,
    **call: Any,
) -> Tuned:
    """Search step schedules for a pipeline; the result's `preset()` is a TOML text for `accelerate`.

    Args:
        pipe: a pipeline that makes pictures or frames by a deterministic scheduler; accelerated or not, it is searched
            plain, and is afterwards as before.
        prompts: what to search on; of more than 8, the first 8 (all of them to calibrate on).
        budgets: numbers of computed steps, or budgets with `min_psnr_db`: the fewest steps that are estimated to reach
            it; half and a third of the steps unless told.
        seeds: one per prompt, or the first one.
        held_out: prompts that have no part in the search, to measure its result on.
        batch: so many prompts go through the pipeline at once.
        runs: real runs at most, all budgets together (one run: all prompts once).
        max_minutes: no run begins later; what is known then is the result, and says `complete=False`.
        rivals: of "own", "euler" and "unipc"; none: ().
        tolerances: of the adaptive cache, to calibrate to PSNR (`calibrate.TOLERANCES` are usual); none: ().
        orders, corrections: of forecasts and of the corrections behind them, to choose from.
        journal: a JSON file that is written after each run, and from which a stopped search goes on.
        out: a folder for the presets, also where the search is interrupted.
        say: told the expected minutes first, and then the progress; None: silent.
        **call: the pipeline's own arguments, such as num_inference_steps, height and guidance_scale.

    Raises:
        InvalidOptionError: bad input, before anything is run.
        IncompatibleError: a scheduler that draws noise, or calls the model more than once a step.
    """
    require_pipeline(pipe)
    asked = Request.of(
        pipe, call, prompts=prompts, budgets=budgets, seeds=seeds, held_out=held_out, batch=batch, runs=runs,
        max_minutes=max_minutes, rivals=rivals, tolerances=tolerances,
        orders=orders, corrections=corrections,
    )  # fmt: skip
    job = _Job(pipe, asked, None if journal is None else Path(journal), say if say is not None else lambda _: None)
    handle = handle_of(pipe)
    frame: AbstractContextManager[object] = nullcontext() if handle is None else handle.aside("tune")
    with frame, untouched(pipe), torch.no_grad():
        try:
            job.run()
        except KeyboardInterrupt:
            if out is not None and job.hunts:
                job.result(complete=False).save(out)
            raise
        result = job.result()
    if out is not None:
        result.save(out)
    return result


class _Job:
    """One search: what was asked for, and what is known so far."""

    def __init__(self, pipe: Any, asked: Request, journal: Path | None, say: Say) -> None:
        self.pipe, self.asked, self.say, self.loop = pipe, asked, say, asked.steps
        self.ground = Ground(pipe, asked.prompts, asked.seeds, asked.call, asked.batch)
        first = max(asked.seeds) + 1
        seeds = range(first, first + len(asked.held_out))
        self.field = Ground(pipe, asked.held_out, seeds, asked.call, asked.batch) if asked.held_out else None
        self.began, self.longest_s = time.monotonic(), 0.0
        self.complete = True
        self.hunts: list[Hunt] = []
        self.recording: Recording
        self.journal = Journal(journal, asked.heading(pipe))
        self.wide: Ground | None = None
        self.calibration: Calibration | None = None
        self.measured: dict[str, dict[str, Trial | str]] = {}

    # ---- the way of a search ----------------------------------------------------------------------------

    def run(self) -> None:
        """All of it, as far as time allows."""
        self._announce()
        self.recording = self._record()
        self._choose_budgets()
        for _ in in_turn(self.hunts, self.surrogate, self._try, self._late, self.say):
            pass
        self.complete = all(hunt.done for hunt in self.hunts)
        for hunt in self.hunts:
            self._compare(hunt)
        self._calibrate()

    def _announce(self) -> None:
        """The expected minutes, from two short runs of one batch."""
        if "plain" in self.journal.rows:
            self.say(f"going on with {self.journal.path}: {len(self.journal.rows)} rows are known")
            return
        seconds = []
        for steps in (2, 4):
            began = time.perf_counter()
            short = {**self.asked.call, "num_inference_steps": steps}
            pilot = Ground(self.pipe, self.ground.prompts[:1], self.ground.seeds[:1], short)
            pilot.recording()
            seconds.append(time.perf_counter() - began)
        a_step = max((seconds[1] - seconds[0]) / 2, 0.0)
        around = max(seconds[0] - 2 * a_step, 0.0)
        count, others = len(self.ground.prompts), len(self.field.prompts) if self.field else 0
        evaluations = [k for k in self.asked.budgets if isinstance(k, int)] or [self.loop // 2]
        mean = sum(evaluations) / len(evaluations)
        real = self.asked.runs + len(self.asked.rivals) * len(evaluations)
        aside = (len(self.asked.rivals) + 1) * len(evaluations)
        total = count * (around + self.loop * a_step) + count * real * (around + mean * a_step)
        total += len(self.asked.every) * len(self.asked.tolerances) * (around + self.loop / 2 * a_step)
        total += others * ((around + self.loop * a_step) + aside * (around + mean * a_step))
        minutes = self.asked.max_minutes
        limit = "" if minutes is None else f", at most {minutes:.3g} as asked"
        self.say(
            f"about {total / 60:.1f} minutes{limit}: {count} plain runs, up to {real} of "
            f"{count} prompt(s) with {mean:.3g} of {self.loop} steps"
            + (f", and the result on {others} held-out prompt(s)" if others else "")
        )

    def _record(self) -> Recording:
        """The plain runs; their pictures are made again only where a real run asks for them."""
        row = self.journal.rows.get("plain")
        if row is None:
            found = self.ground.recording()
            row = {
                "gram": found.gram.tolist(),
                "response": found.response.tolist(),
                "axis": list(found.axis),
                "coordinate": found.coordinate,
                "whole": found.whole,
                "seconds": found.seconds,
            }
            self.journal.add("plain", row)
            return found
        arrays = np.array(row["gram"]), np.array(row["response"])
        return Recording(*arrays, tuple(row["axis"]), row["coordinate"], row["whole"], np.empty(0), row["seconds"])

    def _choose_budgets(self) -> None:
        """Numbers of computed steps, where a PSNR was asked for by the surrogate; and what is known of them."""
        self.loop = len(self.recording.axis)  # of image-to-image: fewer than asked for
        numbers = [want if isinstance(want, int) else self._fewest(want) for want in self.asked.budgets]
        numbers = list(dict.fromkeys(numbers))
        for place, computed in enumerate(numbers):
            confirm("budgets", computed, number(2, self.loop, "from {least} to {most} steps"), GOT)
            quota = self.asked.runs // len(numbers) + (place < self.asked.runs % len(numbers))
            hunt = Hunt(computed, max(1, quota))
            for key, row in self.journal.rows.items():
                kind, _, rest = key.partition(" ")
                if kind == "run" and rest.partition(" ")[0].count("1") == computed and not hunt.done:
                    hunt.tried[self._candidate(rest)] = _trial(row)
            self.hunts.append(hunt)

    def _fewest(self, budget: Budget) -> int:
        assert budget.min_psnr_db is not None
        surrogate = self.surrogate()
        if not surrogate.damping.gain_db:  # one real run tells the decoder's gain
            candidate = min(surrogate.ends(self.loop // 2).items(), key=lambda pair: pair[1])[0]
            surrogate = Surrogate.of(self.recording, {candidate: self._try(candidate)}, surrogate.methods)
        reach = [sum(p.mask) for p in self._curve(surrogate) if p.estimate_db >= budget.min_psnr_db]
        return max(2, min(reach, default=self.loop))

    def _corrects(self) -> bool:
        """Does a correction act under this scheduler?"""
        return why_never(self.pipe.scheduler) is None

    def surrogate(self) -> Surrogate:
        """Fitted to everything that is known."""
        seen = {candidate: trial for hunt in self.hunts for candidate, trial in hunt.tried.items()}
        return Surrogate.of(self.recording, seen, choices(self._corrects(), self.asked.orders, self.asked.corrections))

    @staticmethod
    def _candidate(text: str) -> Candidate:
        mask, order, correct = text.split()
        return mask_of(mask), Method(int(order), int(correct))

    def _try(self, candidate: Candidate) -> Trial:
        mask, method = candidate
        key = f"run {text_of(mask)} {method.order} {method.correct}"
        trial = self._kept(key, lambda: self.ground.schedule(mask, method, self.recording.coordinate))
        assert isinstance(trial, Trial)
        return trial

    def _kept(self, key: str, run: Callable[[], Trial | str]) -> Trial | str:
        """The row of that name, or a run that makes it."""
        if key not in self.journal.rows:
            began = time.monotonic()
            found = run()
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.journal.add(key, vars(found) if isinstance(found, Trial) else found)
        row = self.journal.rows[key]
        return _trial(row) if isinstance(row, dict) else str(row)

    def _late(self) -> bool:
        """Would another run end too late?"""
        minutes = self.asked.max_minutes
        return minutes is not None and time.monotonic() + self.longest_s > self.began + 60 * minutes

    # ---- the end ----------------------------------------------------------------------------------------

    def _compare(self, hunt: Hunt) -> None:
        """Rivals at as many evaluations, and the result on prompts that had no part in the search."""
        if hunt.best is None:
            return
        (mask, method), ground = hunt.best, self.field or self.ground
        where = "held" if self.field else "rival"
        rows = self.measured.setdefault(text_of(mask), {})
        if self.field and not self._skip():
            key = f"held {text_of(mask)} {method.order} {method.correct}"
            rows["ours"] = self._kept(key, lambda: ground.schedule(mask, method, self.recording.coordinate))
            self.say(f"{hunt.computed} steps on held-out prompts: {_mean(rows['ours'])}")
        for name in [name for name in self.asked.rivals if name in schedulers(self.pipe.scheduler)]:
            if self._skip() or (self.field and "ours" not in rows):
                return
            key = f"{where} {name} {hunt.computed}"
            rows[name] = self._kept(key, lambda name=name: ground.rival(name, hunt.computed))  # type: ignore[misc]
            self.say(f"{hunt.computed} steps of {name}: {_mean(rows[name])}")

    def _calibrate(self) -> None:
        """The adaptive cache's tolerances, every prompt by itself."""
        trials: dict[float, Trial] = {}
        for tolerance in self.asked.tolerances:
            if self._skip():
                return
            wishes = wishes_for(tolerance, self.loop)
            row = self._kept(f"tolerance {tolerance:g}", lambda wishes=wishes: self._alone(wishes))  # type: ignore[misc]
            if isinstance(row, Trial):
                trials[tolerance] = row
                self.say(f"tolerance {tolerance:g}: {row.mean_db:.2f} dB at {row.computed:.1f} steps")
        self.calibration = Calibration.of(trials)

    def _alone(self, wishes: Mapping[str, Any]) -> Trial:
        if self.wide is None:
            texts, seeds = zip(*self.asked.every, strict=True)
            more = len(texts) > len(self.ground.prompts)
            self.wide = Ground(self.pipe, texts, seeds, self.asked.call, self.asked.batch) if more else self.ground
        self.wide.recording()
        return self.wide.one_by_one().accelerated(wishes)

    def _skip(self) -> bool:
        late = self._late()
        self.complete = self.complete and not late
        return late

    def _curve(self, surrogate: Surrogate) -> list[Point]:
        points: dict[int, Point] = {}
        for method, table in surrogate.programs(surrogate.longest(self.loop // 2)).items():
            for count, best in table.items():
                estimate = surrogate.psnr_db(surrogate.loss((best.mask, method)))
                if count > 1 and (count not in points or estimate > points[count].estimate_db):
                    points[count] = Point(best.mask, method, min(estimate, 100.0))
        for hunt in self.hunts:
            if hunt.best is not None:
                points[hunt.computed] = Point(*hunt.best, hunt.tried[hunt.best].mean_db)
        return [points[count] for count in sorted(points) if count < self.loop]

    def result(self, complete: bool = True) -> Tuned:
        """What is known now."""
        surrogate = self.surrogate()
        return Tuned(
            settings=tuple(self._setting(hunt) for hunt in self.hunts if hunt.best is not None),
            curve=tuple(self._curve(surrogate)),
            family=lookup(self.pipe).family,
            pipeline=type(self.pipe).__name__,
            origin={**self.asked.heading(self.pipe), "versions": versions()},
            missed_db=surrogate.damping.missed_db,
            complete=complete and self.complete,
            calibration=self.calibration.table() if self.calibration is not None else {},
        )

    def _setting(self, hunt: Hunt) -> Setting:
        assert hunt.best is not None
        mask, method = hunt.best
        rows = dict(self.measured.get(text_of(mask), {}))
        ours = rows.pop("ours", None)
        held = isinstance(ours, Trial)
        return Setting(
            mask, method, self.recording.coordinate,
            trial=ours if isinstance(ours, Trial) else hunt.tried[hunt.best],
            rivals={name: row for name, row in rows.items() if isinstance(row, Trial)},
            left_out={name: row for name, row in rows.items() if isinstance(row, str)},
            prompts=len(self.field.prompts if self.field and held else self.ground.prompts),
            held_out=held,
            searched=hunt.tried[hunt.best],
        )  # fmt: skip


def versions() -> dict[str, str]:
    """Of what the figures hang on."""
    import diffusers

    from .. import __version__

    return {"diffaccel": __version__, "diffusers": diffusers.__version__, "torch": torch.__version__}


def _trial(row: Mapping[str, Any]) -> Trial:
    return Trial(tuple(row["psnr_db"]), tuple(row["ssim"]), row["computed"], row["seconds"])


def _mean(row: Trial | str) -> str:
    return f"{row.mean_db:.2f} dB" if isinstance(row, Trial) else row
