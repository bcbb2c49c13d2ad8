"""An evolution strategy: a gradient of smoothed scores by antithetic draws (Salimans et al. 2017), stepped by optax.

Scores enter by rank (centred ranks in [-0.5, 0.5]), so that only their order counts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxsim.tuning.strategies import Problem

FIRST, DECAY = 0.4, 0.9  # standard deviation of the draws, and its factor from generation to generation
CELL = 0.6  # its least value, in cells
RATE = 0.12  # of Adam, as a share of the edge, falling like the deviation


class Es:
    def __init__(self, problem: Problem):
        self.problem = problem
        self.pairs = -(-problem.generation(4 + 2 * problem.keys) // 2)
        self.deviation = np.full(problem.keys, FIRST)
        self.noise = np.zeros((0, problem.keys))
        self.rule = optax.adam(optax.exponential_decay(RATE, 1, DECAY), b1=0.5, b2=0.9)
        self.mean = jnp.full(problem.keys, 0.5, jnp.float32)
        self.state = self.rule.init(self.mean)

    def ask(self) -> np.ndarray:
        noise = self.problem.generator.standard_normal((self.pairs, self.problem.keys))
        self.noise = np.concatenate([noise, -noise])
        return np.clip(np.asarray(self.mean) + self.deviation * self.noise, 0, 1)

    def tell(self, units: np.ndarray, scores: np.ndarray) -> None:
        from scipy.stats import rankdata

        weights = (rankdata(scores) - 1) / max(1, len(scores) - 1) - 0.5
        gradient = weights @ self.noise / len(scores)
        ascent = jnp.asarray(-gradient, jnp.float32)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes types whatever the caller's mode
            updates, self.state = self.rule.update(ascent, self.state, self.mean)
            self.mean = jnp.clip(optax.apply_updates(self.mean, updates), 0, 1)  # type: ignore[arg-type]
        self.deviation = np.maximum(self.deviation * DECAY, CELL / self.problem.shape)
