"""The main job: which setting carries the largest load within the SLO, how much, and what limits it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxsim.errors import ConfigError
from jaxsim.memory import requests_that_fit
from jaxsim.metrics import Interval
from jaxsim.results import terminal
from jaxsim.results.files import plain
from jaxsim.results.heatmap import heat_map
from jaxsim.results.serve import vllm_serve
from jaxsim.search.capacity import CapacitySearch, Found, choose
from jaxsim.search.figures import limited_by, number_of_instances, over_seeds, percentiles
from jaxsim.search.slo import limits_ms
from jaxsim.search.space import Candidate, Space
from jaxsim.settings import SEARCHED, show
from jaxsim.studies.history import line
from jaxsim.studies.job import Job

COLUMNS = {"load": "load_rps", "clients": "clients"}
UNITS = {"load": "req/s", "clients": "clients"}


def run(job: Job) -> None:
    """Searches, writes summary.json and candidates.csv, shows the best setting. Raises `ConfigError` without one."""
    search, slo = job.search, job.slo
    if not (search.load or search.concurrency):
        raise ConfigError("search.load", "false", "must be true unless search.concurrency=true")
    if not limits_ms(slo):
        raise ConfigError("slo.ttft_ms", "null", "must be a number unless slo.tpot_ms or slo.e2el_ms is one")
    space = Space.of(job.server, search)
    grid = job.share(space.grid())
    candidates = [candidate for candidate in grid if candidate.engine is not None]
    seeds = range(len(job.replicates.requests))
    capacity = CapacitySearch(candidates, seeds, job.replicates.count, search, job.evaluate())
    tracking = job.track()
    job.console.print(f"{job.title()}, {len(grid)} settings, p{slo.percentile:g} of {_limits(job)}")
    interrupted = False
    with terminal.progress(job.console, "compiling") as bar:
        try:
            while not capacity.done:
                bar.expect(capacity.remaining(), f"round {capacity.rounds + 1}")
                capacity.round(bar.advance)
                found = job.stored.found if job.stored else 0
                tracking.log(plain(line(capacity, job.seconds(), found)), capacity.rounds)
            bar.expect(0, f"{capacity.rounds} rounds")
        except KeyboardInterrupt:
            interrupted = True
    rows, found = _rows(job, grid, capacity)
    summary = _summary(job, capacity, rows, found, interrupted)
    _show(job, rows, summary)
    for name in [name for name in COLUMNS.values() if any(row.get(name) for row in rows)]:
        tracking.picture(
            f"maps/{name}", heat_map(f"largest {name}", rows, "max_num_seqs", "max_num_batched_tokens", name)
        )
    job.finish(tracking, summary, {"candidates": rows})
    if interrupted:
        raise KeyboardInterrupt
    if summary["max_num_seqs"] is None:
        first = next(row["reason"] for row in rows if row["reason"])
        raise ConfigError("search.max_num_seqs", show(search.max_num_seqs), f"no setting meets the SLO; {first}")


def _limits(job: Job) -> str:
    return ", ".join(f"{name.upper()} <= {limit:g} ms" for name, limit in limits_ms(job.slo).items())


def _rows(
    job: Job, grid: Sequence[Candidate], capacity: CapacitySearch
) -> tuple[list[dict[str, Any]], dict[Candidate, Found]]:
    """A row per setting of the grid, and what was found about those with a load (or concurrency) that passes."""
    rows, found = [], {}
    started = {candidate: index for index, candidate in enumerate(capacity.candidates)}
    main = "load" if job.search.load else "clients"
    for candidate in grid:
        row: dict[str, Any] = {**candidate.setting, "status": "infeasible", "reason": candidate.reason}
        if candidate.engine is not None:
            row["num_gpu_blocks"] = candidate.engine.num_gpu_blocks
            results = {kind: capacity.found(kind, started[candidate]) for kind in UNITS}
            for kind, name in COLUMNS.items():
                result = results[kind]
                if result is not None and result.known:
                    row |= {name: result.interval.mean, f"{name}_ci95": result.interval.half_width}
                    row[f"{name}_per_seed"] = " ".join(f"{value:.6g}" for value in result.values)
            best = results[main]
            row |= _status(results, best)
            if best is not None and best.outcomes and best.known:
                found[candidate] = best
                row |= _means(best)
        rows.append(row)
    return rows, found


def _status(results: Mapping[str, Found | None], best: Found | None) -> dict[str, str]:
    """Columns status, reason and capped: the columns in which the true value may be larger."""
    if best is None or not all(result.finished for result in results.values() if result):
        return {"status": "unfinished", "reason": "interrupted; the values are the largest that passed so far"}
    if not best.outcomes:
        return {"status": "infeasible", "reason": f"{best.reason} even at the lowest, {best.lowest:g}"}
    capped = [kind for kind, result in results.items() if result and result.capped]
    reason = ", ".join(f"the highest {kind} tried passed" for kind in capped)
    return {"status": "ok", "reason": reason, "capped": " ".join(COLUMNS[kind] for kind in capped)}


def _figures(found: Found) -> dict[str, Interval]:
    """Figures at every seed's own capacity, over seeds."""
    return over_seeds([outcome.figures for outcome in found.outcomes])


def _means(found: Found) -> dict[str, Any]:
    row: dict[str, Any] = {key: interval.mean for key, interval in _figures(found).items()}
    return {"limited_by": limited_by(outcome.figures for outcome in found.outcomes)} | row


def _summary(
    job: Job, capacity: CapacitySearch, rows: list[dict[str, Any]], found: dict[Candidate, Found], interrupted: bool
) -> dict[str, Any]:
    """summary.json: metrics of the best setting under vLLM's names, their half widths under `ci95`."""
    choice = choose({candidate: result.values for candidate, result in found.items()})
    best = choice.best if choice else None
    summary: dict[str, Any] = {
        "sweep": job.sweep,
        "status": "interrupted" if interrupted else "ok" if best else "infeasible",
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "simulations": capacity.simulations,
        "rounds": capacity.rounds,
        "seconds": job.seconds(),
    }
    if choice is None or best is None:
        return summary
    row = next(row for row in rows if all(row[key] == value for key, value in best.setting.items()))
    result, flags = found[best], best.flags
    assert best.engine is not None and best.capacity is not None and flags is not None
    intervals = _figures(result)
    load = result.interval if job.search.load else intervals["request_throughput"]
    lengths = np.concatenate([np.add(item.prompt_len, item.output_len) for item in job.replicates.requests])
    summary |= best.setting
    summary |= {key: row.get(key) for key in ("load_rps", "clients", "limited_by", "reason", "capped")}
    summary[f"largest_{_main(job)}"] = found[choice.largest].interval.mean
    summary["tied_with"] = None if choice.largest is best else choice.largest.name
    summary |= {
        "model": job.server.model.name,
        "hardware": job.server.hardware.name,
        "slo": vars(job.slo),
        "num_gpu_blocks": best.capacity.num_gpu_blocks,
        "kv_cache_tokens": best.capacity.tokens,
        "requests_that_fit": requests_that_fit(best.capacity, np.minimum(lengths, job.server.max_model_len)),
        "seeds": len(job.replicates.requests),
        "dropped": job.replicates.dropped,
    }
    if best.engine.batching == "continuous":
        summary["vllm_serve"] = vllm_serve(job.server.model, flags, best.engine)
    if job.slo.target_rps is not None:
        instances = number_of_instances(job.slo.target_rps, load)
        summary |= dict(zip(("instances", "instances_low", "instances_high"), instances, strict=True))
    summary |= {key: interval.mean for key, interval in intervals.items()}
    summary["stable"] = intervals["stable"].mean == 1
    half_widths = {"load_rps": row.get("load_rps_ci95"), "clients": row.get("clients_ci95")}
    summary["ci95"] = half_widths | {key: interval.half_width for key, interval in intervals.items()}
    return summary


def _show(job: Job, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """The table of settings and the best one."""
    ci95 = summary.get("ci95", {})
    percentile = f"p{job.slo.percentile:g}"
    headings = [
        "seqs",
        "tokens",
        "load req/s",
        "clients",
        f"{percentile} TTFT",
        f"{percentile} TPOT",
        "output tok/s",
        "KV",
        "limited by, or why not",
    ]
    chosen, lines = None, []
    for index, row in enumerate(rows):
        if summary["max_num_seqs"] and all(row[key] == summary[key] for key in row if key in SEARCHED):
            chosen = index
        usage = row.get("kv_usage_mean")
        lines.append(
            [
                str(row["max_num_seqs"]),
                str(row["max_num_batched_tokens"]),
                _with_half(row, "load_rps"),
                _with_half(row, "clients"),
                terminal.number(row.get(f"{percentile}_ttft_ms")),
                terminal.number(row.get(f"{percentile}_tpot_ms")),
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
    job.console.print(terminal.latency_table("Latencies of the best setting", intervals, percentiles(job.slo)))
    job.console.print(terminal.facts(_facts(job, summary, intervals)))
    if "vllm_serve" in summary:
        job.console.print(f"start it   {summary['vllm_serve']}", soft_wrap=True)


def _with_half(row: dict[str, Any], key: str) -> str:
    if row.get(key) is None:
        return "-"
    least = ">= " if key in (row.get("capped") or "").split() else ""
    return least + terminal.interval(Interval(row[key], row[f"{key}_ci95"]))


def _main(job: Job) -> str:
    """The column that settings are compared by."""
    return COLUMNS["load" if job.search.load else "clients"]


def _facts(job: Job, summary: dict[str, Any], intervals: dict[str, Interval]) -> list[tuple[str, str]]:
    def shown(key: str) -> str:
        return terminal.interval(intervals.get(key))

    fit = summary["requests_that_fit"]
    least = {name: ">= " if name in (summary["capped"] or "").split() else "" for name in COLUMNS.values()}
    pairs = [
        (
            "setting",
            f"max_num_seqs={summary['max_num_seqs']} max_num_batched_tokens={summary['max_num_batched_tokens']}",
        ),
        ("load", f"{least['load_rps']}{shown('load_rps')} req/s"),
        ("concurrency", f"{least['clients']}{shown('clients')} clients"),
        ("throughput", f"{shown('request_throughput')} req/s, {shown('output_throughput')} output tokens/s"),
        ("KV cache", f"{summary['kv_usage_mean']:.0%} used, peak {summary['kv_usage_peak']:.0%}"),
        ("KV cache holds", f"{fit['mean']}, {fit['p95']}, {fit['p99']} requests of mean, p95, p99 length"),
        ("preemptions", f"{shown('num_preemptions')} per run"),
        ("waiting", f"mean {shown('waiting_mean')}, largest {shown('waiting_max')} requests"),
        ("limited by", summary["limited_by"]),
        ("stable", "yes" if summary["stable"] else "no, the waiting queue grows"),
    ]
    if summary["tied_with"]:
        unit = UNITS["load" if job.search.load else "clients"]
        carries = f"{summary['tied_with']} carries {terminal.number(summary[f'largest_{_main(job)}'])} {unit}"
        pairs.insert(1, ("tie", f"{carries}; within the paired interval of it the smaller max_num_seqs is taken"))
    if "instances" in summary:
        span = f"{summary['instances_low']} to {summary['instances_high'] or 'more'}"
        pairs.append((f"for {job.slo.target_rps:g} req/s", f"{summary['instances']} instances ({span})"))
    return pairs
