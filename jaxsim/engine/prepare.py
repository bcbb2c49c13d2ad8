"""From lists of requests and settings to the arrays of the engine."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxsim.engine.chains import Chains, Trie, padded, trie_of
from jaxsim.engine.cost import Cost, CostTable
from jaxsim.engine.lanes import Job, Traces
from jaxsim.engine.layout import INFINITE, Knobs, Limits, Tables
from jaxsim.engine.leap import MOST
from jaxsim.engine.priority import ranks
from jaxsim.engine.types import LARGEST, LATEST_S, MOST_TOKENS, EngineConfig, Requests, is_integer, picoseconds
from jaxsim.errors import ConfigError


class Settings(NamedTuple):
    """What to simulate: columns of one length."""

    requests: Sequence[Requests]
    engine: Sequence[EngineConfig]
    cost: Sequence[Cost]
    clients: Sequence[int | None]
    stretch: Sequence[float]
    think_time_s: Sequence[float]

    def at(self, index: Sequence[int]) -> "Settings":
        columns: Any = ([column[i] for i in index] for column in self)
        return Settings(*columns)


class Prepared(NamedTuple):
    """Settings as arrays, with the order of arrival of each list of requests."""

    limits: Limits
    traces: Traces
    tables: Tables | None
    chains: Chains | None
    jobs: Job
    orders: list[np.ndarray]  # per trace: [N] caller's index of the k-th request to arrive


def prepare(settings: Settings, caches: bool, leap: bool, statistics: bool, trace: bool, room: int = 1) -> Prepared:
    """Convert settings that were checked and share a batching policy, to be run with or without prefix caching.

    `room` multiplies the rows for the prefix cache. Raises ConfigError.
    """
    keys = _keys(settings)
    lists = dict(zip(keys, settings.requests, strict=True))
    orders = [arrival_order(listed, closed) for (_, closed), listed in lists.items()]
    place = {key: i for i, key in enumerate(lists)}
    keys_closed = [closed for _, closed in lists]
    shape = (_grown(len(lists), 8), _grown(max(len(order) for order in orders), 64))
    traces = Traces(
        prompt=np.ones(shape, np.int32),
        output=np.ones(shape, np.int32),
        arrival_ps=np.full(shape, INFINITE, np.int64),
    )
    by_priority, ends = settings.engine[0].by_priority, settings.engine[0].misses_turns
    if by_priority:
        traces = traces._replace(ranked=np.zeros((shape[0], 3, shape[1]), np.int32))
    for i, (listed, order) in enumerate(zip(lists.values(), orders, strict=True)):
        traces.prompt[i, : len(order)] = np.asarray(listed.prompt_len)[order]
        traces.output[i, : len(order)] = np.asarray(listed.output_len)[order]
        times = 0.0 if keys_closed[i] else listed.arrival_s
        traces.arrival_ps[i, : len(order)] = np.broadcast_to(picoseconds(times), order.shape)[order]
        if by_priority:
            levels = np.zeros(len(order)) if listed.priority is None else np.asarray(listed.priority)
            traces.ranked[i] = ranks(levels[order], shape[1])

    engines = settings.engine
    budget = max(engine.max_num_batched_tokens for engine in engines)
    seats = max(engine.max_num_seqs for engine in engines)
    distinct = {id(cost): cost for cost in settings.cost}
    costs = [cost.table(budget, seats) for cost in distinct.values()]
    cost_place = {key: i for i, key in enumerate(distinct)}
    cost_index = [cost_place[id(cost)] for cost in settings.cost]
    tables = _tables(costs)
    longest = min(int(traces.output.max()), max(engine.max_model_len for engine in engines))
    tries, trie_index = [], [0] * len(engines)
    if caches:
        tries, trie_index = _tries(settings, [place[key] for key in keys], orders)
    chains, rows = _chains(tries, shape[1], engines, room)
    limits = Limits(
        requests=shape[1],
        ring=_ring(longest),
        phases=max(16, 1 << (max(engine.block_size for engine in engines) - 1).bit_length()),
        threshold=ends or any(engine.long_prefill_token_threshold > 0 for engine in engines),
        tables=0 if tables is None else tables.linear_ps.shape[1],
        closed_loop=statistics or any(settings.clients),
        statistics=statistics,
        trace=trace,
        static=engines[0].batching == "static",
        asynchronous=engines[0].overlaps,
        priority=by_priority,
        ends=ends,
        inflow=engines[0].max_queued_requests is not None,
        returns=engines[0].max_queued_requests is not None and any(settings.clients),
        swap=engines[0].preemption_mode == "swap",
        tail=bool(tries) and engines[0].freed_unhashed_blocks == "tail",
        fenced=jax.default_backend() == "cpu",
        **rows,
    )
    jobs = Job(
        trace=np.array([place[key] for key in keys], np.int32),
        stretch=np.array(settings.stretch, np.float64),
        clients=np.array([count or 0 for count in settings.clients], np.int32),
        max_model_len=np.array([engine.max_model_len for engine in engines], np.int32),
        knobs=_knobs(settings, costs, cost_index, leap)._replace(chains=np.array(trie_index, np.int32)),
    )
    return Prepared(limits, traces, tables, chains, jobs, orders)


def _keys(settings: Settings) -> list[tuple[int, bool]]:
    """Which trace each setting needs: a list of requests, and whether in the list's own order.

    A closed loop ignores arrival times: it needs one of its own only where the list is not in order of arrival.
    """
    own: dict[int, bool] = {}
    for listed, clients in zip(settings.requests, settings.clients, strict=True):
        if clients is not None and id(listed) not in own:
            own[id(listed)] = not _in_order(listed)
    pairs = zip(settings.requests, settings.clients, strict=True)
    return [(id(listed), clients is not None and own[id(listed)]) for listed, clients in pairs]


def _in_order(requests: Requests) -> bool:
    """Whether the list has times of arrival, and is in their order."""
    times = np.asarray(requests.arrival_s, np.float64)
    if times.shape != np.shape(requests.prompt_len):
        return False
    return bool((np.diff(times) >= 0).all() and times[0] >= 0 and times[-1] < LATEST_S)


def _tries(settings: Settings, traces: list[int], orders: list[np.ndarray]) -> tuple[list[Trie], list[int]]:
    """The distinct tries of the settings, and the place of each setting's among them."""
    tries: dict[tuple[int, int, int], tuple[int, Trie]] = {}
    index = []
    for trace, listed, engine in zip(traces, settings.requests, settings.engine, strict=True):
        key = (trace, engine.block_size, engine.max_model_len)
        if key not in tries:
            tries[key] = (len(tries), trie_of(listed, orders[trace], engine.block_size, engine.max_model_len))
        index.append(tries[key][0])
    return [trie for _, trie in tries.values()], index


def _chains(
    tries: list[Trie], requests: int, engines: Sequence[EngineConfig], room: int
) -> tuple[Chains | None, dict[str, int]]:
    """Tables of one shape for the tries, and the rows that the prefix cache is given."""
    if not tries:
        return None, {}
    nodes = _grown(max(len(trie.nodes) for trie in tries), 256)
    paths = _grown(max(len(trie.path) for trie in tries), 256)
    blocks = max(engine.num_gpu_blocks for engine in engines)
    seats = min(requests, max(engine.max_num_seqs for engine in engines))
    # Each segment has a block of its own; more than a few per node and running request are rare.
    segments = _grown(min(blocks, room * (nodes + 2 * seats)), 256)
    rows = {"nodes": nodes, "segments": segments, "holds": _grown(room * 8 * seats, 256)}
    return padded(tries, _grown(len(tries), 8), requests, paths, nodes), rows


def capped(requests: Sequence[Requests], engines: Sequence[EngineConfig]) -> list[Requests]:
    """The requests with outputs of at most each engine's max_new_tokens; equal caps of a list are one object."""
    made: dict[tuple[int, int], Requests] = {}
    result = []
    for listed, engine in zip(requests, engines, strict=True):
        cap = engine.max_new_tokens
        if cap is not None:
            key = (id(listed), cap)
            if key not in made:
                made[key] = listed._replace(output_len=np.minimum(listed.output_len, cap))
            listed = made[key]
        result.append(listed)
    return result


def arrival_order(requests: Requests, closed: bool) -> np.ndarray:
    """[N] index of the k-th request to arrive: by time, ties in list order; in a closed loop the list's order."""
    if closed:
        return np.arange(len(requests.prompt_len))
    return np.argsort(np.asarray(requests.arrival_s, np.float64), kind="stable")


def check(settings: Settings) -> None:
    """Raise ConfigError for requests that vLLM would refuse and for impossible times."""
    longest: dict[tuple[int, int], Requests] = {}
    latest: dict[int, float] = {}
    for requests, engine, _, clients, stretch, think_time_s in zip(*settings, strict=True):
        longest[id(requests), engine.max_model_len] = requests
        if clients is not None and not (is_integer(clients) and 1 <= clients < LARGEST):
            raise ConfigError("clients", clients, "must be an integer from 1, or None for an open loop")
        if not 0 < stretch < np.inf:
            raise ConfigError("stretch", stretch, "must be a number above 0")
        pauses = 0 if clients is None else -(-len(np.asarray(requests.prompt_len)) // clients)
        if not 0 <= think_time_s * max(pauses, 1) < LATEST_S:
            allowed = f"must be from 0 and, times {max(pauses, 1)} requests of a client, below {LATEST_S:g} seconds"
            raise ConfigError("think_time_s", think_time_s, allowed)
        if clients is None:
            latest[id(requests)] = max(stretch, latest.get(id(requests), 0.0))
    for (key, max_model_len), requests in longest.items():
        _check_requests(requests, max_model_len, latest.get(key))


def _check_requests(requests: Requests, max_model_len: int, stretch: float | None) -> None:
    prompt, output = np.asarray(requests.prompt_len), np.asarray(requests.output_len)
    arrival = np.asarray(np.zeros(prompt.shape) if stretch is None else requests.arrival_s, np.float64)
    if not prompt.size:
        raise ConfigError("requests", "[]", "must have at least one request")
    if not prompt.shape == output.shape == arrival.shape or prompt.ndim != 1:
        shapes = f"{arrival.shape}, {prompt.shape}, {output.shape}"
        raise ConfigError("requests", shapes, "arrival_s, prompt_len and output_len must be of one length")
    for name, values in (("prompt_len", prompt), ("output_len", output)):
        if values.dtype.kind not in "iu":
            raise ConfigError(f"requests.{name}", values.dtype, "must be an array of integers")
        if (bad := np.flatnonzero((values < 1) | (values >= LARGEST))).size:
            allowed = f"must be from 1 to {LARGEST - 1} tokens"
            raise ConfigError(f"requests.{name}[{bad[0]}]", values[bad[0]], allowed)
    if requests.priority is not None:
        priority = np.asarray(requests.priority)
        if priority.shape != prompt.shape or priority.dtype.kind not in "iu":
            allowed = f"must be {len(prompt)} integers, or None"
            raise ConfigError("requests.priority", f"{priority.dtype}{list(priority.shape)}", allowed)
    if (bad := np.flatnonzero(prompt >= max_model_len)).size:
        allowed = f"must be below max_model_len={max_model_len}; vLLM refuses the request"
        raise ConfigError(f"requests.prompt_len[{bad[0]}]", prompt[bad[0]], allowed)
    tokens = int(np.minimum(output, max_model_len - prompt).sum(dtype=np.int64))
    if tokens >= MOST_TOKENS:
        allowed = f"must be below {MOST_TOKENS} tokens in one simulation"
        raise ConfigError("requests.output_len", f"{tokens} together", allowed)
    if stretch is not None and (bad := np.flatnonzero(~((arrival >= 0) & (arrival * stretch < LATEST_S)))).size:
        value = arrival[bad[0]] * stretch
        raise ConfigError(f"requests.arrival_s[{bad[0]}]", value, f"must be from 0 to {LATEST_S:g} seconds")


def _grown(size: int, least: int) -> int:
    """A size that few others round up to: a power of two, from 1024 on a multiple of 1024."""
    return max(least, 1 << (size - 1).bit_length()) if size <= 1024 else -(-size // 1024) * 1024


def _ring(longest: int) -> int:
    """Buckets for outputs of up to `longest` tokens: 256, 2048, or a power of two above."""
    return next(ring for ring in (256, 2048, *(1 << p for p in range(13, 23))) if ring > longest)


def _knobs(settings: Settings, costs: list[CostTable], cost_index: list[int], leap: bool) -> Knobs:
    """The knobs of all simulations, arrays of [J]."""
    requests, engines = settings.requests, settings.engine

    def column(name: str, kind: type = np.int32) -> np.ndarray:
        return np.array([getattr(engine, name) for engine in engines], kind)

    longest: dict[tuple[int, int], int] = {}
    for listed, engine in zip(requests, engines, strict=True):
        if (key := (id(listed), engine.max_model_len)) not in longest:
            prompt = np.asarray(listed.prompt_len)
            longest[key] = int(np.max(prompt + np.minimum(listed.output_len, engine.max_model_len - prompt)))
    # The most urgent request gets on in each iteration, but for the turns that it misses: those that preempt themselves
    # ahead of it cost it one each. Where it has equals it may be the victim, and that they come apart may take long.
    patience = [longest[id(r), engine.max_model_len] + 64 for r, engine in zip(requests, engines, strict=True)]
    for i, (listed, engine) in enumerate(zip(requests, engines, strict=True)):
        if engine.misses_turns:
            patience[i] += min(engine.max_num_seqs, len(listed.prompt_len)) + 1000
    coefficients = {
        name: np.array([getattr(cost, name) for cost in costs], np.int64)[cost_index] for name in Knobs._fields[-7:]
    }
    columns: dict[str, Any] = {
        "num_requests": np.array([len(listed.prompt_len) for listed in requests], np.int32),
        "seats": np.array([engine.max_num_active_seqs or engine.max_num_seqs for engine in engines], np.int32),
        "slots": column("max_num_seqs"),
        "budget": column("max_num_batched_tokens"),
        "blocks": column("num_gpu_blocks") - np.int32(1),
        "block_size": column("block_size"),
        "watermark": np.array([int(engine.watermark * engine.num_gpu_blocks) for engine in engines], np.int32),
        "chunked": column("enable_chunked_prefill", np.bool_),
        "full_isl": column("scheduler_reserve_full_isl", np.bool_),
        "threshold": column("long_prefill_token_threshold"),
        "adaptive": column("long_prefill_token_threshold_adaptive", np.bool_),
        "lifted": column("lone_request_without_threshold", np.bool_),
        "patience": np.array(patience, np.int32),
        "leap": np.full(len(engines), MOST if leap else 0, np.int32),
        "padding": column("static_padding", np.bool_),
        "wait_ps": picoseconds(column("static_wait_s", np.float64)),
        "think_ps": picoseconds(settings.think_time_s),
        "queue_limit": np.array([engine.max_queued_requests or LARGEST for engine in engines], np.int32),
        "swaps": np.array([engine.preemption_mode == "swap" for engine in engines]),
        "cpu_blocks": column("num_cpu_blocks"),
        "swap_block_ps": np.array([cost.swap_token_ps for cost in costs], np.int64)[cost_index] * column("block_size"),
        "chains": np.zeros(len(engines), np.int32),
        "table": np.array(cost_index, np.int32),
        **coefficients,
    }
    return Knobs(**columns)


def _tables(costs: list[CostTable]) -> Tables | None:
    """The tables of several costs, padded to one length; None if all are plain coefficients."""
    kinds = ("linear_ps", "decode_base_ps", "decode_ctx_table_ps")
    lengths = [len(table) for cost in costs for kind in kinds if (table := getattr(cost, kind)) is not None]
    if not lengths:
        return None
    result: Any = np.zeros((len(kinds), -(-len(costs) // 8) * 8, _grown(max(lengths), 256)), np.int64)
    for i, kind in enumerate(kinds):
        for j, cost in enumerate(costs):
            if (table := getattr(cost, kind)) is not None:
                result[i, j, : len(table)] = table
    return Tables(*result)


def _unique(values: list[Any]) -> tuple[list[Any], list[int]]:
    """Distinct objects, by identity, and the place of each value among them."""
    places: dict[int, int] = {}
    index = [places.setdefault(id(value), len(places)) for value in values]
    distinct = {place: value for value, place in zip(values, index, strict=True)}
    return [distinct[i] for i in range(len(distinct))], index
