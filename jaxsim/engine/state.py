"""The changing part of one simulation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine.cache import initial_cache
from jaxsim.engine.inflow import initial_inflow, initial_rejected
from jaxsim.engine.layout import (
    GENERATED,
    INFINITE,
    NONE,
    OUTPUT,
    PREEMPTIONS,
    PROMPT,
    RECOMPUTED,
    ROW,
    Knobs,
    Limits,
    split_time,
)
from jaxsim.engine.priority import initial_memory, initial_queue
from jaxsim.engine.statistics import Statistics
from jaxsim.engine.swap import initial_swap
from jaxsim.engine.types import Status


class State(NamedTuple):
    """Scalars are int32 unless noted. The fields after `left` hold the iteration that is being scheduled."""

    memory: jax.Array  # [Limits.memory] int32: requests, arrivals, log, calendar
    tops: jax.Array  # [Limits.tops] int32, upper level of the calendar's bitmap
    need: jax.Array  # [P] int32, decoding requests by block phase
    clock_ps: jax.Array  # int64, end of the last iteration, or the time to which an idle server has come
    look_ps: (
        jax.Array
    )  # int64, time of the schedule() call: the same, under async scheduling the start of that iteration
    now: jax.Array  # iterations so far
    free: jax.Array  # blocks
    in_flight: jax.Array  # bool: the last iteration runs while the next one is scheduled
    held: jax.Array  # async scheduling: running requests that the iteration in flight finishes
    held_blocks: jax.Array  # and their blocks
    dropped: jax.Array  # and those of them that this schedule() has preempted
    decodes: jax.Array  # running requests that decode
    context: jax.Array  # sum of their computed tokens
    running: jax.Array
    fresh_head: jax.Array  # the first request that was never scheduled
    preempted_head: jax.Array  # the preempted request at the head of the queue, or NONE
    preempted_count: jax.Array
    newest: jax.Array  # the running request admitted last, or a finished one above it, or NONE
    prompt_first: jax.Array  # the (first) running request whose prompt is in progress, or NONE
    prompt_last: jax.Array  # the last one; only with Limits.threshold
    prompt_done: jax.Array  # its computed tokens; only without Limits.threshold
    prompt_known: jax.Array  # and the tokens to compute
    log_size: jax.Array  # iterations so far in which some request got its first token
    arrivals_known: jax.Array  # in a closed loop, the number of requests sent so far
    barren: jax.Array  # iterations since the last token
    status: jax.Array
    iterations: jax.Array
    scan_steps: jax.Array
    called: jax.Array  # bool: schedule() has begun, `threshold` is fixed
    begun: jax.Array  # bool: the decoding requests are scheduled
    preempted: jax.Array  # bool: this schedule() has preempted
    threshold: jax.Array  # tokens per prompt in this schedule(), 0 for no limit
    cursor: jax.Array  # next prompt in progress to schedule, or NONE
    left: jax.Array  # token budget
    prefill_tokens: jax.Array
    prefill_rows: jax.Array
    prefill_context: jax.Array  # sum of computed + n
    pairs: jax.Array  # int64, sum of n * computed + n * (n + 1) / 2
    late_decodes: jax.Array  # resumed requests that lack one token: decode rows
    late_context: jax.Array
    joined: jax.Array  # requests that decode from the next iteration on
    joined_context: jax.Array
    joined_fresh: jax.Array  # bool: one of them gets its first token
    statistics: Statistics
    cache: Any = None  # prefix.Cache with Limits.prefix
    queue: Any = None  # priority.Queue with Limits.priority
    inflow: Any = None  # inflow.Inflow with Limits.inflow, but for the policy "priority"
    rejected: Any = None  # inflow.Rejected with Limits.returns
    swap: Any = None  # swap.Swap with Limits.swap


class Event(NamedTuple):
    """What a step did, for a trace; scalars, int32 unless noted, NONE for no request."""

    finished: jax.Array
    preempted: jax.Array
    continued: jax.Array  # a prompt in progress, and its tokens
    continued_tokens: jax.Array
    admitted: jax.Array  # from the waiting queue, and its tokens
    admitted_tokens: jax.Array
    hit_tokens: jax.Array  # that it found in the prefix cache, or in CPU memory
    ran: jax.Array  # bool: the iteration is complete (also an empty one that preempted)
    look_ps: jax.Array  # int64, time of the schedule() call
    start_ps: jax.Array  # int64
    duration_ps: jax.Array  # int64
    running: jax.Array
    waiting: jax.Array
    prefill_tokens: jax.Array
    decodes: jax.Array
    context: jax.Array
    free: jax.Array
    missed: Any = None  # with Limits.ends: a decoding request that is not scheduled


def initial(
    limits: Limits,
    prompt: jax.Array,
    output: jax.Array,
    arrival_ps: jax.Array,
    knobs: Knobs,
    ranked: jax.Array | None = None,
) -> State:
    """The state before the first event.

    prompt, output: [N] int32, output capped by max_model_len; arrival_ps: [N] int64, ascending, INFINITE where unknown
    or beyond num_requests; ranked: [3, N] with Limits.priority, see priority.ranks.
    """
    rows = jnp.full((limits.requests + 1, ROW), NONE, jnp.int32)
    rows = rows.at[:-1, PROMPT].set(prompt).at[:-1, OUTPUT].set(output)
    rows = rows.at[:, PREEMPTIONS].set(0).at[:, RECOMPUTED].set(0).at[:, GENERATED].set(0)
    arrivals = jnp.concatenate([arrival_ps, jnp.full(2, INFINITE, jnp.int64)])
    regions = [
        rows.reshape(-1),
        jnp.stack(split_time(arrivals), axis=1).reshape(-1),
        jnp.full(2 * limits.requests + limits.ring, NONE, jnp.int32),
    ]
    if ranked is not None:
        regions += [jnp.zeros(limits.tickets - limits.words, jnp.int32), initial_memory(limits, ranked)]
    regions.append(jnp.zeros(limits.memory - sum(region.size for region in regions), jnp.int32))
    memory = jnp.concatenate(regions)
    zero, none, false = jnp.int32(0), jnp.int32(NONE), jnp.bool_(False)
    known = jnp.sum(arrival_ps < INFINITE, dtype=jnp.int32)
    fields: dict[str, Any] = dict.fromkeys(State._fields, zero)
    fields |= dict.fromkeys(["preempted_head", "newest", "prompt_first", "prompt_last", "cursor"], none)
    fields |= dict.fromkeys(["in_flight", "called", "begun", "preempted", "joined_fresh"], false)
    fields |= {
        "memory": memory,
        "tops": jnp.zeros(limits.tops, jnp.int32),
        "need": jnp.zeros(limits.phases, jnp.int32),
        "clock_ps": jnp.int64(0),
        "look_ps": jnp.int64(0),
        "free": knobs.blocks,
        "arrivals_known": known,
        "status": jnp.int32(Status.RUNNING),
        "pairs": jnp.int64(0),
        "statistics": Statistics.zero(),
        "cache": initial_cache(limits, knobs) if limits.prefix else None,
        "queue": initial_queue(limits) if limits.priority else None,
        "inflow": initial_inflow() if limits.inflow and not limits.priority else None,
        "rejected": initial_rejected() if limits.returns else None,
        "swap": initial_swap(knobs) if limits.swap else None,
    }
    return State(**fields)
