"""Where freed blocks without a key go, with prefix caching: to the tail of the free queue before vLLM 0.33."""

import random
from dataclasses import replace

import numpy as np
import pytest
import reference
from agreement import agree
from hypothesis import given, settings
from hypothesis import strategies as st
from random_cases import MS, Priced, requests_of
from test_prefix import random_prompts

from jaxsim.engine import AffineCost, CostTable, EngineConfig, Requests, simulate, simulate_many

CASES = 32  # of an example, in one call


def random_case(rng: random.Random, asynchronous: bool = False) -> reference.Case:
    """Tiny pools, shared prefixes, quoted outputs, block-aligned prompts."""
    block_size, longest, seats = rng.choice([1, 2, 3, 4]), rng.choice([16, 24, 40]), rng.randint(1, 8)
    engine = EngineConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, rng.choice([4, 8, 16, 32])),
        num_gpu_blocks=min(-(-longest // block_size) + 1 + rng.choice([0, 0, 1, 2, 4, 8, 20]), 64),
        block_size=block_size,
        max_model_len=longest,
        enable_prefix_caching=True,
        scheduler_reserve_full_isl=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.0, 0.05, 0.2]),
        freed_unhashed_blocks="tail",
        async_scheduling=asynchronous,
    )
    segments, outputs, streams = random_prompts(rng, block_size, longest, rng.randint(2, 14))
    gaps = rng.choice([[0], [0, 0, 1, 3, 10, 40]])
    prompts = [sum(length for _, _, length in parts) for parts in segments]
    arrivals = [MS * int(time) for time in np.cumsum([rng.choice(gaps) for _ in outputs])]
    prices = CostTable(2 * MS, prefill_token_ps=MS * rng.choice([0, 1]), decode_ctx_ps=MS * rng.choice([0, 1]))
    clients = rng.choice([None, None, None, 1, 3])
    return reference.Case(arrivals, prompts, outputs, engine, prices, clients, 0, segments, streams)


@pytest.mark.parametrize("asynchronous", [False, True])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_random_cases_agree_with_the_oracle(asynchronous, seed):
    rng = random.Random(seed)
    cases = [random_case(rng, asynchronous) for _ in range(CASES)]
    shape = replace(cases[0].engine, max_num_seqs=8, max_num_batched_tokens=64)  # one for every example
    cases[0] = cases[0]._replace(engine=shape)
    expected = [reference.simulate(case) for case in cases]
    requests, costs = [requests_of(case) for case in cases], [Priced(case.cost) for case in cases]
    engines = [case.engine for case in cases]
    clients = [case.clients for case in cases]
    for leap in (True, False):
        simulations = simulate_many(requests, engines, costs, clients=clients, leap=leap, lanes=CASES // 2)
        for case, theirs, ours in zip(cases, expected, simulations, strict=True):
            agree(case, ours, theirs)


@pytest.mark.parametrize(("where", "hit"), [("front", 4), ("tail", 2)])
def test_a_full_block_is_evicted_before_one_that_was_freed_after_it(where, hit):
    """Four blocks of two tokens. A frees two full ones, B a full one and one without a key, C takes a block.

    That is B's block without a key if it stands in front, else the second one of A, and D finds only the first.
    """
    engine = EngineConfig(1, 16, 5, 8, 2, enable_prefix_caching=True, freed_unhashed_blocks=where)
    segments = [[("a", 0, 4)], [("b", 0, 3)], [("c", 0, 1)], [("a", 0, 5)]]
    requests = Requests(np.arange(4) * 1.0, np.array([4, 3, 1, 5]), np.ones(4, np.int64), segments=segments)
    simulation = simulate(requests, engine, AffineCost(0.01, 0.0, 0.0, 0.0))
    assert simulation.hit_tokens.tolist() == [0, 0, 0, hit]
