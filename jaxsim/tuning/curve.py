"""Latency against load of one setting: how near the cliff is."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxsim.tuning.evaluate import Evaluate, Task
from jaxsim.tuning.figures import over_seeds
from jaxsim.tuning.space import Candidate

SHARES = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25)  # of the largest load


def latency_curve(
    evaluate: Evaluate,
    candidate: Candidate,
    seeds: Sequence[int],
    count: int,
    load_rps: float,
    on_done: Callable[[], None],
) -> list[dict[str, Any]]:
    """A row per load, with the mean of every figure over the seeds and, as NAME_ci95, its half width."""
    loads = [share * load_rps for share in SHARES]
    tasks = [Task(candidate, seed, load_rps=load, count=count) for load in loads for seed in seeds]
    outcomes = evaluate(tasks, lambda *_: on_done())
    rows = []
    for index, load in enumerate(loads):
        mine = outcomes[index * len(seeds) : (index + 1) * len(seeds)]
        row: dict[str, Any] = {"load_rps": load}
        for key, interval in over_seeds([outcome.figures for outcome in mine]).items():
            row |= {key: interval.mean, f"{key}_ci95": interval.half_width}
        rows.append(row)
    return rows
