"""With what probability a setting is the best: a posterior of the settings' means, seeds paired.

In the shapes, `C` is the number of settings, `S` of seeds, `D` of draws.
"""

from dataclasses import dataclass

import numpy as np

DRAWS = 20_000


@dataclass(frozen=True)
class Ranking:
    """Draws from the posterior. `indifference` is a share: within it of the largest mean is as good as the largest."""

    means: np.ndarray  # [D, C]
    indifference: float

    @property
    def best(self) -> np.ndarray:
        """Probability that a setting has the largest mean; ties share it; [C]."""
        largest = self.means.max(axis=1, keepdims=True)
        first = self.means >= largest - 1e-12 * np.abs(largest)
        return (first / first.sum(axis=1, keepdims=True)).mean(axis=0)

    @property
    def near(self) -> np.ndarray:
        """Probability that a setting's mean is within the indifference of the largest; [C]."""
        largest = self.means.max(axis=1, keepdims=True)
        return (self.means >= largest - self.indifference * np.abs(largest)).mean(axis=0)

    def ahead(self, setting: int) -> np.ndarray:
        """Probability of each to be better than one setting by more than the indifference; [C]."""
        bar = self.means - self.indifference * np.abs(self.means)
        return (bar > self.means[:, [setting]]).mean(axis=0)


def ranking(values: np.ndarray, indifference: float, seed: int = 0) -> Ranking:
    """Posterior from `values` [C, S], S >= 2, column s of all settings under the same seed.

    With a flat prior on means and covariance the means have a multivariate Student t posterior around the sample means
    with S - 1 degrees of freedom and the scale cov / S (Gelman et al., Bayesian Data Analysis, 3.6); common random
    numbers make the covariance large and the differences small.
    """
    seeds = values.shape[1]
    if seeds < 2:
        raise ValueError(f"ranking needs 2 seeds, not {seeds}")
    generator = np.random.default_rng(seed)
    centred = values - values.mean(axis=1, keepdims=True)
    normal = generator.standard_normal((DRAWS, seeds)) @ centred.T / np.sqrt(seeds - 1)  # [D, C], covariance cov
    scale = np.sqrt(generator.chisquare(seeds - 1, DRAWS) / (seeds - 1))
    return Ranking(values.mean(axis=1) + normal / np.sqrt(seeds) / scale[:, None], indifference)
