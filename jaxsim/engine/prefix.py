"""The prefix cache by runs of blocks, and the free queue in LRU order.

Rules: vLLM 0.33.0, v1/core/kv_cache_manager.py, block_pool.py and kv_cache_utils.py. Only unhashed blocks go to the front
of the free queue, so it is always [anonymous blocks][hashed segments]: a number, and a linked list.

A *segment* is a run of physical blocks of one node (see chains.py) with one reference count; its blocks stand from the
last to the first in the queue. The segments of a node form a list of copies in the order of their registration, in which
a lookup takes the first that has the block. A request holds a stack of *holds* (segment, first): the segment, then along
`BELOW` until that first block, so that who splits a segment need not know its holders.

Blocks that decoding fills are registered late: while a request's next block is in the last node of its path it is the
node's *owner*, and its blocks are entered when somebody looks at the node, registers there, or it is released. A node
has one owner, the newest; the others, and requests whose outputs others continue in different ways, are *eager*: a list
that is walked in every iteration, in the order of arrival.

The work comes as jobs that the scheduler posts and one call of `work` after the other carries out, each with a fixed
number of operations: touch, take, release, walk, register, look up, in this order.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine.blocks import quotient
from jaxsim.engine.chains import Chains
from jaxsim.engine.layout import (
    HOLD,
    NODE,
    NONE,
    PREFIX_SINKS,
    SEGMENT,
    VISITOR,
    Knobs,
    Limits,
    read,
    write_cells,
)

# Fields of a segment.
OF, LO, HI, REF, QUEUE_PREV, QUEUE_NEXT, COPY_PREV, COPY_NEXT, BELOW = range(SEGMENT)
# Fields of a node: its first and last copy, and the request whose blocks are still to be entered.
HEAD, TAIL, OWNER = range(3)
# Fields of a request: its last hold; blocks registered; where in the table of paths the next one is; decoding: computed
# tokens less iterations; how it decodes; neighbours among the eager; hit tokens of the first and of later admissions.
TOP, REGISTERED, PATH, BASE, MODE, EAGER_PREV, EAGER_NEXT, HIT_FIRST, HIT_LATER = range(VISITOR)
SETTLED, OWNS, EAGER = 0, 1, 2  # modes
START = -2  # the cursor of a walk over copies before the first
ALL = 1 << 30


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
    taken: jax.Array  # blocks that decodes of the iteration being scheduled have taken before a preemption
    insert: jax.Array  # a request to enter into the eager list, and the one after which to try
    insert_after: jax.Array
    touch: jax.Array  # an admitted request that takes its hits
    take: jax.Array  # blocks to take from the free queue
    release: jax.Array  # a request that gives its blocks back
    release_blocks: jax.Array  # how many it has
    release_at: jax.Array  # the segment to go on with within a hold
    detached: jax.Array  # bool: it neither owns a node nor is eager any more
    walk: jax.Array  # the eager request to visit next
    walk_until: jax.Array  # visits wait for the prompts in progress that come before
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


def initial_cache(limits: Limits, knobs: Knobs) -> Cache:
    none, zero, false = jnp.int32(NONE), jnp.int32(0), jnp.bool_(False)
    fields: dict[str, Any] = dict.fromkeys(Cache._fields, none)
    fields |= dict.fromkeys(
        ["segment_next", "hold_next", "taken", "take", "release_blocks", "register_tokens", "limit", "position"], zero
    )
    fields |= dict.fromkeys(["cap", "idle", "walk_until"], zero)
    fields |= dict.fromkeys(["overflow", "register_joins", "contested", "detached"], false)
    fields |= {"memory": jnp.full(limits.prefix_memory, NONE, jnp.int32), "anonymous": knobs.blocks}
    return Cache(**fields)


def busy(c: Cache) -> jax.Array:
    """bool: a job is outstanding."""
    jobs = (c.touch != NONE) | (c.take > 0) | (c.release != NONE) | (c.register != NONE) | (c.look != NONE)
    return jobs | (c.insert != NONE) | walks(c)


def walks(c: Cache) -> jax.Array:
    return (c.walk != NONE) & (c.walk < c.walk_until)


def work(limits: Limits, knobs: Knobs, chains: Chains, now: jax.Array, c: Cache) -> tuple[Cache, jax.Array]:
    """One operation of the first outstanding job; the cache after it and the blocks that became free."""
    pick, size, which = jnp.where, knobs.block_size, knobs.chains
    memory = c.memory

    def segment(index: jax.Array) -> jax.Array:
        return read(memory, limits.segment_rows + jnp.maximum(index, 0) * SEGMENT, SEGMENT)

    def visitor(index: jax.Array) -> jax.Array:
        return read(memory, limits.visitor_rows + jnp.maximum(index, 0) * VISITOR, VISITOR)

    # Which job.
    left = ~c.overflow
    inserting = left & (c.insert != NONE)
    left &= ~inserting
    touching = left & (c.touch != NONE)
    left &= ~touching
    taking = left & (c.take > 0)
    left &= ~taking
    releasing = left & (c.release != NONE)
    left &= ~releasing
    walking = left & walks(c)
    left &= ~walking
    registering = left & (c.register != NONE)
    left &= ~registering
    looking = left & (c.look != NONE)
    searching = touching | looking

    # Whom it concerns, the node it has come to, and the node's owner.
    me = pick(touching, c.touch, pick(releasing, c.release, pick(walking, c.walk, c.insert_after)))
    me = pick(registering, c.register, pick(looking, c.look, me))
    mine = visitor(me)
    first, end, length = chains.requests[which, jnp.maximum(me, 0)]
    path = pick(searching, pick(c.path == NONE, first, c.path), mine[PATH])
    path = jnp.clip(path, 0, chains.path.shape[1] - 1)
    node = chains.path[which, path]
    node_end = chains.nodes[which, node, 1]
    head_tail_owner = read(memory, limits.node_rows + node * NODE, NODE)
    owner = head_tail_owner[OWNER]
    owners = visitor(owner)
    further = path + 1 < end

    # Blocks to register: the owner's first, up to the iteration in which its turn was before this moment.
    limit = c.limit
    at_end = c.position >= limit
    target = quotient(
        pick(
            registering,
            c.register_tokens,
            pick(mine[MODE] == SETTLED, 0, mine[BASE] + now + count(walking)),
        ),
        size,
    )
    registers = (registering | walking | (releasing & ~c.detached)) & (mine[REGISTERED] < target)
    joins = registering & ~registers & c.register_joins & (mine[REGISTERED] < length)
    visits = (searching & ~at_end) | ((registering | walking) & registers) | joins
    owner_target = quotient(owners[BASE] + now + count(searching | (owner < me)), size)
    for_owner = visits & (owner != NONE) & (owner != me) & (owners[REGISTERED] < owner_target)
    registers = registers | for_owner
    joins = joins & ~for_owner
    who = pick(for_owner, owner, me)
    whose = pick(for_owner, owners, mine)
    start = whose[REGISTERED]
    stop = jnp.minimum(pick(for_owner, owner_target, target), node_end)

    top = whose[TOP]
    hold = read(memory, limits.hold_rows + jnp.maximum(top, 0) * HOLD, HOLD)
    hold_segment, hold_first, hold_next = hold
    pops = releasing & c.detached
    at = pick(c.release_at != NONE, c.release_at, hold_segment)
    at = pick(searching, pick(c.cursor == START, head_tail_owner[HEAD], c.cursor), at)
    at = pick(registers, pick(top == NONE, NONE, hold_segment), pick(taking, c.queue_head, at))
    s = segment(at)
    other = pick(registers, s[COPY_NEXT], c.queue_tail)
    o = segment(other)
    at_cell = limits.segment_rows + jnp.maximum(at, 0) * SEGMENT
    of_cell = limits.node_rows + s[OF] * NODE
    node_cell = limits.node_rows + node * NODE

    # New rows.
    new = pick(c.segment_free != NONE, c.segment_free, c.segment_next)
    new_hold = pick(c.hold_free != NONE, c.hold_free, c.hold_next)

    # Take: from the anonymous blocks, then from the top of the first segment.
    plain = pick(taking, jnp.minimum(c.anonymous, c.take), 0)
    evicts = taking & (c.take > plain)
    evicted = pick(evicts, jnp.minimum(c.take - plain, s[HI] - s[LO]), 0)
    emptied = evicts & (s[HI] - evicted == s[LO])

    # Release.
    has_hold = pops & (top != NONE)
    last_holder = has_hold & (s[REF] == 1)
    neighbours = (o[COPY_NEXT] == at) | (o[COPY_PREV] == at)
    merges = last_holder & (c.queue_tail != NONE) & (o[OF] == s[OF]) & (o[LO] == s[HI]) & neighbours
    appends = last_holder & ~merges
    hold_ends = has_hold & (s[LO] <= hold_first)
    released = pops & ((top == NONE) | (hold_ends & (hold_next == NONE)))
    detaches = releasing & ~c.detached & ~registers
    leaves_eager = detaches & (mine[MODE] == EAGER)
    unhashed = pick(detaches, c.release_blocks - mine[REGISTERED], 0)

    # Register: raise the request's last segment, or a new one behind all copies of the node.
    last_copy = (s[COPY_NEXT] == NONE) | ((o[COPY_NEXT] == NONE) & ((o[HI] <= start) | (o[LO] >= stop)))
    extends = registers & (top != NONE) & (s[OF] == node) & (s[HI] == start) & (s[REF] == 1) & last_copy
    adds = registers & ~extends
    moves_on = (stop == node_end) & further & ~for_owner

    # Search: pieces of the chain along the copies of the node.
    visit = searching & ~at_end & ~for_owner
    gap = visit & (at == NONE)
    cap = pick(c.cursor == START, jnp.minimum(limit, node_end), c.cap)
    covers = visit & ~gap & (s[LO] <= c.position) & (c.position < s[HI])
    piece_end = jnp.minimum(s[HI], cap)
    cuts_above = covers & touching & (piece_end < s[HI])
    cuts_below = covers & touching & ~cuts_above & (s[LO] < c.position)
    cuts = cuts_above | cuts_below
    takes_piece = covers & ~cuts
    holds_piece = takes_piece & touching
    piece = piece_end - c.position
    position = pick(takes_piece, piece_end, c.position)
    in_queue = s[REF] == 0
    unqueues = holds_piece & in_queue
    next_path = pick(takes_piece & (piece_end == node_end) & further, path + 1, path)
    search_ends = searching & ~for_owner & (gap | (position >= limit))
    touched = touching & search_ends
    cut = pick(cuts_above, piece_end, c.position)

    # Join the decoding requests.
    takes_over = joins & (owner != NONE)
    becomes_owner = joins & (owner == NONE) & ~further
    becomes_eager = joins & (owner == NONE) & further
    registered_all = pick(registers, ~for_owner & (stop >= target), ~joins)
    register_ends = registering & ~for_owner & (becomes_owner | becomes_eager | (registered_all & ~c.register_joins))
    register_ends = register_ends | (registering & ~registers & ~for_owner & ~joins)

    # Insert into the eager list: `mine` is the row of `insert_after`.
    steps_back = inserting & (c.insert_after != NONE) & (c.insert_after > c.insert)
    inserts = inserting & ~steps_back
    follower = pick(c.insert_after == NONE, c.eager_first, mine[EAGER_NEXT])

    unlinks_copy = emptied | merges
    frees_segment = unlinks_copy
    needs_segment = adds | cuts
    pushes = adds | holds_piece
    mine_cell = limits.visitor_rows + jnp.maximum(me, 0) * VISITOR
    whose_cell = limits.visitor_rows + jnp.maximum(who, 0) * VISITOR
    insert_cell = limits.visitor_rows + jnp.maximum(c.insert, 0) * VISITOR

    def segment_cell(index: jax.Array, name: int) -> jax.Array:
        return limits.segment_rows + index * SEGMENT + name

    def visitor_cell(index: jax.Array, name: int) -> jax.Array:
        return limits.visitor_rows + index * VISITOR + name

    new_cell = limits.segment_rows + jnp.minimum(new, limits.segments) * SEGMENT
    hold_cell = limits.hold_rows + jnp.minimum(new_hold, limits.holds) * HOLD
    none = jnp.int32(NONE)
    before = pick(s[COPY_PREV] != NONE, segment_cell(s[COPY_PREV], COPY_NEXT), of_cell + HEAD)
    after = pick(s[COPY_NEXT] != NONE, segment_cell(s[COPY_NEXT], COPY_PREV), of_cell + TAIL)
    tail = head_tail_owner[TAIL]
    tail_cell = pick(tail != NONE, segment_cell(tail, COPY_NEXT), node_cell + HEAD)
    queued_cut = cuts & in_queue
    first_admission = mine[HIT_FIRST] == NONE
    hit_tokens = limit * size
    hits = pick(first_admission, hit_tokens, pick(mine[HIT_LATER] == NONE, 0, mine[HIT_LATER]) + hit_tokens)
    cells = [
        # The segment at hand.
        (cuts, at_cell + LO, cut),
        (evicts | extends, at_cell + HI, pick(extends, stop, s[HI] - evicted)),
        (has_hold | holds_piece, at_cell + REF, s[REF] + pick(holds_piece, 1, -1)),
        (appends, at_cell + QUEUE_PREV, c.queue_tail),
        (
            appends | frees_segment | queued_cut,
            at_cell + QUEUE_NEXT,
            pick(frees_segment, c.segment_free, pick(queued_cut, new, none)),
        ),
        (cuts, at_cell + COPY_NEXT, new),
        (cuts, at_cell + BELOW, new),
        # Its neighbours among the copies and in the queue.
        (unlinks_copy, before, s[COPY_NEXT]),
        (unlinks_copy | cuts, after, pick(cuts, new, s[COPY_PREV])),
        (
            (emptied | unqueues | queued_cut) & (s[QUEUE_NEXT] != NONE),
            segment_cell(s[QUEUE_NEXT], QUEUE_PREV),
            pick(queued_cut, new, pick(emptied, none, s[QUEUE_PREV])),
        ),
        (unqueues & (s[QUEUE_PREV] != NONE), segment_cell(s[QUEUE_PREV], QUEUE_NEXT), s[QUEUE_NEXT]),
        (merges, segment_cell(c.queue_tail, LO), s[LO]),
        (appends & (c.queue_tail != NONE), segment_cell(c.queue_tail, QUEUE_NEXT), at),
        # A new segment.
        (needs_segment, new_cell + OF, pick(adds, node, s[OF])),
        (needs_segment, new_cell + LO, pick(adds, start, s[LO])),
        (needs_segment, new_cell + HI, pick(adds, stop, cut)),
        (needs_segment, new_cell + REF, pick(adds, 1, s[REF])),
        (needs_segment, new_cell + QUEUE_PREV, pick(queued_cut, at, none)),
        (needs_segment, new_cell + QUEUE_NEXT, pick(queued_cut, s[QUEUE_NEXT], none)),
        (needs_segment, new_cell + COPY_PREV, pick(adds, tail, at)),
        (needs_segment, new_cell + COPY_NEXT, pick(adds, none, s[COPY_NEXT])),
        (needs_segment, new_cell + BELOW, pick(adds, none, s[BELOW])),
        (adds, tail_cell, new),
        (adds, node_cell + TAIL, new),
        # Holds.
        (pushes, hold_cell, pick(adds, new, at)),
        (pushes, hold_cell + 1, pick(adds, start, c.position)),
        (pushes, hold_cell + 2, top),
        (hold_ends, limits.hold_rows + jnp.maximum(top, 0) * HOLD + 2, c.hold_free),
        # The node's owner.
        (
            becomes_owner | takes_over | (detaches & (mine[MODE] == OWNS)),
            node_cell + OWNER,
            pick(becomes_owner, me, none),
        ),
        # The request.
        (pushes | hold_ends, whose_cell + TOP, pick(pushes, new_hold, hold_next)),
        (registers | touched, whose_cell + REGISTERED, pick(registers, stop, limit)),
        ((registers & moves_on) | touched, whose_cell + PATH, pick(touched, next_path, path + 1)),
        (joins & ~takes_over, mine_cell + BASE, c.register_tokens - now - 1),
        (
            (joins & ~takes_over) | detaches | touched,
            mine_cell + MODE,
            pick(becomes_owner, OWNS, pick(becomes_eager, EAGER, SETTLED)),
        ),
        (takes_over, visitor_cell(owner, MODE), jnp.int32(EAGER)),
        (touched, mine_cell + pick(first_admission, HIT_FIRST, HIT_LATER), hits),
        # The eager list.
        (inserts, insert_cell + EAGER_PREV, c.insert_after),
        (inserts, insert_cell + EAGER_NEXT, follower),
        (
            (inserts & (c.insert_after != NONE)) | (leaves_eager & (mine[EAGER_PREV] != NONE)),
            visitor_cell(pick(inserts, c.insert_after, mine[EAGER_PREV]), EAGER_NEXT),
            pick(inserts, c.insert, mine[EAGER_NEXT]),
        ),
        (
            (inserts & (follower != NONE)) | (leaves_eager & (mine[EAGER_NEXT] != NONE)),
            visitor_cell(pick(inserts, follower, mine[EAGER_NEXT]), EAGER_PREV),
            pick(inserts, c.insert, mine[EAGER_PREV]),
        ),
    ]
    assert len(cells) <= PREFIX_SINKS
    segment_after = segment(new)[QUEUE_NEXT]
    hold_after = read(memory, limits.hold_rows + jnp.maximum(c.hold_free, 0) * HOLD, HOLD)[2]

    eager_first = pick(leaves_eager & (mine[EAGER_PREV] == NONE), mine[EAGER_NEXT], c.eager_first)
    eager_first = pick(inserts & (c.insert_after == NONE), c.insert, eager_first)
    eager_last = pick(leaves_eager & (mine[EAGER_NEXT] == NONE), mine[EAGER_PREV], c.eager_last)
    eager_last = pick(inserts & (follower == NONE), c.insert, eager_last)
    queue_head = pick(emptied, s[QUEUE_NEXT], c.queue_head)
    queue_head = pick(unqueues & (s[QUEUE_PREV] == NONE), s[QUEUE_NEXT], queue_head)
    queue_head = pick(appends & (c.queue_tail == NONE), at, queue_head)
    queue_tail = pick(emptied & (s[QUEUE_NEXT] == NONE), NONE, c.queue_tail)
    queue_tail = pick(unqueues & (s[QUEUE_NEXT] == NONE), s[QUEUE_PREV], queue_tail)
    queue_tail = pick(queued_cut & (s[QUEUE_NEXT] == NONE), new, queue_tail)
    queue_tail = pick(appends, at, queue_tail)
    recycled, recycled_hold = needs_segment & (c.segment_free != NONE), pushes & (c.hold_free != NONE)
    walk = pick((walking & ~registers) | (leaves_eager & (c.walk == me)), mine[EAGER_NEXT], c.walk)
    # Who enters the list may still have its turn in this iteration.
    walk = pick(inserts & ((walk == NONE) | (walk > c.insert)), c.insert, walk)
    segment_free = pick(frees_segment, at, pick(recycled, segment_after, c.segment_free))
    result = c._replace(
        anonymous=c.anonymous - plain + unhashed,
        queue_head=queue_head,
        queue_tail=queue_tail,
        segment_free=segment_free,
        segment_next=c.segment_next + count(needs_segment & ~recycled),
        hold_free=pick(hold_ends, top, pick(recycled_hold, hold_after, c.hold_free)),
        hold_next=c.hold_next + count(pushes & ~recycled_hold),
        overflow=c.overflow | (needs_segment & (new >= limits.segments)) | (pushes & (new_hold >= limits.holds)),
        eager_first=eager_first,
        eager_last=eager_last,
        insert=pick(inserts, NONE, pick(takes_over, owner, pick(becomes_eager, me, c.insert))),
        insert_after=pick(steps_back, mine[EAGER_PREV], pick(inserting, c.insert_after, c.eager_last)),
        touch=pick(touched, NONE, c.touch),
        take=c.take - plain - evicted,
        release=pick(released, NONE, c.release),
        release_at=pick(has_hold & ~hold_ends, s[BELOW], pick(hold_ends, NONE, c.release_at)),
        detached=(c.detached | detaches) & ~released,
        walk=walk,
        register=pick(register_ends, NONE, c.register),
        look=pick(looking & search_ends, NONE, c.look),
        position=position,
        path=pick(visit, next_path, c.path),
        cursor=pick(
            cuts_above,
            new,
            pick(takes_piece, START, pick(visit & ~gap & ~covers, s[COPY_NEXT], pick(visit, at, c.cursor))),
        ),
        cap=pick(visit, pick(covers | (s[LO] <= c.position), cap, jnp.minimum(cap, s[LO])), c.cap),
        idle=c.idle + pick(takes_piece & in_queue, piece, 0),
        found=pick(looking & search_ends, c.look, c.found),
        contested=pick(looking & search_ends, gap & (owner != NONE), c.contested),
    )
    freed = unhashed + pick(last_holder, s[HI] - s[LO], 0)
    return result._replace(memory=write_cells(memory, limits.prefix_sinks, cells)), freed


def count(condition: jax.Array) -> jax.Array:
    return condition.astype(jnp.int32)
