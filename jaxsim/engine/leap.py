"""Iterations in which nothing changes but the context, in closed form.

With a fixed batch the i-th iteration takes first + i * slope, so k of them take k * first + slope * k (k - 1) / 2. The
bounds on k here may be too low, never too high: a short leap costs a step, not exactness. That is why float guesses may
stand where the exact bound is corrected or not needed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsim.engine.layout import Knobs, Tables

MOST = 1 << 20  # iterations in one leap
SHY = 1 - 2.0**-20  # factor that keeps a float32 quotient from rounding above the exact one


class Batch(NamedTuple):
    """What an iteration schedules; counts int32."""

    decodes: jax.Array  # decode rows
    context: jax.Array  # sum of their context after the iteration
    prefill_tokens: jax.Array
    prefill_rows: jax.Array
    prefill_context: jax.Array  # sum of computed + n over prefill rows
    pairs: jax.Array  # int64, sum of n * computed + n * (n + 1) / 2 over prefill rows


def iteration_time(knobs: Knobs, tables: Tables | None, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The time of an iteration and of one token of decode context in it, int64 picoseconds."""
    long = [value.astype(jnp.int64) for value in batch]
    decodes, context, tokens, rows, prefill_context, pairs = long
    per_context = knobs.decode_ctx_ps
    time = knobs.step_ps + knobs.prefill_token_ps * tokens + knobs.prefill_seq_ps * rows
    time += knobs.decode_seq_ps * decodes + knobs.prefill_ctx_ps * prefill_context + knobs.pair_ps * pairs
    if tables is not None:
        per_context += tables.decode_ctx_ps[knobs.table, batch.decodes]
        time += tables.linear_ps[knobs.table, batch.decodes + batch.prefill_tokens]
        time += tables.decode_base_ps[knobs.table, batch.decodes]
    return time + per_context * context, per_context


def span(first_ps: jax.Array, slope_ps: jax.Array, iterations: jax.Array) -> jax.Array:
    """Time of that many iterations, int64."""
    k = iterations.astype(jnp.int64)
    return k * first_ps + slope_ps * (k * (k - 1) >> 1)


def look(
    end_ps: jax.Array, first_ps: jax.Array, slope_ps: jax.Array, leaps: jax.Array, start_ps: jax.Array, early: bool
) -> jax.Array:
    """When the iteration after a leap is scheduled: at the end of the leap or, with `early`, when its last one starts.

    The leap begins at `end_ps`, the iteration before it at `start_ps`.
    """
    if not early:
        return end_ps + span(first_ps, slope_ps, leaps)
    return jnp.where(leaps > 0, end_ps + span(first_ps, slope_ps, leaps - 1), start_ps)


def started_before(first_ps: jax.Array, slope_ps: jax.Array, delay_ps: jax.Array, most: jax.Array) -> jax.Array:
    """How many of at most `most` iterations start less than `delay_ps` from now; int32, exact."""
    first, slope, delay = (value.astype(jnp.float32) for value in (first_ps, slope_ps, delay_ps))
    linear = first - slope / 2
    root = 2 * delay / (linear + jnp.sqrt(linear * linear + 2 * slope * delay))
    guess = jnp.clip(jnp.ceil(root), 1.0, most.astype(jnp.float32)).astype(jnp.int32)
    late = (span(first_ps, slope_ps, guess) < delay_ps).astype(jnp.int32)
    early = (span(first_ps, slope_ps, guess - 1) >= delay_ps).astype(jnp.int32)
    return jnp.where(delay_ps <= 0, 0, jnp.minimum(guess + late - early, most))


def below(first_ps: jax.Array, slope_ps: jax.Array, limit_ps: jax.Array) -> jax.Array:
    """A number of iterations, at least one, that each take less than `limit_ps`; the first one does. int32."""
    ratio = (limit_ps - first_ps - 1).astype(jnp.float32) / slope_ps.astype(jnp.float32) * SHY
    return jnp.where(slope_ps == 0, MOST, jnp.minimum(ratio, MOST - 1).astype(jnp.int32) + 1)


def fitting(blocks: jax.Array, decodes: jax.Array, chunk: jax.Array, block_size: jax.Array) -> jax.Array:
    """A number of iterations whose decodes and prompt chunks of `chunk` tokens take at most `blocks` blocks; int32."""
    spare = (blocks - decodes - jnp.minimum(chunk, 1)).astype(jnp.float32)
    guess = spare * block_size.astype(jnp.float32) / jnp.maximum(decodes + chunk, 1).astype(jnp.float32) * SHY
    return jnp.clip(guess, 0.0, MOST).astype(jnp.int32)
