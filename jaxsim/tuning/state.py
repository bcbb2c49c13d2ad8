"""Where the searches for capacity stand, and what they know."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxsim.metrics import Interval
from jaxsim.tuning.evaluate import Outcome
from jaxsim.tuning.load import NEAR_STRIDE, STRIDE, Ladder, Probe, Verdict
from jaxsim.tuning.pooled import Crossing

NEAREST = 8  # rungs around the capacity of the first seeds on which further ones are tried
NEAR_SHARE = 3  # of the distance from the capacity to an end: a gap between two values around the end may be as wide


class Found(NamedTuple):
    """What the search knows about one setting."""

    values: np.ndarray  # [S], each seed's contribution to the capacity, which is their mean; 0 where nothing passed
    interval: Interval  # of the capacity, at `search.confidence`
    finished: bool  # nothing left to try
    capped: bool  # the highest value on the ladder passed
    reason: str  # why the next value did not pass
    undecided: str  # why the answer is none, in spite of the longest runs; empty if it is one
    note: str  # higher values that are undecided, or passed although one below them did not
    lowest: float  # the lowest value on the ladder
    count: int  # requests of a run
    outcomes: list[Outcome]  # of the highest value that passed, one per seed
    tried: dict[int, np.ndarray]  # rung -> what decides of the runs under all seeds (`decisive`)
    best: int  # rung of the highest value that passed, -1 = none

    @property
    def known(self) -> bool:
        """Whether there is a value: nothing was said yet about a search that an interruption cut off early."""
        return self.finished or bool(self.outcomes)


class State:
    """The search of one kind, loads or clients, over all candidates; in the shapes, `C` is their number."""

    def __init__(self, rungs: np.ndarray, guesses: Sequence[float], near: bool, count: int):
        self.ladder = Ladder(rungs, guesses, near)
        self.counts = [count] * len(guesses)  # [C], requests of a run
        self.figures: list[dict[int, np.ndarray]] = [{} for _ in guesses]  # [C], rung -> what decides, see `decisive`
        self.verdicts: list[dict[int, Verdict]] = [{} for _ in guesses]  # [C], rung -> verdict
        self.best: list[tuple[int, list[Outcome]]] = [(-1, []) for _ in guesses]  # [C], highest good rung, its runs
        self.throughput_rps = [0.0] * len(guesses)  # [C], the largest so far
        self.looks = [0] * len(guesses)  # [C], at the ends of the interval
        self.wanted: list[set[int]] = [set() for _ in guesses]  # [C], rungs to try besides the ladder's
        self.finished = [False] * len(guesses)  # [C]
        self.crossings: dict[int, Crossing | None] = {}  # of candidates whose figures are the same since
        self.before: list[Found | None] = [None] * len(guesses)  # [C], of the first seeds

    def resume(self, before: Sequence[Found]) -> None:
        """Goes on from what was found under the first seeds: the others are tried where those were, near the answer."""
        self.before = list(before)
        self.counts = [found.count for found in before]
        for candidate, found in enumerate(before):
            centre = found.best if found.best >= 0 else int(self.ladder.guess[candidate])
            self.wanted[candidate] = set(sorted(found.tried, key=lambda rung: abs(rung - centre))[:NEAREST])

    def joined(self, probe: Probe, runs: list[Outcome], figures: np.ndarray) -> list[Outcome] | None:
        """Enters runs, after those of the first seeds if they are of the others; the runs of all seeds if at hand."""
        candidate, rung = probe
        self.crossings.pop(candidate, None)
        before = self.before[candidate] if self.known_seeds(probe) else None
        if before is None:
            self.figures[candidate][rung] = figures
            return runs
        self.figures[candidate][rung] = np.concatenate([before.tried[rung], figures])
        return [*before.outcomes, *runs] if rung == before.best else None

    def probes(self, each: int) -> list[Probe]:
        """The next round, see `Ladder.ask`."""
        probes = self.ladder.ask(each)
        wanted = (Probe(candidate, rung) for candidate, some in enumerate(self.wanted) for rung in sorted(some))
        return list(dict.fromkeys([*probes, *wanted]))

    def known_seeds(self, probe: Probe) -> int:
        """How many of the first seeds need no run: their figures are at hand and their runs are not asked for again."""
        before = self.before[probe.search]
        known = before is not None and probe.rung in before.tried and probe.rung not in self.figures[probe.search]
        return len(before.values) if before is not None and known else 0

    def extend(self, candidate: int, guess: float) -> None:
        """Starts over with runs twice as long, near the answer of the shorter ones."""
        self.counts[candidate] *= 2
        self.figures[candidate], self.verdicts[candidate], self.before[candidate] = {}, {}, None
        self.crossings.pop(candidate, None)
        self.best[candidate], self.looks[candidate] = (-1, []), 0
        self.ladder.restart(candidate, guess)

    def in_doubt(self, candidate: int) -> bool:
        """Whether the lowest rung that did not pass is undecided."""
        verdict = self.verdicts[candidate].get(int(self.ladder.high[candidate]))
        return verdict is not None and verdict.passed is None

    def failed(self, candidate: int) -> int:
        """The lowest rung that failed for certain, above those that did not pass; the last if none has."""
        high = self.ladder.high[candidate]
        failed = (rung for rung, said in self.verdicts[candidate].items() if said.passed is False and rung >= high)
        return min(failed, default=len(self.ladder.rungs) - 1)

    def ends(self, candidate: int, found: Crossing) -> set[int]:
        """Rungs to try so that an interval does not rest on values far apart: at its low end and around its reach.

        Where the next rung is undecided also the one half-way to those that failed for certain.
        """
        rungs, tried = self.ladder.rungs, sorted(self.verdicts[candidate])

        def place(load: float) -> int:
            return int(np.clip(np.searchsorted(rungs, load), 0, len(rungs) - 1))

        centre, wanted = place(found.interval.mean), set()
        reach = place(found.reach) if math.isfinite(found.reach) else 2 * tried[-1] - centre + 1
        below = centre - 3 * (centre - place(found.look)) // 2  # far enough for it to lie between two that were tried
        for end, guess in ((place(found.low), below), (reach, reach)):
            lower = max((rung for rung in tried if rung < end), default=-1)
            upper = min((rung for rung in tried if rung >= end), default=len(rungs))
            if upper - lower > max(NEAR_STRIDE, abs(end - centre) // NEAR_SHARE):
                wanted.add(min(max(guess, lower + 1), upper - 1))
        if self.in_doubt(candidate):
            high, failed = int(self.ladder.high[candidate]), self.failed(candidate)
            beyond = min(tried[-1] + STRIDE * 2 ** self.looks[candidate], len(rungs) - 1)
            further = beyond if failed == len(rungs) - 1 else (high + failed) // 2
            wanted |= {further} - {high, *tried}
        return wanted
