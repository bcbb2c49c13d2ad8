"""What a simulation adds up as it goes, exactly, so that leaping gives the same sums as stepping.

Products of counts and picoseconds outgrow int64 within minutes of simulated time; such sums are kept in two limbs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsim.engine.blocks import behind_phase, quotient

LIMB = 24  # bits of the low limb
BINS_PER_OCTAVE = 8
FIRST_OCTAVE = 26  # 2**26 ps = 67 us; shorter gaps fall into bin 0
OCTAVES = 25  # up to 2**51 ps = 2251 s; longer gaps fall into the last bin
BINS = BINS_PER_OCTAVE * OCTAVES


class Wide(NamedTuple):
    """The integer high * 2**LIMB + low."""

    high: jax.Array  # int64
    low: jax.Array  # int64, below 2**LIMB between additions

    @staticmethod
    def zero() -> "Wide":
        return Wide(jnp.int64(0), jnp.int64(0))

    def plus(self, *products: tuple[jax.Array, jax.Array]) -> "Wide":
        """The sum with count * time for each (count, time): count below 2**38, time below 2**62, neither negative."""
        high, low = self
        for count, time in products:
            count = count.astype(jnp.int64)
            high = high + count * (time >> LIMB)
            low = low + count * (time & ((1 << LIMB) - 1))
        return Wide(high + (low >> LIMB), low & ((1 << LIMB) - 1))


def wide_value(wide: Wide) -> int:
    """The exact integer of a Wide on the host."""
    return (int(wide.high) << LIMB) + int(wide.low)


class Stretch(NamedTuple):
    """What one step adds: an iteration if it `works`, and a leap of further ones. Counts int32, times int64."""

    works: jax.Array  # bool
    leaps: jax.Array  # iterations of the leap
    duration_ps: jax.Array  # of the iteration
    leap_ps: jax.Array
    first_ps: jax.Array  # time of the first iteration of the leap, and by how much each further one is longer
    slope_ps: jax.Array
    used: jax.Array  # blocks in use in the iteration
    leap_used: jax.Array  # before the leap
    leap_used_after: jax.Array  # in its last iteration
    blocks: jax.Array  # in the pool
    need: jax.Array  # [P], how the leap's decodes take blocks
    phase: jax.Array
    block_size: jax.Array
    preempted: jax.Array  # preempted requests that wait
    running: jax.Array
    leap_running: jax.Array
    rows: jax.Array  # rows x iterations
    waiting: jax.Array  # the most requests that waited
    tokens: jax.Array
    prefill_tokens: jax.Array
    decodes: jax.Array  # requests that got a token in the iteration before, too
    leap_decodes: jax.Array  # the same x iterations of the leap
    refused: jax.Array  # 1 if the iteration left a request waiting, and for which reason if not for want of blocks
    refused_seats: jax.Array
    refused_budget: jax.Array
    leap_refused: jax.Array  # iterations of the leap that did, and the reason
    leap_by_seats: jax.Array  # bool
    leap_by_budget: jax.Array  # bool
    gap_ps: jax.Array  # time without a token of a resumed request
    gaps: jax.Array  # 1 if there is one


class Statistics(NamedTuple):
    """Sums over the iterations of one simulation."""

    kv_block_ps: Wide  # blocks in use x time
    running_ps: Wide  # running requests x time
    preempted_ps: Wide  # preempted requests waiting x time
    above_90_ps: jax.Array  # int64, time with more than 90 % of the blocks in use
    kv_peak: jax.Array  # int32, blocks
    running_max: jax.Array  # int32
    waiting_max: jax.Array  # int32
    slot_rows: jax.Array  # int64, rows x iterations
    tokens: jax.Array  # int64, scheduled
    prefill_tokens: jax.Array  # int64
    refused_seats: jax.Array  # int32, iterations
    refused_kv: jax.Array  # int32
    refused_budget: jax.Array  # int32
    itl: jax.Array  # [BINS] int32, gaps between tokens
    settle: jax.Array  # int32, first of the requests that resumed in the last iteration and whose gap is not counted
    pending: jax.Array  # int32, first of those that resume in this iteration

    @staticmethod
    def zero() -> "Statistics":
        none, long = jnp.int32(0), jnp.int64(0)
        return Statistics(
            Wide.zero(), Wide.zero(), Wide.zero(), long, none, none, none, long, long, long, none, none, none,
            jnp.zeros(BINS, jnp.int32), jnp.int32(-1), jnp.int32(-1),
        )  # fmt: skip

    def plus(self, d: Stretch) -> "Statistics":
        """The sums with one step more; `settle` and `pending` stay."""
        mark = d.blocks - quotient(d.blocks + 9, jnp.int32(10))  # more blocks than this are more than 90 %
        held, numbers = growth_moments(d.need, d.phase, d.leaps, d.block_size)
        time_ps = d.duration_ps + d.leap_ps
        above_ps = jnp.where(d.used > mark, d.duration_ps, 0) + jnp.where(d.leap_used_after > mark, d.leap_ps, 0)
        by_seats = jnp.where(d.leap_by_seats, d.leap_refused, 0)
        by_budget = jnp.where(d.leap_by_budget, d.leap_refused, 0)
        bins = jnp.stack([itl_bin(time) for time in (d.duration_ps, d.first_ps, d.gap_ps)])
        return Statistics(
            kv_block_ps=self.kv_block_ps.plus(
                (d.used, d.duration_ps), (d.leap_used, d.leap_ps), (held, d.first_ps), (d.slope_ps, numbers)
            ),
            running_ps=self.running_ps.plus((d.running, d.duration_ps), (d.leap_running, d.leap_ps)),
            preempted_ps=self.preempted_ps.plus((d.preempted, time_ps)),
            above_90_ps=self.above_90_ps + above_ps,
            kv_peak=jnp.maximum(self.kv_peak, jnp.where(d.works, jnp.maximum(d.used, d.leap_used_after), 0)),
            running_max=jnp.maximum(self.running_max, jnp.where(d.works, d.running, 0)),
            waiting_max=jnp.maximum(self.waiting_max, d.waiting),
            slot_rows=self.slot_rows + d.rows.astype(jnp.int64),
            tokens=self.tokens + d.tokens.astype(jnp.int64),
            prefill_tokens=self.prefill_tokens + d.prefill_tokens.astype(jnp.int64),
            refused_seats=self.refused_seats + d.refused_seats + by_seats,
            refused_kv=self.refused_kv
            + (d.refused - d.refused_seats - d.refused_budget)
            + (d.leap_refused - by_seats - by_budget),
            refused_budget=self.refused_budget + d.refused_budget + by_budget,
            itl=self.itl.at[bins].add(jnp.stack([d.decodes, d.leap_decodes, d.gaps])),
            settle=self.settle,
            pending=self.pending,
        )


def octave(time_ps: jax.Array) -> jax.Array:
    """floor(log2 time), int64."""
    return 63 - lax.clz(time_ps)


def itl_bin(time_ps: jax.Array) -> jax.Array:
    """Bin of a gap: eight linear steps per octave, int32."""
    exponent = octave(jnp.maximum(time_ps, 8))
    step = (time_ps >> (exponent - 3)) & 7
    place = BINS_PER_OCTAVE * (exponent - FIRST_OCTAVE) + step
    return jnp.clip(place, 0, BINS - 1).astype(jnp.int32)


def bin_end(time_ps: jax.Array) -> jax.Array:
    """The first gap that belongs to a later bin than this one, int64."""
    exponent = octave(jnp.maximum(time_ps, 1 << FIRST_OCTAVE))
    step = (time_ps >> (exponent - 3)) & 7
    end = (step + 9) << (exponent - 3)
    end = jnp.where(time_ps < 1 << FIRST_OCTAVE, jnp.int64(1 << FIRST_OCTAVE), end)
    return jnp.where(exponent >= FIRST_OCTAVE + OCTAVES - 1, jnp.int64(1 << 62), end)


def itl_edges_s() -> np.ndarray:
    """Edges of the bins of `Totals.itl_histogram` in seconds, [BINS + 1] float64; the last bin is open."""
    place = np.arange(BINS + 1)
    edges = 2.0 ** (FIRST_OCTAVE + place // BINS_PER_OCTAVE) * (1 + place % BINS_PER_OCTAVE / BINS_PER_OCTAVE) / 1e12
    return np.concatenate([[0.0], edges[1:]])


def growth_moments(
    need: jax.Array, phase: jax.Array, iterations: jax.Array, block_size: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two sums over the blocks that decoding requests take in a leap of `iterations` iterations.

    With j the iteration in which a block is taken: the sum of (iterations - j), and the sum of the iteration numbers
    j ... iterations - 1, both int64. For an iteration time of first + i * slope the blocks taken in the leap are held
    for first * the one + slope * the other within it.
    """
    behind = behind_phase(need, phase, block_size)
    cycles = quotient(iterations, block_size)
    rest = iterations - cycles * block_size

    def moments(counts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        sums = (jnp.sum(counts * power, dtype=jnp.int32) for power in (1, behind, behind * behind))
        zeroth, first, second = (value.astype(jnp.int64) for value in sums)
        return zeroth, first, second

    k, size = iterations.astype(jnp.int64), block_size.astype(jnp.int64)
    blocks, numbers = jnp.int64(0), jnp.int64(0)
    # Phases below `rest` take a block cycles + 1 times, the others `cycles` times.
    early = behind < rest
    for counts, times in (
        (jnp.where(early, need, 0), cycles.astype(jnp.int64) + 1),
        (jnp.where(early, 0, need), cycles.astype(jnp.int64)),
    ):
        zeroth, first, second = moments(counts)
        steps = times * (times - 1) // 2  # sum of m for m < times
        squares = times * (times - 1) * (2 * times - 1) // 6
        sum_j = times * first + size * steps * zeroth
        sum_jj = times * second + 2 * size * steps * first + size * size * squares * zeroth
        blocks += times * k * zeroth - sum_j
        numbers += (times * zeroth * k * (k - 1) - (sum_jj - sum_j)) // 2
    return blocks, numbers
