"""The largest load and the largest concurrency of every setting that meet the SLO, and the best setting."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxsim.metrics import Interval, paired_interval
from jaxsim.settings import SearchSettings, SloSettings
from jaxsim.tuning.evaluate import Evaluate, Outcome, Task
from jaxsim.tuning.load import Ladder, Probe, integer_ladder, load_ladder
from jaxsim.tuning.pooled import FEW_SEEDS, Crossing, crossing, decisive, verdict
from jaxsim.tuning.slo import limits
from jaxsim.tuning.space import Candidate
from jaxsim.tuning.state import Found, State

LOWEST_RPS, HIGHEST_RPS = 0.01, 1e5
LONGEST_RUN_S = 1e6  # keeps the int64 picosecond clock far from its end
TIE_SEEDS = 3  # at least, for an interval to make a tie
SLO_SHARE = 0.7  # of the saturated throughput: the first guess of the load that meets an SLO
EXTENSION = 8  # times as many requests as asked for, at most, where search.max_num_requests is null
EVENTS = 10  # jams that a missed share should rest on, at least
AT_ONCE = 1 << 14  # simulations whose figures, 6 KB each, are held together until the search has entered them
FULL = 0.8  # of the blocks in use: with more clients requests are preempted again and again
LOOKS = 2  # rounds spent on the ends of an interval, at most


class CapacitySearch:
    """The searches of all candidates side by side: each round is one call of `evaluate` with all that is still open.

    Every value is tried under all seeds, and their runs together pass or fail (`jaxsim.tuning.pooled`). When a search
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
        before: Sequence[Mapping[str, Found]] | None = None,  # [C], what was found under the first seeds, by kind
        drawable: Callable[[int], bool] = lambda count: True,  # whether there are runs of so many requests
        request_tokens: float = 1.0,  # prompt and output of a request, mean
    ):
        self.candidates, self.seeds, self.count = candidates, seeds, count
        self.search, self.evaluate, self.limits = search, evaluate, limits(slo)
        self.most = max(count, search.max_num_requests or EXTENSION * count)
        self.drawable = drawable
        self.rounds = self.simulations = self.computed = 0
        # Simulations of a full round; later ones probe what is still open at several values to keep the lanes busy.
        self.width = 2 * len(candidates) * len(seeds)
        self.states: dict[str, State] = {}
        guesses = dict(guesses or {})
        for kind in before[0] if before else ():
            guesses[kind] = [found[kind].interval.mean for found in before or ()]
        if search.concurrency or (search.load and "load" not in guesses):
            rungs = integer_ladder(max(1, count // 2), search.step)
            start = guesses.get("clients", [full(candidate, request_tokens) for candidate in candidates])
            self.states["clients"] = State(rungs, start, "clients" in guesses, count)
        if search.load and "load" in guesses:
            self._start_loads(guesses["load"], near=True)
        for kind, state in self.states.items():
            if before and kind in before[0]:
                state.resume([found[kind] for found in before])

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
        asked = [(state, probe) for state in self.states.values() for probe in state.probes(each)]
        told: dict[int, dict[Probe, list[Outcome] | None]] = {id(state): {} for state in self.states.values()}
        batch = max(1, AT_ONCE // len(self.seeds))
        for some in (asked[first : first + batch] for first in range(0, len(asked), batch)):
            seeds = [self.seeds[state.known_seeds(probe) :] for state, probe in some]
            tasks = [self._task(*one, seed) for one, mine in zip(some, seeds, strict=True) for seed in mine]
            outcomes = self.evaluate(tasks, (lambda *_: on_done()) if on_done else None)
            self.simulations += len(tasks)
            self.computed += sum(outcome.computed for outcome in outcomes)
            rest = iter(outcomes)
            for (state, probe), mine in zip(some, seeds, strict=True):
                told[id(state)][probe] = self._enter(state, probe, list(itertools.islice(rest, len(mine))))
        for state in self.states.values():
            self._tell(state, told[id(state)])
        if self.search.load and "load" not in self.states:
            self._start_loads([SLO_SHARE * rate for rate in self.states["clients"].throughput_rps])
        if not self.search.concurrency:
            self.states.pop("clients", None)
        self.rounds += 1

    def _task(self, state: State, probe: Probe, seed: int) -> Task:
        value = float(state.ladder.rungs[probe.rung])
        load_rps, clients = (None, int(value)) if state is self.states.get("clients") else (value, None)
        return Task(self.candidates[probe.search], seed, load_rps, clients, state.counts[probe.search])

    def _enter(self, state: State, probe: Probe, runs: list[Outcome]) -> list[Outcome] | None:
        """Enters what is needed of runs at one value; the runs of all seeds if they are at hand and passed together."""
        candidate, rung = probe
        together = state.joined(probe, runs, decisive(runs, self.limits))
        said = state.verdicts[candidate][rung] = verdict(state.figures[candidate][rung], self.limits)
        state.wanted[candidate].discard(rung)
        rows = [outcome.figures for outcome in runs]
        rates = [(row["num_prompts"] - row["rejected"]) / max(row["duration_s"], 1e-9) for row in rows]
        rate = float(np.mean(rates)) * self.candidates[candidate].instances
        state.throughput_rps[candidate] = max(state.throughput_rps[candidate], rate)
        return together if said.passed else None

    def _tell(self, state: State, together: Mapping[Probe, list[Outcome] | None]) -> None:
        state.ladder.tell([*together], [state.verdicts[candidate][rung] for candidate, rung in together])
        for (candidate, rung), runs in together.items():
            if rung == state.ladder.low[candidate] and runs is not None:
                state.best[candidate] = rung, runs
        for candidate in range(len(self.candidates)):
            if not state.finished[candidate] and not state.ladder.open[candidate]:
                self._close(state, candidate)

    def _close(self, state: State, candidate: int) -> None:
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
        if found is not None and state.looks[candidate] < LOOKS and len(self.seeds) >= FEW_SEEDS:
            state.looks[candidate] += 1
            state.wanted[candidate] = state.ends(candidate, found)
            if state.wanted[candidate]:
                return
        if self._wide(found) and can_extend:
            state.extend(candidate, guess)
        else:
            state.finished[candidate] = True

    def _crossing(self, state: State, candidate: int) -> Crossing | None:
        if candidate not in state.crossings:
            state.crossings[candidate] = self._cross(state, candidate)
        return state.crossings[candidate]

    def _cross(self, state: State, candidate: int) -> Crossing | None:
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
        self.states["load"] = State(rungs, guesses, near, self.count)

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
            tried=state.figures[candidate],
            best=int(ladder.low[candidate]),
        )


def full(candidate: Candidate, request_tokens: float) -> int:
    """About how many clients fill a server: its seats or, if that is fewer, its blocks."""
    room = math.inf if candidate.capacity is None else FULL * candidate.capacity.tokens / request_tokens
    return max(1, math.floor(min(candidate.max_num_seqs, room)))


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
