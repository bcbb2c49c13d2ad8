"""CPU time from nothing to a program's first result, in a process of its own, and what the program consists of.

    python -m benchmarks.start NAME

prints JSON. Whether it has to compile depends on JAX's own variables for its compilation cache.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from benchmarks.program import Program, step, watching
from benchmarks.workloads import VLLM, TabledCost, YardstickCost, default_mix, settings, system_prompts
from jaxsim.engine import Cost, Requests, simulate_many
from jaxsim.engine.width import lane_bytes

LANES = 64
# Options of the engine, statistics, and what is simulated.
PROGRAMS: dict[str, tuple[dict[str, Any], bool, Callable[[int], Requests], Cost]] = {
    "plain": ({}, False, default_mix, YardstickCost()),
    "statistics": ({}, True, default_mix, YardstickCost()),
    "main job": (VLLM, True, default_mix, TabledCost()),  # no two requests share a block
    "main job, shared prompts": (VLLM, True, system_prompts, TabledCost()),
}
MAIN = "main job"


def compiled(name: str) -> Program:
    """The program, having simulated a list of 1,000 requests."""
    options, statistics, requests, cost = PROGRAMS[name]
    engines = settings(LANES, fewest=8, most=48, **options)
    with watching() as watch:
        simulate_many(requests(1000), engines, cost, stretch=1 / 12, statistics=statistics, lanes=LANES)
    return watch.sole


def start(name: str) -> dict[str, Any]:
    """A row of the table: to the first result with an empty compilation cache and with one that holds the program."""
    with tempfile.TemporaryDirectory() as folder:
        cache = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5"}
        command = [sys.executable, "-m", "benchmarks.start", name]
        cold, cached = (
            json.loads(subprocess.run(command, env=os.environ | cache, check=True, capture_output=True).stdout)
            for _ in range(2)
        )
    return cold | {"cold_s": cold["seconds"], "cached_s": cached["seconds"]}


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    name = sys.argv[1]
    program = compiled(name)
    seconds = time.process_time()  # from the start of the process, imports and compilation included
    counts, larger = step(program.text), replace(program.limits, requests=10_240)
    print(
        json.dumps(
            {
                "program": name,
                "seconds": seconds,
                "dispatched": counts.total,
                "copies": counts.dispatched["copy"],
                "operations": counts.operations,
                "lane_bytes": program.state_bytes,
                "lane_bytes_10k": program.state_bytes + lane_bytes(larger) - lane_bytes(program.limits),
                "temporary_bytes": program.temporary_bytes / LANES,
            }
        )
    )


if __name__ == "__main__":
    main()
