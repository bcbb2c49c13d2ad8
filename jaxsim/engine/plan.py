"""Pass 1 under the policy "priority", where a victim may be scheduled already.

Taking requests in the order of the list and "preempt until what remains fits" come to the same: a preemption happens
exactly while those looked at and the requester together want more than there is, and it always hits the largest class.
Only a prompt's tokens depend on what was scheduled before it, and they are fixed before its first victim: `reserved`.
With a threshold, where prompts already scheduled may be victims, an iteration that might not fit is planned prompt by
prompt, then scheduled.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine.blocks import blocks_for, quotient
from jaxsim.engine.layout import NEXT, NONE, PLAN, Knobs, Limits
from jaxsim.engine.priority import Queue


class Wish(NamedTuple):
    """What pass 1 asks for."""

    plans: jax.Array  # bool: the iteration is only planned as yet
    budget: jax.Array  # tokens for `joiner` and the prompts behind it
    tokens: jax.Array  # of `joiner`
    blocks: jax.Array  # that the plan takes without `joiner`


def wish(
    limits: Limits, knobs: Knobs, queue: Queue, look: Any, begun: jax.Array, wanted: jax.Array, budget: jax.Array,
    due: jax.Array, prompts: jax.Array, free: jax.Array,
) -> Wish:  # fmt: skip
    """`wanted`: tokens that `joiner` lacks; `budget`: tokens for prompts, of which there are at most `prompts`; `due`:
    blocks that the decodes take, of `free`."""
    fixed = queue.reserved > 0
    if not limits.threshold:
        tokens = jnp.where(fixed, queue.reserved, jnp.minimum(wanted, budget))
        return Wish(jnp.bool_(False), budget, tokens, jnp.int32(0))
    most = due + quotient(budget, knobs.block_size) + 1 + prompts
    plans = ~begun & look.prompted & ~queue.planned & (queue.planning | (most > free))
    budget = budget - jnp.where(plans, queue.tokens, 0)
    tokens = jnp.where(fixed, queue.reserved, jnp.minimum(wanted, budget))
    tokens = jnp.where(queue.planned, look.joiner_ticket[PLAN], tokens)
    return Wish(plans, budget, tokens, jnp.where(plans, queue.blocks, 0))


class Outcome(NamedTuple):
    """What came of it."""

    decided: jax.Array  # bool: it was granted, or somebody preempted for it
    pops: jax.Array  # bool: somebody was, or a finished request left the list of running ones
    passes: jax.Array  # bool: tokens are scheduled
    decodes_fit: jax.Array  # bool
    in_prompt: jax.Array  # bool: the victim's prompt was in progress
    victim_computed: jax.Array
    tokens: jax.Array  # of `joiner`
    blocks: jax.Array


def revised(limits: Limits, knobs: Knobs, queue: Queue, look: Any, w: Wish, o: Outcome) -> Queue:
    """The plan after a step."""
    itself = o.in_prompt & (look.leaver == look.joiner)
    tokens = jnp.where(look.prompted & o.decodes_fit & ~itself, o.tokens, 0)
    queue = queue._replace(reserved=jnp.where(o.decided, jnp.where(o.pops, tokens, 0), queue.reserved))
    if not limits.threshold:
        return queue
    steps = o.decided & w.plans
    adds = steps & ~o.pops
    cursor = jnp.where(o.pops & ~itself, look.joiner, jnp.where(o.pops | (w.budget > o.tokens), look.row[NEXT], NONE))
    cursor = jnp.where(steps, cursor, queue.cursor)
    lost = jnp.where(o.in_prompt, look.leaver_ticket[PLAN], 0)
    held = blocks_for(o.victim_computed, knobs.block_size)
    lost_blocks = blocks_for(o.victim_computed + lost, knobs.block_size) - held
    uses = queue.planned & o.passes & look.prompted
    return queue._replace(
        cursor=cursor,
        planning=jnp.where(steps, cursor != NONE, queue.planning),
        planned=queue.planned | (steps & (cursor == NONE)),
        tokens=queue.tokens - lost + jnp.where(adds, o.tokens, 0) - jnp.where(uses, o.tokens, 0),
        blocks=queue.blocks - lost_blocks + jnp.where(adds, o.blocks, 0),
    )
