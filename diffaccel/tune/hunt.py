"""From the surrogate's favourites to the best schedule that real runs have seen, for several budgets in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .runs import Trial, text_of
from .surrogate import Candidate, Surrogate

SHARE_OF_METHODS = 0.4  # of a budget's real runs: one method after the other; the rest: neighbours of the best


@dataclass
class Hunt:
    """One budget: what was tried, and what to try next."""

    computed: int
    quota: int
    tried: dict[Candidate, Trial] = field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The candidate with the highest mean PSNR so far."""
        return max(self.tried, key=lambda c: self.tried[c].mean_db) if self.tried else None

    @property
    def done(self) -> bool:
        """Is the quota used?"""
        return len(self.tried) >= self.quota

    def next(self, surrogate: Surrogate) -> Candidate | None:
        """The most promising untried one: first of methods not yet tried, then around the best."""
        early = len(self.tried) < max(1, round(SHARE_OF_METHODS * self.quota))
        if early or self.best is None:
            known = {method for _, method in self.tried}
            ends = surrogate.ends(self.computed)
            pool = {c: loss for c, loss in ends.items() if c[1] not in known} or ends
        else:
            pool = surrogate.near(self.best)
        pool = {candidate: loss for candidate, loss in pool.items() if candidate not in self.tried}
        return min(pool, key=pool.__getitem__) if pool else None


def in_turn(
    hunts: list[Hunt],
    surrogate: Callable[[], Surrogate],
    run: Callable[[Candidate], Trial],
    stop: Callable[[], bool],
    say: Callable[[str], None],
) -> Iterator[Trial]:
    """One real run per budget and round, until quotas are used or `stop` says so; yields after each."""
    while any(not hunt.done for hunt in hunts):
        moved = False
        for hunt in [hunt for hunt in hunts if not hunt.done]:
            if stop():
                return
            candidate = hunt.next(surrogate())
            if candidate is None:
                hunt.quota = len(hunt.tried)
                continue
            trial = hunt.tried[candidate] = run(candidate)
            moved = True
            assert hunt.best is not None
            best = hunt.tried[hunt.best]
            say(
                f"{hunt.computed} steps, run {len(hunt.tried)} of {hunt.quota}: {text_of(candidate[0])} "
                f"{candidate[1]}: {trial.mean_db:.2f} dB; best {best.mean_db:.2f} dB"
            )
            yield trial
        if not moved:
            return
