"""Distributions of prompt and output lengths, each given by its quantile function.

A length is the quantile function at one uniform number per request, so that two distributions fed the same numbers
stay coupled (common random numbers): request i is long in both or short in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from jaxsim.engine.types import LARGEST
from jaxsim.errors import ConfigError

LONGEST = LARGEST - 1  # tokens of one request that the engine takes
DISTRIBUTIONS = ("fixed", "lognormal", "empirical")

# ln(value) = mu + a * sigma + b * sigma**2 for each figure that locates a lognormal distribution.
_LOCATIONS = {"mu": (0.0, 0.0), "mean": (0.0, 0.5)} | {
    f"p{q}": (NormalDist().inv_cdf(q / 100) if q != 50 else 0.0, 0.0) for q in (50, 95, 99)
}
_TWO_FIGURES = "a lognormal takes exactly two of mean, cv, p50, p95, p99, mu, sigma that do not determine each other"


@dataclass(frozen=True)
class Length:
    """Length of a prompt or an output in tokens; the fields are those of `conf/workload/synthetic.yaml`.

    fixed: `value`.
    lognormal: any two of `mean`, `cv` (standard deviation / mean), `p50`, `p95`, `p99`, `mu`, `sigma` (of ln tokens).
        They describe the distribution before it is clipped to `min` and `max`.
    empirical: `values` alone or with `weights` (a list or a histogram: values are drawn as they are), or `values` at
        `quantiles` running from 0 to 1; between two points the quantile function rises as a power of the probability,
        with one exponent for all intervals that makes the mean equal `mean` (1, straight lines, without `mean`).

    Fields of other distributions are ignored. Errors: ConfigError naming the field.
    """

    dist: str = "fixed"
    value: int | None = None
    mean: float | None = None
    cv: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    mu: float | None = None
    sigma: float | None = None
    values: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    quantiles: tuple[float, ...] | None = None
    min: int = 1
    max: int | None = None

    def __post_init__(self):
        if self.dist not in DISTRIBUTIONS:
            raise ConfigError("dist", self.dist, "one of " + ", ".join(DISTRIBUTIONS))
        _check_integer("min", self.min, 1, LONGEST)
        if self.max is not None:
            _check_integer("max", self.max, self.min, LONGEST)
        if self.dist == "fixed":
            _check_integer("value", self.value, self.min, self.largest)
        self.quantile(np.array([0.5]))  # solves for the parameters, so a distribution that does not exist fails here

    @property
    def largest(self) -> int:
        """Upper clipping bound in tokens."""
        return LONGEST if self.max is None else self.max

    def sample(self, uniform: np.ndarray) -> np.ndarray:
        """Lengths in tokens, int64 [N], of uniform numbers [N] in [0, 1): nearest integer, clipped to min and max."""
        return np.clip(np.rint(self.quantile(uniform)), self.min, self.largest).astype(np.int64)

    def quantile(self, u: np.ndarray) -> np.ndarray:
        """Unrounded, unclipped quantile function at `u` [N] in [0, 1), float64 [N] tokens."""
        if self.dist == "fixed":
            assert self.value is not None
            return np.full(len(u), float(self.value))
        if self.dist == "lognormal":
            from scipy.special import ndtri

            mu, sigma = self.lognormal_parameters()
            with np.errstate(over="ignore"):
                # sigma 0 at u 0 would be 0 * -inf
                return np.exp(mu + sigma * ndtri(np.maximum(u, 2.0**-60)))
        return self._empirical(u)

    def lognormal_parameters(self) -> tuple[float, float]:
        """(mu, sigma) of ln tokens. Two locations give a quadratic in sigma; the smaller valid root is taken."""
        given = {
            name: value
            for name in ("mu", "mean", "p50", "p95", "p99", "sigma", "cv")
            if (value := getattr(self, name)) is not None
        }
        for name, value in given.items():
            _check_number(name, value, positive=name not in ("mu", "sigma", "cv"))
            if name in ("sigma", "cv") and value < 0:
                raise ConfigError(name, value, "a number >= 0")
        shapes = [name for name in given if name in ("sigma", "cv")]
        places = [name for name in given if name not in ("sigma", "cv")]
        if len(given) != 2 or len(shapes) > 1 or set(places) == {"mu", "p50"}:
            raise ConfigError("dist", "lognormal", f"{_TWO_FIGURES}; given: {', '.join(given) or 'none'}")
        logs = [given[name] if name == "mu" else math.log(given[name]) for name in places]
        (a1, b1) = _LOCATIONS[places[0]]
        if shapes:
            shape = given[shapes[0]]
            sigma = shape if shapes[0] == "sigma" else math.sqrt(math.log1p(shape * shape))
        else:
            sigma = self._sigma_of(places, logs)
        return logs[0] - a1 * sigma - b1 * sigma * sigma, sigma

    def _sigma_of(self, places: list[str], logs: list[float]) -> float:
        """sigma from two locations: (a1 - a2) sigma + (b1 - b2) sigma**2 = ln v1 - ln v2."""
        (a1, b1), (a2, b2) = (_LOCATIONS[name] for name in places)
        a, b, d = a1 - a2, b1 - b2, logs[0] - logs[1]
        if b == 0:
            roots = [d / a]
        else:
            root = math.sqrt(disc) if (disc := a * a + 4 * b * d) >= 0 else math.nan
            roots = [(-a - root) / (2 * b), (-a + root) / (2 * b)]
        valid = [sigma for sigma in roots if sigma >= 0]
        if not valid:
            first, second = places
            raise ConfigError(first, getattr(self, first), f"no lognormal has it with {second}={getattr(self, second)}")
        return min(valid)

    def _empirical(self, u: np.ndarray) -> np.ndarray:
        values = _number_list("values", self.values)
        if self.quantiles is None:
            weights = np.ones(len(values)) if self.weights is None else _number_list("weights", self.weights)
            if len(weights) != len(values) or weights.min() < 0 or weights.sum() <= 0:
                raise ConfigError("weights", list(weights), "as many numbers >= 0 as values, at least one above 0")
            order = np.argsort(values, kind="stable")
            upper = np.cumsum(weights[order]) / weights.sum()
            return values[order][np.minimum(np.searchsorted(upper, u, side="right"), len(values) - 1)]
        if self.weights is not None:
            raise ConfigError("weights", list(self.weights), "null when quantiles are given")
        points = _number_list("quantiles", self.quantiles)
        if len(points) != len(values) or points[0] != 0 or points[-1] != 1 or (np.diff(points) <= 0).any():
            raise ConfigError("quantiles", list(points), "as many rising numbers as values, the first 0, the last 1")
        if (np.diff(values) < 0).any():
            raise ConfigError("values", list(values), "numbers that do not fall from one quantile to the next")
        exponent = self._exponent(values, np.diff(points))
        left = np.clip(np.searchsorted(points, u, side="right") - 1, 0, len(points) - 2)
        share = (u - points[left]) / (points[left + 1] - points[left])
        return values[left] + (values[left + 1] - values[left]) * share**exponent

    def _exponent(self, values: np.ndarray, mass: np.ndarray) -> float:
        """Exponent k at which the mean is right: an interval's mean is low + (high - low) / (k + 1)."""
        if self.mean is None:
            return 1.0
        _check_number("mean", self.mean, positive=True)
        low, high = float(mass @ values[:-1]), float(mass @ values[1:])
        if not low < self.mean < high:
            raise ConfigError("mean", self.mean, f"between {low:g} and {high:g} with these quantiles (exclusive)")
        return (high - low) / (self.mean - low) - 1.0


def _check_integer(key: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ConfigError(key, value, f"an integer from {low} to {high}")


def _check_number(key: str, value: object, positive: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(key, value, "a finite number" + (" above 0" if positive else ""))
    if positive and value <= 0:
        raise ConfigError(key, value, "a finite number above 0")


def _number_list(key: str, values: tuple[float, ...] | None) -> np.ndarray:
    """`values` as float64 [K], K >= 1; lengths in tokens must be at least 1."""
    allowed = "a list of tokens from 1" if key == "values" else "a list of numbers"
    try:
        array = np.array(values if values is not None else [], dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError(key, values, allowed) from None
    if array.ndim != 1 or len(array) == 0 or not np.isfinite(array).all() or (key == "values" and array.min() < 1):
        raise ConfigError(key, values, allowed)
    return array
