"""Rejection by queue length: a request that finds max_queued_requests waiting is turned away when it arrives.

Between two schedule() calls the queue only grows, so the requests that arrive between them are judged together, at the
second: as many as there is room for join, the rest, the later ones, are rejected. The queue is then a range of requests
with holes: the last one before a hole links to the first one behind it. Under the policy "priority", whose queue is a
bitmap, they are judged one a step, in the order of arrival, before anything is scheduled; nobody who waits makes way
for a more urgent one, since a gate in front of the server knows no priorities.

In a closed loop a client that is turned away hears of it at the end of the iteration that this schedule() call
schedules or, if that is empty, of the one in flight; without one, at once. It thinks and comes again with its next
request, as after an answer.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine.layout import LINK, NONE, ROW, Knobs, Limits, arrived_by, read_cell


class Inflow(NamedTuple):
    """Scalars, int32."""

    waiting: jax.Array  # requests that wait and were never scheduled
    end: jax.Array  # the first request that was not judged yet
    tail: jax.Array  # the last of those that wait


class Rejected(NamedTuple):
    """Clients of a closed loop that were turned away and have not come again. Scalars, int32."""

    judged: jax.Array  # in this schedule() call
    told: jax.Array  # before it: they have heard of it, and send their next requests one a step


class Gate(NamedTuple):
    """The queue after the requests that have arrived are judged. Scalars, int32 unless noted."""

    queue: Inflow
    head: jax.Array  # the first of those that wait, or the next to arrive
    next: jax.Array  # the head when that one is admitted
    links: jax.Array  # bool: `link_from` is to be linked to `link_to`
    link_from: jax.Array
    link_to: jax.Array
    rejected: jax.Array  # requests turned away with this step


def initial_inflow() -> Inflow:
    return Inflow(jnp.int32(0), jnp.int32(0), jnp.int32(NONE))


def initial_rejected() -> Rejected:
    return Rejected(jnp.int32(0), jnp.int32(0))


def judge(
    limits: Limits,
    knobs: Knobs,
    q: Inflow,
    memory: jax.Array,
    fresh_head: jax.Array,
    preempted: jax.Array,
    look_ps: jax.Array,
    returned: jax.Array,
) -> Gate:
    """Who joins the queue until `look_ps`; `preempted` requests wait as well, and count.

    `returned`: 1 if a client comes with this step, whose request is not in the memory yet.
    """
    arrived = arrived_by(limits, memory, q.end, look_ps) + returned
    joining = jnp.clip(knobs.queue_limit - preempted - q.waiting, 0, arrived)
    waiting, end = q.waiting + joining, q.end + arrived
    first = jnp.where(q.waiting > 0, fresh_head, q.end)
    head = jnp.where(waiting > 0, first, end)
    link = read_cell(memory, head * ROW + LINK)
    behind = jnp.where(link == NONE, head + 1, link)
    behind = jnp.where((q.waiting > 0) & (head == q.tail), q.end, behind)
    return Gate(
        queue=Inflow(waiting, end, jnp.where(joining > 0, q.end + joining - 1, q.tail)),
        head=head,
        next=jnp.where(waiting > 1, behind, jnp.where(waiting > 0, end, end + 1)),
        links=(joining > 0) & (q.waiting > 0),
        link_from=q.tail,
        link_to=q.end,
        rejected=arrived - joining,
    )


def waiting_at(
    limits: Limits, knobs: Knobs, q: Inflow, memory: jax.Array, preempted: jax.Array, time_ps: jax.Array
) -> jax.Array:
    """Requests that wait and were never scheduled at a later time, if none is admitted until then."""
    arrived = arrived_by(limits, memory, q.end, time_ps)
    return q.waiting + jnp.clip(knobs.queue_limit - preempted - q.waiting, 0, arrived)


def after(
    limits: Limits, knobs: Knobs, r: Rejected, look: Any, runs: jax.Array, sent: jax.Array
) -> tuple[jax.Array, Rejected]:
    """Whether the schedule() call has turned away clients with requests left, and the state after a step.

    `runs`: the call ends with this step; `sent`: requests that clients have sent until then.
    """
    turned_away = look.turn.arrives & ~look.turn.enters if limits.priority else look.gate.rejected
    judged = r.judged + turned_away.astype(jnp.int32)
    told = r.told - (look.returns & ~look.finishes).astype(jnp.int32)
    more = sent < knobs.num_requests
    after = Rejected(jnp.where(runs, 0, judged), jnp.where(more, told + jnp.where(runs, judged, 0), 0))
    return more & (judged > 0), after
