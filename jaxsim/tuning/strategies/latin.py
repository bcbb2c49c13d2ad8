"""A Latin hypercube: each key's values come up equally often (McKay, Beckman and Conover 1979)."""

import numpy as np

from jaxsim.tuning.strategies import Problem


class Latin:
    def __init__(self, problem: Problem):
        from scipy.stats import qmc

        self.sampler = qmc.LatinHypercube(problem.keys, rng=problem.generator)
        self.left = min(problem.settings, problem.size)

    def ask(self) -> np.ndarray:
        number, self.left = self.left, 0
        return self.sampler.random(number)

    def tell(self, units: np.ndarray, scores: np.ndarray) -> None:
        pass
