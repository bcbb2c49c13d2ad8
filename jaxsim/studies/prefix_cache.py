"""The prefix cache on and off: hit rate, TTFT and throughput against what prompts share and the size of the pool."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxsim.errors import ConfigError
from jaxsim.metrics import Interval, paired_interval, t_interval
from jaxsim.results import terminal
from jaxsim.settings import PrefixCacheSettings, show
from jaxsim.studies.job import Job
from jaxsim.tuning.evaluate import Task
from jaxsim.tuning.replicates import Replicates, joined, replicates
from jaxsim.workload import reusable_share, workload_from_config

SATURATION_RPS = 1e4  # of each instance
LOAD = 0.8  # of the least throughput under saturation without the cache, in the largest pool
POOLS = (1 / 16, 1 / 4, 1)  # of the blocks that the GPU holds
HIT_RATES = ("prefix_cache_hit_rate", "prefix_cache_hit_rate_warm", "mean_request_hit_rate", "median_request_hit_rate")
COMPARED = ("mean_ttft_ms", "p50_ttft_ms", "p95_ttft_ms", "p99_ttft_ms", "request_throughput", "output_throughput")


class Variant(NamedTuple):
    """One workload of the study; `key` names the one that costs the same without a cache."""

    place: int  # among those of the study
    label: dict[str, float]
    key: Any
    sampled: Replicates


class Point(NamedTuple):
    """What to simulate under every seed."""

    variant: Variant
    pool: int
    caching: bool

    @property
    def key(self) -> tuple:
        """Without the cache it does not matter what is shared."""
        return (self.variant.key, self.pool) + ((tuple(self.variant.label.values()),) if self.caching else ())


def run(job: Job) -> None:
    """Every workload in every pool with the cache on and off, saturated and at one load. Raises `ConfigError`."""
    asked: PrefixCacheSettings = job.groups["prefix_cache"]
    for key, needed in (("batching", "continuous"), ("enable_prefix_caching", True)):
        if (value := getattr(job.server.flags, key)) != needed:
            raise ConfigError(
                f"engine.{key}", show(value), f"must be {show(needed)}: the cache is simulated on and off"
            )
    seqs, tokens = job.server.batch_defaults()
    pools = _pools(job, asked, seqs, tokens)
    every = _variants(job, asked)
    points = {
        point.key: point
        for point in itertools.starmap(Point, itertools.product(every, pools, (False, True)))
    }  # fmt: skip
    cost = job.server.cost(tokens, seqs)
    candidates = {}
    for key, point in points.items():
        changes = {"num_gpu_blocks": point.pool, "enable_prefix_caching": point.caching}
        made = job.server.candidate(seqs, tokens, **changes)
        candidates[key] = replace(made, setting={**made.setting, **point.variant.label, **changes}, cost=cost)
    evaluate = job.evaluate(joined([variant.sampled for variant in every]))
    seeds, instances = len(job.replicates.requests), job.server.flags.instances
    tracking = job.track()
    job.console.print(f"{job.title()}, {len(every)} workloads, {len(pools)} pools, the cache on and off")
    job.say_defaults()
    rows: list[dict[str, Any]] = []
    interrupted = False
    with terminal.progress(job.console, "simulating") as bar:
        bar.expect(2 * len(points) * seeds, "simulating")

        def simulate(load_rps: float) -> dict[tuple, list[dict[str, Any]]]:
            """Figures of every seed for each point."""
            tasks = [
                Task(candidates[key], point.variant.place * seeds + seed, load_rps)
                for key, point in points.items()
                for seed in range(seeds)
            ]
            found = iter(evaluate(tasks, lambda *_: bar.advance()))
            return {key: [outcome.figures for outcome in itertools.islice(found, seeds)] for key in points}

        try:
            peaks = simulate(SATURATION_RPS * instances)
            load_rps = asked.load_rps or _load(peaks, [point for point in points.values() if not point.caching])
            loaded = simulate(load_rps)
            for variant, pool in itertools.product(every, pools):
                on, off = Point(variant, pool, True).key, Point(variant, pool, False).key
                label = variant.label | {"num_gpu_blocks": pool, "load_rps": load_rps}
                sent = [variant.sampled.of(seed, instances=instances) for seed in range(seeds)]
                bound = [reusable_share(one, job.server.flags.block_size) for one in sent]
                rows.append(label | {"infinite_hit_rate": float(np.mean(bound))} | _compare(loaded, peaks, on, off))
                tracking.log({key: value for key, value in rows[-1].items() if not isinstance(value, dict)})
        except KeyboardInterrupt:
            interrupted = True
    _finish(job, tracking, rows, interrupted)
    if interrupted:
        raise KeyboardInterrupt


def _pools(job: Job, asked: PrefixCacheSettings, seqs: int, tokens: int) -> list[int]:
    """Sizes of the pool in blocks, the null block included."""
    capacity = job.server.candidate(seqs, tokens).capacity
    assert capacity is not None
    least = -(-job.server.max_model_len // job.server.flags.block_size) + 1
    for pool in asked.num_gpu_blocks or ():
        if pool < least:
            allowed = f"must be at least {least}, which hold one request of max_model_len={job.server.max_model_len}"
            raise ConfigError("prefix_cache.num_gpu_blocks", pool, allowed)
    return sorted(set(asked.num_gpu_blocks or (max(least, int(capacity.num_gpu_blocks * part)) for part in POOLS)))


def _variants(job: Job, asked: PrefixCacheSettings) -> list[Variant]:
    """The workloads: of a trace the one it is, else each shared length with each share of reuse."""
    workload: Mapping[str, Any] = job.settings["workload"]
    if workload.get("kind") == "trace":
        if all(requests.segments is None for requests in job.replicates.requests):
            raise ConfigError("workload.path", workload["path"], "needs hash ids: prompts without them share nothing")
        return [Variant(0, {}, None, job.replicates)]
    result = []
    given = workload.get("prefix") or {}
    for length, share in itertools.product(asked.prefix_len, asked.share):
        prefix = {"groups": given.get("groups") or asked.groups, "length": {"value": length}, "unique": 1 - share}
        made = workload_from_config({**workload, "prefix": {**given, **prefix}}, prefix_caching=True)
        sampled = replicates(made, job.search, job.server.max_model_len, workload.get("too_long", "error"))
        result.append(Variant(len(result), {"prefix_len": length, "share": share}, length, sampled))
    return result


def _load(peaks: Mapping[tuple, list[dict[str, Any]]], off: Sequence[Point]) -> float:
    largest = max(point.pool for point in off)
    means = [np.mean([one["request_throughput"] for one in peaks[p.key]]) for p in off if p.pool == largest]
    return float(f"{LOAD * min(means):.3g}")


def _compare(loaded: Mapping, peaks: Mapping, on: tuple, off: tuple) -> dict[str, Any]:
    """Means over seeds with the cache on and off, what it gains seed by seed, and half widths under `ci95`."""
    found: dict[str, Interval] = {}
    for name, key in (("off", off), ("on", on)):
        for figure in COMPARED:
            found[f"{name}_{figure}"] = t_interval([one[figure] for one in loaded[key]])
        found[f"{name}_stable"] = t_interval([one["stable"] for one in loaded[key]])
        found[f"{name}_peak_throughput"] = t_interval([one["request_throughput"] for one in peaks[key]])
    for figure in HIT_RATES:
        found[figure] = t_interval([one[figure] for one in loaded[on]])
    for figure in ("mean_ttft_ms", "p99_ttft_ms"):
        saved = paired_interval([one[figure] for one in loaded[off]], [one[figure] for one in loaded[on]])
        found[f"saved_{figure}"] = saved
    ratios = [a["request_throughput"] / b["request_throughput"] for a, b in zip(peaks[on], peaks[off], strict=True)]
    found["peak_throughput_ratio"] = t_interval(ratios)
    means = {name: interval.mean for name, interval in found.items()}
    return means | {"ci95": {name: interval.half_width for name, interval in found.items()}}


def _finish(job: Job, tracking: Any, rows: list[dict[str, Any]], interrupted: bool) -> None:
    status = "interrupted" if interrupted else "ok"
    summary = {"sweep": job.sweep, "status": status, "seconds": job.seconds(), "points": rows}
    flat = [{name: value for name, value in row.items() if name != "ci95"} for row in rows]
    labels = {"prefix_len": "shared tokens", "share": "reuse", "num_gpu_blocks": "blocks"}
    labels = {key: name for key, name in labels.items() if rows and key in rows[0]}
    rates = ["hit rate", "after warm-up", "of a request", "no eviction"]

    def shown(row: Mapping[str, Any], name: str) -> str:
        return terminal.interval(Interval(row[name], row["ci95"][name]))

    def both(row: Mapping[str, Any], name: str) -> str:
        return " / ".join(terminal.number(row[f"{arm}_{name}"]) for arm in ("off", "on"))

    found, carried = [], []
    for row in rows:
        place = [f"{row[key]:g}" if key == "share" else f"{row[key]}" for key in labels]
        shares = [f"{row[name]:.1%}" for name in (*HIT_RATES[:3], "infinite_hit_rate")]
        ttft = [both(row, name) for name in ("p50_ttft_ms", "p99_ttft_ms")]
        found.append([*place, *shares, *ttft, shown(row, "saved_p99_ttft_ms")])
        carried.append([*place, both(row, "peak_throughput"), shown(row, "peak_throughput_ratio")])
    if rows:
        title = f"Prefix cache off / on at {rows[0]['load_rps']:g} req/s, TTFT in ms"
        heads = [*labels.values(), *rates, "p50", "p99", "p99 saved"]
        job.console.print(terminal.table(title, heads, found))
        heads = [*labels.values(), "req/s off / on", "ratio"]
        job.console.print(terminal.table("Throughput under saturation", heads, carried))
    job.finish(tracking, summary, {"candidates": flat})
