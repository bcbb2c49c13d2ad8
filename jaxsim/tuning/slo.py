"""An SLO as limits on figures of a run, and whether one run meets it."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxsim.engine import Simulation, Status
from jaxsim.errors import ConfigError
from jaxsim.metrics import goodput, itl_share_above, latencies
from jaxsim.settings import SloSettings, show
from jaxsim.tuning.load import Verdict

LATENCIES = ("queue_wait", "ttft", "tpot", "itl", "e2el")
STATISTIC = re.compile(rf"(mean|median|p(\d+(?:\.\d+)?))_({'|'.join(LATENCIES)})_ms(?:@([\w-]+))?")
OF_THE_RUN = ("num_preemptions", "preemptions_per_request", "kv_usage_mean", "kv_usage_peak", "kv_time_above_90")
FORMS = f"must be mean_, median_ or pNN_, then {', '.join(LATENCIES)}, then _ms; or one of {', '.join(OF_THE_RUN)}"
OF_A_CLASS = tuple(latency for latency in LATENCIES if latency != "itl")  # gaps are not kept by request
OF_A_REQUEST = ("ttft", "tpot", "e2el")  # as `vllm bench serve --goodput` knows them
MISSED = "goodput_missed"


class Limit(NamedTuple):
    """One figure of a run that must not be above a bound."""

    figure: str  # under the name that `figures` has for it
    bound: float  # in the figure's unit
    latency: str | None = None  # None: of the run as a whole
    percentile: float | None = None  # None: of a mean, or of the run as a whole
    label: str | None = None  # the class of requests that it is about, None: all

    @property
    def decides(self) -> str:
        """The figure whose mean over seeds is compared with `allowed`.

        For a percentile it is the share of the requests above the bound: a share of a few runs together is the mean of
        their shares, and unbiased, whereas a percentile is not the mean of their percentiles.
        """
        return self.figure if self.percentile is None else f"share_above_{self.figure}"

    @property
    def allowed(self) -> float:
        return self.bound if self.percentile is None else round(1 - self.percentile / 100, 12)

    @property
    def text(self) -> str:
        if self.figure == MISSED:
            return f"goodput >= {1 - self.bound:.4g} of the requests"
        if self.latency is None:
            return f"{self.figure} <= {self.bound:g}"
        return f"{self._statistic} {self._of} <= {self.bound:g} ms"

    def missed(self, value: float) -> str:
        """Says that one run missed it: by the figure itself."""
        if self.figure == MISSED:
            return f"goodput {1 - value:.4g} of the requests, below {1 - self.bound:.4g}"
        if self.latency is None:
            return f"{self.figure} {value:.4g} above {self.bound:g}"
        return f"{self._statistic} {self._of} {value:.4g} ms above {self.bound:g} ms"

    def missed_by_all(self, value: float) -> str:
        """Says that the runs of all seeds together missed it: by the mean of `decides`."""
        if self.percentile is None or self.latency is None:
            return self.missed(value)
        text = f"{self._statistic} {self._of} above {self.bound:g} ms"
        return f"{text}: {value:.2%} of the requests are, {self.allowed:.4g} may"

    @property
    def _of(self) -> str:
        assert self.latency is not None
        return self.latency.upper() + (f" of {self.label}" if self.label else "")

    @property
    def _statistic(self) -> str:
        return self.figure.split("_")[0]


def limits(slo: SloSettings) -> list[Limit]:
    """The limits that are set, the shorthands first. Raises `ConfigError` for one that cannot be read."""
    bounds: dict[str, float] = {}
    for latency, bound in shorthands(slo).items():
        bounds[f"p{slo.percentile:g}_{latency}_ms"] = bound
    for figure, bound in (slo.limits or {}).items():
        bounds[figure] = min(bound, bounds.get(figure, math.inf))
    found = [_limit(figure, bound) for figure, bound in bounds.items()]
    if goodput_ms(slo):
        found.append(Limit(MISSED, round(1 - slo.goodput_share, 12)))
    return found


def _limit(figure: str, bound: float) -> Limit:
    if figure in OF_THE_RUN:
        return Limit(figure, bound)
    match = STATISTIC.fullmatch(figure)
    if match is None:
        raise ConfigError(f"slo.limits.{figure}", show(bound), FORMS)
    percentile = {"mean": None, "median": 50.0}.get(match[1], float(match[2] or 50))
    if percentile is not None and not 0 < percentile <= 100:
        raise ConfigError(f"slo.limits.{figure}", show(bound), "must name a percentile above 0 up to 100")
    if match[4] and match[3] not in OF_A_CLASS:
        raise ConfigError(f"slo.limits.{figure}", show(bound), f"must be of {', '.join(OF_A_CLASS)} for a class")
    figure = match[1] if percentile is None or match[1] == "median" else f"p{percentile:g}"
    figure += f"_{match[3]}_ms" + (f"@{match[4]}" if match[4] else "")
    return Limit(figure, bound, match[3], percentile, match[4])


def shorthands(slo: SloSettings) -> dict[str, float]:
    """Limits at `slo.percentile`, in milliseconds."""
    bounds = {latency: getattr(slo, f"{latency}_ms") for latency in ("ttft", "tpot", "itl", "e2el", "queue_wait")}
    return {latency: bound for latency, bound in bounds.items() if bound is not None}


def goodput_ms(slo: SloSettings) -> dict[str, float]:
    """What `slo.goodput` asks of every single request, in milliseconds. Raises `ConfigError`."""
    bounds: dict[str, float] = {}
    for part in (slo.goodput or "").split():
        name, _, bound = part.partition(":")
        try:
            bounds[name] = float(bound)
        except ValueError:
            bounds[name] = math.nan
        if name not in OF_A_REQUEST or not 0 < bounds[name] < math.inf:
            raise ConfigError("slo.goodput", show(slo.goodput), "must be as in ttft:200 tpot:50 e2el:9000, in ms")
    return bounds


def of_a_request(slo: SloSettings) -> dict[str, float]:
    """What a request must meet to count for the goodput: `slo.goodput`, or else the shorthands; in milliseconds."""
    bounds = goodput_ms(slo) or shorthands(slo)
    return {latency: bound for latency, bound in bounds.items() if latency in OF_A_REQUEST}


def shares(simulation: Simulation, slo: SloSettings, warmup: float) -> dict[str, float]:
    """What `Limit.decides` asks for beyond the plain figures: shares of the requests after warm-up (ITL: of all gaps).

    A request that never finished has missed.
    """
    found = {}
    for limit in limits(slo):
        times = latencies(simulation if limit.label is None else of_class(simulation, limit.label), warmup)
        unfinished = times.requests - len(times.ttft)
        if limit.figure == MISSED:
            found[limit.decides] = 1 - goodput(simulation, goodput_ms(slo), warmup).share
        elif limit.percentile is not None and limit.latency == "itl":
            found[limit.decides] = itl_share_above(simulation, limit.bound)
        elif limit.percentile is not None and limit.latency is not None:
            values = getattr(times, limit.latency)
            values = values[times.output_tokens > 1] if limit.latency == "tpot" else values
            found[limit.decides] = share_above(np.append(values, np.full(unfinished, np.inf)), limit.bound)
    return found


def of_class(simulation: Simulation, label: str) -> Simulation:
    """The records of one class of requests; totals stay those of all."""
    mine = np.asarray(simulation.label) == label
    records = {
        name: value[mine]
        for name, value in vars(simulation).items()
        if isinstance(value, np.ndarray) and value.shape == mine.shape
    }
    return replace(simulation, **records)


def share_above(values: np.ndarray, bound: float) -> float:
    """Share of `values` [K] above a bound, 0 where there are none.

    Interpolated between neighbours as `np.percentile` does: at most 1 % are above exactly where the p99 is not.
    """
    if len(values) < 2:
        return float(np.any(values > bound))
    return float(1 - np.interp(bound, np.sort(values), np.linspace(0, 1, len(values))))


def judge(figures: Mapping[str, Any], slo: SloSettings, status: Status = Status.DONE) -> Verdict:
    """Whether a run finished, met every limit and was stable; the reason names the first that was missed.

    Undecided where all were met but more and more requests were in the server: a longer run may well miss them.
    """
    if status != Status.DONE:
        return Verdict(False, f"the run ended as {Status(status).name}")
    for limit in limits(slo):
        if figures[limit.figure] > limit.bound:
            return Verdict(False, limit.missed(figures[limit.figure]))
        if (
            limit.percentile is not None and figures[limit.decides] > limit.allowed + 1e-9
        ):  # unfinished ones have missed
            return Verdict(False, limit.missed_by_all(figures[limit.decides]))
    if not figures["stable"]:
        return Verdict(False, "the waiting queue grows")
    if figures["growing"]:
        return Verdict(None, left_behind(figures["growth_share"]))
    return Verdict(True, "")


def left_behind(share: float) -> str:
    return f"undecided: the server may not keep up, {share:.2g} of the arrivals add to the requests in it"
