"""The compiled program: what its loop may not do, how many steps it takes, and that accelerators accept it."""

import functools
import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax import export
from random_cases import ASYNC_RICH, PRIORITY_RICH, RICH, Kind, run_batch

from benchmarks.program import Program, watching
from benchmarks.workloads import YardstickCost, default_mix
from jaxsim.engine import EngineConfig, Requests, Simulation, Status, lanes, simulate_many


def large_results(program: Program) -> Counter:
    """Operations outside the entry whose result has at least as many elements as the memory, or as the requests of
    all lanes of a device, by name."""
    found, entry = Counter(), False
    width = program.lanes // len(jax.local_devices())
    least = width * program.limits.requests
    for line in program.text.splitlines():
        if line.endswith("{"):
            entry = line.startswith("ENTRY")
        if (match := re.search(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", line)) and not entry:
            if math.prod(map(int, match[1].split(","))) >= least:
                found[match[2]] += 1
    return found


def assert_in_place(program: Program) -> None:
    found = large_results(program)
    assert found["scatter"] + found["dynamic-update-slice"] > 0, "the memory is not written at all?"
    writes = found.pop("scatter") + found.pop("dynamic-update-slice", 0)
    assert found.pop("fusion", 0) <= writes  # each write is a fusion of its own
    assert not found.keys() - {"parameter", "get-tuple-element"}, f"whole arrays are made in each step: {found}"


class Yardstick(NamedTuple):
    """What a stepping simulator in C, written apart from this project, does with one max_num_seqs on `workload`."""

    seats: int
    iterations: int
    preemptions: int
    end_ns: int
    p99_ttft_s: float  # ascending, at position floor(0.99 (N - 1)), float32


# The same rules without full-sequence check, null block, watermark and length cap.
ROOMY = [
    Yardstick(1, 199484, 0, 1_228_493_442_535, 1134.182495),
    Yardstick(2, 99827, 0, 630_551_442_535, 543.637512),
    Yardstick(4, 50131, 0, 332_375_442_535, 247.933838),
    Yardstick(8, 25248, 0, 183_077_442_535, 99.541534),
    Yardstick(16, 12995, 0, 109_559_442_535, 26.262192),
    Yardstick(32, 8667, 0, 83_591_442_535, 1.322124),
    Yardstick(64, 8665, 0, 83_579_442_535, 0.252350),
    Yardstick(128, 8665, 0, 83_579_442_535, 0.252350),
    Yardstick(256, 8665, 0, 83_579_442_535, 0.252350),
    Yardstick(512, 8665, 0, 83_579_442_535, 0.252350),
]
TIGHT = [
    Yardstick(16, 12995, 0, 109_559_442_535, 26.262192),
    Yardstick(32, 8627, 6, 83_595_507_335, 1.470059),
    Yardstick(64, 8439, 52, 83_598_619_815, 1.299869),
]


def workload() -> Requests:
    """The suite's default mix at 12 requests/s, arrivals in whole nanoseconds as in the C program."""
    requests = default_mix(1000)
    return requests._replace(arrival_s=np.floor(requests.arrival_s * (1e9 / 12)) / 1e9)


SEATS = sorted({int(512 ** (i / 63) + 1e-9) for i in range(64)})  # geometric, 1 to 512
ROOM = 20_000  # blocks


class Fast(NamedTuple):
    """The fastest program, and its simulations of the yardstick's workload by (seats, blocks)."""

    program: Program
    simulations: dict[tuple[int, int], Simulation]


def fast(**options: Any) -> Fast:
    keys = [(seats, ROOM) for seats in SEATS] + [(expected.seats, 1500) for expected in TIGHT]
    engines = [
        EngineConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=2048,
            num_gpu_blocks=blocks + 1,
            max_model_len=8192,
            scheduler_reserve_full_isl=False,
            **options,
        )
        for seats, blocks in keys
    ]
    with watching() as watch:
        simulations = simulate_many(workload(), engines, YardstickCost(), statistics=False, lanes=32)
    return Fast(watch.sole, dict(zip(keys, simulations, strict=True)))


def rich(kind: Kind) -> Program:
    """The program with every feature: statistics, threshold, tables, closed loop."""
    with watching() as watch:
        run_batch([], kind)
    return watch.sole


@pytest.fixture(scope="module")
def fast_sync() -> Fast:
    return fast()


@pytest.fixture(scope="module")
def fast_async() -> Fast:
    return fast(async_scheduling=True)


@pytest.fixture(scope="module")
def fast_priority() -> Fast:
    """Requests of one priority that arrive one by one: the outcome is that of first come, first served."""
    return fast(policy="priority")


@pytest.fixture(scope="module")
def programs(fast_sync, fast_async, fast_priority) -> dict[str, Program]:
    """The fastest programs, and those with every feature."""
    kinds = RICH, ASYNC_RICH, PRIORITY_RICH
    plain = {"plain": fast_sync.program, "async plain": fast_async.program, "priority plain": fast_priority.program}
    return plain | {str(kind): rich(kind) for kind in kinds}


NAMES = "plain", "async plain", "priority plain", "rich", "async rich", "priority rich"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_copied_in_the_loop(programs, name):
    limits = programs[name].limits
    features = limits.statistics, limits.threshold, limits.tables > 0, limits.closed_loop
    assert features == (("rich" in name),) * 4
    assert limits.asynchronous == ("async" in name) and limits.priority == ("priority" in name)
    assert_in_place(programs[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_accelerators_accept_the_programs(programs, platform, name):
    program = programs[name]
    limits = replace(program.limits, fenced=False)  # a remedy for CPUs
    chunk = jax.jit(functools.partial(lanes.advance, limits, program.steps))
    with lanes.x64():
        exported = export.export(chunk, platforms=[platform])(*program.arguments)
    assert exported.platforms == (platform,)
    assert "scatter" in exported.mlir_module()


@pytest.mark.parametrize("which", ["fast_sync", "fast_async", "fast_priority"])
def test_fewer_than_six_steps_per_request(which, request):
    simulations = request.getfixturevalue(which).simulations
    steps = {seats: simulations[seats, ROOM].totals.scan_steps / 1000 for seats in SEATS}
    assert min(SEATS) == 1 and max(SEATS) == 512
    assert max(steps.values()) < 6, steps
    assert min(steps.values()) >= 1, steps  # a step admits at most one request


@pytest.mark.parametrize("which", ["fast_sync", "fast_priority"])
@pytest.mark.parametrize(("blocks", "expected"), [(ROOM, ROOMY), (1500, TIGHT)], ids=["roomy", "tight"])
def test_yardstick(which, blocks, expected, request):
    """Thousands of tokens, requests and iterations, where small cases do not reach."""
    for one in expected:
        simulation = request.getfixturevalue(which).simulations[one.seats, blocks]
        assert simulation.status == Status.DONE
        assert simulation.totals.iterations == one.iterations
        assert simulation.totals.num_preemptions == one.preemptions
        assert simulation.finish_ps.max() == one.end_ns * 1000
        ttft = np.sort(simulation.first_token_ps - simulation.arrival_ps)[989] / 1e12
        assert ttft == pytest.approx(one.p99_ttft_s, rel=1e-6, abs=1e-6)
