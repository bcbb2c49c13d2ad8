"""Settings drawn evenly, none twice, in one generation."""

import numpy as np

from jaxsim.tuning.strategies import Problem


class Random:
    def __init__(self, problem: Problem):
        self.problem = problem
        self.left = min(problem.settings, problem.size)

    def ask(self) -> np.ndarray:
        problem, number = self.problem, self.left
        self.left = 0
        places = problem.generator.choice(problem.size, number, replace=False)
        return (np.stack(np.unravel_index(places, problem.shape), axis=1) + 0.5) / problem.shape

    def tell(self, units: np.ndarray, scores: np.ndarray) -> None:
        pass
