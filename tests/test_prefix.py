"""Prefix caching in the engine: golden cases, random cases against the oracle, and what a hit is worth."""

import json
import random
import sys
from typing import Any

import block_pool
import golden_cases
import numpy as np
import pytest
import reference
from agreement import agree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_cases import Priced, requests_of

from jaxsim.engine import AffineCost, CostTable, EngineConfig, Requests, Simulation, prepare, simulate, simulate_many
from jaxsim.engine.chains import shared_blocks, trie_of
from jaxsim.errors import ConfigError

MS = 10**9  # ps
GOLDEN = [name for name in golden_cases.NAMES if "apc" in name]
CASES = 32  # of an example, in one call


@pytest.fixture
def one_shape(monkeypatch):
    """Golden cases of every size share one compiled program."""
    monkeypatch.setattr(prepare, "_grown", lambda size, least: 512 if size <= 512 else 4096)


def golden_arguments(name: str) -> tuple[Requests, EngineConfig, AffineCost]:
    case, _ = golden_cases.load(name)
    listed = case["requests"]
    prices = ("base", "per_prefill_token", "per_decode_seq", "per_ctx_token")
    requests = Requests(
        np.array([request["arrival"] for request in listed]) / 1e6,
        np.array([request["prompt_len"] for request in listed]),
        np.array([request["output_len"] for request in listed]),
        segments=[request.get("segs") for request in listed],
        output_stream=[request.get("out_stream") for request in listed],
    )
    return requests, EngineConfig(**case["engine"]), AffineCost(*(case["cost"][price] / 1e6 for price in prices))


def records(simulation: Simulation) -> list[list[int]]:
    """The golden columns of requests, -1 for never."""
    names = "arrival_ps", "first_scheduled_ps", "first_token_ps", "finish_ps", "num_preemptions", "hit_tokens"
    columns = [getattr(simulation, name) for name in (*names, "resumed_hit_tokens", "output_tokens")]
    return [[i, *map(int, row)] for i, row in enumerate(zip(*columns, strict=True))]


def never(rows: list[list[Any]]) -> list[list[int]]:
    return [[-1 if value is None else value for value in row] for row in rows]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_iterations(name, one_shape):
    _, expected = golden_cases.load(name)
    simulation = simulate(*golden_arguments(name), trace=True)
    assert simulation.iterations == golden_cases.in_picoseconds(expected["iter_cols"], expected["iters"])


@pytest.mark.parametrize("leap", [True, False])
def test_golden_requests(leap, one_shape):
    requests, engines, costs = zip(*map(golden_arguments, GOLDEN), strict=True)
    simulations = simulate_many(list(requests), list(engines), list(costs), leap=leap)
    for name, simulation in zip(GOLDEN, simulations, strict=True):
        _, expected = golden_cases.load(name)
        rows = golden_cases.in_picoseconds(expected["req_cols"], expected["reqs"])
        assert records(simulation) == never(rows), name


def random_prompts(rng: random.Random, block_size: int, longest: int, count: int) -> tuple[list, list, list]:
    """Segments, output lengths and output streams of requests that share prefixes in one of several ways."""
    segments, outputs, streams = [], [], []
    style = rng.choice(["mixed", "system prompts", "conversations", "equal prompts"])
    for i in range(count):
        stream = rng.choice([None, "z0", "z1"]) if style in ("mixed", "equal prompts") else None
        if style == "system prompts":
            own = f"u{i}" if rng.random() < 0.8 else "u"
            system = (f"s{rng.randint(0, 1)}", 0, rng.choice([block_size, 2 * block_size, 5]))
            parts = [system, (own, 0, rng.randint(1, 6))]
        elif style == "conversations" and i and rng.random() < 0.7:
            turn = rng.randrange(i)
            quoted = max(1, outputs[turn] - rng.randint(0, 1))
            parts = [*segments[turn], (streams[turn] or f"o{turn}", 0, quoted), (f"u{i}", 0, rng.randint(1, 4))]
        elif style == "equal prompts":
            parts = [(f"g{rng.randint(0, 1)}", 0, rng.choice([1, 2, 3, 4]) * block_size + rng.randint(0, 1))]
        else:
            names = ["a", "b", "o0", "o1", "p0", f"u{i}"]
            parts = [(rng.choice(names), rng.choice([0, 0, 2]), rng.randint(1, 10)) for _ in range(rng.randint(1, 3))]
        segments.append(first_tokens(parts, longest - 1))
        outputs.append(rng.choice([1, 2, 3, 5, 8, 12, 20]))
        streams.append(stream)
    return segments, outputs, streams


def first_tokens(parts: list[tuple[str, int, int]], limit: int) -> list[tuple[str, int, int]]:
    kept = []
    for name, start, length in parts:
        kept += [(name, start, min(length, limit))] if limit > 0 else []
        limit -= length
    return kept


def random_case(rng: random.Random, thresholds: list[int], asynchronous: bool) -> reference.Case:
    block_size, longest, seqs = rng.choice([1, 2, 3, 4]), rng.choice([16, 24, 40]), rng.randint(1, 8)
    chunked = rng.random() < 0.8
    engine = EngineConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, rng.choice([4, 8, 16, 32])) if chunked else longest + rng.choice([0, 24]),
        num_gpu_blocks=min(-(-longest // block_size) + 1 + rng.choice([0, 0, 1, 2, 4, 8, 20]), 64),
        block_size=block_size,
        max_model_len=longest,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=True,
        scheduler_reserve_full_isl=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.0, 0.05, 0.2]),
        max_num_active_seqs=rng.choice([None, None, max(1, seqs - 1)]),
        # Where some case has one all have one, to share a program; that of the whole length makes no difference.
        long_prefill_token_threshold=rng.choice(thresholds) or (longest if any(thresholds) else 0),
        long_prefill_token_threshold_adaptive=rng.random() < 0.3,
        async_scheduling=asynchronous,
    )
    segments, outputs, streams = random_prompts(rng, block_size, longest, rng.randint(2, 14))
    gaps = rng.choice([[0], [0, 0, 1, 3, 10, 40]])
    context = MS * rng.choice([0, 0, 1])
    return reference.Case(
        [MS * int(arrival) for arrival in np.cumsum([rng.choice(gaps) for _ in outputs])],
        [sum(length for _, _, length in parts) for parts in segments],
        outputs,
        engine,
        CostTable(2 * MS, MS * rng.choice([0, 1]), 0, MS * rng.choice([0, 1]), context, context),
        rng.choice([None, None, None, 1, 3]),
        segments=segments,
        output_streams=streams,
    )


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("thresholds", [[0], [0, 1, 2, 3, 5, 8]], ids=["plain", "threshold"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**9))
def test_random_cases_agree_with_the_oracle(thresholds, asynchronous, seed):
    """Tiny pools, shared prefixes, quoted outputs, block-aligned prompts; leaping and stepping."""
    rng = random.Random(seed)
    cases = [random_case(rng, thresholds, asynchronous) for _ in range(CASES)]
    expected = [reference.simulate(case, 3000) for case in cases]
    with pytest.MonkeyPatch.context() as patch:  # those that share nothing as well
        patch.setattr(sys.modules["jaxsim.engine.simulate"], "shared_blocks", lambda *_: True)
        for leap in (True, False):
            agree_all(cases, expected, leap)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**9))
def test_random_cases_that_share_nothing_agree_with_the_oracle(asynchronous, seed):
    rng = random.Random(seed)
    cases = [random_case(rng, [0, 3, 8], asynchronous)._replace(segments=None) for _ in range(CASES)]
    expected = [reference.simulate(case, 3000) for case in cases]
    assert any(request[7] for theirs in expected for request in theirs.reqs)  # some find their own blocks again
    agree_all(cases, expected, True)


def agree_all(cases: list[reference.Case], expected: list[reference.Result], leap: bool) -> None:
    simulations = simulate_many(
        [requests_of(case) for case in cases],
        [case.engine for case in cases],
        [Priced(case.cost) for case in cases],
        clients=[case.clients for case in cases],
        think_time_s=[case.think_ps / 1e12 for case in cases],
        leap=leap,
        lanes=CASES // 2,
    )
    for case, theirs, ours in zip(cases, expected, simulations, strict=True):
        if theirs.status != "TRUNCATED":
            agree(case, ours, theirs)


def test_a_prompt_takes_its_blocks_before_a_later_decode_preempts_itself(one_shape):
    """A chunk takes all that is free; the last request, which decodes, gives back its own blocks only then."""
    listed = [(0, 18, 12, [("a", 0, 18)]), (2, 23, 1, [("b", 0, 23)]), (2, 2, 8, [("c", 0, 2)])]
    listed += [(3, 11, 12, [("c", 0, 2), ("o2", 0, 8), ("d", 0, 1)])]
    arrivals, prompts, outputs, segments = map(list, zip(*listed, strict=True))
    engine = EngineConfig(6, 48, 27, 24, 1, False, 8, watermark=0.05, enable_prefix_caching=True, async_scheduling=True)
    case = reference.Case([ms * MS for ms in arrivals], prompts, outputs, engine, CostTable(2 * MS), segments=segments)
    result = reference.simulate(case)
    assert any(row[10] == [2] for row in result.iters), "request 2 preempts itself"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["jaxsim.engine.simulate"], "shared_blocks", lambda *_: True)
        agree(case, simulate(requests_of(case), engine, Priced(case.cost)), result)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_trie_has_the_oracle_s_blocks(seed):
    rng = random.Random(seed)
    block_size, longest = rng.randint(1, 4), 40
    segments, outputs, streams = random_prompts(rng, block_size, longest, rng.randint(1, 12))
    prompts = [sum(length for _, _, length in parts) for parts in segments]
    outputs = [min(output, longest - prompt) for prompt, output in zip(prompts, outputs, strict=True)]
    requests = Requests(np.zeros(len(prompts)), np.array(prompts), np.array(outputs), None, segments, streams)
    trie = trie_of(requests, np.arange(len(prompts)), block_size, longest)
    tokens = block_pool.token_identities(prompts, outputs, segments, streams)
    pairs = set()
    for (first, end, length, _), keys in zip(trie.requests, block_pool.chains(tokens, block_size), strict=True):
        blocks = [(node, block) for node in trie.path[first:end].tolist() for block in range(*trie.nodes[node])]
        assert [block for _, block in blocks[:length]] == list(range(length))
        assert len(keys) - length in (0, 1)  # the block that only the last token fills is never computed
        pairs |= set(zip(blocks[:length], keys[:length], strict=True))
    assert len(pairs) == len({block for block, _ in pairs}) == len({key for _, key in pairs})


def shared_prefix(prefix: int) -> Requests:
    """Two prompts of 100 tokens, far apart, that begin with the same `prefix` tokens."""
    segments = [[("s", 0, prefix), (f"u{i}", 0, 100 - prefix)] if prefix else None for i in range(2)]
    return Requests(np.array([0.0, 10.0]), np.array([100, 100]), np.array([3, 3]), segments=segments)


@pytest.mark.parametrize(("prefix", "hit"), [(0, 0), (15, 0), (16, 16), (79, 64), (100, 96)])
def test_a_hit_shortens_ttft_by_the_cost_of_its_tokens(prefix, hit):
    engine = EngineConfig(4, 1000, 1000, 1000, enable_prefix_caching=True)
    cost = AffineCost(0.010, 0.001, 0.0, 0.0)
    simulation = simulate(shared_prefix(prefix), engine, cost)
    ttft_ps = simulation.first_token_ps - simulation.arrival_ps
    assert simulation.hit_tokens.tolist() == [0, hit]
    assert ttft_ps.tolist() == [110 * MS, (110 - hit) * MS]


def test_what_shares_nothing_is_simulated_with_the_cache_only_where_it_preempts(monkeypatch):
    """Then a resumed request finds what it had computed; all else is as without the cache."""
    runs = []
    module = sys.modules["jaxsim.engine.simulate"]
    prepare_all = module.prepare

    def watched(settings, caches, *rest):
        runs.append((caches, [engine.num_gpu_blocks for engine in settings.engine]))
        return prepare_all(settings, caches, *rest)

    monkeypatch.setattr(module, "prepare", watched)
    requests = Requests(np.arange(30) / 50, np.arange(30) % 7 * 16 + 20, np.arange(30) % 5 * 9 + 1)
    cost = AffineCost(0.010, 0.0001, 0.001, 0.00001)
    pools = [400, 22, 300, 25]

    def simulated(on: bool) -> list[Simulation]:
        engines = [EngineConfig(8, 64, pool, 256, enable_prefix_caching=on, async_scheduling=True) for pool in pools]
        return simulate_many(requests, engines, cost)

    off, on = simulated(False), simulated(True)
    preempts = [one.totals.num_preemptions > 0 for one in off]
    assert preempts == [False, True, False, True]
    assert runs == [(False, pools), (False, pools), (True, [22, 25])]
    assert [one.resumed_hit_tokens.any() for one in on] == preempts
    assert [np.array_equal(a.finish_ps, b.finish_ps) for a, b in zip(on, off, strict=True)] == [not p for p in preempts]
    assert not any(one.hit_tokens.any() for one in on)


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([[("a", 0, 9)], [("b", 0, 9)]], False),
        ([[("a", 0, 3), ("b", 0, 6)], [("a", 0, 4), ("c", 0, 5)]], False),
        ([[("a", 0, 4), ("b", 0, 5)], [("a", 0, 1), ("a", 1, 8)]], True),
        ([[("a", 0, 3)], [("a", 0, 3)]], False),
        ([[("a", 0, 3), ("o1", 0, 1)], [("a", 0, 3)]], True),
        ([None, [("p0", 0, 9)]], True),
        ([None, [("p0", 1, 9)]], False),
    ],
)
def test_which_requests_have_a_block_in_common(prompts, shared):
    """Blocks of 4 tokens; each request computes one token of its output."""
    lengths = np.array([9 if parts is None else sum(length for _, _, length in parts) for parts in prompts])
    requests = Requests(np.zeros(2), lengths, np.array([2, 2]), segments=prompts)
    assert shared_blocks(requests, 4, 100) == shared
    keys = block_pool.chains(block_pool.token_identities(lengths.tolist(), [1, 1], prompts, None), 4)
    assert bool(set(keys[0]) & set(keys[1])) == shared


def test_too_few_rows_are_noticed_and_more_are_tried(monkeypatch):
    rooms = []
    whole = prepare._chains

    def scarce(tries, requests, engines, room):
        chains, rows = whole(tries, requests, engines, room)
        if not tries:  # first without the cache: nothing is shared
            return chains, rows
        rooms.append(room)
        return chains, rows | ({"segments": 2, "holds": 3} if room == 1 else {})

    monkeypatch.setattr(prepare, "_chains", scarce)
    simulation = simulate(*golden_arguments("apc_preempt"))
    _, expected = golden_cases.load("apc_preempt")
    assert rooms == [1, 4]
    assert records(simulation) == golden_cases.in_picoseconds(expected["req_cols"], expected["reqs"])


def test_segments_must_add_up_to_the_prompt():
    engine = EngineConfig(4, 1000, 1000, 1000, enable_prefix_caching=True)
    requests = Requests(np.zeros(1), np.array([9]), np.array([1]), segments=[[("a", 0, 8)]])
    with pytest.raises(ConfigError, match=r"requests.segments\[0\]=8: must have as many tokens as the prompt, 9"):
        simulate(requests, engine, AffineCost(0.01, 0.0, 0.0, 0.0))


def test_an_endless_pool_finds_what_the_trace_repeats(data):
    """Blocks of 512 tokens, full ones only, the last token always computed: counted here from the ids alone."""
    rows = [json.loads(line) for line in (data / "traces" / "mooncake_conversation.jsonl").read_text().splitlines()]
    seen: set[int] = set()
    hits = []
    for row in rows:
        blocks = 0
        for block in row["hash_ids"][: (row["input_length"] - 1) // 512]:
            if block not in seen:
                break
            blocks += 1
        seen.update(row["hash_ids"][: row["input_length"] // 512])
        hits.append(512 * blocks)
    assert round(sum(hits) / sum(row["input_length"] for row in rows), 5) == 0.37338
    rows = rows[:500]
    prompts = np.array([row["input_length"] for row in rows])
    segments = [
        [(block, 0, min(512, row["input_length"] - 512 * i)) for i, block in enumerate(row["hash_ids"])] for row in rows
    ]
    requests = Requests(
        np.array([row["timestamp"] for row in rows]) / 1e3,
        prompts,
        np.array([row["output_length"] for row in rows]),
        segments=segments,
    )
    engine = EngineConfig(64, 1 << 18, 50_000, 1 << 17, block_size=512, enable_prefix_caching=True)
    simulation = simulate_many(requests, engine, AffineCost(0.001, 1e-7, 1e-6, 0.0), statistics=False)[0]
    assert simulation.hit_tokens.tolist() == hits[:500]
