"""The running requests in the order of admission, for the policy "priority" where that order counts.

With prefix caching it does: which blocks are evicted depends on how many are taken before a victim gives back its own,
and what the victim leaves behind on whether its turn had come. So an iteration that may not fit is planned request by
request in the order of the list, as vLLM 0.33.0 goes through it (v1/core/sched/scheduler.py): each takes its blocks and
registers those that will be full, whether or not it is preempted afterwards. Then the iteration is scheduled with those
that are left.

Before 0.33 a request that preempted itself ended pass 1 (Limits.ends): those behind it are not scheduled. A decoding
request that misses its turn becomes a prompt in progress that lacks one token, which is what a request is that resumes
with all but its last token at hand: from the last on they leave the calendar, one a step, and join it again after their
next iteration.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine.blocks import blocks_for, quotient, remainder
from jaxsim.engine.layout import AHEAD, BEHIND, FIT, NONE, ORDER, OUTPUT, PLAN, PROMPT, Knobs, Limits

NOBODY = -2  # misses a turn


class Roster(NamedTuple):
    """The ends of a list that AHEAD and BEHIND link; scalars, int32."""

    admissions: jax.Array  # so far
    first: jax.Array
    last: jax.Array


class Turn(NamedTuple):
    """Scalars."""

    opens: jax.Array  # bool: planning begins with this step
    tokens: jax.Array  # int32, that the victim has blocks for
    granted: jax.Array  # bool: the victim had its turn


class Miss(NamedTuple):
    """A request that misses its turn. Scalars."""

    decoding: jax.Array  # bool: one does, and was decoding
    before: jax.Array  # int32, the prompts in progress between which it goes, or NONE
    behind: jax.Array


def initial_roster() -> Roster:
    return Roster(jnp.int32(0), jnp.int32(NONE), jnp.int32(NONE))


def links(limits: Limits, roster: Roster, look: Any, p: Any, a: Any) -> tuple[Roster, list[tuple]]:
    """The list after a step in which one leaves or one is admitted, and the cells to write."""
    pick, none = jnp.where, jnp.int32(NONE)
    leaves = look.finishes | p.preempts
    ahead, behind = look.leaver_ticket[AHEAD], look.leaver_ticket[BEHIND]

    def cell(request: jax.Array, name: int) -> jax.Array:
        return limits.tickets + jnp.maximum(request, 0) * limits.ticket + name

    cells = [
        (leaves & (ahead != NONE), cell(ahead, BEHIND), behind),
        (leaves & (behind != NONE), cell(behind, AHEAD), ahead),
        (a.admits & (roster.last != NONE), cell(roster.last, BEHIND), look.joiner),
        (a.admits, cell(look.joiner, ORDER), roster.admissions),
        (a.admits, cell(look.joiner, AHEAD), roster.last),
        (a.admits, cell(look.joiner, BEHIND), none),
    ]
    first = pick(leaves & (ahead == NONE), behind, pick(a.admits & (roster.last == NONE), look.joiner, roster.first))
    last = pick(leaves & (behind == NONE), ahead, pick(a.admits, look.joiner, roster.last))
    return Roster(roster.admissions + a.admits.astype(jnp.int32), first, last), cells


def missing(queue: Any) -> jax.Array:
    """bool: the plan is made but for those that miss their turn."""
    return queue.served != NOBODY


def miss(queue: Any, look: Any) -> Miss:
    """Whether `joiner` is one that leaves the calendar; those behind it are prompts in progress all."""
    return Miss(look.active & missing(queue) & ~look.prompted, look.before, look.joiner_ticket[BEHIND])


def wish(queue: Any, look: Any, wanted: jax.Array, budget: jax.Array) -> jax.Array:
    """Tokens of the prompt `joiner`, which lacks `wanted`; `budget`: tokens for prompts. They are fixed before anybody
    is preempted for them."""
    planned_before = jnp.where(queue.planning, queue.tokens, 0)
    tokens = jnp.where(queue.reserved > 0, queue.reserved, jnp.minimum(wanted, budget - planned_before))
    return jnp.where(queue.planned, look.joiner_ticket[PLAN], tokens)


def asks(
    limits: Limits, knobs: Knobs, s: Any, look: Any, due: jax.Array, demand: jax.Array, budget: jax.Array,
    prompts: jax.Array, threshold: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Blocks that are asked for in this step, and whether the iteration may not fit and must be planned.

    `due`: blocks of the decodes; `demand`: these and those of the prompt `joiner`; `budget`: tokens for prompts, of
    which there are at most `prompts`, with `threshold` tokens each.
    """
    queue, row = s.queue, look.row
    most = demand
    if limits.threshold:
        together = quotient(budget, knobs.block_size) + 1 + prompts
        each = jnp.where(threshold > 0, prompts * blocks_for(threshold, knobs.block_size), together)
        most = due + jnp.where(look.prompted, jnp.minimum(together, each), 0)
    doubtful = ~s.begun & ~queue.planning & ~queue.planned & (most > s.free)
    context = row[PROMPT] + row[OUTPUT] - (row[FIT] - s.now) - 1
    own = (remainder(context, knobs.block_size) == 0).astype(jnp.int32)
    demand = jnp.where(queue.planning, jnp.where(look.prompted, demand - due, own), demand)
    nothing = queue.planned | doubtful
    if limits.ends:
        nothing = nothing | missing(queue)
    return jnp.where(nothing, 0, demand), doubtful


def turn(look: Any, opens: jax.Array, computed: jax.Array, in_prompt: jax.Array) -> Turn:
    """`computed`: tokens of the victim; `in_prompt`: whether its prompt was in progress."""
    granted = look.leaver_ticket[ORDER] < look.joiner_ticket[ORDER]
    tokens = computed + jnp.where(in_prompt, look.leaver_ticket[PLAN], granted.astype(jnp.int32))
    return Turn(opens, tokens, granted)


def revised(limits: Limits, queue: Any, look: Any, opens: jax.Array, grants: jax.Array, p: Any) -> Any:
    """The plan after a step, of which `p` is an Outcome; `grants`: `joiner` gets what it asks for in its turn."""
    behind = look.joiner_ticket[BEHIND]
    itself = p.pops & (look.leaver == look.joiner)
    cursor = jnp.where(opens, queue.roster.first, jnp.where(grants | itself, behind, queue.cursor))
    planning = queue.planning | opens
    if limits.ends:
        ahead, passed = look.joiner_ticket[AHEAD], missing(queue) & p.decided
        starts = itself & (behind != NONE)
        cursor = jnp.where(starts, queue.roster.last, jnp.where(passed, ahead, cursor))
        cursor = jnp.where(passed & (ahead == queue.served), NONE, cursor)
        served = jnp.where(starts, ahead, jnp.where(cursor == NONE, NOBODY, queue.served))
        queue = queue._replace(served=served)
    ends = planning & (cursor == NONE)
    reserved = jnp.where(p.pops & look.prompted & ~itself, p.tokens, 0)
    uses = queue.planned & p.passes & look.prompted
    lost = jnp.where(p.in_prompt, look.leaver_ticket[PLAN], 0)
    return queue._replace(
        reserved=jnp.where(grants | p.pops, reserved, queue.reserved),
        cursor=cursor,
        planning=planning & ~ends,
        planned=queue.planned | ends,
        tokens=queue.tokens - lost + jnp.where(grants, p.tokens, 0) - jnp.where(uses, p.tokens, 0),
    )
