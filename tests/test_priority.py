"""The policy "priority": the engine against the oracle, and its rules on cases that can be followed by hand."""

from dataclasses import replace

import numpy as np
import pytest
import reference
from agreement import AVERAGES, GIVEN_UP, agree, agree_in_a_batch, agree_row_by_row, records, totals
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_cases import (
    MS,
    PLAIN,
    PRIORITY_KINDS,
    PRIORITY_PLAIN,
    PRIORITY_RICH,
    Kind,
    batch_of,
    case_of,
    run,
    run_batch,
    small,
    with_shape,
)

from jaxsim.engine import CostTable, EngineConfig, Status
from jaxsim.engine.priority import ranks

quick = settings(deadline=None, max_examples=8, phases=(Phase.explicit, Phase.reuse, Phase.generate))


@pytest.mark.parametrize("kind", PRIORITY_KINDS, ids=str)
@quick
@given(data=st.data())
def test_oracle(kind, data):
    agree_in_a_batch(data.draw(batch_of(kind)).cases, kind)


@pytest.mark.parametrize("kind", PRIORITY_KINDS[::3], ids=str)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_oracle_row_by_row(kind, data):
    agree_row_by_row(data.draw(case_of(kind).map(lambda case: with_shape(case, kind))))


@quick
@given(batch=batch_of(PRIORITY_PLAIN))
def test_equal_priorities_and_distinct_arrivals_are_first_come_first_served(batch):
    ranked = []
    for case in batch.cases:
        arrivals = [time + i for i, time in enumerate(sorted(case.arrivals_ps))]
        ranked.append(case._replace(arrivals_ps=arrivals, priorities=None, clients=None))
    in_order = [case._replace(engine=replace(case.engine, policy="fcfs")) for case in ranked]
    pairs = zip(ranked, run_batch(ranked, PRIORITY_PLAIN), run_batch(in_order, PLAIN), strict=False)
    for case, one, other in pairs:
        assert records(one) == records(other), case
        unlike = AVERAGES if one.status == Status.STUCK else set()  # when that is noticed differs
        got, want = ({k: v for k, v in totals(each).items() if k not in unlike} for each in (one, other))
        assert got == want, case


def schedule(case: reference.Case, priorities: list[int], kind: Kind = PRIORITY_PLAIN) -> list[tuple]:
    """Rows, preempted and admitted requests of each iteration of the oracle, with which the engine has agreed."""
    case = case._replace(priorities=priorities, engine=replace(case.engine, policy="priority"))
    result = reference.simulate(case)
    agree(case, run_batch([case], kind)[0], result)
    return [(row[9], row[10], row[11][::2]) for row in result.iters]


def test_the_queue_is_ordered_by_priority_arrival_and_place_in_the_list():
    """0 has the only seat when the others come, 3 before 1, 2 and 4; 1 is less urgent, 2 and 4 tie."""
    rows = schedule(small([(0, 1, 3), (2, 1, 1), (2, 1, 1), (1, 1, 1), (2, 1, 1)], max_num_seqs=1), [0, 1, 0, 0, 0])
    assert [request for _, _, admitted in rows for request in admitted] == [0, 3, 2, 4, 1]


def test_a_more_urgent_arrival_overtakes_a_head_that_does_not_fit():
    """1 needs all eight blocks and waits for 0 to end; 2 comes while it waits."""
    rows = schedule(small([(0, 1, 7), (1, 8, 1), (3, 1, 1)]), [0, 1, 0])
    assert [admitted for _, _, admitted in rows] == [[0], [], [], [2], [], [], [], [1], []]
    assert rows[3][0] == [0, 1, 2, 1]


def test_pass_1_goes_on_after_a_request_preempted_itself():
    """0 is first in the list and least urgent; the block that it misses and gives up is all that 1 needs."""
    case = small([(0, 1, 3), (1, 2, 2), (1, 1, 2)], max_num_seqs=3, num_gpu_blocks=4, block_size=2)
    rows = schedule(case, [1, 0, 0])
    assert rows[1] == ([0, 1, 1, 2, 2, 1], [], [1, 2])
    assert rows[2] == ([1, 1, 2, 1], [0], [])


def test_a_victim_may_be_scheduled_already():
    """0 and 1 have got the last two blocks when 2 asks: 0 goes though its row was there."""
    case = small(
        [(0, 1, 3), (1, 2, 2), (1, 2, 2)], max_num_seqs=3, num_gpu_blocks=6, block_size=2, max_num_batched_tokens=6
    )
    rows = schedule(case, [1, 0, 0])
    assert rows[1] == ([0, 1, 1, 2, 2, 2], [], [1, 2])
    assert rows[2] == ([1, 1, 2, 1], [0], [])


def test_of_equal_victims_the_first_in_the_list_goes():
    case = small([(0, 2, 3)] * 3, max_num_seqs=3, max_num_batched_tokens=6, num_gpu_blocks=5, block_size=2)
    rows = schedule(case, [0, 1, 1])
    assert rows[:2] == [([0, 2, 1, 2, 2, 2], [], [0, 1, 2]), ([0, 1, 2, 1], [1], [])]


def test_a_prompt_keeps_its_tokens_when_a_victim_gives_back_its_own():
    """Four tokens: 0 and 1 decode, 2 asks for the other two; without 0 there would be three."""
    case = small([(0, 1, 4), (1, 1, 4), (1, 6, 1)], max_num_seqs=3, scheduler_reserve_full_isl=False)
    rows = schedule(case, [1, 0, 0])
    assert rows[1] == ([0, 1, 1, 1, 2, 2], [], [1, 2])
    assert rows[2] == ([1, 1, 2, 2], [0], [])


def test_tokens_of_a_scheduled_prompt_return_to_those_behind():
    """Five tokens, two a prompt: when 1 drives 0 out, 2 gets two instead of one."""
    case = small(
        [(0, 5, 1), (0, 5, 1), (0, 5, 1)],
        max_num_seqs=3,
        max_num_batched_tokens=5,
        num_gpu_blocks=8,
        long_prefill_token_threshold=2,
        scheduler_reserve_full_isl=False,
    )
    case = case._replace(arrivals_ps=[0, 0, 0])
    rows = schedule(case, [0, 0, 0], PRIORITY_RICH)
    assert rows[0] == ([0, 2, 1, 2, 2, 1], [], [0, 1, 2])
    assert rows[1] == ([1, 2, 2, 2], [0], [])


def test_equals_that_drive_each_other_out_for_ever_are_stuck():
    """Either fits alone. In turns of three chunks the first in the list, which is the further one, goes."""
    case = small(
        [(0, 9, 4), (0, 8, 5)],
        max_model_len=14,
        num_gpu_blocks=14,
        long_prefill_token_threshold=2,
        scheduler_reserve_full_isl=False,
        policy="priority",
    )
    result = reference.simulate(case)
    assert result.stalled > GIVEN_UP and result.totals.num_preemptions > 100
    simulation = run_batch([case], PRIORITY_RICH)[0]
    assert simulation.status == Status.STUCK
    agree(case, simulation, result)


def test_more_ranks_than_one_word_of_words_has_bits():
    """The bitmaps' upper level has a bit for each 32 ranks; a burst of 1,200 requests on a pool that is too small."""
    rng = np.random.default_rng(7)
    prompts, outputs = rng.integers(1, 60, (2, 1200)).tolist()
    engine = EngineConfig(24, 64, 61, 128, block_size=8, policy="priority", scheduler_reserve_full_isl=False)
    priorities = rng.integers(-1, 3, 1200).tolist()
    case = reference.Case([0] * 1200, prompts, outputs, engine, CostTable(step_ps=MS), priorities=priorities)
    result = reference.simulate(case)
    assert result.totals.num_preemptions > 100
    agree(case, run(case), result)


def test_ranks():
    rank, request, previous = ranks(np.array([1, 0, 1, 0]), 6)
    assert rank[:4].tolist() == [2, 0, 3, 1]
    assert request[:4].tolist() == [1, 3, 0, 2]
    assert previous.tolist() == [-1, -1, 0, 1, -1, -1]
