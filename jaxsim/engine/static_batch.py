"""One event of static batching: a finish, a request taken into the batch or a chunk of its prompt, an iteration and a leap.

A batch takes requests from the head of the queue while seats and reserved KV blocks last, computes their prompts in order,
then decodes in lockstep until its longest row ends. Requests are taken one a step, and get their share of the first
iteration's token budget in that step. What a batch holds is fixed when it starts, so nothing but completions ends a leap.

The batch is the requests `fresh_head - running ... fresh_head - 1`. In this mode these fields of the state mean:
- `now`: decode iterations so far, of all batches: what the calendar counts. A row whose only token is that of its prompt
  is in the present bucket; buckets are looked at between iterations only;
- `running`: rows of the batch until it ends; `decodes`: those not finished; `joined`: those whose prompt is complete;
- `context`: computed tokens of the rows that a decode iteration bills, with padding the finished ones too;
- `begun`: the batch has started; before that it takes requests; `called`: an iteration is partly scheduled;
- `prompt_first`, `prompt_last`: two words of a time, the arrival of the batch's head, then the batch's start;
- `preempted`: the batch has decoded; `pairs` is from then on the end of its first decode iteration.

An iteration's first tokens follow a pause of any length, that until the last prompt is complete, so the gap between a row's
first two tokens is counted when it finishes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine import leap
from jaxsim.engine.blocks import blocks_for, quotient
from jaxsim.engine.calendar import bit, mark_word, next_completion
from jaxsim.engine.layout import (
    FIRST_SCHEDULED,
    FIRST_TOKEN,
    GENERATED,
    INFINITE,
    LAST_TOKEN,
    NEXT,
    NONE,
    OUTPUT,
    PREEMPTIONS,
    PROMPT,
    ROW,
    WINDOW,
    Knobs,
    Limits,
    Tables,
    join_time,
    read,
    read_cell,
    read_row,
    split_time,
    write_cells,
    write_windows,
)
from jaxsim.engine.state import Event, State
from jaxsim.engine.statistics import Statistics, bin_end, itl_bin
from jaxsim.engine.types import Status

pick = jnp.where


def count(condition: jax.Array) -> jax.Array:
    return condition.astype(jnp.int32)


def arrival(limits: Limits, memory: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Arrival times of requests `first` and `first + 1`, int64, INFINITE where unknown."""
    words = read(memory, limits.arrivals + 2 * first, 4)
    return join_time(words[0], words[1]), join_time(words[2], words[3])


def arrived_by(limits: Limits, memory: jax.Array, first: jax.Array, time_ps: jax.Array) -> jax.Array:
    """How many of the requests from `first` on have arrived at a time, by bisection; int32."""
    position = first
    for power in reversed(range(limits.requests.bit_length())):
        probe = position + (1 << power)
        last = jnp.minimum(probe, limits.requests + 1) - 1
        words = read(memory, limits.arrivals + 2 * last, 2)
        inside = (probe <= limits.requests) & (join_time(words[0], words[1]) <= time_ps)
        position = jnp.where(inside, probe, position)
    return position - first


class Leap(NamedTuple):
    """Iterations after the one of this step that are like each other."""

    iterations: jax.Array  # int32
    first_ps: jax.Array  # int64, time of the first
    time_ps: jax.Array  # int64, time of all
    slope_ps: jax.Array  # int64, by which each takes longer than the one before


class Iteration(NamedTuple):
    """The iteration of this step, if there is one."""

    runs: jax.Array  # bool
    start_ps: jax.Array  # int64
    duration_ps: jax.Array  # int64
    batch: leap.Batch


def step(limits: Limits, knobs: Knobs, tables: Tables | None, state: State) -> tuple[State, Event | None]:
    """The next event of one simulation; a simulation that has ended stays as it is."""
    s = state
    memory = s.memory
    mask = limits.ring - 1
    none = jnp.int32(NONE)

    # A finish; the last one of a batch ends it.
    active = s.status == Status.RUNNING
    bucket = s.now & mask
    finisher = read_cell(memory, limits.buckets + bucket)
    finishes = active & s.begun & ~s.called & (finisher != NONE)
    gone = read_row(memory, finisher)
    more_finish = finishes & (gone[NEXT] != NONE)
    ends = finishes & (s.decodes == 1)
    begun = s.begun & ~ends
    decoded = s.preempted & ~ends
    decodes = s.decodes - count(finishes)
    running = pick(ends, 0, s.running)
    joined = pick(ends, 0, s.joined)
    free = pick(ends, knobs.blocks, s.free)
    context = s.context - pick(finishes & ~knobs.padding, gone[PROMPT] + gone[OUTPUT] - 1, 0)
    context = pick(ends, 0, context)
    arrives_ps, arrives_next_ps = arrival(limits, memory, s.fresh_head)
    if limits.closed_loop:
        returns = finishes & (s.arrivals_known < knobs.num_requests)
        back_ps = s.clock_ps + knobs.think_ps
        arrives_ps = pick(returns & (s.arrivals_known == s.fresh_head), back_ps, arrives_ps)
        arrives_next_ps = pick(returns & (s.arrivals_known == s.fresh_head + 1), back_ps, arrives_next_ps)

    # A batch that has not started takes the head of the queue; an empty one jumps to its arrival.
    forms = active & ~more_finish & ~begun
    prefills = active & ~more_finish & begun & (joined < running)
    decoding = active & ~more_finish & begun & (joined == running)
    joiner = s.fresh_head - pick(begun, running - joined, 0)
    row = read_row(memory, joiner)
    opens = forms & (running == 0)
    over = opens & (arrives_ps >= INFINITE)
    clock_ps = pick(opens & ~over, jnp.maximum(s.clock_ps, arrives_ps), s.clock_ps)
    present = forms & (arrives_ps <= clock_ps)
    reserve = blocks_for(row[PROMPT] + row[OUTPUT], knobs.block_size)
    takes = present & (reserve <= free)
    refused = present & ~takes
    stuck = refused & opens
    mark_ps = join_time(s.prompt_first, s.prompt_last)
    batch_ps = mark_ps
    mark_ps = pick(takes & opens, arrives_ps, mark_ps)
    free = free - pick(takes, reserve, 0)
    running = running + count(takes)
    decodes = decodes + count(takes)
    context = context + pick(takes, row[PROMPT], 0)
    fresh_head = s.fresh_head + count(takes)
    arrives_ps = pick(takes, arrives_next_ps, arrives_ps)
    deadline_ps = mark_ps + knobs.wait_ps
    complete = (running >= knobs.slots) | refused | ((arrives_ps > clock_ps) & (clock_ps >= deadline_ps))
    starts = forms & (running > 0) & complete
    waits = forms & (running > 0) & ~complete & (arrives_ps > clock_ps)
    mark_ps = pick(starts, clock_ps, mark_ps)

    # A chunk of the first prompt of the batch that is not complete.
    budget = pick(s.called, s.left, knobs.budget)
    rest = row[PROMPT] - s.prompt_done
    in_turn = prefills | (takes & (joined == running - 1))
    completes = in_turn & (rest <= budget)
    chunk = pick(completes | (in_turn & knobs.chunked), jnp.minimum(rest, budget), 0)
    left = budget - chunk
    joined = joined + count(completes)
    prompt_done = pick(completes, 0, s.prompt_done + chunk)
    wide, done = chunk.astype(jnp.int64), s.prompt_done.astype(jnp.int64)
    prefill_tokens = s.prefill_tokens + chunk
    prefill_rows = s.prefill_rows + count(chunk > 0)
    prefill_context = s.prefill_context + pick(chunk > 0, s.prompt_done + chunk, 0)
    pairs = pick(ends, 0, s.pairs) + wide * done + (wide * (wide + 1) >> 1)
    joined_fresh = s.joined_fresh | completes

    # The iteration.
    prompts_run = starts | (prefills & (~completes | (left == 0) | (joined == running)))
    runs = prompts_run | decoding
    width = pick(knobs.padding, running, decodes)
    billed = pick(decoding, width, 0)
    batch = leap.Batch(
        billed,
        pick(decoding, context + billed, 0),
        prefill_tokens,
        prefill_rows,
        prefill_context,
        pick(decoding, 0, pairs),
    )
    duration_ps, _ = leap.iteration_time(knobs, tables, batch)
    duration_ps = pick(runs, duration_ps, 0)
    end_ps = clock_ps + duration_ps
    now = s.now + count(decoding)
    context = context + billed

    # The calendar. The bucket that a finish has emptied may be the one that the joiner enters.
    fit_bucket = (s.now + row[OUTPUT] - 1) & mask
    below = read_cell(memory, limits.buckets + fit_bucket)
    emptied = finishes & ~more_finish
    refills = completes & emptied & (fit_bucket == bucket)
    below = pick(refills, none, below)
    clear_word, set_word = bucket >> 5, fit_bucket >> 5
    cleared = read_cell(memory, limits.words + clear_word)
    cleared = pick(emptied, cleared & ~bit(bucket), cleared)
    marked = read_cell(memory, limits.words + set_word)
    marked = pick(set_word == clear_word, cleared, marked)
    marked = pick(completes, marked | bit(fit_bucket), marked)
    tops = mark_word(s.tops, clear_word, emptied & (cleared == 0), jnp.bool_(False))
    tops = mark_word(tops, set_word, completes, jnp.bool_(True))
    completion = next_completion(limits, memory, tops, [(set_word, marked), (clear_word, cleared)], now)

    # The leap: decodes up to the next completion, or full-budget chunks of the prompt that has just got one.
    steady = runs & (joined == running)
    chunks = prompts_run & prefills & ~completes & (chunk > 0) & (completion > 0)
    full, before = knobs.budget.astype(jnp.int64), prompt_done.astype(jnp.int64)
    ahead = leap.Batch(
        pick(steady, width, 0),
        pick(steady, context + width, 0),
        pick(chunks, knobs.budget, 0),
        count(chunks),
        pick(chunks, prompt_done + knobs.budget, 0),
        pick(chunks, full * before + (full * (full + 1) >> 1), 0),
    )
    first_ps, per_context_ps = leap.iteration_time(knobs, tables, ahead)
    slope_ps = pick(steady, per_context_ps * width.astype(jnp.int64), 0)
    slope_ps += pick(chunks, knobs.prefill_ctx_ps * full + knobs.pair_ps * full * full, 0)
    leaps = pick(steady, completion, pick(chunks, quotient(rest - chunk - 1, knobs.budget), 0))
    leaps = jnp.minimum(leaps, knobs.leap)
    if limits.statistics:
        within_bin = leap.below(first_ps, slope_ps, bin_end(first_ps))
        leaps = pick(steady, jnp.minimum(leaps, within_bin), leaps)
    leap_ps = leap.span(first_ps, slope_ps, leaps)
    decode_leaps = pick(steady, leaps, 0)
    leap_tokens = pick(chunks, leaps * knobs.budget, 0)
    starts_decoding = prompts_run & (decode_leaps > 0)

    status = pick(over, Status.DONE, pick(stuck, Status.STUCK, s.status)).astype(jnp.int32)
    # The clock of a simulation that is stuck stands at the end of its last iteration.
    clock_next_ps = pick(waits, jnp.minimum(arrives_ps, deadline_ps), end_ps + leap_ps)
    clock_next_ps = pick(stuck & (s.iterations > 0), s.clock_ps, clock_next_ps)

    # Everything is decided; write it. No write may overtake a read of this step, or XLA copies the memory.
    nothing = jnp.minimum(leaps, 0)
    if limits.statistics:
        log_words = read(memory, limits.log + 2 * jnp.maximum(gone[FIRST_TOKEN], 0), 2)
        gap_ps = s.pairs - join_time(log_words[0], log_words[1])
        nothing = nothing + pick(finishes, jnp.minimum(log_words[1], 0), 0)
    clock_words, end_words, batch_words = split_time(clock_ps), split_time(end_ps), split_time(batch_ps)
    sink_row = limits.requests * ROW + nothing
    departure = gone[WINDOW:].at[LAST_TOKEN - WINDOW : PREEMPTIONS - WINDOW].set(jnp.stack(split_time(s.clock_ps)))
    departure = departure.at[GENERATED - WINDOW].set(gone[OUTPUT])
    first_chunk = prefills & (chunk > 0) & (s.prompt_done == 0)
    entry = jnp.stack(
        [
            pick(completes, below, row[NEXT]),
            row[NEXT + 1],
            row[NEXT + 2],
            row[NEXT + 3],
            pick(first_chunk, clock_words[0], row[FIRST_SCHEDULED]),
            pick(first_chunk, clock_words[1], row[FIRST_SCHEDULED + 1]),
            pick(completes, s.log_size, row[FIRST_TOKEN]),
            row[FIRST_TOKEN + 1],
        ]
    )
    memory = write_windows(
        memory,
        [pick(finishes, finisher * ROW, sink_row) + WINDOW, pick(chunk > 0, joiner * ROW, sink_row)],
        [departure, entry],
    )
    logs = prompts_run & joined_fresh
    log_at = limits.log + 2 * s.log_size
    # Rows of the first iteration do not know its start before the batch is complete.
    opened = finishes & (gone[FIRST_SCHEDULED + 1] == NONE)
    opened_at = finisher * ROW + FIRST_SCHEDULED
    cells = [
        (finishes & ~refills, limits.buckets + bucket, gone[NEXT]),
        (emptied & ~(completes & (set_word == clear_word)), limits.words + clear_word, cleared),
        (completes, limits.buckets + fit_bucket, joiner),
        (completes, limits.words + set_word, marked),
        (logs, log_at, end_words[0]),
        (logs, log_at + 1, end_words[1]),
        (opened, opened_at, batch_words[0]),
        (opened, opened_at + 1, batch_words[1]),
    ]
    arrivals_known = s.arrivals_known
    if limits.closed_loop:
        back_words = split_time(back_ps)
        back_at = limits.arrivals + 2 * s.arrivals_known
        cells += [(returns, back_at, back_words[0]), (returns, back_at + 1, back_words[1])]
        arrivals_known = arrivals_known + count(returns)
    memory = write_cells(memory, limits.sinks, cells)

    statistics, event = s.statistics, None
    if limits.statistics or limits.trace:
        # Requests that wait after the (last) schedule() call of this step.
        asked_ps = pick(leaps > 0, end_ps + leap.span(first_ps, slope_ps, leaps - 1), clock_ps)
        waiting = arrived_by(limits, memory, fresh_head, asked_ps)
    if limits.statistics:
        old = s.statistics
        used = knobs.blocks - free
        above = used > knobs.blocks - blocks_for(knobs.blocks, jnp.int32(10))
        unqueued = leap.started_before(first_ps, slope_ps, arrives_ps - end_ps, jnp.maximum(leaps, 1))
        refusals = count(runs & (arrives_ps <= clock_ps)) + jnp.maximum(leaps - unqueued, 0)
        tokens = pick(runs, prefill_tokens + billed, 0) + leap_tokens + decode_leaps * width
        gaps = (duration_ps, first_ps, gap_ps)
        weights = (
            pick(decoding & decoded, decodes, 0),
            (decode_leaps - count(starts_decoding)) * decodes,
            count(finishes & (gone[OUTPUT] > 1)),
        )
        statistics = old._replace(
            kv_block_ps=old.kv_block_ps.plus((used, duration_ps + leap_ps)),
            above_90_ps=old.above_90_ps + pick(above, duration_ps + leap_ps, 0),
            kv_peak=jnp.maximum(old.kv_peak, pick(runs, used, 0)),
            running_max=jnp.maximum(old.running_max, pick(runs, running, 0)),
            waiting_max=jnp.maximum(old.waiting_max, pick(runs, waiting, 0)),
            slot_rows=old.slot_rows + decodes.astype(jnp.int64) * (count(runs) + leaps).astype(jnp.int64),
            tokens=old.tokens + tokens.astype(jnp.int64),
            prefill_tokens=old.prefill_tokens + (pick(runs, prefill_tokens, 0) + leap_tokens).astype(jnp.int64),
            refused_seats=old.refused_seats + refusals,
            itl=old.itl.at[jnp.stack([itl_bin(gap) for gap in gaps])].add(jnp.stack(weights)),
        )
    if limits.trace:
        event = Event(
            pick(finishes, finisher, none), none,
            pick(prefills & (chunk > 0), joiner, none), chunk, pick(takes, joiner, none), chunk,
            runs, clock_ps, duration_ps, running, waiting,
            prefill_tokens, billed, prefill_context + batch.context, free,
        )  # fmt: skip

    second_ps = pick(starts_decoding, end_ps + first_ps, pick(prompts_run, 0, pairs))
    mark_words = split_time(mark_ps)
    return s._replace(
        memory=memory,
        tops=tops,
        clock_ps=clock_next_ps,
        now=now + decode_leaps,
        free=free,
        decodes=decodes,
        context=context + decode_leaps * width,
        running=running,
        fresh_head=fresh_head,
        prompt_first=mark_words[0],
        prompt_last=mark_words[1],
        prompt_done=prompt_done + leap_tokens,
        log_size=s.log_size + count(logs),
        arrivals_known=arrivals_known,
        status=status,
        iterations=s.iterations + count(runs) + leaps,
        scan_steps=s.scan_steps + count(active),
        called=(s.called | takes | prefills) & ~runs,
        begun=begun | starts,
        preempted=decoded | decoding | starts_decoding,
        left=left,
        prefill_tokens=pick(runs, 0, prefill_tokens),
        prefill_rows=pick(runs, 0, prefill_rows),
        prefill_context=pick(runs, 0, prefill_context),
        pairs=pick(decoding & ~decoded, end_ps, second_ps),
        joined=joined,
        joined_fresh=joined_fresh & ~runs,
        statistics=statistics,
    ), event
