"""With what probability a setting is the best: a posterior of the settings' means, seeds paired.

In the shapes, `C` is the number of settings, `S` of seeds, `D` of draws.
"""

from typing import NamedTuple

import numpy as np

DRAWS = 20_000


class Ranking(NamedTuple):
    best: np.ndarray  # [C], probability that the setting has the largest mean; ties share it
    near: np.ndarray  # [C], probability that its mean is within the indifference of the largest


def ranking(values: np.ndarray, indifference: float, seed: int = 0) -> Ranking:
    """Posterior probabilities from `values` [C, S], S >= 2, column s of all settings under the same seed.

    With a flat prior on means and covariance the means have a multivariate Student t posterior around the sample means
    with S - 1 degrees of freedom and the scale cov / S (Gelman et al., Bayesian Data Analysis, 3.6); common random
    numbers make the covariance large and the differences small. `indifference` is a share of the largest mean.
    """
    settings, seeds = values.shape
    if seeds < 2:
        raise ValueError(f"ranking needs 2 seeds, not {seeds}")
    generator = np.random.default_rng(seed)
    centred = values - values.mean(axis=1, keepdims=True)
    normal = generator.standard_normal((DRAWS, seeds)) @ centred.T / np.sqrt(seeds - 1)  # [D, C], covariance cov
    scale = np.sqrt(generator.chisquare(seeds - 1, DRAWS) / (seeds - 1))
    means = values.mean(axis=1) + normal / np.sqrt(seeds) / scale[:, None]
    largest = means.max(axis=1, keepdims=True)
    first = means >= largest - 1e-12 * np.abs(largest)
    near = means >= largest - indifference * np.abs(largest)
    return Ranking((first / first.sum(axis=1, keepdims=True)).mean(axis=0), near.mean(axis=0))
