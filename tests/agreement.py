"""What the engine and the oracle say about a case, in one vocabulary."""

from fractions import Fraction
from typing import Any

import pytest
import reference

from jaxsim.engine import Simulation, Status, itl_edges_s

BINS = len(itl_edges_s()) - 1
GIVEN_UP = 1000  # rows without progress after which the oracle calls a run endless; a refused head has none


def agree(case: reference.Case, simulation: Simulation, result: reference.Result) -> None:
    """Equal records and equal totals; of an endless loop only what both have seen of it."""
    if result.stalled > GIVEN_UP:
        return agree_until_given_up(case, simulation, result)
    assert records(simulation) == expected_records(case, result), case
    got, want = totals(simulation), expected_totals(case, result)
    if simulation.status == Status.STUCK:
        for name in AVERAGES:
            del got[name], want[name]
    for name in ROUNDED & got.keys():
        assert got.pop(name) == pytest.approx(want.pop(name), rel=1e-12, abs=1e-9), (name, case)
    assert got == want, case


def agree_until_given_up(case: reference.Case, simulation: Simulation, result: reference.Result) -> None:
    """Requests that preempt and recompute themselves for ever: engine and oracle stop watching at different moments."""
    assert simulation.status == Status.STUCK, case
    end = result.totals.t0 + round(simulation.totals.duration_s * 1e12)
    want = expected_records(case, result)
    for name in ("arrival_ps", "first_scheduled_ps", "first_token_ps", "finish_ps"):
        seen = [time if time < end else -1 for time in want[name]]
        got = [time if time < end else -1 for time in getattr(simulation, name).tolist()]
        assert got == seen, (name, case)
    if max(want["arrival_ps"]) < end:
        assert simulation.output_tokens.tolist() == want["output_tokens"], case


def records(simulation: Simulation) -> dict[str, Any]:
    """Status and per-request records as plain lists."""
    names = "arrival_ps", "first_scheduled_ps", "first_token_ps", "finish_ps"
    names += "prompt_len", "num_preemptions", "recomputed_tokens", "hit_tokens", "resumed_hit_tokens", "output_tokens"
    return {"status": simulation.status.name} | {name: getattr(simulation, name).tolist() for name in names}


def expected_records(case: reference.Case, result: reference.Result) -> dict[str, Any]:
    columns = list(zip(*result.reqs, strict=True))
    arrival, scheduled, token, finish = ([-1 if time is None else time for time in column] for column in columns[1:5])
    return {
        "status": result.status,
        "arrival_ps": arrival,
        "first_scheduled_ps": scheduled,
        "first_token_ps": token,
        "finish_ps": finish,
        "prompt_len": list(case.prompts),
        "num_preemptions": list(columns[5]),
        "recomputed_tokens": result.recomputed,
        "hit_tokens": [hit or 0 for hit in columns[6]],
        "resumed_hit_tokens": list(columns[7]),
        "output_tokens": list(columns[8]),
    }


def totals(simulation: Simulation) -> dict[str, Any]:
    """Everything in `Totals` but the number of scan steps, which is the program's own affair."""
    values = simulation.totals._asdict()
    del values["scan_steps"]
    return values | {"itl_histogram": simulation.totals.itl_histogram.tolist()}


# A stuck run has no end; when that is noticed, after the last iteration or the last arrival, is the program's affair.
AVERAGES = {"duration_s", "kv_usage_mean", "kv_time_above_90", "running_mean", "waiting_mean", "waiting_growth_rps"}
ROUNDED = {"running_mean", "waiting_mean", "waiting_growth_rps"}  # sums of float64 in the engine


def expected_totals(case: reference.Case, result: reference.Result) -> dict[str, Any]:
    exact, engine = result.totals, case.engine
    duration, usable = exact.t1 - exact.t0, engine.num_gpu_blocks - 1
    tokens = exact.prefill_tokens + exact.decode_tokens

    def ratio(part: int, whole: int) -> float:
        return float(part) / whole if whole else 0.0

    return {
        "iterations": exact.iterations,
        "duration_s": duration / 1e12,
        "num_preemptions": exact.num_preemptions,
        "recomputed_tokens": exact.recomputed_tokens,
        "scheduled_tokens": tokens,
        "prefill_tokens": exact.prefill_tokens,
        "decode_tokens": exact.decode_tokens,
        "output_tokens": sum(row[8] for row in result.reqs),
        "kv_usage_mean": ratio(exact.kv_block_ps, duration * usable),
        "kv_usage_peak": ratio(exact.kv_peak_blocks, usable),
        "kv_time_above_90": ratio(exact.above_90_ps, duration),
        "running_mean": ratio(exact.running_ps, duration),
        "running_max": exact.running_max,
        "waiting_mean": ratio(exact.waiting_ps, duration),
        "waiting_max": exact.waiting_max,
        "waiting_growth_rps": waiting_growth(result),
        "slot_occupancy": ratio(exact.slot_rows, engine.max_num_seqs * exact.iterations),
        "budget_use": ratio(tokens, engine.max_num_batched_tokens * exact.iterations),
        "refused_seats": exact.refused_seats,
        "refused_kv": exact.refused_kv,
        "refused_budget": exact.refused_budget,
        "itl_histogram": [exact.itl.get(i, 0) for i in range(BINS)],
    }


def waiting_growth(result: reference.Result) -> float:
    """Mean queue of the second half of the arrivals' time less that of the first half, per second of half that time."""
    arrived = [row[1] for row in result.reqs if row[1] is not None]
    start, end = Fraction(min(arrived)), Fraction(max(arrived))
    half = (end - start) / 2
    if not half:
        return 0.0
    grown = Fraction(0)
    for row in result.reqs:
        if row[1] is not None:
            until = end if row[2] is None else row[2]
            grown += max(min(until, end) - max(row[1], start + half), 0)
            grown -= max(min(until, start + half) - max(row[1], start), 0)
    return float(grown / half / (half / 10**12))
