"""Settings that one simulation answers for: what comes out is what each alone gives, to the last bit."""

from collections import Counter
from dataclasses import replace

import numpy as np
from test_lanes import Setting, everything, run

from jaxsim.engine import AffineCost, EngineConfig, Requests, Status, simulate_many
from jaxsim.engine.alike import enough, families
from jaxsim.engine.prepare import Settings
from jaxsim.settings import SearchSettings, SloSettings
from jaxsim.tuning.evaluate import Simulator, Task
from jaxsim.tuning.replicates import Replicates
from jaxsim.tuning.space import Candidate, FixedCost

SEATS, BLOCKS = (1, 8, 9, 12, 30), (24, 64, 128, 192, 400, 1000)
COST = AffineCost(5e-3, 5e-5, 2e-5, 4e-8)


def requests(count: int, seed: int) -> Requests:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(0.02, count))
    return Requests(arrival, rng.integers(1, 100, count), rng.integers(1, 120, count))


def grid() -> list[Setting]:
    """Pools from too small to endless, seats from one to more than are needed, under several loads and loops."""
    lists = [requests(60, 0), requests(60, 1)]
    engine = EngineConfig(max_num_seqs=1, max_num_batched_tokens=200, num_gpu_blocks=20, max_model_len=220)
    loops = [(None, 1.0), (None, 4.0), (3, 1.0), (9, 1.0)]
    rules = [{}, {"watermark": 0.3, "scheduler_reserve_full_isl": False}]
    return [
        Setting(one, replace(engine, max_num_seqs=seats, num_gpu_blocks=blocks, **rule), COST, clients, stretch, 0.0)
        for one, (clients, stretch) in zip(lists * 2, loops, strict=True)
        for rule in rules
        for seats in SEATS
        for blocks in BLOCKS
    ]


def test_reuse_changes_nothing():
    chosen, told = grid(), []
    each = run(chosen)
    reused = run(chosen, reuse=True, on_done=lambda index, simulation: told.append((index, simulation)))
    for setting, one, other in zip(chosen, each, reused, strict=True):
        assert everything(one) == everything(other), setting
    assert sorted(index for index, _ in told) == list(range(len(chosen)))
    # Those that are the same follow one another.
    changes = sum(a.finish_ps is not b.finish_ps for (_, a), (_, b) in zip(told[1:], told[:-1], strict=True))
    computed = Counter(id(simulation.finish_ps) for simulation in reused)
    assert len(computed) == changes + 1 < 0.8 * len(chosen)
    assert max(computed.values()) > 9
    usage = {(id(simulation.finish_ps), simulation.totals.kv_usage_mean) for simulation in reused}
    assert len(usage) > len(computed)  # each of its own pool


def test_only_seats_and_blocks_may_differ():
    one = requests(9, 0)
    engine = EngineConfig(max_num_seqs=8, max_num_batched_tokens=200, num_gpu_blocks=99, max_model_len=220)
    more = replace(engine, max_num_seqs=16, num_gpu_blocks=50)

    def together(first: EngineConfig, second: EngineConfig, caches: bool = False, **changes) -> bool:
        columns = {"requests": one, "cost": COST, "clients": None, "stretch": 1.0, "think_time_s": 0.0}
        pairs = {key: [value, changes.get(key, value)] for key, value in columns.items()}
        return len(families(Settings(engine=[first, second], **pairs), caches)) == 1

    assert together(engine, more)
    both = Settings([one] * 2, [engine, more], [COST] * 2, [None] * 2, [1.0] * 2, [0.0] * 2)
    assert families(both, False) == {1: [0]}  # the one with more seats first
    assert not together(engine, more, caches=True)
    assert together(engine, replace(more, num_gpu_blocks=99), caches=True)
    others = {"max_num_batched_tokens": 201, "watermark": 0.1, "block_size": 8, "async_scheduling": True}
    for key, value in others.items():
        assert not together(engine, replace(more, **{key: value}))
    assert not together(replace(engine, batching="static"), replace(more, batching="static"))
    assert not together(replace(engine, policy="priority"), replace(more, policy="priority"))
    changes = {"requests": requests(9, 0), "cost": replace(COST), "clients": 4, "stretch": 2.0, "think_time_s": 0.1}
    for key, value in changes.items():
        assert not together(engine, more, **{key: value})


def test_nothing_is_enough_without_statistics_or_an_end():
    engine = EngineConfig(max_num_seqs=30, max_num_batched_tokens=200, num_gpu_blocks=1000, max_model_len=220)
    one = requests(60, 0)
    (found,) = run([Setting(one, engine, COST, 3, 1.0, 0.0)])
    assert enough(found, one, engine)[0] == found.totals.running_max + 1 == 4
    assert 3 * 14 < enough(found, one, engine)[1] < 100  # three of at most 219 tokens, in blocks of 16
    unknown = replace(found, totals=found.totals._replace(running_max=np.nan))
    for other in (unknown, replace(found, status=Status.OVERTIME)):
        assert enough(other, one, engine) == (np.inf, np.inf)
    assert enough(found, one, replace(engine, max_num_active_seqs=3))[0] == np.inf


def test_a_search_gets_the_figures_of_every_setting():
    table, lists = FixedCost(COST.table(200, 30)), [requests(60, 0), requests(60, 1)]
    engine = EngineConfig(max_num_seqs=1, max_num_batched_tokens=200, num_gpu_blocks=20, max_model_len=220)
    candidates = [
        Candidate({}, replace(engine, max_num_seqs=seats, num_gpu_blocks=blocks), None, cost=table)
        for seats in SEATS[-3:]
        for blocks in BLOCKS[-4:]
    ]
    tasks = [Task(one, seed, load_rps=5.0) for one in candidates for seed in (0, 1)]
    slo = SloSettings(ttft_ms=50.0, limits={"kv_usage_peak": 0.1})

    def outcomes(**more):
        return Simulator(Replicates(lists, [40.0, 40.0], [0, 0]), slo, SearchSettings(), 4, **more)(tasks)

    each = outcomes(simulate=lambda *arguments, **options: simulate_many(*arguments, **options | {"reuse": False}))
    found = outcomes()
    assert all(outcome.computed for outcome in each)
    assert 2 <= sum(outcome.computed for outcome in found) < len(tasks) // 2
    for one, other in zip(each, found, strict=True):
        assert one.verdict == other.verdict and list(one.figures.items()) == list(other.figures.items())
    assert len({outcome.figures["slo_met"] for outcome in found}) == 2  # the peak is a share of a setting's own pool
