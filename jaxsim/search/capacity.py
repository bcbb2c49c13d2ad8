"""The largest load and the largest concurrency of every setting that meet the SLO, and the best setting."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxsim.metrics import Interval, paired_interval
from jaxsim.search.evaluate import Evaluate, Outcome, Task
from jaxsim.search.load import NEAR_STRIDE, STRIDE, Ladder, Probe, Verdict, integer_ladder, load_ladder
from jaxsim.search.pooled import Crossing, crossing, decisive, verdict
from jaxsim.search.slo import limits
from jaxsim.search.space import Candidate
from jaxsim.settings import SearchSettings, SloSettings

LOWEST_RPS, HIGHEST_RPS = 0.01, 1e5
LONGEST_RUN_S = 1e6  # keeps the int64 picosecond clock far from its end
TIE_SEEDS = 3  # at least, for an interval to make a tie
SLO_SHARE = 0.7  # of the saturated throughput: the first guess of the load that meets an SLO
EXTENSION = 8  # times as many requests as asked for, at most, where search.max_num_requests is null
EVENTS = 10  # jams that a missed share should rest on, at least
LOOKS = 4  # rounds spent on the ends of an interval, at most
NEAR_SHARE = 4  # of the distance from the capacity to an end: a gap between two values around the end may be as wide


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

    @property
    def known(self) -> bool:
        """Whether there is a value: nothing was said yet about a search that an interruption cut off early."""
        return self.finished or bool(self.outcomes)


class _State:
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

    def extend(self, candidate: int, guess: float) -> None:
        """Starts over with runs twice as long, near the answer of the shorter ones."""
        self.counts[candidate] *= 2
        self.figures[candidate], self.verdicts[candidate] = {}, {}
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
        for end, guess in ((place(found.low), place(found.look)), (reach, reach)):
            below = max((rung for rung in tried if rung < end), default=-1)
            above = min((rung for rung in tried if rung >= end), default=len(rungs))
            if above - below > max(NEAR_STRIDE, abs(end - centre) // NEAR_SHARE):
                wanted.add(min(max(guess, below + 1), above - 1))
        if self.in_doubt(candidate):
            high, failed = int(self.ladder.high[candidate]), self.failed(candidate)
            further = high + STRIDE if failed == len(rungs) - 1 else (high + failed) // 2
            wanted |= {further} - {high, *tried}
        return wanted


class CapacitySearch:
    """The searches of all candidates side by side: each round is one call of `evaluate` with all that is still open.

    Every value is tried under all seeds, and their runs together pass or fail (`jaxsim.search.pooled`). When a search
    has closed in on its answer, but the next value is undecided or the missed share rests on a few jams, it is
    repeated with runs twice as long, up to `search.max_num_requests`; so it is, after a look at the ends of the
    interval, if that is wider than `search.precision`. What stays undecided belongs to the interval.
    In the shapes, `C` is the number of candidates, `S` of seeds.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        seeds: Sequence[int],  # their places among the replicates
        count: int,  # requests of a simulation, at first
        search: SearchSettings,
        slo: SloSettings,
        evaluate: Evaluate,
        guesses: Mapping[str, Sequence[float]] | None = None,  # [C] by kind, from an earlier search
        drawable: Callable[[int], bool] = lambda count: True,  # whether there are runs of so many requests
    ):
        self.candidates, self.seeds, self.count = candidates, seeds, count
        self.search, self.evaluate, self.limits = search, evaluate, limits(slo)
        self.most = max(count, search.max_num_requests or EXTENSION * count)
        self.drawable = drawable
        self.rounds = self.simulations = 0
        # Simulations of a full round; later ones probe what is still open at several values to keep the lanes busy.
        self.width = 2 * len(candidates) * len(seeds)
        self.states: dict[str, _State] = {}
        guesses = guesses or {}
        if search.concurrency or (search.load and "load" not in guesses):
            rungs = integer_ladder(max(1, count // 2), search.step)
            start = guesses.get("clients", [candidate.max_num_seqs for candidate in candidates])
            self.states["clients"] = _State(rungs, start, "clients" in guesses, count)
        if search.load and "load" in guesses:
            self._start_loads(guesses["load"], near=True)

    @property
    def ladders(self) -> dict[str, Ladder]:
        return {kind: state.ladder for kind, state in self.states.items()}

    @property
    def done(self) -> bool:
        return self.rounds > 0 and all(all(state.finished) for state in self.states.values())

    def remaining(self) -> int:
        """About how many simulations are still to come."""
        expected = sum(ladder.remaining() for ladder in self.ladders.values())
        expected += sum(len(wanted) for state in self.states.values() for wanted in state.wanted)
        unborn = 8 * len(self.candidates) if self.search.load and "load" not in self.states else 0
        return len(self.seeds) * (expected + unborn)

    def round(self, on_done: Callable[[], None] | None = None) -> None:
        """One round. Without guesses the first has closed loops only: their throughput is the guess for the load."""
        still_open = sum(int(ladder.open.sum()) for ladder in self.ladders.values())
        each = max(1, self.width // max(1, still_open * len(self.seeds)))
        asked = [(kind, probe) for kind, state in self.states.items() for probe in self._probes(state, each)]
        tasks = [self._task(kind, probe, seed) for kind, probe in asked for seed in self.seeds]
        outcomes = self.evaluate(tasks, (lambda *_: on_done()) if on_done else None)
        runs = [outcomes[start : start + len(self.seeds)] for start in range(0, len(outcomes), len(self.seeds))]
        for kind, state in self.states.items():
            self._tell(state, [(probe, run) for (one, probe), run in zip(asked, runs, strict=True) if one == kind])
        if self.search.load and "load" not in self.states:
            self._start_loads([SLO_SHARE * rate for rate in self.states["clients"].throughput_rps])
        if not self.search.concurrency:
            self.states.pop("clients", None)
        self.rounds += 1
        self.simulations += len(outcomes)

    def _probes(self, state: _State, each: int) -> list[Probe]:
        probes = state.ladder.ask(each)
        for candidate, wanted in enumerate(state.wanted):
            probes += [Probe(candidate, rung) for rung in sorted(wanted)]
        return probes

    def _task(self, kind: str, probe: Probe, seed: int) -> Task:
        state, value = self.states[kind], float(self.states[kind].ladder.rungs[probe.rung])
        load_rps, clients = (value, None) if kind == "load" else (None, int(value))
        return Task(self.candidates[probe.search], seed, load_rps, clients, state.counts[probe.search])

    def _tell(self, state: _State, told: Sequence[tuple[Probe, list[Outcome]]]) -> None:
        verdicts = [verdict(runs, self.limits) for _, runs in told]
        for ((candidate, rung), runs), said in zip(told, verdicts, strict=True):
            state.figures[candidate][rung] = decisive(runs, self.limits)
            state.verdicts[candidate][rung] = said
            state.wanted[candidate].discard(rung)
            rate = float(np.mean([row["num_prompts"] / max(row["duration_s"], 1e-9) for _, row in runs]))
            state.throughput_rps[candidate] = max(state.throughput_rps[candidate], rate)
        state.ladder.tell([probe for probe, _ in told], verdicts)
        for (candidate, rung), runs in told:
            if rung == state.ladder.low[candidate]:
                state.best[candidate] = rung, runs
        for candidate in range(len(self.candidates)):
            if not state.finished[candidate] and not state.ladder.open[candidate]:
                self._close(state, candidate)

    def _close(self, state: _State, candidate: int) -> None:
        """Looks further, extends, or ends the search of a candidate whose capacity lies between two neighbours."""
        low = int(state.ladder.low[candidate])
        if state.best[candidate][0] != low >= 0:  # what had passed above it was overtaken by a failure below
            state.wanted[candidate] = {low}
            return
        found = self._crossing(state, candidate)
        guess = found.interval.mean if found else float(state.ladder.rungs[0])
        longer = 2 * state.counts[candidate]
        can_extend = longer <= self.most and self.drawable(longer)
        seldom = found is not None and found.events < EVENTS
        if (state.in_doubt(candidate) or seldom) and can_extend:
            state.extend(candidate, guess)
            return
        if found is not None and state.looks[candidate] < LOOKS and len(self.seeds) > 1:
            state.looks[candidate] += 1
            state.wanted[candidate] = state.ends(candidate, found)
            if state.wanted[candidate]:
                return
        if self._wide(found) and can_extend:
            state.extend(candidate, guess)
        else:
            state.finished[candidate] = True

    def _crossing(self, state: _State, candidate: int) -> Crossing | None:
        rungs, low = sorted(state.figures[candidate]), int(state.ladder.low[candidate])
        if low < 0:
            return None
        figures = np.stack([state.figures[candidate][rung] for rung in rungs])
        loads, passed = state.ladder.rungs[rungs], rungs.index(low)
        whole = state is self.states.get("clients")
        found = crossing(loads, figures, self.limits, passed, self.search.confidence, whole)
        if not state.in_doubt(candidate):
            return found
        mean, half_width = found.interval
        half_width = max(half_width, state.ladder.rungs[state.failed(candidate)] - mean)
        return found._replace(interval=Interval(mean, half_width))

    def _wide(self, found: Crossing | None) -> str:
        """Says that the interval is wider than asked for; empty if it is not."""
        if self.search.precision is None or found is None or len(self.seeds) == 1:
            return ""
        relative = found.interval.half_width / found.interval.mean if found.interval.mean > 0 else math.inf
        wide = f"undecided: ± {relative:.2g} of the value is wider than search.precision={self.search.precision:g}"
        return wide if relative > self.search.precision else ""

    def _start_loads(self, guesses: Sequence[float], near: bool = False) -> None:
        lowest = max(LOWEST_RPS, self.most / LONGEST_RUN_S)
        rungs = load_ladder(lowest, HIGHEST_RPS, self.search.step)
        self.states["load"] = _State(rungs, guesses, near, self.count)

    def found(self, kind: str, candidate: int) -> Found | None:
        """The state of the search "load" or "clients" of one candidate; None if it is not searched."""
        state = self.states.get(kind)
        if state is None:
            return None
        ladder, crossing = state.ladder, self._crossing(state, candidate)
        high = int(ladder.high[candidate])
        above = sorted(rung for rung in ladder.passed[candidate] if rung > high)[-1:]
        in_doubt = state.finished[candidate] and state.in_doubt(candidate)
        notes = [f"{ladder.rungs[rung]:.4g} passed although {ladder.rungs[high]:.4g} did not" for rung in above]
        if in_doubt:
            text = f"{ladder.reason[candidate]}, in runs of {state.counts[candidate]}"
            notes.append(f"{ladder.rungs[high]:.4g} is {text}")
        undecided = ladder.reason[candidate] if in_doubt and crossing is None else self._wide(crossing)
        return Found(
            values=crossing.values if crossing else np.zeros(len(self.seeds)),
            interval=crossing.interval if crossing else Interval(0.0, 0.0),
            finished=state.finished[candidate],
            capped=bool(ladder.capped[candidate]),
            reason=ladder.reason[candidate],
            undecided=undecided if state.finished[candidate] else "",
            note="; ".join(notes),
            lowest=float(ladder.rungs[0]),
            count=state.counts[candidate],
            outcomes=state.best[candidate][1],
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
