"""Simulated requests per second of one core with and without prefix caching, in one run.

    python benchmarks/prefix_caching.py [--settings 128] [--requests 1000] [--lanes 128]

Prompts of 1,000 tokens, the first 800 of which are one of eight system prompts, Poisson arrivals at 12 requests/s,
max_num_seqs from 8 to 48, 4,000 blocks, async scheduling. A third run has the cache on and prompts that share nothing:
where nobody preempts that is a run without. Times are CPU times of this process; compilation is not counted.
"""

import argparse
import os
import time

import jax
import numpy as np
from speed import RATE_RPS, YardstickCost

from jaxsim.engine import EngineConfig, Requests, Simulation, simulate_many


def workload(count: int, shared: int) -> Requests:
    """Prompts of 1,000 tokens, the first `shared` of them of one of eight streams; arrivals at one request/s."""
    random = np.random.default_rng(0)
    output = np.clip(np.exp(random.normal(5.0, 0.8, count)), 1, 1500).astype(int)
    group = random.integers(0, 8, count)
    segments = [[(f"s{group[i]}", 0, shared), (f"u{i}", 0, 1000 - shared)] for i in range(count)] if shared else None
    return Requests(np.cumsum(random.exponential(1.0, count)), np.full(count, 1000), output, segments=segments)


def settings(count: int, caching: bool) -> list[EngineConfig]:
    seats = np.geomspace(8, 48, count).astype(int).tolist()
    return [
        EngineConfig(seat, 2048, 4001, 8192, enable_prefix_caching=caching, async_scheduling=True) for seat in seats
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="simulated requests per second with and without prefix caching")
    parser.add_argument("--settings", type=int, default=128)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--lanes", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    jax.config.update("jax_num_cpu_devices", 1)
    cases = {
        "off": (workload(asked.requests, 800), settings(asked.settings, False)),
        "on": (workload(asked.requests, 800), settings(asked.settings, True)),
        "on, nothing shared": (workload(asked.requests, 0), settings(asked.settings, True)),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    runs: dict[str, list[Simulation]] = {}
    for repeat in range(asked.repeats + 1):  # in turn, so that a busy machine slows all alike; the first compiles
        for name, (requests, engines) in cases.items():
            start = time.process_time()
            runs[name] = simulate_many(requests, engines, YardstickCost(), stretch=1 / RATE_RPS, lanes=asked.lanes)
            taken[name] += [time.process_time() - start] if repeat else []
    for name, done in runs.items():
        seconds = min(taken[name])
        steps = sum(one.totals.scan_steps for one in done) / (asked.settings * asked.requests)
        hits = sum(one.hit_tokens.sum() for one in done) / sum(one.prompt_len.sum() for one in done)
        print(
            f"prefix caching {name}: {asked.settings * asked.requests / seconds:,.0f} requests/s, "
            f"{seconds / min(taken['off']):.1f} x the time of none, {steps:.1f} scan steps per request, "
            f"{hits:.0%} of the prompt tokens found, {sum(one.totals.num_preemptions for one in done)} preemptions"
        )


if __name__ == "__main__":
    main()
