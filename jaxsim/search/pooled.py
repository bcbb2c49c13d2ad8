"""Runs of one setting under several seeds, taken together: the verdict at one load, the capacity over several loads.

Every limit of an SLO is a bound on the mean over seeds of one figure (`Limit.decides`), so capacity is the load at
which the first of these means crosses its bound. Over seeds the crossing varies far less than each seed's own, and it
has a smaller bias: the mean is linear in the runs, the largest load that one short run happens to survive is not.

In the shapes, `R` is the number of loads, ascending, `S` of seeds.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t

from jaxsim.metrics import TREND_SHARE, Interval
from jaxsim.search.evaluate import Outcome
from jaxsim.search.load import Verdict
from jaxsim.search.slo import Limit, left_behind

FEW_SEEDS = 3  # below, the spread over seeds says nothing and every run speaks for itself
TREND_LEVEL = 0.95  # one-sided
STATE = ("failed", "stable", "growing", "growth_share")


class Curve(NamedTuple):
    """One figure under every load and seed, and what its mean over seeds may be."""

    values: np.ndarray  # [R, S]
    allowed: float
    positive: bool  # cannot be below 0


class Crossing(NamedTuple):
    """A capacity: the load up to which every mean is allowed."""

    values: np.ndarray  # [S], each seed's contribution; their mean is the capacity
    interval: Interval
    low: float  # where an upper confidence limit of a mean crosses already; 0 if at the lowest load
    look: float  # where that should be, by the loads above it
    reach: float  # the highest load that a seed's contribution rests on
    events: float  # about how many independent ones the missed share rests on: (mean / standard error) squared


def decisive(outcomes: Sequence[Outcome], limits: Sequence[Limit]) -> np.ndarray:
    """The figures that decide, of runs under S seeds: [S, L + 4], what the limits need first, then `STATE`."""
    keys = [*(limit.decides for limit in limits), *STATE]
    return np.array([[figures[key] for key in keys] for _, figures in outcomes], dtype=np.float64)


def verdict(figures: np.ndarray, limits: Sequence[Limit]) -> Verdict:
    """Whether runs under several seeds, `figures` of `decisive`, together finished, met every limit and were stable.

    Unstable where the waiting queue grows in more than half of them. Undecided where the requests in the server grow on
    the average over seeds, by more than chance: at a load a little too high, short runs end before it shows elsewhere.
    """
    seeds, (failed, stable, growing, shares) = len(figures), figures[:, len(limits) :].T
    if failed.any():
        return Verdict(False, f"{failed.sum():.0f} requests never finished")
    for limit, value in zip(limits, figures.mean(axis=0), strict=False):
        if value > limit.allowed:
            return Verdict(False, limit.missed_by_all(float(value)))
    if 2 * stable.sum() < seeds:
        return Verdict(False, f"the waiting queue grows in {seeds - stable.sum():.0f} of {seeds} runs")
    if seeds < FEW_SEEDS:
        doubt = bool(growing.any())
    else:
        error = float(shares.std(ddof=1)) / math.sqrt(seeds)
        doubt = shares.mean() >= TREND_SHARE and shares.mean() > float(t.ppf(TREND_LEVEL, seeds - 1)) * error
    return Verdict(None, left_behind(float(shares.mean()))) if doubt else Verdict(True, "")


def crossing(
    loads: np.ndarray,
    figures: np.ndarray,
    limits: Sequence[Limit],
    passed: int,
    confidence: float,
    whole: bool = False,
) -> Crossing:
    """The capacity from `figures` [R, S, L + 4] at `loads` [R] (see `decisive`), the highest good load at `passed`.

    `whole` is for numbers of clients: then nothing between two values counts.
    The contributions are jackknife pseudo-values: what leaving one seed out changes. The half width is the larger of
    two: of the t interval over them, and the distance to `low`, from a t interval of the logarithm of each mean. The
    missed shares of few runs are skewed (a seed with a long jam outweighs the others), and where no seed had one
    the first alone is too narrow.
    """
    seeds = figures.shape[1]
    curves = [Curve(figures[:, :, index], limit.allowed, True) for index, limit in enumerate(limits)]
    at = _first(loads, [(one.values.mean(axis=1), one.allowed) for one in curves])
    following = float(loads[passed + 1]) if passed + 1 < len(loads) else math.inf
    if at > following or math.isinf(at):
        # No limit of the SLO failed the next load: the server could not keep up with it.
        growth = figures[:, :, -1]
        curves.append(Curve(growth, max(TREND_SHARE, float(growth[passed].mean())), False))
        at = float(loads[passed])
    at = float(loads[passed]) if whole else float(np.clip(at, loads[passed], following))
    if seeds == 1:
        return Crossing(np.array([at]), Interval(at, math.nan), at, at, at, math.inf)
    rest = [np.delete(np.arange(seeds), seed) for seed in range(seeds)]
    left_out = np.array([_first(loads, [(c.values[:, kept].mean(axis=1), c.allowed) for c in curves]) for kept in rest])
    reach = float(left_out.max())
    left_out = np.minimum(left_out, loads[-1])
    values = at + (seeds - 1) * (left_out.mean() - left_out)
    quantile = float(t.ppf((1 + confidence) / 2, seeds - 1))
    upper = [(_upper(curve, quantile), curve.allowed) for curve in curves]
    low, look = min(at, _first(loads, upper)), min(at, _before(loads, upper))
    missed = [c.values[passed + 1] for c in curves if c.positive and passed + 1 < len(loads)]
    events = [(one.mean() / max(one.std(ddof=1), 1e-12)) ** 2 * seeds for one in missed if one.mean() > 0]
    half = max(quantile * float(values.std(ddof=1)) / math.sqrt(seeds), at - low)
    return Crossing(values, Interval(at, half), low, look, reach, min(events, default=math.inf))


def _first(loads: np.ndarray, means: Sequence[tuple[np.ndarray, float]]) -> float:
    """The lowest load at which one of the means [R] crosses what is allowed; infinite where none does.

    Between two loads a mean is taken to grow exponentially, as the tail of a wait does; linearly from 0 or below. The
    answer is 0 if the lowest load is too high already.
    """
    least = math.inf
    for mean, allowed in means:
        above = np.flatnonzero(mean > allowed)
        if len(above) == 0:
            continue
        index = int(above[0])
        if index == 0:
            return 0.0
        before, after = float(mean[index - 1]), float(mean[index])
        if before > 0 and allowed > 0:
            share = math.log(allowed / before) / math.log(after / before)
        else:
            share = (allowed - before) / (after - before)
        least = min(least, float(loads[index - 1] + share * (loads[index] - loads[index - 1])))
    return least


def _before(loads: np.ndarray, means: Sequence[tuple[np.ndarray, float]]) -> float:
    """Where the means should cross, by their growth over the two lowest loads at which they are above."""
    least = math.inf
    for mean, allowed in means:
        index = int(np.argmax(mean > allowed))
        if mean[index] > allowed > 0 and index + 1 < len(loads) and mean[index + 1] > mean[index]:
            growth = math.log(mean[index + 1] / mean[index]) / float(loads[index + 1] - loads[index])
            least = min(least, float(loads[index]) - math.log(mean[index] / allowed) / growth)
    return least


def _upper(curve: Curve, quantile: float) -> np.ndarray:
    """Upper confidence limit of the mean at each load, [R]; on a logarithmic scale where that makes sense."""
    mean = curve.values.mean(axis=1)
    error = curve.values.std(axis=1, ddof=1) / math.sqrt(curve.values.shape[1])
    if not curve.positive:
        return mean + quantile * error
    relative = np.divide(error, mean, out=np.zeros_like(mean), where=mean > 0)
    return mean * np.exp(np.minimum(quantile * relative, 50.0))
