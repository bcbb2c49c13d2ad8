"""What a search found: a row per setting, and the summary of the best one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxsim.memory import requests_that_fit
from jaxsim.metrics import Interval
from jaxsim.results.serve import vllm_serve
from jaxsim.settings import SloSettings
from jaxsim.tuning.capacity import Found
from jaxsim.tuning.explore import Exploration, Known
from jaxsim.tuning.figures import cost_per_million, limited_by, number_of_instances, over_seeds
from jaxsim.tuning.replicates import Replicates
from jaxsim.tuning.space import Candidate, Server

COLUMNS = {"load": "load_rps", "clients": "clients"}


@dataclass(frozen=True)
class Result:
    """The answer of a search, as `summary.json` and `candidates.csv` have it.

    `summary` holds the best setting, its capacity and its figures under the keys of `vllm bench serve`, half widths of
    their intervals under `ci95`; `candidates` a row per setting that was tried, in the order in which it came up.
    """

    summary: dict[str, Any]
    candidates: list[dict[str, Any]]
    best: Candidate | None  # None if no setting meets the SLO


def result(
    exploration: Exploration, server: Server, replicates: Replicates, slo: SloSettings, interrupted: bool = False
) -> Result:
    """The result so far. A setting that was not finished has the values that passed until now."""
    tried = [*exploration.tried, *([exploration.baseline] if exploration.baseline else [])]
    rows = {candidate: _row(exploration, candidate) for candidate in tried}
    choice = exploration.choice()
    best = choice.best if choice else None
    summary: dict[str, Any] = {
        "status": "interrupted" if interrupted else "ok" if best else "infeasible",
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "model": server.model.name,
        "hardware": server.hardware.name,
        "slo": vars(slo),
        "strategy": exploration.search.strategy,
        "settings": len(exploration.tried),
        "simulations": exploration.simulations,
        "rounds": exploration.rounds_done,
        "dropped": replicates.dropped,
        "defaults": {key: taken._asdict() for key, taken in server.taken(exploration.space.searched).items()},
    }
    if choice is not None:
        found = exploration.known[choice.best].found
        summary |= _described(exploration, choice.best, rows[choice.best], server, replicates, slo)
        largest = exploration.known[choice.largest].found[exploration.main]
        summary[f"largest_{COLUMNS[exploration.main]}"] = largest.interval.mean
        summary["tied_with"] = None if choice.largest is choice.best else choice.largest.name
        summary |= _chances(exploration, choice.best)
        summary["ci95"] = _half_widths(found, found[exploration.main])
    if exploration.baseline is not None:
        baseline = rows[exploration.baseline]
        summary["baseline"] = baseline
        if best is not None and baseline.get(COLUMNS[exploration.main]):
            gain = exploration.score(best) / exploration.score(exploration.baseline)
            summary["gain_over_baseline"] = gain - 1
    return Result(summary, list(rows.values()), best)


def _row(exploration: Exploration, candidate: Candidate) -> dict[str, Any]:
    row: dict[str, Any] = {**candidate.setting, "status": "infeasible", "reason": candidate.reason}
    known = exploration.known.get(candidate)
    if candidate is exploration.baseline:
        row["baseline"] = True
    if candidate.engine is None:
        return row
    row["num_gpu_blocks"] = candidate.engine.num_gpu_blocks
    if known is None:
        return row | {"status": "unfinished", "reason": "not simulated: interrupted, or the budget was spent"}
    row |= {
        "seeds": len(known.seeds),
        "num_requests": max([known.count, *(found.count for found in known.found.values())]),
    }
    for kind, name in COLUMNS.items():
        found = known.found.get(kind)
        if found is not None and found.known:
            row |= {name: found.interval.mean, f"{name}_ci95": found.interval.half_width}
            row[f"{name}_per_seed"] = " ".join(f"{value:.6g}" for value in found.values)
    best = known.found.get(exploration.main)
    row |= _status(known, best)
    if best is not None and best.outcomes and best.known:
        row["limited_by"] = limited_by(outcome.figures for outcome in best.outcomes)
        row |= {key: interval.mean for key, interval in figures(best).items()}
    return row


def _status(known: Known, best: Found | None) -> dict[str, str]:
    """Columns status, reason and capped: the columns in which the true value may be larger."""
    if best is None or not all(found.finished for found in known.found.values()):
        return {"status": "unfinished", "reason": "broken off; the values are the largest that passed so far"}
    if not best.outcomes:
        status = "undecided" if best.undecided else "infeasible"
        return {"status": status, "reason": f"{best.undecided or best.reason} even at the lowest, {best.lowest:g}"}
    capped = [kind for kind, found in known.found.items() if found.capped]
    reasons = [f"the highest {kind} tried passed" for kind in capped]
    reasons += [
        f"{kind}: {text}" for kind, found in known.found.items() for text in (found.undecided, found.note) if text
    ]
    status = "undecided" if best.undecided else "ok"
    return {"status": status, "reason": "; ".join(reasons), "capped": " ".join(COLUMNS[kind] for kind in capped)}


def figures(found: Found) -> dict[str, Interval]:
    """Figures at the highest load, or number of clients, that passed; over seeds."""
    return over_seeds([outcome.figures for outcome in found.outcomes])


def _described(
    exploration: Exploration,
    best: Candidate,
    row: Mapping[str, Any],
    server: Server,
    replicates: Replicates,
    slo: SloSettings,
) -> dict[str, Any]:
    """The best setting: what it is, what it carries and what it costs."""
    assert best.engine is not None and best.capacity is not None and best.flags is not None
    found = exploration.known[best].found[exploration.main]
    intervals = figures(found)
    load = found.interval if exploration.main == "load" else intervals["request_throughput"]
    summary: dict[str, Any] = dict(best.setting)
    summary |= {key: row.get(key) for key in ("load_rps", "clients", "limited_by", "reason", "capped", "seeds")}
    summary |= {
        "num_gpu_blocks": best.capacity.num_gpu_blocks,
        "kv_cache_tokens": best.capacity.tokens,
        "requests_that_fit": requests_that_fit(best.capacity, np.minimum(replicates.lengths, server.max_model_len)),
    }
    if (line := vllm_serve(server.model, best.flags, best.engine)) is not None:
        summary["vllm_serve"] = line
    if slo.target_rps is not None:
        needed = number_of_instances(slo.target_rps, load, best.instances)
        summary |= dict(zip(("instances_needed", "instances_needed_low", "instances_needed_high"), needed, strict=True))
    summary |= {key: interval.mean for key, interval in intervals.items()}
    summary["stable"] = intervals["stable"].mean == 1
    summary |= {"instances": best.instances, "gpus": best.gpus}
    price = server.hardware.price_per_hour
    if price is not None:
        for name, key in (("output", "output_throughput"), ("total", "total_token_throughput")):
            summary[f"cost_per_million_{name}_tokens"] = cost_per_million(price, summary[key] / best.gpus)
    return summary


def _half_widths(found: Mapping[str, Found], main: Found) -> dict[str, float | None]:
    widths = {name: found[kind].interval.half_width if kind in found else None for kind, name in COLUMNS.items()}
    return widths | {key: interval.half_width for key, interval in figures(main).items()}


def _chances(exploration: Exploration, best: Candidate) -> dict[str, float | None]:
    """How likely the best setting is the best, and within the indifference of it."""
    ranked = exploration.ranking()
    chances: dict[str, float | None] = {"probability_best": None, "probability_within_indifference": None}
    if ranked is not None and best in ranked[0]:
        place = ranked[0].index(best)
        chances["probability_best"] = float(ranked[1].best[place])
        chances["probability_within_indifference"] = float(ranked[1].near[place])
    return chances | {"indifference": exploration.search.indifference}
