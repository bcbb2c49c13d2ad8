"""CMA-ES with margin (Hamano et al. 2022), of the package `cmaes`: keeps every discrete value within reach."""

import numpy as np

from jaxsim.tuning.strategies import Problem


class Cmaes:
    def __init__(self, problem: Problem):
        from cmaes import CMAwM

        self.shape = problem.shape
        self.optimizer = CMAwM(
            mean=(problem.shape - 1) / 2,
            sigma=1.0,
            bounds=np.stack([np.zeros(problem.keys), problem.shape - 1], axis=1),
            steps=np.ones(problem.keys),
            cov=np.diag((0.3 * problem.shape) ** 2),
            population_size=problem.generation(4 + 2 * problem.keys),
            seed=int(problem.generator.integers(2**31)),
        )
        self.drawn: list[np.ndarray] = []

    def ask(self) -> np.ndarray:
        pairs = [self.optimizer.ask() for _ in range(self.optimizer.population_size)]
        self.drawn = [inner for _, inner in pairs]
        return (np.array([cell for cell, _ in pairs]) + 0.5) / self.shape

    def tell(self, units: np.ndarray, scores: np.ndarray) -> None:
        self.optimizer.tell([(inner, -float(score)) for inner, score in zip(self.drawn, scores, strict=True)])
