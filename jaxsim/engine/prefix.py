"""The prefix cache by runs of blocks, and the free queue in LRU order.

Rules: vLLM 0.33.0, v1/core/kv_cache_manager.py, block_pool.py and kv_cache_utils.py. Only unhashed blocks go to the
front of the free queue, so it is always [anonymous blocks][hashed segments]: a number, and a linked list. Before 0.33
they went to the tail (Limits.tail): then the number is of blocks never used, and freed ones are segments of a node that
is nobody's.

A *segment* is a run of physical blocks of one node (see chains.py) with one reference count; its blocks stand from the
last to the first in the queue. The segments of a node form a list of copies in the order of their registration, in
which a lookup takes the first that has the block. A request holds a stack of *holds* (segment, first): the segment,
then along `BELOW` until that first block, so that who splits a segment need not know its holders.

Blocks that decoding fills are registered late: while a request's next block is in the last node of its path it is the
node's *owner*, and its blocks are entered when somebody looks at the node, registers there, or it is released. A node
has one owner, the newest; the others, and requests whose outputs others continue in different ways, are *eager*: a list
that is walked in every iteration, in the order of arrival. Where that is not the order of admission, under the policy
"priority", the latter takes its place (Limits.roster).

The work comes as jobs that the scheduler posts and one call of `work` after the other carries out, each with a fixed
number of operations: enlist, touch, take, release, walk, register, look up, in this order.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxsim.engine.blocks import quotient
from jaxsim.engine.cache import (
    BASE,
    BLOCKS,
    COPY_NEXT,
    EAGER_NEXT,
    HEAD,
    LEAVER_NEXT,
    MODE,
    ORDER,
    OWNER,
    PATH,
    QUEUE_NEXT,
    REGISTERED,
    SETTLED,
    START,
    STAYS,
    TOP,
    Cache,
    Job,
    Turn,
    View,
    count,
    releases,
    takes,
    walks,
)
from jaxsim.engine.chains import Chains
from jaxsim.engine.fence import fence
from jaxsim.engine.layout import HOLD, NODE, NONE, SEGMENT, Knobs, Limits, read
from jaxsim.engine.segments import carry_out, change


def next_job(c: Cache) -> Job:
    pick = jnp.where
    left = ~c.overflow
    flags = []
    jobs = (c.insert != NONE, c.enlist != NONE, c.touch != NONE, takes(c), releases(c), walks(c))
    for outstanding in (*jobs, c.register != NONE, c.look != NONE):
        flags.append(left & outstanding)
        left = left & ~outstanding
    _, enlisting, touching, _, releasing, walking, registering, looking = flags
    leaver = pick(c.alone != NONE, c.alone, c.release)
    me = pick(touching, c.touch, pick(releasing, leaver, pick(walking, c.walk, c.insert_after)))
    me = pick(registering, c.register, pick(looking, c.look, me))
    me = pick(enlisting, c.enlist_after, me)
    return Job(*flags, searching=touching | looking, me=me)


def next_turn(
    limits: Limits, size: jax.Array, now: jax.Array, c: Cache, job: Job, mine: jax.Array, chain: jax.Array,
    owner: jax.Array, owners: jax.Array, owner_chain: jax.Array | None, node_end: jax.Array,
) -> Turn:  # fmt: skip
    """The owner registers first, up to the iteration in which its turn was before this moment.

    Under async scheduling the token that an iteration computes is not known yet when the iteration is scheduled, so
    that it counts in the next one; the last such token counts when its request is finished.
    """
    pick = jnp.where
    ahead = owner < job.me if c.orders is None else owners[ORDER] < mine[ORDER]
    if owner_chain is not None:  # those that finish give back their blocks before the next iteration's turns
        ahead = ahead & ~job.releasing
    decoded = mine[BASE] + now + count(job.walking)
    if c.orders is not None:
        decoded = decoded + count(job.releasing & (c.alone != NONE) & c.alone_granted)
    owner_decoded = owners[BASE] + now + count(job.searching | ahead)
    visiting = job.registering | job.walking
    stays: Any = None
    if limits.ends:
        blocks = pick(job.releasing & (c.alone != NONE), c.alone_blocks, mine[BLOCKS])
        stays = blocks <= STAYS
    if owner_chain is not None:
        finished = job.releasing & ((c.alone == NONE) | c.alone_finished)
        if limits.ends:
            finished = finished & ~stays
        decoded = pick(finished, chain[3], jnp.minimum(decoded, chain[3]) - 1)
        owner_decoded = jnp.minimum(owner_decoded, owner_chain[3]) - 1
        visiting = visiting | finished
    if limits.ends:
        # What the iteration in flight computes counts when that has ended, in the order of admission.
        tokens = STAYS - blocks - count(~job.releasing)
        decoded = pick(stays, tokens, decoded)
        owner_decoded = pick(owners[BLOCKS] <= STAYS, STAYS - owners[BLOCKS] - 1, owner_decoded)
        visiting = visiting | (job.releasing & stays)
    decoded = pick(mine[MODE] == SETTLED, 0, decoded)
    target = quotient(pick(job.registering, c.register_tokens, decoded), size)
    registers = job.registering | job.walking | (job.releasing & ~c.detached)
    registers = registers & (mine[REGISTERED] < target)
    joins = job.registering & ~registers & c.register_joins & (mine[REGISTERED] < chain[2])
    visits = (job.searching & (c.position < c.limit)) | (visiting & registers) | joins
    owner_target = quotient(owner_decoded, size)
    for_owner = visits & (owner != NONE) & (owner != job.me) & (owners[REGISTERED] < owner_target)
    whose = pick(for_owner, owners, mine)
    return Turn(
        registers=registers | for_owner,
        for_owner=for_owner,
        joins=joins & ~for_owner,
        start=whose[REGISTERED],
        stop=jnp.minimum(pick(for_owner, owner_target, target), node_end),
        target=target,
        who=pick(for_owner, owner, job.me),
        whose=whose,
        stays=stays,
    )


def work(
    limits: Limits, knobs: Knobs, chains: Chains, now: jax.Array, c: Cache, on: jax.Array | None
) -> tuple[Cache, jax.Array]:
    """One operation of the first outstanding job; the cache after it and the blocks that became free."""
    pick, size, which = jnp.where, knobs.block_size, knobs.chains
    memory = c.memory
    c = c._replace(memory=jnp.int32(0))

    def row(start: int, index: jax.Array, width: int) -> jax.Array:
        return read(memory, start + jnp.maximum(index, 0) * width, width)

    job = fence(on, lambda: next_job(c))
    mine = row(limits.visitor_rows, job.me, limits.visitor)
    chain = chains.requests[which, jnp.maximum(job.me, 0)]
    first, end, length, _ = chain

    def place() -> jax.Array:
        path = pick(job.searching, pick(c.path == NONE, first, c.path), mine[PATH])
        return jnp.clip(path, 0, chains.path.shape[1] - 1)

    path = fence(on, place)
    node = chains.path[which, path]
    following = row(limits.node_rows, chains.path[which, jnp.minimum(path + 1, chains.path.shape[1] - 1)], NODE)
    copies = row(limits.node_rows, node, NODE)
    node_end = chains.nodes[which, node, 1]
    owner = fence(on, lambda: copies[OWNER])
    owners = row(limits.visitor_rows, owner, limits.visitor)
    owner_chain = chains.requests[which, jnp.maximum(owner, 0)] if limits.asynchronous else None
    turn = fence(on, lambda: next_turn(limits, size, now, c, job, mine, chain, owner, owners, owner_chain, node_end))
    top = turn.whose[TOP]
    hold = row(limits.hold_rows, top, HOLD)

    def segment_at_hand() -> jax.Array:
        at = pick(c.release_at != NONE, c.release_at, hold[0])
        at = pick(job.searching, pick(c.cursor == START, copies[HEAD], c.cursor), at)
        return pick(turn.registers, pick(top == NONE, NONE, hold[0]), pick(job.taking, c.queue_head, at))

    at = fence(on, segment_at_hand)
    s = row(limits.segment_rows, at, SEGMENT)
    behind = turn.registers & ~(job.releasing & (s[COPY_NEXT] == NONE))
    view = View(
        job,
        turn,
        mine,
        length,
        path,
        path + 1 < end,
        (following[HEAD] == NONE) & (following[OWNER] == NONE),
        node,
        node_end,
        copies,
        owners[BASE],
        hold,
        at,
        s,
        row(limits.segment_rows, pick(behind, s[COPY_NEXT], c.queue_tail), SEGMENT),
        row(limits.segment_rows, c.segment_free, SEGMENT)[QUEUE_NEXT],
        row(limits.hold_rows, c.hold_free, HOLD)[2],
    )
    if limits.roster:
        leaver = pick(c.enlist_after == NONE, c.release, mine[LEAVER_NEXT])
        follower = row(limits.visitor_rows, pick(job.enlisting, leaver, mine[EAGER_NEXT]), limits.visitor)
        view = view._replace(owner_order=owners[ORDER], next_order=follower[ORDER])
    changes = fence(on, lambda: change(limits, size, c, view))
    result, index, value, freed = fence(on, lambda: carry_out(limits, size, now, c, view, changes))
    memory = memory.at[index].set(value, unique_indices=True, mode="promise_in_bounds")
    return result._replace(memory=memory), freed
