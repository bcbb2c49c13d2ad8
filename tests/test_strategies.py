"""One contract for every strategy, the posterior of the ranking, and the search that they drive."""

import numpy as np
import pytest

from jaxsim.tuning.ranking import ranking
from jaxsim.tuning.strategies import NAMES, Problem, strategy

SHAPE = (12, 8)


def made(name, settings=32, seed=0, shape=SHAPE):
    if name == "cmaes":
        pytest.importorskip("cmaes", reason="needs the package cmaes")
    return strategy(name, Problem(shape, settings, seed))


def score(units: np.ndarray, best=(8, 2), shape=SHAPE) -> np.ndarray:
    """Falls with the distance from one cell, by 100 at most."""
    cells = np.clip(np.floor(units * shape), 0, np.array(shape) - 1)
    return 100 - (((cells - best) / shape) ** 2).sum(axis=1) * 50


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [SHAPE, (1000,), (2, 3, 4, 5)])
def test_positions_lie_in_the_cube_and_a_seed_repeats_itself(name, shape):
    runs = []
    for _ in range(2):
        tried, asked = made(name, shape=shape), []
        for _ in range(8):
            units = tried.ask()
            assert units.shape[1:] == (len(shape),)
            if not len(units):
                break
            assert ((units >= 0) & (units <= 1)).all()
            asked.append(units)
            tried.tell(units, score(units, np.array(shape) // 2, shape))
        runs.append(np.concatenate(asked))
    assert (runs[0] == runs[1]).all()
    # One generation of as many as asked for (the grid: all), or several.
    assert len(runs[0]) >= (np.prod(shape) if name == "grid" else min(32, np.prod(shape)))


@pytest.mark.parametrize("name", NAMES)
def test_equal_and_lowest_scores_are_borne(name):
    tried = made(name)
    for value in (0.0, -1.0, 0.0):
        units = tried.ask()
        if len(units):
            tried.tell(units, np.full(len(units), value))
    assert np.isfinite(tried.ask()).all()


@pytest.mark.parametrize("name", ["cem", "es", "cmaes"])
def test_what_adapts_comes_closer(name):
    first, last = [], []
    for seed in range(5):
        tried = made(name, settings=60, seed=seed)
        scores = []
        for _ in range(8):
            units = tried.ask()
            scores.append(score(units))
            tried.tell(units, scores[-1])
        first.append(scores[0].mean())
        last.append(scores[-1].mean())
    assert np.mean(last) > np.mean(first) + 3  # a hypercube's mean lies 5 to 9 below the best


def test_random_settings_are_all_different():
    units = made("random", settings=96).ask()
    assert len({tuple(row) for row in np.floor(units * SHAPE).tolist()}) == 96


def test_the_posterior_of_a_difference_is_students():
    # Two settings, three seeds, paired differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.464 with 2 degrees of freedom,
    # of which Student's distribution lies below 0.9629.
    values = np.array([[11.0, 12.0, 13.0], [10.0, 10.0, 10.0]])
    found = ranking(values, 0.0)
    best, near = found.best, found.near
    assert best[0] == pytest.approx(0.9629, abs=0.01) and best.sum() == pytest.approx(1)
    assert (near == best).all() and found.ahead(1).tolist() == [best[0], 0]
    # The second is within 10 % of the first if that is below 11.11: t = -1.5396, 0.1318.
    assert ranking(values, 0.1).near[1] == pytest.approx(0.1318, abs=0.01)


def test_equal_settings_share_the_chance_and_one_seed_says_nothing():
    assert ranking(np.array([[1.0, 2.0], [1.0, 2.0]]), 0.0).best.tolist() == [0.5, 0.5]
    with pytest.raises(ValueError):
        ranking(np.array([[1.0], [2.0]]), 0.0)
