"""How many lanes there are, what is kept of many simulations, and lanes as an accelerator handles them."""

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_lanes import LANES, everything, run, settings

from jaxsim.engine import AffineCost, CostTable, EngineConfig, Requests, lanes, simulate_many, width
from jaxsim.engine.layout import Limits
from jaxsim.engine.prepare import Settings, prepare
from jaxsim.errors import ConfigError
from jaxsim.tuning.space import FixedCost

PLAIN = Limits(requests=1024, ring=2048, phases=16)
KINDS = {
    "plain": PLAIN,
    "async": replace(PLAIN, asynchronous=True, closed_loop=True, threshold=True, tables=256),
    "priority": replace(PLAIN, priority=True),
    "static": replace(PLAIN, static=True),
    "swap": replace(PLAIN, swap=True),
    "inflow": replace(PLAIN, inflow=True),
    "prefix": replace(PLAIN, nodes=2048, segments=4096, holds=512),
}


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_lane(kind):
    """The formula is the state's true size, up to a kilobyte."""
    limits = KINDS[kind]
    columns: Any = ([column] for column in settings(1)[0])
    job = prepare(Settings(*columns), False, True, True, False).jobs
    with lanes.x64():
        table = jnp.zeros((1, limits.requests), jnp.int32)
        ranked = jnp.zeros((1, 3, limits.requests), jnp.int32) if limits.priority else None
        traces = lanes.Traces(table, table, table.astype(jnp.int64), ranked)
        first = jax.tree.map(lambda leaf: leaf[0], job)
        state = jax.eval_shape(lambda: lanes.load(limits, traces, first))
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state, first.knobs)))
    assert held <= width.lane_bytes(limits) <= held + 1024


def devices(platform: str, *free: int) -> list[Any]:
    stats = [{"bytes_limit": 10 * each, "bytes_in_use": 9 * each} for each in free]
    return [SimpleNamespace(platform=platform, memory_stats=lambda one=one: one) for one in stats]


def test_lanes_follow_the_memory(monkeypatch):
    lane = width.lane_bytes(PLAIN)
    monkeypatch.setattr(width, "available_bytes", lambda: 10**12)
    assert width.width(PLAIN, None, 10**9, devices("gpu", 2000 * lane)) == 1000
    assert width.width(PLAIN, None, 10**9, devices("gpu", 2000 * lane, 800 * lane)) == 400
    assert width.width(PLAIN, None, 100, devices("gpu", 2000 * lane)) == 128
    assert width.width(PLAIN, 5000, 10, devices("gpu", 2000 * lane)) == 1000
    assert width.width(PLAIN, 50, 10, devices("gpu", 2000 * lane)) == 50
    assert width.width(PLAIN, None, 10**9, devices("cpu", 1, 1)) == 256  # what is fast
    assert width.width(replace(PLAIN, requests=2**20), 64, 100, devices("cpu", 1, 1)) == 64
    assert width.width(replace(PLAIN, requests=2**20), 64, 3, devices("cpu", 1, 1)) == 2  # 84 MB each
    monkeypatch.setattr(width, "available_bytes", lambda: 40 * lane)
    assert width.width(PLAIN, None, 10**9, devices("cpu", 1, 1)) == 10
    assert width.width(PLAIN, 64, 10**9, devices("cpu", 1)) == 20
    # Results of all lanes must find room on this machine, too.
    assert width.width(PLAIN, None, 10**9, devices("gpu", 2000 * lane)) == 20


def test_a_single_lane_is_too_slow_and_two_do_not_fit(monkeypatch):
    assert width.width(PLAIN, None, 1, devices("cpu", 1)) == width.width(PLAIN, 1, 1, devices("cpu", 1)) == 2
    monkeypatch.setattr(width, "available_bytes", lambda: width.lane_bytes(PLAIN))
    with pytest.raises(ConfigError, match="^requests=1024: must be fewer: so many need 0.00034 GiB, of which 8.6e-05 "):
        width.width(PLAIN, 8, 10, devices("cpu", 1))


REGIONS = ("arrivals", "log", "buckets", "words", "tickets", "sinks", "memory")
BY_PRIORITY = ("tickets", "places", "waiting_words", "class_words", "sinks")
ROWS = ("segment_rows", "node_rows", "visitor_rows", "hold_rows", "prefix_sinks", "prefix_memory")


@pytest.mark.parametrize("kind", KINDS)
def test_a_million_requests_can_be_addressed(kind, monkeypatch):
    """Regions follow each other, in numbers of 32 bits, with everything that a request can bring."""
    million = 1_000_448  # a multiple of 1024
    limits = replace(KINDS[kind], requests=million, ring=1 << 22)
    if limits.prefix:
        limits = replace(limits, nodes=2 * million, segments=4 * million, holds=8 * 4096)
    for names in (REGIONS, *[BY_PRIORITY] * limits.priority, *[ROWS] * limits.prefix):
        starts = [getattr(limits, name) for name in names]
        assert starts == sorted(starts) and starts[-1] < 2**31
    assert limits.arrivals == 16 * (million + 1)  # a row each, and one more for reads beyond the end
    assert limits.tops * 1024 >= limits.ring and limits.requests % 1024 == 0  # both levels of the bitmaps
    monkeypatch.setattr(width, "available_bytes", lambda: 2**50)
    assert width.width(limits, 8, 8, devices("cpu", 1)) == 8
    per_request = 27 if limits.priority else 20  # cells: row, arrival, log; ticket and place
    for requests, fits in ((2**31 // (per_request + 1) // 1024 * 1024, True), (2**31 // per_request, False)):
        more = replace(limits, requests=requests)
        if fits and not limits.prefix:
            assert width.width(more, 8, 8, devices("cpu", 1)) == 8
        elif not fits:
            with pytest.raises(ConfigError, match=f"^requests={requests}: must be fewer: a memory has 2.31 cells"):
                width.width(more, 8, 1, devices("cpu", 1))


def test_a_long_queue_at_a_single_seat():
    """40,000 requests one after the other: each starts when it has come and the one before it has gone."""
    count, rng = 40_000, np.random.default_rng(2)
    arrival_ps = np.cumsum(rng.integers(1, 10**11, count))
    prompt, output = rng.integers(1, 200, count), rng.integers(1, 6, count)
    cost = CostTable(step_ps=10**10, prefill_token_ps=10**8, decode_seq_ps=10**7)
    engine = EngineConfig(max_num_seqs=1, max_num_batched_tokens=256, num_gpu_blocks=99, max_model_len=256)
    requests = Requests(arrival_ps / 1e12, prompt, output)
    (simulation,) = simulate_many(requests, engine, FixedCost(cost), statistics=False)
    first = 10**10 + 10**8 * prompt
    rest = (output - 1) * (10**10 + 10**7)
    scheduled, free = np.zeros(count, np.int64), 0
    for i, (arrival, busy) in enumerate(zip(arrival_ps.tolist(), (first + rest).tolist(), strict=True)):
        scheduled[i] = max(arrival, free)
        free = scheduled[i] + busy
    assert np.array_equal(simulation.arrival_ps, arrival_ps)
    assert np.array_equal(simulation.first_scheduled_ps, scheduled)
    assert np.array_equal(simulation.first_token_ps, scheduled + first)
    assert np.array_equal(simulation.finish_ps, scheduled + first + rest)
    assert (scheduled > arrival_ps).mean() > 0.3  # some wait, some don't
    assert simulation.totals.scan_steps < 3 * count


def test_more_tokens_than_can_be_counted():
    requests = Requests(np.zeros(600), np.ones(600, int), np.full(600, 2**22 - 1))
    engine = EngineConfig(1, 64, 2**22 - 1, 2**22 - 1)
    with pytest.raises(ConfigError, match="^requests.output_len=2516581200 together: must be below 2147483648 tokens"):
        simulate_many(requests, engine, AffineCost(0, 0, 0, 0))
    with pytest.raises(ConfigError, match="^engine.num_gpu_blocks=2097152: must be below 2097152 at block_size=1024"):
        EngineConfig(1, 64, 2**21, 4096, block_size=1024)
    EngineConfig(1, 64, 2**21 - 1, 4096, block_size=1024)


def test_a_container_limits_what_is_available(tmp_path, monkeypatch):
    whole = width.available_bytes()
    assert whole > 2**20
    monkeypatch.setattr(width, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert width.available_bytes() == 600_000


def test_nothing_is_kept_that_was_handed_on():
    alive: list[weakref.ref] = []
    most = []

    def note(index: int, simulation: Any) -> None:
        alive.append(weakref.ref(simulation))
        most.append(sum(one() is not None for one in alive))

    assert run(settings(), on_done=note, keep=False) == []
    assert len(most) == len(settings()) and max(most) <= 2 * LANES < len(most)  # those of one look at the lanes


def test_as_on_an_accelerator(monkeypatch):
    """Lanes that are loaded and given out in blocks, by a program without fences."""
    some = settings()
    expected = run(some)
    fetched, original = [], lanes.fetched

    def noted(*all: Any) -> Any:
        for lane, outcome in original(*all):
            fetched.append(lane)
            yield lane, outcome

    monkeypatch.setattr(lanes, "fetched", noted)
    monkeypatch.setattr(lanes, "BLOCK", 3)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for simulation, other in zip(expected, run(some), strict=True):
        assert everything(simulation) == everything(other)
    assert len(fetched) == len(some)
