"""What latency costs: throughput per GPU against TTFT, and against tokens per second and user."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsim.results import terminal
from jaxsim.settings import ParetoSettings, show
from jaxsim.studies.job import Job
from jaxsim.tuning.evaluate import Outcome, Task
from jaxsim.tuning.figures import cost_per_million, over_seeds
from jaxsim.tuning.space import Candidate, Space

SATURATING_RPS = 1e4
FRONTS = ("front_ttft", "front_interactivity")


def run(job: Job) -> None:
    """Every setting of the search space at shares of its saturated throughput; marks what no other point beats.

    Raises `ConfigError` if no setting can start.
    """
    asked: ParetoSettings = job.groups["pareto"]
    space = Space.of(job.server, job.search, job.baseline)
    grid = job.shard.mine(space.grid())
    candidates = [one for one in grid if one.engine is not None]
    baseline = space.baseline_candidate()
    if baseline is not None and baseline.engine is not None:
        candidates.append(baseline)
    seeds = range(len(job.replicates.requests))
    simulate = job.evaluate()
    tracking = job.track()
    job.console.print(f"{job.title()}, {len(grid)} settings at {len(asked.shares)} loads")
    job.say_defaults(space.searched)
    rows: list[dict[str, Any]] = []
    interrupted = False
    with terminal.progress(job.console, "compiling") as bar:

        def batch(tasks: list[Task]) -> list[list[Outcome]]:
            """Outcomes by setting and load, a list over seeds each."""
            done = simulate(tasks, lambda *_: bar.advance())
            return [done[start : start + len(seeds)] for start in range(0, len(done), len(seeds))]

        try:
            bar.expect(len(candidates) * len(seeds) * (1 + len(asked.shares)), "saturated")
            full = batch([Task(one, seed, SATURATING_RPS) for one in candidates for seed in seeds])
            peaks = [np.mean([outcome.figures["request_throughput"] for outcome in runs]) for runs in full]
            points = [
                (one, float(f"{peak * share:.4g}"))
                for one, peak in zip(candidates, peaks, strict=True)
                for share in asked.shares
            ]
            bar.expect(len(points) * len(seeds), "simulating")
            runs = batch([Task(one, seed, load) for one, load in points for seed in seeds])
            for (one, load), outcomes in zip(points, runs, strict=True):
                rows.append(
                    {**one.setting, "load_rps": load, "baseline": one is baseline, **_point(job, one, outcomes)}
                )
        except KeyboardInterrupt:
            interrupted = True
    _mark(rows, job.ttft)
    for row in rows:
        tracking.log(row)
    _show(job, space, rows)
    fronts = {name: [row for row in rows if row[name]] for name in FRONTS}
    summary = {"sweep": job.sweep, "status": "interrupted" if interrupted else "ok", "seconds": job.seconds(), **fronts}
    job.finish(tracking, summary, {"candidates": rows})
    if interrupted:
        raise KeyboardInterrupt


def _point(job: Job, one: Candidate, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Means over seeds; a load at which the queue grows in any seed is no operating point."""
    found = {key: interval.mean for key, interval in over_seeds([outcome.figures for outcome in outcomes]).items()}
    keys = ["request_throughput", "output_throughput", "mean_ttft_ms", job.ttft, "mean_tpot_ms", "p99_tpot_ms"]
    row = {key: found[key] for key in [*keys, "mean_e2el_ms", "kv_usage_mean", "num_preemptions"]}
    row["stable"] = float(found["stable"] == 1)
    row["gpus"] = one.gpus
    row["output_throughput_per_gpu"] = found["output_throughput"] / one.gpus
    row["interactivity"] = 1000 / found["mean_tpot_ms"] if found["mean_tpot_ms"] > 0 else float("nan")
    price = job.server.hardware.price_per_hour
    if price is not None:
        row["cost_per_million_output_tokens"] = cost_per_million(price, row["output_throughput_per_gpu"])
    return row


def _mark(rows: list[dict[str, Any]], ttft: str) -> None:
    """Marks the stable points that no other beats in both throughput per GPU and the latency."""
    throughput = np.array([row["output_throughput_per_gpu"] for row in rows])
    stable = np.array([row["stable"] == 1 for row in rows], bool)
    for name, better in (
        ("front_ttft", np.array([-row[ttft] for row in rows])),
        ("front_interactivity", np.array([row["interactivity"] for row in rows])),
    ):
        marked = stable & on_front(np.where(stable, throughput, -np.inf), np.where(stable, better, -np.inf))
        for row, on in zip(rows, marked, strict=True):
            row[name] = bool(on)


def on_front(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Which points [K] no other dominates: larger in one and not smaller in the other; equal points all stay."""
    least = (first[:, None] <= first) & (second[:, None] <= second)
    more = (first[:, None] < first) | (second[:, None] < second)
    return np.asarray(~np.any(least & more, axis=1))


def _show(job: Job, space: Space, rows: list[dict[str, Any]]) -> None:
    keys = list(space.values)
    columns = {
        "load_rps": "load req/s",
        "output_throughput_per_gpu": "output tok/s/GPU",
        job.ttft: f"p{job.slo.percentile:g} TTFT ms",
        "interactivity": "tok/s/user",
        "cost_per_million_output_tokens": "cost per million",
    }
    columns = {key: name for key, name in columns.items() if rows and key in rows[0]}
    headings = [*(terminal.SHORT.get(key, key) for key in keys), *columns.values(), ""]
    for name, title in zip(FRONTS, ("TTFT", "interactivity"), strict=True):
        front = sorted((row for row in rows if row[name]), key=lambda row: row["output_throughput_per_gpu"])
        lines = [
            [
                *(show(row[key]) for key in keys),
                *(terminal.number(row[key]) for key in columns),
                "baseline" if row["baseline"] else "",
            ]
            for row in front
        ]
        job.console.print(
            terminal.table(f"Throughput per GPU against {title}: what no other point beats", headings, lines)
        )
