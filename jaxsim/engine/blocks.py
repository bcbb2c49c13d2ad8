"""KV blocks as counts: without prefix caching the identity of a block is irrelevant.

A decoding request takes a block in every iteration in which its context is a multiple of the block size. Its phase,
(context - iteration) mod block size, stays the same as both grow, so counting requests by phase tells how many blocks
an iteration takes without looking at the requests.
"""

import jax
import jax.numpy as jnp


def quotient(x: jax.Array, size: jax.Array) -> jax.Array:
    """floor(x / size) for |x| < 2**24, int32: a float guess, corrected, vectorises where integer division does not."""
    guess = jnp.floor(x.astype(jnp.float32) / size.astype(jnp.float32)).astype(jnp.int32)
    rest = x - guess * size
    return guess + (rest >= size).astype(jnp.int32) - (rest < 0).astype(jnp.int32)


def remainder(x: jax.Array, size: jax.Array) -> jax.Array:
    """x mod size, from 0 to size - 1 also for negative x."""
    return x - quotient(x, size) * size


def blocks_for(tokens: jax.Array, block_size: jax.Array) -> jax.Array:
    """KV blocks that hold `tokens` tokens: the ceiling of the quotient, any shape, int32."""
    return quotient(tokens + block_size - 1, block_size)


def add_phase(need: jax.Array, phase: jax.Array, count: jax.Array) -> jax.Array:
    """`need` with `count` requests more in a phase; need is [P] int32."""
    return need + jnp.where(jnp.arange(need.shape[0], dtype=jnp.int32) == phase, count, 0)


def blocks_taken(need: jax.Array, phase: jax.Array, iterations: jax.Array, block_size: jax.Array) -> jax.Array:
    """Blocks that decoding requests take in the next `iterations` iterations; `phase` takes one in the first."""
    cycles = quotient(iterations, block_size)
    behind = behind_phase(need, phase, block_size)
    rest = jnp.where(behind < iterations - cycles * block_size, need, 0)
    return cycles * jnp.sum(need, dtype=jnp.int32) + jnp.sum(rest, dtype=jnp.int32)


def behind_phase(need: jax.Array, phase: jax.Array, block_size: jax.Array) -> jax.Array:
    """For each phase the number of iterations until it takes a block; [P] int32."""
    behind = phase - jnp.arange(need.shape[0], dtype=jnp.int32)
    return jnp.where(behind < 0, behind + block_size, behind)
