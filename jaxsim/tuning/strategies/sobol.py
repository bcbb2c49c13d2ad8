"""A scrambled Sobol sequence: fills the cube evenly in every projection (Owen 1998)."""

import warnings

import numpy as np

from jaxsim.tuning.strategies import Untold


class Sobol(Untold):
    def draw(self, number: int) -> np.ndarray:
        from scipy.stats import qmc

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # balance is lost where the number is no power of two
            return qmc.Sobol(self.problem.keys, rng=self.problem.generator).random(number)
