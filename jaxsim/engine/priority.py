"""The policy "priority": who is at the head of the queue, and who is preempted.

vLLM 0.33.0 (v1/core/sched/request_queue.py, scheduler.py) keeps the waiting requests, preempted ones among them, in a
heap by (priority, arrival, id), and preempts the running request with the largest (priority, arrival), of several the
one that was admitted first. Ids compare in the order of the list.

Requests arrive in the order in which they are numbered, so their ranks by (priority, arrival, id) are known beforehand:
the queue is a bitmap over ranks, in two levels like the calendar's. With Limits.swap it has two positions for a rank,
that of a swapped request ahead of those of all that wait. Requests of equal priority and arrival are a class, named by
the rank of its first. A second bitmap says which classes run, and each class has a list of its running requests by
admission. Victims are taken from the front of a list; those that finish stay until they come to the front.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsim.engine.calendar import FAR, bit, mark_word, trailing_zeros
from jaxsim.engine.layout import (
    BELOW,
    CLASS,
    NEWEST,
    NONE,
    OLDEST,
    PLACE,
    PLAN,
    PREVIOUS,
    RANK,
    REQUEST,
    ROW,
    Knobs,
    Limits,
    join_time,
    read,
    read_cell,
)
from jaxsim.engine.roster import NOBODY, initial_roster, links


class Queue(NamedTuple):
    """The part of the state that only this policy has; scalars int32 unless noted."""

    waiting: jax.Array  # [T or 2 T], upper level of the bitmap of waiting requests
    classes: jax.Array  # [T], of the bitmap of classes that run
    queued: jax.Array  # requests in the bitmap; those that arrived are entered one a step
    reserved: jax.Array  # tokens of the prompt for which requests are being preempted, or 0
    cursor: jax.Array  # with Limits.threshold: the next prompt to plan, with Limits.roster the next request; or NONE
    planning: jax.Array  # bool: the iteration is being planned
    planned: jax.Array  # bool: it is planned, and now scheduled
    tokens: jax.Array  # of the plan that are not yet scheduled
    blocks: jax.Array  # that they take
    roster: Any = None  # roster.Roster with Limits.roster
    served: Any = None  # with Limits.ends: while others miss their turn, the last that had it, or NONE; else NOBODY


class Turn(NamedTuple):
    """Whom the policy puts first in a step."""

    arrives: jax.Array  # bool: the next request to arrive has come
    enters: jax.Array  # bool: it joins the queue; with Limits.inflow it may be rejected
    more_enter: jax.Array  # bool: and the one after it has arrived as well
    entrant_position: jax.Array  # in the queue: its rank and Limits.ahead
    entrant_class: jax.Array
    head: jax.Array  # of the queue, the entrant included; any request if it is empty
    head_position: jax.Array
    head_class: jax.Array
    victim: jax.Array  # first of the largest running class, or a finished request before it, or NONE
    victim_class: jax.Array


class Marks(NamedTuple):
    """What a step writes for the policy."""

    cells: list[tuple[jax.Array, jax.Array, jax.Array]]
    waiting: jax.Array  # [T or 2 T]
    classes: jax.Array  # [T]
    least: jax.Array  # no less than 0; known when all has been read
    roster: Any = None  # roster.Roster


def ranks(priority: np.ndarray, size: int) -> np.ndarray:
    """Rank of each request, the request of each rank, and the one of the same priority before each; [3, size] int32.

    priority: [N] in order of arrival.
    """
    result = np.full((3, size), NONE, np.int32)
    result[:2] = np.arange(size)
    order = np.argsort(priority, kind="stable")
    result[0, order] = np.arange(len(order))
    result[1, : len(order)] = order
    same = priority[order[1:]] == priority[order[:-1]]
    result[2, order[1:]] = np.where(same, order[:-1], NONE)
    return result


def initial_queue(limits: Limits) -> Queue:
    zero, none, false = jnp.int32(0), jnp.int32(NONE), jnp.bool_(False)
    waiting = jnp.zeros(-(-(limits.ahead + limits.requests) // 1024), jnp.int32)
    classes = jnp.zeros(-(-limits.requests // 1024), jnp.int32)
    queue = Queue(waiting, classes, zero, zero, none, false, false, zero, zero)
    if limits.ends:
        queue = queue._replace(served=jnp.int32(NOBODY))
    return queue._replace(roster=initial_roster()) if limits.roster else queue


def initial_memory(limits: Limits, ranked: jax.Array) -> jax.Array:
    """The policy's region of the memory; ranked: [3, N], see `ranks`."""
    tickets = jnp.zeros((limits.requests + 1, limits.ticket), jnp.int32)
    tickets = tickets.at[:-1, RANK].set(ranked[0]).at[:-1, PREVIOUS].set(ranked[2])
    places = jnp.full((limits.requests, PLACE), NONE, jnp.int32).at[:, REQUEST].set(ranked[1])
    bitmaps = jnp.zeros(limits.sinks - limits.waiting_words, jnp.int32)
    return jnp.concatenate([tickets.reshape(-1), places.reshape(-1), bitmaps])


def ticket(limits: Limits, memory: jax.Array, request: jax.Array) -> jax.Array:
    return read(memory, limits.tickets + jnp.maximum(request, 0) * limits.ticket, limits.ticket)


def lowest(memory: jax.Array, words: int, tops: jax.Array) -> jax.Array:
    """The lowest position that is set in a bitmap of two levels, FAR if none is."""
    index = jnp.arange(tops.shape[0], dtype=jnp.int32)
    word = jnp.min(jnp.where(tops != 0, 32 * index + trailing_zeros(tops), FAR))
    bits = read_cell(memory, words + jnp.where(word == FAR, 0, word))
    return jnp.where(word == FAR, FAR, 32 * word + trailing_zeros(bits))


def highest(memory: jax.Array, words: int, tops: jax.Array) -> jax.Array:
    """The highest position that is set, NONE if none is."""
    index = jnp.arange(tops.shape[0], dtype=jnp.int32)
    word = jnp.max(jnp.where(tops != 0, 32 * index + 31 - lax.clz(tops), NONE))
    bits = read_cell(memory, words + jnp.maximum(word, 0))
    return jnp.where(word == NONE, NONE, 32 * word + 31 - lax.clz(bits))


def turn(
    limits: Limits,
    knobs: Knobs,
    queue: Queue,
    memory: jax.Array,
    active: jax.Array,
    entrant: jax.Array,
    look_ps: jax.Array,
    arrives_ps: jax.Array,
    arrives_next_ps: jax.Array,
) -> Turn:
    """`entrant` is the next request to enter, which arrives at `arrives_ps`; the one after it at `arrives_next_ps`."""
    arrives = enters = active & (arrives_ps <= look_ps)
    if limits.inflow:
        enters = arrives & (queue.queued < knobs.queue_limit)
    mine = ticket(limits, memory, entrant)
    before = jnp.maximum(mine[PREVIOUS], 0)
    words = read(memory, limits.arrivals + 2 * before, 2)
    tie = (mine[PREVIOUS] != NONE) & (join_time(words[0], words[1]) == arrives_ps)
    entrant_class = jnp.where(tie, ticket(limits, memory, before)[CLASS], mine[RANK])
    position = mine[RANK] + limits.ahead if limits.swap else mine[RANK]
    head_position = jnp.minimum(lowest(memory, limits.waiting_words, queue.waiting), jnp.where(enters, position, FAR))
    head_position = jnp.minimum(head_position, limits.ahead + limits.requests - 1)
    head_rank = head_position
    if limits.swap:
        head_rank = jnp.where(head_position < limits.ahead, head_position, head_position - limits.ahead)
    head = read_cell(memory, limits.places + head_rank * PLACE + REQUEST)
    victim_class = highest(memory, limits.class_words, queue.classes)
    victim = read_cell(memory, limits.places + jnp.maximum(victim_class, 0) * PLACE + OLDEST)
    return Turn(
        arrives=arrives,
        enters=enters,
        more_enter=jnp.where(arrives, arrives_next_ps, arrives_ps) <= look_ps,
        entrant_position=position,
        entrant_class=entrant_class,
        head=head,
        head_position=head_position,
        head_class=jnp.where(enters & (head == entrant), entrant_class, ticket(limits, memory, head)[CLASS]),
        victim=jnp.where(victim_class == NONE, NONE, victim),
        victim_class=victim_class,
    )


def queued(limits: Limits, memory: np.ndarray) -> np.ndarray:
    """Which requests are in the queue, on the host; [N] bool in order of arrival."""
    words = memory[limits.waiting_words : limits.class_words].view(np.uint32)
    bits = (words[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    places = memory[limits.places : limits.waiting_words].reshape(-1, PLACE)
    result = np.zeros(limits.requests, bool)
    result[places[np.flatnonzero(bits.reshape(-1)) % limits.requests, REQUEST]] = True
    return result


def mark(limits: Limits, queue: Queue, memory: jax.Array, entrant: jax.Array, look: Any, p: Any, a: Any) -> Marks:
    """Bitmaps and lists after a step: an arrival, and an admission or a departure from the list of running requests."""
    who: Turn = look.turn
    leaver, joiner, below = look.leaver, look.joiner, look.gone[BELOW]
    place_of = lambda word, position: word + (position >> 5)  # noqa: E731

    position = look.leaver_ticket[RANK]
    if limits.swap:
        position = position + jnp.where(p.swaps, 0, limits.ahead)
    position = jnp.where(a.admits, who.head_position, position)
    changes = a.admits | p.preempts
    cell, entry = place_of(limits.waiting_words, position), place_of(limits.waiting_words, who.entrant_position)
    same = changes & (cell == entry)
    changed, entered = read_cell(memory, cell), read_cell(memory, entry)
    changed = jnp.where(who.enters & same, changed | bit(who.entrant_position), changed)
    changed = jnp.where(a.admits, changed & ~bit(position), changed | bit(position))
    entered = entered | bit(who.entrant_position)
    waiting = mark_word(queue.waiting, who.entrant_position >> 5, who.enters, jnp.bool_(True))
    waiting = mark_word(waiting, position >> 5, changes, changed != 0)

    group = jnp.maximum(jnp.where(a.admits, who.head_class, who.victim_class), 0)
    moves = a.admits | p.pops
    word = place_of(limits.class_words, group)
    running = read_cell(memory, word)
    alone = (running & bit(group)) == 0
    left = running | bit(group)
    left = jnp.where(p.pops & (below == NONE), left & ~bit(group), left)
    classes = mark_word(queue.classes, group >> 5, moves, left != 0)
    place = limits.places + group * PLACE
    newest = read_cell(memory, place + NEWEST)

    cells = [
        (changes, cell, changed),
        (who.enters & ~same, entry, entered),
        (who.arrives, limits.tickets + entrant * limits.ticket + CLASS, who.entrant_class),
        (moves, word, left),
        (p.pops | (a.admits & alone), place + OLDEST, jnp.where(a.admits, joiner, below)),
        (a.admits, place + NEWEST, joiner),
        (a.admits & ~alone, newest * ROW + BELOW, joiner),
    ]
    if limits.threshold or limits.roster:
        planned = limits.tickets + jnp.where(p.preempts, leaver, joiner) * limits.ticket + PLAN
        cells.append((p.plans | p.continues | p.preempts, planned, jnp.where(p.plans, p.chunk, 0)))
    listed: Any = None
    if limits.roster:
        listed, more = links(limits, queue.roster, look, p, a)
        cells += more
    read_all = [lax.population_count(value) for value in (changed, entered, left)] + [newest + 1, who.entrant_class]
    least = read_all[0]
    for value in read_all[1:]:
        least = jnp.minimum(least, value)
    return Marks(cells, waiting, classes, least, listed)


def after(queue: Queue, marks: Marks, queued: jax.Array, runs: jax.Array) -> Queue:
    """The state after a step whose plan is in `queue`; an iteration that is complete has none left."""
    none, false = jnp.int32(NONE), jnp.bool_(False)
    return Queue(
        waiting=marks.waiting,
        classes=marks.classes,
        queued=queued,
        reserved=jnp.where(runs, 0, queue.reserved),
        cursor=jnp.where(runs, none, queue.cursor),
        planning=jnp.where(runs, false, queue.planning),
        planned=jnp.where(runs, false, queue.planned),
        tokens=jnp.where(runs, 0, queue.tokens),
        blocks=jnp.where(runs, 0, queue.blocks),
        roster=marks.roster,
        served=None if queue.served is None else jnp.where(runs, NOBODY, queue.served),
    )
