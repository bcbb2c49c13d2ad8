"""The cross-entropy method: a normal distribution drawn to the best quarter of each generation (Rubinstein 1999)."""

import numpy as np

from jaxsim.tuning.strategies import Problem

ELITE = 0.25  # share of a generation that the distribution follows
STEP = 0.7  # how far it follows
CELL = 0.6  # least standard deviation, in cells: the neighbours of the best stay within reach


class Cem:
    def __init__(self, problem: Problem):
        self.problem = problem
        self.population = problem.generation(4 + 2 * problem.keys)
        self.mean = np.full(problem.keys, 0.5)
        self.deviation = np.full(problem.keys, 0.3)
        self.units = np.zeros((0, problem.keys))  # all that was told, best first
        self.scores = np.zeros(0)

    def ask(self) -> np.ndarray:
        """A Latin hypercube first, then draws from the distribution, reflected at the faces of the cube."""
        if not len(self.scores):
            from scipy.stats import qmc

            return qmc.LatinHypercube(self.problem.keys, rng=self.problem.generator).random(self.population)
        deviation = np.maximum(self.deviation, CELL / self.problem.shape)
        drawn = self.problem.generator.normal(self.mean, deviation, (self.population, self.problem.keys))
        return 1 - np.abs(1 - np.abs(drawn) % 2)

    def tell(self, units: np.ndarray, scores: np.ndarray) -> None:
        units, scores = np.concatenate([units, self.units]), np.concatenate([scores, self.scores])
        order = np.argsort(-scores, kind="stable")
        self.units, self.scores = units[order], scores[order]
        elite = self.units[: max(2, round(ELITE * self.population))]
        self.mean += STEP * (elite.mean(axis=0) - self.mean)
        self.deviation += STEP * (elite.std(axis=0) - self.deviation)
