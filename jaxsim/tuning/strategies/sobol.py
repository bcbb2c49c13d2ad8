"""A scrambled Sobol sequence: fills the cube evenly in every projection (Owen 1998)."""

import warnings

import numpy as np

from jaxsim.tuning.strategies import Problem


class Sobol:
    def __init__(self, problem: Problem):
        from scipy.stats import qmc

        self.sequence = qmc.Sobol(problem.keys, rng=problem.generator)
        self.left = min(problem.settings, problem.size)

    def ask(self) -> np.ndarray:
        number, self.left = self.left, 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # balance is lost where the number is no power of two
            return self.sequence.random(number)

    def tell(self, units: np.ndarray, scores: np.ndarray) -> None:
        pass
