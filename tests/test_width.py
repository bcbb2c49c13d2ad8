"""How many lanes there are, what is kept of many simulations, and lanes as an accelerator handles them."""

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_lanes import everything, run, settings

from jaxsim.engine import lanes, width
from jaxsim.engine.layout import Limits
from jaxsim.engine.prepare import Settings, prepare
from jaxsim.errors import ConfigError

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
    assert len(most) == len(settings()) and max(most) <= 2


def test_as_on_an_accelerator(monkeypatch):
    """Lanes that are loaded and given out in blocks, by a program without fences."""
    some = settings()
    expected = run(some)
    fetched, original = [], lanes.fetched
    monkeypatch.setattr(lanes, "fetched", lambda *all: fetched.append(original(*all)) or fetched[-1])
    monkeypatch.setattr(lanes, "BLOCK", 3)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for simulation, other in zip(expected, run(some), strict=True):
        assert everything(simulation) == everything(other)
    assert sum(map(len, fetched)) == len(some)
