"""Static and continuous batching on the same requests: how much the latter gains, at which loads, and why."""

from typing import Any

import numpy as np

from jaxsim.engine import Requests, Simulation, simulate_many
from jaxsim.metrics import Interval, t_interval
from jaxsim.results import terminal
from jaxsim.settings import StaticSettings
from jaxsim.studies.job import Job
from jaxsim.tuning.figures import figures

POLICIES = ("static", "continuous")
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0, 2.0)  # of the throughput of continuous batching under saturation
REPORTED = (2.0, 5.0)  # ratio of throughputs that the field reports


def run(job: Job) -> None:
    """Both policies at every load, with the requests as they are and with equal outputs. Raises `ConfigError`."""
    asked: StaticSettings = job.groups["static_vs_continuous"]
    seqs, tokens = job.server.batch_defaults()
    engines = {policy: job.server.candidate(seqs, tokens, batching=policy).engine for policy in POLICIES}
    cost = job.server.cost(tokens, seqs)
    sampled = job.replicates
    outputs = {"as they are": sampled.requests, "all equal": [_equal(requests) for requests in sampled.requests]}
    tracking = job.track()
    job.console.print(f"{job.title()}, max_num_seqs={seqs}")
    job.say_defaults()
    rows: list[dict[str, Any]] = []
    interrupted = False
    with terminal.progress(job.console, "simulating") as bar:

        def simulate(requests: list[Requests], engine: Any, loads: list[float]) -> list[Simulation]:
            return simulate_many(
                requests * len(loads),
                engine,
                cost,
                stretch=[sampled.stretch(seed, load) for load in loads for seed in range(len(requests))],
                on_done=lambda index, simulation: bar.advance(),
                lanes=job.lanes,
            )

        try:
            seeds = len(sampled.requests)
            loads = list(asked.loads_rps or ())
            expected = len(outputs) * len(POLICIES) * seeds * (len(loads) or len(SHARES))
            bar.expect(expected + (0 if loads else seeds), "simulating")
            if not loads:
                saturated = simulate(sampled.requests, engines["continuous"], [1e4])
                peak = float(np.mean([figures(one, job.slo, 0.0)["request_throughput"] for one in saturated]))
                loads = [float(f"{peak * share:.3g}") for share in SHARES]
            for name, requests in outputs.items():
                runs = {policy: simulate(requests, engine, loads) for policy, engine in engines.items()}
                for index, load in enumerate(loads):
                    mine = {policy: done[index * seeds : (index + 1) * seeds] for policy, done in runs.items()}
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


def _compare(job: Job, runs: dict[str, list[Simulation]]) -> dict[str, float]:
    """Means over seeds of both policies; the ratio of throughputs is taken seed by seed."""
    row: dict[str, float] = {}
    throughput = {}
    keys = ["request_throughput", "output_throughput", "p99_ttft_ms", "mean_e2el_ms", "slot_occupancy"]
    keys += [key for key in [job.ttft] if key not in keys]
    for policy, done in runs.items():
        found = [figures(simulation, job.slo, job.search.warmup) for simulation in done]
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
