"""One simulation or many."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxsim.engine.alike import families, served
from jaxsim.engine.chains import shared_blocks
from jaxsim.engine.cost import Cost
from jaxsim.engine.lanes import Outcome, run
from jaxsim.engine.prepare import Settings, arrival_order, capped, check, prepare
from jaxsim.engine.records import as_of, simulation
from jaxsim.engine.replay import Replay, series_of
from jaxsim.engine.types import EngineConfig, Requests, Simulation, Status
from jaxsim.engine.width import width
from jaxsim.errors import ConfigError


def simulate(
    requests: Requests,
    engine: EngineConfig,
    cost: Cost,
    *,
    clients: int | None = None,
    stretch: float = 1.0,
    think_time_s: float = 0.0,
    leap: bool = True,
    trace: bool = False,
    series: bool = False,
) -> Simulation:
    """Simulate one setting.

    Open loop: requests come at `arrival_s * stretch`. With `clients` the loop is closed: that many clients start at
    time 0, and each takes the next request in list order `think_time_s` after its last one finished, or was rejected
    (inflow.py). `leap=False` computes every iteration on its own, with the same results. `trace=True` adds
    `Simulation.iterations`, a row per iteration with the columns of the golden cases, `series=True` a time series; both
    imply `leap=False`.
    Raises ConfigError for requests that vLLM would refuse.
    """
    replay = Replay(engine.overlaps) if trace or series else None
    settings = Settings([requests], [engine], [cost], [clients], [stretch], [think_time_s])
    ((_, sole),) = _run(settings, leap and replay is None, True, None, replay)
    if replay is None:
        return sole
    rows = replay.rows(arrival_order(requests, clients is not None), sole)
    more: dict[str, Any] = {"iterations": rows if trace else []}
    more["series"] = series_of(rows, engine.num_gpu_blocks - 1) if series else None
    return Simulation(**{**vars(sole), **more})


def simulate_many(
    requests: Requests | Sequence[Requests],
    engine: EngineConfig | Sequence[EngineConfig],
    cost: Cost | Sequence[Cost],
    *,
    clients: int | None | Sequence[int | None] = None,
    stretch: float | Sequence[float] = 1.0,
    think_time_s: float | Sequence[float] = 0.0,
    leap: bool = True,
    statistics: bool = True,
    on_done: Callable[[int, Simulation], None] | None = None,
    lanes: int | None = None,
    keep: bool = True,
    reuse: bool = False,
) -> list[Simulation]:
    """Simulate many settings at once, on all local devices.

    Each of requests, engine, cost, clients, stretch and think_time_s is one value or a sequence; sequences have one
    common length, the number of simulations. `on_done(index, simulation)` is called as each ends; without `keep` that
    is all and the list is empty: records take 57 bytes a request, which adds up over many simulations.
    Without `statistics` only the per-request records and the counts that come with them are kept, the rest of `Totals`
    is NaN. `lanes` is the number of simulations that a device steps together, if so many fit into its memory; given, it
    makes calls of any length share one compiled program. With `reuse` settings that differ only in seats or blocks of
    which there are always enough are simulated once: such simulations come one after the other and share their arrays.
    """
    if lanes is not None and lanes < 1:
        raise ConfigError("lanes", lanes, "must be at least 1")
    arguments: list[Any] = [requests, engine, cost, clients, stretch, think_time_s]
    many = [isinstance(value, Sequence | np.ndarray) and not isinstance(value, Requests) for value in arguments]
    lengths = {len(value) for value, is_many in zip(arguments, many, strict=True) if is_many}
    if len(lengths) > 1:
        raise ValueError(f"simulate_many got sequences of different lengths: {sorted(lengths)}")
    length = lengths.pop() if lengths else 1
    if length == 0:
        return []
    columns = [list(value) if is_many else [value] * length for value, is_many in zip(arguments, many, strict=True)]
    results: list[Any] = [None] * length if keep else []
    for index, ended in _run(Settings(*columns), leap, statistics, lanes, None, reuse):
        if keep:
            results[index] = ended
        if on_done is not None:
            on_done(index, ended)
    return results


def _run(
    settings: Settings,
    leap: bool,
    statistics: bool,
    asked: int | None,
    replay: Replay | None,
    reuse: bool = False,
) -> Iterator[tuple[int, Simulation]]:
    """Each simulation with its index, as it ends; `asked` is the number of lanes."""
    check(settings)
    settings = settings._replace(requests=capped(settings.requests, settings.engine))
    # Rules that cost something are programs of their own, and so is prefix caching.
    programs: dict[tuple, list[int]] = {}
    for i, (engine, caches) in enumerate(zip(settings.engine, finds_blocks(settings), strict=True)):
        rules = (engine.batching, engine.overlaps, engine.policy, engine.misses_turns, engine.preemption_mode)
        rules += (engine.max_queued_requests is not None, engine.caches and engine.freed_unhashed_blocks)
        programs.setdefault((rules, caches, 1), []).append(i)
    while programs:
        (rules, caches, room), index = programs.popitem()
        for i, result in _batch(settings.at(index), caches, leap, statistics, asked, replay, room, reuse):
            place = index[i]
            again = None
            if result.status == Status.OVERFLOW:
                again = (rules, caches, 4 * room)
            elif settings.engine[place].caches and not caches and result.totals.num_preemptions:
                again = (rules, True, room)  # a preempted request may have found its own blocks
            if again is not None:
                programs.setdefault(again, []).append(place)
                if replay is not None:
                    replay.clear()
                continue
            yield place, result


def _batch(
    settings: Settings,
    caches: bool,
    leap: bool,
    statistics: bool,
    asked: int | None,
    replay: Replay | None,
    room: int,
    reuse: bool,
) -> Iterator[tuple[int, Simulation]]:
    """Settings of one program, each with its index as it ends."""
    limits, traces, tables, chains, jobs, orders = prepare(settings, caches, leap, statistics, replay is not None, room)
    places = [np.argsort(order) if np.any(np.diff(order) < 0) else None for order in orders]
    devices = jax.local_devices()
    size = len(settings.engine)
    if asked is None:
        devices = devices[: 1 if replay is not None or size < len(devices) else None]
    lanes = width(limits, asked, size, devices)

    others = families(settings, caches) if reuse else {}
    queue = deque(others or range(size))

    def collect(i: int, outcome: Outcome) -> list[tuple[int, Simulation]]:
        requests, engine = settings.requests[i], settings.engine[i]
        closed, place = settings.clients[i] is not None, places[int(jobs.trace[i])]
        ended = simulation(limits, requests, closed, engine, place, outcome)
        same = served(settings, i, others.get(i, []), ended)
        queue.extend(other for other in others.get(i, []) if other not in same)
        return [(i, ended), *((other, as_of(settings.engine[other], ended, outcome)) for other in same)]

    on_events = None if replay is None else replay.add
    for ended in run(limits, traces, tables, chains, jobs, queue, lanes, devices, collect, on_events=on_events):
        yield from ended


def finds_blocks(settings: Settings) -> list[bool]:
    """Which settings are to be run with prefix caching at once.

    Where no two requests have a block in common, only a preempted request can find one, and until it does the prefix
    cache changes nothing: it costs no block, and which block is taken is of no importance. So such a setting is run
    without, and again with prefix caching if it preempted.
    """
    shared: dict[tuple[int, int, int], bool] = {}
    result = []
    for requests, engine in zip(settings.requests, settings.engine, strict=True):
        key = (id(requests), engine.block_size, engine.max_model_len)
        if engine.caches and key not in shared:
            shared[key] = shared_blocks(requests, engine.block_size, engine.max_model_len)
        result.append(engine.caches and shared[key])
    return result
