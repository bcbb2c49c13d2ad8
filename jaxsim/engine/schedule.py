"""The decisions of schedule(): who leaves, which prompt goes on, who is admitted.

The rules are those of vLLM 0.33.0 (v1/core/sched/scheduler.py); priority.py and plan.py say what the policy "priority"
changes. Under FCFS running requests are always ahead of waiting ones in the order of arrival. Three things follow:
- the victim of a preemption is the top of the stack of admissions, and the preempted stand in front of the queue;
- the requests that cannot get a block are the last ones, so all decodes may be scheduled as one count, before the
  prompts in progress, and requests are preempted until what remains fits;
- without a threshold only the last running request can have its prompt in progress, and then it uses up the budget.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine import roster
from jaxsim.engine import swap as swapping
from jaxsim.engine.blocks import blocks_for, quotient, remainder
from jaxsim.engine.layout import (
    BELOW,
    FIT,
    GENERATED,
    LINK,
    NEXT,
    NONE,
    OUTPUT,
    PREEMPTIONS,
    PREV,
    PROMPT,
    SWAPPED,
    Knobs,
    Limits,
)
from jaxsim.engine.plan import Outcome, revised, wish
from jaxsim.engine.state import State


class Look(NamedTuple):
    """What a step needs to know of the requests it concerns; read from the memory before anything is decided."""

    active: jax.Array  # bool
    finishes: jax.Array  # bool: `leaver` is finished
    returns: jax.Array  # bool: a client sends its next request
    waits: Any  # bool, with Limits.inflow: others are to come, or to be judged, before anything is scheduled
    judged_ps: Any  # int64, with Limits.returns: arrival of the first request that is not judged yet
    leaver: jax.Array  # a finished request, else the one to preempt if need be, or NONE
    gone: jax.Array  # [ROW], its row
    prompted: jax.Array  # bool: `joiner` is a running request whose prompt is in progress
    joiner: jax.Array  # if there is none the head of the queue; with Limits.roster also a decoding request to plan
    row: jax.Array  # [ROW], its row
    arrives_ps: jax.Array  # int64, arrival of the first fresh request
    arrives_next_ps: jax.Array  # int64, and of the one after it
    arrived: jax.Array  # fresh requests that have arrived; only with Limits.threshold, else 0
    turn: Any = None  # priority.Turn with Limits.priority
    gate: Any = None  # inflow.Gate with Limits.inflow
    leaver_ticket: Any = None  # [Limits.ticket] with Limits.priority
    joiner_ticket: Any = None
    before: Any = None  # with Limits.ends: the prompt in progress ahead of the request that is behind `joiner`


class Pass1(NamedTuple):
    """After a departure and pass 1 over the running requests."""

    more_finish: jax.Array  # bool: another request has finished, the rest must wait
    preempts: jax.Array  # bool
    drops: jax.Array  # bool: the victim needs no more iterations, it only waits for the one in flight
    decoding: jax.Array  # bool: the victim was decoding, or `leaver` misses its turn
    in_prompt: jax.Array  # bool: the victim's prompt was in progress
    generated: jax.Array  # output tokens of the victim
    victim_computed: jax.Array
    continues: jax.Array  # bool: the prompt in progress gets a chunk
    chunk: jax.Array
    computed: jax.Array  # its computed tokens before
    late: jax.Array  # bool: it is a decode row
    prompt_complete: jax.Array  # bool
    called: jax.Array
    begun: jax.Array
    threshold: jax.Array
    preempted: jax.Array
    cursor: jax.Array
    free: jax.Array
    held: jax.Array
    held_blocks: jax.Array
    dropped: jax.Array
    decodes: jax.Array
    context: jax.Array
    running: jax.Array
    preempted_head: jax.Array
    preempted_count: jax.Array
    newest: jax.Array
    left: jax.Array
    taken: Any = None  # with Limits.prefix: blocks that this iteration's decodes have taken before a preemption
    takes: Any = None  # and blocks to take from the free queue now
    pops: Any = None  # with Limits.priority, bool: `leaver` leaves the list of running requests
    plans: Any = None  # bool: the chunk is only planned; with Limits.roster: what `joiner` gets in its turn is
    queue: Any = None  # priority.Queue with the plan
    turn: Any = None  # roster.Turn with Limits.roster
    miss: Any = None  # roster.Miss with Limits.ends
    swap: Any = None  # swap.Swap with Limits.swap
    swaps: Any = None  # and bool: the victim's blocks go to CPU memory


class Pass2(NamedTuple):
    """After pass 2 looked at the head of the waiting queue."""

    admits: jax.Array  # bool
    tokens: jax.Array  # of the head, if it is admitted
    refused: jax.Array  # bool: the head waits and does not fit
    over_budget: jax.Array  # bool: for want of budget, else of blocks
    wanted: jax.Array  # the head's tokens without regard to the budget
    joins: jax.Array  # bool: the prompt of `joiner` is complete after this iteration
    first_token: jax.Array  # bool: it then gets its first token
    starts_prompt: jax.Array  # bool: the head is admitted with part of its prompt
    runs: jax.Array  # bool: nothing is left to schedule
    head_waits: jax.Array  # bool: a request waits after this step
    arrives_ps: jax.Array  # int64
    fresh_head: jax.Array
    preempted_head: jax.Array
    preempted_count: jax.Array
    running: jax.Array
    free: jax.Array
    left: jax.Array
    newest: jax.Array
    hits: Any = None  # Hits with Limits.prefix or Limits.swap
    queued: Any = None  # with Limits.priority: requests that have entered the queue and wait
    inflow: Any = None  # inflow.Inflow with Limits.inflow
    swap: Any = None  # swap.Swap with Limits.swap


class Hits(NamedTuple):
    """What the head of the queue need not compute, found in the prefix cache or in CPU memory."""

    tokens: jax.Array
    late: jax.Array  # bool: the head is admitted as a decode row
    looks: jax.Array  # bool: the head is to be looked up before it can be admitted
    takes: jax.Array  # blocks to take from the free queue, those of pass 1 included
    open_to_change: jax.Array  # bool: in a leap the head's hits might change


def count(condition: jax.Array) -> jax.Array:
    """1 for true, 0 for false, int32."""
    return condition.astype(jnp.int32)


def cut(tokens: jax.Array, threshold: jax.Array) -> jax.Array:
    """A prompt's tokens under long_prefill_token_threshold; 0 is no limit."""
    return jnp.where((threshold > 0) & (tokens > threshold), threshold, tokens)


def depart(limits: Limits, knobs: Knobs, s: State, look: Look) -> Pass1:
    """The finish of one request or, if pass 1 does not fit, the preemption of one; otherwise pass 1."""
    gone, row = look.gone, look.row
    finishes = look.finishes
    more_finish = finishes & (gone[NEXT] != NONE)
    # The last finish and pass 1 are one step, unless its blocks have to come back through the prefix cache first, or an
    # admission in the same step would change the list of running requests twice.
    waits = finishes if limits.ends or (limits.prefix and not limits.asynchronous) else more_finish
    if look.waits is not None:
        waits = waits | look.waits
    scheduling = look.active & ~waits & (~s.begun | look.prompted)
    finished_context = gone[PROMPT] + gone[OUTPUT] - 1
    finished_blocks = blocks_for(finished_context, knobs.block_size)
    decodes = s.decodes - count(finishes)
    context = s.context - jnp.where(finishes, finished_context, 0)
    free, running, held, held_blocks = s.free, s.running, s.held, s.held_blocks
    if limits.asynchronous:
        # The last token is in flight: the request keeps its seat and blocks for this schedule() call.
        held = held + count(finishes)
        if not limits.prefix:
            held_blocks = held_blocks + jnp.where(finishes, finished_blocks, 0)
    else:
        if not limits.prefix:
            free = free + jnp.where(finishes, finished_blocks, 0)
        running = running - count(finishes)
    due = due_now(limits, knobs, s, finishes, finished_context)
    budget = jnp.where(s.begun, s.left, knobs.budget - decodes)

    called, threshold = s.called, s.threshold
    if limits.threshold:
        # The threshold holds for all of a schedule() call and counts the requests at its start.
        requests = running + (s.queue.queued if limits.priority else s.preempted_count) + look.arrived
        share = jnp.where(knobs.adaptive, quotient(knobs.budget, jnp.maximum(requests, 1)), 0)
        holds = (knobs.threshold > 0) & ((requests > 1) | ~knobs.lifted)
        limit = jnp.where(holds, jnp.maximum(knobs.threshold, share), 0)
        threshold = jnp.where(called, threshold, limit)
        called = called | (look.active & ~waits)
        computed, known = ~row[FIT], row[PROMPT] + row[GENERATED]
    else:
        computed, known = s.prompt_done, s.prompt_known

    wanted: Any = None
    if limits.priority:
        asked = jnp.where(s.begun, 0, due)
        tokens = cut(known - computed, threshold)
        if limits.roster:
            tokens = roster.wish(s.queue, look, tokens, budget)
        else:
            wanted = wish(limits, knobs, s.queue, look, s.begun, tokens, budget, asked, running - decodes, free)
            tokens = wanted.tokens
        chunk = jnp.where(look.prompted, tokens, 0)
    else:
        chunk = jnp.where(look.prompted, jnp.minimum(cut(known - computed, threshold), budget), 0)
    chunk_blocks = blocks_for(computed + chunk, knobs.block_size) - blocks_for(computed, knobs.block_size)
    taken: Any = None
    takes: Any = None
    due = jnp.where(s.begun, 0, due)
    if limits.prefix and not limits.roster:
        taken = s.cache.taken
        due = due - taken
    demand = due + jnp.where(look.prompted, chunk_blocks, 0)
    only_plans: Any = None
    decodes_fit: Any = None
    doubtful: Any = None
    if limits.roster:
        prompts = running - decodes
        demand, doubtful = roster.asks(limits, knobs, s, look, due, demand, budget, prompts, threshold)
        only_plans = s.queue.planning | doubtful
    elif limits.priority:
        demand, only_plans = demand + wanted.blocks, wanted.plans
        decodes_fit = due <= free
    fits = demand <= free
    # Finished requests that are still on the stack are dropped when they come to its top.
    pops = scheduling & ~finishes & ~fits
    drops = pops & (gone[GENERATED] >= gone[OUTPUT]) & (gone[FIT] == s.now) if limits.asynchronous else jnp.bool_(False)
    if limits.ends:  # an empty schedule() has waited for it while others ran
        drops = drops & s.in_flight
    preempts = pops & (gone[GENERATED] < gone[OUTPUT])
    passes = scheduling & fits
    if limits.priority:
        passes = passes & ~only_plans

    # With a threshold the victim may have been counted among the decodes of this very iteration.
    if limits.threshold:
        in_prompt = preempts & (gone[FIT] < 0)
        computed_prompt = ~gone[FIT]
    else:
        in_prompt = preempts & (look.leaver == s.prompt_first)
        computed_prompt = s.prompt_done
    decoding = preempts & ~in_prompt
    miss: Any = None
    if limits.ends:
        miss = roster.miss(s.queue, look)
        decoding = decoding | miss.decoding
    counted = decoding & s.begun
    generated = jnp.where(in_prompt, gone[GENERATED], gone[OUTPUT] - (gone[FIT] - s.now))
    victim_computed = jnp.where(in_prompt, computed_prompt, gone[PROMPT] + generated - 1)
    victim_blocks = blocks_for(victim_computed + count(counted), knobs.block_size)
    turn: Any = None
    if limits.roster:
        opens = scheduling & ~finishes & doubtful
        turn = roster.turn(look, opens, victim_computed, in_prompt)
        takes = jnp.where(scheduling & fits, demand, 0)
        free = free - takes
        if not limits.prefix:
            free = free + jnp.where(preempts, blocks_for(turn.tokens, knobs.block_size), 0)
    elif limits.prefix:
        # Those before the one that does not fit take theirs first: the order decides what is evicted. Where only the
        # victim itself does not fit, that is all of them.
        own = count(decoding & (remainder(victim_computed, knobs.block_size) == 0))
        first = jnp.minimum(due - jnp.where(counted, 0, own), free)
        first = jnp.where(demand - own <= free, free, first)
        first = jnp.where(preempts | drops, first, 0)
        takes = first + jnp.where(passes, demand, 0)
        taken = jnp.where(passes, 0, taken + first)
        free = free - takes
    else:
        free = free + jnp.where(preempts, victim_blocks, 0) - jnp.where(passes, demand, 0)
    if limits.asynchronous:
        running, held = running - count(drops), held - count(drops)
        if not limits.prefix:
            free = free + jnp.where(drops, finished_blocks, 0)
            held_blocks = held_blocks - jnp.where(drops, finished_blocks, 0)
        victim_computed = jnp.where(drops, finished_context, victim_computed)

    swap: Any = None
    swaps: Any = jnp.bool_(False)
    if limits.swap:
        swap, swaps = swapping.out(knobs, s.swap, look.leaver, preempts, victim_computed)
    begun = s.begun | passes
    continues = passes & look.prompted & (chunk > 0)
    left = jnp.where(begun, budget + count(counted) - jnp.where(passes, chunk, 0), s.left)
    cursor: Any = s.cursor
    queue: Any = None
    plans: Any = None
    if limits.priority:
        decided = scheduling & (fits | pops)
        outcome = Outcome(decided, pops, passes, decodes_fit, in_prompt, victim_computed, chunk, chunk_blocks)
        plans = decided & only_plans & ~pops
        if limits.roster:
            plans = plans & s.queue.planning
            if limits.ends:
                plans = plans & ~roster.missing(s.queue)
            queue = roster.revised(limits, s.queue, look, turn.opens, plans, outcome)
        else:
            queue = revised(limits, knobs, s.queue, look, wanted, outcome)
    if limits.threshold:
        rest: Any = jnp.where(queue.planned, queue.tokens, left) if limits.priority else left
        cursor = jnp.where(passes & look.prompted, jnp.where(rest > 0, row[NEXT], NONE), cursor)
        cursor = jnp.where(in_prompt & (look.leaver == look.joiner) & look.prompted, NONE, cursor)
    return Pass1(
        more_finish=more_finish,
        preempts=preempts,
        drops=drops,
        decoding=decoding,
        in_prompt=in_prompt,
        generated=generated,
        victim_computed=victim_computed,
        continues=continues,
        chunk=chunk,
        computed=computed,
        late=continues & (row[GENERATED] > 0) & (computed + 1 == known),
        prompt_complete=continues & (computed + chunk == known),
        called=called,
        begun=begun,
        threshold=threshold,
        preempted=s.preempted | preempts | drops,
        cursor=cursor,
        free=free,
        held=held,
        held_blocks=held_blocks,
        dropped=s.dropped + count(drops),
        decodes=decodes - count(decoding),
        context=context - jnp.where(decoding, victim_computed, 0),
        running=running - count(preempts),
        preempted_head=s.preempted_head
        if limits.priority
        else jnp.where(preempts & ~swaps, look.leaver, s.preempted_head),
        preempted_count=s.preempted_count + count(preempts),
        newest=s.newest if limits.priority else jnp.where(pops, gone[BELOW], s.newest),
        left=left,
        taken=jnp.int32(0) if limits.roster else taken,
        takes=takes,
        pops=pops if limits.priority else None,
        plans=plans,
        queue=queue,
        turn=turn,
        miss=miss,
        swap=swap,
        swaps=swaps if limits.swap else None,
    )


def due_now(limits: Limits, knobs: Knobs, s: State, finishes: jax.Array, finished_context: jax.Array) -> jax.Array:
    """Blocks that the decodes take in this iteration, without the request that is finished."""
    phase = remainder(-s.now, knobs.block_size)
    phases = jnp.arange(limits.phases, dtype=jnp.int32)
    due = jnp.sum(jnp.where(phases == phase, s.need, 0), dtype=jnp.int32)
    took = remainder(finished_context, knobs.block_size) == 0
    return due - count(finishes & took)


def admit(limits: Limits, knobs: Knobs, s: State, look: Look, p: Pass1) -> Pass2:
    """The head of the waiting queue, unless a prompt in progress took its turn in this step."""
    row = look.row
    known = row[PROMPT] + row[GENERATED]
    queued: Any = None
    if limits.priority:
        queued = s.queue.queued + count(look.turn.enters)
        # The head is known when all that have arrived are in the queue.
        head_waits = (queued > 0) & ~look.turn.more_enter
    else:
        requeued = p.preempted_count > 0 if limits.swap else p.preempted_head != NONE
        head_waits = requeued | (look.arrives_ps <= s.look_ps)
    seat = p.running < knobs.seats
    attempt = look.active & p.begun & ~look.prompted & ~p.preempted & head_waits & (p.left > 0) & seat
    hit: Any = 0
    hit_blocks: Any = None
    idle_blocks: Any = 0
    looks: Any = None
    if limits.prefix:
        looks = attempt & (s.cache.found != look.joiner)
        attempt = attempt & ~looks
        hit_blocks, idle_blocks = s.cache.position, s.cache.idle
        hit = hit_blocks * knobs.block_size
    swapped: Any = jnp.bool_(False)
    if limits.swap:
        swapped = look.turn.head_position < limits.ahead if limits.priority else s.swap.head != NONE
        stored = jnp.where(swapped, row[SWAPPED], 0)
        hit = jnp.maximum(hit, stored) if limits.prefix else stored
    computed = limits.prefix or limits.swap
    needed = known - hit if computed else known
    wanted = cut(needed, p.threshold)
    over_budget = ~knobs.chunked & (wanted > p.left)
    tokens = jnp.minimum(wanted, p.left)
    blocks = blocks_for(hit + tokens if computed else tokens, knobs.block_size)
    reserve = jnp.maximum(blocks, jnp.where(knobs.full_isl, blocks_for(known, knobs.block_size), 0))
    if limits.prefix:
        blocks = blocks - hit_blocks
        reserve = reserve - hit_blocks + idle_blocks
    no_room = reserve + jnp.where(p.running > 0, knobs.watermark, 0) > p.free
    admits = attempt & ~over_budget & ~no_room
    refused = attempt & ~admits
    head_complete = admits & (tokens == needed)
    joins = head_complete | p.prompt_complete

    if limits.priority:
        from_preempted, from_fresh = admits & (row[PREEMPTIONS] > 0), look.turn.arrives
        preempted_head = p.preempted_head
        queued = queued - count(admits) + count(p.preempts)
    else:
        from_preempted = admits & ((s.preempted_head != NONE) | swapped)
        from_fresh = admits & ~from_preempted
        preempted_head = jnp.where(from_preempted & ~swapped, row[LINK], p.preempted_head)
    arrives_ps = jnp.where(from_fresh, look.arrives_next_ps, look.arrives_ps)
    running = p.running + count(admits)
    left = p.left - jnp.where(admits, tokens, 0)
    preempted_count = p.preempted_count - count(from_preempted)
    if limits.priority:
        requeued = queued > 0
    else:
        requeued = preempted_count > 0 if limits.swap else preempted_head != NONE
    head_waits = requeued | (arrives_ps <= s.look_ps)
    more = ~p.preempted & ~refused & head_waits & (left > 0) & (running < knobs.seats)
    runs = look.active & p.begun & ~more & ~p.more_finish & (p.cursor == NONE)
    hits, held = None, blocks
    if limits.swap:
        no, late = jnp.bool_(False), head_complete & (tokens == 1) & (row[GENERATED] > 0)
        hits = Hits(hit, late, no, jnp.int32(0), no)
    inflow: Any = None
    fresh_head = s.fresh_head + count(from_fresh)
    if limits.inflow and not limits.priority:
        inflow = look.gate.queue._replace(waiting=look.gate.queue.waiting - count(from_fresh))
        fresh_head = jnp.where(from_fresh, look.gate.next, look.gate.head)
    if limits.prefix:
        late = head_complete & (tokens == 1) & (row[GENERATED] > 0)
        # An iteration runs in a step of its own, when the cache has followed the schedule.
        posts = look.finishes | p.preempts | p.drops | (p.takes > 0) | p.continues | admits | looks
        eager = (s.cache.eager_first != NONE) & p.begun & (~s.begun | (s.cache.walk != NONE))
        runs = runs & ~posts & ~eager
        open_to_change = s.cache.contested | (~knobs.chunked & (hit > 0))
        hits = Hits(hit, late, looks, p.takes + jnp.where(admits, blocks, 0), open_to_change)
        held = blocks + idle_blocks
    return Pass2(
        admits=admits,
        tokens=tokens,
        refused=refused,
        over_budget=over_budget,
        wanted=wanted,
        joins=joins,
        first_token=joins & (row[GENERATED] == 0),
        starts_prompt=admits & ~head_complete,
        runs=runs,
        head_waits=head_waits,
        arrives_ps=arrives_ps,
        fresh_head=fresh_head,
        preempted_head=preempted_head,
        preempted_count=preempted_count,
        running=running,
        free=p.free - jnp.where(admits, held, 0),
        left=left,
        newest=p.newest if limits.priority else jnp.where(admits, look.joiner, p.newest),
        hits=hits,
        queued=queued,
        inflow=inflow,
        swap=swapping.back(knobs, p.swap, row, admits & swapped, hit_blocks) if limits.swap else None,
    )


def computed_tokens(a: Pass2) -> jax.Array:
    """Computed tokens of the head after this iteration, if it is admitted: its hits count."""
    return a.tokens if a.hits is None else a.hits.tokens + a.tokens


class Prompts(NamedTuple):
    """The prompts in progress after a step: a list, or with Limits.threshold off at most one."""

    first: jax.Array
    last: jax.Array
    done: jax.Array
    known: jax.Array


def prompts_in_progress(limits: Limits, s: State, look: Look, p: Pass1, a: Pass2) -> Prompts:
    if not limits.threshold:
        first = jnp.where(a.starts_prompt, look.joiner, s.prompt_first)
        return Prompts(
            first=jnp.where(p.in_prompt | p.prompt_complete, NONE, first),
            last=s.prompt_last,
            done=jnp.where(a.starts_prompt, computed_tokens(a), s.prompt_done + jnp.where(p.continues, p.chunk, 0)),
            known=jnp.where(a.starts_prompt, look.row[PROMPT] + look.row[GENERATED], s.prompt_known),
        )
    ends = p.in_prompt | p.prompt_complete
    before = jnp.where(p.in_prompt, look.gone[PREV], look.row[PREV])
    after = jnp.where(p.in_prompt, look.gone[NEXT], look.row[NEXT])
    first = jnp.where(ends & (before == NONE), after, s.prompt_first)
    last = jnp.where(ends & (after == NONE), before, s.prompt_last)
    if limits.ends:
        first = jnp.where(p.miss.decoding & (p.miss.before == NONE), look.joiner, first)
        last = jnp.where(p.miss.decoding & (p.miss.behind == NONE), look.joiner, last)
    return Prompts(
        first=jnp.where(a.starts_prompt & (first == NONE), look.joiner, first),
        last=jnp.where(a.starts_prompt, look.joiner, last),
        done=s.prompt_done,
        known=s.prompt_known,
    )


class PhaseChange(NamedTuple):
    """How the decoding requests by block phase change."""

    left: jax.Array  # the phase of a request that decodes no more, and 1 if there is one
    leaves: jax.Array
    joined: jax.Array  # the same of one that joins
    joins: jax.Array


def phase_change(knobs: Knobs, s: State, look: Look, p: Pass1, a: Pass2) -> PhaseChange:
    gone, row = look.gone, look.row
    context = jnp.where(look.finishes, gone[PROMPT] + gone[OUTPUT] - 1, p.victim_computed)
    return PhaseChange(
        left=remainder(context - s.now, knobs.block_size),
        leaves=count(look.finishes | p.decoding),
        joined=remainder(row[PROMPT] + row[GENERATED] - s.now - 1, knobs.block_size),
        joins=count(a.joins),
    )
