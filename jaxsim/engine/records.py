"""From the arrays of a finished simulation to records in the caller's order."""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxsim.engine.cache import HIT_FIRST, HIT_LATER
from jaxsim.engine.lanes import Outcome
from jaxsim.engine.layout import (
    FIRST_SCHEDULED,
    FIRST_TOKEN,
    GENERATED,
    INFINITE,
    LAST_TOKEN,
    LINK,
    OUTPUT,
    PREEMPTIONS,
    PROMPT,
    RECOMPUTED,
    ROW,
    Limits,
)
from jaxsim.engine.priority import queued
from jaxsim.engine.statistics import BINS, Statistics, wide_value
from jaxsim.engine.types import NEVER, PS_PER_S, EngineConfig, Requests, Simulation, Status, Totals


def simulation(
    limits: Limits,
    requests: Requests,
    closed_loop: bool,
    engine: EngineConfig,
    place: np.ndarray | None,
    outcome: Outcome,
) -> Simulation:
    """place: [N] position of each of the caller's requests in the order of arrival, None if they are in this order."""
    memory, state, cache = outcome
    n = len(requests.prompt_len)
    rows = memory[: n * ROW].reshape(n, ROW)
    times = rows.view(np.int64)  # two words are one time, low word first
    arrival = memory[limits.arrivals : limits.arrivals + 2 * n].view(np.int64)
    arrival = np.where(arrival >= INFINITE, NEVER, arrival)
    log = memory[limits.log : limits.buckets].view(np.int64)
    first_scheduled = times[:, FIRST_SCHEDULED // 2]

    def ordered(values: np.ndarray) -> np.ndarray:
        return values.copy() if place is None else values[place]

    position, output_tokens = ordered(rows[:, FIRST_TOKEN]), ordered(rows[:, GENERATED])
    rejected, started = np.zeros(n, bool), first_scheduled
    if limits.inflow:
        rejected = turned_away(limits, memory, rows, arrival, engine, state)
        started, rejected = np.where(rejected, arrival, first_scheduled), ordered(rejected)
    hits = np.zeros((2, n), np.int32)
    if cache is not None:
        visitors = cache[limits.visitor_rows : limits.visitor_rows + n * limits.visitor].reshape(n, limits.visitor)
        hits = [ordered(np.maximum(visitors[:, column], 0)) for column in (HIT_FIRST, HIT_LATER)]
    preemptions, recomputed = ordered(rows[:, PREEMPTIONS]), ordered(rows[:, RECOMPUTED])
    sums = {"num_preemptions": preemptions, "recomputed_tokens": recomputed, "output_tokens": output_tokens}
    return Simulation(
        arrival_ps=ordered(arrival),
        first_scheduled_ps=ordered(first_scheduled),
        first_token_ps=np.where(position < 0, NEVER, log[position]),
        finish_ps=np.where(output_tokens >= ordered(rows[:, OUTPUT]), ordered(times[:, LAST_TOKEN // 2]), NEVER),
        prompt_len=ordered(rows[:, PROMPT]),
        output_tokens=output_tokens,
        num_preemptions=preemptions,
        recomputed_tokens=recomputed,
        hit_tokens=hits[0],
        status=Status(int(state.status)),
        totals=totals_of(limits, engine, sums, arrival, started, state),
        closed_loop=closed_loop,
        resumed_hit_tokens=hits[1],
        rejected=rejected,
        label=requests.label,
    )


def as_of(engine: EngineConfig, simulation: Simulation, outcome: Outcome) -> Simulation:
    """The same simulation of another setting that it answers for, see `alike`; it shares the arrays."""
    totals = simulation.totals
    duration_ps = int(outcome.state.clock_ps) - int(simulation.arrival_ps.min())  # all of them have arrived
    totals = totals._replace(**used(engine, outcome.state.statistics, totals.iterations, duration_ps))
    return replace(simulation, totals=totals)


def turned_away(
    limits: Limits, memory: np.ndarray, rows: np.ndarray, arrival: np.ndarray, engine: EngineConfig, state: Any
) -> np.ndarray:
    """Requests that came, were not admitted and do not wait; [N] bool in order of arrival.

    Nobody leaves the queue of a run that is stuck: of those to come as many join as there is room for.
    """
    fresh = rows[:, FIRST_SCHEDULED + 1] < 0
    rejected = fresh & (arrival >= 0)
    if limits.priority:
        waits = queued(limits, memory)[: len(rows)]
        waiting, end = int(waits.sum()), int(state.fresh_head)
        rejected &= ~waits
    else:
        waiting, end = int(state.inflow.waiting) + int(state.preempted_count), int(state.inflow.end)
        place = int(state.fresh_head)
        for _ in range(int(state.inflow.waiting)):
            rejected[place] = False
            place = place + 1 if rows[place, LINK] < 0 else int(rows[place, LINK])
    rejected[end : end + max((engine.max_queued_requests or 0) - waiting, 0)] = False
    return rejected


def totals_of(
    limits: Limits,
    engine: EngineConfig,
    sums: dict[str, np.ndarray],
    arrival: np.ndarray,
    first_scheduled: np.ndarray,
    state: Any,
) -> Totals:
    """sums: arrays to be added up; arrival, first_scheduled: in order of arrival."""
    start, end = int(arrival[0]), int(state.clock_ps)
    duration = end - start
    counts = {
        "iterations": int(state.iterations),
        "scan_steps": int(state.scan_steps),
        "duration_s": duration / PS_PER_S,
        **{name: int(values.sum(dtype=np.int64)) for name, values in sums.items()},
    }
    if not limits.statistics:
        rest = {name: np.nan for name in Totals._fields if name not in counts}
        return Totals(**{**rest, **counts, "itl_histogram": np.zeros(BINS, np.int64)})
    kept = state.statistics
    histogram = kept.itl.astype(np.int64)
    iterations = counts["iterations"]
    sent = np.where(arrival >= 0, arrival, end)
    opened = np.where(first_scheduled >= 0, first_scheduled, end)
    requeued = share(wide_value(kept.preempted_ps), duration)
    tokens, prefill = int(kept.tokens), int(kept.prefill_tokens)
    return Totals(
        **counts,
        scheduled_tokens=tokens,
        prefill_tokens=prefill,
        decode_tokens=tokens - prefill,
        kv_time_above_90=share(kept.above_90_ps, duration),
        running_mean=share(wide_value(kept.running_ps), duration),
        running_max=int(kept.running_max),
        waiting_mean=share(np.maximum(opened - sent, 0).sum(dtype=np.float64), duration) + requeued,
        waiting_max=int(kept.waiting_max),
        waiting_growth_rps=waiting_growth_rps(sent, opened),
        budget_use=share(tokens, engine.max_num_batched_tokens * iterations),
        refused_seats=int(kept.refused_seats),
        refused_kv=int(kept.refused_kv),
        refused_budget=int(kept.refused_budget),
        itl_histogram=histogram,
        **used(engine, kept, iterations, duration),
    )


def used(engine: EngineConfig, kept: Statistics, iterations: int, duration_ps: int) -> dict[str, Any]:
    """How much of its blocks and seats a setting used."""
    blocks = engine.num_gpu_blocks - 1
    return {
        "kv_usage_mean": share(wide_value(kept.kv_block_ps), duration_ps * blocks),
        "kv_usage_peak": share(kept.kv_peak, blocks),
        "slot_occupancy": share(kept.slot_rows, engine.max_num_seqs * iterations),
    }


def share(part: Any, whole: int) -> float:
    return float(part) / whole if whole else 0.0


def waiting_growth_rps(arrival_ps: np.ndarray, first_scheduled_ps: np.ndarray) -> float:
    """Requests per second by which the queue of never scheduled requests grows while requests arrive.

    The mean length of the queue in the second half of the time of arrivals, less that in the first half, over half of
    that time: the slope, if the queue grows evenly.
    """
    start, end = arrival_ps.min(), arrival_ps.max()
    half = (end - start) / 2
    if half <= 0:
        return 0.0
    middle = start + half

    def mean_length(since: float, until: float) -> float:
        overlap = np.minimum(first_scheduled_ps, until) - np.maximum(arrival_ps, since)
        return float(np.maximum(overlap, 0).sum()) / half

    return (mean_length(middle, end) - mean_length(start, middle)) / (half / PS_PER_S)
