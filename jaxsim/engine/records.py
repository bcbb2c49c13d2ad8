"""From the arrays of a finished simulation to records in the caller's order."""

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
from jaxsim.engine.statistics import wide_value
from jaxsim.engine.types import NEVER, PS_PER_S, EngineConfig, Simulation, Status, Totals


def simulation(
    limits: Limits, n: int, closed_loop: bool, engine: EngineConfig, order: np.ndarray, outcome: Outcome
) -> Simulation:
    memory, state, cache = outcome
    rows = memory[: n * ROW].reshape(n, ROW)
    times = rows.view(np.int64)  # two words are one time, low word first
    arrival = memory[limits.arrivals : limits.arrivals + 2 * n].view(np.int64)
    arrival = np.where(arrival >= INFINITE, NEVER, arrival)
    log = memory[limits.log : limits.buckets].view(np.int64)
    position = rows[:, FIRST_TOKEN]
    generated = rows[:, GENERATED]
    finished = generated >= rows[:, OUTPUT]
    finish = np.where(finished, times[:, LAST_TOKEN // 2], NEVER)
    first_scheduled = times[:, FIRST_SCHEDULED // 2]

    def ordered(values: np.ndarray) -> np.ndarray:
        result = np.empty_like(values)
        result[order] = values
        return result

    rejected = np.zeros(n, bool) if state.inflow is None else turned_away(rows, first_scheduled, engine, state)
    hits = np.zeros((n, 2), np.int32)
    if cache is not None:
        visitors = cache[limits.visitor_rows : limits.visitor_rows + n * limits.visitor].reshape(n, limits.visitor)
        hits = np.maximum(visitors[:, [HIT_FIRST, HIT_LATER]], 0)

    return Simulation(
        arrival_ps=ordered(arrival),
        first_scheduled_ps=ordered(first_scheduled),
        first_token_ps=ordered(np.where(position < 0, NEVER, log[position])),
        finish_ps=ordered(finish),
        prompt_len=ordered(rows[:, PROMPT]),
        output_tokens=ordered(generated),
        num_preemptions=ordered(rows[:, PREEMPTIONS]),
        recomputed_tokens=ordered(rows[:, RECOMPUTED]),
        hit_tokens=ordered(hits[:, 0]),
        status=Status(int(state.status)),
        totals=totals_of(limits, engine, rows, arrival, np.where(rejected, arrival, first_scheduled), state),
        closed_loop=closed_loop,
        resumed_hit_tokens=ordered(hits[:, 1]),
        rejected=ordered(rejected),
    )


def turned_away(rows: np.ndarray, first_scheduled: np.ndarray, engine: EngineConfig, state: Any) -> np.ndarray:
    """Requests that were judged, were not admitted and do not wait; [N] bool in order of arrival.

    Nobody leaves the queue of a run that is stuck: of those to come as many join as there is room for.
    """
    rejected = first_scheduled < 0
    waiting, end = int(state.inflow.waiting), int(state.inflow.end)
    room = max((engine.max_queued_requests or 0) - waiting - int(state.preempted_count), 0)
    rejected[end : end + room] = False
    place = int(state.fresh_head)
    for _ in range(waiting):
        rejected[place] = False
        place = place + 1 if rows[place, LINK] < 0 else int(rows[place, LINK])
    return rejected


def totals_of(
    limits: Limits,
    engine: EngineConfig,
    rows: np.ndarray,
    arrival: np.ndarray,
    first_scheduled: np.ndarray,
    state: Any,
) -> Totals:
    start, end = int(arrival[0]), int(state.clock_ps)
    duration = end - start
    counts = {
        "iterations": int(state.iterations),
        "scan_steps": int(state.scan_steps),
        "duration_s": duration / PS_PER_S,
        "num_preemptions": int(rows[:, PREEMPTIONS].sum(dtype=np.int64)),
        "recomputed_tokens": int(rows[:, RECOMPUTED].sum(dtype=np.int64)),
        "output_tokens": int(rows[:, GENERATED].sum(dtype=np.int64)),
    }
    kept = state.statistics
    histogram = kept.itl.astype(np.int64)
    if not limits.statistics:
        rest = {name: np.nan for name in Totals._fields if name not in counts}
        return Totals(**{**rest, **counts, "itl_histogram": histogram})
    blocks, iterations = engine.num_gpu_blocks - 1, counts["iterations"]
    sent = np.where(arrival >= 0, arrival, end)
    opened = np.where(first_scheduled >= 0, first_scheduled, end)
    share = lambda part, whole: float(part) / whole if whole else 0.0  # noqa: E731
    requeued = share(wide_value(kept.preempted_ps), duration)
    tokens, prefill = int(kept.tokens), int(kept.prefill_tokens)
    return Totals(
        **counts,
        scheduled_tokens=tokens,
        prefill_tokens=prefill,
        decode_tokens=tokens - prefill,
        kv_usage_mean=share(wide_value(kept.kv_block_ps), duration * blocks),
        kv_usage_peak=share(kept.kv_peak, blocks),
        kv_time_above_90=share(kept.above_90_ps, duration),
        running_mean=share(wide_value(kept.running_ps), duration),
        running_max=int(kept.running_max),
        waiting_mean=share(np.maximum(opened - sent, 0).sum(dtype=np.float64), duration) + requeued,
        waiting_max=int(kept.waiting_max),
        waiting_growth_rps=waiting_growth_rps(sent, opened),
        slot_occupancy=share(kept.slot_rows, engine.max_num_seqs * iterations),
        budget_use=share(tokens, engine.max_num_batched_tokens * iterations),
        refused_seats=int(kept.refused_seats),
        refused_kv=int(kept.refused_kv),
        refused_budget=int(kept.refused_budget),
        itl_histogram=histogram,
    )


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
