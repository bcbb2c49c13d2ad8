"""The engine against what vLLM 0.33.0's own scheduler did: integers and times are equal."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_cases import NAMES as ALL_NAMES
from golden_cases import in_picoseconds, load, picoseconds
from random_cases import BATCH, LANES, REQUESTS, TABLE, Kind, Priced, requests_of, shaping_case

from jaxsim.engine import AffineCost, CostTable, EngineConfig, Requests, Simulation, simulate, simulate_many


class Cost:
    """A golden case's prices; where a threshold is set with tables that are all zero, for the sake of one program."""

    def __init__(self, prices: dict[str, float], limited: bool):
        self.affine = AffineCost(**{f"{name}_s": ticks / 1e6 for name, ticks in prices.items()})
        self.linear_ps = np.zeros(TABLE, np.int64) if limited else None

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        return replace(self.affine.table(max_tokens, max_seqs), linear_ps=self.linear_ps)


def kind_of(case: dict[str, Any]) -> Kind:
    limited = case["engine"]["long_prefill_token_threshold"] > 0
    return Kind(limited, limited, case["engine"]["async_scheduling"], case["engine"]["policy"] == "priority")


def modelled(name: str) -> bool:
    engine = load(name)[0]["engine"]
    return not engine["enable_prefix_caching"]


NAMES = [name for name in ALL_NAMES if modelled(name)]
KINDS = {str(kind): kind for kind in (kind_of(load(name)[0]) for name in NAMES)}


def parts(case: dict[str, Any]) -> tuple[Requests, EngineConfig, Cost]:
    """A golden input; ticks are microseconds."""
    arrival, prompt, output = zip(
        *((request["arrival"], request["prompt_len"], request["output_len"]) for request in case["requests"]),
        strict=True,
    )
    priority = np.array([request.get("priority", 0) for request in case["requests"]])
    requests = Requests(np.array(arrival) / 1e6, np.array(prompt), np.array(output), priority)
    return requests, EngineConfig(**case["engine"]), Cost(case["cost"], kind_of(case).tables)


def outcome(simulation: Simulation, size: int) -> dict[str, Any]:
    """The first `size` requests in the golden columns, but for first and later hits, which are 0 without caching."""
    names = "arrival_ps", "first_scheduled_ps", "first_token_ps", "finish_ps", "num_preemptions", "output_tokens"
    columns = [getattr(simulation, name)[:size].tolist() for name in names]
    assert not simulation.hit_tokens.any()
    return {"stuck": simulation.status.name == "STUCK", "requests": [list(row) for row in zip(*columns, strict=True)]}


def expected_outcome(expected: dict[str, Any]) -> dict[str, Any]:
    rows = in_picoseconds(expected["req_cols"], expected["reqs"])
    never = [[-1 if value is None else value for value in row] for row in rows]
    assert not expected["totals"]["truncated"]
    return {"stuck": expected["totals"]["stuck"], "requests": [[*row[1:6], row[8]] for row in never]}


def test_there_are_golden_cases():
    assert len(NAMES) == 37


def with_tail(case: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """The case with one-token requests that come when all is over, up to REQUESTS."""
    late = max([expected["totals"]["end_time"], *(request["arrival"] for request in case["requests"])]) + 1000
    tail = [{"arrival": late, "prompt_len": 1, "output_len": 1}] * (REQUESTS - len(case["requests"]))
    return case | {"requests": case["requests"] + tail}


@pytest.mark.parametrize("name", NAMES)
def test_row_by_row(name):
    case, expected = load(name)
    simulation = simulate(*parts(with_tail(case, expected)), trace=True)
    rows = in_picoseconds(expected["iter_cols"], expected["iters"])
    assert simulation.iterations[: len(rows)] == rows
    assert outcome(simulation, len(case["requests"])) == expected_outcome(expected)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_leaping(kind):
    """All cases of one kind in one batch; the totals that the golden files have agree too."""
    chosen = [(name, case, expected) for name in NAMES for case, expected in [load(name)] if kind_of(case) == kind]
    fill = [shaping_case(kind) for _ in range(BATCH + 1 - len(chosen))]
    columns = [parts(case) for _, case, _ in chosen]
    columns += [(requests_of(case), case.engine, Priced(case.cost)) for case in fill]
    requests, engines, costs = zip(*columns, strict=True)
    simulations = simulate_many(requests, engines, costs, lanes=LANES)
    for (name, _, expected), simulation in zip(chosen, simulations, strict=False):
        assert outcome(simulation, len(expected["reqs"])) == expected_outcome(expected), name
        golden, totals = expected["totals"], simulation.totals
        assert totals.iterations == golden["n_iters"] - golden["n_zero_iters"], name
        assert totals.duration_s == (picoseconds(golden["end_time"]) - simulation.arrival_ps.min()) / 1e12, name
        assert totals.prefill_tokens == golden["sched_prefill_tokens"], name
        assert totals.decode_tokens == golden["sched_decode_tokens"], name
        assert totals.output_tokens == golden["output_tokens"], name
        assert totals.num_preemptions == golden["preemptions"], name
        assert totals.running_max == golden["max_running"], name
        usable = golden["usable_blocks"]
        assert totals.kv_usage_peak == (usable - golden["min_free_blocks"]) / usable, name
        assert totals.waiting_max == max(row[4] for row in expected["iters"]), name
        first_tokens = sum(row[3] is not None for row in expected["reqs"])
        assert totals.itl_histogram.sum() == golden["output_tokens"] - first_tokens, name
        assert totals.scan_steps <= 4 * len(expected["iters"]), name
