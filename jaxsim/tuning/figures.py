"""Figures of one run, and over seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxsim.engine import Simulation
from jaxsim.metrics import Interval, growth, is_growing, summarise, t_interval
from jaxsim.settings import SloSettings
from jaxsim.tuning.slo import OF_A_CLASS, judge, limits, of_a_request, of_class, shares

PERCENTILES = (50, 95, 99)
LIMITS = {"seats": "refused_seats", "KV cache": "refused_kv", "token budget": "refused_budget"}


def percentiles(slo: SloSettings) -> tuple[float, ...]:
    """Percentiles that are reported, ascending."""
    limited = {limit.percentile for limit in limits(slo) if limit.percentile is not None}
    return tuple(sorted({*PERCENTILES, slo.percentile, *limited}))


def figures(simulation: Simulation, slo: SloSettings, warmup: float) -> dict[str, Any]:
    """Everything reported about one run: the keys of `vllm bench serve`, what the server did and what the SLO asks."""
    row: dict[str, Any] = summarise(simulation, warmup, percentiles(slo), of_a_request(slo) or None)
    row |= _of_the_server(simulation)
    row["preemptions_per_request"] = simulation.totals.num_preemptions / max(1, len(simulation.prompt_len))
    if simulation.label is not None:
        for label in sorted(set(simulation.label.tolist())):
            mine = summarise(of_class(simulation, label), warmup, percentiles(slo))
            kept = [key for key in mine if key.endswith(tuple(f"_{latency}_ms" for latency in OF_A_CLASS))]
            row |= {f"{key}@{label}": mine[key] for key in [*kept, "completed", "rejected"]}
    row |= shares(simulation, slo, warmup)
    row["stable"] = float(not is_growing(simulation))
    trend = growth(simulation)
    row["growth_share"], row["growing"] = trend.share, float(trend.clear)
    row["slo_met"] = float(judge(row, slo, simulation.status).passed is True)
    return row


def figures_as_of(row: Mapping[str, Any], simulation: Simulation, slo: SloSettings) -> dict[str, Any]:
    """The figures of a simulation from those of another one with the same records."""
    changed = {**row, **_of_the_server(simulation)}
    return changed | {"slo_met": float(judge(changed, slo, simulation.status).passed is True)}


def _of_the_server(simulation: Simulation) -> dict[str, Any]:
    return {key: value for key, value in simulation.totals._asdict().items() if np.isscalar(value)}


def over_seeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, Interval]:
    """Mean and 95 % interval of every figure over seeds."""
    return {key: t_interval([row[key] for row in rows]) for key in rows[0] if np.isscalar(rows[0][key])}


def limited_by(rows: Iterable[Mapping[str, Any]]) -> str:
    """What most often refused the head of the waiting queue, by the figures of runs; "compute" if nothing ever did.

    Even a refusal in one iteration of a thousand counts: the requests that an SLO's tail is made of are few.
    """
    counts = dict.fromkeys(LIMITS, 0)
    for row in rows:
        for name, total in LIMITS.items():
            counts[name] += int(row[total])
    most = max(counts, key=lambda name: counts[name])
    return most if counts[most] else "compute"


def number_of_instances(target_rps: float, load: Interval, carrying: int = 1) -> tuple[int, int | None, int | None]:
    """Instances for a load, if `carrying` of them have the capacity: by its mean and the ends of its interval."""
    half = 0.0 if math.isnan(load.half_width) else load.half_width
    low, high = load.mean - half, load.mean + half
    return (
        math.ceil(carrying * target_rps / load.mean),
        math.ceil(carrying * target_rps / high),
        math.ceil(carrying * target_rps / low) if low > 0 else None,
    )


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """Cost of a million tokens at a GPU's price and its throughput, in the currency of the price."""
    return price_per_hour / 3600 / tokens_per_s * 1e6
