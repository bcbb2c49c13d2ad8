"""What operators reach for: rejection by queue length, swapping, a cap on outputs; against the oracle and by hand."""

from dataclasses import replace
from typing import Any

import pytest
import reference
from agreement import agree, agree_in_a_batch, agree_row_by_row, records
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_cases import (
    LOOP_KINDS,
    MS,
    PLAIN,
    RELIEF_KINDS,
    RICH,
    Kind,
    batch_of,
    case_of,
    run_batch,
    small,
    with_shape,
)

from jaxsim.engine import CostTable, EngineConfig, Simulation
from jaxsim.errors import ConfigError
from jaxsim.settings import SloSettings
from jaxsim.tuning.figures import figures
from jaxsim.tuning.slo import judge

quick = settings(deadline=None, max_examples=5, phases=(Phase.explicit, Phase.reuse, Phase.generate))


@pytest.mark.parametrize("kind", RELIEF_KINDS, ids=str)
@quick
@given(data=st.data())
def test_oracle(kind, data):
    agree_in_a_batch(data.draw(batch_of(kind)).cases, kind)


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_oracle_row_by_row(data):
    kind = RICH._replace(inflow=True, swap=True)
    agree_row_by_row(data.draw(case_of(kind).map(lambda case: with_shape(case, kind))))


def engine_on(case: reference.Case) -> Simulation:
    engine = case.engine
    rejects, swaps = engine.max_queued_requests is not None, engine.preemption_mode == "swap"
    kind = PLAIN._replace(inflow=rejects, returns=rejects, swap=swaps, asynchronous=engine.async_scheduling)
    return run_batch([case], kind)[0]


URGENT_KIND = LOOP_KINDS[2]  # a program that the random cases have compiled
URGENT: Any = {"policy": "priority", "preemption_mode": "swap"}


def both(case: reference.Case, kind: Kind | None = None):
    """The oracle's result, with which the engine agrees, and the engine's."""
    result = reference.simulate(case)
    simulation = engine_on(case) if kind is None else run_batch([case], kind)[0]
    agree(case, simulation, result)
    return result, simulation


def test_who_finds_the_queue_full_is_rejected():
    """One seat, taken for three iterations; of 1, 2 and 3, which come meanwhile, two find room in the queue of two."""
    case = small([(0, 1, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), (4, 1, 1)], max_num_seqs=1, max_queued_requests=2)
    result, simulation = both(case)
    assert simulation.rejected.tolist() == [False, False, False, True, False]
    assert simulation.finish_ps.tolist() == [3 * MS, 4 * MS, 5 * MS, -1, 6 * MS]
    assert result.status == simulation.status.name == "DONE" and simulation.totals.waiting_max == 2


def test_a_queue_of_one():
    """0 and 1 come at once: 1 finds 0 waiting. 2 waits while 0 runs, 3 and, before 2 is admitted, 4 find it there."""
    case = small(
        [(0, 1, 2), (0, 1, 1), (1, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1)], max_num_seqs=1, max_queued_requests=1
    )
    assert both(case)[1].rejected.tolist() == [False, True, False, True, True, False]


@pytest.mark.parametrize("think_ms", [0, 5])
def test_a_client_that_is_turned_away_comes_again_with_its_next_request(think_ms):
    """One seat: of three clients one is served and two hear after 1 ms that the queue of one was full."""
    case = small([(0, 1, 2)] * 5, clients=3, max_num_seqs=1, max_queued_requests=1)
    _, simulation = both(case._replace(think_ps=think_ms * MS))
    assert simulation.rejected.tolist() == [False, True, True, False, True]
    assert simulation.arrival_ps.tolist() == [0, 0, 0] + [(1 + think_ms) * MS] * 2
    again = max(2, 1 + think_ms)
    assert simulation.finish_ps.tolist() == [2 * MS, -1, -1, (again + 2) * MS, -1]


def test_clients_of_a_server_that_never_serves_run_out_of_requests():
    """The first request fits no pool and waits for ever: each further one is turned away, however small."""
    case = small([(0, 8, 1)] + [(0, 1, 1)] * 7, clients=2, num_gpu_blocks=5, max_queued_requests=1)
    result, simulation = both(case._replace(think_ps=MS))
    assert result.status == simulation.status.name == "STUCK"
    assert simulation.rejected.tolist() == [False] + [True] * 7
    assert simulation.arrival_ps.tolist() == [0, *(i * MS for i in range(7))]


def test_nobody_who_waits_makes_way_for_a_more_urgent_one():
    """1 and 2 come while 0 has the only seat: the queue of one is full when 2, the most urgent, is judged."""
    case = small([(0, 1, 3), (1, 1, 1), (1, 1, 1)], max_num_seqs=1, max_queued_requests=1, **URGENT)
    simulation = both(case._replace(priorities=[1, 1, 0]), URGENT_KIND)[1]
    assert simulation.rejected.tolist() == [False, False, True] and simulation.finish_ps[1] == 4 * MS


def test_who_is_rejected_has_missed_the_slo():
    case = small([(0, 1, 5), *[(1, 1, 1)] * 9], max_num_seqs=1, max_queued_requests=1)
    _, simulation = both(case)
    assert simulation.rejected.sum() == 8
    row = figures(simulation, SloSettings(percentile=50), 0.0)
    assert row["rejected"] == row["failed"] == 8 and row["p50_ttft_ms"] < 200
    verdict = judge(row, SloSettings(percentile=50))
    assert verdict.passed is False and verdict.reason.startswith("p50 TTFT above 200 ms: ")
    lenient = SloSettings(percentile=10)  # nine of ten may be above
    assert judge(figures(simulation, lenient, 0.0), lenient).passed


def test_outputs_are_capped():
    _, simulation = both(small([(0, 1, 7), (0, 1, 2)], max_new_tokens=3))
    assert simulation.output_tokens.tolist() == [3, 2]


# Eight blocks of one token: 1 needs its fifth block in the iteration in which 0 needs its fourth.
def tight(**changes) -> reference.Case:
    return small([(0, 1, 7), (0, 2, 5)], max_num_batched_tokens=8, **changes)


def swapping(blocks: int, **prices) -> reference.Case:
    return priced(tight(preemption_mode="swap", num_cpu_blocks=blocks), **prices)


def priced(case: reference.Case, **prices) -> reference.Case:
    return case._replace(cost=replace(case.cost, **prices))


def test_a_swapped_request_needs_no_prefill_and_pays_both_ways():
    recomputed, swapped = engine_on(tight()), both(swapping(100))[1]
    assert recomputed.num_preemptions.tolist() == swapped.num_preemptions.tolist() == [0, 1]
    lost = int(recomputed.recomputed_tokens[1])
    assert lost == 4 and swapped.recomputed_tokens.tolist() == [0, 0]
    assert recomputed.totals.prefill_tokens - swapped.totals.prefill_tokens == lost + 1
    paid = both(swapping(100, swap_token_ps=MS // 8))[1]
    assert paid.finish_ps[1] - swapped.finish_ps[1] == 2 * lost * MS // 8
    # The iteration after the preemption pays for the way out, before request 0 has ended.
    assert paid.finish_ps[0] - swapped.finish_ps[0] == lost * MS // 8


def test_without_room_on_the_cpu_it_is_recomputed():
    assert records(both(swapping(3))[1]) == records(engine_on(tight()))
    assert records(both(swapping(4))[1])["recomputed_tokens"] == [0, 0]


def test_the_bandwidth_at_which_both_cost_the_same():
    """Four tokens go out and come back, in blocks of one token; recomputed they are four more tokens of prefill.

    At a price of 2 ms per prefill token a token may take 1 ms each way: 2 x 4 x 1 ms = 4 x 2 ms. The fifth token costs
    the same in both: a decode row is as dear as a token of prefill.
    """
    prices: Any = {"step_ps": MS, "prefill_token_ps": 2 * MS, "decode_seq_ps": 2 * MS}
    recompute = both(tight()._replace(cost=CostTable(**prices)))[1]

    def end(swap_token_ps: int) -> int:
        return int(both(swapping(100, **prices, swap_token_ps=swap_token_ps))[1].finish_ps.max())

    assert end(MS) == int(recompute.finish_ps.max())
    assert end(MS - 1) < end(MS) < end(MS + 1)


def test_swapped_requests_come_back_before_recomputed_ones():
    """Both 1 and 2 are preempted; the CPU takes 2, the first victim, and has no room for 1."""
    case = small(
        [(0, 1, 8), (0, 1, 7), (0, 1, 6)], max_num_seqs=3, preemption_mode="swap", num_cpu_blocks=3, num_gpu_blocks=10
    )
    result, simulation = both(case)
    order = [rid for row in result.iters for rid in row[11][::2]]
    assert order[:3] == [0, 1, 2] and simulation.num_preemptions[1] > 0 and simulation.num_preemptions[2] > 0
    assert order[3] == 2 and simulation.recomputed_tokens[1] > 0


AHEAD: Any = {"preemption_mode": "swap", "async_scheduling": True}


def test_the_tokens_of_the_iteration_in_flight_are_swapped_as_well():
    """Request 1 is driven out while its fourth token is being computed: with three blocks of CPU memory it is lost."""
    for blocks, lost in ((3, 4), (4, 0)):
        case = priced(tight(**AHEAD, num_cpu_blocks=blocks), swap_token_ps=MS // 8)
        simulation = both(case)[1]
        assert simulation.num_preemptions.tolist() == [0, 1] and simulation.recomputed_tokens.tolist() == [0, lost]
        # The first four iterations are under way when it goes; the one after them waits for the copy.
        assert simulation.finish_ps[0] == 7 * MS + (4 - lost) * MS // 8


def test_a_victim_whose_last_token_is_in_flight_is_not_copied():
    case = small([(0, 1, 7), (0, 3, 3)], max_num_batched_tokens=8, num_cpu_blocks=100, **AHEAD)
    simulation = both(priced(case, swap_token_ps=MS // 8))[1]
    assert simulation.num_preemptions.tolist() == [0, 1] and simulation.finish_ps.tolist() == [7 * MS, 3 * MS]


def test_a_swapped_request_comes_back_before_more_urgent_ones_that_wait():
    """2 comes when 1 is in CPU memory, and a block for it is free."""
    case = small([(0, 1, 7), (0, 2, 5), (4, 1, 1)], max_num_batched_tokens=8, num_cpu_blocks=100, **URGENT)
    case = case._replace(priorities=[0, 2, 1], engine=replace(case.engine, max_queued_requests=10))
    result, simulation = both(case, URGENT_KIND)
    assert [rid for row in result.iters for rid in row[11][::2]] == [0, 1, 1, 2]
    assert simulation.num_preemptions.tolist() == [0, 1, 0] and not simulation.recomputed_tokens.any()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preemption_mode": "swap", "batching": "static"}, "preemption_mode=swap: is not modelled together with bat"),
        (
            {"preemption_mode": "swap", "enable_prefix_caching": True},
            "preemption_mode=swap: is not modelled together with en",
        ),
        ({"preemption_mode": "drop"}, "preemption_mode=drop: must be recompute or swap"),
        ({"max_queued_requests": 0}, "max_queued_requests=0: must be an integer from 1"),
        ({"max_queued_requests": 1, "batching": "static"}, "max_queued_requests=1: is not modelled together with bat"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be an integer from 1"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks=-1: must be from 0"),
    ],
)
def test_what_is_not_modelled_is_refused(changes, said):
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "num_gpu_blocks": 2, "max_model_len": 2}
    with pytest.raises(ConfigError, match=f"^engine.{said}"):
        EngineConfig(**(sizes | changes))
