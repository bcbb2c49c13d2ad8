"""One event of continuous batching: a finish or a preemption, an admission, an iteration and a leap.

A step does at most one of each; what cannot be done in it is left to the next, with the clock standing still. So an
iteration takes as many steps as it has finishes, preemptions, admissions or prompts in progress, and the iterations
after it up to the next event take none.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine import inflow, leap, priority, roster
from jaxsim.engine.blocks import add_phase, behind_phase, blocks_for, blocks_taken, quotient, remainder
from jaxsim.engine.cache import ALL, START, STAYS, Cache, busy
from jaxsim.engine.calendar import bit, mark_word, next_completion
from jaxsim.engine.chains import Chains
from jaxsim.engine.fence import fence
from jaxsim.engine.layout import (
    BEHIND,
    BELOW,
    FIRST_SCHEDULED,
    FIRST_TOKEN,
    FIT,
    GENERATED,
    INFINITE,
    LAST_TOKEN,
    LINK,
    NEXT,
    NONE,
    ORDER,
    OUTPUT,
    OVERTIME,
    PREEMPTIONS,
    PREV,
    PROMPT,
    RECOMPUTED,
    ROW,
    SWAPPED,
    WINDOW,
    Knobs,
    Limits,
    Tables,
    arrivals,
    arrived_by,
    join_time,
    read_cell,
    read_row,
    split_time,
    write_cells,
    write_windows,
)
from jaxsim.engine.prefix import work
from jaxsim.engine.schedule import (
    Look,
    Pass1,
    Pass2,
    PhaseChange,
    Prompts,
    admit,
    computed_tokens,
    count,
    depart,
    phase_change,
    prompts_in_progress,
)
from jaxsim.engine.state import Event, State
from jaxsim.engine.statistics import Stretch, bin_end
from jaxsim.engine.types import Status

OPERATIONS = 2  # on the prefix cache in one step


class Words(NamedTuple):
    """The calendar's bitmap where this step changes it."""

    clears: jax.Array  # bool: a bucket becomes empty
    clear_word: jax.Array
    cleared: jax.Array
    set_word: jax.Array
    marked: jax.Array
    tops: jax.Array  # [Limits.tops]


class Iteration(NamedTuple):
    """The iteration that is complete with this step, if one is, and the state after it."""

    works: jax.Array  # bool: it schedules tokens
    duration_ps: jax.Array  # int64, 0 unless `works`
    end_ps: jax.Array  # int64
    now: jax.Array
    phase: jax.Array  # of the requests that take a block in the next iteration
    running: jax.Array
    free: jax.Array
    decodes: jax.Array
    context: jax.Array
    chunk: jax.Array  # of the prompt in progress in each iteration of a leap, or 0
    first_ps: jax.Array  # int64, time of the next iteration if nothing changes
    slope_ps: jax.Array  # int64, by which each further one is longer


class Leap(NamedTuple):
    """Iterations like the last one, after it."""

    iterations: jax.Array
    before_arrival: jax.Array  # of them, those that start before the next arrival; too many if it is not awaited
    time_ps: jax.Array  # int64
    blocks: jax.Array
    full: jax.Array  # bool: no seat is free
    queued: jax.Array  # bool: a request waits at the start


def look_up(limits: Limits, knobs: Knobs, s: State, settle_row: jax.Array | None) -> Look:
    """Who is concerned: a finished request or the next victim, and a prompt in progress or the head of the queue."""
    active = s.status == Status.RUNNING
    if limits.prefix:
        active = active & ~busy(s.cache) & ~s.cache.overflow
    if settle_row is not None:
        # Gaps of requests that resumed in the last iteration are counted one a step, before their rows change.
        active = active & ((s.statistics.settle == NONE) | (settle_row[LINK] == NONE))
    finisher = read_cell(s.memory, limits.buckets + (s.now & (limits.ring - 1)))
    finishes = active & (finisher != NONE)
    leaver = jnp.where(finishes, finisher, s.newest)
    prompt = jnp.where(s.begun, s.cursor, s.prompt_first)
    returns, returned, back_ps = jnp.bool_(False), jnp.int32(0), s.clock_ps
    if limits.loops:
        # First the clients whose requests have finished, then those who were turned away.
        comes = finishes | (active & (s.rejected.told > 0)) if limits.returns else finishes
        returns, back_ps = comes & (s.arrivals_known < knobs.num_requests), s.clock_ps + knobs.think_ps
        returned = count(returns & (back_ps <= s.look_ps))
    gate: Any = None
    if limits.inflow and not limits.priority:
        gate = inflow.judge(limits, knobs, s.inflow, s.memory, s.fresh_head, s.preempted_count, s.look_ps, returned)
        arrives_ps, arrived = arrivals(limits, s.memory, gate.head)[0], gate.queue.waiting
        arrives_next_ps = arrivals(limits, s.memory, gate.next)[0]
    else:
        arrives_ps, arrives_next_ps = arrivals(limits, s.memory, s.fresh_head)
        arrived = arrived_by(limits, s.memory, s.fresh_head, s.look_ps) + returned if limits.threshold else jnp.int32(0)
    head = jnp.where(s.preempted_head != NONE, s.preempted_head, s.fresh_head if gate is None else gate.head)
    if limits.swap:
        head = jnp.where(s.swap.head != NONE, s.swap.head, head)
    joiner = jnp.where(prompt != NONE, prompt, head)
    if limits.loops:
        first, second = (s.fresh_head, s.fresh_head + 1) if gate is None else (gate.head, gate.next)
        arrives_ps = jnp.where(returns & (s.arrivals_known == first), back_ps, arrives_ps)
        arrives_next_ps = jnp.where(returns & (s.arrivals_known == second), back_ps, arrives_next_ps)
    judged_ps: Any = None
    turn: Any = None
    if limits.returns and gate is not None:
        judged_ps = arrivals(limits, s.memory, gate.queue.end)[0]
        judged_ps = jnp.where(returns & (s.arrivals_known == gate.queue.end), back_ps, judged_ps)
    if limits.priority:
        turn = priority.turn(
            limits, knobs, s.queue, s.memory, active, s.fresh_head, s.look_ps, arrives_ps, arrives_next_ps
        )
        if limits.inflow:
            arrived = count(turn.enters)
            judged_ps = jnp.where(turn.arrives, arrives_next_ps, arrives_ps)
        if limits.threshold and not limits.roster:
            prompt = jnp.where(s.queue.planning, s.queue.cursor, prompt)
        leaver = jnp.where(finishes, finisher, turn.victim)
        joiner = jnp.where(prompt != NONE, prompt, turn.head)
        if limits.roster:
            joiner = jnp.where(s.queue.planning, s.queue.cursor, joiner)
        if limits.ends:
            leaver = jnp.where(roster.missing(s.queue), joiner, leaver)
    waits: Any = None
    if limits.inflow and limits.priority:
        waits = turn.more_enter
    if limits.returns:
        more_come = s.rejected.told - count(returns & ~finishes) > 0
        waits = more_come if waits is None else waits | more_come
    gone, row, prompted = read_row(s.memory, leaver), read_row(s.memory, joiner), prompt != NONE
    if limits.roster:
        in_prompt = row[FIT] < 0 if limits.threshold else joiner == s.prompt_first
        prompted = jnp.where(s.queue.planning, in_prompt, prompted)
    joiner_ticket = priority.ticket(limits, s.memory, joiner) if limits.priority else None
    before: Any = None
    if joiner_ticket is not None and limits.ends:
        behind = joiner_ticket[BEHIND]
        before = read_cell(s.memory, jnp.maximum(behind, 0) * ROW + PREV)
        before = jnp.where(behind == NONE, s.prompt_last, before)
    return Look(
        active=active,
        finishes=finishes,
        returns=returns,
        waits=waits,
        judged_ps=judged_ps,
        leaver=leaver,
        gone=gone,
        prompted=prompted,
        joiner=joiner,
        row=row,
        arrives_ps=arrives_ps,
        arrives_next_ps=arrives_next_ps,
        arrived=arrived,
        turn=turn,
        gate=gate,
        leaver_ticket=priority.ticket(limits, s.memory, leaver) if limits.priority else None,
        joiner_ticket=joiner_ticket,
        before=before,
    )


def collect(s: State, look: Look, p: Pass1, a: Pass2) -> dict[str, jax.Array]:
    """The iteration as scheduled so far, by field of State."""
    known = look.row[PROMPT] + look.row[GENERATED]
    tokens = jnp.where(a.admits, a.tokens, p.chunk)
    before = jnp.where(a.admits, 0 if a.hits is None else a.hits.tokens, p.computed)
    late = p.late if a.hits is None else p.late | a.hits.late
    scheduled = (a.admits | p.continues) & ~late
    n = tokens.astype(jnp.int64)
    return {
        "prefill_tokens": s.prefill_tokens + jnp.where(scheduled, tokens, 0),
        "prefill_rows": s.prefill_rows + count(scheduled),
        "prefill_context": s.prefill_context + jnp.where(scheduled, before + tokens, 0),
        "pairs": s.pairs + jnp.where(scheduled, n * before.astype(jnp.int64) + (n * (n + 1) >> 1), 0),
        "late_decodes": s.late_decodes + count(late),
        "late_context": s.late_context + jnp.where(late, before + 1, 0),
        "joined": s.joined + count(a.joins),
        "joined_context": s.joined_context + jnp.where(a.joins, known, 0),
        "joined_fresh": s.joined_fresh | a.first_token,
    }


def mark_calendar(limits: Limits, s: State, look: Look, p: Pass1, a: Pass2, fit_bucket: jax.Array) -> Words:
    """The bitmap without the bucket that a departure empties and with the one that a request enters."""
    gone = look.gone
    bucket = jnp.where(look.finishes, s.now, gone[FIT]) & (limits.ring - 1)
    lone = (gone[PREV] == NONE) & (gone[NEXT] == NONE)
    clears = (look.finishes | p.decoding) & lone
    clear_word, set_word = bucket >> 5, fit_bucket >> 5
    cleared = read_cell(s.memory, limits.words + clear_word)
    cleared = jnp.where(clears, cleared & ~bit(bucket), cleared)
    marked = read_cell(s.memory, limits.words + set_word)
    marked = jnp.where(set_word == clear_word, cleared, marked)
    marked = jnp.where(a.joins, marked | bit(fit_bucket), marked)
    tops = mark_word(s.tops, clear_word, clears & (cleared == 0), jnp.bool_(False))
    tops = mark_word(tops, set_word, a.joins, jnp.bool_(True))
    return Words(clears, clear_word, cleared, set_word, marked, tops)


def iterate(
    knobs: Knobs, tables: Tables | None, s: State, p: Pass1, a: Pass2, prompts: Prompts, c: dict[str, jax.Array]
) -> Iteration:
    """The iteration, and the time of those after it as long as nothing changes."""
    works = a.runs & (a.left < knobs.budget)
    batch = leap.Batch(
        p.decodes + c["late_decodes"],
        p.context + p.decodes + c["late_context"],
        c["prefill_tokens"],
        c["prefill_rows"],
        c["prefill_context"],
        c["pairs"],
    )
    duration_ps, _ = leap.iteration_time(knobs, tables, batch)
    if a.swap is not None:
        duration_ps = duration_ps + a.swap.moved.astype(jnp.int64) * knobs.swap_block_ps
    duration_ps = jnp.where(works, duration_ps, 0)
    decodes = p.decodes + jnp.where(works, c["joined"], 0)
    context = p.context + jnp.where(works, p.decodes + c["joined_context"], 0)

    # Without a threshold a prompt in progress takes all that the decodes leave of the budget.
    in_progress = prompts.first != NONE
    chunk = jnp.where(in_progress, knobs.budget - decodes, 0)
    n = chunk.astype(jnp.int64)
    steady = leap.Batch(
        decodes,
        context + decodes,
        chunk,
        count(in_progress),
        jnp.where(in_progress, prompts.done + chunk, 0),
        n * prompts.done.astype(jnp.int64) + (n * (n + 1) >> 1),
    )
    first_ps, per_context_ps = leap.iteration_time(knobs, tables, steady)
    slope_ps = per_context_ps * decodes.astype(jnp.int64) + (knobs.prefill_ctx_ps + knobs.pair_ps * n) * n
    return Iteration(
        works=works,
        duration_ps=duration_ps,
        end_ps=s.clock_ps + duration_ps,
        now=s.now + count(works),
        phase=remainder(-s.now - count(works), knobs.block_size),
        running=a.running - jnp.where(a.runs, p.held, 0),
        free=a.free + jnp.where(a.runs, p.held_blocks, 0),
        decodes=decodes,
        context=context,
        chunk=chunk,
        first_ps=first_ps,
        slope_ps=slope_ps,
    )


def bound_leap(
    limits: Limits, knobs: Knobs, s: State, p: Pass1, a: Pass2, prompts: Prompts, i: Iteration, completion: jax.Array,
    pending: jax.Array, judged_ps: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Iterations that may follow at once, whether only they count (and not an arrival), and whether a request waits."""
    in_progress = prompts.first != NONE
    full = i.running >= knobs.seats
    # Blocks only shrink until a request leaves, so a head that was refused for want of blocks stays refused.
    stays_refused = a.refused & (~a.over_budget | (a.wanted > knobs.budget - i.decodes)) & (p.held == 0)
    if limits.threshold:  # an arrival may shorten the chunk that a waiting prompt asks for
        stays_refused = jnp.bool_(False)
    blocked = full | in_progress | stays_refused
    look_ps = s.clock_ps if limits.asynchronous else i.end_ps
    if limits.priority:
        queued = a.queued > 0
    else:
        queued = a.preempted_count > 0 if limits.swap else a.preempted_head != NONE
    queued = queued | (a.arrives_ps <= look_ps)
    rest = quotient(prompts.known - prompts.done - 1, jnp.maximum(i.chunk, 1))
    bound = jnp.where(in_progress, jnp.minimum(completion, rest), jnp.where(i.decodes > 0, completion, 0))
    bound = jnp.minimum(bound, leap.fitting(i.free, i.decodes, i.chunk, knobs.block_size))
    bound = jnp.minimum(bound, knobs.leap)
    stop = ~i.works | (queued & ~blocked)
    if limits.priority:  # an arrival may become the head
        blocked = full | in_progress
        stop = stop | ((a.arrives_ps <= look_ps) & ~blocked)
    if limits.threshold:
        stop = stop | in_progress
    if judged_ps is not None:
        stop = stop | (judged_ps <= look_ps)
    if limits.prefix:
        # Blocks that are registered in between could be hits of a prompt behind, or of the head.
        stop = stop | in_progress | (a.refused & a.hits.open_to_change)
        if limits.asynchronous:  # blocks come back before the next iteration
            stop = stop | (p.held > 0)
        fills_at = -i.now if limits.asynchronous else -i.now - 1
        fills = behind_phase(s.cache.eager_need, remainder(fills_at, knobs.block_size), knobs.block_size)
        bound = jnp.minimum(bound, jnp.min(jnp.where(s.cache.eager_need > 0, fills, bound)))
    if limits.statistics:
        # Stop where the ITL bin changes, where 90 % of the blocks are passed and where a resumed request's gap is to be
        # counted; the growth of a prompt's blocks has no closed form.
        bound = jnp.minimum(bound, leap.below(i.first_ps, i.slope_ps, bin_end(i.first_ps)))
        mark = i.free - blocks_for(knobs.blocks, jnp.int32(10))
        passing = leap.fitting(mark, i.decodes, i.chunk, knobs.block_size)
        bound = jnp.where(mark >= 0, jnp.minimum(bound, passing), bound)
        stop = stop | in_progress | (pending != NONE)
    return jnp.where(stop, 0, bound), blocked, queued


def leap_on(
    limits: Limits, knobs: Knobs, a: Pass2, prompts: Prompts, i: Iteration, need: jax.Array, bound: jax.Array,
    blocked: jax.Array, queued: jax.Array, judged_ps: jax.Array | None,
) -> Leap:  # fmt: skip
    arrives_ps = a.arrives_ps
    if judged_ps is not None:
        arrives_ps = jnp.where(queued, judged_ps, arrives_ps)
        blocked = blocked & (judged_ps == INFINITE)
    before_arrival = leap.started_before(i.first_ps, i.slope_ps, arrives_ps - i.end_ps, bound)
    if limits.asynchronous:  # each iteration is scheduled when the one before it starts
        before_arrival = jnp.minimum(before_arrival + 1, bound)
    leaps = jnp.where(blocked, bound, before_arrival)
    blocks = blocks_taken(need, i.phase, leaps, knobs.block_size)
    held = blocks_for(prompts.done, knobs.block_size)
    grown = blocks_for(prompts.done + leaps * i.chunk, knobs.block_size) - held
    return Leap(
        iterations=leaps,
        before_arrival=before_arrival,
        time_ps=leap.span(i.first_ps, i.slope_ps, leaps),
        blocks=blocks + jnp.where(i.chunk > 0, grown, 0),
        full=i.running >= knobs.seats,
        queued=queued,
    )


def write(
    limits: Limits, knobs: Knobs, s: State, look: Look, p: Pass1, a: Pass2, i: Iteration, words: Words,
    below_in_bucket: jax.Array, leaps: jax.Array, pending_before: jax.Array | None, joined_fresh: jax.Array,
    marks: priority.Marks | None,
) -> jax.Array:  # fmt: skip
    """The memory after the step: two half rows and a dozen single cells."""
    pick = jnp.where
    gone, row = look.gone, look.row
    fit = s.now + row[OUTPUT] - row[GENERATED]
    fit_bucket = fit & (limits.ring - 1)
    # No write may overtake a read of this step, or XLA copies the memory: those that lead to `leaps` come first.
    nothing = jnp.minimum(leaps, 0)
    if marks is not None:
        nothing = jnp.minimum(nothing, marks.least)
    sink_row = limits.requests * ROW + nothing
    clock_low, clock_high = split_time(s.clock_ps)
    knows_last = p.decoding | look.finishes
    lost, queue = p.preempts | p.drops, s.preempted_head
    if limits.swap:
        lost, queue = lost & ~p.swaps, pick(p.swaps, s.swap.head, queue)
    departure = jnp.stack(
        [
            pick(knows_last, clock_low, gone[LAST_TOKEN]),
            pick(knows_last, clock_high, gone[LAST_TOKEN + 1]),
            gone[PREEMPTIONS] + count(p.preempts | p.drops),
            gone[RECOMPUTED] + pick(lost, p.victim_computed, 0),
            pick(look.finishes | p.drops, gone[OUTPUT], p.generated),
            gone[PROMPT],
            gone[OUTPUT],
            gone[LINK] if limits.priority else pick(p.preempts, queue, gone[LINK]),
        ]
    )
    opens = a.admits & (row[PREEMPTIONS] == 0)
    place = [below_in_bucket, jnp.int32(NONE), fit]
    enters = a.joins
    if limits.threshold:
        enters = enters | a.admits | p.continues
        in_list = [pick(a.admits, NONE, row[NEXT]), pick(a.starts_prompt, s.prompt_last, row[PREV])]
        in_list += [~pick(a.admits, computed_tokens(a), p.computed + p.chunk)]
        if limits.ends:
            enters = enters | p.miss.decoding
            late = p.miss.behind, p.miss.before, ~p.victim_computed
            in_list = [pick(p.miss.decoding, mine, prompt) for mine, prompt in zip(late, in_list, strict=True)]
        place = [pick(a.joins, calendar, prompt) for calendar, prompt in zip(place, in_list, strict=True)]
    enters = enters | a.admits
    entry = jnp.stack(
        [
            *place,
            pick(a.admits, NONE if limits.priority else p.newest, row[BELOW]),
            pick(opens, clock_low, row[FIRST_SCHEDULED]),
            pick(opens, clock_high, row[FIRST_SCHEDULED + 1]),
            pick(a.first_token, s.log_size, row[FIRST_TOKEN]),
            row[FIRST_TOKEN + 1],
        ]
    )
    departs = look.finishes | p.preempts | p.drops
    if limits.ends:
        departs = departs | p.miss.decoding
    starts = [pick(departs, look.leaver * ROW, sink_row) + WINDOW, pick(enters, look.joiner * ROW, sink_row)]
    memory = write_windows(s.memory, starts, [departure, entry])

    end_low, end_high = split_time(i.end_ps)
    logs = i.works & joined_fresh
    log = limits.log + 2 * s.log_size + nothing
    scheduled = look.finishes | p.decoding
    unlinks = scheduled | p.in_prompt if limits.threshold else scheduled
    bucket = limits.buckets + (pick(look.finishes, s.now, gone[FIT]) & (limits.ring - 1))
    follows = gone[PREV] != NONE
    same_word = a.joins & (words.set_word == words.clear_word)
    cells = [
        (unlinks & (scheduled | follows), pick(follows, gone[PREV] * ROW + NEXT, bucket), gone[NEXT]),
        (unlinks & (gone[NEXT] != NONE), gone[NEXT] * ROW + PREV, gone[PREV]),
        (words.clears & ~same_word, limits.words + words.clear_word, words.cleared),
        (a.joins, limits.buckets + fit_bucket, look.joiner),
        (a.joins & (below_in_bucket != NONE), below_in_bucket * ROW + PREV, look.joiner),
        (a.joins, limits.words + words.set_word, words.marked),
        (logs, log, end_low),
        (logs, log + 1, end_high),
    ]
    if limits.loops:
        back_low, back_high = split_time(s.clock_ps + knobs.think_ps)
        back = limits.arrivals + 2 * s.arrivals_known
        cells += [(look.returns, back, back_low), (look.returns, back + 1, back_high)]
    if limits.threshold:
        neighbour, follower = pick(a.starts_prompt, s.prompt_last, row[PREV]), row[NEXT]
        enters_list, changes, preceding = a.starts_prompt, p.prompt_complete, row[PREV]
        if limits.ends:
            misses = p.miss.decoding
            neighbour = pick(misses, p.miss.before, neighbour)
            follower = pick(misses, p.miss.behind, follower)
            enters_list, changes = enters_list | misses, changes | misses
            preceding = pick(misses, look.joiner, preceding)
        cells += [
            (
                (changes | enters_list) & (neighbour != NONE),
                neighbour * ROW + NEXT,
                pick(enters_list, look.joiner, follower),
            ),
            (changes & (follower != NONE), follower * ROW + PREV, preceding),
        ]
    if pending_before is not None:
        cells += [(a.joins & ~a.first_token, look.joiner * ROW + LINK, pending_before)]
    if limits.swap:
        cells += [(p.swaps, look.leaver * ROW + SWAPPED, p.victim_computed)]
    if look.gate is not None:
        cells += [(look.gate.links, look.gate.link_from * ROW + LINK, look.gate.link_to)]
    if marks is not None:
        cells += marks.cells
    return write_cells(memory, limits.sinks, cells)


def post(limits: Limits, knobs: Knobs, s: State, look: Look, p: Pass1, a: Pass2, leap_blocks: jax.Array) -> Cache:
    """The cache with the jobs that follow from a step."""
    c, pick, none = s.cache, jnp.where, jnp.int32(NONE)
    leaves = look.finishes | p.preempts | p.drops
    context = p.victim_computed + count(p.decoding & s.begun)
    context = pick(look.finishes, look.gone[PROMPT] + look.gone[OUTPUT] - 1, context)
    grows = p.continues | a.admits
    begins = p.begun & ~s.begun
    looks = a.hits.looks
    if limits.roster:
        context = pick(p.preempts, p.turn.tokens, context)
        grows = grows | (p.plans & look.prompted)
        # Where the iteration is planned the eager have had their turns with the others.
        begins = p.turn.opens | (begins & ~p.queue.planned)
    searches = looks | a.admits
    takes = a.hits.takes + leap_blocks
    plain = jnp.minimum(takes, c.anonymous)
    blocks = blocks_for(context, knobs.block_size)
    last = leaves & ~p.more_finish
    alone = last & (c.release == NONE)
    if limits.ends and limits.asynchronous:
        alone = jnp.bool_(False)  # among those that miss their turn, which enter the list as well, each has its place
    leaver, finished, blocks_alone, waits_alone = look.leaver, look.finishes, blocks, c.waits_alone
    enlists, complete = leaves & ~alone, pick(leaves, last, c.complete)
    if limits.asynchronous:
        # Those that the iteration in flight finishes keep their blocks until this one runs, unless they are preempted.
        waits, enlists = alone & look.finishes, enlists & look.finishes
        departs = p.preempts | p.drops
        alone = departs | (a.runs & (c.waits_alone != NONE))
        leaver, finished = pick(departs, look.leaver, c.waits_alone), ~departs
        blocks_alone = pick(departs, blocks, c.enlist_blocks)
        complete = a.runs | (c.complete & ~look.finishes)
        waits_alone = pick(a.runs | (p.drops & (look.leaver == c.waits_alone)), none, c.waits_alone)
        waits_alone = pick(waits, look.leaver, waits_alone)
    enlist_blocks, starts_list = pick(look.finishes, blocks, c.enlist_blocks), leaves
    if limits.ends:
        misses, stays = p.miss.decoding, STAYS - context
        if limits.asynchronous:
            enlists, starts_list, complete = enlists | misses, leaves | misses, complete & ~misses
            enlist_blocks = pick(misses, stays, enlist_blocks)
        else:
            alone, blocks_alone = alone | misses, pick(misses, stays, blocks_alone)
    walk_until = pick(begins | (p.cursor == NONE), ALL, c.walk_until)
    if limits.threshold:
        until = look.joiner_ticket[ORDER] if limits.roster else look.joiner
        walk_until = pick(look.prompted & p.begun & (p.continues | (p.cursor != NONE)), until, walk_until)
    if limits.roster:
        walk_until = pick(p.turn.opens, 0, pick(s.queue.planning, c.walk_until, walk_until))
        walk_until = pick(p.plans, look.joiner_ticket[ORDER] + 1, walk_until)
        c = c._replace(
            alone_granted=pick(alone, p.preempts & p.turn.granted, c.alone_granted),
            orders=c.orders._replace(
                walk=pick(begins, c.orders.eager_first, c.orders.walk),
                touch=pick(a.admits, s.queue.roster.admissions, c.orders.touch),
                enlist=pick(enlists, look.leaver_ticket[ORDER], c.orders.enlist),
            ),
        )
    return c._replace(
        taken=p.taken,
        anonymous=c.anonymous - plain,
        take=c.take + takes - plain,
        touch=pick(a.admits, look.joiner, c.touch),
        release=c.release if limits.roster else pick(a.runs & (c.release >= c.dropped), none, c.release),
        alone=pick(alone, leaver, c.alone),
        alone_blocks=pick(alone, blocks_alone, c.alone_blocks),
        alone_finished=pick(alone, finished, c.alone_finished),
        waits_alone=waits_alone,
        enlist=pick(enlists, look.leaver, c.enlist),
        enlist_blocks=enlist_blocks,
        enlist_after=pick(starts_list, none, c.enlist_after),
        complete=complete,
        dropped=pick(look.finishes, ALL, pick(p.drops, look.leaver, c.dropped)),
        release_at=pick(leaves, none, c.release_at),
        walk=pick(begins, c.eager_first, c.walk),
        walk_until=pick(look.active, walk_until, c.walk_until),
        register=pick(grows, look.joiner, c.register),
        register_tokens=pick(grows, pick(a.admits, computed_tokens(a), p.computed + p.chunk), c.register_tokens),
        register_joins=pick(grows, a.joins, c.register_joins),
        look=pick(looks, look.joiner, c.look),
        limit=pick(
            looks,
            quotient(look.row[PROMPT] + look.row[GENERATED] - 1, knobs.block_size),
            pick(a.admits, c.position, c.limit),
        ),
        position=pick(searches, 0, c.position),
        path=pick(searches, none, c.path),
        cursor=pick(searches, jnp.int32(START), c.cursor),
        idle=pick(searches, 0, c.idle),
        found=pick(searches | a.runs | p.preempts, none, c.found),
    )


def step(
    limits: Limits, knobs: Knobs, tables: Tables | None, chains: Chains | None, s: State, on: jax.Array | None
) -> tuple[State, Event | None]:
    """The next event of one simulation; a simulation that has ended stays as it is."""
    if chains is not None:
        for _ in range(OPERATIONS):
            cache, freed = work(limits, knobs, chains, s.now, s.cache, on)
            s = s._replace(cache=cache, free=s.free + freed)
    settle_row = read_row(s.memory, s.statistics.settle) if limits.statistics else None
    look = look_up(limits, knobs, s, settle_row)
    small = s._replace(memory=jnp.int32(0))
    if limits.prefix:
        small = small._replace(cache=s.cache._replace(memory=jnp.int32(0)))

    p = fence(on, lambda: depart(limits, knobs, small, look))
    a = fence(on, lambda: admit(limits, knobs, small, look, p))
    fit_bucket = (s.now + look.row[OUTPUT] - look.row[GENERATED]) & (limits.ring - 1)
    below_in_bucket = read_cell(s.memory, limits.buckets + fit_bucket)
    words = mark_calendar(limits, s, look, p, a, fit_bucket)

    def complete() -> tuple[Prompts, dict[str, jax.Array], PhaseChange, Iteration]:
        prompts = prompts_in_progress(limits, small, look, p, a)
        collected = collect(small, look, p, a)
        phases = phase_change(knobs, small, look, p, a)
        return prompts, collected, phases, iterate(knobs, tables, small, p, a, prompts, collected)

    prompts, collected, phases, i = fence(on, complete)
    need = add_phase(add_phase(s.need, phases.left, -phases.leaves), phases.joined, phases.joins)
    changed = [(words.set_word, words.marked), (words.clear_word, words.cleared)]
    completion = next_completion(limits, s.memory, words.tops, changed, i.now)
    pending = jnp.where(a.joins & ~a.first_token, look.joiner, s.statistics.pending)
    sent = s.arrivals_known + count(look.returns)
    rejected: Any = None
    judged_ps: Any = None
    if limits.returns:
        turned_away, rejected = inflow.after(limits, knobs, s.rejected, look, a.runs, sent)
        # Whom an iteration turns away comes again after it.
        judged_ps = jnp.where(turned_away, 0, jnp.where(sent < knobs.num_requests, look.judged_ps, INFINITE))
    bound, blocked, queued = fence(
        on, lambda: bound_leap(limits, knobs, small, p, a, prompts, i, completion, pending, judged_ps)
    )
    j = fence(on, lambda: leap_on(limits, knobs, a, prompts, i, need, bound, blocked, queued, judged_ps))

    pending_before = s.statistics.pending if limits.statistics else None
    marks: Any = priority.mark(limits, s.queue, s.memory, s.fresh_head, look, p, a) if limits.priority else None
    memory = write(
        limits, knobs, s, look, p, a, i, words, below_in_bucket, j.iterations, pending_before,
        collected["joined_fresh"], marks,
    )  # fmt: skip
    statistics, event = s.statistics, None
    # An empty schedule() waits for the iteration in flight, then tries again with what that has freed.
    drains = a.runs & ~i.works & s.in_flight
    idle = a.runs & ~i.works & ~p.preempted & ~drains
    leap_look_ps = leap.look(i.end_ps, i.first_ps, i.slope_ps, j.iterations, s.clock_ps, limits.asynchronous)
    if limits.statistics or limits.trace:
        # Requests that wait after the (last) schedule() call of this step.
        last_ps = leap.look(i.end_ps, i.first_ps, i.slope_ps, j.iterations - 1, s.clock_ps, limits.asynchronous)
        last_ps = jnp.where(j.iterations > 0, last_ps, s.look_ps)
        if look.gate is not None:
            fresh = inflow.waiting_at(limits, knobs, a.inflow, memory, a.preempted_count, last_ps)
        else:
            fresh = arrived_by(limits, memory, a.fresh_head, last_ps)
            if limits.inflow:
                fresh = jnp.clip(knobs.queue_limit - a.queued, 0, fresh)
        waiting = p.dropped + (a.queued if limits.priority else a.preempted_count) + fresh
    if settle_row is not None:
        gap_ps = s.clock_ps - join_time(settle_row[LAST_TOKEN], settle_row[LAST_TOKEN + 1])
        left_waiting = i.works & (a.head_waits | (p.dropped > 0))
        full = a.running >= knobs.seats
        by_seats, by_budget = ~p.preempted & full, (a.left == 0) | (a.refused & a.over_budget)
        counted = count(i.works)
        done = Stretch(
            works=i.works,
            leaps=j.iterations,
            duration_ps=i.duration_ps,
            leap_ps=j.time_ps,
            first_ps=i.first_ps,
            slope_ps=i.slope_ps,
            used=knobs.blocks - a.free,
            leap_used=knobs.blocks - i.free,
            leap_used_after=knobs.blocks - i.free + j.blocks,
            blocks=knobs.blocks,
            need=need,
            phase=i.phase,
            block_size=knobs.block_size,
            preempted=a.preempted_count,
            running=a.running,
            leap_running=i.running,
            rows=a.running * counted + i.running * j.iterations,
            waiting=jnp.where(a.runs & (i.works | p.preempted), waiting, 0),
            tokens=jnp.where(i.works, knobs.budget - a.left, 0) + j.iterations * i.decodes,
            prefill_tokens=jnp.where(i.works, collected["prefill_tokens"], 0),
            decodes=jnp.where(i.works, p.decodes, 0),
            leap_decodes=j.iterations * i.decodes,
            refused_seats=count(left_waiting & by_seats),
            refused_budget=count(left_waiting & ~p.preempted & ~full & by_budget),
            refused=count(left_waiting),
            leap_refused=j.iterations - jnp.where(j.queued, 0, jnp.minimum(j.before_arrival, j.iterations)),
            leap_by_seats=j.full,
            leap_by_budget=~j.full & a.over_budget,
            gap_ps=gap_ps,
            gaps=count(s.statistics.settle != NONE),
        )
        settled = jnp.where(s.statistics.settle == NONE, NONE, settle_row[LINK])
        statistics = fence(
            on,
            lambda: s.statistics.plus(done)._replace(
                settle=jnp.where(a.runs, pending, settled), pending=jnp.where(a.runs, NONE, pending)
            ),
        )
    if limits.trace:
        none = jnp.int32(NONE)
        event = Event(
            finished=jnp.where(look.finishes, look.leaver, none),
            preempted=jnp.where(p.preempts | p.drops, look.leaver, none),
            continued=jnp.where(p.continues, look.joiner, none),
            continued_tokens=p.chunk,
            admitted=jnp.where(a.admits, look.joiner, none),
            admitted_tokens=a.tokens,
            hit_tokens=jnp.int32(0) if a.hits is None else a.hits.tokens,
            ran=a.runs & (i.works | p.preempted),
            look_ps=s.look_ps,
            start_ps=s.clock_ps,
            duration_ps=i.duration_ps,
            running=a.running,
            waiting=waiting,
            prefill_tokens=collected["prefill_tokens"],
            decodes=p.decodes + collected["late_decodes"],
            context=p.context + p.decodes + collected["late_context"] + collected["prefill_context"],
            free=a.free,
            missed=jnp.where(p.miss.decoding, look.joiner, none) if limits.ends else None,
        )

    # An empty schedule: after a preemption try again at once, otherwise wait for the next arrival or stop.
    later_ps = jnp.int64(INFINITE)
    if limits.priority:
        later_ps = a.arrives_ps  # an arrival may become the head
    elif limits.threshold:
        # An arrival brings the threshold that a lone prompt lacked, with which it may fit.
        later = a.inflow.end if look.gate is not None else jnp.minimum(a.fresh_head + look.arrived, limits.requests)
        later_ps, _ = arrivals(limits, memory, later)
    elif limits.returns:
        later_ps = judged_ps
    wake_ps = jnp.where(a.head_waits, later_ps, a.arrives_ps)
    if rejected is not None:
        wake_ps = jnp.where(rejected.told > 0, s.clock_ps, wake_ps)
    wakes = idle & (wake_ps < INFINITE)
    over = idle & ~a.head_waits & ~wakes
    gets_token = i.works & (p.decodes + collected["late_decodes"] + collected["joined"] > 0)
    fruitless = count(a.runs & ~idle & ~gets_token) + jnp.where(i.decodes > 0, 0, j.iterations)
    fruitful = gets_token | ((j.iterations > 0) & (i.decodes > 0))
    barren = jnp.where(fruitful, 0, s.barren + fruitless)
    stuck = (idle & a.head_waits & ~wakes) | (look.active & (barren > knobs.patience))
    clock_ps = jnp.where(wakes, wake_ps, i.end_ps + j.time_ps)
    status = jnp.where(over, jnp.int32(Status.DONE), jnp.where(stuck, jnp.int32(Status.STUCK), s.status))
    status = jnp.where(look.active & (clock_ps >= OVERTIME), jnp.int32(Status.OVERTIME), status)
    cache, queue = None, None
    if limits.priority:
        queue = priority.after(p.queue, marks, a.queued, a.runs)
    if limits.prefix:
        cache = post(limits, knobs, s, look, p, a, j.blocks)
        status = jnp.where(s.cache.overflow, jnp.int32(Status.OVERFLOW), status)
    log_size = s.log_size + count(i.works & collected["joined_fresh"])
    collected = {name: jnp.where(a.runs, jnp.zeros_like(value), value) for name, value in collected.items()}
    return State(
        memory=memory,
        tops=words.tops,
        need=need,
        clock_ps=clock_ps,
        look_ps=jnp.where(wakes, wake_ps, jnp.where(i.works, leap_look_ps, jnp.where(drains, s.clock_ps, s.look_ps))),
        now=i.now + j.iterations,
        free=i.free - j.blocks,
        in_flight=jnp.where(a.runs, i.works, s.in_flight) if limits.asynchronous else s.in_flight,
        held=jnp.where(a.runs, 0, p.held),
        held_blocks=jnp.where(a.runs, 0, p.held_blocks),
        dropped=jnp.where(a.runs, 0, p.dropped),
        decodes=i.decodes,
        context=i.context + j.iterations * i.decodes,
        running=i.running,
        fresh_head=a.fresh_head,
        preempted_head=a.preempted_head,
        preempted_count=a.preempted_count,
        newest=a.newest,
        prompt_first=prompts.first,
        prompt_last=prompts.last,
        prompt_done=prompts.done + j.iterations * i.chunk,
        prompt_known=prompts.known,
        log_size=log_size,
        arrivals_known=sent,
        barren=barren,
        status=status,
        iterations=s.iterations + count(i.works) + j.iterations,
        scan_steps=s.scan_steps + count(s.status == Status.RUNNING),
        called=p.called & ~a.runs,
        begun=p.begun & ~a.runs,
        preempted=p.preempted & ~a.runs,
        threshold=p.threshold,
        cursor=jnp.where(a.runs, NONE, p.cursor),
        left=jnp.where(a.runs, 0, a.left),
        statistics=statistics,
        cache=cache,
        queue=queue,
        inflow=a.inflow,
        rejected=rejected,
        swap=a.swap._replace(moved=jnp.where(i.works, 0, a.swap.moved)) if limits.swap else None,
        **collected,
    ), event
