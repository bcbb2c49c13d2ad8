"""What the engine may cost, in counts that no busy machine changes; the suite in `benchmarks` measures times.

Bounds are one or two percent above what XLA for CPUs makes of the programs under jax 0.7.2, 0.10.2 and 0.12.0. Whoever
does with less lowers them.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.monitoring
import pytest

import jaxsim
from benchmarks.program import Program, step, watching
from benchmarks.timing import run
from benchmarks.workloads import VLLM, Case, TabledCost, cases, settings, system_prompts

LANES = 32
CASES = {case.name: case._replace(engines=case.engines[::4], lanes=LANES) for case in cases(quick=True)}
CACHING = Case("caching", system_prompts(1000), 12, settings(LANES, 8, 48, 4000, **VLLM), LANES, TabledCost())
CASES[CACHING.name] = CACHING


class Ran(NamedTuple):
    """A case with the program that it used."""

    program: Program
    steps: float  # scan steps per request, mean over settings
    most: float  # of any setting


Look = Callable[[str, bool], Ran]


@pytest.fixture(scope="module")
def look() -> Iterator[Look]:
    """Runs a case of the suite with or without statistics; programs are compiled once."""
    with watching() as watch:

        @functools.cache
        def look(name: str, statistics: bool) -> Ran:
            for one in watch.programs:
                one.calls = 0
            _, simulations = run(CASES[name], statistics)
            (program,) = [one for one in watch.programs if one.calls]
            steps = [one.totals.scan_steps / len(one.prompt_len) for one in simulations]
            return Ran(program, sum(steps) / len(steps), max(steps))

        yield look


class Bound(NamedTuple):
    """The most that one scan step of a program may do for all lanes of a device."""

    dispatched: int  # operations started one by one; a fusion, and a copy of a scalar per lane, is one
    copies: int  # among them
    operations: int  # with those inside fusions, where values are computed again for each use


# A program of the suite by a case that runs it, with and without statistics.
PLAIN = "default mix, 12 req/s", False
STATISTICS = "default mix, 12 req/s", True
MAIN_JOB = "default mix, vLLM's defaults", True
SHARED_PROMPTS = CACHING.name, True
BOUNDS = {
    PLAIN: Bound(165, 19, 1860),
    STATISTICS: Bound(274, 39, 4140),
    MAIN_JOB: Bound(279, 36, 4370),
    SHARED_PROMPTS: Bound(760, 62, 7880),
}


@pytest.mark.parametrize("which", BOUNDS, ids=["plain", "statistics", "main job", "prefix caching"])
def test_a_step_is_few_operations(look, which):
    program, bound = look(*which).program, BOUNDS[which]
    limits = program.limits
    kind = limits.statistics, limits.asynchronous, limits.tables > 0, limits.prefix
    assert kind == (which != PLAIN, *[which in (MAIN_JOB, SHARED_PROMPTS)] * 2, which == SHARED_PROMPTS)
    counts = step(program.text)
    assert 50 < counts.total <= bound.dispatched, counts
    assert counts.dispatched["fusion"] > 50 and counts.operations > 5 * counts.total  # or they are not counted at all
    assert counts.dispatched["copy"] <= bound.copies, counts
    assert counts.operations <= bound.operations


@pytest.mark.parametrize("which", BOUNDS, ids=["plain", "statistics", "main job", "prefix caching"])
def test_bytes_of_state_per_lane(look, which):
    """A row of 16 words, arrival and log of two each per request; a word and a bit per bucket of the calendar; with
    prefix caching 9 words per segment, 3 per node and per hold, 11 per request. Beyond that scalars and a histogram."""
    program = look(*which).program
    limits = program.limits
    arrays = 80 * limits.requests + 4 * limits.ring + limits.ring // 8
    arrays += 4 * (9 * limits.segments + 3 * limits.nodes + 3 * limits.holds + 11 * limits.requests) * limits.prefix
    assert arrays < program.state_bytes <= arrays + (2000 if limits.prefix else 1500)
    # While a chunk runs a device holds a few values per lane more, and never a second memory.
    assert program.temporary_bytes < LANES * (2000 if limits.prefix else 1000)


@pytest.mark.parametrize(
    ("name", "statistics", "mean", "most"),
    [
        ("light load, 2 req/s", False, 1.75, 2.0),
        ("default mix, 12 req/s", False, 1.43, 1.92),
        ("overload, 100 req/s", False, 1.22, 1.94),
        ("heavy preemption, 400 blocks", False, 9.6, 10.6),
        ("long prompts, 20,000 tokens", False, 4.6, 6.2),
        ("default mix, 12 req/s", True, 1.44, 1.93),
        ("heavy preemption, 400 blocks", True, 11.0, 12.0),
        ("long prompts, 20,000 tokens", True, 18.5, 22.0),
        ("default mix, vLLM's defaults", True, 1.96, 2.02),
        (CACHING.name, True, 6.4, 7.2),
    ],
)
def test_scan_steps_per_request(look, name, statistics, mean, most):
    ran = look(name, statistics)
    assert 1 <= ran.steps <= mean and ran.most <= most  # a step admits at most one request


def test_a_search_compiles_its_three_programs_once():
    """More settings, other loads and numbers of clients, more rounds: all in the programs of the first search."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    sizes: dict[str, Any] = {"seeds": 2, "num_requests": 100, "max_num_requests": 100, "runtime": {"lanes": 4}}
    jaxsim.search({"max_num_seqs": [8, 64], "max_num_batched_tokens": [2048]}, **sizes)
    assert len(compiled) <= 3  # fewer where a test before it has had the same sizes
    compiled.clear()
    space = {"max_num_seqs": [4, 8, 16, 32, 64], "max_num_batched_tokens": [1024, 2048]}
    assert jaxsim.search(space, **sizes).summary["simulations"] > 100
    assert not compiled
    jax.jit(lambda x: x + 1)(1.0)
    assert compiled  # or nobody listens
