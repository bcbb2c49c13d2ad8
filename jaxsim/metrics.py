"""Metrics of one simulation and intervals over seeds; names and definitions are those of `vllm bench serve`.

Latencies are in milliseconds, percentiles by linear interpolation. TTFT includes queueing,
TPOT = (E2EL - TTFT) / (output tokens - 1). Simulations are read by their fields only (`jaxsim.engine.Simulation`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxsim import engine
from jaxsim.errors import ConfigError

PS_PER_MS = 10**9
PS_PER_S = 10**12
GROWTH_SHARE = 0.03  # of the arrivals left waiting, see `is_growing`
GROWTH_REQUESTS = 10
BATCHES = 10  # of arrivals, see `growth`
LAST = 15  # the last arrivals are one in so many of the later three quarters: a twentieth of all
TREND_SHARE = 0.005  # of the arrivals; see `growth`
TREND_T = 2.896  # 99 % quantile of Student's t with BATCHES - 2 degrees of freedom


class Latencies(NamedTuple):
    """Per finished request after warm-up, in arrival order, milliseconds, float64; K requests."""

    ttft: np.ndarray  # [K]
    tpot: np.ndarray  # [K], 0 for outputs of one token (they count as 0 for goodput and are left out of TPOT figures)
    e2el: np.ndarray  # [K]
    queue_wait: np.ndarray  # [K], arrival to first scheduled
    output_tokens: np.ndarray  # [K] int64
    requests: int  # after warm-up, finished or not


class Goodput(NamedTuple):
    """Requests that met every limit."""

    requests_per_s: float
    share: float  # of the requests after warm-up; unfinished ones have missed


class HitRates(NamedTuple):
    """Prompt tokens found in the prefix cache at first admission, as shares; NaN where there is no request."""

    cold: float  # of all prompt tokens of the run, which begins with an empty cache
    warm: float  # of the prompt tokens after warm-up
    per_request: np.ndarray  # [K] of each admitted request after warm-up, in arrival order, float64


class Growth(NamedTuple):
    """By how much more requests came than finished, see `growth`."""

    share: float  # of the arrivals
    clear: bool  # whether this one run tells it from chance


class Interval(NamedTuple):
    """A mean with the half width of its confidence interval."""

    mean: float
    half_width: float


def latencies(simulation: Any, warmup: float = 0.1) -> Latencies:
    """Latencies of the finished requests, the first `warmup` share of the requests (by arrival) left out."""
    if not 0 <= warmup < 1:
        raise ConfigError("warmup", warmup, "a share of the requests, from 0 to below 1")
    arrival = np.asarray(simulation.arrival_ps)
    # In a closed loop that got stuck some requests were never sent: they come last.
    order = np.argsort(np.where(arrival < 0, np.iinfo(np.int64).max, arrival), kind="stable")
    kept = order[math.floor(warmup * len(order)) :]
    done = kept[np.asarray(simulation.finish_ps)[kept] >= 0]
    first, finish = np.asarray(simulation.first_token_ps)[done], np.asarray(simulation.finish_ps)[done]
    scheduled = np.asarray(simulation.first_scheduled_ps)[done]
    output = np.asarray(simulation.output_tokens)[done].astype(np.int64)
    return Latencies(
        ttft=(first - arrival[done]) / PS_PER_MS,
        tpot=(finish - first) / PS_PER_MS / np.maximum(output - 1, 1),
        e2el=(finish - arrival[done]) / PS_PER_MS,
        queue_wait=(scheduled - arrival[done]) / PS_PER_MS,
        output_tokens=output,
        requests=len(kept),
    )


def hit_rates(simulation: Any, warmup: float = 0.1) -> HitRates:
    """Hit rates of the requests that were admitted; hits when a preempted request resumes do not count."""
    hits = np.asarray(simulation.hit_tokens).astype(np.int64)
    tokens = np.asarray(simulation.prompt_len).astype(np.int64)
    arrival = np.asarray(simulation.arrival_ps)
    admitted = np.asarray(simulation.first_scheduled_ps) >= 0
    order = np.argsort(np.where(arrival < 0, np.iinfo(np.int64).max, arrival), kind="stable")
    kept = order[math.floor(warmup * len(order)) :]
    kept = kept[admitted[kept]]

    def share(where: np.ndarray) -> float:
        return float(hits[where].sum() / tokens[where].sum()) if tokens[where].sum() else math.nan

    return HitRates(share(admitted), share(kept), hits[kept] / tokens[kept])


def summarise(
    simulation: Any,
    warmup: float = 0.1,
    percentiles: Sequence[float] = (50, 95, 99),
    slo_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Flat dict with the keys of `vllm bench serve --save-result`, plus `queue_wait`; NaN where there is no request.

    TTFT, TPOT, E2EL and queue wait are of requests finished after warm-up. Counts, throughputs and ITL are of the whole
    run: first arrival to last token, as vLLM's. `request_goodput` is None without `slo_ms` (see `goodput`).
    Hit rates are of the whole run, of the requests after warm-up, and per request after warm-up (see `hit_rates`).
    """
    for percentile in percentiles:
        if not 0 <= percentile <= 100:
            raise ConfigError("percentiles", percentile, "numbers from 0 to 100")
    times = latencies(simulation, warmup)
    done = np.asarray(simulation.finish_ps) >= 0
    prompt_tokens = int(np.asarray(simulation.prompt_len)[done].sum(dtype=np.int64))
    output_tokens = int(np.asarray(simulation.output_tokens)[done].sum(dtype=np.int64))
    duration = simulation.totals.duration_s
    result: dict[str, Any] = {
        "duration": duration,
        "num_prompts": len(done),
        "completed": int(done.sum()),
        "failed": int((~done).sum()),
        "rejected": int(np.sum(getattr(simulation, "rejected", False))),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _per_second(int(done.sum()), duration),
        "request_goodput": None if slo_ms is None else _goodput(simulation, times, slo_ms).requests_per_s,
        "output_throughput": _per_second(output_tokens, duration),
        "total_token_throughput": _per_second(prompt_tokens + output_tokens, duration),
    }
    rates = hit_rates(simulation, warmup)
    result |= {
        "prefix_cache_hit_rate": rates.cold,
        "prefix_cache_hit_rate_warm": rates.warm,
        "mean_request_hit_rate": _mean(rates.per_request),
        "median_request_hit_rate": _percentiles(rates.per_request, (50,))[0],
    }
    series = {
        "ttft": times.ttft,
        "tpot": times.tpot[times.output_tokens > 1],
        "e2el": times.e2el,
        "queue_wait": times.queue_wait,
    }
    for name, values in series.items():
        points = _percentiles(values, (50, *percentiles))
        result |= _figures(name, percentiles, _mean(values), _std(values), points)
    result |= _figures("itl", percentiles, *_itl(simulation, percentiles))
    return result


def goodput(simulation: Any, slo_ms: Mapping[str, float], warmup: float = 0.1) -> Goodput:
    """Requests that meet all limits of `slo_ms`, keys ttft, tpot and e2el, milliseconds, inclusive.

    The rate is the share after warm-up x requests / duration; without warm-up that is vLLM's request_goodput.
    """
    return _goodput(simulation, latencies(simulation, warmup), slo_ms)


def _goodput(simulation: Any, times: Latencies, slo_ms: Mapping[str, float]) -> Goodput:
    good = np.ones(len(times.ttft), dtype=bool)
    for key, limit in slo_ms.items():
        if key not in ("ttft", "tpot", "e2el"):
            raise ConfigError("slo", key, "limits for ttft, tpot, e2el in ms")
        good &= getattr(times, key) <= limit
    share = float(good.sum()) / times.requests if times.requests else math.nan
    return Goodput(_per_second(share * len(simulation.arrival_ps), simulation.totals.duration_s), share)


def histogram_percentile(counts: np.ndarray, edges: np.ndarray, q: float) -> float:
    """Percentile of a histogram, `counts` [bins], `edges` [bins + 1], linear inside a bin; NaN if it is empty.

    An infinite last edge counts as the bin's lower edge.
    """
    total = int(counts.sum())
    if total == 0:
        return math.nan
    target = q / 100 * total
    below = np.concatenate([[0], np.cumsum(counts)])
    used = np.flatnonzero(counts)
    bin_ = int(used[np.searchsorted(below[used + 1], target)])
    low, high = edges[bin_], edges[bin_ + 1]
    if not math.isfinite(high):
        return float(low)
    return float(low + (high - low) * (target - below[bin_]) / counts[bin_])


def itl_share_above(simulation: Any, limit_ms: float) -> float:
    """Share of the gaps between tokens above a limit, in a run as a whole, linear inside the histogram's bins."""
    counts = np.asarray(simulation.totals.itl_histogram)
    edges = _itl_edges_ms()
    total = int(counts.sum())
    below = np.interp(limit_ms, edges[:-1], np.concatenate([[0], np.cumsum(counts)[:-1]]))
    return float(1 - below / total) if total else 0.0


def t_interval(values: Sequence[float] | np.ndarray, level: float = 0.95) -> Interval:
    """Student t interval of the mean over seeds; the half width of fewer than two values is NaN."""
    from scipy.special import stdtrit

    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return Interval(_mean(array), math.nan)
    quantile = float(stdtrit(len(array) - 1, (1 + level) / 2))
    return Interval(float(array.mean()), quantile * float(array.std(ddof=1)) / math.sqrt(len(array)))


def paired_interval(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, level: float = 0.95) -> Interval:
    """t interval of a - b, paired by seed."""
    if len(a) != len(b):
        raise ValueError(f"paired values must match: {len(a)} and {len(b)} seeds")
    return t_interval(np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64), level)


def is_growing(simulation: Any) -> bool:
    """Whether requests came faster than they were taken up: the run was unstable, whatever its percentiles say.

    The queue is counted from the records: Q at a request's arrival = earlier requests not yet scheduled then. The first
    quarter of the requests is left out (the batch fills), the slope of Q over time is fitted to the rest, and the
    queue grows if all three hold:
    1. slope >= 3 % of the arrival rate: 3 of 100 requests are left behind for good. Below that lies the wander of a
       stable queue near saturation (M/M/1, 2,000 requests: flagged at load 0.95 in 2 % of the runs, at 1.05 in 60 %, at
       1.1 in 92 %).
    2. slope x time >= 10 requests, so that a short run is not judged by a handful.
    3. Q never falls below half of that in the last quarter: an unstable queue does not drain, one that caught a burst
       at the end of the run had been empty just before.
    A closed loop never grows: its clients wait. Nor does a batch that arrives all at once.
    """
    found = _in_front(simulation, simulation.first_scheduled_ps)
    if found is None:
        return False
    time_s, queue = found
    growth = _slope(time_s, queue) * (time_s[-1] - time_s[0])
    low_water = queue[-max(len(queue) // 3, 1) :].min()
    return growth >= max(GROWTH_SHARE * len(queue), GROWTH_REQUESTS) and low_water >= growth / 2


def growth(simulation: Any) -> Growth:
    """The trend of the number of requests in the server, waiting or running, as the arrivals see it.

    The first quarter of the arrivals is left out, as in `is_growing`. The share is how much higher the last twentieth
    of all arrivals found the number than those before them, over half the arrivals: that is what a steady growth by
    that share of the arrivals leads to (the last part against the first: Geweke 1992). It is clear from 0.5 % on if the
    slope of a line through the means of 10 equal batches is above 0 at 99 %, one-sided: batches wash out most of the
    correlation of neighbours (batch means: Law, Simulation Modeling and Analysis, 9.5.3). Near saturation a stable
    server needs thousands of requests to fill: it grows, too.
    """
    found = _in_front(simulation, simulation.finish_ps)
    if found is None or len(found[0]) < 2 * BATCHES:
        return Growth(0.0, False)
    present = found[1]
    end = len(present) // LAST
    share = float(present[-end:].mean() - present[:-end].mean()) / (len(present) / 2)
    size = len(present) // BATCHES
    time, level = (series[-size * BATCHES :].reshape(BATCHES, size).mean(axis=1) for series in found)
    slope = _slope(time, level)
    rest = level - level.mean() - slope * (time - time.mean())
    spread = float(np.square(time - time.mean()).sum())
    error = math.sqrt(float(rest @ rest) / (BATCHES - 2) / spread) if spread > 0 else math.inf
    return Growth(share, share >= TREND_SHARE and slope > TREND_T * error)


def _in_front(simulation: Any, left_ps: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Times (seconds) of the later three quarters of the arrivals, and how many earlier requests had not left by then.

    None in a closed loop, whose clients wait, and for a batch that arrives all at once.
    """
    if getattr(simulation, "closed_loop", False):
        return None
    order = np.argsort(np.asarray(simulation.arrival_ps), kind="stable")
    joined = ~np.broadcast_to(getattr(simulation, "rejected", False), order.shape)  # who is rejected waits for nothing
    order = order[joined[order]]
    if len(order) < 2:
        return None
    arrival, left = np.asarray(simulation.arrival_ps)[order], np.asarray(left_ps)
    gone = np.searchsorted(np.sort(left[left >= 0]), arrival, side="right")
    # A request taken up in the instant it arrives has left already at its own arrival.
    present = np.maximum(np.arange(len(order)) - gone, 0)[len(order) // 4 :]
    time_s = (arrival[len(order) // 4 :] - arrival[0]) / PS_PER_S
    return (time_s, present) if len(time_s) > 1 and time_s[-1] > time_s[0] else None


def _slope(time: np.ndarray, values: np.ndarray) -> float:
    """Of the fitted line."""
    centred = time - time.mean()
    square = float(centred @ centred)
    return float(centred @ (values - values.mean())) / square if square > 0 else 0.0


def _itl_edges_ms() -> np.ndarray:
    return np.asarray(engine.itl_edges_s(), dtype=np.float64) * 1000


def _itl(simulation: Any, percentiles: Sequence[float]) -> tuple[float, float, list[float]]:
    """(mean, std, [median and percentiles]) of the gaps between tokens, ms.

    The mean is exact, of the finished requests; the rest takes the gaps as uniform inside the histogram's bins.
    """
    counts = np.asarray(simulation.totals.itl_histogram)
    edges = _itl_edges_ms()
    total = int(counts.sum())
    if total == 0:
        return math.nan, math.nan, [math.nan] * (1 + len(percentiles))
    low = edges[:-1]
    high = np.where(np.isfinite(edges[1:]), edges[1:], low)
    centre = float(counts @ (low + high)) / 2 / total
    square = float(counts @ (low * low + low * high + high * high)) / 3 / total
    std = math.sqrt(max(square - centre * centre, 0.0))
    done = np.asarray(simulation.finish_ps) >= 0
    decode_ps = (np.asarray(simulation.finish_ps) - np.asarray(simulation.first_token_ps))[done].sum(dtype=np.float64)
    gaps = (np.asarray(simulation.output_tokens)[done] - 1).sum(dtype=np.int64)
    mean = float(decode_ps / PS_PER_MS / gaps) if gaps else math.nan
    return mean, std, [histogram_percentile(counts, edges, q) for q in (50, *percentiles)]


def _figures(name: str, percentiles: Sequence[float], mean: float, std: float, points: list[float]) -> dict[str, float]:
    result = {f"mean_{name}_ms": mean, f"median_{name}_ms": points[0], f"std_{name}_ms": std}
    return result | {f"p{q:g}_{name}_ms": value for q, value in zip(percentiles, points[1:], strict=True)}


def _per_second(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else math.nan


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _std(values: np.ndarray) -> float:
    return float(values.std()) if len(values) else math.nan


def _percentiles(values: np.ndarray, percentiles: Sequence[float]) -> list[float]:
    """As `np.percentile`, to the last bit; to sort everything is faster than its search for each of them."""
    if not len(values):
        return [math.nan] * len(percentiles)
    ordered = np.sort(values)
    place = np.divide(percentiles, 100) * (len(values) - 1)
    before = place.astype(np.int64)
    share = place - before
    low, high = ordered[before], ordered[np.minimum(before + 1, len(values) - 1)]
    return np.where(share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share)).tolist()
