"""`self_preemption="ends"`, the rule before vLLM 0.33: behind a request that preempted itself nobody is scheduled.

The engine against the oracle on crowded pools, and cases to follow by hand; with prefix caching the program is that of
0.20, and so async.
"""

import itertools
import random
from dataclasses import replace

import pytest
import reference
import test_priority_prefix as caching
from agreement import GIVEN_UP, agree, agree_in_a_batch
from random_cases import BATCH, MS, RICH, run_batch, small, with_shape
from test_prefix import CASES, agree_all
from test_priority_prefix import cached_at_once  # noqa: F401

from jaxsim.engine import CostTable, EngineConfig

ENDS = RICH._replace(priority=True, ends=True)
CACHED = caching.Kind(True, caching.THRESHOLDS, "tail", "ends")


def crowded_case(rng: random.Random) -> reference.Case:
    """More running requests than the pool holds, often of equal priority and arrival."""
    block_size, longest, seats = rng.choice([1, 1, 2, 3, 4, 8]), rng.choice([12, 20, 40, 90]), rng.randint(2, 16)
    n, shortest = rng.randint(3, 40), longest // rng.choice([1, 2, 4])
    prompts, outputs = ([rng.randint(1, shortest) for _ in range(n)] for _ in range(2))
    max_model_len = max(max(prompts) + 1, longest + rng.choice([0, 5]))
    threshold = rng.choice([0, 0, 1, 2, 3, 5, 8])
    engine = EngineConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, rng.choice([4, 8, 16, 32, 64])),
        num_gpu_blocks=-(-max_model_len // block_size) + 1 + rng.choice([0, 0, 1, 2, 4, 8, 16]),
        block_size=block_size,
        max_model_len=max_model_len,
        policy="priority",
        self_preemption="ends",
        scheduler_reserve_full_isl=rng.random() < 0.3,
        watermark=rng.choice([0.0, 0.0, 0.05]),
        long_prefill_token_threshold=threshold,
        long_prefill_token_threshold_adaptive=threshold > 0 and rng.random() < 0.3,
        lone_request_without_threshold=rng.random() < 0.5,
    )
    gaps, levels = rng.choice([[0], [0, 0, 1, 3], [0, 2, 5, 10]]), rng.choice([1, 2, 3, n])
    arrivals = [0]
    for _ in range(n - 1):
        arrivals.append(arrivals[-1] + MS * rng.choice(gaps))
    prices = CostTable(MS * rng.choice([1, 2]), MS * rng.choice([0, 1]), 0, MS * rng.choice([0, 1]))
    case = reference.Case(arrivals, prompts, outputs, engine, prices, rng.choice([None, None, 4, 8]))
    return case._replace(think_ps=MS * rng.choice([0, 0, 1, 7]), priorities=[rng.randrange(levels) for _ in range(n)])


@pytest.mark.parametrize("seed", [1, 2])
def test_oracle(seed):
    """Leaping and stepping, records and totals."""
    rng = random.Random(seed)
    agree_in_a_batch([with_shape(crowded_case(rng), ENDS) for _ in range(BATCH)], ENDS)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_oracle_with_prefix_caching(seed):
    rng = random.Random(seed)
    cases = [caching.random_case(rng, CACHED) for _ in range(CASES)]
    expected = [reference.simulate(case, 3000) for case in cases]
    for leap in (True, False):
        agree_all(cases, expected, leap)


def schedule(case: reference.Case, priorities: list[int]) -> tuple[list[tuple], reference.Result]:
    """Rows and preempted requests of each iteration of the oracle, with which the engine has agreed."""
    case = case._replace(priorities=priorities, engine=replace(case.engine, policy="priority", self_preemption="ends"))
    result = reference.simulate(case)
    agree(case, run_batch([with_shape(case, ENDS)], ENDS)[0], result)
    return [(row[9], row[10]) for row in result.iters], result


def test_an_iteration_is_empty_if_the_first_preempts_itself():
    """0 is first in the list and least urgent; the block that it gives up is what 1 takes in the next iteration."""
    case = small([(0, 1, 3), (1, 2, 2), (1, 1, 2)], max_num_seqs=3, num_gpu_blocks=4, block_size=2)
    rows, _ = schedule(case, [1, 0, 0])
    assert rows[1:4] == [([0, 1, 1, 2, 2, 1], []), ([], [0]), ([1, 1, 2, 1], [])]


def test_a_token_is_late_behind_a_request_that_preempted_itself():
    """Ten blocks of one token. In the fifth iteration 0 gets the last one, 1 asks and goes, and 2 misses its turn.

    So one gap lasts two iterations; that of 1 lasts three, the others one.
    """
    case = small([(0, 1, 6), (1, 1, 4), (2, 1, 6)], max_num_seqs=3, num_gpu_blocks=11, max_num_batched_tokens=8)
    rows, result = schedule(case, [0, 1, 0])
    assert [(sched[::2], out) for sched, out in rows[3:7]] == [([0, 1, 2], []), ([0], [1]), ([0, 2], []), ([2, 1], [])]
    assert result.totals.itl == {reference.itl_bin(MS): 11, reference.itl_bin(2 * MS): 1, reference.itl_bin(3 * MS): 1}


def test_equals_that_drive_each_other_out_may_come_apart_late():
    """One token a turn: for 111 iterations nobody gets a token, more than the longest request has tokens and 64.

    Then one does. In the end they do go on for ever, which the oracle notices later.
    """
    prompts, outputs = [17, 28, 14, 5, 26, 27, 12, 21, 2], [4, 3, 1, 2, 4, 2, 4, 1, 5]
    case = small(
        [(0, *lengths) for lengths in zip(prompts, outputs, strict=True)],
        max_num_seqs=9, max_num_batched_tokens=9, num_gpu_blocks=18, block_size=2, max_model_len=30,
        scheduler_reserve_full_isl=False, long_prefill_token_threshold=1,
    )  # fmt: skip
    rows, result = schedule(case, [0] * 9)
    assert result.stalled > GIVEN_UP
    tokens = {row[3] for row in result.reqs} | {row[1] + row[2] for row in result.iters if row[6]}
    fruitful = [row[0] for row in result.iters if row[9] and row[1] + row[2] in tokens]
    assert max(b - a for a, b in itertools.pairwise(fruitful)) == 112


def test_who_finished_before_an_empty_iteration_is_no_victim_after_it():
    """Async, nine blocks of one token: 2 finishes in the third iteration, while 0 preempts itself ahead of all others.

    So the next is empty. After it 1 asks for four and three are free: of 2 and 3, its equal, only 3 is there.
    """
    engine = EngineConfig(
        8, 16, 10, 30, 1, policy="priority", self_preemption="ends", freed_unhashed_blocks="tail",
        async_scheduling=True, enable_prefix_caching=True, long_prefill_token_threshold=4,
        scheduler_reserve_full_isl=False,
    )  # fmt: skip
    case = reference.Case([0, MS, MS, MS], [1, 8, 1, 1], [6, 1, 1, 4], engine, CostTable(MS), priorities=[1, -1, 0, 0])
    result = reference.simulate(case)
    assert [(row[9][::2], row[10], row[12]) for row in result.iters[2:5]] == [
        ([0, 1, 2, 3], [], [2]),
        ([], [0], []),
        ([1], [3], [1]),
    ]
    agree_all([case] * CASES, [result] * CASES, True)


def test_what_is_in_flight_counts_after_those_that_finish_have_left():
    """2, 0 and 3 compute the same blocks of one token, each a token further than the one before it in the list.

    3 finishes with the iteration in which 0 gets the token that fills the same block next: the copy of 3 is the first.
    """
    engine = EngineConfig(
        6, 32, 35, 24, 1, policy="priority", self_preemption="ends", freed_unhashed_blocks="tail",
        async_scheduling=True, enable_prefix_caching=True, long_prefill_token_threshold=1,
        scheduler_reserve_full_isl=False, lone_request_without_threshold=False,
    )  # fmt: skip
    prompts, outputs = [4, 2, 4, 4, 5, 12], [6, 7, 7, 5, 1, 2]
    segments = [[("a", 0, n)] for n in prompts[:4]] + [[("a", 0, 4), ("y", 0, n)] for n in (1, 8)]
    case = reference.Case(
        [0, 0, 0, 0, 8 * MS, 15 * MS], prompts, outputs, engine, CostTable(2 * MS),
        segments=segments, output_streams=["y", "q", "y", "y", "v", "y"], priorities=[1, 9, 0, 2, 5, 3],
    )  # fmt: skip
    agree_all([case] * CASES, [reference.simulate(case)] * CASES, True)
