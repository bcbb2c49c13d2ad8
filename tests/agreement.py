"""What the engine and the oracle say about a case, in one vocabulary, and what any schedule has to keep."""

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import reference
from random_cases import Kind, run, run_batch, shaping_case

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


def agree_in_a_batch(cases: list[reference.Case], kind: Kind) -> None:
    """Records and totals equal the oracle's, and neither leaping nor statistics change anything at all.

    Without statistics leaps go further, above all over the chunks of a prompt, which they do without a threshold only.
    """
    leaping = run_batch(cases, kind)
    stepping = run_batch(cases, kind, leap=False)
    hasty = leaping if kind.threshold else run_batch(cases, kind, statistics=False)
    for case, one, other, bare in zip([*cases, shaping_case(kind)], leaping, stepping, hasty, strict=True):
        result = reference.simulate(case)
        agree(case, one, result)
        assert records(one) == records(other), case
        assert totals(one) == totals(other), case
        if result.stalled <= GIVEN_UP:
            assert records(one) == records(bare), case
            assert one.totals.iterations == bare.totals.iterations, case
        assert one.status == bare.status, case


def agree_row_by_row(case: reference.Case) -> None:
    """Admissions, chunks, preemptions, finishes, start times and free blocks of every iteration."""
    simulation, result = run(case, trace=True, series=True), reference.simulate(case)
    keeps_invariants(case, simulation)
    series_are_rows(case, simulation)
    agree(case, simulation, result)
    rows = len(simulation.iterations)
    assert simulation.iterations == (result.iters[:rows] if result.stalled > GIVEN_UP else result.iters), case


def series_are_rows(case: reference.Case, simulation: Simulation) -> None:
    series, rows, usable = simulation.series, simulation.iterations, case.engine.num_gpu_blocks - 1
    assert series is not None and len(series) == len(rows)
    assert series["time_s"].tolist() == [row[1] / 1e12 for row in rows]
    assert series["running"].tolist() == [row[3] for row in rows]
    assert series["waiting"].tolist() == [row[4] for row in rows]
    assert series["kv_usage"].tolist() == pytest.approx([(usable - row[8]) / usable for row in rows])
    assert series["preemptions"].tolist() == np.cumsum([len(row[10]) for row in rows], dtype=int).tolist()


def keeps_invariants(case: reference.Case, simulation: Simulation) -> None:
    """What holds for every schedule whatever the policy; rows are those of the golden cases."""
    engine, usable = case.engine, case.engine.num_gpu_blocks - 1
    seats = engine.max_num_active_seqs or engine.max_num_seqs
    scheduled, admissions, preemptions, finishes = Counter(), Counter(), Counter(), Counter()
    clock = 0
    for row in simulation.iterations:
        start, duration, running, waiting, prefills, decodes, context, free = row[1:9]
        sched, out, admitted, finished = row[9:13]
        assert clock <= start and duration >= 0 and waiting >= 0
        clock = start + duration
        tokens = dict(zip(sched[::2], sched[1::2], strict=True))
        assert len(tokens) * 2 == len(sched) and all(n > 0 for n in tokens.values())
        assert prefills + decodes == sum(tokens.values()) <= engine.max_num_batched_tokens
        assert len(tokens) <= running <= seats and context >= sum(tokens.values())
        assert 0 <= free <= usable
        assert not (out and admitted) and finished == [rid for rid in tokens if rid in finished]
        scheduled.update(tokens)
        preemptions.update(out)
        admissions.update(admitted[::2])
        finishes.update(finished)
    for rid, (prompt, output) in enumerate(zip(case.prompts, case.outputs, strict=True)):
        assert preemptions[rid] == simulation.num_preemptions[rid]
        if simulation.rejected[rid]:
            assert not scheduled[rid] and not simulation.output_tokens[rid]
        elif simulation.status == Status.DONE:
            produced = min(output, engine.max_model_len - prompt, engine.max_new_tokens or output)
            assert simulation.output_tokens[rid] == produced and finishes[rid] == 1
            computed = prompt + produced - 1 + int(simulation.recomputed_tokens[rid])
            if not engine.async_scheduling:  # where a preempted request may finish without coming back
                assert admissions[rid] == preemptions[rid] + 1
                assert scheduled[rid] == computed
            assert scheduled[rid] <= computed
    if simulation.status == Status.DONE and not engine.async_scheduling:
        # The blocks in use during the last iteration are those of the requests that finish in it.
        contexts = [case.prompts[rid] + int(simulation.output_tokens[rid]) - 1 for rid in finished]
        assert usable - free == sum(math.ceil(tokens / engine.block_size) for tokens in contexts)
    if simulation.status == Status.DONE:
        served = ~simulation.rejected
        assert (simulation.arrival_ps <= simulation.first_scheduled_ps)[served].all()
        assert (simulation.first_scheduled_ps <= simulation.first_token_ps).all()
        assert (simulation.first_token_ps <= simulation.finish_ps).all()
        assert simulation.finish_ps.max() == clock


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
    names += ("rejected",)
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
        "rejected": result.rejected,
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
    for row, rejected in zip(result.reqs, result.rejected, strict=True):
        if row[1] is not None and not rejected:
            until = end if row[2] is None else row[2]
            grown += max(min(until, end) - max(row[1], start + half), 0)
            grown -= max(min(until, start + half) - max(row[1], start), 0)
    return float(grown / half / (half / 10**12))
