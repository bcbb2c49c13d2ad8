"""Settings drawn evenly, none twice, in one generation."""

import numpy as np

from jaxsim.tuning.strategies import Untold


class Random(Untold):
    def draw(self, number: int) -> np.ndarray:
        return self.problem.middles(self.problem.generator.choice(self.problem.size, number, replace=False))
