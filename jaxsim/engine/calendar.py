"""When running requests complete: a ring of buckets by iteration, with a bitmap of two levels over the buckets.

A decoding request gets one token in every iteration, so the iteration at whose start it is finished is known when its
prompt is complete. Iterations `now + 1 ... now + R - 1` have a bucket each. Bit i of word w stands for bucket 32 w + i,
bit w mod 32 of top w // 32 says that word w is not empty.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsim.engine.layout import Limits, read_cell

FAR = 1 << 30  # no completion is scheduled


def bit(position: jax.Array) -> jax.Array:
    return jnp.int32(1) << (position & 31)


def trailing_zeros(word: jax.Array) -> jax.Array:
    """Index of the lowest set bit, 32 for zero; any shape, int32."""
    return lax.population_count((word & -word) - 1)


def mark_word(tops: jax.Array, word: jax.Array, happens: jax.Array, filled: jax.Array) -> jax.Array:
    """`tops` ([T] int32) with the bit of a word set or cleared where `happens`."""
    here = happens & (jnp.arange(tops.shape[0], dtype=jnp.int32) == word >> 5)
    return jnp.where(here, jnp.where(filled, tops | bit(word), tops & ~bit(word)), tops)


def next_completion(
    limits: Limits, memory: jax.Array, tops: jax.Array, changed: list[tuple[jax.Array, jax.Array]], now: jax.Array
) -> jax.Array:
    """Iterations from `now` to the next non-empty bucket, FAR if there is none.

    `changed` lists (word, value) pairs that are not yet written to memory, the one that counts first if a word occurs
    twice; `tops` is up to date.
    """
    mask = limits.ring // 32 - 1
    position = now & (limits.ring - 1)
    word = position >> 5

    def value(index: jax.Array) -> jax.Array:
        result = read_cell(memory, limits.words + index)
        for which, what in reversed(changed):
            result = jnp.where(which == index, what, result)
        return result

    here = value(word) & (jnp.int32(-1) << (position & 31))
    # The first non-empty word after this one, around the ring; this one last, for buckets before the present position.
    start = word + 1
    low = jnp.int32(-1) << (start & 31)
    index = jnp.arange(tops.shape[0], dtype=jnp.int32)
    ahead = jnp.where(index == start >> 5, tops & low, jnp.where(index > start >> 5, tops, 0))
    first_ahead = jnp.min(jnp.where(ahead != 0, 32 * index + trailing_zeros(ahead), FAR))
    first_any = jnp.min(jnp.where(tops != 0, 32 * index + trailing_zeros(tops), FAR))
    other = jnp.where(first_ahead != FAR, first_ahead, first_any)
    bits = value(jnp.where(other == FAR, 0, other & mask))
    around = ((32 * other + trailing_zeros(bits)) - position) & (limits.ring - 1)
    return jnp.where(here != 0, trailing_zeros(here) - (position & 31), jnp.where(other == FAR, FAR, around))
