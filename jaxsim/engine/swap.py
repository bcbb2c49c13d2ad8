"""Preemption by swapping, as vLLM's V0 had it: the victim's blocks go to CPU memory and come back before it runs on.

A victim for whose blocks the CPU pool has no room is recomputed. Swapped requests come back before all that wait, the
one that was admitted first ahead or, under the policy "priority", the first by (priority, arrival, id), by the rules of
admission: a seat, budget for what is still to be computed, and free blocks for all of it. Moving a block takes
knobs.swap_block_ps, in the iteration of that schedule() call.

Under async scheduling the copy stands on the device's stream behind the iteration in flight and before the one that is
being scheduled: what goes to the CPU is the KV of all tokens computed so far, those of the iteration in flight among
them. Its sampled token is there before the victim can come back. A victim that needs no more than that token is not
copied.

With prefix caching the victim's blocks on the GPU are released as any others are: full ones can be found until they are
taken, by the victim as well. What it finds when it comes back is not copied.

Source: core/scheduler.py of vLLM 0.4.3, which sorted the swapped by the priority that its only policy gave them, their
arrival. 0.6.0 to 0.8.5 took them in the order in which they were swapped out, and with chunked prefill admitted waiting
ones behind those that did not fit; all of them stopped with an error where the CPU pool was full.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine.blocks import blocks_for
from jaxsim.engine.layout import LINK, NONE, SWAPPED, Knobs


class Swap(NamedTuple):
    """Scalars, int32."""

    head: jax.Array  # the first request to come back, or NONE; under the policy "priority" the queue knows
    free: jax.Array  # blocks of the CPU pool
    moved: jax.Array  # blocks, out and in, that no iteration has paid for yet


def initial_swap(knobs: Knobs) -> Swap:
    return Swap(jnp.int32(NONE), knobs.cpu_blocks, jnp.int32(0))


def out(knobs: Knobs, s: Swap, victim: jax.Array, preempts: jax.Array, computed: jax.Array) -> tuple[Swap, jax.Array]:
    """The pool after a preemption, and whether the victim was swapped."""
    blocks = blocks_for(computed, knobs.block_size)
    swaps = preempts & knobs.swaps & (computed > 0) & (blocks <= s.free)
    moved = jnp.where(swaps, blocks, 0)
    return Swap(jnp.where(swaps, victim, s.head), s.free - moved, s.moved + moved), swaps


def back(knobs: Knobs, s: Swap, row: jax.Array, returns: jax.Array, found: jax.Array | None) -> Swap:
    """The pool after the admission of its head, whose row is given, if it `returns`; `found`: its blocks on the GPU."""
    blocks = jnp.where(returns, blocks_for(row[SWAPPED], knobs.block_size), 0)
    moved = blocks if found is None else jnp.maximum(blocks - found, 0)
    return Swap(jnp.where(returns, row[LINK], s.head), s.free + blocks, s.moved + moved)
