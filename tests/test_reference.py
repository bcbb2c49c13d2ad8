"""The oracle itself, against the reference scheduler's golden cases and against results worked out by hand."""

from types import SimpleNamespace
from typing import Any

import block_pool
import golden_cases
import pytest
import reference

MS = 10**9  # ps


def make_engine(**changes: Any) -> SimpleNamespace:
    """A roomy engine with the golden format's defaults, changed by name."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 1000, "num_gpu_blocks": 1001, "block_size": 16}
    static = {"batching": "continuous", "static_padding": False, "static_wait_s": 0.0}
    engine = golden_cases.ENGINE_DEFAULTS | sizes | {"max_model_len": 2000} | static
    assert changes.keys() <= engine.keys()
    return SimpleNamespace(**(engine | changes))


def make_cost(**changes: Any) -> SimpleNamespace:
    """10 ms an iteration and nothing else, changed by name."""
    names = "prefill_token_ps", "prefill_seq_ps", "decode_seq_ps", "prefill_ctx_ps", "pair_ps", "decode_ctx_ps"
    tables = {"linear_ps": None, "decode_base_ps": None, "decode_ctx_table_ps": None}
    cost = {"step_ps": 10 * MS} | dict.fromkeys(names, 0) | tables
    assert changes.keys() <= cost.keys()
    return SimpleNamespace(**(cost | changes))


def make_case(requests, engine, cost=None, clients=None, think_ms=0) -> reference.Case:
    """Requests are (arrival in ms, prompt, output)."""
    arrivals, prompts, outputs = zip(*requests, strict=True)
    arrivals_ps = [arrival * MS for arrival in arrivals]
    return reference.Case(
        arrivals_ps, list(prompts), list(outputs), engine, cost or make_cost(), clients, think_ms * MS
    )


def golden_case(case: dict[str, Any]) -> reference.Case:
    ps = golden_cases.picoseconds
    prices, requests = case["cost"], case["requests"]
    cost = make_cost(
        step_ps=ps(prices["base"]),
        prefill_token_ps=ps(prices["per_prefill_token"]),
        decode_seq_ps=ps(prices["per_decode_seq"]),
        prefill_ctx_ps=ps(prices["per_ctx_token"]),
        decode_ctx_ps=ps(prices["per_ctx_token"]),
    )
    arrivals = [ps(request["arrival"]) or 0 for request in requests]
    prompts = [request["prompt_len"] for request in requests]
    return reference.Case(
        arrivals,
        prompts,
        [request["output_len"] for request in requests],
        make_engine(**case["engine"]),
        cost,
        segments=[request.get("segs") for request in requests],
        output_streams=[request.get("out_stream") for request in requests],
        priorities=[request.get("priority", 0) for request in requests],
    )


def times(result: reference.Result, column: str) -> list[int]:
    """One column of the requests' times, in ms."""
    columns = ["rid", "arrival", "first_sched", "first_token", "finish"]
    return [row[columns.index(column)] / MS for row in result.reqs]


def test_golden_cases_are_here():
    assert len(golden_cases.NAMES) == 50


@pytest.mark.parametrize("name", golden_cases.NAMES)
def test_golden(name):
    case, expected = golden_cases.load(name)
    result = reference.simulate(golden_case(case), case.get("max_iters"))
    assert result.iters == golden_cases.in_picoseconds(expected["iter_cols"], expected["iters"])
    assert result.reqs == golden_cases.in_picoseconds(expected["req_cols"], expected["reqs"])
    golden, totals = expected["totals"], result.totals
    status = "STUCK" if golden["stuck"] else "TRUNCATED" if golden["truncated"] else "DONE"
    assert result.status == status
    assert totals.iterations == golden["n_iters"] - golden["n_zero_iters"]
    assert totals.t0 == min(row[1] for row in result.reqs)
    assert totals.t1 == golden_cases.picoseconds(golden["end_time"])
    assert totals.prefill_tokens == golden["sched_prefill_tokens"]
    assert totals.decode_tokens == golden["sched_decode_tokens"]
    assert totals.num_preemptions == golden["preemptions"]
    assert totals.running_max == golden["max_running"]
    assert totals.kv_peak_blocks == golden["usable_blocks"] - golden["min_free_blocks"]
    assert totals.waiting_max == max(row[4] for row in expected["iters"])
    assert sum(totals.itl.values()) == golden["output_tokens"] - sum(row[3] is not None for row in result.reqs)


@pytest.mark.parametrize("name", golden_cases.NAMES)
def test_integrals_are_areas_over_golden_rows(name):
    """Beyond the rows' own queue lengths, a request waits from its arrival to the iteration that is scheduled next."""
    case, expected = golden_cases.load(name)
    totals = reference.simulate(golden_case(case)).totals
    rows = golden_cases.in_picoseconds(expected["iter_cols"], expected["iters"])
    arrivals = [golden_cases.picoseconds(request["arrival"]) or 0 for request in case["requests"]]
    # Under async scheduling the last column tells when an iteration was scheduled, otherwise it was at its start.
    asked = [(row[13] if len(row) > 13 else row[1], row[1]) for row in rows]
    seen = [min((start for when, start in asked if when >= arrival), default=totals.t1) for arrival in arrivals]
    assert totals.waiting_ps == sum(row[2] * row[4] for row in rows) + sum(seen) - sum(arrivals)
    assert totals.running_ps == sum(row[2] * row[3] for row in rows)
    usable = expected["totals"]["usable_blocks"]
    assert totals.kv_block_ps == sum(row[2] * (usable - row[8]) for row in rows)
    assert totals.above_90_ps == sum(row[2] for row in rows if (usable - row[8]) / usable > 0.9)


@pytest.mark.parametrize(("batching", "end_ms", "occupied"), [("static", 20_000, 2620), ("continuous", 10_200, 2620)])
def test_textbook_batch(batching, end_ms, occupied):
    batch = [(0, 1, 10)] * 31 + [(0, 1, 1000)]
    result = reference.simulate(make_case(batch * 2, make_engine(max_num_seqs=32, batching=batching)))
    assert result.status == "DONE"
    assert result.totals.t1 == end_ms * MS
    assert result.totals.slot_rows == occupied  # 2 * (31 * 10 + 1000) rows, each in one iteration per token
    assert times(result, "finish")[31] == 10_000


def test_closed_loop_two_clients_one_seat():
    requests = [(999, 10, 2)] * 4  # the arrival times are ignored
    result = reference.simulate(make_case(requests, make_engine(max_num_seqs=1), clients=2, think_ms=5))
    assert times(result, "arrival") == [0, 0, 25, 45]
    assert times(result, "first_sched") == [0, 20, 40, 60]
    assert times(result, "first_token") == [10, 30, 50, 70]
    assert times(result, "finish") == [20, 40, 60, 80]
    totals = result.totals
    assert (totals.t0, totals.t1, totals.iterations) == (0, 80 * MS, 8)
    assert totals.waiting_ps == (20 + 15 + 15) * MS
    assert (totals.running_ps, totals.running_max, totals.waiting_max) == (80 * MS, 1, 1)
    assert (totals.refused_seats, totals.refused_budget, totals.refused_kv) == (4, 0, 0)  # at 0, 10, 30 and 50 ms
    assert totals.itl == {57: 4}  # 10 ms: octave 33 from 8.59 ms on, its second eighth


def test_closed_loop_idles_while_clients_think():
    result = reference.simulate(make_case([(0, 10, 1)] * 2, make_engine(), clients=1, think_ms=50))
    assert times(result, "finish") == [10, 70]
    assert [row[1] for row in result.iters] == [0, 60 * MS]


def test_closed_loop_that_sticks_leaves_requests_unsent():
    engine = make_engine(num_gpu_blocks=3, block_size=4, max_num_seqs=1)
    result = reference.simulate(make_case([(0, 9, 1)] * 3, engine, clients=2))
    assert result.status == "STUCK"
    assert [row[1] for row in result.reqs] == [0, 0, None]


def test_static_padding_bills_finished_rows():
    """Prompts of 4, outputs 1, 2 and 4: the contexts after the three decode iterations are 5, 6 and 7."""
    requests = [(0, 4, 1), (0, 4, 2), (0, 4, 4)]
    cost = make_cost(decode_seq_ps=MS, decode_ctx_ps=MS // 1000)
    plain = reference.simulate(make_case(requests, make_engine(batching="static"), cost))
    padded = reference.simulate(make_case(requests, make_engine(batching="static", static_padding=True), cost))
    assert [row[2] * 1000 // MS for row in plain.iters] == [10_000, 12_010, 11_006, 11_007]  # us
    assert [row[2] * 1000 // MS for row in padded.iters] == [10_000, 13_015, 13_018, 13_021]
    assert [row[9] for row in padded.iters] == [[0, 4, 1, 4, 2, 4], [1, 1, 2, 1], [2, 1], [2, 1]]
    assert [row[12] for row in padded.iters] == [[0], [1], [], [2]]
    assert times(padded, "finish") == [10, 23.015, 49.054]
    assert plain.totals.slot_rows == padded.totals.slot_rows == 3 + 2 + 1 + 1
    assert (plain.totals.decode_tokens, padded.totals.decode_tokens) == (4, 9)
    assert [row[3] for row in plain.iters] == [3] * 4
    assert plain.totals.running_ps == 3 * plain.totals.t1


def test_static_wait_ends_with_a_full_batch_or_at_the_deadline():
    engine = make_engine(batching="static", max_num_seqs=3, static_wait_s=0.010)
    result = reference.simulate(make_case([(0, 4, 2), (4, 4, 2), (20, 4, 2)], engine))
    assert times(result, "first_sched") == [10, 10, 30]  # the third's deadline is the end of the first batch
    assert times(result, "finish") == [30, 30, 50]
    full = reference.simulate(make_case([(0, 4, 2), (1, 4, 2), (2, 4, 2)], engine))
    assert times(full, "first_sched") == [2, 2, 2]
    at_once = reference.simulate(make_case([(0, 4, 2), (4, 4, 2)], make_engine(batching="static")))
    assert times(at_once, "first_sched") == [0, 20]


def test_static_wait_is_over_when_the_next_request_does_not_fit():
    engine = make_engine(batching="static", num_gpu_blocks=3, static_wait_s=0.010)
    result = reference.simulate(make_case([(0, 4, 2), (1, 4, 2), (2, 4, 2)], engine))
    assert times(result, "first_sched") == [2, 2, 22]  # the third's deadline, 12, has passed by then
    assert [row[3:5] for row in result.iters] == [[2, 1], [2, 1], [1, 0], [1, 0]]
    assert result.totals.refused_seats == 2


def test_static_wait_without_further_arrivals_ends_at_the_deadline():
    engine = make_engine(batching="static", static_wait_s=0.010)
    assert times(reference.simulate(make_case([(3, 4, 1)], engine)), "first_sched") == [13]


@pytest.mark.parametrize(("chunked", "chunks"), [(True, [[0, 8, 1, 2], [1, 6]]), (False, [[0, 8], [1, 8]])])
def test_static_prefill_fills_the_budget_in_batch_order(chunked, chunks):
    engine = make_engine(batching="static", max_num_batched_tokens=10, enable_chunked_prefill=chunked)
    result = reference.simulate(make_case([(0, 8, 2), (0, 8, 1)], engine))
    assert [row[9] for row in result.iters] == [*chunks, [0, 1]]
    assert times(result, "first_token") == [10, 20]
    assert times(result, "finish") == [30, 20]


def test_static_batch_reserves_whole_requests_until_it_ends():
    """Each request needs two blocks of 4 (3 + 5 tokens); four are usable, so the third waits for the first two."""
    engine = make_engine(batching="static", num_gpu_blocks=5, block_size=4)
    result = reference.simulate(make_case([(0, 3, 5)] * 3, engine))
    assert times(result, "finish") == [50, 50, 100]
    assert [row[8] for row in result.iters] == [0] * 5 + [2] * 5
    assert result.totals.kv_peak_blocks == 4
    assert result.totals.kv_block_ps == (4 * 50 + 2 * 50) * MS
    assert result.totals.above_90_ps == 50 * MS
    assert result.totals.waiting_ps == 50 * MS


def test_static_head_too_large_for_the_pool_sticks():
    result = reference.simulate(make_case([(0, 40, 1), (5, 4, 1)], make_engine(batching="static", num_gpu_blocks=3)))
    assert (result.status, result.iters) == ("STUCK", [])
    assert (result.totals.t0, result.totals.t1, result.totals.waiting_ps) == (0, 0, 0)


def test_endless_recomputation_is_stuck():
    """Without the full-sequence check the first chunk (8 of 20 tokens) fits three blocks of 4, the second never."""
    engine = make_engine(
        num_gpu_blocks=4, block_size=4, max_num_batched_tokens=8, scheduler_reserve_full_isl=False, max_num_seqs=1
    )
    result = reference.simulate(make_case([(0, 20, 2), (0, 4, 2)], engine))
    assert result.status == "STUCK"
    assert [row[9:11] for row in result.iters[:4]] == [[[0, 8], []], [[], [0]]] * 2
    assert len(result.iters) == 1 + 4 * 2 + 1000 + 22 + 1
    assert result.recomputed == [result.totals.recomputed_tokens, 0] == [8 * result.totals.num_preemptions, 0]


def test_a_prompt_of_many_chunks_is_progress():
    engine = make_engine(max_num_batched_tokens=4, max_model_len=40_000, num_gpu_blocks=2501, max_num_seqs=1)
    result = reference.simulate(make_case([(0, 30_000, 1)], engine))
    assert (result.status, result.totals.iterations) == ("DONE", 7500)


def test_truncated():
    result = reference.simulate(make_case([(0, 4, 3)], make_engine()), max_iters=2)
    assert (result.status, len(result.iters), result.reqs[0][4]) == ("TRUNCATED", 2, None)


@pytest.mark.parametrize(
    ("changes", "prompt", "reason"),
    [
        ({"max_num_batched_tokens": 8}, 8, "refused_budget"),  # the first prompt takes all of it
        ({"max_num_batched_tokens": 10, "enable_chunked_prefill": False}, 8, "refused_budget"),  # 2 left, 8 needed
        ({"num_gpu_blocks": 3}, 20, "refused_kv"),  # the first prompt takes both blocks
        ({"max_num_active_seqs": 1}, 8, "refused_seats"),
        ({"max_num_active_seqs": 1, "num_gpu_blocks": 3}, 20, "refused_seats"),  # both hold: seats are asked first
    ],
)
def test_refusals(changes, prompt, reason):
    totals = reference.simulate(make_case([(0, prompt, 1)] * 2, make_engine(**changes))).totals
    refused = {name: getattr(totals, name) for name in ("refused_seats", "refused_budget", "refused_kv")}
    assert refused == dict.fromkeys(refused, 0) | {reason: 1}


def test_adaptive_threshold_by_hand():
    """Two requests, budget 100: chunks of max(30, 100 // 2); the survivor alone has no limit."""
    engine = make_engine(
        max_num_batched_tokens=100, long_prefill_token_threshold=30, long_prefill_token_threshold_adaptive=True
    )
    result = reference.simulate(make_case([(0, 60, 1), (0, 250, 1)], engine))
    assert [row[9] for row in result.iters] == [[0, 50, 1, 50], [0, 10, 1, 50], [1, 100], [1, 50]]


def test_a_lone_request_is_cut_before_0_33():
    engine = make_engine(long_prefill_token_threshold=30, lone_request_without_threshold=False)
    result = reference.simulate(make_case([(0, 70, 1)], engine))
    assert [row[9] for row in result.iters] == [[0, 30], [0, 30], [0, 10]]


def test_self_preemption_ended_pass_1_before_0_33():
    """Blocks for three: 0 asks first for a second one and is the least urgent; 1 and 2 miss their turn with it."""
    sizes = {"num_gpu_blocks": 4, "block_size": 2, "policy": "priority", "self_preemption": "ends"}
    case = make_case([(0, 1, 3), (10, 2, 2), (10, 1, 2)], make_engine(**sizes))._replace(priorities=[1, 0, 0])
    result = reference.simulate(case)
    assert [(row[9], row[10]) for row in result.iters[:4]] == [
        ([0, 1], []),
        ([0, 1, 1, 2, 2, 1], []),
        ([], [0]),
        ([1, 1, 2, 1], []),
    ]


def test_freed_blocks_without_a_hash_joined_the_tail_before_0_33():
    """One free block and the three of 0, of which the last is not full: at the tail it lets the full ones survive."""
    pool = block_pool.BlockPool(4, plain_first=False)
    blocks = pool.take(3)
    for block in blocks[:2]:
        pool.register(block, block)
    pool.release(blocks)
    assert list(pool.queue) == [4, 3, 2, 1]
    first = block_pool.BlockPool(4)
    blocks = first.take(3)
    for block in blocks[:2]:
        first.register(block, block)
    first.release(blocks)
    assert list(first.queue) == [3, 4, 2, 1]


def test_bill_has_every_term_of_the_cost_table():
    """A chunk of 3 tokens after 5, and decodes that reach contexts of 11 and (padding) 20."""
    cost = SimpleNamespace(
        step_ps=1,
        prefill_token_ps=10,
        prefill_seq_ps=100,
        decode_seq_ps=1_000,
        prefill_ctx_ps=10_000,
        pair_ps=1_000_000,
        decode_ctx_ps=10**9,
        linear_ps=[10**12 * tokens for tokens in range(9)],
        decode_base_ps=[0, 1, 2 * 10**15],
        decode_ctx_table_ps=[0, 1, 10**18],
    )
    chunk, decode = reference.Request(0, 9, 1, 0), reference.Request(1, 9, 4, 0)
    rows = [reference.Row(chunk, 3, 5, False, False), reference.Row(decode, 1, 10, True, True)]
    duration = (
        (1 + 3 * 10 + 100 + 2 * 1_000 + 8 * 10_000 + (3 * 5 + 6) * 1_000_000 + 31 * 10**9)
        + 5 * 10**12  # five tokens in all
        + 2 * 10**15
        + 31 * 10**18
    )
    step = reference.Step(rows=rows, padding=[20])
    assert reference.bill(cost, step) == reference.Bill(3, 2, 8 + 31, duration)
    assert reference.bill(cost, reference.Step()).duration == 0


@pytest.mark.parametrize(
    ("gap_ps", "index"),
    [(0, 0), (2**26 - 1, 0), (2**26, 0), (9 * 2**23 - 1, 0), (9 * 2**23, 1), (2**27 - 1, 7), (2**27, 8)]
    + [(2**50, 192), (2**51 - 1, 199), (2**51, 199), (2**60, 199)],
)
def test_itl_bins(gap_ps, index):
    assert reference.itl_bin(gap_ps) == index


@pytest.mark.parametrize("request_", [(0, 2000, 1), (0, 0, 1), (0, 1, 0)])
def test_impossible_lengths_are_refused(request_):
    with pytest.raises(ValueError, match="request 0"):
        reference.simulate(make_case([request_], make_engine()))


def test_preemption_comes_first_among_the_reasons():
    """Two decodes take the last two blocks of 3 in the fourth iteration, when the third request (18 computed) needs a
    seventh. It then has to recompute 19 tokens whole: more than the 18 that two decodes leave, until they end."""
    engine = make_engine(
        num_gpu_blocks=11, block_size=3, max_model_len=20, max_num_batched_tokens=20, enable_chunked_prefill=False
    )
    result = reference.simulate(make_case([(0, 1, 5), (0, 1, 5), (0, 16, 4)], engine))
    assert [row[10] for row in result.iters] == [[], [], [], [2], [], []]
    assert times(result, "finish") == [50, 50, 60]
    totals = result.totals
    assert (totals.refused_seats, totals.refused_budget, totals.refused_kv) == (0, 1, 1)
    assert (result.recomputed, totals.waiting_ps) == ([0, 0, 18], 20 * MS)


def test_adaptive_threshold_needs_a_threshold():
    engine = make_engine(max_num_batched_tokens=100, long_prefill_token_threshold_adaptive=True)
    result = reference.simulate(make_case([(0, 80, 1), (0, 40, 1)], engine))
    assert [row[9] for row in result.iters] == [[0, 80, 1, 20], [1, 20]]


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_output_ends_at_max_model_len(batching):
    result = reference.simulate(make_case([(0, 18, 10)], make_engine(max_model_len=20, batching=batching)))
    assert (result.reqs[0][8], times(result, "finish")) == (2, [20])


@pytest.mark.parametrize("name", [name for name in golden_cases.NAMES if name.startswith("apc")])
def test_chains_of_the_golden_cases(name):
    """Keys are equal exactly where the reference scheduler's hashes are."""
    case, expected = golden_cases.load(name)
    inputs = golden_case(case)
    outputs = [min(o, inputs.engine.max_model_len - p) for p, o in zip(inputs.prompts, inputs.outputs, strict=True)]
    tokens = block_pool.token_identities(inputs.prompts, outputs, inputs.segments, inputs.output_streams)
    ours = block_pool.chains(tokens, inputs.engine.block_size)
    pairs = {
        pair for mine, theirs in zip(ours, expected["chain"], strict=True) for pair in zip(mine, theirs, strict=True)
    }
    assert len(pairs) == len({mine for mine, _ in pairs}) == len({theirs for _, theirs in pairs})


def test_a_full_hit_gives_up_the_last_block_and_keeps_two_copies():
    """Prompts of 32 in blocks of 16: the second request finds one block, and its own copy of the other is kept too."""
    engine = make_engine(enable_prefix_caching=True)
    case = make_case([(0, 32, 1), (100, 32, 1), (200, 40, 1)], engine)
    case = case._replace(segments=[[("x", 0, 32)], [("x", 0, 32)], [("x", 0, 40)]])
    result = reference.simulate(case)
    assert [row[6] for row in result.reqs] == [0, 16, 32]
    assert [row[9] for row in result.iters] == [[0, 32], [1, 16], [2, 8]]
