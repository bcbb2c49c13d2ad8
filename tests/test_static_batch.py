"""Static batching: results worked out by hand, and random cases against the oracle."""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
import reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxsim.engine import (
    AffineCost,
    CostTable,
    EngineConfig,
    Requests,
    Simulation,
    Status,
    lanes,
    simulate,
    simulate_many,
)
from jaxsim.engine.layout import Knobs, Limits
from jaxsim.engine.state import initial

MS = 10**9  # ps
TEN_MS = AffineCost(0.010, 0.0, 0.0, 0.0)
CASES = 24  # of an example, in one call


@dataclasses.dataclass(frozen=True, eq=False)
class FixedCost:
    """A cost that is its table."""

    value: CostTable

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        return self.value


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    requests: Requests
    engine: EngineConfig
    cost: FixedCost
    clients: int | None
    think_s: float


def make_engine(**changes: Any) -> EngineConfig:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 2000, "num_gpu_blocks": 1001, "max_model_len": 2000}
    values: dict[str, Any] = {**sizes, "batching": "static", **changes}
    return EngineConfig(**values)


def make_requests(*rows: tuple[float, int, int]) -> Requests:
    """Rows are (arrival in ms, prompt, output)."""
    arrivals, prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    return Requests(arrivals / 1000, prompts, outputs)


def ms(times_ps: np.ndarray) -> list[float]:
    return [time / MS for time in times_ps.tolist()]


@pytest.mark.parametrize(("batching", "end_s", "iterations"), [("static", 20.0, 2000), ("continuous", 10.2, 1020)])
def test_textbook_batch(batching, end_s, iterations):
    batch = [(0, 1, 10)] * 31 + [(0, 1, 1000)]
    result = simulate(make_requests(*batch * 2), make_engine(max_num_seqs=32, batching=batching), TEN_MS)
    assert result.status == Status.DONE
    assert result.totals.duration_s == end_s
    assert result.totals.iterations == iterations
    assert result.finish_s[31] == 10.0
    # 2 * (31 * 10 + 1000) rows, each in one iteration per token
    assert result.totals.slot_occupancy == 2620 / (32 * iterations)
    assert result.totals.refused_seats == 1000 if batching == "static" else result.totals.refused_seats > 0
    assert result.totals.scan_steps < 200


def test_finished_rows_cost_nothing_unless_padded():
    # 1 ms per decode row and 1 us per token of its context: prompts in 10 ms, then 2 rows, then 1.
    cost = AffineCost(0.010, 0.0, 0.001, 0.000001)
    requests = make_requests((0, 4, 2), (0, 8, 4))
    plain = simulate(requests, make_engine(), cost)
    padded = simulate(requests, make_engine(static_padding=True), cost)
    first = 10.012  # both prompts: 10 ms and 12 tokens of context
    second = first + 12.014  # 2 rows, contexts 5 and 9
    assert ms(plain.first_token_ps) == ms(padded.first_token_ps) == [first, first]
    assert plain.finish_ps[0] == padded.finish_ps[0] == round(second * MS)
    assert plain.finish_ps[1] == round((second + 11.010 + 11.011) * MS)
    assert padded.finish_ps[1] == round((second + 12.016 + 12.018) * MS)
    assert (plain.totals.decode_tokens, padded.totals.decode_tokens) == (4, 6)
    assert plain.totals.slot_occupancy == padded.totals.slot_occupancy == (2 + 2 + 1 + 1) / (4 * 4)


def test_wait_ends_with_a_full_batch_or_at_the_deadline():
    engine = make_engine(max_num_seqs=3, static_wait_s=0.010)
    full = simulate(make_requests((0, 4, 2), (2, 4, 2), (5, 4, 2), (6, 4, 1)), engine, TEN_MS)
    assert ms(full.first_scheduled_ps) == [5, 5, 5, 25]  # the last waits until 16 ms, behind a batch that ends at 25
    late = simulate(make_requests((0, 4, 2), (4, 4, 2), (11, 4, 1)), engine, TEN_MS)
    assert ms(late.first_scheduled_ps) == [10, 10, 30]  # the third could wait until 21 ms
    assert ms(late.finish_ps) == [30, 30, 40]
    alone = simulate(make_requests((3, 4, 1)), engine, TEN_MS)
    assert ms(alone.first_scheduled_ps) == [13]


def test_wait_is_over_when_the_next_request_does_not_fit():
    engine = make_engine(num_gpu_blocks=3, static_wait_s=0.010)  # two blocks of 16 tokens
    result = simulate(make_requests((0, 20, 4), (3, 10, 2)), engine, TEN_MS)
    assert ms(result.first_scheduled_ps) == [3, 43]


@pytest.mark.parametrize(
    ("chunked", "first_scheduled", "first_token"),
    [(True, [0, 0, 10], [10, 20, 20]), (False, [0, 10, 10], [10, 20, 20])],
)
def test_prompts_fill_the_budget_in_order(chunked, first_scheduled, first_token):
    # Prompts of 6, 7 and 3 tokens, 10 a time: 6 + 4, then 3 + 3; whole ones only: 6, then 7 + 3.
    engine = make_engine(max_num_batched_tokens=10, max_model_len=10, enable_chunked_prefill=chunked)
    result = simulate(make_requests((0, 6, 1), (0, 7, 2), (0, 3, 3)), engine, TEN_MS)
    assert ms(result.first_scheduled_ps) == first_scheduled
    assert ms(result.first_token_ps) == first_token
    assert ms(result.finish_ps) == [10, 30, 40]  # a single token ends with its own prompt, decodes wait for the last


def test_a_long_prompt_takes_few_steps():
    engine = make_engine(max_num_batched_tokens=100, max_model_len=200_000, num_gpu_blocks=20_000)
    result = simulate(make_requests((0, 126_000, 3)), engine, TEN_MS)
    assert ms(result.first_token_ps) == [12_600]
    assert (result.totals.iterations, result.totals.prefill_tokens) == (1262, 126_000)
    assert result.totals.scan_steps < 10


def test_closed_loop():
    # Two seats, three clients, 5 ms between requests; the trace's times are ignored.
    requests = make_requests((999, 4, 2), (999, 4, 3), (999, 4, 1), (999, 4, 1), (999, 4, 1))
    result = simulate(requests, make_engine(max_num_seqs=2), TEN_MS, clients=3, think_time_s=0.005)
    # The first batch runs from 0 to 30 with finishes at 20 and 30; their clients come back at 25 and 35.
    assert ms(result.arrival_ps) == [0, 0, 0, 25, 35]
    assert ms(result.first_scheduled_ps) == [0, 0, 30, 30, 40]
    assert ms(result.finish_ps) == [20, 30, 40, 40, 50]


def test_blocks_are_reserved_for_whole_requests_until_the_batch_ends():
    engine = make_engine(num_gpu_blocks=5, block_size=4)  # four blocks
    result = simulate(make_requests((0, 4, 1), (0, 4, 4), (0, 1, 1)), engine, TEN_MS)
    assert ms(result.first_scheduled_ps) == [0, 0, 40]
    # Four blocks for 40 ms, one for 10.
    assert result.totals.kv_usage_peak == 1.0
    assert result.totals.kv_usage_mean == (4 * 40 + 1 * 10) / (4 * 50)
    assert result.totals.kv_time_above_90 == 40 / 50
    assert result.totals.waiting_max == 1


def test_a_request_larger_than_the_pool_is_stuck():
    result = simulate(make_requests((7, 4, 2), (9, 40, 1), (50, 4, 1)), make_engine(num_gpu_blocks=3), TEN_MS)
    assert result.status == Status.STUCK
    assert result.finish_ps.tolist() == [27 * MS, -1, -1]
    assert result.totals.duration_s == 0.02
    at_once = simulate(make_requests((7, 40, 1)), make_engine(num_gpu_blocks=3), TEN_MS)
    assert at_once.status == Status.STUCK
    assert at_once.totals.duration_s == 0.0


def random_cost(rng: np.random.Generator) -> FixedCost:
    """Any mix of coefficients, none up to milliseconds, and tables of one length, so that all share one compile."""
    names = [field.name for field in dataclasses.fields(CostTable)]
    scale = [10 * MS, MS // 10, MS // 10, MS // 10, MS // 100, MS // 100, MS // 1000]
    values: dict[str, Any] = {
        name: int(rng.integers(0, most)) if rng.random() < 0.6 else 0 for name, most in zip(names, scale, strict=False)
    }
    for name, most in zip(names[-3:], (MS, MS, MS // 100), strict=True):
        values[name] = rng.integers(0, most if rng.random() < 0.3 else 1, 401)
    return FixedCost(CostTable(**values))


def random_setting(rng: np.random.Generator) -> Setting:
    """A small case that turns every switch of static batching."""
    some = lambda low, high: int(rng.integers(low, high + 1))  # noqa: E731
    size = some(1, 40)
    limit = some(20, 300)
    seats = some(1, 12)
    chunked = rng.random() < 0.7
    budget = max(some(1, 60) if rng.random() < 0.5 else some(20, 400), seats)
    budget = budget if chunked else max(budget, limit)
    block = int(rng.choice([1, 2, 3, 4, 8, 16]))
    longest = -(-limit // block)
    blocks = some(longest, 4 * longest) + 1 if rng.random() < 0.9 else some(1, longest) + 1
    unit = rng.choice([1, 1000, 1_000_000])  # us
    gaps = rng.integers(0, 30, size) * (rng.random(size) < 0.7)
    arrivals = rng.permutation(np.cumsum(gaps)) if rng.random() < 0.3 else np.cumsum(gaps)
    prompts = rng.integers(1, min(limit, some(2, 200)), size)
    outputs = rng.integers(1, some(2, 60), size)
    outputs = np.where(rng.random(size) < 0.2, 1, outputs)
    engine = EngineConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        num_gpu_blocks=blocks,
        max_model_len=limit,
        block_size=block,
        enable_chunked_prefill=chunked,
        batching="static",
        static_padding=bool(rng.random() < 0.4),
        static_wait_s=float(rng.choice([0.0, 0.0, 1e-4, 0.02, 5.0])),
    )
    clients = some(1, 12) if rng.random() < 0.3 else None
    think_s = float(rng.choice([0.0, 1e-3, 0.5]))
    requests = Requests(arrivals * unit / 1e6, prompts, outputs)
    return Setting(requests, engine, random_cost(rng), clients, think_s)


def expectation(case: Setting) -> reference.Result:
    return reference.simulate(
        reference.Case(
            [round(value * 1e12) for value in case.requests.arrival_s.tolist()],
            case.requests.prompt_len.tolist(),
            case.requests.output_len.tolist(),
            case.engine,
            case.cost.value,
            case.clients,
            round(case.think_s * 1e12),
        )
    )


def same(result: Simulation, expected: reference.Result, engine: EngineConfig) -> None:
    """Everything that both report, exactly."""
    assert result.status.name == expected.status
    never = lambda column: [-1 if row[column] is None else row[column] for row in expected.reqs]  # noqa: E731
    assert result.arrival_ps.tolist() == never(1)
    assert result.first_scheduled_ps.tolist() == never(2)
    assert result.first_token_ps.tolist() == never(3)
    assert result.finish_ps.tolist() == never(4)
    assert result.output_tokens.tolist() == never(8)
    totals, exact = result.totals, expected.totals
    duration, blocks, runs = exact.t1 - exact.t0, engine.num_gpu_blocks - 1, exact.iterations
    share = lambda part, whole: float(part) / whole if whole else 0.0  # noqa: E731
    same_names = ["iterations", "prefill_tokens", "decode_tokens", "num_preemptions", "recomputed_tokens"]
    same_names += ["running_max", "waiting_max", "refused_seats", "refused_kv", "refused_budget"]
    for name in same_names:
        assert getattr(totals, name) == getattr(exact, name), name
    assert totals.scheduled_tokens == exact.prefill_tokens + exact.decode_tokens
    assert totals.output_tokens == sum(row[8] for row in expected.reqs)
    assert totals.kv_usage_peak == exact.kv_peak_blocks / blocks
    assert totals.slot_occupancy == share(exact.slot_rows, engine.max_num_seqs * runs)
    if result.status == Status.DONE:  # a stuck run has no end; when that is noticed is the program's affair
        assert totals.duration_s == duration / 1e12
        assert totals.kv_usage_mean == share(exact.kv_block_ps, duration * blocks)
        assert totals.kv_time_above_90 == share(exact.above_90_ps, duration)
    if result.status == Status.DONE and duration:
        assert totals.waiting_mean == pytest.approx(exact.waiting_ps / duration, rel=1e-12)
    assert {i: n for i, n in enumerate(totals.itl_histogram.tolist()) if n} == exact.itl


def run_all(cases: list[Setting], leap: bool, **options: Any) -> list[Simulation]:
    columns = zip(*((c.requests, c.engine, c.cost, c.clients, c.think_s) for c in cases), strict=True)
    requests, engines, costs, clients, thinks = (list(column) for column in columns)
    return simulate_many(requests, engines, costs, clients=clients, think_time_s=thinks, leap=leap, lanes=8, **options)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1))
def test_agrees_with_the_oracle(seed):
    rng = np.random.default_rng(seed)
    cases = [random_setting(rng) for _ in range(CASES)]
    leaping, stepping = run_all(cases, True), run_all(cases, False)
    for case, leapt, stepped in zip(cases, leaping, stepping, strict=True):
        expected = expectation(case)
        same(leapt, expected, case.engine)
        same(stepped, expected, case.engine)
        assert stepped.totals.scan_steps >= leapt.totals.scan_steps


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_iteration_agrees_with_the_oracle(seed):
    case = random_setting(np.random.default_rng(seed))
    expected = expectation(case)
    result = simulate(
        case.requests, case.engine, case.cost, clients=case.clients, think_time_s=case.think_s, trace=True
    )
    assert result.iterations == expected.iters
    same(result, expected, case.engine)


def test_steps_do_not_grow_with_the_outputs():
    rng = np.random.default_rng(0)
    rows = [(0, int(rng.integers(1, 60)), int(rng.integers(1, 250))) for _ in range(64)]
    for seats in (1, 4, 16, 64):
        engine = make_engine(max_num_seqs=seats, max_num_batched_tokens=64)
        result = simulate(make_requests(*rows), engine, TEN_MS)
        # Each request is taken, at most twice given a chunk, and finished, with a few cuts at bin edges.
        assert result.totals.scan_steps <= 4 * 64
        assert result.totals.iterations > 250


def test_no_copy_of_the_memory_in_the_compiled_loop():
    limits = Limits(requests=64, ring=256, phases=16, closed_loop=True, static=True)
    flags = {"chunked", "full_isl", "adaptive", "lifted", "padding"}
    kinds = {
        name: np.bool_ if name in flags else np.int64 if name.endswith("_ps") else np.int32 for name in Knobs._fields
    }
    values: dict[str, Any] = {name: kind(1) for name, kind in kinds.items()}
    with lanes.x64():
        knobs, ones = Knobs(**values), jax.numpy.ones(64, np.int32)
        state = initial(limits, ones, ones, jax.numpy.zeros(64, np.int64), knobs)
        knobs, state = jax.tree.map(lambda leaf: np.stack([leaf] * 8), (knobs, state))
        chunk = jax.jit(functools.partial(lanes.advance, limits, 8), donate_argnums=(4,))
        text = chunk.lower(np.bool_(True), knobs, None, None, state).compile().as_text() or ""
    assert f"s32[8,{limits.memory}]" in text
    assert not re.findall(rf"s32\[8,{limits.memory}\]\S* copy\(", text)


def test_records_do_not_depend_on_statistics():
    rng = np.random.default_rng(0)
    cases = [random_setting(rng) for _ in range(CASES)]
    for full, bare in zip(run_all(cases, True), run_all(cases, True, statistics=False), strict=True):
        for name in ("arrival_ps", "first_scheduled_ps", "first_token_ps", "finish_ps", "output_tokens"):
            assert np.array_equal(getattr(full, name), getattr(bare, name))
        assert full.status == bare.status
        assert full.totals.iterations == bare.totals.iterations
