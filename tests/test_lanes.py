"""Many simulations at once: results do not depend on the company, and they share one program."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.monitoring
import numpy as np
import pytest
from agreement import records, totals

from jaxsim.engine import AffineCost, EngineConfig, Requests, Simulation, simulate, simulate_many

LANES = 4  # per device: fewer than simulations, so that lanes are refilled
COMPILE = "/jax/core/compile/backend_compile_duration"


class Setting(NamedTuple):
    """The arguments of one simulation."""

    requests: Requests
    engine: EngineConfig
    cost: AffineCost
    clients: int | None
    stretch: float
    think_time_s: float


def settings(count: int = 27) -> list[Setting]:
    """Short and long lists of requests, tight and roomy pools, open and closed loops, all different."""
    rng = np.random.default_rng(7)
    result = []
    for i in range(count):
        size = (3, 64, 30, 200)[i % 4]
        requests = Requests(
            np.cumsum(rng.exponential(0.02, size)), rng.integers(1, 100, size), rng.integers(1, 120, size)
        )
        engine = EngineConfig(
            max_num_seqs=1 + 3 * (i % 7),
            max_num_batched_tokens=32 + 50 * (i % 3),
            num_gpu_blocks=20 + 40 * (i % 5),
            max_model_len=220,
            watermark=0.1 * (i % 2),
            scheduler_reserve_full_isl=i % 3 > 0,
        )
        cost = AffineCost(5e-3 + 1e-4 * i, 5e-5, 2e-5, 4e-8 * (i % 3))
        result.append(Setting(requests, engine, cost, (None, None, 5)[i % 3], 1 + i % 4 / 2, 0.01 * (i % 2)))
    return result


def run(chosen: list[Setting], **options: Any) -> list[Simulation]:
    requests, engines, costs, clients, stretches, thinks = (list(column) for column in zip(*chosen, strict=True))
    more = {"clients": clients, "stretch": stretches, "think_time_s": thinks, "lanes": LANES}
    return simulate_many(requests, engines, costs, **(more | options))


def everything(simulation: Simulation) -> dict[str, Any]:
    return records(simulation) | totals(simulation) | {"scan_steps": simulation.totals.scan_steps}


@pytest.fixture(scope="module")
def together() -> list[Simulation]:
    """All settings in one batch."""
    return run(settings())


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """Names of the compiles (also those answered by JAX's cache on disk) that have happened in this test."""
    seen = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILE:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.clear_event_listeners()


def test_the_settings_are_a_test(together):
    assert sum(simulation.totals.num_preemptions > 0 for simulation in together) >= 5
    assert len({simulation.totals.scan_steps for simulation in together}) > 20
    assert len(jax.local_devices()) == 2


def test_alone_equals_in_a_batch(together):
    """Alone the requests are padded less, one device is used, and no other lane runs."""
    for setting, simulation in zip(settings(), together, strict=True):
        if len(setting.requests.prompt_len) <= 64:
            requests, engine, cost, clients, stretch, think = setting
            alone = simulate(requests, engine, cost, clients=clients, stretch=stretch, think_time_s=think)
            assert everything(alone) == everything(simulation)


def test_order_does_not_matter(together):
    for simulation, other in zip(together, reversed(run(settings()[::-1])), strict=True):
        assert everything(simulation) == everything(other)


def test_two_devices_equal_one(together, monkeypatch):
    asked = []
    sole = jax.local_devices()[:1]
    monkeypatch.setattr(jax, "local_devices", lambda: asked.append(1) or sole)
    for simulation, other in zip(together, run(settings()), strict=True):
        assert everything(simulation) == everything(other)
    assert asked


def test_on_done_is_called_as_each_simulation_ends(together):
    told = []
    results = run(settings(), on_done=lambda index, simulation: told.append((index, simulation)))
    assert sorted(index for index, _ in told) == list(range(len(together)))
    assert all(simulation is results[index] for index, simulation in told)
    assert [index for index, _ in told] != list(range(len(together)))  # not kept until all have ended


def test_switches_loads_and_sizes_share_one_program(together, compiles):
    first = settings()
    run(first)
    assert not compiles
    one = [setting._replace(requests=first[3].requests) for setting in first]
    run(one)
    warm = len(compiles)  # fewer distinct lists of requests: the small programs that load lanes may differ
    for seats, budget, blocks, block_size in ((1, 64, 99, 16), (24, 300, 50, 7), (8, 8, 500, 1)):
        engine = EngineConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            num_gpu_blocks=blocks,
            block_size=block_size,
            max_model_len=250,
            enable_chunked_prefill=budget < 250,
            watermark=0.25,
            scheduler_reserve_full_isl=False,
            max_num_active_seqs=1,
        )
        for count in (3, 40):
            some = [setting._replace(engine=replace(engine, watermark=i / 100)) for i, setting in enumerate(one)]
            run((some * 2)[:count], leap=count > 3)
    assert len(compiles) == warm <= 2
    jax.jit(lambda x: x + len(first))(np.zeros(3))
    assert len(compiles) > warm  # the count counts
