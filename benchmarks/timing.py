"""CPU time per simulated request, of the engine and of the native program in turn, so that noise meets all alike."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import yardstick
from benchmarks.program import Watch
from benchmarks.workloads import Case, YardstickCost
from jaxsim.engine import Simulation, simulate_many


def run(case: Case, statistics: bool) -> tuple[float, list[Simulation]]:
    """CPU seconds and outcomes."""
    start = time.process_time()
    runs = simulate_many(
        case.requests, case.engines, case.cost, stretch=1 / case.rate_rps, statistics=statistics, lanes=case.lanes
    )
    return time.process_time() - start, runs


def measure(case: Case, watch: Watch, program: Path | None, folder: Path, repeats: int) -> dict[str, Any]:
    """A row of the table: counts, and nanoseconds per request as the least of the repeats."""
    count, total = len(case.requests.prompt_len), len(case.engines) * len(case.requests.prompt_len)
    native: list[float] = []
    seconds: dict[bool, list[float]] = {False: [], True: []}
    runs: dict[bool, list[Simulation]] = {}
    if program is not None:
        yardstick.write_input(folder / "input", case.requests, case.engines, YardstickCost(), 1 / case.rate_rps)
    for statistics in (True, False):  # compiles
        run(case._replace(engines=case.engines[-1:]), statistics)
    done = None
    for repeat in range(repeats):
        if program is not None:
            timed = yardstick.run(program, folder / "input", count, whole=repeat == 0)
            native.append(timed.seconds)
            done = done or timed
        for statistics in (True, False):
            for one in watch.programs:
                one.calls = 0
            taken, runs[statistics] = run(case, statistics)
            seconds[statistics].append(taken)
    agrees = same(done, runs[False]) and same(done, runs[True]) if done and case.native else None
    # The programs of the last run, without statistics.
    lane_steps = sum(one.calls * one.steps * one.lanes for one in watch.programs)
    steps, rich_steps = (sum(one.totals.scan_steps for one in runs[statistics]) for statistics in (False, True))
    plain = runs[False]
    plain_ns, rich_ns = (min(seconds[statistics]) / total * 1e9 for statistics in (False, True))
    native_ns = min(native) / total * 1e9 if native else None
    return {
        "case": case.name,
        "settings": len(case.engines),
        "requests": count,
        "lanes": case.lanes,
        "iterations_per_request": sum(one.totals.iterations for one in plain) / total,
        "preemptions": sum(one.totals.num_preemptions for one in plain),
        "hit_share": float(sum(one.hit_tokens.sum() for one in plain) / sum(one.prompt_len.sum() for one in plain)),
        "steps_per_request": steps / total,
        "statistics_steps_per_request": rich_steps / total,
        "most_steps_per_request": max(one.totals.scan_steps for one in plain) / count,
        "lanes_busy": steps / lane_steps,
        "lane_step_ns": min(seconds[False]) / lane_steps * 1e9,
        "request_ns": plain_ns,
        "statistics_request_ns": rich_ns,
        "native_request_ns": native_ns,
        "ratio": plain_ns / native_ns if native_ns else None,
        "statistics_ratio": rich_ns / native_ns if native_ns else None,
        "native_has_the_rules": case.native,
        "agrees": agrees,
        "seconds": seconds[False],
        "statistics_seconds": seconds[True],
        "native_seconds": native,
    }


def same(done: yardstick.NativeRun, runs: list[Simulation]) -> bool:
    """Whether the engine's outcomes are the native program's, to the picosecond; the requests come in order."""
    return all(
        run.totals.iterations == done.iterations[i]
        and run.totals.num_preemptions == done.num_preemptions[i]
        and np.array_equal(run.first_scheduled_ps, done.first_scheduled_ps[i])
        and np.array_equal(run.first_token_ps, done.first_token_ps[i])
        and np.array_equal(run.finish_ps, done.finish_ps[i])
        for i, run in enumerate(runs)
    )
