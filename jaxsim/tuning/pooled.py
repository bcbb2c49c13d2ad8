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
from scipy.special import stdtrit

from jaxsim.metrics import GROWTH_SHARE, TREND_SHARE, Interval
from jaxsim.tuning.evaluate import Outcome
from jaxsim.tuning.load import Verdict
from jaxsim.tuning.slo import Limit, left_behind

FEW_SEEDS = 5  # below, the spread over seeds says too little and every run speaks for itself
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
    events: float  # about how many independent ones, jams say, the share that fails the next load rests on


def decisive(outcomes: Sequence[Outcome], limits: Sequence[Limit]) -> np.ndarray:
    """The figures that decide, of runs under S seeds: [S, L + 4], what the limits need first, then `STATE`."""
    keys = [*(limit.decides for limit in limits), *STATE]
    return np.array([[outcome.figures[key] for key in keys] for outcome in outcomes], dtype=np.float64)


def verdict(figures: np.ndarray, limits: Sequence[Limit]) -> Verdict:
    """Whether runs under several seeds, `figures` of `decisive`, together finished, met every limit and were stable.

    Unstable where the waiting queue grows in more than half of them. Undecided where the requests in the server grow on
    the average over seeds by more than chance, or where it cannot be excluded that they grow by `GROWTH_SHARE`: at a
    load a little too high, short runs end before it shows elsewhere.
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
        margin = float(stdtrit(seeds - 1, TREND_LEVEL)) * float(shares.std(ddof=1)) / math.sqrt(seeds)
        doubt = shares.mean() >= max(TREND_SHARE, margin) or shares.mean() + margin >= GROWTH_SHARE
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
    seeds, last = figures.shape[1], len(loads) - 1
    curves = [Curve(figures[:, :, index], limit.allowed, True) for index, limit in enumerate(limits)]
    binding = [one for one in curves if passed < last and one.values[passed + 1].mean() > one.allowed]
    if binding:
        at = float(_first(loads, [(one.values.mean(axis=1, keepdims=True), one.allowed) for one in curves])[0])
    else:
        # No limit of the SLO failed the next load: the server could not keep up with it.
        growth = figures[:, :, -1]
        curves.append(Curve(growth, max(TREND_SHARE, float(growth[passed].mean())), False))
        at = float(loads[passed])
    at = float(loads[passed]) if whole else float(np.clip(at, loads[passed], loads[min(passed + 1, last)]))
    if seeds == 1 or not last:
        return Crossing(np.full(seeds, at), Interval(at, math.nan), at, at, at, math.inf)
    rest = [((one.values.sum(axis=1, keepdims=True) - one.values) / (seeds - 1), one.allowed) for one in curves]
    left_out = _first(loads, rest)
    reach = float(left_out.max())
    left_out = np.minimum(left_out, loads[-1])
    values = at + (seeds - 1) * (left_out.mean() - left_out)
    quantile = float(stdtrit(seeds - 1, (1 + confidence) / 2))
    upper = [(_upper(curve, quantile), curve.allowed) for curve in curves]
    low = min(at, float(_first(loads, [(mean[:, None], allowed) for mean, allowed in upper])[0]))
    half = max(quantile * float(values.std(ddof=1)) / math.sqrt(seeds), at - low)
    events = [_events(one.values[passed + 1]) for one in binding if one.allowed > 0]
    look = min(at, _before(loads, upper))
    return Crossing(values, Interval(at, half), low, look, reach, min(events, default=math.inf))


def _events(shares: np.ndarray) -> float:
    """About how many independent events shares [S] rest on: of so many a Poisson count would scatter as much."""
    if len(shares) < FEW_SEEDS or not shares.std() > 0:
        return math.inf
    return float(len(shares) * shares.mean() ** 2 / shares.var(ddof=1))


def _first(loads: np.ndarray, means: Sequence[tuple[np.ndarray, float]]) -> np.ndarray:
    """The lowest load at which one of the means [R, K] crosses what is allowed, [K]; infinite where none does.

    Between two loads a mean is taken to grow exponentially, as the tail of a wait does; linearly from 0 or below. The
    answer is 0 if the lowest load is too high already.
    """
    crossings = []
    for mean, allowed in means:
        above, columns = mean > allowed, np.arange(mean.shape[1])
        index = np.maximum(above.argmax(axis=0), 1)
        before, after = mean[index - 1, columns], mean[index, columns]
        with np.errstate(divide="ignore", invalid="ignore"):
            exponential = np.log(allowed / before) / np.log(after / before) if allowed > 0 else np.nan
            share = np.where((before > 0) & (allowed > 0), exponential, (allowed - before) / (after - before))
        found = loads[index - 1] + share * (loads[index] - loads[index - 1])
        crossings.append(np.where(above[0], 0.0, np.where(above.any(axis=0), found, np.inf)))
    return np.min(crossings, axis=0, initial=np.inf)


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
