"""A Latin hypercube: each key's values come up equally often (McKay, Beckman and Conover 1979)."""

import numpy as np

from jaxsim.tuning.strategies import Untold


class Latin(Untold):
    def draw(self, number: int) -> np.ndarray:
        from scipy.stats import qmc

        return qmc.LatinHypercube(self.problem.keys, rng=self.problem.generator).random(number)
