"""Lane-steps per second by number of lanes, kernels per step and time per simulated request, on the device at hand.

    python -m benchmarks.gpu [--lanes 1024 4096 ...] [--seconds 540] [--out gpu.json]
    python -m benchmarks.gpu --unroll 4  # several steps in one pass of the loop
    python -m benchmarks.gpu --quick     # small numbers, for a CPU

Three programs: the plainest one, and the main job's (async scheduling, tables of iteration times, statistics) without
and with prefix caching. Every lane runs its simulation of a list of requests to the end; nothing is taken out, so these
are the device's own speeds. At last the same through `simulate_many`, the host's work included, at the best number of
lanes. All programs are compiled first, side by side. Rows that do not fit into memory, or for which no time is left,
say so. docs/gpu.md explains the columns.
"""

import argparse
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from benchmarks.program import step
from benchmarks.workloads import TabledCost, YardstickCost, settings
from jaxsim.engine import Requests, Status, lanes, simulate_many
from jaxsim.engine.prepare import Prepared, Settings, prepare
from jaxsim.engine.width import lane_bytes, width

STEPS = lanes.STEPS
LISTS, ENGINES = 8, 64  # distinct lists of requests and settings; lanes beyond them repeat them
RATE_RPS = 12.0
PROGRAMS = ("plain", "main", "main with caching")


class Program(NamedTuple):
    """One program at one number of lanes, compiled."""

    name: str
    lanes: int
    prepared: Prepared
    fill: Any
    chunk: Any
    compile_s: float


def simulations(name: str, requests: int) -> Settings:
    """What the lanes run, one setting after the other."""
    lists = []
    for seed in range(LISTS):
        random = np.random.default_rng(seed)
        prompt = np.clip(np.exp(random.normal(5.5, 1.0, requests)), 1, 3000).astype(int)
        output = np.clip(np.exp(random.normal(5.0, 0.8, requests)), 1, 1500).astype(int)
        arrival = np.cumsum(random.exponential(1.0, requests))
        shared = [min(int(length) * 4 // 5, 512) for length in prompt]  # tokens of one of four system prompts
        parts = [
            [part for part in ((f"system {i % 4}", 0, head), (f"{seed} {i}", 0, int(length) - head)) if part[2]]
            for i, (length, head) in enumerate(zip(prompt, shared, strict=True))
        ]
        lists.append(Requests(arrival, prompt, output, segments=parts if name == "main with caching" else None))
    main = name != "plain"
    rules = {"scheduler_reserve_full_isl": True, "async_scheduling": main}
    engines = settings(ENGINES, fewest=8, most=256, enable_prefix_caching=name == "main with caching", **rules)
    chosen = [lists[i % LISTS] for i in range(ENGINES)]
    return Settings(
        chosen,
        engines,
        [TabledCost() if main else YardstickCost()] * ENGINES,
        [None] * ENGINES,
        [1 / RATE_RPS] * ENGINES,
        [0.0] * ENGINES,
    )


def ready(name: str, requests: int) -> Prepared:
    return prepare(simulations(name, requests), name == "main with caching", True, name != "plain", False)


def arguments(prepared: Prepared, count: int, mesh: Any) -> tuple[tuple, tuple]:
    """What a refill and a chunk of `count` lanes are called with, the lanes still empty; on the host."""
    limits, traces, tables, chains, jobs, _ = prepared
    slots = -(-count // lanes.blocks(limits)) * lanes.blocks(limits)
    several = jax.tree.map(lambda column: column[np.arange(count) % ENGINES], jobs)
    knobs, state = lanes.blank(limits, traces, several)
    places = np.arange(slots, dtype=np.int32)
    fill = (traces, knobs, state, np.full(1, count, np.int32), places, several)
    return fill, (np.bool_(True), knobs, tables, chains, state)


def shaped(tree: Any, place: NamedSharding) -> Any:
    """The tree's shapes, with where its leaves are to be."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)


def compiled(name: str, prepared: Prepared, count: int, mesh: Any) -> Program:
    whole, split = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec(lanes.AXIS))
    start = time.monotonic()
    with lanes.x64():
        fill, chunk, _ = lanes.compiled(prepared.limits, mesh, STEPS)
        filling, stepping = arguments(prepared, count, mesh)
        traces, *rest = filling
        on, knobs, tables, chains, state = stepping
        fill = fill.lower(shaped(traces, whole), *shaped(rest, split)).compile()
        shared = shaped((tables, chains), whole)
        chunk = chunk.lower(shaped(on, whole), shaped(knobs, split), *shared, shaped(state, split)).compile()
    return Program(name, count, prepared, fill, chunk, time.monotonic() - start)


def measure(program: Program, mesh: Any, seconds: float) -> dict[str, Any]:
    """Steps all lanes to their end, or for so many seconds."""
    whole, split = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec(lanes.AXIS))
    taken: list[float] = []
    done, ended, steps = np.zeros(1, bool), np.zeros(1, bool), np.zeros(1, np.int32)
    with lanes.x64():
        filling, stepping = arguments(program.prepared, program.lanes, mesh)
        on, _, tables, chains, _ = stepping
        on, tables, chains, traces = jax.device_put((on, tables, chains, filling[0]), whole)
        rest = jax.device_put(filling[1:], split)
        start = time.monotonic()
        knobs, state = program.fill(traces, *rest)
        jax.block_until_ready(state)
        fill_s = time.monotonic() - start
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            start = time.monotonic()
            state, _ = program.chunk(on, knobs, tables, chains, state)
            status = np.asarray(state.status)
            taken.append(time.monotonic() - start)
            done, ended = status == Status.DONE, status != Status.RUNNING
            if ended.all():
                break
        steps = np.asarray(state.scan_steps)[done]
    step_s = float(np.median(taken)) / STEPS
    each = float(steps.mean()) / len(program.prepared.orders[0]) if done.any() else math.nan
    return {
        "step_us": 1e6 * step_s,
        "lane_steps_per_s": program.lanes / step_s,
        "steps_per_request": each,
        "ns_per_request": 1e9 * each * step_s / program.lanes,
        "requests_per_s": program.lanes / step_s / each,
        "fill_s": fill_s,
        "ended": float(ended.mean()),
        "not_done": int((ended & ~done).sum()),
    }


def end_to_end(name: str, requests: int, count: int) -> dict[str, Any]:
    """Through the public function, records and all; compiled already if so many lanes were measured."""
    given = simulations(name, requests)
    jobs = 2 * count
    some: Any = [[column[i % ENGINES] for i in range(jobs)] for column in given]
    start = time.monotonic()
    simulate_many(*some[:3], stretch=some[4], statistics=name != "plain", lanes=count, keep=False)
    first = time.monotonic() - start
    start = time.monotonic()
    simulate_many(*some[:3], stretch=some[4], statistics=name != "plain", lanes=count, keep=False)
    taken = time.monotonic() - start
    return {"lanes": count, "simulations": jobs, "first_s": first, "requests_per_s": jobs * requests / taken}


def main() -> None:
    parser = argparse.ArgumentParser(description="speed of the engine on an accelerator, by number of lanes")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1 << 14, 1 << 16, 1 << 12, 1 << 18, 1 << 10])
    parser.add_argument("--requests", type=int, default=250, help="of each simulation")
    parser.add_argument("--row-seconds", type=float, default=8.0, help="at most, for the steps of one row")
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="for everything: rows that come later are left out"
    )
    parser.add_argument("--unroll", type=int, default=lanes.UNROLL, help="steps in one pass of the compiled loop")
    parser.add_argument("--quick", action="store_true", help="16 to 256 lanes, 60 requests")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    asked = parser.parse_args()
    if asked.quick:
        asked.lanes, asked.requests, asked.row_seconds = [64, 16, 256], 60, 2.0
    lanes.UNROLL = asked.unroll
    began = time.monotonic()
    device = jax.local_devices()[0]
    mesh = lanes.devices_mesh([device])
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"date": date.today().isoformat(), "device": device.device_kind, "jax": jax.__version__}
    result |= {
        "platform": device.platform,
        "requests": asked.requests,
        "unroll": asked.unroll,
        "kernels": {},
        "rows": rows,
        "end_to_end": {},
    }

    def left() -> float:
        return asked.seconds - (time.monotonic() - began)

    def keep() -> None:
        asked.out.write_text(json.dumps(result, indent=1))

    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}, {asked.requests} requests a simulation")
    prepared = {name: ready(name, asked.requests) for name in PROGRAMS}
    plans = [(name, count) for count in asked.lanes for name in PROGRAMS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = [pool.submit(compiled, name, prepared[name], count, mesh) for name, count in plans]
        for future in waiting:
            try:
                future.exception(timeout=max(0.0, 0.6 * asked.seconds - (time.monotonic() - began)))
            except TimeoutError:
                pool.shutdown(wait=False, cancel_futures=True)
                break
        print(f"compiled in {time.monotonic() - began:.0f} s")
        heads = ("program", "lanes", "MB", "us/step", "M lane-steps/s", "steps/req", "ns/req", "M req/s", "compile s")
        print("".join(f"{head:>{18 if i == 0 else 15}}" for i, head in enumerate(heads)))
        for (name, count), future in zip(plans, waiting, strict=True):
            row: dict[str, Any] = {"program": name, "lanes": count}
            megabytes = count * lane_bytes(prepared[name].limits) / 1e6
            try:
                if device.platform == "cpu" and width(prepared[name].limits, count, count, [device]) < count:
                    raise MemoryError
                if left() < asked.row_seconds or not future.done() or future.cancelled():
                    row["left_out"] = "no time"
                else:
                    program = future.result()
                    if name not in result["kernels"]:
                        result["kernels"][name] = dict(step(program.chunk.as_text()).dispatched.most_common())
                    row |= {"compile_s": program.compile_s, **measure(program, mesh, asked.row_seconds)}
            except (MemoryError, jax.errors.JaxRuntimeError) as error:
                if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                row["left_out"] = "out of memory"
            rows.append(row)
            keep()
            print(f"{name:>18}{count:>15}{megabytes:>15.0f}" + _line(row), flush=True)
    for name, found in result["kernels"].items():
        text = ", ".join(f"{number} {kind}" for kind, number in found.items())
        print(f"{name}: {sum(found.values())} operations in a pass of the loop, unrolled {asked.unroll} x ({text})")
    for name in PROGRAMS:
        mine = [row for row in rows if row["program"] == name and "left_out" not in row]
        if not mine:
            continue
        best = max(mine, key=lambda row: row["lane_steps_per_s"])
        enough = [row for row in mine if row["lane_steps_per_s"] >= 0.95 * best["lane_steps_per_s"]]
        least = min(row["lanes"] for row in enough)
        result.setdefault("best_lanes", {})[name] = least
        print(f"{name}: fastest with {best['lanes']} lanes, {least} are within 5 % of it")
        if left() > 60 or asked.quick:
            found = result["end_to_end"][name] = end_to_end(name, asked.requests, min(least, 1 << 12))
            print(f"{name}: {found['requests_per_s'] / 1e6:.3f} M requests/s through simulate_many", flush=True)
    keep()
    print(f"{asked.out}: {time.monotonic() - began:.0f} s")


def _line(row: dict[str, Any]) -> str:
    if "left_out" in row:
        return f"   {row['left_out']}"
    shown = [f"{row['step_us']:.1f}", f"{row['lane_steps_per_s'] / 1e6:.2f}", f"{row['steps_per_request']:.2f}"]
    shown += [f"{row['ns_per_request']:.1f}", f"{row['requests_per_s'] / 1e6:.3f}", f"{row['compile_s']:.0f}"]
    return "".join(f"{each:>15}" for each in shown)


if __name__ == "__main__":
    main()
