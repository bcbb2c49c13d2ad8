"""Time per simulated request on one core, beside a plain C program on the same requests and settings.

    python benchmarks/speed.py [--settings 512] [--requests 1000] [--lanes 256]

The yardstick is native/native.c in the folder that $JAXSIM_DATA names: the core of the scheduling rules, every
iteration stepped, no statistics. It is compiled with `cc`; without it only this engine's time is printed. The workload
is the one the yardstick generates by default: max_num_seqs from 1 to 512 in geometric steps, lognormal lengths, Poisson
arrivals at 12 requests/s, 20,000 blocks. Times are CPU times of this process and of the yardstick's; compilation is not
counted. The two agree in all but the rounding of times, which the last lines show.
"""

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxsim.engine import CostTable, EngineConfig, Requests, Simulation, simulate_many

RATE_RPS = 12.0
BLOCKS = 20_000  # usable


class YardstickCost:
    """6 ms, 60 us per prompt token, 20 us per decode and 40 ns per token of context of decodes."""

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        return CostTable(
            step_ps=6 * 10**9, prefill_token_ps=60 * 10**6, decode_seq_ps=20 * 10**6, decode_ctx_ps=40 * 10**3
        )


def workload(count: int) -> Requests:
    """Lognormal lengths and exponential gaps with the yardstick's parameters; arrivals at one request per second."""
    random = np.random.default_rng(0)
    prompt = np.clip(np.exp(random.normal(5.5, 1.0, count)), 1, 3000).astype(int)
    output = np.clip(np.exp(random.normal(5.0, 0.8, count)), 1, 1500).astype(int)
    return Requests(np.cumsum(random.exponential(1.0, count)), prompt, output)


def settings(count: int) -> list[EngineConfig]:
    """max_num_seqs from 1 to 512, as the yardstick chooses them."""
    seats = [int(512 ** (i / max(1, count - 1)) + 1e-9) for i in range(count)]
    return [
        EngineConfig(
            max_num_seqs=seat,
            max_num_batched_tokens=2048,
            num_gpu_blocks=BLOCKS + 1,
            max_model_len=8192,
            scheduler_reserve_full_isl=False,
        )
        for seat in seats
    ]


def yardstick(requests: Requests, count: int) -> list[str] | None:
    """What the C program prints: a line per setting, then its time; None if it cannot be built."""
    source = Path(os.environ.get("JAXSIM_DATA", "")) / "native" / "native.c"
    if not source.is_file():
        return None
    with tempfile.TemporaryDirectory() as folder:
        program, trace = Path(folder) / "native", Path(folder) / "trace.txt"
        subprocess.run(["cc", "-O3", "-march=native", str(source), "-o", str(program), "-lm"], check=True)
        rows = zip(requests.prompt_len, requests.output_len, requests.arrival_s, strict=True)
        trace.write_text("".join(f"{p} {o} {a:.15g}\n" for p, o, a in rows))
        command = [program, count, len(requests.prompt_len), RATE_RPS, BLOCKS, trace, "v"]
        return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout.split(
            "\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time per simulated request of this engine and of a C program")
    parser.add_argument("--settings", type=int, default=512)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--lanes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    jax.config.update("jax_num_cpu_devices", 1)
    requests, engines = workload(asked.requests), settings(asked.settings)
    cost = YardstickCost()

    def simulate(statistics: bool) -> tuple[float, list[Simulation]]:
        start = time.process_time()
        runs = simulate_many(requests, engines, cost, stretch=1 / RATE_RPS, statistics=statistics, lanes=asked.lanes)
        return (time.process_time() - start) / (asked.settings * asked.requests) * 1e9, runs

    for statistics in (False, True):
        simulate(statistics)
    times: dict[str, list[float]] = {"engine": [], "engine with statistics": [], "yardstick": []}
    lines: list[str] | None = None
    runs: list[Simulation] = []
    for _ in range(asked.repeats):  # in turn, so that a busy machine slows all alike
        taken, runs = simulate(False)
        times["engine"].append(taken)
        times["engine with statistics"].append(simulate(True)[0])
        if (lines := yardstick(requests, asked.settings)) is not None:
            times["yardstick"].append(float(lines[-2].split(" ns/request")[0].split()[-1]))
    steps = np.array([run.totals.scan_steps for run in runs]) / asked.requests
    print(f"scan steps per request: mean {steps.mean():.2f}, largest {steps.max():.2f}")
    for name, taken in times.items():
        if not taken:
            print("yardstick: no native/native.c under $JAXSIM_DATA")
            continue
        ratio = f", {min(taken) / min(times['yardstick']):.2f} x the yardstick" if times["yardstick"] else ""
        print(f"{name}: {min(taken):.0f} ns per request{ratio}")
    for i in (0, asked.settings // 2, asked.settings - 1):
        if lines is None:
            break
        seats, iterations, preemptions, end_s, p99_s = lines[i].split()
        run = runs[i]
        ttft = np.sort(run.first_token_s - run.arrival_s)[int(0.99 * (asked.requests - 1))]
        print(
            f"max_num_seqs {seats}: iterations {run.totals.iterations} / {iterations}, preemptions "
            f"{run.totals.num_preemptions} / {preemptions}, end {np.max(run.finish_s):.3f} / {float(end_s):.3f} s, "
            f"p99 TTFT {ttft:.3f} / {float(p99_s):.3f} s"
        )


if __name__ == "__main__":
    main()
