"""Gradient-free search strategies, one file each behind one small contract.

A strategy sees the unit cube alone: V edges, one per searched key, each cut evenly into as many cells as the key has
values (`Space.decode`). `ask` gives positions [K, V] to try next, none when it has nothing more to say; `tell` takes
the same positions with their scores [K], larger is better, where equal scores are normal and settings that cannot
start or meet no SLO score lowest. Positions may repeat cells; what was simulated once is told from memory.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Protocol

import numpy as np

from jaxsim.errors import ConfigError


class Strategy(Protocol):
    """How every strategy is used: ask, tell, ask, tell, ..."""

    def ask(self) -> np.ndarray: ...

    def tell(self, units: np.ndarray, scores: np.ndarray) -> None: ...


class Problem:
    """What a strategy is made for."""

    def __init__(self, shape: tuple[int, ...], settings: int, seed: int, population: int | None = None):
        self.shape = np.array(shape, int)  # [V], cells along each edge
        self.settings = settings  # about as many different ones can be tried
        self.population = population  # settings of a generation, None: the strategy's choice
        self.generator = np.random.default_rng(seed)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def keys(self) -> int:
        return len(self.shape)

    def middles(self, places: np.ndarray) -> np.ndarray:
        """Positions [K, V] of the middles of cells, [K] places of which the last key's vary fastest."""
        return (np.stack(np.unravel_index(places, self.shape), axis=1) + 0.5) / self.shape

    def generation(self, least: int) -> int:
        """Settings of a generation: as asked, else enough for V keys and for some generations in all."""
        return self.population or int(np.clip(self.settings // 5, least, 64))


class Untold:
    """A strategy that proposes all it has at once and learns nothing: a subclass draws the positions, [number, V]."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.left = min(problem.settings, problem.size)

    def draw(self, number: int) -> np.ndarray:
        raise NotImplementedError

    def ask(self) -> np.ndarray:
        number, self.left = self.left, 0
        return self.draw(number) if number else np.zeros((0, self.problem.keys))

    def tell(self, units: np.ndarray, scores: np.ndarray) -> None:
        pass


UNTOLD = ("grid", "random", "sobol", "latin")  # these learn nothing from scores
NAMES = ("grid", "random", "sobol", "latin", "cem", "es", "cmaes")


def strategy(name: str, problem: Problem) -> Strategy:
    """A strategy by its name. Raises `ConfigError` where its package is missing."""
    make: Callable[[Problem], Strategy] = getattr(import_module(f"jaxsim.tuning.strategies.{name}"), name.capitalize())
    try:
        return make(problem)
    except ModuleNotFoundError as error:
        allowed = f"needs the package {error.name}: pip install 'jaxsim[{error.name}]'"
        raise ConfigError("search.strategy", name, allowed) from None
