"""How often the interval of a capacity holds the true one: the table of docs/confidence.md.

    python benchmarks/intervals.py [--repetitions 200] [--seeds 10] [--requests 2000] [--only NAME]

Each case has a capacity that is known: of a queue with one server, Poisson arrivals and exponential service from a
formula (`SingleServer`); of a setting of the real engine from 25 seeds of 40,000 requests. The search of the main job
is repeated with other seeds every time, all repetitions side by side. A 95 % interval should hold the truth in 90 to
99 % of them. The lines "each seed alone" show the mean of the seeds' own capacities with its t interval instead.
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console

from jaxsim.composition import defaults
from jaxsim.metrics import growth, is_growing, t_interval
from jaxsim.settings import SearchSettings, SloSettings
from jaxsim.studies.job import Job
from jaxsim.tuning.capacity import CapacitySearch
from jaxsim.tuning.evaluate import Evaluate, OnDone, Outcome, Simulator, Task
from jaxsim.tuning.load import Verdict
from jaxsim.tuning.pooled import crossing, decisive
from jaxsim.tuning.slo import limits
from jaxsim.tuning.space import Candidate

PS_PER_S = 10**12
TRUTH_SEEDS, TRUTH_REQUESTS, TRUTH_FIRST = 25, 40_000, 10_000_000
SINGLE_SERVER = {
    "single server, capacity 0.5": 0.5,
    "single server, capacity 0.8": 0.8,
    "single server, capacity 0.9": 0.9,
}
ENGINE = {
    "engine, p99 TTFT 200 ms": ["slo.ttft_ms=200"],
    "engine, p99 TTFT 400 ms": ["slo.ttft_ms=400"],
    "engine, mean TPOT 11 ms": ["slo.ttft_ms=null", "slo.limits={mean_tpot_ms:11}"],
}


@dataclasses.dataclass(frozen=True)
class SingleServer:
    """Simulations of a queue with one server that needs 1 s a request on the average, as an `Evaluate`.

    P(wait > x) = load * exp(-(1 - load) * x) (M/M/1: Kleinrock, Queueing Systems I, 5.12): at the load `capacity` the
    p99 of the wait, which is the TTFT here, is `limit_ms`.
    """

    capacity: float
    first_seed: int = 0

    @property
    def limit_ms(self) -> float:
        return 1000 * math.log(self.capacity / 0.01) / (1 - self.capacity)

    @property
    def slo(self) -> SloSettings:
        return SloSettings(ttft_ms=self.limit_ms)

    def __call__(self, tasks: Sequence[Task], on_done: OnDone | None = None) -> list[Outcome]:
        return [self.outcome(task.seed, float(task.load_rps or 0), int(task.count or 0)) for task in tasks]

    def outcome(self, seed: int, load_rps: float, count: int) -> Outcome:
        """A run; more requests begin with the same ones."""
        arrivals, services = (np.random.default_rng((self.first_seed + seed, stream)) for stream in (0, 1))
        arrival = np.cumsum(arrivals.exponential(1 / load_rps, count))
        service = services.exponential(1.0, count)
        # Lindley's recursion as a walk above its own minimum.
        walk = np.concatenate([[0.0], np.cumsum(service[:-1] - np.diff(arrival))])
        wait = walk - np.minimum.accumulate(walk)
        start = np.rint((arrival + wait) * PS_PER_S)
        run = SimpleNamespace(
            arrival_ps=np.rint(arrival * PS_PER_S), first_scheduled_ps=start, finish_ps=start + service * PS_PER_S
        )
        trend, kept = growth(run), wait[count // 10 :]
        figures = {
            "failed": 0,
            "share_above_p99_ttft_ms": float(np.mean(1000 * kept > self.limit_ms)),
            "stable": float(not is_growing(run)),
            "growing": float(trend.clear),
            "growth_share": trend.share,
            "num_prompts": count,
            "rejected": 0,
            "duration_s": float((arrival + wait + service)[-1] - arrival[0]),
        }
        return Outcome(Verdict(None if trend.clear else True, "growing" if trend.clear else ""), figures)


@dataclasses.dataclass(frozen=True)
class Repeated:
    """The same setting as many candidates, each with seeds of its own: an `Evaluate` over repetitions."""

    evaluate: Evaluate
    candidates: Sequence[Candidate]
    seeds: int

    def __call__(self, tasks: Sequence[Task], on_done: OnDone | None = None) -> list[Outcome]:
        place = {id(candidate): index for index, candidate in enumerate(self.candidates)}
        return self.evaluate(
            [task._replace(seed=place[id(task.candidate)] * self.seeds + task.seed) for task in tasks], on_done
        )


def repeat(
    one: Candidate, evaluate: Evaluate, slo: SloSettings, guess: float, repetitions: int, seeds: int, requests: int
) -> CapacitySearch:
    """The search, done; its candidates are the repetitions."""
    candidates = [dataclasses.replace(one) for _ in range(repetitions)]
    search = CapacitySearch(
        candidates,
        range(seeds),
        requests,
        SearchSettings(concurrency=False, seeds=seeds),
        slo,
        Repeated(evaluate, candidates, seeds),
        guesses={"load": [guess] * repetitions},
    )
    while not search.done:
        search.round()
    return search


def row(name: str, truth: float, means: np.ndarray, halves: np.ndarray, runs: float) -> str:
    """A line of the table."""
    inside, above = abs(means - truth) <= halves, means - halves > truth
    parts = [f"{truth:.4g}", f"{means.mean() / truth - 1:+.1%}", f"{means.std() / truth:.1%}"]
    parts += [f"{halves.mean() / truth:.1%}", f"{inside.mean():.1%}", f"{above.mean():.1%}", f"{runs:.0f}"]
    return f"| {name} | {' | '.join(parts)} |"


def report(name: str, truth: float, guess: float, make: Callable[[], Any], options: argparse.Namespace) -> None:
    """Prints the line of a case, and that of its seeds taken one by one."""
    one, evaluate, slo = make()
    search = repeat(one, evaluate, slo, guess, options.repetitions, options.seeds, options.requests)
    found = [search.found("load", index) for index in range(options.repetitions)]
    means, halves = np.array([item.interval for item in found if item is not None]).T
    print(row(name, truth, means, halves, search.simulations / options.repetitions), flush=True)
    if isinstance(evaluate, SingleServer):
        alone = repeat(one, evaluate, slo, guess, options.repetitions * options.seeds, 1, options.requests)
        values = alone.ladders["load"].values().reshape(options.repetitions, options.seeds)
        means, halves = np.array([t_interval(value) for value in values]).T
        runs = alone.simulations / options.repetitions
        print(row(f"{name}, each seed alone", truth, means, halves, runs), flush=True)


def engine_case(words: Sequence[str]) -> tuple[Candidate, Simulator, SloSettings]:
    """The setting max_num_seqs=32, max_num_batched_tokens=4096 of the main job's defaults."""
    settings = defaults(["+sweep=slo_search", "search.seeds=1", *words])
    job = Job.of(settings, Path("."), Console())
    one = dataclasses.replace(job.server.candidate(32, 4096), cost=job.server.cost(4096, 32))
    return one, Simulator(job.replicates, job.slo, job.search, 64), job.slo


def engine_truth(one: Candidate, evaluate: Simulator, slo: SloSettings, near: float) -> float:
    """The capacity in long runs, from loads around `near`."""
    loads, figures = near * np.linspace(0.85, 1.15, 4), []
    for load in loads:
        tasks = [Task(one, TRUTH_FIRST + seed, load, None, TRUTH_REQUESTS) for seed in range(TRUTH_SEEDS)]
        figures.append(decisive(evaluate(tasks), limits(slo)))
    allowed = [limit.allowed for limit in limits(slo)]
    passed = np.flatnonzero((np.mean(figures, axis=1)[:, : len(allowed)] <= allowed).all(axis=1))
    return crossing(loads, np.stack(figures), limits(slo), int(passed[-1]), 0.95).interval.mean


def main() -> None:
    parser = argparse.ArgumentParser(description="How often the interval of a capacity holds the true one.")
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    start = time.monotonic()
    print("| case | capacity | bias | spread | half width | holds it | all above | runs |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, capacity in SINGLE_SERVER.items():
        if options.only in name:
            server = SingleServer(capacity)
            one = Candidate({"max_num_seqs": 1, "max_num_batched_tokens": 1}, None, None)
            report(name, capacity, 1.05 * capacity, lambda server=server, one=one: (one, server, server.slo), options)
    for name, words in ENGINE.items():
        if options.only in name:
            one, evaluate, slo = engine_case(words)
            pilot = repeat(one, evaluate, slo, 5.0, 1, 40, options.requests).found("load", 0)
            assert pilot is not None
            truth = engine_truth(one, evaluate, slo, pilot.interval.mean)
            report(name, truth, truth, lambda one=one, evaluate=evaluate, slo=slo: (one, evaluate, slo), options)
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
