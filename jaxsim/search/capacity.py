"""The largest load and the largest concurrency of every setting and seed that meet the SLO, and the best setting."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxsim.engine import Simulation
from jaxsim.metrics import Interval, paired_interval, t_interval
from jaxsim.search.evaluate import Replicates, Simulate, judge, warmup_share
from jaxsim.search.load import Ladder, Probe, Verdict, integer_ladder, load_ladder
from jaxsim.search.space import Candidate
from jaxsim.settings import SearchSettings, SloSettings

LOWEST_RPS, HIGHEST_RPS = 0.01, 1e5
LONGEST_RUN_S = 1e6  # keeps the int64 picosecond clock far from its end
SLO_SHARE = 0.7  # of the saturated throughput: the first guess of the load that meets an SLO


class Found(NamedTuple):
    """What the search knows about one setting."""

    values: np.ndarray  # [S], highest passing value of each seed, 0 where none passed
    interval: Interval
    finished: bool  # nothing left to try
    capped: bool  # the highest value on the ladder passed, in some seed
    reason: str  # why the next value failed; of the first seed
    lowest: float  # the lowest value on the ladder
    runs: list[Simulation]  # of the passing values, at most one per seed


class CapacitySearch:
    """All searches side by side: each round is one call of `simulate` over everything that is still open.

    In the shapes, `C` is the number of candidates, `S` of seeds; search `c * S + s` is candidate c under seed s.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        replicates: Replicates,
        cost: Any,
        slo: SloSettings,
        search: SearchSettings,
        simulate: Simulate,
    ):
        self.candidates, self.replicates, self.cost = candidates, replicates, cost
        self.slo, self.search, self.simulate = slo, search, simulate
        self.rounds = self.simulations = 0
        # Simulations of a full round; later ones probe what is still open at several values to keep the lanes busy.
        self.width = 2 * len(candidates) * len(replicates.requests)
        self.best: dict[tuple[str, int], Simulation] = {}  # run of the highest passing value
        self.seats = integer_ladder(max(1, replicates.count // 2), search.step)
        guesses = [candidate.max_num_seqs for candidate in candidates for _ in replicates.requests]
        self.ladders: dict[str, Ladder] = {"clients": Ladder(self.seats, guesses)}

    @property
    def done(self) -> bool:
        return self.rounds > 0 and all(ladder.done for ladder in self.ladders.values())

    def remaining(self) -> int:
        """About how many simulations are still to come."""
        searches = len(self.candidates) * len(self.replicates.requests)
        expected = sum(ladder.remaining() for ladder in self.ladders.values())
        return expected + (8 * searches if self.search.load and not self.rounds else 0)

    def round(self, on_done: Callable[[], None] | None = None) -> None:
        """One round. The first has closed loops only: their throughput is the guess for the load."""
        each = max(1, self.width // max(1, sum(int(ladder.open.sum()) for ladder in self.ladders.values())))
        asked = [(kind, probe) for kind, ladder in self.ladders.items() for probe in ladder.ask(each)]
        verdicts: dict[str, list[tuple[Probe, Verdict]]] = {kind: [] for kind in self.ladders}
        runs = self._simulate(asked, on_done)
        for (kind, probe), run in zip(asked, runs, strict=True):
            clients = int(self.seats[probe.rung]) if kind == "clients" else None
            warmup = warmup_share(self.search.warmup, clients, self.replicates.count)
            verdicts[kind].append((probe, judge(run, self.slo, warmup)))
        for kind, told in verdicts.items():
            self.ladders[kind].tell([probe for probe, _ in told], [verdict for _, verdict in told])
        for (kind, probe), run in zip(asked, runs, strict=True):
            if probe.rung == self.ladders[kind].low[probe.search]:
                self.best[kind, probe.search] = run
        if not self.rounds:
            self._start_loads(asked, runs)
        self.rounds += 1
        self.simulations += len(runs)

    def _simulate(self, asked: Sequence[tuple[str, Probe]], on_done: Callable[[], None] | None) -> list[Simulation]:
        seeds = len(self.replicates.requests)
        loads = self.ladders["load"].rungs if "load" in self.ladders else np.ones(1)
        return self.simulate(
            [self.replicates.requests[probe.search % seeds] for _, probe in asked],
            [self.candidates[probe.search // seeds].engine for _, probe in asked],
            self.cost,
            clients=[int(self.seats[probe.rung]) if kind == "clients" else None for kind, probe in asked],
            stretch=[
                self.replicates.stretch(probe.search % seeds, loads[probe.rung]) if kind == "load" else 1.0
                for kind, probe in asked
            ],
            think_time_s=self.search.think_time_s,
            on_done=(lambda index, run: on_done()) if on_done else None,
        )

    def _start_loads(self, asked: Sequence[tuple[str, Probe]], runs: Sequence[Simulation]) -> None:
        guesses = np.zeros(len(self.candidates) * len(self.replicates.requests))
        for (_, probe), run in zip(asked, runs, strict=True):
            duration_s = run.totals.duration_s
            rate_rps = len(run.prompt_len) / duration_s if duration_s > 0 else LOWEST_RPS
            guesses[probe.search] = max(guesses[probe.search], SLO_SHARE * rate_rps)
        if self.search.load:
            lowest = max(LOWEST_RPS, self.replicates.count / LONGEST_RUN_S)
            rungs = load_ladder(lowest, HIGHEST_RPS, self.search.step)
            self.ladders["load"] = Ladder(rungs, guesses.tolist())
        if not self.search.concurrency:
            del self.ladders["clients"]

    def found(self, kind: str, candidate: int) -> Found | None:
        """The state of the search "load" or "clients" of one candidate; None if it is not searched."""
        ladder = self.ladders.get(kind)
        if ladder is None:
            return None
        seeds = len(self.replicates.requests)
        mine = slice(candidate * seeds, (candidate + 1) * seeds)
        values = ladder.values()[mine]
        return Found(
            values=values,
            interval=t_interval(values),
            finished=not ladder.open[mine].any(),
            capped=bool(ladder.capped[mine].any()),
            reason=next((reason for reason in ladder.reason[mine] if reason), ""),
            lowest=float(ladder.rungs[0]),
            runs=[self.best[kind, index] for index in range(mine.start, mine.stop) if (kind, index) in self.best],
        )


def choose(values: Mapping[tuple[int, int], np.ndarray]) -> tuple[int, int] | None:
    """The setting (max_num_seqs, max_num_batched_tokens) with the largest mean over seeds; None if all are 0.

    `values` are [S] per setting, seeds paired. Settings whose paired 95 % interval to the largest holds 0 are ties, and
    the smallest max_num_seqs among them is taken; then the larger mean.
    """
    if not values or max(value.mean() for value in values.values()) <= 0:
        return None
    largest = max(values, key=lambda key: (values[key].mean(), -key[0], -key[1]))
    ties = [largest]
    for key, value in values.items():
        difference = paired_interval(values[largest], value)
        half = 0.0 if math.isnan(difference.half_width) else difference.half_width
        if value.mean() > 0 and difference.mean <= half:
            ties.append(key)
    return min(ties, key=lambda key: (key[0], -values[key].mean(), key[1]))
