"""What the prefix cache of one simulation consists of; prefix.py says how it works."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine.layout import NONE, SEGMENT, VISITOR, Knobs, Limits

# Fields of a segment.
OF, LO, HI, REF, QUEUE_PREV, QUEUE_NEXT, COPY_PREV, COPY_NEXT, BELOW = range(SEGMENT)
# Fields of a node: its first and last copy, and the request whose blocks are still to be entered.
HEAD, TAIL, OWNER = range(3)
# Fields of a request: its last hold; blocks registered; where in the table of paths the next one is; decoding: computed
# tokens less iterations; how it decodes; neighbours among the eager; hit tokens of the first and of later admissions;
# leaving: who leaves after it, and the blocks that it has.
TOP, REGISTERED, PATH, BASE, MODE, EAGER_PREV, EAGER_NEXT, HIT_FIRST, HIT_LATER, LEAVER_NEXT, BLOCKS = range(VISITOR)
ORDER = VISITOR  # with Limits.roster: how many were admitted before it
# With Limits.ends: who misses a turn stops decoding but keeps its blocks. In place of their number BLOCKS then holds
# STAYS less the tokens that count when the iteration in flight has ended.
STAYS = -2
SETTLED, OWNS, EAGER = 0, 1, 2  # modes
START = -2  # the cursor of a walk over copies before the first
ALL = 1 << 30


class Orders(NamedTuple):
    """With Limits.roster, ORDER of the requests that the fields of Cache name; scalars, int32."""

    insert: jax.Array
    eager_first: jax.Array
    walk: jax.Array
    touch: jax.Array
    enlist: jax.Array


class Cache(NamedTuple):
    """Scalars are int32 unless noted; jobs are outstanding where they name a request, or a number above 0."""

    memory: jax.Array  # [Limits.prefix_memory] int32: segments, nodes, requests, holds
    anonymous: jax.Array  # free blocks without a key
    queue_head: jax.Array  # segments in the free queue
    queue_tail: jax.Array
    segment_free: jax.Array  # a list of free rows, and the first that was never used
    segment_next: jax.Array
    hold_free: jax.Array
    hold_next: jax.Array
    overflow: jax.Array  # bool: there were too few rows
    eager_first: jax.Array
    eager_last: jax.Array
    eager_need: jax.Array  # [P], eager requests by the phase of their blocks, as in blocks.py
    taken: jax.Array  # blocks that decodes of the iteration being scheduled have taken before a preemption
    insert: jax.Array  # a request to enter into the eager list, and the one after which to try
    insert_after: jax.Array
    touch: jax.Array  # an admitted request that takes its hits
    take: jax.Array  # blocks to take from the free queue
    enlist: jax.Array  # a request to enter into the list of those that leave, its blocks, and after whom to try
    enlist_blocks: jax.Array
    enlist_after: jax.Array
    release: jax.Array  # the first of those that leave, in order; it gives its blocks back
    complete: jax.Array  # bool: the list of those that leave is complete, and its turn has come
    dropped: jax.Array  # async scheduling: from this request on they were preempted, and are not in the list any more
    alone: jax.Array  # a request that leaves now and without the list, and its blocks
    alone_blocks: jax.Array
    alone_finished: jax.Array  # bool: it is finished, not preempted
    waits_alone: jax.Array  # async scheduling: the one that will leave without the list, with `enlist_blocks` blocks
    release_at: jax.Array  # the segment to go on with within a hold
    detached: jax.Array  # bool: it neither owns a node nor is eager any more
    walk: jax.Array  # the eager request to visit next
    walk_until: jax.Array  # visits wait for the prompts in progress that come before: a request, or its ORDER
    register: jax.Array  # a request that registers its blocks
    register_tokens: jax.Array  # its computed tokens after the iteration
    register_joins: jax.Array  # bool: then it decodes
    look: jax.Array  # a request to look up
    limit: jax.Array  # look, touch: blocks
    position: jax.Array  # blocks found so far
    path: jax.Array  # where in the table of paths, NONE at the start
    cursor: jax.Array  # the copy to look at
    cap: jax.Array  # the first block that an earlier copy has
    idle: jax.Array  # blocks found in the free queue
    found: jax.Array  # the request that `position` and `idle` hold for
    contested: jax.Array  # bool: its next block may be registered by a decoding request at any time
    orders: Any = None
    alone_granted: Any = None  # with Limits.roster, bool: `alone` is preempted after its turn in this iteration


def initial_cache(limits: Limits, knobs: Knobs) -> Cache:
    none, zero, false = jnp.int32(NONE), jnp.int32(0), jnp.bool_(False)
    fields: dict[str, Any] = dict.fromkeys(Cache._fields, none)
    fields |= dict.fromkeys(
        ["segment_next", "hold_next", "taken", "take", "enlist_blocks", "register_tokens", "limit", "position"], zero
    )
    fields |= dict.fromkeys(["cap", "idle", "walk_until", "alone_blocks"], zero)
    fields |= dict.fromkeys(
        ["overflow", "complete", "register_joins", "contested", "detached", "alone_finished"], false
    )
    fields |= {"dropped": jnp.int32(ALL)}
    fields |= {"eager_need": jnp.zeros(limits.phases, jnp.int32)}
    fields |= {"orders": Orders(*[zero] * 5) if limits.roster else None}
    fields |= {"alone_granted": false if limits.roster else None}
    fields |= {"memory": jnp.full(limits.prefix_memory, NONE, jnp.int32), "anonymous": knobs.blocks}
    return Cache(**fields)


def busy(c: Cache) -> jax.Array:
    """bool: a job is outstanding."""
    jobs = (c.touch != NONE) | takes(c) | releases(c) | (c.register != NONE) | (c.look != NONE)
    return jobs | (c.insert != NONE) | (c.enlist != NONE) | walks(c)


def takes(c: Cache) -> jax.Array:
    """Takes from the queue commute until somebody looks at its segments or adds to it."""
    return (c.take > 0) & ((c.touch != NONE) | releases(c) | (c.look != NONE))


def releases(c: Cache) -> jax.Array:
    return (c.alone != NONE) | ((c.release != NONE) & c.complete)


def walks(c: Cache) -> jax.Array:
    return (c.walk != NONE) & ((c.walk if c.orders is None else c.orders.walk) < c.walk_until)


class Job(NamedTuple):
    """Which job is carried on, and for whom. Flags are bool, the rest int32."""

    inserting: jax.Array
    enlisting: jax.Array
    touching: jax.Array
    taking: jax.Array
    releasing: jax.Array
    walking: jax.Array
    registering: jax.Array
    looking: jax.Array
    searching: jax.Array  # touching or looking
    me: jax.Array  # the request; inserting and enlisting: the one after which to try


class Turn(NamedTuple):
    """Who registers blocks, if somebody does: the request itself, or first the owner of the node it visits."""

    registers: jax.Array  # bool
    for_owner: jax.Array  # bool
    joins: jax.Array  # bool: the request has registered all and starts to decode
    start: jax.Array  # blocks
    stop: jax.Array
    target: jax.Array
    who: jax.Array
    whose: jax.Array  # [VISITOR], its row
    stays: Any = None  # with Limits.ends, bool: job.me stops decoding and runs on


class View(NamedTuple):
    """What an operation reads before it changes anything; rows are int32 arrays."""

    job: Job
    turn: Turn
    mine: jax.Array  # the row of job.me
    length: jax.Array  # blocks of its chain
    path: jax.Array  # where it is in the table of paths
    further: jax.Array  # bool: its path goes on
    blank: jax.Array  # bool: to a node of which there is no block, and nobody to enter one
    node: jax.Array  # the node there
    node_end: jax.Array  # the first block behind it
    copies: jax.Array  # its row
    owner_base: jax.Array  # BASE of its owner
    hold: jax.Array  # the last hold of turn.who
    at: jax.Array  # the segment at hand
    segment: jax.Array  # its row
    other: jax.Array  # the next copy, or the tail of the queue
    spare: jax.Array  # what follows the first row in the list of free segments, and of free holds
    spare_hold: jax.Array
    owner_order: Any = None  # with Limits.roster: ORDER of the owner
    next_order: Any = None  # and of the next in the list at hand


def count(condition: jax.Array) -> jax.Array:
    """1 for true, 0 for false, int32."""
    return condition.astype(jnp.int32)
