"""The golden cases: inputs of vLLM 0.33.0's own V1 scheduler, and what it did with them in virtual time.

`golden/NAME.json` is an input, `golden/NAME.out.json` the outcome, one row per schedule() call and one per request;
`iter_cols` and `req_cols` in each outcome name the columns. Times are ticks of one microsecond.
"""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"
NAMES = sorted(path.name.removesuffix(".out.json") for path in FOLDER.glob("*.out.json"))
TICK_PS = 1_000_000
ENGINE_DEFAULTS = {
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "enable_prefix_caching": False,
    "policy": "fcfs",
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
    "max_num_active_seqs": None,
    "async_scheduling": False,
    "lone_request_without_threshold": True,
    "freed_unhashed_blocks": "front",
    "self_preemption": "continues",
}


def load(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Input (its engine completed with the format's defaults) and outcome of the golden case `name`, times in ticks."""
    case = json.loads((FOLDER / f"{name}.json").read_text())
    case["engine"] = ENGINE_DEFAULTS | case["engine"]
    return case, json.loads((FOLDER / f"{name}.out.json").read_text())


def picoseconds(ticks: float | None) -> int | None:
    """Ticks (None: never) as an exact number of picoseconds. AssertionError if there is none."""
    if ticks is None:
        return None
    exact = Fraction(ticks) * TICK_PS
    assert exact.denominator == 1, f"{ticks} ticks is not a whole number of picoseconds"
    return exact.numerator


def in_picoseconds(columns: list[str], rows: list[list[Any]]) -> list[list[Any]]:
    """Golden rows with every column that is a time in picoseconds."""
    times = {"start", "dur", "sched_time", "arrival", "first_sched", "first_token", "finish"}
    return [
        [picoseconds(value) if column in times else value for column, value in zip(columns, row, strict=True)]
        for row in rows
    ]
