"""The compiled program: what its loop may not do, how many steps it takes, and that accelerators accept it."""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax import export
from random_cases import ASYNC_RICH, PRIORITY_RICH, RICH, run_batch

from jaxsim.engine import CostTable, EngineConfig, Requests, Simulation, Status, lanes, simulate_many

US = 10**6  # ps


class Program(NamedTuple):
    """A chunk of scan steps as the engine compiled it."""

    limits: Any
    steps: int
    arguments: Any  # arrays without values
    text: str  # optimised HLO of one device


def watch(run: Callable[[], Any]) -> tuple[Program, Any]:
    """The program that `run` steps its lanes with, and what `run` returns."""
    programs, original = [], lanes.compiled

    def compiled(limits: Any, mesh: Any, steps: int) -> tuple[Callable, Callable, Callable]:
        fill, chunk, pick = original(limits, mesh, steps)
        executables = []

        def watched(*arguments: Any) -> Any:
            if not executables:
                executables.append(chunk.lower(*arguments).compile())
                shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
                programs.append(Program(limits, steps, shapes, executables[0].as_text()))
            return executables[0](*arguments)

        watched.lower = chunk.lower  # pyright: ignore[reportFunctionMemberAccess]
        return fill, watched, pick

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "compiled", compiled)
        result = run()
    (program,) = programs
    return program, result


def large_results(program: Program) -> Counter:
    """Operations outside the entry whose result has at least as many elements as the memory, or as the requests of
    all lanes of a device, by name."""
    found, entry = Counter(), False
    width = program.arguments[-1].memory.shape[0] // len(jax.local_devices())
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
    """What a stepping simulator in C does with one max_num_seqs on `workload`."""

    seats: int
    iterations: int
    preemptions: int
    end_ns: int
    p99_ttft_s: float  # ascending, at position floor(0.99 (N - 1)), float32


# native.c: the same rules without full-sequence check, null block, watermark and length cap.
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


def workload(size: int = 1000) -> Requests:
    """The yardstick's default: lognormal lengths, exponential gaps at 12 requests/s, a xorshift generator."""
    state = 88172645463325252

    def uniform() -> float:
        nonlocal state
        state ^= state << 13 & (1 << 64) - 1
        state ^= state >> 7
        state ^= state << 17 & (1 << 64) - 1
        return ((state >> 11) + 0.5) / 2**53

    def normal() -> float:
        radius = math.sqrt(-2 * math.log(uniform()))
        return radius * math.cos(6.283185307179586 * uniform())

    prompts, outputs, arrivals, time = [], [], [], 0.0
    for _ in range(size):
        prompts.append(int(min(max(math.exp(5.5 + normal()), 1), 3000)))
        outputs.append(int(min(max(math.exp(5 + 0.8 * normal()), 1), 1500)))
        time -= math.log(uniform())
        arrivals.append(int(time * (1e9 / 12)))  # ns
    return Requests(np.array(arrivals) / 1e9, np.array(prompts), np.array(outputs))


class YardstickCost:
    """6 ms, 60 us per prompt token, 20 us per decode, 40 ns per token of context before the step (ours: after it)."""

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        context = US // 25
        return CostTable(6000 * US, prefill_token_ps=60 * US, decode_seq_ps=20 * US - context, decode_ctx_ps=context)


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
    program, simulations = watch(
        lambda: simulate_many(workload(), engines, YardstickCost(), statistics=False, lanes=32)
    )
    return Fast(program, dict(zip(keys, simulations, strict=True)))


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
    """The fastest programs, and those with every feature: statistics, threshold, tables, closed loop."""
    kinds = RICH, ASYNC_RICH, PRIORITY_RICH
    rich = {str(kind): watch(lambda kind=kind: run_batch([], kind))[0] for kind in kinds}
    plain = {"plain": fast_sync.program, "async plain": fast_async.program, "priority plain": fast_priority.program}
    return plain | rich


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
