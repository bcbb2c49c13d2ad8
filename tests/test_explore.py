"""The search over settings, on stand-ins whose capacities are known; the Pareto front; the Python API."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import jaxsim
from jaxsim.composition import defaults
from jaxsim.errors import ConfigError
from jaxsim.settings import EngineSettings, SearchSettings, SloSettings, read
from jaxsim.studies.pareto import on_front
from jaxsim.tuning.evaluate import Outcome
from jaxsim.tuning.explore import Exploration, levels
from jaxsim.tuning.load import Verdict
from jaxsim.tuning.space import Server, Space
from jaxsim.tuning.strategies import Problem

SEATS, TOKENS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512), (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


def space(search: SearchSettings, baseline=None, **flags) -> Space:
    composed = defaults([])
    return Space.of(Server.of(composed, read(EngineSettings, "engine", composed["engine"] | flags)), search, baseline)


def capacity(candidate, seed: int, noise: float = 0.02) -> float:
    """Largest at 64 seats and 2,048 tokens, the same scatter for every setting under a seed."""
    distance = np.log2(candidate.max_num_seqs / 64) ** 2 + 2 * np.log2(candidate.max_num_batched_tokens / 2048) ** 2
    own = np.random.default_rng([seed, candidate.max_num_seqs, candidate.max_num_batched_tokens]).normal()
    shared = np.random.default_rng(seed).normal()
    return 20 * np.exp(-distance / 8) * (1 + 0.1 * shared + noise * own) * candidate.gpus


class StandIn:
    """The share of requests above the TTFT limit is 1 % at the capacity, 16 % at twice as much; counts tasks."""

    def __init__(self):
        self.tasks = []

    def __call__(self, tasks, on_done=None):
        self.tasks += tasks
        outcomes = []
        for index, task in enumerate(tasks):
            limit = capacity(task.candidate, task.seed)
            missed = 0.01 * ((task.load_rps or 0) / limit) ** 4 if task.clients is None else float(task.clients > 40)
            figures = {"duration_s": 40 / limit, "num_prompts": 40, "rejected": 0, "request_throughput": limit}
            figures |= {"share_above_p99_ttft_ms": missed, "failed": 0, "stable": 1, "growing": 0, "growth_share": 0}
            outcomes.append(Outcome(Verdict(missed <= 0.01, "" if missed <= 0.01 else "slow"), figures))
            if on_done:
                on_done(index, outcomes[-1])
        return outcomes


def explored(baseline: Any = None, seeds: int = 6, **settings: Any):
    search = SearchSettings(**{"max_num_seqs": SEATS, "max_num_batched_tokens": TOKENS} | settings)
    evaluate = StandIn()
    exploring = Exploration(space(search, baseline), search, SloSettings(), evaluate, seeds, 100)
    for _ in exploring.rounds():
        pass
    assert exploring.simulations == len(evaluate.tasks)
    return exploring, evaluate


def chosen(exploring):
    choice = exploring.choice()
    assert choice is not None
    return choice.best


def regret(exploring) -> float:
    candidates = [exploring.space.candidate(point) for point in exploring.space.points()]
    truth = {one: capacity(one, 0, noise=0) for one in candidates}
    return 1 - truth[chosen(exploring)] / max(truth.values())


def test_the_grid_finds_the_best_and_halving_finds_it_for_less():
    fewer = TOKENS[1::2]
    full, _ = explored(max_seeds=None, seeds=10, max_num_batched_tokens=fewer)
    halved, _ = explored(max_seeds=None, seeds=10, max_num_batched_tokens=fewer, halving=3)
    # Ties within the paired interval go to fewer seats: that may cost the noise, 2 % of each of two settings.
    assert regret(full) <= 0.04 and regret(halved) <= 0.04
    assert halved.simulations < 0.6 * full.simulations
    assert len(full.known) == len(halved.known) == 48
    seeds = sorted({len(known.seeds) for known in halved.known.values()})
    assert seeds[0] == 2 and seeds[-1] == 10 and len(halved.finalists) < 24


@pytest.mark.parametrize("name", ["random", "sobol", "latin", "cem", "es", "cmaes"])
def test_a_strategy_spends_what_it_may_and_comes_close(name):
    if name == "cmaes":
        pytest.importorskip("cmaes", reason="needs the package cmaes")
    exploring, evaluate = explored(strategy=name, settings=32, halving=3, max_seeds=None)
    assert len(exploring.proposed) <= 32 and len(set(exploring.proposed)) == len(exploring.proposed)
    assert regret(exploring) < 0.15
    assert {task.candidate for task in evaluate.tasks} == set(exploring.proposed)


def test_more_seeds_go_to_what_is_in_doubt_only():
    exploring, _ = explored(seeds=3, max_seeds=12, indifference=0.0, confidence=0.9)
    best = exploring.known[chosen(exploring)]
    assert len(best.seeds) > 3
    assert min(len(known.seeds) for known in exploring.known.values()) == 3
    ranked = exploring.ranking()
    assert ranked is not None and 0 < ranked[1].near.max() <= 1


def test_a_budget_ends_the_search_with_what_is_known():
    exploring, evaluate = explored(max_simulations=3000)
    assert 3000 <= exploring.simulations < 3000 + 2 * 96 * 6 * 3  # the batch under way is finished
    assert len(exploring.known) == 96 and chosen(exploring)


def test_settings_that_cannot_start_are_kept_out_and_none_at_all_is_an_error():
    exploring, evaluate = explored(max_num_seqs=(64, 4096), max_num_batched_tokens=(2048,))
    assert [one.engine is None for one in exploring.proposed] == [False, True]
    assert exploring.score(exploring.proposed[1]) == -1
    with pytest.raises(ConfigError, match="none of these settings can start"):
        explored(max_num_seqs=(4096,), max_num_batched_tokens=(2048, 1024))


def test_the_baseline_is_compared_and_never_chosen():
    exploring, _ = explored(baseline={"max_num_seqs": 512}, max_num_seqs=(8, 16), max_num_batched_tokens=(512,))
    baseline = exploring.baseline
    assert baseline is not None and baseline.setting == {"max_num_seqs": 512, "max_num_batched_tokens": 8192}
    assert chosen(exploring) is not baseline and baseline in exploring.known
    # Its iterations are longer than any of the space: they have a price, too.
    cost = baseline.cost
    linear_ps = cost.table(8192, 512).linear_ps if cost else None
    assert linear_ps is not None and len(linear_ps) == 8193 and (linear_ps[1:] > 0).all()
    assert len(exploring.known[baseline].seeds) == len(exploring.known[chosen(exploring)].seeds)


@pytest.mark.parametrize("key", ["tensor_parallel_size", "instances"])
def test_settings_compare_by_gpu(key):
    searched: dict[str, Any] = {key: (1, 2)}
    exploring, _ = explored(max_num_seqs=(64,), max_num_batched_tokens=(2048,), **searched)
    one, two = exploring.proposed
    assert two.gpus == 2 and (one.cost is two.cost) == (key == "instances")
    assert exploring.score(one) == pytest.approx(exploring.score(two), rel=0.03)
    assert exploring.known[two].found["load"].interval.mean == pytest.approx(2 * exploring.score(two))


def test_clients_of_each_instance_compare_by_its_gpus():
    exploring, _ = explored(max_num_seqs=(64,), max_num_batched_tokens=(2048,), instances=(1, 2), load=False)
    assert [exploring.score(one) for one in exploring.proposed] == [40, 40]


def test_any_key_reaches_the_engine():
    search = SearchSettings(
        max_num_seqs=(32,), max_num_batched_tokens=None, block_size=(16, 32), scheduler_reserve_full_isl=(True, False)
    )
    grid = space(search).grid()
    engines = [one.engine for one in grid]
    assert [(engine.block_size, engine.scheduler_reserve_full_isl) for engine in engines if engine] == [
        (16, True), (16, False), (32, True), (32, False),
    ]  # fmt: skip
    assert {one.max_num_batched_tokens for one in grid} == {8192}  # vLLM's choice for an H100
    assert grid[1].name == "32/8192/16/false"


def test_levels_of_halving():
    assert [(level.seeds, level.count) for level in levels(3, 10, 2000, 18)] == [(2, 2000), (4, 2000), (10, 2000)]
    assert [(level.seeds, level.count) for level in levels(3, 10, 20000, 18)] == [(2, 2222), (4, 6666), (10, 20000)]
    assert [(level.seeds, level.count) for level in levels(None, 10, 2000, 18)] == [(10, 2000)]
    assert [(level.seeds, level.count) for level in levels(3, 10, 2000, 3)] == [(10, 2000)]


def test_the_unit_cube_covers_every_value_evenly():
    found = space(SearchSettings(max_num_seqs=(8, 16, 32), max_num_batched_tokens=(2048,), block_size=(16, 32)))
    assert found.varied.tolist() == [0, 2]
    points = found.points()
    middles = Problem((3, 2), 6, 0).middles(np.arange(6))
    assert found.decode(middles) == points and len(points) == 6
    assert found.decode(np.array([[0.34, 0.0], [1.0, 1.0], [-1.0, 2.0]])) == [(1, 0, 0), (2, 0, 1), (0, 0, 1)]


def test_the_front_is_what_no_other_point_beats():
    throughput = np.array([1.0, 2.0, 3.0, 2.0, 2.0])
    speed = np.array([9.0, 5.0, 1.0, 4.0, 5.0])
    assert on_front(throughput, speed).tolist() == [True, True, True, False, True]


def test_python_gives_what_the_command_line_prints():
    small = {
        "seeds": 2,
        "num_requests": 100,
        "max_num_requests": 100,
        "max_seeds": None,
        "runtime": {"lanes": 4, "compilation_cache": None},
    }
    rounds = []
    found = jaxsim.search(
        {"max_num_seqs": [8, 64], "max_num_batched_tokens": [2048]},
        {"ttft_ms": 1000},
        {"preset": "synthetic", "prompt": {"value": 500}},
        on_round=lambda exploring: rounds.append(exploring.simulations),
        **small,
    )
    assert found.best is not None and found.summary["max_num_seqs"] == found.best.max_num_seqs
    assert len(found.candidates) == 2 and rounds == sorted(rounds) and rounds[-1] == found.summary["simulations"]
    assert found.summary["slo"]["ttft_ms"] == 1000 and found.summary["ci95"]["load_rps"] > 0
    with pytest.raises(ConfigError, match="^search.block_sise"):
        jaxsim.search({"block_sise": [16]})
    assert dataclasses.is_dataclass(found)
