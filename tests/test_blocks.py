"""Counts of KV blocks."""

import jax
import numpy as np
import pytest

from jaxsim.engine.blocks import quotient, remainder


@pytest.mark.parametrize("size", [1, 2, 3, 7, 13, 16, 31, 128, 528, 784, 1000, 4095, 65537, (1 << 22) - 1])
@pytest.mark.parametrize("alike", [True, False], ids=["one size", "a size each"])
def test_quotients_are_exact_in_their_range(size, alike):
    """XLA multiplies by the reciprocal of a size that all share, which rounds more often than a division."""
    random = np.random.default_rng(size)
    multiples = random.integers(0, (1 << 24) // size, 20_000) * size
    x = np.concatenate(
        [multiples - 1, multiples, multiples + 1, -multiples, random.integers(-(1 << 24), 1 << 24, 20_000)]
    )
    x = x[np.abs(x) < 1 << 24].astype(np.int32)
    sizes = np.int32(size) if alike else np.full(x.shape, size, np.int32)
    np.testing.assert_array_equal(jax.jit(quotient)(x, sizes), x // size)
    np.testing.assert_array_equal(jax.jit(remainder)(x, sizes), x % size)
