"""The engine against the oracle on random cases, and properties that need no oracle."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
from agreement import agree, agree_in_a_batch, agree_row_by_row, records, totals
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_cases import (
    ASYNC_PLAIN,
    KINDS,
    MS,
    PLAIN,
    RICH,
    batch_of,
    case_of,
    run_batch,
    shaping_case,
    small,
    with_shape,
)

from jaxsim.engine import CostTable, EngineConfig, Status

# A batch is not shrunk: the test that runs case by case finds the small examples.
quick = settings(deadline=None, max_examples=8, phases=(Phase.explicit, Phase.reuse, Phase.generate))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@quick
@given(data=st.data())
def test_oracle(kind, data):
    agree_in_a_batch(data.draw(batch_of(kind)).cases, kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_oracle_row_by_row(kind, data):
    agree_row_by_row(data.draw(case_of(kind).map(lambda case: with_shape(case, kind))))


@quick
@given(batch=batch_of(PLAIN))
def test_a_pool_that_holds_everything_never_preempts(batch):
    roomy = []
    for case in batch.cases:
        lengths = [p + o for p, o in zip(case.prompts, case.outputs, strict=True)]
        blocks = sum(math.ceil(length / case.engine.block_size) for length in lengths)
        roomy.append(case._replace(engine=replace(case.engine, num_gpu_blocks=blocks + 1, watermark=0.0)))
    for case, simulation in zip(roomy, run_batch(roomy, PLAIN), strict=False):
        assert simulation.status == Status.DONE, case
        assert simulation.totals.num_preemptions == simulation.totals.refused_kv == 0, case
        assert simulation.totals.recomputed_tokens == 0, case


def doubled(case: reference.Case) -> reference.Case:
    prices: Any = {name: value if value is None else 2 * value for name, value in vars(case.cost).items()}
    arrivals = [2 * time for time in case.arrivals_ps]
    return case._replace(arrivals_ps=arrivals, cost=CostTable(**prices), think_ps=2 * case.think_ps)


@quick
@given(batch=batch_of(RICH))
def test_doubling_all_times_doubles_the_results(batch):
    once, twice = run_batch(batch.cases, RICH), run_batch([doubled(case) for case in batch.cases], RICH)
    for case, one, two in zip(batch.cases, once, twice, strict=False):
        want, got = records(one), records(two)
        for name in ("arrival_ps", "first_scheduled_ps", "first_token_ps", "finish_ps"):
            want[name] = [2 * time if time >= 0 else time for time in want[name]]
        assert got == want, case
        want, got = totals(one), totals(two)
        gaps, wider_gaps = np.array(want.pop("itl_histogram")), np.array(got.pop("itl_histogram"))
        assert wider_gaps[:9].sum() == gaps[0] and wider_gaps[9:-1].tolist() == gaps[1:-9].tolist(), case  # an octave
        assert got.pop("duration_s") == 2 * want.pop("duration_s"), case
        assert got.pop("waiting_growth_rps") == pytest.approx(want.pop("waiting_growth_rps") / 2), case
        assert got == pytest.approx(want, rel=1e-14), case


def test_one_server_with_constant_service_is_a_queue_m_d_1():
    """One seat, one token: Poisson arrivals at half the capacity wait 1/2 service time on average."""
    service_ps, load, runs, count, warm = 10 * MS, 0.5, 248, 256, 56
    engine = EngineConfig(max_num_seqs=1, max_num_batched_tokens=8, num_gpu_blocks=4, max_model_len=8)
    rng = np.random.default_rng(20231116)
    gaps = rng.exponential(service_ps / load, (runs, count))
    arrivals = np.cumsum(gaps, axis=1).astype(np.int64).tolist()
    ones = [1] * count
    cases = [reference.Case(times, ones, ones, engine, CostTable(step_ps=service_ps)) for times in arrivals]
    waits = []
    for i in range(0, runs, 31):
        for case, simulation in zip(cases[i : i + 31], run_batch(cases[i : i + 31], PLAIN), strict=False):
            starts, free_at = [], 0
            for time in case.arrivals_ps:
                starts.append(max(time, free_at))
                free_at = starts[-1] + service_ps
            assert simulation.first_scheduled_ps.tolist() == starts
            waits.append(np.mean(simulation.first_scheduled_ps[warm:] - simulation.arrival_ps[warm:]) / service_ps)
    expected = load / (2 * (1 - load))  # Pollaczek and Khinchine
    error = np.std(waits, ddof=1) / math.sqrt(runs)
    assert error < 0.03 * expected
    assert abs(np.mean(waits) - expected) < 4 * error


def test_stretching_arrivals_is_arriving_later():
    case = shaping_case(PLAIN)._replace(arrivals_ps=[MS * i for i in range(256)], clients=None)
    late = case._replace(arrivals_ps=[3 * time for time in case.arrivals_ps])
    stretched, arranged = run_batch([case] * 31, PLAIN, stretch=3.0)[0], run_batch([late] * 31, PLAIN)[0]
    assert records(stretched) == records(arranged) and totals(stretched) == totals(arranged)
    assert stretched.arrival_ps.tolist() == late.arrivals_ps


def test_a_client_that_returns_at_once_counts_for_the_threshold():
    """Two requests are there when the second is scheduled: the waiting client's and that of the one just served."""
    case = small([(0, 1, 1), (0, 2, 1), (0, 1, 1)], 2, max_num_seqs=1, long_prefill_token_threshold=1)
    result = reference.simulate(case)
    assert [row[9] for row in result.iters] == [[0, 1], [1, 1], [1, 1], [2, 1]]
    agree(case, run_batch([case], RICH)[0], result)


def test_an_arrival_can_free_a_stuck_head():
    """A lone prompt of three blocks never fits into two, but with company it is cut to one."""
    case = small(
        [(1, 1, 1), (0, 3, 1)],
        num_gpu_blocks=3,
        long_prefill_token_threshold=1,
        scheduler_reserve_full_isl=False,
    )
    result = reference.simulate(case)
    assert [row[9] for row in result.iters] == [[1, 1, 0, 1], []]
    agree(case, run_batch([case], RICH)[0], result)


def test_async_iterations_that_take_no_time():
    case = small([(0, 1, 1), (0, 1, 1)], max_num_seqs=1, num_gpu_blocks=2, max_model_len=2, async_scheduling=True)
    case = case._replace(cost=CostTable())
    agree(case, run_batch([case], ASYNC_PLAIN)[0], reference.simulate(case))
