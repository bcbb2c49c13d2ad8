"""Keep XLA for CPUs from computing a value again in each place that uses it.

XLA fuses operations into one loop per result and repeats within each whatever the result depends on; for a step with
dozens of results that is most of the work. The branch of a conditional is compiled apart and its results are stored, so
a step is cut into stages whose results are stored between them. The condition is always true, which XLA cannot know.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Result = TypeVar("Result")


def fence(on: jax.Array | None, stage: Callable[[], Result]) -> Result:
    """`stage()` with its results stored; `on` is a true scalar that is the same for all lanes, None for no fence."""
    if on is None:
        return stage()
    shapes = jax.eval_shape(stage)
    return lax.cond(on, stage, lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes))
