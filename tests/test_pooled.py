"""Runs of all seeds together: the verdict, the capacity and its interval, on queues whose capacity is known."""

import math
from typing import Any

import numpy as np
import pytest
from random_cases import Priced

from benchmarks.intervals import SingleServer, repeat
from jaxsim.engine import CostTable, EngineConfig, Requests
from jaxsim.settings import SearchSettings, SloSettings
from jaxsim.tuning.capacity import CapacitySearch
from jaxsim.tuning.evaluate import Outcome, Simulator, Task
from jaxsim.tuning.load import Verdict
from jaxsim.tuning.pooled import crossing, decisive, verdict
from jaxsim.tuning.replicates import Replicates
from jaxsim.tuning.slo import Limit
from jaxsim.tuning.space import Candidate

P99 = Limit("p99_ttft_ms", 200.0, "ttft", 99.0)
ONE = Candidate({"max_num_seqs": 1, "max_num_batched_tokens": 1}, None, None)


def runs(shares: Any, growth: Any = 0.0, stable: Any = 1.0, growing: Any = 0.0, failed: Any = 0.0) -> np.ndarray:
    """Figures [S, 5] of runs with these shares of requests above the limit."""
    rest = np.broadcast_arrays(failed, stable, growing, growth, np.asarray(shares, float))[:4]
    return np.stack([np.asarray(shares, float), *rest], axis=1)


def test_the_runs_of_all_seeds_pass_or_fail_together():
    assert verdict(runs([0.0, 0.0, 0.03]), [P99]) == Verdict(True, "")  # one seed alone would fail
    failed = verdict(runs([0.01, 0.0, 0.03]), [P99])
    assert failed == Verdict(False, "p99 TTFT above 200 ms: 1.33% of the requests are, 0.01 may")
    assert verdict(runs([0, 0], failed=[0, 2]), [P99]).reason == "2 requests never finished"
    grows = verdict(runs(np.zeros(3), stable=[0, 0, 1]), [P99])
    assert grows == Verdict(False, "the waiting queue grows in 2 of 3 runs")
    assert verdict(runs(np.zeros(3), stable=[0, 1, 1]), [P99]).passed


def test_growth_beyond_chance_is_undecided():
    def said(growth, **more):
        return verdict(runs(np.zeros(len(growth)), growth, **more), [P99]).passed

    assert said([0.02, 0.01, 0.015, 0.02, 0.01]) is None
    assert said([0.02, -0.015, 0.01, -0.01, 0.015]) is True  # mean 0.4 %, standard error 0.7 %
    assert said([0.004, 0.003, 0.004, 0.003, 0.004]) is True  # less than the step between two loads
    assert said([0.08, -0.07, 0.04, -0.04, 0.03]) is None  # mean 0.8 %, but 3 % cannot be excluded
    assert said([0.02, 0.01]) is True and said([0.02, 0.01], growing=[1, 0]) is None  # few seeds speak for themselves


def test_the_capacity_is_where_the_mean_crosses_and_the_seeds_contributions_average_to_it():
    loads = np.array([1.0, 2.0, 4.0])
    # Shares 0.25, 0.5 and 2 % on the average: from 0.5 to 2 % growing exponentially, 1 % is half-way from 2 to 4.
    shares = np.array([[0.002, 0.003, 0.002, 0.003, 0.0025], [0.005] * 5, [0.02] * 5])
    figures = np.stack([runs(row) for row in shares])
    found = crossing(loads, figures, [P99], 1, 0.95)
    assert found.interval.mean == pytest.approx(3.0) and found.values == pytest.approx([3.0] * 5)
    assert found.interval.half_width == pytest.approx(0, abs=1e-9) and math.isinf(found.events)
    assert crossing(loads, figures, [P99], 1, 0.95, whole=True).interval.mean == 2.0
    figures[2, :, 0] = [0.01, 0.03, 0.02, 0.015, 0.025]
    scattered = crossing(loads, figures, [P99], 1, 0.95)
    assert scattered.values.mean() == pytest.approx(3.0) and scattered.interval.mean == pytest.approx(3.0)
    # An upper limit of 2 % * exp(2.776 * 0.3536 / sqrt(5)) there, t(0.975, 4) = 2.776, and of 0.5 % at 2.
    upper = 0.02 * math.exp(2.776 * 0.3952847 / math.sqrt(5))
    assert scattered.low == pytest.approx(2 + 2 * math.log(2) / math.log(upper / 0.005), rel=1e-3)
    assert scattered.events == pytest.approx(5 / 0.3952847**2, rel=1e-6)
    # Further seeds that say the same change nothing.
    doubled = crossing(loads, np.concatenate([figures, figures], axis=1), [P99], 1, 0.95)
    assert doubled.interval.mean == pytest.approx(3.0) and doubled.interval.half_width < scattered.interval.half_width


def test_two_limits_give_the_smaller_capacity():
    loads, mean = np.array([1.0, 2.0, 4.0]), Limit("mean_tpot_ms", 50.0, "tpot")
    figures = np.zeros((3, 5, 6))
    figures[:, :, 0] = np.array([0.002, 0.005, 0.02])[:, None]
    figures[:, :, 1] = np.array([10.0, 40.0, 90.0])[:, None]
    found = crossing(loads, figures, [P99, mean], 1, 0.95).interval.mean
    assert found == pytest.approx(2 + 2 * math.log(50 / 40) / math.log(90 / 40))


def test_the_interval_holds_the_known_capacity():
    # P(wait > x) of M/M/1 is in closed form. Of 60 intervals at 95 % fewer than 52 hold it once in 2,000 times.
    server, repetitions = SingleServer(0.5), 60
    search = repeat(ONE, server, server.slo, 0.55, repetitions, seeds=8, requests=1500)
    found = [search.found("load", index) for index in range(repetitions)]
    intervals = np.array([one.interval for one in found if one is not None])
    inside = np.abs(intervals[:, 0] - 0.5) <= intervals[:, 1]
    assert inside.sum() >= 52
    assert intervals[:, 0].mean() == pytest.approx(0.5, rel=0.03)
    assert intervals[:, 1].mean() < 0.1  # and says something


def test_runs_are_extended_until_the_answer_rests_on_enough():
    server = SingleServer(0.8)

    def found(**settings):
        search = CapacitySearch(
            [ONE], range(10), 500, SearchSettings(concurrency=False, **settings), server.slo, server, {"load": [0.8]}
        )
        while not search.done:
            search.round()
        result = search.found("load", 0)
        assert result is not None
        return result

    longest, short = found(), found(max_num_requests=500)
    assert (longest.count, short.count) == (4000, 500) and not longest.undecided
    assert longest.interval.half_width < short.interval.half_width
    narrow = found(max_num_requests=500, precision=0.01)
    assert narrow.undecided.startswith("undecided: ± ") and narrow.undecided.endswith("search.precision=0.01")
    assert found(max_num_requests=32000, precision=0.05).interval.half_width < 0.05


def test_further_seeds_join_the_first_as_if_all_had_been_there():
    server = SingleServer(0.5)
    settings = SearchSettings(concurrency=False, max_num_requests=1000)

    def search(seeds, **more):
        search = CapacitySearch([ONE], range(seeds), 1000, settings, server.slo, server, **more)
        while not search.done:
            search.round()
        found = search.found("load", 0)
        assert found is not None
        return found, search.simulations

    first, _ = search(10, guesses={"load": [0.5]})
    both, joined = search(20, before=[{"load": first}])
    alone, whole = search(20, guesses={"load": [0.6]})
    assert both.best == alone.best and len(both.values) == len(both.outcomes) == 20
    assert both.interval.mean == pytest.approx(alone.interval.mean, rel=0.01)
    assert joined < whole


class Drifts:
    """Runs in which nothing is late, but above 1 request/s every run has a few more requests in the server."""

    def __call__(self, tasks, on_done=None):
        base = {"share_above_p99_ttft_ms": 0, "failed": 0, "rejected": 0, "stable": 1}
        base |= {"num_prompts": 1000, "duration_s": 1000}
        loads = [task.load_rps or 0.5 for task in tasks]
        rows = [base | {"growing": load > 1, "growth_share": 0.02 * (load > 1), "stable": load < 1.3} for load in loads]
        return [Outcome(Verdict(True, ""), row) for row in rows]


def test_what_stays_undecided_never_passes_and_belongs_to_the_interval():
    search = CapacitySearch(
        [ONE], range(5), 1000, SearchSettings(concurrency=False), SloSettings(), Drifts(), {"load": [2.0]}
    )
    while not search.done:
        search.round()
    found = search.found("load", 0)
    assert found is not None and 1 / 1.02 < found.interval.mean <= 1
    assert found.count == 8000 and "undecided" in found.note and not found.undecided
    assert 1.3 <= found.interval.mean + found.interval.half_width < 1.6  # the queue grows for certain from 1.3 on


def test_an_overloaded_server_whose_p99_passes_in_short_runs_is_not_feasible():
    """The short-run trap: 1,000 requests end before a queue that grows by a few per cent is long."""
    engine = EngineConfig(max_num_seqs=4, max_num_batched_tokens=512, num_gpu_blocks=2000, max_model_len=1024)
    cost = Priced(CostTable(step_ps=10**10, prefill_token_ps=10**7, decode_seq_ps=10**7))
    one = Candidate({"max_num_seqs": 4, "max_num_batched_tokens": 512}, engine, None, cost=cost)  # type: ignore[arg-type]

    def draw(seed: int, count: int):
        random = np.random.default_rng(seed)
        output = random.integers(30, 51, count)
        return Requests(np.cumsum(random.exponential(1.0, count)), np.full(count, 50), output), 1.0

    first = [draw(seed, 1000)[0] for seed in range(6)]
    slo, search = SloSettings(ttft_ms=15_000.0), SearchSettings(concurrency=False, max_num_requests=1000)
    simulator = Simulator(Replicates(first, [1.0] * 6, [0] * 6, draw), slo, search, lanes=8)
    saturated = simulator([Task(one, seed, 1e4, None, 1000) for seed in range(6)])
    most_rps = float(np.mean([outcome.figures["request_throughput"] for outcome in saturated]))
    limit = [Limit("p99_ttft_ms", 15_000.0, "ttft", 99.0)]
    for factor, feasible in ((0.9, True), (1.03, False), (1.05, False)):
        runs = simulator([Task(one, seed, factor * most_rps, None, 1000) for seed in range(6)])
        assert max(outcome.figures["p99_ttft_ms"] for outcome in runs) < 15_000  # the trap is set
        said = verdict(decisive(runs, limit), limit)
        assert (said.passed is True) == feasible
        assert feasible or "undecided" in said.reason or "grows" in said.reason
    capacity = CapacitySearch([one], range(6), 1000, search, slo, simulator, {"load": [most_rps]})
    while not capacity.done:
        capacity.round()
    found = capacity.found("load", 0)
    assert found is not None and 0.85 * most_rps < found.interval.mean < 1.03 * most_rps
