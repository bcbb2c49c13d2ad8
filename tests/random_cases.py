"""Random small cases for the engine and the oracle.

Every batch ends with a simulation that sets the padded shapes (256 requests, a ring of 256, 32 phases, tables of 1024),
so that all batches of one kind share a compile. A case is a `reference.Case` whose engine is an EngineConfig and whose
cost is a CostTable.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import reference
from hypothesis import strategies as st

from jaxsim.engine import CostTable, EngineConfig, Requests, Simulation, simulate, simulate_many

MS = 10**9  # ps
REQUESTS = 256
TABLE = 1024
BATCH = 31  # random cases in a batch, which one more makes 32
LANES = 16  # per device
COEFFICIENTS = "step", "prefill_token", "prefill_seq", "decode_seq", "decode_ctx", "prefill_ctx", "pair"
TABLES = "linear_ps", "decode_base_ps", "decode_ctx_table_ps"


class Priced:
    """A cost object that knows its table."""

    def __init__(self, prices: CostTable):
        self.prices = prices

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        return self.prices


class Kind(NamedTuple):
    """Features that compile: cases of one kind share a program."""

    threshold: bool  # some case sets long_prefill_token_threshold
    tables: bool  # some case has cost tables
    asynchronous: bool = False  # all cases have async_scheduling
    priority: bool = False  # all cases have the policy "priority"
    inflow: bool = False  # all cases have max_queued_requests
    swap: bool = False  # all cases have preemption_mode="swap"
    ends: bool = False  # all cases have self_preemption="ends"
    returns: bool = False  # with inflow: some case has clients

    def __str__(self) -> str:
        words = ["async"] * self.asynchronous + ["priority"] * self.priority + ["ends"] * self.ends
        words += ["inflow"] * self.inflow + ["returns"] * self.returns + ["swap"] * self.swap
        return " ".join([*words, "rich" if self.tables else "plain"])


PLAIN, RICH = Kind(False, False), Kind(True, True)
ASYNC_PLAIN, ASYNC_RICH = (kind._replace(asynchronous=True) for kind in (PLAIN, RICH))
KINDS = PLAIN, RICH, ASYNC_PLAIN, ASYNC_RICH
PRIORITY_KINDS = tuple(kind._replace(priority=True) for kind in KINDS)
SWAP_KINDS = tuple(kind._replace(swap=True) for kind in (PLAIN, RICH, ASYNC_PLAIN, ASYNC_RICH, PRIORITY_KINDS[1]))
LOOP_KINDS = tuple(kind._replace(inflow=True, returns=True) for kind in (PLAIN, *SWAP_KINDS[-2:]))
RELIEF_KINDS = *LOOP_KINDS, PRIORITY_KINDS[2]._replace(inflow=True), *SWAP_KINDS[:3]
PRIORITY_PLAIN, PRIORITY_RICH = PRIORITY_KINDS[:2]


@st.composite
def case_of(draw: st.DrawFn, kind: Kind = RICH, most: int = 64) -> reference.Case:
    """A case of up to `most` requests with every switch of the rules; lengths and times come from a seed."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, most))
    longest_prompt, longest_output = pick(3, 20, 90, 300), pick(1, 6, 40, 255)
    skewed = lambda most: 1 + int(most * rng.random() ** 3)  # noqa: E731
    prompts = [min(skewed(longest_prompt), longest_prompt) for _ in range(n)]
    outputs = [min(skewed(longest_output), longest_output) for _ in range(n)]

    # Limits: the length cap cuts some outputs, the pool is too small, tight, roomy or endless.
    free_length = max(p + o for p, o in zip(prompts, outputs, strict=True))
    max_model_len = max(prompts) + 1 + pick(0, 2, 10, free_length, free_length)
    longest = min(free_length, max_model_len)
    block_size = pick(1, 2, 3, 4, 8, 12, 16, 16)
    extra_blocks = pick(-2, 0, 0, 1, 1, 2, 3, 5, 10, 30, 10_000)
    seats = pick(1, 2, 3, 5, 8, 16, 16, 40)
    chunked = pick(True, True, True, False)
    budget = max(seats + pick(0, 1, 3, 10, 50, 200, 500), 1 if chunked else max_model_len)
    threshold = pick(0, 1, 2, 7, 16, 40) if kind.threshold else 0
    engine = EngineConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        num_gpu_blocks=max(-(-longest // block_size) + extra_blocks, 1) + 1,
        block_size=block_size,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=threshold,
        long_prefill_token_threshold_adaptive=threshold > 0 and pick(False, True),
        lone_request_without_threshold=pick(True, True, False) if threshold else True,
        watermark=pick(0.0, 0.0, 0.0, 0.05, 0.2, 0.5),
        scheduler_reserve_full_isl=pick(True, False),
        max_num_active_seqs=pick(None, None, None, 1, max(1, seats // 2)),
        async_scheduling=kind.asynchronous,
        policy="priority" if kind.priority else "fcfs",
        self_preemption="ends" if kind.ends else "continues",
        max_queued_requests=pick(1, 1, 2, 3, 5, 10, 1000) if kind.inflow else None,
        max_new_tokens=pick(None, 1, 3, 20) if kind.inflow else None,
        preemption_mode="swap" if kind.swap else "recompute",
        num_cpu_blocks=pick(0, 1, 2, 5, 10, 40, 10_000) if kind.swap else 0,
    )

    # On a coarse grid arrivals meet the ends of iterations exactly; on the finest one any rounding shows.
    unit = pick(1, 1000, MS, MS)
    price = lambda largest: unit * (rng.randint(0, largest) // unit)  # noqa: E731
    largest = {"step": 3 * MS if unit == MS else 20 * MS, "prefill_token": MS, "prefill_seq": MS, "decode_seq": MS}
    largest |= {"decode_ctx": MS // 20, "prefill_ctx": MS // 50, "pair": MS // 500}
    swap_token_ps = price(2 * MS) if kind.swap else 0
    free = pick(False, False, False, False, False, True)
    charged = {name for name in COEFFICIENTS if not free and pick(True, False)}
    coefficients = {f"{name}_ps": price(largest[name]) if name in charged else 0 for name in COEFFICIENTS}
    if kind.asynchronous:  # with iterations that take no time it is open which of two at once comes first
        coefficients["step_ps"] += unit
    # Tables are longer than needed; an entry beyond the batch that anybody reads would show.
    limits = dict(zip(TABLES, (20 * MS, 5 * MS, MS // 20), strict=True)) if kind.tables and not free else {}
    entropy = np.random.default_rng(rng.getrandbits(64))
    tables: Any = {
        name: unit * (entropy.integers(0, limit, TABLE) // unit) if pick(True, False) else None
        for name, limit in limits.items()
    }

    gap = pick(0, 1, MS, 20 * MS, 300 * MS)
    start = pick(0, 0, 7 * MS, 2000 * 1000 * MS)
    arrivals = [start + unit * (rng.randint(0, gap * n) // unit) for _ in range(n)]
    if pick(True, True, False):
        arrivals.sort()
    clients = pick(None, None, None, None, None, 1, 2, 5, n, n + 3)
    think = unit * (rng.randint(0, pick(0, MS, 100 * MS)) // unit)
    clients = None if kind.inflow and not kind.returns else clients
    prices = CostTable(**coefficients, **tables, swap_token_ps=swap_token_ps)
    case = reference.Case(arrivals, prompts, outputs, engine, prices, clients, think)
    if kind.priority:  # ties of priority and of arrival alike
        levels = pick(1, 2, 3, n)
        case = case._replace(priorities=[rng.randrange(levels) - 1 for _ in range(n)])
    return with_close_calls(case, rng) if pick(True, False) else case


def with_close_calls(case: reference.Case, rng: random.Random) -> reference.Case:
    """The case with one arrival at the start of an iteration, or a picosecond from it."""
    starts = [row[1] for row in reference.simulate(case).iters] or [0]
    arrivals = case.arrivals_ps[:]
    arrivals[rng.randrange(len(arrivals))] = max(rng.choice(starts) + rng.choice((-1, 0, 0, 1)), 0)
    return case._replace(arrivals_ps=arrivals)


class Batch:
    """Cases that run together; printed in short, since a failure names the case that it is about."""

    def __init__(self, cases: list[reference.Case]):
        self.cases = cases

    def __repr__(self) -> str:
        return f"<{len(self.cases)} cases>"


@st.composite
def batch_of(draw: st.DrawFn, kind: Kind) -> Batch:
    return Batch(draw(st.lists(case_of(kind), min_size=BATCH, max_size=BATCH)))


def shaping_case(kind: Kind) -> reference.Case:
    """Sets the padded shapes of whatever batch it is in, and a closed loop, which is a compile of its own as well."""
    engine = EngineConfig(
        max_num_seqs=64,
        max_num_batched_tokens=TABLE - 1,
        num_gpu_blocks=1000,
        block_size=32,
        max_model_len=100,
        long_prefill_token_threshold=8 if kind.threshold else 0,
        async_scheduling=kind.asynchronous,
        policy="priority" if kind.priority else "fcfs",
        self_preemption="ends" if kind.ends else "continues",
        max_queued_requests=1000 if kind.inflow else None,
        preemption_mode="swap" if kind.swap else "recompute",
    )
    linear = np.arange(TABLE, dtype=np.int64) * 1000 if kind.tables else None
    prices = CostTable(step_ps=MS, linear_ps=linear)
    clients = None if kind.inflow and not kind.returns else REQUESTS
    return reference.Case([0] * REQUESTS, [1] * REQUESTS, [1] * REQUESTS, engine, prices, clients)


def with_shape(case: reference.Case, kind: Kind) -> reference.Case:
    """The same case with the features of its kind turned on, where that makes no difference, to share a compile."""
    engine, prices = case.engine, case.cost
    if kind.threshold and not engine.long_prefill_token_threshold:
        engine = replace(engine, long_prefill_token_threshold=engine.max_model_len)
    if kind.tables and prices.linear_ps is None:
        prices = replace(prices, linear_ps=np.zeros(TABLE, np.int64))
    return case._replace(engine=engine, cost=prices)


def requests_of(case: reference.Case) -> Requests:
    """Whole picoseconds below 2251 s survive float64 seconds."""
    arrivals, prompts, outputs = map(np.array, (case.arrivals_ps, case.prompts, case.outputs))
    return Requests(arrivals / 1e12, prompts, outputs, case.priorities, case.segments, case.output_streams)


def run_batch(cases: Sequence[reference.Case], kind: Kind, **options: Any) -> list[Simulation]:
    """The engine on up to BATCH cases and on `shaping_case`; the latter's outcome comes last."""
    cases = [*cases, *(shaping_case(kind) for _ in range(BATCH + 1 - len(cases)))]
    return simulate_many(
        [requests_of(case) for case in cases],
        [case.engine for case in cases],
        [Priced(case.cost) for case in cases],
        clients=[case.clients for case in cases],
        think_time_s=[case.think_ps / 1e12 for case in cases],
        lanes=LANES,
        **options,
    )


def run(case: reference.Case, **options: Any) -> Simulation:
    return simulate(
        requests_of(case),
        case.engine,
        Priced(case.cost),
        clients=case.clients,
        think_time_s=case.think_ps / 1e12,
        **options,
    )


def small(requests, clients=None, **changes) -> reference.Case:
    """A case of (arrival in ms, prompt, output) with 1 ms an iteration."""
    arrivals, prompts, outputs = zip(*requests, strict=True)
    sizes: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 4,
        "num_gpu_blocks": 9,
        "block_size": 1,
        "max_model_len": 9,
    }
    engine = EngineConfig(**(sizes | changes))
    return reference.Case([ms * MS for ms in arrivals], [*prompts], [*outputs], engine, CostTable(step_ps=MS), clients)
