"""The policy "priority" together with prefix caching: the engine against the oracle, and cases to follow by hand."""

import random
import sys
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import reference
from agreement import GIVEN_UP
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_cases import MS, run
from test_prefix import CASES, agree_all, first_tokens
from test_prefix import random_case as fcfs_case

from jaxsim.engine import CostTable, EngineConfig


class Kind(NamedTuple):
    """Features that compile: cases of one kind share a program."""

    asynchronous: bool
    thresholds: list[int]
    freed: str = "front"  # freed_unhashed_blocks
    self_preemption: str = "continues"
    swap: bool = False  # all cases have preemption_mode="swap"

    def __str__(self) -> str:
        words = [
            "async" if self.asynchronous else "sync",
            *["threshold"] * any(self.thresholds),
            self.freed,
            self.self_preemption,
            *["swap"] * self.swap,
        ]
        return " ".join(words)


THRESHOLDS = [0, 1, 2, 3, 5, 8]
KINDS = [Kind(False, THRESHOLDS), Kind(True, [0], swap=True)]
ROWS = Kind(True, THRESHOLDS, "tail", "ends")


@pytest.fixture(autouse=True)
def cached_at_once(monkeypatch):
    """Cases that share nothing are run with the cache as well."""
    monkeypatch.setattr(sys.modules["jaxsim.engine.simulate"], "shared_blocks", lambda *_: True)


def random_case(rng: random.Random, kind: Kind) -> reference.Case:
    """Ties of priority and of arrival alike; a third of the cases are those of first come, first served."""
    case = crowded_case(rng) if rng.random() < 0.7 else fcfs_case(rng, kind.thresholds, False)
    arrivals, n = case.arrivals_ps[:], len(case.prompts)
    if rng.random() < 0.3:
        rng.shuffle(arrivals)
    engine = replace(
        case.engine,
        policy="priority",
        async_scheduling=kind.asynchronous,
        long_prefill_token_threshold=rng.choice(kind.thresholds) or any(kind.thresholds) * case.engine.max_model_len,
        freed_unhashed_blocks=kind.freed,
        self_preemption=kind.self_preemption,
    )
    if kind.swap:  # with CPU memory for none, some or all victims; without it they are recomputed
        engine = replace(engine, preemption_mode="swap", num_cpu_blocks=rng.choice([0, 2, 5, 10, 1000, 1000]))
        case = case._replace(cost=replace(case.cost, swap_token_ps=MS * rng.choice([0, 1, 1])))
    levels = rng.choice([1, 2, 3, n])
    priorities = [rng.randrange(levels) - 1 for _ in range(n)]
    return case._replace(
        engine=engine, arrivals_ps=arrivals, priorities=priorities, think_ps=MS * rng.choice([0, 0, 1, 7])
    )


def crowded_case(rng: random.Random) -> reference.Case:
    """Many running requests that go on from the same prompts alike, in a pool that holds few of them."""
    block_size, longest, seats = rng.choice([1, 2, 2, 3, 4]), rng.choice([16, 24, 40]), rng.randint(4, 16)
    engine = EngineConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, rng.choice([8, 16, 32, 64])),
        num_gpu_blocks=min(-(-longest // block_size) + 1 + rng.choice([0, 1, 2, 4, 8, 16]), 64),
        block_size=block_size,
        max_model_len=longest,
        enable_prefix_caching=True,
        scheduler_reserve_full_isl=rng.random() < 0.3,
        watermark=rng.choice([0.0, 0.0, 0.05]),
        long_prefill_token_threshold_adaptive=rng.random() < 0.3,
    )
    names = [f"z{i}" for i in range(rng.randint(1, 3))]
    prompts = [f"g{i}" for i in range(rng.randint(1, 3))]
    segments, outputs, streams = [], [], []
    for i in range(rng.randint(6, 24)):
        parts = [(rng.choice(prompts), 0, rng.randint(1, 6) if rng.random() < 0.4 else 2 * block_size)]
        parts += [(rng.choice(names), 0, rng.randint(1, 8))] if rng.random() < 0.4 else []
        parts += [(f"u{i}", 0, rng.randint(1, 3))] if rng.random() < 0.2 else []
        segments.append(first_tokens(parts, longest - 1))
        outputs.append(rng.choice([2, 5, 8, 12, 20]))
        streams.append(rng.choice(names) if rng.random() < 0.8 else None)
    gaps = rng.choice([[0], [0, 0, 1, 3], [0, 2, 5, 10]])
    return reference.Case(
        [MS * int(arrival) for arrival in np.cumsum([rng.choice(gaps) for _ in outputs])],
        [sum(length for _, _, length in parts) for parts in segments],
        outputs,
        engine,
        CostTable(2 * MS, prefill_token_ps=MS * rng.choice([0, 1]), decode_seq_ps=MS * rng.choice([0, 1])),
        rng.choice([None, None, None, 4, 8]),
        segments=segments,
        output_streams=streams,
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**9))
def test_random_cases_agree_with_the_oracle(kind, seed):
    """Leaping and stepping, records and totals."""
    rng = random.Random(seed)
    cases = [random_case(rng, kind) for _ in range(CASES)]
    expected = [reference.simulate(case, 3000) for case in cases]
    for leap in (True, False):
        agree_all(cases, expected, leap)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**9))
def test_random_cases_row_by_row(seed):
    """Free blocks, chunks, admissions with their hits, and preemptions of every iteration."""
    case = random_case(random.Random(seed), ROWS)
    result = reference.simulate(case, 3000)
    if result.status != "TRUNCATED" and result.stalled <= GIVEN_UP:
        assert run(case, trace=True).iterations == result.iters, case


def outcome(listed: list[tuple], engine: EngineConfig) -> reference.Result:
    """What the oracle makes of (arrival in ms, priority, output, prompt's segments), with which the engine agrees."""
    arrivals, priorities, outputs, segments = map(list, zip(*listed, strict=True))
    prompts = [sum(length for _, _, length in parts) for parts in segments]
    threshold = engine.long_prefill_token_threshold or engine.max_model_len
    engine = replace(
        engine, policy="priority", enable_prefix_caching=True, long_prefill_token_threshold=threshold,
        scheduler_reserve_full_isl=False, lone_request_without_threshold=False,
    )  # fmt: skip
    case = reference.Case(
        [ms * MS for ms in arrivals], prompts, outputs, engine, CostTable(MS), segments=segments, priorities=priorities
    )
    result = reference.simulate(case)
    agree_all([case] * CASES, [result] * CASES, True)
    return result


def hits(result: reference.Result) -> list[int]:
    """Tokens found at first admission, by request."""
    return [row[6] for row in result.reqs]


def test_who_is_admitted_first_computes_and_the_other_hits():
    """In one iteration: 1 is more urgent, 0 finds the two full blocks that precede its last token."""
    prompt = [("a", 0, 5)]
    result = outcome([(0, 1, 1, prompt), (0, 0, 1, prompt)], EngineConfig(2, 16, 9, 16, 2))
    assert result.iters[0][9] == [1, 5, 0, 1]
    assert hits(result) == [4, 0]


@pytest.mark.parametrize(("quoted", "hit"), [("a", 4), ("b", 2)])
def test_those_that_finish_together_leave_in_the_order_of_admission(quoted, hit):
    """1 was admitted before 0 and leaves before it: of its two blocks the last is the one that 2 takes."""
    listed = [(0, 1, 1, [("a", 0, 4)]), (0, 0, 1, [("b", 0, 4)]), (5, 0, 1, [("c", 0, 2)])]
    result = outcome([*listed, (9, 0, 1, [(quoted, 0, 5)])], EngineConfig(2, 16, 5, 8, 2))
    assert hits(result)[3] == hit


def test_blocks_of_an_iteration_that_did_not_happen_are_found():
    """Ten blocks of one token, chunks of four. In the second iteration 0 gets the last two, then 1 asks for one.

    0, the first of equals, gives back all six; 1 takes the last, so five are left; the fifth was never computed.
    """
    listed = [(0, 0, 2, [("a", 0, 6)]), (0, 0, 1, [("b", 0, 5)])]
    result = outcome(listed, EngineConfig(2, 8, 11, 10, 1, long_prefill_token_threshold=4))
    assert [(row[9], row[10], row[8]) for row in result.iters[:3]] == [
        ([0, 4, 1, 4], [], 2),
        ([1, 1], [0], 5),
        ([0, 1], [], 4),
    ]
    assert result.reqs[0][7] == 5


def test_a_block_that_a_decode_fills_in_its_turn_stays_when_it_is_preempted_afterwards():
    """14 blocks of two tokens. In the fourth iteration 0 takes the last free block, 1 fills its third one, and 2 asks
    for four: 1 gives back three, and since that is not enough 2 goes as well. 3 finds all that 1 has left.
    """
    listed = [(0, 0, 9, [("u", 0, 2)]), (0, 2, 9, [("v", 0, 3)]), (1, 1, 1, [("r", 0, 25)])]
    listed += [(3, -1, 1, [("v", 0, 3), ("o1", 0, 3), ("w", 0, 1)])]
    result = outcome(listed, EngineConfig(4, 10, 15, 28, 2))
    assert [(row[9], row[10]) for row in result.iters[2:5]] == [
        ([0, 1, 1, 1, 2, 8], []),
        ([0, 1], [1, 2]),
        ([0, 1, 3, 1], []),
    ]
    assert hits(result)[3] == 6


@pytest.mark.parametrize("caching", [True, False])
def test_what_a_swapped_request_finds_is_not_copied_back(caching):
    """Eight blocks of one token. Request 1 goes with four; 0 takes the free one and all but the first of these four."""
    engine = EngineConfig(
        2, 8, 9, 9, 1, enable_prefix_caching=caching, policy="priority", preemption_mode="swap", num_cpu_blocks=100,
        async_scheduling=True,
    )  # fmt: skip
    cost = CostTable(MS, swap_token_ps=MS // 8)
    case = reference.Case([0, 0], [1, 2], [7, 5], engine, cost, priorities=[0, 1])
    result = reference.simulate(case)
    if caching:  # in the program of the random cases
        agree_all([case] * CASES, [result] * CASES, True)
    assert [row[5] for row in result.reqs] == [0, 1] and result.recomputed == [0, 0]
    assert [row[7] for row in result.reqs] == [0, int(caching)]
    assert result.totals.t1 == 9 * MS + (4 + 4 - caching) * MS // 8
