"""Everything about one setting at one load or number of clients, or at each of a list, over several seeds."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxsim.engine import simulate
from jaxsim.errors import ConfigError
from jaxsim.metrics import Interval
from jaxsim.results import terminal
from jaxsim.results.files import plain
from jaxsim.results.serve import vllm_serve
from jaxsim.settings import EvaluateSettings
from jaxsim.studies.job import Job
from jaxsim.tuning.evaluate import Outcome, Task
from jaxsim.tuning.figures import limited_by, over_seeds, percentiles
from jaxsim.tuning.space import Candidate

LATENCIES = ("ttft", "tpot", "e2el")  # drawn against the load
HIT_RATES = ("prefix_cache_hit_rate", "prefix_cache_hit_rate_warm", "mean_request_hit_rate")


def run(job: Job) -> None:
    """Simulates every point under every seed; writes summary.json, candidates.csv and, if asked, series.csv.

    Raises `ConfigError`.
    """
    asked: EvaluateSettings = job.groups["evaluate"]
    if asked.load_rps and asked.clients:
        raise ConfigError("evaluate.clients", list(asked.clients), "must be null when evaluate.load_rps is given")
    candidate = job.server.candidate(*job.server.batch_defaults())
    cost = job.server.cost(candidate.max_num_batched_tokens, candidate.max_num_seqs)
    candidate = dataclasses.replace(candidate, cost=cost)
    assert candidate.engine is not None and candidate.capacity is not None
    sampled, seeds = job.replicates, len(job.replicates.requests)
    key = "clients" if asked.clients else "load_rps"
    points: tuple[Any, ...] = asked.clients or asked.load_rps or (float(np.mean(sampled.rates_rps)),)
    if asked.clients and max(asked.clients) > sampled.count:
        raise ConfigError("evaluate.clients", max(asked.clients), f"must be at most {sampled.count}, the requests")
    evaluate = job.evaluate()
    tracking = job.track()
    job.console.print(f"{job.title()}, {len(points)} x {key}")
    job.say_defaults()
    tasks = [Task(candidate, seed)._replace(**{key: point}) for point in points for seed in range(seeds)]
    runs: dict[int, dict[str, Any]] = {}
    interrupted = False
    with terminal.progress(job.console, "simulating") as bar:
        bar.expect(len(tasks), "simulating")

        def keep(index: int, outcome: Outcome) -> None:
            runs[index] = outcome.figures
            bar.advance()

        try:
            evaluate(tasks, keep)
        except KeyboardInterrupt:
            interrupted = True
    rows: list[dict[str, Any]] = []
    for index, point in enumerate(points):
        mine = [runs[i] for i in range(index * seeds, (index + 1) * seeds) if i in runs]
        if mine:
            rows.append(_row(key, point, mine))
    for step, row in enumerate(rows):
        tracking.log({name: value for name, value in plain(row).items() if not isinstance(value, dict)}, step)
        _show(job, key, row)
    if len(rows) > 1:
        for name in LATENCIES:
            lines = {f"{part} {name}": [row[f"{part}_{name}_ms"] for row in rows] for part in ("p50", "p95", "p99")}
            tracking.curves(f"curves/{name}_ms", f"{name} in ms", key, [row[key] for row in rows], lines)
    tables = {"candidates": [{name: value for name, value in row.items() if name != "ci95"} for row in rows]}
    try:
        if asked.series and not interrupted:
            tables["series"] = _series(job, candidate, key, points)
    except KeyboardInterrupt:
        interrupted = True
    summary = {
        "sweep": job.sweep,
        "status": "interrupted" if interrupted else "ok",
        "model": job.server.model.name,
        "hardware": job.server.hardware.name,
        "max_num_seqs": candidate.max_num_seqs,
        "max_num_batched_tokens": candidate.max_num_batched_tokens,
        "num_gpu_blocks": candidate.capacity.num_gpu_blocks,
        "dropped": sampled.dropped,
        "defaults": {name: taken._asdict() for name, taken in job.server.taken().items()},
        "seconds": job.seconds(),
    }
    if (line := vllm_serve(job.server.model, job.server.flags, candidate.engine)) is not None:
        summary["vllm_serve"] = line
        job.console.print(f"start it   {summary['vllm_serve']}", soft_wrap=True)
    summary |= rows[0] if len(rows) == 1 else {"points": rows}
    job.finish(tracking, summary, tables)
    if interrupted:
        raise KeyboardInterrupt


def _series(job: Job, candidate: Candidate, key: str, points: Sequence[float]) -> list[dict[str, float]]:
    """A row per iteration of the first seed at each point."""
    assert candidate.engine is not None and candidate.cost is not None
    rows = []
    for point in points:
        task = Task(candidate, 0)._replace(**{key: point})
        requests, stretch = task.sent(job.replicates)
        run = simulate(
            requests,
            candidate.engine,
            candidate.cost,
            clients=task.clients,
            stretch=stretch,
            think_time_s=job.search.think_time_s,
            series=True,
        )
        assert run.series is not None and run.series.dtype.names is not None
        columns = {name: run.series[name].tolist() for name in run.series.dtype.names}
        rows += [
            {key: point} | dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
        ]
    return rows


def _row(key: str, point: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds of the figures of runs, their half widths under `ci95`."""
    intervals = over_seeds(runs)
    row: dict[str, Any] = {key: point, "seeds": len(runs), "limited_by": limited_by(runs)}
    row |= {name: interval.mean for name, interval in intervals.items()}
    return row | {
        "runs_done": sum(run["failed"] == 0 for run in runs),
        "ci95": {name: interval.half_width for name, interval in intervals.items()},
    }


def _show(job: Job, key: str, row: dict[str, Any]) -> None:
    intervals = {name: Interval(row[name], half) for name, half in row["ci95"].items()}

    def shown(name: str) -> str:
        return terminal.interval(intervals.get(name))

    title = f"{row[key]:g} {'clients' if key == 'clients' else 'req/s'}"
    job.console.print(terminal.latency_table(f"Latencies at {title}", intervals, percentiles(job.slo)))
    for table in terminal.class_tables(intervals, percentiles(job.slo)):
        job.console.print(table)
    pairs = [
        ("throughput", f"{shown('request_throughput')} req/s, {shown('output_throughput')} output tokens/s"),
        ("goodput", f"{shown('request_goodput')} req/s within the limits"),
        ("KV cache", f"{row['kv_usage_mean']:.0%} used, peak {row['kv_usage_peak']:.0%}"),
        ("prefix cache", _hits(job, shown)),
        ("preemptions", f"{shown('num_preemptions')} per run"),
        ("running", f"mean {shown('running_mean')}, largest {shown('running_max')} requests"),
        ("waiting", f"mean {shown('waiting_mean')}, largest {shown('waiting_max')} requests"),
        ("limited by", row["limited_by"]),
        ("stable", "yes" if row["stable"] == 1 else f"in {row['stable']:.0%} of the seeds"),
        (f"p{job.slo.percentile:g} within SLO", f"in {row['slo_met']:.0%} of the seeds"),
        ("finished", f"{row['runs_done']} of {row['seeds']} runs"),
    ]
    job.console.print(terminal.facts(pairs))


def _hits(job: Job, shown: Callable[[str], str]) -> str:
    """Hit rates in words."""
    if not job.server.flags.caches:
        return "off"
    cold, warm, mean = (shown(name) for name in HIT_RATES)
    return f"{cold} of the prompt tokens found, {warm} after warm-up; {mean} of a request's"
