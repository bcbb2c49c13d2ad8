"""One operation on the segments of the prefix cache: what it does, and the cells that it writes; see prefix.py."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine.blocks import add_phase, remainder
from jaxsim.engine.cache import (
    BASE,
    BELOW,
    BLOCKS,
    COPY_NEXT,
    COPY_PREV,
    EAGER,
    EAGER_NEXT,
    EAGER_PREV,
    HEAD,
    HI,
    HIT_FIRST,
    HIT_LATER,
    LEAVER_NEXT,
    LO,
    MODE,
    OF,
    ORDER,
    OWNER,
    OWNS,
    PATH,
    QUEUE_NEXT,
    QUEUE_PREV,
    REF,
    REGISTERED,
    SETTLED,
    START,
    TAIL,
    TOP,
    Cache,
    View,
    count,
)
from jaxsim.engine.layout import HOLD, NODE, NONE, SEGMENT, Limits


class Change(NamedTuple):
    """What an operation does, and how much; int32 unless noted."""

    plain: jax.Array  # anonymous blocks taken
    evicts: jax.Array  # bool: a segment loses `evicted` blocks
    evicted: jax.Array
    emptied: jax.Array  # bool: all of them
    has_hold: jax.Array  # bool: a hold is given back, or a segment of it
    last_holder: jax.Array  # bool: nobody else holds the segment
    merges: jax.Array  # bool: it becomes one with the tail of the queue
    appends: jax.Array  # bool: it becomes the tail
    hold_ends: jax.Array  # bool: it was the last segment of the hold
    released: jax.Array  # bool: it was the last hold
    detaches: jax.Array  # bool: the request neither owns a node nor is eager any more
    leaves_eager: jax.Array  # bool: it was
    unhashed: jax.Array  # its blocks without a key
    spills: jax.Array | None  # with Limits.tail, bool: they become a segment at the tail of the queue
    grows: jax.Array | None  # bool: or part of the one that is there
    extends: jax.Array  # bool: a segment is raised to turn.stop
    adds: jax.Array  # bool: a new segment for [turn.start, turn.stop)
    moves_on: jax.Array  # bool: the next block is in the next node
    visit: jax.Array  # bool: a search looks at a copy
    gap: jax.Array  # bool: there is none
    cap: jax.Array  # the end of what the copy may give
    covers: jax.Array  # bool: it has the next block
    cuts_above: jax.Array  # bool: the copy is cut at the end of the piece
    cuts: jax.Array  # bool: there, or at its start
    takes_piece: jax.Array  # bool: the piece is a whole segment, or need not be
    holds_piece: jax.Array  # bool: the request now holds it
    piece: jax.Array  # blocks
    position: jax.Array  # blocks found
    in_queue: jax.Array  # bool: the segment at hand is in the free queue
    unqueues: jax.Array  # bool: it leaves the queue
    next_path: jax.Array  # where the search goes on
    search_ends: jax.Array  # bool
    touched: jax.Array  # bool: all hits are held
    cut: jax.Array  # where the segment is cut
    takes_over: jax.Array  # bool: the owner of the node becomes eager
    becomes_owner: jax.Array  # bool: the request owns the node
    becomes_eager: jax.Array  # bool
    register_ends: jax.Array  # bool
    steps_back: jax.Array  # bool: the place in the eager list is further ahead
    inserts: jax.Array  # bool: it is here
    follower: jax.Array  # the request behind it
    next_leaver: jax.Array  # the request that leaves after `enlist_after`
    enlists: jax.Array  # bool: the request is entered before it


def change(limits: Limits, size: jax.Array, c: Cache, v: View) -> Change:
    """Decide on one operation."""
    pick, job, turn, s, o, at = jnp.where, v.job, v.turn, v.segment, v.other, v.at
    mine, hold, path, node, node_end, further = v.mine, v.hold, v.path, v.node, v.node_end, v.further
    top, owner = turn.whose[TOP], v.copies[OWNER]

    # Take: from the anonymous blocks, then from the top of the first segment.
    plain = pick(job.taking, jnp.minimum(c.anonymous, c.take), 0)
    evicts = job.taking & (c.take > plain)
    evicted = pick(evicts, jnp.minimum(c.take - plain, s[HI] - s[LO]), 0)
    emptied = evicts & (s[HI] - evicted == s[LO])

    # Register: raise the request's last segment, or a new one behind all copies of the node.
    last_copy = (s[COPY_NEXT] == NONE) | ((o[COPY_NEXT] == NONE) & ((o[HI] <= turn.start) | (o[LO] >= turn.stop)))
    extends = turn.registers & (top != NONE) & (s[OF] == node) & (s[HI] == turn.start) & (s[REF] == 1) & last_copy
    adds = turn.registers & ~extends
    moves_on = (turn.stop == node_end) & further & ~turn.for_owner

    # Release; the segment that gets the last blocks to register may be given back at once.
    last_registration = turn.registers & ~turn.for_owner & (turn.stop >= turn.target)
    at_once = last_registration & extends & (s[COPY_NEXT] == NONE) & (not limits.tail)
    pops = job.releasing & (~turn.registers | at_once)
    registered = pick(turn.registers, turn.stop, mine[REGISTERED])
    high = pick(extends, turn.stop, s[HI])
    detaches = pops & ~c.detached
    unhashed = pick(detaches, pick(c.alone != NONE, c.alone_blocks, mine[BLOCKS]) - registered, 0)
    if limits.roster:  # who was to leave may have been preempted since
        unhashed = pick(job.releasing & (c.alone == NONE) & (mine[BLOCKS] == NONE), 0, unhashed)
    has_hold = pops & (top != NONE)
    if limits.ends:
        unhashed, has_hold = pick(turn.stays, 0, unhashed), has_hold & ~turn.stays
    spills, grows = None, None
    if limits.tail:
        # These are an operation of their own; before an empty queue they are as good as in front.
        has_hold = has_hold & (unhashed == 0)
        queued = (unhashed > 0) & (c.queue_tail != NONE)
        grows = queued & (o[OF] == limits.nodes)
        spills = queued & ~grows
    last_holder = has_hold & (s[REF] == 1)
    neighbours = (o[COPY_NEXT] == at) | (o[COPY_PREV] == at)
    merges = last_holder & (c.queue_tail != NONE) & (o[OF] == s[OF]) & (o[LO] == high) & neighbours
    appends = last_holder & ~merges
    hold_ends = has_hold & (s[LO] <= hold[1])
    released = pops & ((top == NONE) | (hold_ends & (hold[2] == NONE)))
    if limits.ends:
        released = released | (pops & turn.stays)
    leaves_eager = detaches & (mine[MODE] == EAGER)

    # Search: pieces of the chain along the copies of the node.
    visit = job.searching & (c.position < c.limit) & ~turn.for_owner
    gap = visit & (at == NONE)
    cap = pick(c.cursor == START, jnp.minimum(c.limit, node_end), c.cap)
    covers = visit & ~gap & (s[LO] <= c.position) & (c.position < s[HI])
    piece_end = jnp.minimum(s[HI], cap)
    cuts_above = covers & job.touching & (piece_end < s[HI])
    cuts_below = covers & job.touching & ~cuts_above & (s[LO] < c.position)
    cuts = cuts_above | cuts_below
    takes_piece = covers & ~cuts
    holds_piece = takes_piece & job.touching
    piece = piece_end - c.position
    position = pick(takes_piece, piece_end, c.position)
    in_queue = s[REF] == 0
    unqueues = holds_piece & in_queue
    crosses = takes_piece & (piece_end == node_end) & further
    next_path = pick(crosses, path + 1, path)
    search_ends = job.searching & ~turn.for_owner & (gap | (crosses & v.blank) | (position >= c.limit))
    touched = job.touching & search_ends
    cut = pick(cuts_above, piece_end, c.position)

    # Join the decoding requests.
    takes_over = turn.joins & (owner != NONE)
    # Mostly the next block is of the same node, which nobody owns: then the last registration does this too.
    joins_too = job.registering & last_registration & c.register_joins
    joins_too = joins_too & (turn.stop < node_end) & (turn.stop < v.length)
    becomes_owner = (turn.joins | joins_too) & (owner == NONE) & ~further
    becomes_eager = turn.joins & (owner == NONE) & further
    nothing_to_do = ~turn.registers & ~turn.for_owner & ~turn.joins
    ends = becomes_owner | becomes_eager | nothing_to_do | (last_registration & ~c.register_joins)
    register_ends = job.registering & ends

    # Insert into the eager list: `mine` is the row of `insert_after`.
    later = c.insert_after > c.insert if c.orders is None else mine[ORDER] > c.orders.insert
    steps_back = job.inserting & (c.insert_after != NONE) & later
    inserts = job.inserting & ~steps_back
    follower = pick(c.insert_after == NONE, c.eager_first, mine[EAGER_NEXT])

    # The same for the list of those that leave.
    next_leaver = pick(c.enlist_after == NONE, c.release, mine[LEAVER_NEXT])
    sooner = next_leaver < c.enlist if c.orders is None else v.next_order < c.orders.enlist
    enlists = job.enlisting & ~((next_leaver != NONE) & sooner)
    return Change(
        plain,
        evicts,
        evicted,
        emptied,
        has_hold,
        last_holder,
        merges,
        appends,
        hold_ends,
        released,
        detaches,
        leaves_eager,
        unhashed,
        spills,
        grows,
        extends,
        adds,
        moves_on,
        visit,
        gap,
        cap,
        covers,
        cuts_above,
        cuts,
        takes_piece,
        holds_piece,
        piece,
        position,
        in_queue,
        unqueues,
        next_path,
        search_ends,
        touched,
        cut,
        takes_over,
        becomes_owner,
        becomes_eager,
        register_ends,
        steps_back,
        inserts,
        follower,
        next_leaver,
        enlists,
    )


def carry_out(
    limits: Limits, size: jax.Array, now: jax.Array, c: Cache, v: View, d: Change
) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
    """The cache after an operation but for its memory; the memory's cells to write and their values; blocks freed."""
    pick, none, job, turn = jnp.where, jnp.int32(NONE), v.job, v.turn
    mine, path, node, at, s = v.mine, v.path, v.node, v.at, v.segment
    me, top, hold_next = job.me, turn.whose[TOP], v.hold[2]
    owner, tail = v.copies[OWNER], v.copies[TAIL]

    def segment_cell(index: jax.Array, name: int) -> jax.Array:
        return limits.segment_rows + index * SEGMENT + name

    def visitor_cell(index: jax.Array, name: int | jax.Array) -> jax.Array:
        return limits.visitor_rows + jnp.maximum(index, 0) * limits.visitor + name

    new = pick(c.segment_free != NONE, c.segment_free, c.segment_next)
    new_hold = pick(c.hold_free != NONE, c.hold_free, c.hold_next)
    unlinks_copy = d.emptied | d.merges
    needs_segment, pushes, queued_cut = d.adds | d.cuts, d.adds | d.holds_piece, d.cuts & d.in_queue
    at_cell, new_cell = segment_cell(jnp.maximum(at, 0), 0), segment_cell(jnp.minimum(new, limits.segments), 0)
    of_cell, node_cell = limits.node_rows + s[OF] * NODE, limits.node_rows + node * NODE
    mine_cell, whose_cell, insert_cell = visitor_cell(me, 0), visitor_cell(turn.who, 0), visitor_cell(c.insert, 0)
    leaver_cell = visitor_cell(c.enlist, 0)
    hold_cell = limits.hold_rows + jnp.minimum(new_hold, limits.holds) * HOLD
    before = pick(s[COPY_PREV] != NONE, segment_cell(s[COPY_PREV], COPY_NEXT), of_cell + HEAD)
    after = pick(s[COPY_NEXT] != NONE, segment_cell(s[COPY_NEXT], COPY_PREV), of_cell + TAIL)
    tail_cell = pick(tail != NONE, segment_cell(tail, COPY_NEXT), node_cell + HEAD)
    first_admission = mine[HIT_FIRST] == NONE
    hit_tokens = c.limit * size
    next_in_list = mine[LEAVER_NEXT]
    if not limits.roster:
        next_in_list = pick(next_in_list >= c.dropped, none, next_in_list)
    hits = pick(first_admission, hit_tokens, pick(mine[HIT_LATER] == NONE, 0, mine[HIT_LATER]) + hit_tokens)
    cells = [
        # The segment at hand.
        (d.cuts, at_cell + LO, d.cut),
        (d.evicts | d.extends, at_cell + HI, pick(d.extends, turn.stop, s[HI] - d.evicted)),
        (d.has_hold | d.holds_piece, at_cell + REF, s[REF] + pick(d.holds_piece, 1, -1)),
        (d.appends, at_cell + QUEUE_PREV, c.queue_tail),
        (
            d.appends | unlinks_copy | queued_cut,
            at_cell + QUEUE_NEXT,
            pick(unlinks_copy, c.segment_free, pick(queued_cut, new, none)),
        ),
        (d.cuts, at_cell + COPY_NEXT, new),
        (d.cuts, at_cell + BELOW, new),
        # Its neighbours among the copies and in the queue.
        (unlinks_copy, before, s[COPY_NEXT]),
        (unlinks_copy | d.cuts, after, pick(d.cuts, new, s[COPY_PREV])),
        (
            (d.emptied | d.unqueues | queued_cut) & (s[QUEUE_NEXT] != NONE),
            segment_cell(s[QUEUE_NEXT], QUEUE_PREV),
            pick(queued_cut, new, pick(d.emptied, none, s[QUEUE_PREV])),
        ),
        (d.unqueues & (s[QUEUE_PREV] != NONE), segment_cell(s[QUEUE_PREV], QUEUE_NEXT), s[QUEUE_NEXT]),
        (d.merges, segment_cell(c.queue_tail, LO), s[LO]),
        (d.appends & (c.queue_tail != NONE), segment_cell(c.queue_tail, QUEUE_NEXT), at),
        # A new segment.
        (needs_segment, new_cell + OF, pick(d.adds, node, s[OF])),
        (needs_segment, new_cell + LO, pick(d.adds, turn.start, s[LO])),
        (needs_segment, new_cell + HI, pick(d.adds, turn.stop, d.cut)),
        (needs_segment, new_cell + REF, pick(d.adds, 1, s[REF])),
        (needs_segment, new_cell + QUEUE_PREV, pick(queued_cut, at, none)),
        (needs_segment, new_cell + QUEUE_NEXT, pick(queued_cut, s[QUEUE_NEXT], none)),
        (needs_segment, new_cell + COPY_PREV, pick(d.adds, tail, at)),
        (needs_segment, new_cell + COPY_NEXT, pick(d.adds, none, s[COPY_NEXT])),
        (needs_segment, new_cell + BELOW, pick(d.adds, none, s[BELOW])),
        (d.adds, tail_cell, new),
        (d.adds, node_cell + TAIL, new),
        # Holds.
        (pushes, hold_cell, pick(d.adds, new, at)),
        (pushes, hold_cell + 1, pick(d.adds, turn.start, c.position)),
        (pushes, hold_cell + 2, top),
        (d.hold_ends, limits.hold_rows + jnp.maximum(top, 0) * HOLD + 2, c.hold_free),
        # The node's owner.
        (
            d.becomes_owner | d.takes_over | (d.detaches & (mine[MODE] == OWNS)),
            node_cell + OWNER,
            pick(d.becomes_owner, me, none),
        ),
        # The request.
        (pushes | d.hold_ends, whose_cell + TOP, pick(pushes, new_hold, hold_next)),
        (turn.registers | d.touched, whose_cell + REGISTERED, pick(turn.registers, turn.stop, c.limit)),
        ((turn.registers & d.moves_on) | d.touched, whose_cell + PATH, pick(d.touched, d.next_path, path + 1)),
        (d.becomes_owner | d.becomes_eager, mine_cell + BASE, c.register_tokens - now - 1),
        (
            d.becomes_owner | d.becomes_eager | d.detaches | d.touched,
            mine_cell + MODE,
            pick(d.becomes_owner, OWNS, pick(d.becomes_eager, EAGER, SETTLED)),
        ),
        (d.takes_over, visitor_cell(owner, MODE), jnp.int32(EAGER)),
        (d.touched, mine_cell + pick(first_admission, HIT_FIRST, HIT_LATER), hits),
        # The eager list.
        (d.inserts, insert_cell + EAGER_PREV, c.insert_after),
        (d.inserts, insert_cell + EAGER_NEXT, d.follower),
        (
            (d.inserts & (c.insert_after != NONE)) | (d.leaves_eager & (mine[EAGER_PREV] != NONE)),
            visitor_cell(pick(d.inserts, c.insert_after, mine[EAGER_PREV]), EAGER_NEXT),
            pick(d.inserts, c.insert, mine[EAGER_NEXT]),
        ),
        (
            (d.inserts & (d.follower != NONE)) | (d.leaves_eager & (mine[EAGER_NEXT] != NONE)),
            visitor_cell(pick(d.inserts, d.follower, mine[EAGER_NEXT]), EAGER_PREV),
            pick(d.inserts, c.insert, mine[EAGER_PREV]),
        ),
        (d.enlists, leaver_cell + LEAVER_NEXT, d.next_leaver),
        (d.enlists, leaver_cell + BLOCKS, c.enlist_blocks),
        (d.enlists & (c.enlist_after != NONE), mine_cell + LEAVER_NEXT, c.enlist),
    ]
    if c.orders is not None:
        gone = c.alone != NONE
        gone = d.released & (gone | turn.stays if limits.ends else gone)
        cells += [(d.touched, mine_cell + ORDER, c.orders.touch), (gone, mine_cell + BLOCKS, none)]
    anonymous = c.anonymous - d.plain + d.unhashed
    if d.spills is not None and d.grows is not None:
        row = [(OF, jnp.int32(limits.nodes)), (LO, jnp.int32(0)), (HI, d.unhashed), (REF, jnp.int32(0))]
        row += [(QUEUE_PREV, c.queue_tail), *((name, none) for name in (QUEUE_NEXT, COPY_PREV, COPY_NEXT, BELOW))]
        cells += [(d.spills, new_cell + name, value) for name, value in row]
        cells.append((d.spills, segment_cell(c.queue_tail, QUEUE_NEXT), new))
        cells.append((d.grows, segment_cell(c.queue_tail, HI), v.other[HI] + d.unhashed))
        anonymous = anonymous - pick(d.spills | d.grows, d.unhashed, 0)
    assert len(cells) <= limits.prefix_memory - limits.prefix_sinks
    eager_first = pick(d.leaves_eager & (mine[EAGER_PREV] == NONE), mine[EAGER_NEXT], c.eager_first)
    eager_first = pick(d.inserts & (c.insert_after == NONE), c.insert, eager_first)
    eager_last = pick(d.leaves_eager & (mine[EAGER_NEXT] == NONE), mine[EAGER_PREV], c.eager_last)
    eager_last = pick(d.inserts & (d.follower == NONE), c.insert, eager_last)
    joins_base = pick(d.takes_over, v.owner_base, c.register_tokens - now - 1)
    eager_need = add_phase(c.eager_need, remainder(joins_base, size), count(d.takes_over | d.becomes_eager))
    eager_need = add_phase(eager_need, remainder(mine[BASE], size), -count(d.leaves_eager))
    queue_head = pick(d.emptied, s[QUEUE_NEXT], c.queue_head)
    queue_head = pick(d.unqueues & (s[QUEUE_PREV] == NONE), s[QUEUE_NEXT], queue_head)
    queue_head = pick(d.appends & (c.queue_tail == NONE), at, queue_head)
    queue_tail = pick(d.emptied & (s[QUEUE_NEXT] == NONE), NONE, c.queue_tail)
    queue_tail = pick(d.unqueues & (s[QUEUE_NEXT] == NONE), s[QUEUE_PREV], queue_tail)
    queue_tail = pick(queued_cut & (s[QUEUE_NEXT] == NONE), new, queue_tail)
    queue_tail = pick(d.appends, at, queue_tail)
    if d.spills is not None:
        needs_segment = needs_segment | d.spills
        queue_tail = pick(d.spills, new, queue_tail)
    recycled, recycled_hold = needs_segment & (c.segment_free != NONE), pushes & (c.hold_free != NONE)
    walks_on = (job.walking & ~turn.registers) | (d.leaves_eager & (c.walk == me))
    walk = pick(walks_on, mine[EAGER_NEXT], c.walk)
    walk_order: Any = None if c.orders is None else pick(walks_on, v.next_order, c.orders.walk)
    # Who enters the list may still have its turn in this iteration.
    later = walk > c.insert if c.orders is None else walk_order > c.orders.insert
    enters_walk = d.inserts & ((walk == NONE) | later)
    walk = pick(enters_walk, c.insert, walk)
    segment_free = pick(unlinks_copy, at, pick(recycled, v.spare, c.segment_free))
    result = c._replace(
        anonymous=anonymous,
        queue_head=queue_head,
        queue_tail=queue_tail,
        segment_free=segment_free,
        segment_next=c.segment_next + count(needs_segment & ~recycled),
        hold_free=pick(d.hold_ends, top, pick(recycled_hold, v.spare_hold, c.hold_free)),
        hold_next=c.hold_next + count(pushes & ~recycled_hold),
        overflow=c.overflow | (needs_segment & (new >= limits.segments)) | (pushes & (new_hold >= limits.holds)),
        eager_first=eager_first,
        eager_last=eager_last,
        eager_need=eager_need,
        insert=pick(d.inserts, NONE, pick(d.takes_over, owner, pick(d.becomes_eager, me, c.insert))),
        insert_after=pick(d.steps_back, mine[EAGER_PREV], pick(job.inserting, c.insert_after, c.eager_last)),
        touch=pick(d.touched, NONE, c.touch),
        take=c.take - d.plain - d.evicted,
        enlist=pick(d.enlists, NONE, c.enlist),
        enlist_after=pick(job.enlisting & ~d.enlists, d.next_leaver, c.enlist_after),
        release=pick(
            d.enlists & (c.enlist_after == NONE),
            c.enlist,
            pick(d.released & (c.alone == NONE), next_in_list, c.release),
        ),
        alone=pick(d.released, none, c.alone),
        release_at=pick(d.has_hold & ~d.hold_ends, s[BELOW], pick(d.hold_ends, NONE, c.release_at)),
        detached=(c.detached | d.detaches) & ~d.released,
        walk=walk,
        register=pick(d.register_ends, NONE, c.register),
        look=pick(job.looking & d.search_ends, NONE, c.look),
        position=d.position,
        path=pick(d.visit, d.next_path, c.path),
        cursor=pick(
            d.cuts_above,
            new,
            pick(d.takes_piece, START, pick(d.visit & ~d.gap & ~d.covers, s[COPY_NEXT], pick(d.visit, at, c.cursor))),
        ),
        cap=pick(d.visit, pick(d.covers | (s[LO] <= c.position), d.cap, jnp.minimum(d.cap, s[LO])), c.cap),
        idle=c.idle + pick(d.takes_piece & d.in_queue, d.piece, 0),
        found=pick(job.looking & d.search_ends, c.look, c.found),
        contested=pick(job.looking & d.search_ends, d.gap & (owner != NONE), c.contested),
    )
    if c.orders is not None:
        eager_order = pick(d.leaves_eager & (mine[EAGER_PREV] == NONE), v.next_order, c.orders.eager_first)
        eager_order = pick(d.inserts & (c.insert_after == NONE), c.orders.insert, eager_order)
        insert_order = pick(d.takes_over, v.owner_order, pick(d.becomes_eager, mine[ORDER], c.orders.insert))
        walk_order = pick(enters_walk, c.orders.insert, walk_order)
        orders = c.orders._replace(insert=insert_order, eager_first=eager_order, walk=walk_order)
        result = result._replace(orders=orders)
    freed = d.unhashed + pick(d.last_holder, pick(d.extends, turn.stop, s[HI]) - s[LO], 0)
    index = jnp.stack([pick(happens, cell, limits.prefix_sinks + i) for i, (happens, cell, _) in enumerate(cells)])
    return result, index, jnp.stack([jnp.asarray(value, jnp.int32) for _, _, value in cells]), freed
