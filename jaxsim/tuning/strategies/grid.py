"""Every setting, in one generation."""

import numpy as np

from jaxsim.tuning.strategies import Problem


class Grid:
    def __init__(self, problem: Problem):
        self.shape = problem.shape
        self.asked = False

    def ask(self) -> np.ndarray:
        """All cells' middles, the last key varying fastest; then none."""
        size = 0 if self.asked else int(np.prod(self.shape))
        self.asked = True
        places = np.stack(np.unravel_index(np.arange(size), self.shape), axis=1) if len(self.shape) else None
        return np.zeros((size, 0)) if places is None else (places + 0.5) / self.shape

    def tell(self, units: np.ndarray, scores: np.ndarray) -> None:
        pass
