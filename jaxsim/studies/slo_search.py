"""The main job: which setting carries the largest load within the SLO, how much, and what limits it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxsim.engine import simulate_many
from jaxsim.errors import ConfigError
from jaxsim.memory import requests_that_fit
from jaxsim.metrics import Interval
from jaxsim.results import terminal
from jaxsim.results.files import plain, write_csv, write_json
from jaxsim.results.serve import vllm_serve
from jaxsim.search.capacity import CapacitySearch, Found, choose
from jaxsim.search.evaluate import figures, limited_by, limits_ms, number_of_instances, over_seeds, warmup_share
from jaxsim.settings import show
from jaxsim.studies.job import Job

UNITS = {"load": "req/s", "clients": "clients"}


def run(job: Job) -> None:
    """Searches, writes summary.json and candidates.csv, shows the best setting. Raises `ConfigError` without one."""
    search, slo = job.search, job.slo
    if not (search.load or search.concurrency):
        raise ConfigError("search.load", "false", "must be true unless search.concurrency=true")
    if not limits_ms(slo):
        raise ConfigError("slo.ttft_ms", "null", "must be a number unless slo.tpot_ms or slo.e2el_ms is one")
    grid = job.server.grid(search)
    candidates = [candidate for candidate in grid if candidate.engine is not None]
    cost = job.server.cost(max(search.max_num_batched_tokens), max(search.max_num_seqs))
    simulate = partial(simulate_many, lanes=job.runtime.lanes)
    capacity = CapacitySearch(candidates, job.replicates, cost, slo, search, simulate)
    tracking = job.track()
    job.console.print(f"{job.title()}, {len(grid)} settings, p{slo.percentile:g} of {_limits(job)}")
    interrupted = False
    with terminal.progress(job.console, "compiling") as bar:
        try:
            while not capacity.done:
                bar.expect(capacity.remaining(), f"round {capacity.rounds + 1}")
                capacity.round(bar.advance)
                tracking.log(_round(capacity))
            bar.expect(0, f"{capacity.rounds} rounds")
        except KeyboardInterrupt:
            interrupted = True
    rows, found = _rows(job, grid, capacity)
    summary = _summary(job, capacity, rows, found, interrupted)
    files = [job.folder / "summary.json", job.folder / "candidates.csv"]
    write_json(files[0], summary)
    write_csv(files[1], rows)
    _show(job, rows, summary)
    tracking.table("candidates", [plain(row) for row in rows])
    tracking.summary({key: value for key, value in plain(summary).items() if not isinstance(value, dict | list)})
    tracking.artifact("results", files)
    for line in [f"results    {job.folder}", *(tracking.finish() or [])]:
        job.console.print(line, soft_wrap=True)
    if interrupted:
        raise KeyboardInterrupt
    if summary["max_num_seqs"] is None:
        first = next(row["reason"] for row in rows if row["reason"])
        raise ConfigError("search.max_num_seqs", show(search.max_num_seqs), f"no setting meets the SLO; {first}")


def _limits(job: Job) -> str:
    return ", ".join(f"{name.upper()} <= {limit:g} ms" for name, limit in limits_ms(job.slo).items())


def _round(capacity: CapacitySearch) -> dict[str, Any]:
    """A line of the history: how far the searches are."""
    line = {"round": capacity.rounds, "simulations": capacity.simulations}
    for kind, ladder in capacity.ladders.items():
        line |= {f"{kind}_open": int(ladder.open.sum()), f"{kind}_best": float(ladder.values().max())}
    return line


def _rows(job: Job, grid: Sequence[Any], capacity: CapacitySearch) -> tuple[list[dict[str, Any]], dict[tuple, Found]]:
    """A row per setting of the grid, and what was found about those with a load (or concurrency) that passes."""
    rows, found = [], {}
    started = {candidate: index for index, candidate in enumerate(capacity.candidates)}
    main = "load" if job.search.load else "clients"
    for candidate in grid:
        key = (candidate.max_num_seqs, candidate.max_num_batched_tokens)
        row: dict[str, Any] = {"max_num_seqs": key[0], "max_num_batched_tokens": key[1]}
        row |= {"status": "infeasible", "reason": candidate.reason}
        if candidate.engine is not None:
            row["num_gpu_blocks"] = candidate.engine.num_gpu_blocks
            results = {kind: capacity.found(kind, started[candidate]) for kind in UNITS}
            for kind, result in results.items():
                if result is not None:
                    name = "load_rps" if kind == "load" else "clients"
                    row |= {name: result.interval.mean, f"{name}_ci95": result.interval.half_width}
                    row[f"{name}_per_seed"] = " ".join(f"{value:.6g}" for value in result.values)
            best = results[main]
            row |= _status([result for result in results.values() if result], best)
            if best is not None and best.runs:
                found[key] = best
                row |= _means(job, best)
        rows.append(row)
    return rows, found


def _status(results: Sequence[Found], best: Found | None) -> dict[str, str]:
    if best is None or not all(result.finished for result in results):
        return {"status": "unfinished", "reason": "interrupted; the values are the largest that passed so far"}
    if not best.runs:
        return {"status": "infeasible", "reason": f"{best.reason} even at the lowest, {best.lowest:g}"}
    return {"status": "ok", "reason": "the highest value tried passed" if best.capped else ""}


def _figures(job: Job, found: Found) -> dict[str, Interval]:
    """Figures at every seed's own capacity, over seeds."""
    clients = job.search.load is False
    count = job.replicates.count
    values = [value for value in found.values if value > 0]
    shares = [warmup_share(job.search.warmup, int(value) if clients else None, count) for value in values]
    pairs = zip(found.runs, shares, strict=True)
    return over_seeds([figures(simulation, job.slo, share) for simulation, share in pairs])


def _means(job: Job, found: Found) -> dict[str, Any]:
    row: dict[str, Any] = {key: interval.mean for key, interval in _figures(job, found).items()}
    return {"limited_by": limited_by(found.runs)} | row


def _summary(
    job: Job, capacity: CapacitySearch, rows: list[dict[str, Any]], found: dict[tuple, Found], interrupted: bool
) -> dict[str, Any]:
    """summary.json: metrics of the best setting under vLLM's names, their half widths under `ci95`."""
    best = choose({key: result.values for key, result in found.items()})
    summary: dict[str, Any] = {
        "sweep": job.sweep,
        "status": "interrupted" if interrupted else "ok" if best else "infeasible",
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "simulations": capacity.simulations,
        "rounds": capacity.rounds,
        "seconds": job.seconds(),
    }
    if best is None:
        return summary
    row = next(row for row in rows if (row["max_num_seqs"], row["max_num_batched_tokens"]) == best)
    index = [(item.max_num_seqs, item.max_num_batched_tokens) for item in capacity.candidates].index(best)
    candidate, result = capacity.candidates[index], found[best]
    assert candidate.engine is not None and candidate.capacity is not None
    intervals = _figures(job, result)
    load = result.interval if job.search.load else intervals["request_throughput"]
    lengths = np.concatenate([np.add(item.prompt_len, item.output_len) for item in job.replicates.requests])
    summary |= {"max_num_seqs": best[0], "max_num_batched_tokens": best[1]}
    summary |= {key: row.get(key) for key in ("load_rps", "clients", "limited_by")}
    summary |= {
        "stable": intervals["stable"].mean == 1,
        "model": job.server.model.name,
        "hardware": job.server.hardware.name,
        "slo": vars(job.slo),
        "vllm_serve": vllm_serve(job.server.model, job.server.flags, candidate.engine),
        "num_gpu_blocks": candidate.capacity.num_gpu_blocks,
        "kv_cache_tokens": candidate.capacity.tokens,
        "requests_that_fit": requests_that_fit(candidate.capacity, np.minimum(lengths, job.server.max_model_len)),
        "seeds": len(job.replicates.requests),
        "dropped": job.replicates.dropped,
    }
    if job.slo.target_rps is not None:
        instances = number_of_instances(job.slo.target_rps, load)
        summary |= dict(zip(("instances", "instances_low", "instances_high"), instances, strict=True))
    summary |= {key: interval.mean for key, interval in intervals.items()}
    half_widths = {"load_rps": row.get("load_rps_ci95"), "clients": row.get("clients_ci95")}
    summary["ci95"] = half_widths | {key: interval.half_width for key, interval in intervals.items()}
    return summary


def _show(job: Job, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """The table of settings and the best one."""
    ci95 = summary.get("ci95", {})
    headings = [
        "seqs",
        "tokens",
        "load req/s",
        "clients",
        "p99 TTFT",
        "p99 TPOT",
        "output tok/s",
        "KV",
        "limited by, or why not",
    ]
    chosen, lines = None, []
    for index, row in enumerate(rows):
        if all(row[key] == summary[key] for key in ("max_num_seqs", "max_num_batched_tokens")):
            chosen = index
        usage = row.get("kv_usage_mean")
        lines.append(
            [
                str(row["max_num_seqs"]),
                str(row["max_num_batched_tokens"]),
                _with_half(row, "load_rps"),
                _with_half(row, "clients"),
                terminal.number(row.get("p99_ttft_ms")),
                terminal.number(row.get("p99_tpot_ms")),
                terminal.number(row.get("output_throughput")),
                "-" if usage is None else f"{usage:.0%}",
                row["reason"] if row["status"] != "ok" else row.get("limited_by", ""),
            ]
        )
    job.console.print(
        terminal.table(
            "Settings (max_num_seqs, max_num_batched_tokens), each at its own capacity; times in ms",
            headings,
            lines,
            chosen,
        )
    )
    if chosen is None:
        return
    intervals = {key: Interval(summary[key], half) for key, half in ci95.items() if summary.get(key) is not None}
    job.console.print(terminal.latency_table("Latencies of the best setting", intervals, (50, 95, 99)))
    job.console.print(terminal.facts(_facts(job, summary, intervals)))
    job.console.print(f"start it   {summary['vllm_serve']}", soft_wrap=True)


def _with_half(row: dict[str, Any], key: str) -> str:
    if row.get(key) is None:
        return "-"
    return terminal.interval(Interval(row[key], row[f"{key}_ci95"]))


def _facts(job: Job, summary: dict[str, Any], intervals: dict[str, Interval]) -> list[tuple[str, str]]:
    def shown(key: str) -> str:
        return terminal.interval(intervals.get(key))

    fit = summary["requests_that_fit"]
    pairs = [
        (
            "setting",
            f"max_num_seqs={summary['max_num_seqs']} max_num_batched_tokens={summary['max_num_batched_tokens']}",
        ),
        ("load", f"{shown('load_rps')} req/s"),
        ("concurrency", f"{shown('clients')} clients"),
        ("throughput", f"{shown('request_throughput')} req/s, {shown('output_throughput')} output tokens/s"),
        ("KV cache", f"{summary['kv_usage_mean']:.0%} used, peak {summary['kv_usage_peak']:.0%}"),
        ("KV cache holds", f"{fit['mean']}, {fit['p95']}, {fit['p99']} requests of mean, p95, p99 length"),
        ("preemptions", f"{shown('num_preemptions')} per run"),
        ("waiting", f"mean {shown('waiting_mean')}, largest {shown('waiting_max')} requests"),
        ("limited by", summary["limited_by"]),
        ("stable", "yes" if summary["stable"] else "no, the waiting queue grows"),
    ]
    if "instances" in summary:
        span = f"{summary['instances_low']} to {summary['instances_high'] or 'more'}"
        pairs.append((f"for {job.slo.target_rps:g} req/s", f"{summary['instances']} instances ({span})"))
    return pairs
