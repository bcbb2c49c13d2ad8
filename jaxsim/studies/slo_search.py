"""The main job: which setting carries the largest load within the SLO, how much, and what limits it."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxsim.errors import ConfigError
from jaxsim.metrics import Interval
from jaxsim.results import terminal
from jaxsim.results.heatmap import heat_map
from jaxsim.settings import show
from jaxsim.studies.job import Job
from jaxsim.tuning.curve import SHARES, latency_curve
from jaxsim.tuning.explore import Exploration
from jaxsim.tuning.figures import percentiles
from jaxsim.tuning.result import COLUMNS, Result, result
from jaxsim.tuning.slo import limits
from jaxsim.tuning.space import Space

CURVES = ("ttft", "tpot", "e2el")
UNITS = {"load": "req/s", "clients": "clients"}


def exploration(job: Job) -> Exploration:
    """The search that a job asks for, not begun. Raises `ConfigError`."""
    search, slo = job.search, job.slo
    if not (search.load or search.concurrency):
        raise ConfigError("search.load", "false", "must be true unless search.concurrency=true")
    space = Space.of(job.server, search, job.baseline)
    sampled = job.replicates
    seeds, count, tokens = len(sampled.requests), sampled.count, float(sampled.lengths.mean())
    return Exploration(space, search, slo, job.evaluate(), seeds, count, sampled.drawable, job.shard, tokens)


def search(job: Job, on_round: Callable[[Exploration], None] | None = None) -> Result:
    """Carries the search out. Raises `ConfigError`."""
    exploring = exploration(job)
    for _ in exploring.rounds():
        if on_round is not None:
            on_round(exploring)
    return result(exploring, job.server, job.replicates, job.slo)


def run(job: Job) -> None:
    """Searches, writes summary.json and candidates.csv, shows the best setting. Raises `ConfigError` without one."""
    exploring = exploration(job)
    tracking = job.track()
    most = exploring.most
    job.console.print(f"{job.title()}, {_searched(exploring)}, {_limits(job)}")
    job.say_defaults(exploring.space.searched)
    interrupted = False
    with terminal.progress(job.console, "compiling") as bar:

        def ended() -> None:
            bar.advance()
            if bar.completed == 1:  # everything is compiled
                bar.expect(exploring.remaining(), "round 1")

        try:
            for _ in exploring.rounds(ended):
                text = f"round {exploring.rounds_done}, {len(exploring.known)} of {most} settings"
                bar.expect(exploring.remaining(), text)
                tracking.log(_round(job, exploring), exploring.rounds_done)
            bar.expect(0, f"{exploring.rounds_done} rounds")
        except KeyboardInterrupt:
            interrupted = True
    found = result(exploring, job.server, job.replicates, job.slo, interrupted)
    summary: dict[str, Any] = {"sweep": job.sweep} | found.summary | {"seconds": job.seconds()}
    _show(job, exploring, found)
    curve: list[dict[str, Any]] = []
    try:
        curve = [] if interrupted or found.best is None or not job.search.load else _curve(job, exploring, found)
    except KeyboardInterrupt:
        interrupted, summary["status"] = True, "interrupted"
    for name in CURVES if curve else ():
        lines = {part: [row[f"{part}_{name}_ms"] for row in curve] for part in ("p50", "p95", "p99")}
        loads = [row["load_rps"] for row in curve]
        tracking.curves(f"curves/{name}_ms", f"{name} in ms, best setting", "load_rps", loads, lines)
    for name in [name for name in COLUMNS.values() if any(row.get(name) for row in found.candidates)]:
        drawn = heat_map(f"largest {name}", found.candidates, "max_num_seqs", "max_num_batched_tokens", name)
        tracking.picture(f"maps/{name}", drawn)
    job.finish(tracking, summary, {"candidates": found.candidates} | ({"curve": curve} if curve else {}))
    if interrupted:
        raise KeyboardInterrupt
    if found.best is None:
        first = next(row["reason"] for row in found.candidates if row["reason"])
        asked = show(exploring.space.values["max_num_seqs"])
        raise ConfigError("search.max_num_seqs", asked, f"no setting meets the SLO; {first}")


def _curve(job: Job, exploring: Exploration, found: Result) -> list[dict[str, Any]]:
    """Latencies of the best setting against the load."""
    assert found.best is not None
    seeds, load_rps = range(len(job.replicates.requests)), found.summary["load_rps"]
    with terminal.progress(job.console, "latency against load") as bar:
        bar.expect(len(SHARES) * len(seeds), "latency against load")
        count = job.replicates.count
        return latency_curve(exploring.evaluate, found.best, seeds, count, load_rps, bar.advance)


def _searched(exploring: Exploration) -> str:
    size = exploring.space.size
    return f"{size} settings" if exploring.most == size else f"{exploring.most} of {size} settings"


def _limits(job: Job) -> str:
    return ", ".join(limit.text for limit in limits(job.slo)) or "no limit but a stable queue"


def _round(job: Job, exploring: Exploration) -> dict[str, Any]:
    """A line of the history: the best so far, and how far the search is; the rate is of what was computed."""
    seconds = time.monotonic() - exploring.start
    line: dict[str, Any] = {
        "round": exploring.rounds_done,
        "simulations": exploring.simulations,
        "computed": exploring.computed,
        "settings": len(exploring.known),
        "simulated_requests_per_s": exploring.computed * job.replicates.count / seconds if seconds > 0 else None,
    }
    engines = [one for one in exploring.known if one.engine is not None]
    line["feasible_share"] = sum(exploring.score(one) > 0 for one in engines) / len(engines) if engines else None
    choice = exploring.choice()
    if choice is not None:
        best = exploring.known[choice.best].found[exploring.main].interval
        name = COLUMNS[exploring.main]
        line |= {f"best_{name}": best.mean, f"best_{name}_ci95": best.half_width, **choice.best.setting}
    return line


def _show(job: Job, exploring: Exploration, found: Result) -> None:
    """The table of settings and the best one."""
    rows, summary, ci95 = found.candidates, found.summary, found.summary.get("ci95", {})
    keys = [key for key, values in exploring.space.values.items() if len(values) > 1 or key in terminal.SHORT]
    percentile = f"p{job.slo.percentile:g}"
    headings = [
        *(terminal.SHORT.get(key, key) for key in keys),
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
        if found.best is not None and not row.get("baseline") and _is(row, found.best.setting):
            chosen = index
        usage = row.get("kv_usage_mean")
        lines.append(
            [
                *(show(row[key]) for key in keys),
                _with_half(row, "load_rps"),
                _with_half(row, "clients"),
                terminal.number(row.get(f"{percentile}_ttft_ms")),
                terminal.number(row.get(f"{percentile}_tpot_ms")),
                terminal.number(row.get("output_throughput")),
                "-" if usage is None else f"{usage:.0%}",
                ("baseline: " if row.get("baseline") else "")
                + (row["reason"] if row["status"] != "ok" else row.get("limited_by", "")),
            ]
        )
    job.console.print(
        terminal.table(
            "Settings, each at its own capacity; times in ms",
            headings,
            lines,
            chosen,
        )
    )
    if chosen is None:
        return
    intervals = {key: Interval(summary[key], half) for key, half in ci95.items() if summary.get(key) is not None}
    job.console.print(terminal.latency_table("Latencies of the best setting", intervals, percentiles(job.slo)))
    for table in terminal.class_tables(intervals, percentiles(job.slo)):
        job.console.print(table)
    job.console.print(terminal.facts(_facts(job, exploring, summary, intervals)))
    if "vllm_serve" in summary:
        job.console.print(f"start it   {summary['vllm_serve']}", soft_wrap=True)


def _with_half(row: dict[str, Any], key: str) -> str:
    if row.get(key) is None:
        return "-"
    least = ">= " if key in (row.get("capped") or "").split() else ""
    return least + terminal.interval(Interval(row[key], row[f"{key}_ci95"]))


def _is(row: dict[str, Any], setting: Mapping[str, Any]) -> bool:
    return all(row[key] == value for key, value in setting.items())


def _facts(
    job: Job, exploring: Exploration, summary: dict[str, Any], intervals: dict[str, Interval]
) -> list[tuple[str, str]]:
    def shown(key: str) -> str:
        return terminal.interval(intervals.get(key))

    fit = summary["requests_that_fit"]
    each = " of each instance" if summary["instances"] > 1 else ""
    least = {name: ">= " if name in (summary["capped"] or "").split() else "" for name in COLUMNS.values()}
    pairs = [
        ("setting", " ".join(f"{key}={show(summary[key])}" for key in exploring.space.values)),
        ("load", f"{least['load_rps']}{shown('load_rps')} req/s"),
        ("concurrency", f"{least['clients']}{shown('clients')} clients{each}"),
        ("throughput", f"{shown('request_throughput')} req/s, {shown('output_throughput')} output tokens/s"),
        ("KV cache", f"{summary['kv_usage_mean']:.0%} used, peak {summary['kv_usage_peak']:.0%}"),
        ("KV cache holds", f"{fit['mean']}, {fit['p95']}, {fit['p99']} requests of mean, p95, p99 length"),
        ("preemptions", f"{shown('num_preemptions')} per run"),
        ("waiting", f"mean {shown('waiting_mean')}, largest {shown('waiting_max')} requests"),
        ("limited by", summary["limited_by"]),
        ("stable", "yes" if summary["stable"] else "no, the waiting queue grows"),
        ("simulations", f"{exploring.simulations:,}, of which {exploring.computed:,} were computed"),
    ]
    if summary["tied_with"]:
        carries = terminal.number(summary[f"largest_{COLUMNS[exploring.main]}"])
        carries = f"{summary['tied_with']} carries {carries} {UNITS[exploring.main]}"
        pairs.insert(1, ("tie", f"{carries}; within the paired interval of it the smaller max_num_seqs is taken"))
    if summary["probability_within_indifference"] is not None:
        near, best = summary["probability_within_indifference"], summary["probability_best"]
        text = f"{near:.0%} to carry within {summary['indifference']:.0%} of the best setting, {best:.0%} to be it"
        pairs.append(("how sure", f"{text}; {summary['seeds']} seeds"))
    if "gain_over_baseline" in summary:
        now = summary["baseline"][COLUMNS[exploring.main]]
        text = f"carries {terminal.number(now)} {UNITS[exploring.main]}; the best {summary['gain_over_baseline']:+.1%}"
        per_gpu = job.search.tensor_parallel_size or job.search.instances
        pairs.append(("baseline", text + (" per GPU" if per_gpu else "")))
    if "cost_per_million_output_tokens" in summary:
        cost = terminal.number(summary["cost_per_million_output_tokens"])
        pairs.append(("cost", f"{cost} per million output tokens at the GPU's price_per_hour"))
    if "instances_needed" in summary:
        span = f"{summary['instances_needed_low']} to {summary['instances_needed_high'] or 'more'}"
        pairs.append((f"for {job.slo.target_rps:g} req/s", f"{summary['instances_needed']} instances ({span})"))
    return pairs
