"""Priorities of requests, which count under `engine.policy=priority` only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxsim.errors import ConfigError

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Priority:
    """Each request has one of `values`, the lower the more urgent, chosen in proportion to `weights` (None: equal)."""

    values: tuple[int, ...] = (0,)
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        whole = [type(value) is int and abs(value) <= LARGEST for value in self.values]
        if not whole or not all(whole):
            raise ConfigError("values", list(self.values), "a list of integers")
        if self.weights is not None:
            numbers = [not isinstance(weight, bool) and isinstance(weight, int | float) for weight in self.weights]
            good = all(numbers) and all(0 <= weight < np.inf for weight in self.weights) and sum(self.weights) > 0
            if not good or len(numbers) != len(whole):
                allowed = "as many numbers >= 0 as values, at least one above 0"
                raise ConfigError("weights", list(self.weights), allowed)

    def sample(self, uniform: np.ndarray) -> np.ndarray | None:
        """Priorities, int64 [N], of uniform numbers [N] in [0, 1); None if all are equal."""
        if len(self.values) == 1:
            return None
        weights = np.ones(len(self.values)) if self.weights is None else np.array(self.weights, np.float64)
        upper = np.cumsum(weights) / weights.sum()
        chosen = np.searchsorted(upper, uniform, side="right")
        return np.array(self.values, np.int64)[np.minimum(chosen, len(self.values) - 1)]
