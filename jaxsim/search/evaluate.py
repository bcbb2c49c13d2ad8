"""Replicates of one setting: the requests of every seed, whether a run meets the SLO, and figures over seeds."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxsim.engine import Requests, Simulation, Status
from jaxsim.errors import ConfigError
from jaxsim.metrics import Interval, is_growing, latencies, summarise, t_interval
from jaxsim.search.load import Verdict
from jaxsim.settings import SearchSettings, SloSettings
from jaxsim.workload import TraceWorkload, Workload, drop_or_refuse

PERCENTILES = (50, 95, 99)
LIMITS = {"seats": "refused_seats", "KV cache": "refused_kv", "token budget": "refused_budget"}


Simulate = Callable[..., list[Simulation]]  # `jaxsim.engine.simulate_many`, or a stand-in


class Replicates(NamedTuple):
    """The same requests for every setting, one set per seed: common random numbers."""

    requests: list[Requests]  # [S], all of one length
    rates_rps: list[float]  # [S], load at which they arrive as they stand; stretched to any other
    dropped: list[int]  # [S], requests too long for the server

    @property
    def count(self) -> int:
        """Requests per seed."""
        return len(self.requests[0].prompt_len)

    def stretch(self, seed: int, load_rps: float) -> float:
        """Factor on the arrival times of the seed's requests, by place, that makes their load `load_rps`."""
        return self.rates_rps[seed] / load_rps


def replicates(
    workload: Workload | TraceWorkload, search: SearchSettings, max_model_len: int, too_long: str
) -> Replicates:
    """Requests of every seed. Raises `ConfigError` for prompts that do not fit and are not to be dropped."""
    count = search.num_requests
    if isinstance(workload, TraceWorkload):
        count = min(count or len(workload.ticks), len(workload.ticks))
        if not math.isfinite(workload.rate_rps):
            raise ConfigError("workload.path", workload.source, "needs arrival times: all requests arrive at once")
    elif count is None:
        raise ConfigError("search.num_requests", "null", "must be an integer for a workload that is not a trace")
    requests, dropped = [], []
    for seed in range(search.first_seed, search.first_seed + search.seeds):
        kept, left_out = drop_or_refuse(workload.sample(seed, count), max_model_len, too_long)  # pyright: ignore
        requests.append(kept)
        dropped.append(left_out)
    shortest = min(len(kept.prompt_len) for kept in requests)
    cut = [
        Requests(*(None if field is None else field[:shortest] for field in kept))  # pyright: ignore[reportArgumentType]
        for kept in requests
    ]
    return Replicates(cut, [_rate_rps(requests, workload.rate_rps) for requests in cut], dropped)


def _rate_rps(requests: Requests, nominal_rps: float) -> float:
    """The rate at which these very requests arrive: of a short sample or a trace's window it is not the nominal one."""
    last = float(requests.arrival_s[-1] - requests.arrival_s[0])
    return (len(requests.arrival_s) - 1) / last if last > 0 else nominal_rps


def warmup_share(warmup: float, clients: int | None, count: int) -> float:
    """Share of requests that no latency counts: in a closed loop at least the first of every client."""
    return max(warmup, min(0.9, (clients or 0) / count))


def judge(simulation: Simulation, slo: SloSettings, warmup: float) -> Verdict:
    """Whether a run finished, was stable and met every limit; the reason names the first that was missed."""
    if simulation.status != Status.DONE:
        return Verdict(False, f"the run ended as {Status(simulation.status).name}")
    times = latencies(simulation, warmup)
    for name, limit in limits_ms(slo).items():
        values = times.tpot[times.output_tokens > 1] if name == "tpot" else getattr(times, name)
        value = float(np.percentile(values, slo.percentile)) if len(values) else 0.0
        if value > limit:
            return Verdict(False, f"p{slo.percentile:g} {name.upper()} {value:.4g} ms above {limit:g} ms")
    if is_growing(simulation):
        return Verdict(False, "the waiting queue grows")
    return Verdict(True, "")


def limits_ms(slo: SloSettings) -> dict[str, float]:
    """The limits that are set, in milliseconds."""
    limits = {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms, "e2el": slo.e2el_ms}
    return {name: limit for name, limit in limits.items() if limit is not None}


def percentiles(slo: SloSettings) -> tuple[float, ...]:
    """Percentiles that are reported, ascending."""
    return tuple(sorted({*PERCENTILES, slo.percentile}))


def figures(simulation: Simulation, slo: SloSettings, warmup: float) -> dict[str, Any]:
    """Everything reported about one run: the keys of `vllm bench serve`, and what the server did."""
    row: dict[str, Any] = summarise(simulation, warmup, percentiles(slo), limits_ms(slo))
    row |= {key: value for key, value in simulation.totals._asdict().items() if np.isscalar(value)}
    row["preemptions_per_request"] = simulation.totals.num_preemptions / max(1, len(simulation.prompt_len))
    row["stable"] = float(not is_growing(simulation))
    row["slo_met"] = float(judge(simulation, slo, warmup).passed)
    return row


def over_seeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, Interval]:
    """Mean and 95 % interval of every figure over seeds."""
    return {key: t_interval([row[key] for row in rows]) for key in rows[0] if np.isscalar(rows[0][key])}


def limited_by(simulations: Iterable[Simulation]) -> str:
    """What most often refused the head of the waiting queue; "compute" if nothing ever did.

    Even a refusal in one iteration of a thousand counts: the requests that an SLO's tail is made of are few.
    """
    counts = dict.fromkeys(LIMITS, 0)
    for simulation in simulations:
        for name, total in LIMITS.items():
            counts[name] += int(getattr(simulation.totals, total))
    most = max(counts, key=lambda name: counts[name])
    return most if counts[most] else "compute"


def number_of_instances(target_rps: float, load: Interval) -> tuple[int, int | None, int | None]:
    """Instances for a load: by the mean capacity, by the upper and by the lower end of its interval."""
    half = 0.0 if math.isnan(load.half_width) else load.half_width
    low, high = load.mean - half, load.mean + half
    return (
        math.ceil(target_rps / load.mean),
        math.ceil(target_rps / high),
        math.ceil(target_rps / low) if low > 0 else None,
    )
