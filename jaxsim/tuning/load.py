"""The largest load, or number of clients, that passes a test: many searches side by side.

All candidates are rungs of a ladder, a sorted array shared by every search: loads that differ by one relative step, or
numbers of clients. A search finds the highest rung that passes with the next one not passing and everything tried below
it passing, assuming that the rest below does, too. It tries its guess and the lowest rung, gallops away from the guess
with doubling strides until a passing and another rung enclose the answer, then halves. Shared rungs make equal
capacities compare as equal.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STRIDE = 8  # rungs of the first gallop away from a guess
MOST_STRIDES = 12  # in one round: they double, and no ladder is that long
NEAR_STRIDE = 2  # the same where the guess comes from an earlier search


class Verdict(NamedTuple):
    """Whether a test was passed; None where that cannot be told, which never counts as passed."""

    passed: bool | None
    reason: str  # why it was not passed; empty if it was


class Probe(NamedTuple):
    """One simulation that a search asks for."""

    search: int
    rung: int


def load_ladder(lowest: float, highest: float, step: float) -> np.ndarray:
    """Loads from `lowest` to `highest`, each `step` (relative) above the one before; [R] float64, ascending."""
    rungs = int(np.ceil(np.log(highest / lowest) / np.log1p(step))) + 1
    return lowest * (1.0 + step) ** np.arange(rungs)


def integer_ladder(highest: int, step: float) -> np.ndarray:
    """Integers from 1 to `highest`, neighbours 1 or the relative `step` apart; [R] float64, ascending."""
    rungs = [1]
    while rungs[-1] < highest:
        rungs.append(min(highest, rungs[-1] + max(1, int(step * rungs[-1]))))
    return np.array(rungs, dtype=np.float64)


class Ladder:
    """The searches over one ladder, as arrays over `P` searches: ask for probes, tell their verdicts, until `done`.

    `near` says that the guesses come from an earlier search: then the lowest rung is tried only when all above fail.
    """

    def __init__(self, rungs: np.ndarray, guesses: Sequence[float], near: bool = False):
        self.rungs = rungs  # [R], ascending
        count = len(guesses)
        self.guess = self._at(guesses)  # [P]
        self.near = np.full(count, near)  # [P]
        self.low = np.full(count, -1)  # [P], highest rung below `high` that passed, -1 = none
        self.high = np.full(count, len(rungs))  # [P], lowest rung that did not pass, R = none
        self.stride = np.where(self.near, NEAR_STRIDE, STRIDE)  # [P]
        self.reason = [""] * count  # [P], why rung `high` did not pass
        self.passed: list[set[int]] = [set() for _ in range(count)]  # [P]

    def restart(self, search: int, guess: float) -> None:
        """Begins one search again, near a guess."""
        self.guess[search], self.near[search], self.stride[search] = self._at([guess])[0], True, NEAR_STRIDE
        self.low[search], self.high[search] = -1, len(self.rungs)
        self.reason[search], self.passed[search] = "", set()

    def _at(self, values: Sequence[float]) -> np.ndarray:
        return np.clip(np.searchsorted(self.rungs, values, side="right") - 1, 0, len(self.rungs) - 1)

    @property
    def open(self) -> np.ndarray:
        """Searches whose answer is not known yet; [P] bool."""
        return self.high - self.low > 1

    @property
    def done(self) -> bool:
        return not self.open.any()

    @property
    def capped(self) -> np.ndarray:
        """Searches in which even the highest rung passed; [P] bool."""
        return self.low == len(self.rungs) - 1

    def values(self) -> np.ndarray:
        """Highest value that passed so far, 0 where none did; [P] float64."""
        return np.where(self.low < 0, 0.0, self.rungs[np.maximum(self.low, 0)])

    def ask(self, each: int = 1) -> list[Probe]:
        """The next round: for every open search up to `each` probes, in the first round the guess and the lowest."""
        probes = []
        for index in np.flatnonzero(self.open):
            low, high, stride = int(self.low[index]), int(self.high[index]), int(self.stride[index])
            steps = [stride * 2**doubled for doubled in range(min(each, MOST_STRIDES))]
            if low < 0 and high == len(self.rungs):
                rungs = {int(self.guess[index])} | (set() if self.near[index] else {0})
            elif high == len(self.rungs):
                rungs = {min(low + step, high - 1) for step in steps}
            elif low <= 0 and high - stride > low + 1:
                rungs = {max(high - step, low + 1) for step in steps}
            else:
                parts = min(each, high - low - 1) + 1
                rungs = {low + (high - low) * part // parts for part in range(1, parts)}
            probes += [Probe(int(index), rung) for rung in sorted(rungs)]
        return probes

    def tell(self, probes: Sequence[Probe], verdicts: Sequence[Verdict]) -> None:
        """Enters the outcome of a round, in any order. What passes above a rung that did not counts for nothing."""
        told: dict[int, dict[int, Verdict]] = {}
        for probe, verdict in zip(probes, verdicts, strict=True):
            told.setdefault(probe.search, {})[probe.rung] = verdict
        for index, round_ in told.items():
            first = self.low[index] < 0 and self.high[index] == len(self.rungs)
            if not first and (self.low[index] <= 0 or self.high[index] == len(self.rungs)):
                self.stride[index] = min(self.stride[index] * 2 ** min(len(round_), MOST_STRIDES), len(self.rungs))
            for rung, (passed, reason) in round_.items():
                if passed:
                    self.passed[index].add(rung)
                elif rung < self.high[index]:
                    self.high[index], self.reason[index] = rung, reason
            self.low[index] = max((rung for rung in self.passed[index] if rung < self.high[index]), default=-1)

    def remaining(self) -> int:
        """About how many probes are still to come."""
        gap = np.where(self.high == len(self.rungs), 2 * self.stride, self.high - self.low)
        gap = np.where((self.low <= 0) & (self.high < len(self.rungs)), np.minimum(gap, 2 * self.stride), gap)
        gap = np.where((self.low < 0) & (self.high == len(self.rungs)) & ~self.near, 8 * STRIDE, gap)
        return int(np.ceil(np.log2(np.maximum(gap[self.open], 2))).sum())
