"""The largest load and the largest concurrency of every setting and seed that meet the SLO, and the best setting."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxsim.metrics import Interval, paired_interval, t_interval
from jaxsim.search.evaluate import Evaluate, Outcome, Task
from jaxsim.search.load import Ladder, Probe, integer_ladder, load_ladder
from jaxsim.search.space import Candidate
from jaxsim.settings import SearchSettings

LOWEST_RPS, HIGHEST_RPS = 0.01, 1e5
LONGEST_RUN_S = 1e6  # keeps the int64 picosecond clock far from its end
TIE_SEEDS = 3  # at least, for an interval to make a tie
SLO_SHARE = 0.7  # of the saturated throughput: the first guess of the load that meets an SLO


class Found(NamedTuple):
    """What the search knows about one setting."""

    values: np.ndarray  # [S], highest passing value of each seed, 0 where none passed
    interval: Interval
    finished: bool  # nothing left to try
    capped: bool  # the highest value on the ladder passed, in some seed
    reason: str  # why the next value failed; of the first seed
    lowest: float  # the lowest value on the ladder
    outcomes: list[Outcome]  # of the passing values, at most one per seed

    @property
    def known(self) -> bool:
        """Whether every value is one: a seed that nothing was said about yet has none."""
        return self.finished or bool((self.values > 0).all())

    def joined(self, other: "Found") -> "Found":
        """Together with what was found for further seeds."""
        values = np.concatenate([self.values, other.values])
        return Found(
            values=values,
            interval=t_interval(values),
            finished=self.finished and other.finished,
            capped=self.capped or other.capped,
            reason=self.reason or other.reason,
            lowest=max(self.lowest, other.lowest),
            outcomes=self.outcomes + other.outcomes,
        )


class CapacitySearch:
    """All searches side by side: each round is one call of `evaluate` with everything that is still open.

    In the shapes, `C` is the number of candidates, `S` of seeds; search `c * S + s` is candidate c under the s-th seed.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        seeds: Sequence[int],  # their places among the replicates
        count: int,  # requests of a simulation
        search: SearchSettings,
        evaluate: Evaluate,
    ):
        self.candidates, self.seeds, self.count = candidates, seeds, count
        self.search, self.evaluate = search, evaluate
        self.rounds = self.simulations = 0
        # Simulations of a full round; later ones probe what is still open at several values to keep the lanes busy.
        self.width = 2 * len(candidates) * len(seeds)
        self.best: dict[tuple[str, int], Outcome] = {}  # of the highest passing value
        self.seats = integer_ladder(max(1, count // 2), search.step)
        guesses = [candidate.max_num_seqs for candidate in candidates for _ in seeds]
        self.ladders: dict[str, Ladder] = {"clients": Ladder(self.seats, guesses)}

    @property
    def done(self) -> bool:
        return self.rounds > 0 and all(ladder.done for ladder in self.ladders.values())

    def remaining(self) -> int:
        """About how many simulations are still to come."""
        searches = len(self.candidates) * len(self.seeds)
        expected = sum(ladder.remaining() for ladder in self.ladders.values())
        return expected + (8 * searches if self.search.load and not self.rounds else 0)

    def round(self, on_done: Callable[[], None] | None = None) -> None:
        """One round. The first has closed loops only: their throughput is the guess for the load."""
        each = max(1, self.width // max(1, sum(int(ladder.open.sum()) for ladder in self.ladders.values())))
        asked = [(kind, probe) for kind, ladder in self.ladders.items() for probe in ladder.ask(each)]
        tasks = [self._task(kind, probe) for kind, probe in asked]
        outcomes = self.evaluate(tasks, (lambda *_: on_done()) if on_done else None)
        for kind, ladder in self.ladders.items():
            told = [(one[1], out.verdict) for one, out in zip(asked, outcomes, strict=True) if one[0] == kind]
            ladder.tell([probe for probe, _ in told], [verdict for _, verdict in told])
        for (kind, probe), outcome in zip(asked, outcomes, strict=True):
            if probe.rung == self.ladders[kind].low[probe.search]:
                self.best[kind, probe.search] = outcome
        if not self.rounds:
            self._start_loads(asked, outcomes)
        self.rounds += 1
        self.simulations += len(outcomes)

    def _task(self, kind: str, probe: Probe) -> Task:
        candidate, seed = divmod(probe.search, len(self.seeds))
        value = self.ladders[kind].rungs[probe.rung]
        load_rps, clients = (float(value), None) if kind == "load" else (None, int(value))
        return Task(self.candidates[candidate], self.seeds[seed], load_rps, clients, self.count)

    def _start_loads(self, asked: Sequence[tuple[str, Probe]], outcomes: Sequence[Outcome]) -> None:
        guesses = np.zeros(len(self.candidates) * len(self.seeds))
        for (_, probe), (_, figures) in zip(asked, outcomes, strict=True):
            duration_s = figures["duration_s"]
            rate_rps = figures["num_prompts"] / duration_s if duration_s > 0 else LOWEST_RPS
            guesses[probe.search] = max(guesses[probe.search], SLO_SHARE * rate_rps)
        if self.search.load:
            lowest = max(LOWEST_RPS, self.count / LONGEST_RUN_S)
            rungs = load_ladder(lowest, HIGHEST_RPS, self.search.step)
            self.ladders["load"] = Ladder(rungs, guesses.tolist())
        if not self.search.concurrency:
            del self.ladders["clients"]

    def found(self, kind: str, candidate: int) -> Found | None:
        """The state of the search "load" or "clients" of one candidate; None if it is not searched."""
        ladder = self.ladders.get(kind)
        if ladder is None:
            return None
        seeds = len(self.seeds)
        mine = slice(candidate * seeds, (candidate + 1) * seeds)
        values = ladder.values()[mine]
        return Found(
            values=values,
            interval=t_interval(values),
            finished=not ladder.open[mine].any(),
            capped=bool(ladder.capped[mine].any()),
            reason=next((reason for reason in ladder.reason[mine] if reason), ""),
            lowest=float(ladder.rungs[0]),
            outcomes=[self.best[kind, index] for index in range(mine.start, mine.stop) if (kind, index) in self.best],
        )


class Choice(NamedTuple):
    best: Candidate
    largest: Candidate  # the largest mean; another one than `best` where the two are tied


def choose(values: Mapping[Candidate, np.ndarray]) -> Choice | None:
    """The setting with the largest mean over seeds, or one tied with it; None if all are 0.

    `values` are [S] per setting, seeds paired. Settings whose paired 95 % interval to the largest holds 0 are ties, and
    the smallest max_num_seqs among them is taken; then the larger mean. Below 3 seeds the interval says nothing (of two
    it is 12.7 standard errors wide) and the largest is taken.
    """
    if not values or max(value.mean() for value in values.values()) <= 0:
        return None
    largest = max(values, key=lambda one: (values[one].mean(), -one.max_num_seqs, -one.max_num_batched_tokens))
    ties = [largest]
    for candidate, value in values.items() if len(values[largest]) >= TIE_SEEDS else ():
        difference = paired_interval(values[largest], value)
        if value.mean() > 0 and difference.mean <= difference.half_width:
            ties.append(candidate)
    smallest = min(ties, key=lambda one: (one.max_num_seqs, -values[one].mean(), one.max_num_batched_tokens))
    return Choice(smallest, largest)
