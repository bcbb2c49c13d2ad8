"""One event of static batching: a finish, a request taken or a chunk of a prompt, an iteration and a leap.

A batch takes requests from the head of the queue while seats and reserved KV blocks last, computes their prompts in
order, then decodes in lockstep until its longest row ends. It takes one request a step, which gets its share of the
first iteration's token budget at once. What a batch holds is fixed when it starts, so that of all events only a
completion ends a leap.

The batch is the requests `fresh_head - running ... fresh_head - 1`. In this mode these fields of the state mean:
- `now`: decode iterations so far, which the calendar counts. A row whose only token is that of its prompt is in the
  present bucket; buckets are looked at between iterations only;
- `running`: rows of the batch until it ends; `decodes`: those not finished; `joined`: those whose prompt is complete;
- `context`: computed tokens of the rows that a decode iteration bills, with padding the finished ones too;
- `begun`: the batch has started, before that it takes requests; `called`: an iteration is partly scheduled;
- `prompt_first`, `prompt_last`: two words of a time, the arrival of the batch's head, then the start of the batch;
- `preempted`: the batch has decoded; `pairs` is from then on the end of its first decode iteration.

Between a row's first two tokens lie the prompts of the rows behind it, so that gap is counted when the row finishes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine import leap
from jaxsim.engine.blocks import blocks_for, quotient
from jaxsim.engine.calendar import bit, mark_word, next_completion
from jaxsim.engine.fence import fence
from jaxsim.engine.layout import (
    FIRST_SCHEDULED,
    FIRST_TOKEN,
    GENERATED,
    INFINITE,
    LAST_TOKEN,
    NEXT,
    NONE,
    OUTPUT,
    OVERTIME,
    PREEMPTIONS,
    PROMPT,
    ROW,
    WINDOW,
    Knobs,
    Limits,
    Tables,
    arrivals,
    arrived_by,
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


class Look(NamedTuple):
    """The requests that a step concerns; read from the memory before anything is decided."""

    active: jax.Array  # bool
    finishes: jax.Array  # bool: `finisher` is finished
    finisher: jax.Array
    gone: jax.Array  # [ROW], its row
    more_finish: jax.Array  # bool: so is another request, the rest must wait
    ends: jax.Array  # bool: its batch ends with it
    returns: jax.Array  # bool: its client has a next request
    joiner: jax.Array  # the first row of the batch whose prompt is not complete, or the head of the queue
    row: jax.Array  # [ROW], its row
    arrives_ps: jax.Array  # int64, arrival of the head of the queue
    arrives_next_ps: jax.Array  # int64, and of the request after it


class Forming(NamedTuple):
    """The batch after a finish and after it took, or refused, the head of the queue."""

    clock_ps: jax.Array  # int64
    prefills: jax.Array  # bool: the batch has started and computes prompts
    decoding: jax.Array  # bool: it decodes
    takes: jax.Array  # bool
    starts: jax.Array  # bool: the batch is complete
    waits: jax.Array  # bool: it is not, but nobody is there
    over: jax.Array  # bool: nobody will come
    stuck: jax.Array  # bool: the head never fits
    mark_ps: jax.Array  # int64, see `prompt_first`
    deadline_ps: jax.Array  # int64, end of the wait for a full batch
    begun: jax.Array
    running: jax.Array
    joined: jax.Array
    decodes: jax.Array
    context: jax.Array
    free: jax.Array
    fresh_head: jax.Array
    arrives_ps: jax.Array  # int64, arrival of the head of the queue


class Prompt(NamedTuple):
    """The joiner's chunk, and the iteration as scheduled so far."""

    chunk: jax.Array  # 0 if it is not its turn
    completes: jax.Array  # bool
    left: jax.Array
    joined: jax.Array
    done: jax.Array
    tokens: jax.Array
    rows: jax.Array
    context: jax.Array
    pairs: jax.Array
    fresh: jax.Array  # bool: a request gets its first token


class Words(NamedTuple):
    """The calendar where this step changes it."""

    fit_bucket: jax.Array  # of the joiner
    below: jax.Array  # the request that was first in it, or NONE
    refills: jax.Array  # bool: the finish has just emptied it
    clears: jax.Array  # bool: a finish empties a bucket
    clear_word: jax.Array
    cleared: jax.Array
    set_word: jax.Array
    marked: jax.Array
    tops: jax.Array  # [Limits.tops]


class Iteration(NamedTuple):
    """The iteration that is complete with this step, if one is, and the leap after it."""

    runs: jax.Array  # bool
    prompts: jax.Array  # bool: it computes prompts
    billed: jax.Array  # decode rows
    context: jax.Array  # of all its rows, after it
    duration_ps: jax.Array  # int64, 0 unless `runs`
    end_ps: jax.Array  # int64
    leaps: jax.Array  # further iterations
    decode_leaps: jax.Array  # the same if they decode, else 0
    leap_tokens: jax.Array  # prompt tokens in the leap
    width: jax.Array  # decode rows billed in each iteration of the leap
    first_ps: jax.Array  # int64, the time of its first iteration
    slope_ps: jax.Array  # int64, by which each further one is longer
    leap_ps: jax.Array  # int64
    starts_decoding: jax.Array  # bool: it begins with the batch's first decode iteration


def count(condition: jax.Array) -> jax.Array:
    return condition.astype(jnp.int32)


def look_up(limits: Limits, knobs: Knobs, s: State) -> Look:
    active = s.status == Status.RUNNING
    finisher = read_cell(s.memory, limits.buckets + (s.now & (limits.ring - 1)))
    finishes = active & s.begun & ~s.called & (finisher != NONE)
    gone = read_row(s.memory, finisher)
    ends = finishes & (s.decodes == 1)
    joiner = s.fresh_head - pick(s.begun & ~ends, s.running - s.joined, 0)
    arrives_ps, arrives_next_ps = arrivals(limits, s.memory, s.fresh_head)
    returns = jnp.bool_(False)
    if limits.closed_loop:
        returns = finishes & (s.arrivals_known < knobs.num_requests)
        back_ps = s.clock_ps + knobs.think_ps
        arrives_ps = pick(returns & (s.arrivals_known == s.fresh_head), back_ps, arrives_ps)
        arrives_next_ps = pick(returns & (s.arrivals_known == s.fresh_head + 1), back_ps, arrives_next_ps)
    return Look(
        active=active,
        finishes=finishes,
        finisher=finisher,
        gone=gone,
        more_finish=finishes & (gone[NEXT] != NONE),
        ends=ends,
        returns=returns,
        joiner=joiner,
        row=read_row(s.memory, joiner),
        arrives_ps=arrives_ps,
        arrives_next_ps=arrives_next_ps,
    )


def form(knobs: Knobs, s: State, look: Look) -> Forming:
    """The finish, then one request into a batch that has not started; an empty batch jumps to the next arrival."""
    gone, row, ends = look.gone, look.row, look.ends
    running, joined = pick(ends, 0, s.running), pick(ends, 0, s.joined)
    decodes = s.decodes - count(look.finishes)
    context = s.context - pick(look.finishes & ~knobs.padding, gone[PROMPT] + gone[OUTPUT] - 1, 0)
    free = pick(ends, knobs.blocks, s.free)
    begun = s.begun & ~ends
    goes_on = look.active & ~look.more_finish

    forms = goes_on & ~begun
    empty = forms & (running == 0)
    over = empty & (look.arrives_ps >= INFINITE)
    clock_ps = pick(empty & ~over, jnp.maximum(s.clock_ps, look.arrives_ps), s.clock_ps)
    present = forms & (look.arrives_ps <= clock_ps)
    reserve = blocks_for(row[PROMPT] + row[OUTPUT], knobs.block_size)
    takes = present & (reserve <= free)
    refused = present & ~takes
    running = running + count(takes)
    arrives_ps = pick(takes, look.arrives_next_ps, look.arrives_ps)
    mark_ps = pick(takes & empty, look.arrives_ps, join_time(s.prompt_first, s.prompt_last))
    deadline_ps = mark_ps + knobs.wait_ps
    nobody = arrives_ps > clock_ps
    complete = (running >= knobs.slots) | refused | (nobody & (clock_ps >= deadline_ps))
    starts = forms & (running > 0) & complete
    return Forming(
        clock_ps=clock_ps,
        prefills=goes_on & begun & (joined < running),
        decoding=goes_on & begun & (joined == running),
        takes=takes,
        starts=starts,
        waits=forms & (running > 0) & ~complete & nobody,
        over=over,
        stuck=empty & refused,
        mark_ps=pick(starts, clock_ps, mark_ps),
        deadline_ps=deadline_ps,
        begun=begun | starts,
        running=running,
        joined=joined,
        decodes=decodes + count(takes),
        context=pick(ends, 0, context) + pick(takes, row[PROMPT], 0),
        free=free - pick(takes, reserve, 0),
        fresh_head=s.fresh_head + count(takes),
        arrives_ps=arrives_ps,
    )


def compute_prompt(knobs: Knobs, s: State, look: Look, f: Forming) -> Prompt:
    """A chunk for the first prompt of the batch that is not complete: what is left of it, or of the budget."""
    budget = pick(s.called, s.left, knobs.budget)
    rest = look.row[PROMPT] - s.prompt_done
    in_turn = f.prefills | (f.takes & (f.joined == f.running - 1))
    completes = in_turn & (rest <= budget)
    chunk = pick(completes | (in_turn & knobs.chunked), jnp.minimum(rest, budget), 0)
    n, done = chunk.astype(jnp.int64), s.prompt_done.astype(jnp.int64)
    return Prompt(
        chunk=chunk,
        completes=completes,
        left=budget - chunk,
        joined=f.joined + count(completes),
        done=pick(completes, 0, s.prompt_done + chunk),
        tokens=s.prefill_tokens + chunk,
        rows=s.prefill_rows + count(chunk > 0),
        context=s.prefill_context + pick(chunk > 0, s.prompt_done + chunk, 0),
        pairs=pick(look.ends, 0, s.pairs) + n * done + (n * (n + 1) >> 1),
        fresh=s.joined_fresh | completes,
    )


def mark_calendar(limits: Limits, s: State, look: Look, p: Prompt) -> Words:
    bucket = s.now & (limits.ring - 1)
    fit_bucket = (s.now + look.row[OUTPUT] - 1) & (limits.ring - 1)
    clears = look.finishes & ~look.more_finish
    refills = p.completes & clears & (fit_bucket == bucket)
    below = read_cell(s.memory, limits.buckets + fit_bucket)
    clear_word, set_word = bucket >> 5, fit_bucket >> 5
    cleared = read_cell(s.memory, limits.words + clear_word)
    cleared = pick(clears, cleared & ~bit(bucket), cleared)
    marked = read_cell(s.memory, limits.words + set_word)
    marked = pick(set_word == clear_word, cleared, marked)
    marked = pick(p.completes, marked | bit(fit_bucket), marked)
    tops = mark_word(s.tops, clear_word, clears & (cleared == 0), jnp.bool_(False))
    tops = mark_word(tops, set_word, p.completes, jnp.bool_(True))
    return Words(
        fit_bucket=fit_bucket,
        below=pick(refills, NONE, below),
        refills=refills,
        clears=clears,
        clear_word=clear_word,
        cleared=cleared,
        set_word=set_word,
        marked=marked,
        tops=tops,
    )


def iterate(
    limits: Limits, knobs: Knobs, tables: Tables | None, look: Look, f: Forming, p: Prompt, completion: jax.Array
) -> Iteration:
    """The iteration, and a leap: decodes to the next completion, or chunks of the prompt that has just got one."""
    prompts = f.starts | (f.prefills & (~p.completes | (p.left == 0) | (p.joined == f.running)))
    runs = prompts | f.decoding
    width = pick(knobs.padding, f.running, f.decodes)
    billed = pick(f.decoding, width, 0)
    context = f.context + billed
    pairs = pick(f.decoding, 0, p.pairs)
    batch = leap.Batch(billed, pick(f.decoding, context, 0), p.tokens, p.rows, p.context, pairs)
    duration_ps, _ = leap.iteration_time(knobs, tables, batch)
    duration_ps = pick(runs, duration_ps, 0)

    decodes_on = runs & (p.joined == f.running)
    prompt_on = prompts & f.prefills & ~p.completes & (p.chunk > 0) & (completion > 0)
    n, done = pick(prompt_on, knobs.budget, 0).astype(jnp.int64), p.done.astype(jnp.int64)
    ahead = leap.Batch(
        pick(decodes_on, width, 0),
        pick(decodes_on, context + width, 0),
        pick(prompt_on, knobs.budget, 0),
        count(prompt_on),
        pick(prompt_on, p.done + knobs.budget, 0),
        n * done + (n * (n + 1) >> 1),
    )
    first_ps, per_context_ps = leap.iteration_time(knobs, tables, ahead)
    slope_ps = per_context_ps * ahead.decodes.astype(jnp.int64) + (knobs.prefill_ctx_ps + knobs.pair_ps * n) * n
    decode_leaps = jnp.minimum(completion, knobs.leap)
    if limits.statistics:
        decode_leaps = jnp.minimum(decode_leaps, leap.below(first_ps, slope_ps, bin_end(first_ps)))
    decode_leaps = pick(decodes_on, decode_leaps, 0)
    # The last chunk is the joiner's own, whatever is left of it.
    chunks = jnp.minimum(quotient(look.row[PROMPT] - p.done - 1, knobs.budget), knobs.leap)
    leaps = pick(prompt_on, chunks, decode_leaps)
    return Iteration(
        runs=runs,
        prompts=prompts,
        billed=billed,
        context=p.context + batch.context,
        duration_ps=duration_ps,
        end_ps=f.clock_ps + duration_ps,
        leaps=leaps,
        decode_leaps=decode_leaps,
        leap_tokens=pick(prompt_on, leaps * knobs.budget, 0),
        width=width,
        first_ps=first_ps,
        slope_ps=slope_ps,
        leap_ps=leap.span(first_ps, slope_ps, leaps),
        starts_decoding=prompts & (decode_leaps > 0),
    )


def write(
    limits: Limits, knobs: Knobs, s: State, look: Look, f: Forming, p: Prompt, w: Words, i: Iteration,
    nothing: jax.Array,
) -> jax.Array:  # fmt: skip
    """The memory after the step: two half rows and ten single cells."""
    gone, row = look.gone, look.row
    sink_row = limits.requests * ROW + nothing
    departure = gone[WINDOW:].at[LAST_TOKEN - WINDOW : PREEMPTIONS - WINDOW].set(jnp.stack(split_time(s.clock_ps)))
    departure = departure.at[GENERATED - WINDOW].set(gone[OUTPUT])
    # Rows of the first iteration learn its start when they finish: the batch is not complete when they are computed.
    opens = f.prefills & (p.chunk > 0) & (s.prompt_done == 0)
    entry = jnp.stack(
        [
            pick(p.completes, w.below, row[NEXT]),
            *(row[field] for field in range(NEXT + 1, FIRST_SCHEDULED)),
            *(pick(opens, word, row[FIRST_SCHEDULED + j]) for j, word in enumerate(split_time(f.clock_ps))),
            pick(p.completes, s.log_size, row[FIRST_TOKEN]),
            row[FIRST_TOKEN + 1],
        ]
    )
    starts = [
        pick(look.finishes, look.finisher * ROW, sink_row) + WINDOW,
        pick(p.chunk > 0, look.joiner * ROW, sink_row),
    ]
    memory = write_windows(s.memory, starts, [departure, entry])

    logs = i.prompts & p.fresh
    log = limits.log + 2 * s.log_size
    learns = look.finishes & (gone[FIRST_SCHEDULED + 1] == NONE)
    first_scheduled = look.finisher * ROW + FIRST_SCHEDULED
    bucket = limits.buckets + (s.now & (limits.ring - 1))
    end_low, end_high = split_time(i.end_ps)
    cells = [
        (look.finishes & ~w.refills, bucket, gone[NEXT]),
        (w.clears & ~(p.completes & (w.set_word == w.clear_word)), limits.words + w.clear_word, w.cleared),
        (p.completes, limits.buckets + w.fit_bucket, look.joiner),
        (p.completes, limits.words + w.set_word, w.marked),
        (logs, log, end_low),
        (logs, log + 1, end_high),
        (learns, first_scheduled, s.prompt_first),
        (learns, first_scheduled + 1, s.prompt_last),
    ]
    if limits.closed_loop:
        back_low, back_high = split_time(s.clock_ps + knobs.think_ps)
        back = limits.arrivals + 2 * s.arrivals_known
        cells += [(look.returns, back, back_low), (look.returns, back + 1, back_high)]
    return write_cells(memory, limits.sinks, cells)


def add_up(
    knobs: Knobs, s: State, look: Look, f: Forming, p: Prompt, i: Iteration, waiting: jax.Array, gap_ps: jax.Array
) -> Statistics:
    """The sums with this step's iterations; `gap_ps` lies between the first two tokens of a finished row."""
    old = s.statistics
    used, iterations, time_ps = knobs.blocks - f.free, count(i.runs) + i.leaps, i.duration_ps + i.leap_ps
    above = used > knobs.blocks - blocks_for(knobs.blocks, jnp.int32(10))
    prompts = pick(i.runs, p.tokens, 0) + i.leap_tokens
    tokens = prompts + i.billed + i.decode_leaps * i.width
    unqueued = leap.started_before(i.first_ps, i.slope_ps, f.arrives_ps - i.end_ps, i.leaps)
    refused = count(i.runs & (f.arrives_ps <= f.clock_ps)) + i.leaps - unqueued
    decoded = s.preempted & f.decoding
    gaps = {
        "iteration": (i.duration_ps, pick(decoded, f.decodes, 0)),
        "leap": (i.first_ps, (i.decode_leaps - count(i.starts_decoding)) * f.decodes),
        "first": (gap_ps, count(look.finishes & (look.gone[OUTPUT] > 1))),
    }
    bins = jnp.stack([itl_bin(gap) for gap, _ in gaps.values()])
    return old._replace(
        kv_block_ps=old.kv_block_ps.plus((used, time_ps)),
        running_ps=old.running_ps.plus((f.running, time_ps)),
        above_90_ps=old.above_90_ps + pick(above, time_ps, 0),
        kv_peak=jnp.maximum(old.kv_peak, pick(i.runs, used, 0)),
        running_max=jnp.maximum(old.running_max, pick(i.runs, f.running, 0)),
        waiting_max=jnp.maximum(old.waiting_max, pick(i.runs, waiting, 0)),
        slot_rows=old.slot_rows + (f.decodes * iterations).astype(jnp.int64),
        tokens=old.tokens + tokens.astype(jnp.int64),
        prefill_tokens=old.prefill_tokens + prompts.astype(jnp.int64),
        refused_seats=old.refused_seats + refused,
        itl=old.itl.at[bins].add(jnp.stack([weight for _, weight in gaps.values()])),
    )


def step(
    limits: Limits, knobs: Knobs, tables: Tables | None, s: State, on: jax.Array | None = None
) -> tuple[State, Event | None]:
    """The next event of one simulation; a simulation that has ended stays as it is. For `on` see `fence`."""
    look = look_up(limits, knobs, s)
    small = s._replace(memory=jnp.int32(0))

    def schedule() -> tuple[Forming, Prompt]:
        f = form(knobs, small, look)
        return f, compute_prompt(knobs, small, look, f)

    f, p = fence(on, schedule)
    w = mark_calendar(limits, s, look, p)
    now = s.now + count(f.decoding)
    changed = [(w.set_word, w.marked), (w.clear_word, w.cleared)]
    completion = next_completion(limits, s.memory, w.tops, changed, now)
    i = fence(on, lambda: iterate(limits, knobs, tables, look, f, p, completion))

    # No write may overtake a read of this step, or XLA copies the memory: all reads lead to `nothing`.
    nothing, gap_ps = jnp.minimum(i.leaps, 0), jnp.int64(0)
    if limits.statistics:
        low, high = read(s.memory, limits.log + 2 * jnp.maximum(look.gone[FIRST_TOKEN], 0), 2)
        gap_ps = s.pairs - join_time(low, high)
        nothing = nothing + pick(look.finishes, jnp.minimum(high, 0), 0)
    memory = write(limits, knobs, s, look, f, p, w, i, nothing)

    statistics, event = s.statistics, None
    if limits.statistics or limits.trace:
        # Requests that wait after the (last) schedule() call of this step.
        last_ps = i.end_ps + leap.span(i.first_ps, i.slope_ps, i.leaps - 1)
        waiting = arrived_by(limits, memory, f.fresh_head, pick(i.leaps > 0, last_ps, f.clock_ps))
        if limits.statistics:
            statistics = fence(on, lambda: add_up(knobs, small, look, f, p, i, waiting, gap_ps))
        if limits.trace:
            none = jnp.int32(NONE)
            event = Event(
                finished=pick(look.finishes, look.finisher, none),
                preempted=none,
                continued=pick(f.prefills & (p.chunk > 0), look.joiner, none),
                continued_tokens=p.chunk,
                admitted=pick(f.takes, look.joiner, none),
                admitted_tokens=p.chunk,
                hit_tokens=jnp.int32(0),
                ran=i.runs,
                look_ps=f.clock_ps,
                start_ps=f.clock_ps,
                duration_ps=i.duration_ps,
                running=f.running,
                waiting=waiting,
                prefill_tokens=p.tokens,
                decodes=i.billed,
                context=i.context,
                free=f.free,
            )

    decoded = s.preempted & ~look.ends
    # `pairs`: of the iteration's chunks, 0 before the next one; then the end of the batch's first decode iteration.
    pairs = pick(i.starts_decoding, i.end_ps + i.first_ps, pick(i.prompts, 0, p.pairs))
    # Stuck, the clock stands at the end of the last iteration.
    clock_ps = pick(f.waits, jnp.minimum(f.arrives_ps, f.deadline_ps), i.end_ps + i.leap_ps)
    mark_low, mark_high = split_time(f.mark_ps)
    clock_ps = pick(f.stuck & (s.iterations > 0), s.clock_ps, clock_ps)
    status = pick(f.over, jnp.int32(Status.DONE), pick(f.stuck, jnp.int32(Status.STUCK), s.status))
    return s._replace(
        memory=memory,
        tops=w.tops,
        clock_ps=clock_ps,
        now=now + i.decode_leaps,
        free=f.free,
        decodes=f.decodes,
        context=f.context + i.billed + i.decode_leaps * i.width,
        running=f.running,
        fresh_head=f.fresh_head,
        prompt_first=mark_low,
        prompt_last=mark_high,
        prompt_done=p.done + i.leap_tokens,
        log_size=s.log_size + count(i.prompts & p.fresh),
        arrivals_known=s.arrivals_known + count(look.returns),
        status=pick(look.active & (clock_ps >= OVERTIME), jnp.int32(Status.OVERTIME), status),
        iterations=s.iterations + count(i.runs) + i.leaps,
        scan_steps=s.scan_steps + count(look.active),
        called=(s.called | f.takes | f.prefills) & ~i.runs,
        begun=f.begun,
        preempted=decoded | f.decoding | i.starts_decoding,
        left=p.left,
        prefill_tokens=pick(i.runs, 0, p.tokens),
        prefill_rows=pick(i.runs, 0, p.rows),
        prefill_context=pick(i.runs, 0, p.context),
        pairs=pick(f.decoding & ~decoded, i.end_ps, pairs),
        joined=p.joined,
        joined_fresh=p.fresh & ~i.runs,
        statistics=statistics,
    ), event
