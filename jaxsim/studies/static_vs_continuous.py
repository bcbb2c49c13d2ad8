"""Static and continuous batching on the same requests: how much the latter gains, at which loads, and why."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from jaxsim.engine import Requests
from jaxsim.metrics import Interval, t_interval
from jaxsim.results import terminal
from jaxsim.settings import StaticSettings
from jaxsim.studies.job import Job
from jaxsim.tuning.evaluate import Task
from jaxsim.tuning.replicates import joined

POLICIES = ("static", "continuous")
OUTPUTS = ("as they are", "all equal")
SATURATION_RPS = 1e4  # of each instance
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0, 2.0)  # of the throughput of continuous batching under saturation
REPORTED = (2.0, 5.0)  # ratio of throughputs that the field reports


def run(job: Job) -> None:
    """Both policies at every load, with the requests as they are and with equal outputs. Raises `ConfigError`."""
    asked: StaticSettings = job.groups["static_vs_continuous"]
    seqs, tokens = job.server.batch_defaults()
    cost = job.server.cost(tokens, seqs)
    candidates = {}
    for policy in POLICIES:
        made = job.server.candidate(seqs, tokens, batching=policy)
        candidates[policy] = replace(made, setting={**made.setting, "batching": policy}, cost=cost)
    evaluate = job.evaluate(joined([job.replicates, job.replicates.changed(_equal)]))
    seeds = len(job.replicates.requests)
    tracking = job.track()
    job.console.print(f"{job.title()}, max_num_seqs={seqs}")
    job.say_defaults()
    rows: list[dict[str, Any]] = []
    interrupted = False
    with terminal.progress(job.console, "simulating") as bar:

        def tasks(policy: str, outputs: int, load_rps: float) -> list[Task]:
            return [Task(candidates[policy], outputs * seeds + seed, load_rps) for seed in range(seeds)]

        def simulated(tasks: Sequence[Task]) -> list[dict[str, Any]]:
            return [outcome.figures for outcome in evaluate(tasks, lambda *_: bar.advance())]

        try:
            loads = list(asked.loads_rps or ())
            expected = len(OUTPUTS) * len(POLICIES) * seeds * (len(loads) or len(SHARES))
            bar.expect(expected + (0 if loads else seeds), "simulating")
            if not loads:
                saturated = simulated(tasks("continuous", 0, SATURATION_RPS * job.server.flags.instances))
                peak = float(np.mean([one["request_throughput"] for one in saturated]))
                loads = [float(f"{peak * share:.3g}") for share in SHARES]
            for place, name in enumerate(OUTPUTS):
                both = [one for load in loads for policy in POLICIES for one in tasks(policy, place, load)]
                found = iter(simulated(both))
                for load in loads:
                    mine = {policy: list(islice(found, seeds)) for policy in POLICIES}
                    rows.append({"outputs": name, "load_rps": load} | _compare(job, mine))
                    tracking.log({key: value for key, value in rows[-1].items() if key != "outputs"})
        except KeyboardInterrupt:
            interrupted = True
    _finish(job, tracking, rows, seqs, interrupted)
    if interrupted:
        raise KeyboardInterrupt


def _equal(requests: Requests) -> Requests:
    """The same requests with outputs of the mean length."""
    mean = max(1, round(float(np.mean(requests.output_len))))
    return requests._replace(output_len=np.full_like(np.asarray(requests.output_len), mean))


def _compare(job: Job, runs: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Means over seeds of both policies; the ratio of throughputs is taken seed by seed."""
    row: dict[str, float] = {}
    throughput = {}
    keys = ["request_throughput", "output_throughput", "p99_ttft_ms", "mean_e2el_ms", "slot_occupancy"]
    keys += [key for key in [job.ttft] if key not in keys]
    for policy, found in runs.items():
        throughput[policy] = np.array([one["request_throughput"] for one in found])
        for key in keys:
            row[f"{policy}_{key}"] = float(np.mean([one[key] for one in found]))
    ratio = t_interval(throughput["continuous"] / throughput["static"])
    return row | {"throughput_ratio": ratio.mean, "throughput_ratio_ci95": ratio.half_width}


def _finish(job: Job, tracking: Any, rows: list[dict[str, Any]], seqs: int, interrupted: bool) -> None:
    summary: dict[str, Any] = {
        "sweep": job.sweep,
        "status": "interrupted" if interrupted else "ok",
        "max_num_seqs": seqs,
    }
    if rows:
        best = max(rows, key=lambda row: row["throughput_ratio"])
        summary |= {
            "largest_ratio": best["throughput_ratio"],
            "at_load_rps": best["load_rps"],
            "outputs": best["outputs"],
        }
        inside = [row for row in rows if REPORTED[0] <= row["throughput_ratio"] <= REPORTED[1]]
        summary["loads_with_reported_ratio"] = [row["load_rps"] for row in inside if row["outputs"] == "as they are"]
    summary |= {"seconds": job.seconds(), "points": rows}
    headings = [
        "load req/s",
        "static req/s",
        "continuous req/s",
        "ratio",
        f"p{job.slo.percentile:g} TTFT s",
        "slots in use",
        "outputs",
    ]
    lines = [
        [
            terminal.number(row["load_rps"]),
            *(terminal.number(row[f"{policy}_request_throughput"]) for policy in POLICIES),
            terminal.interval(Interval(row["throughput_ratio"], row["throughput_ratio_ci95"])),
            " / ".join(terminal.number(row[f"{policy}_{job.ttft}"] / 1000) for policy in POLICIES),
            " / ".join(f"{row[f'{policy}_slot_occupancy']:.0%}" for policy in POLICIES),
            row["outputs"],
        ]
        for row in rows
    ]
    job.console.print(terminal.table("Static / continuous batching", headings, lines))
    if rows:
        low, high = REPORTED
        loads = ", ".join(terminal.number(load) for load in summary["loads_with_reported_ratio"]) or "no load here"
        job.console.print(
            terminal.facts(
                [
                    ("largest ratio", f"{summary['largest_ratio']:.2f} at {summary['at_load_rps']:g} req/s"),
                    (f"{low:g} to {high:g}x", f"at {loads} (below saturation both carry the load: the ratio is 1)"),
                ]
            )
        )
    job.finish(tracking, summary, {"candidates": rows})
