"""The benchmark suite: ratios and counts, in tables.

    python -m benchmarks [--quick] [--json FILE] [--only WORD] [--repeats 3] [--aisimulate PYTHON]

It pins itself to one core: times are CPU times of that core, the engine's and the native program's in turn. `--quick`
takes about a minute. `--aisimulate` names a Python that has AISimulate installed, which then does the grid as well.
docs/speed.md says how to read the tables.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import grid, yardstick
from benchmarks.program import watching
from benchmarks.start import MAIN, PROGRAMS, start
from benchmarks.timing import measure
from benchmarks.workloads import cases

# Columns: key, title, format.
CASES = (
    ("case", "case", "{}"),
    ("settings", "settings", "{}"),
    ("iterations_per_request", "iterations per request", "{:.1f}"),
    ("steps_per_request", "steps per request", "{:.2f}"),
    ("most_steps_per_request", "most of a setting", "{:.2f}"),
    ("statistics_steps_per_request", "steps with statistics", "{:.2f}"),
    ("lanes_busy", "lanes busy", "{:.0%}"),
    ("lane_step_ns", "ns per lane-step", "{:.0f}"),
    ("request_ns", "ns per request", "{:.0f}"),
    ("statistics_request_ns", "ns with statistics", "{:.0f}"),
    ("native_request_ns", "ns native", "{:.0f}"),
    ("ratio", "x native", "{:.2f}"),
    ("statistics_ratio", "x with statistics", "{:.2f}"),
    ("agrees", "agrees", "{}"),
)
STARTS = (
    ("program", "program", "{}"),
    ("cold_s", "CPU s to the first result", "{:.1f}"),
    ("cached_s", "with a filled cache", "{:.1f}"),
    ("dispatched", "operations started per step", "{}"),
    ("copies", "copies", "{}"),
    ("operations", "operations with those fused", "{}"),
    ("lane_bytes", "bytes per lane", "{:,}"),
    ("temporary_bytes", "temporary", "{:,.0f}"),
    ("lane_bytes_10k", "bytes per lane, 10,000 requests", "{:,}"),
)
GRID = (
    ("grid", "grid", "{}"),
    ("simulations", "simulations", "{:,}"),
    ("requests", "requests simulated", "{:,}"),
    ("seconds", "CPU seconds", "{:.2f}"),
    ("ratio", "AISimulate takes", "{:.0f} x"),
)


class Table:
    """A Markdown table that is printed row by row, and its rows."""

    def __init__(self, columns: Sequence[tuple[str, str, str]]):
        self.columns, self.rows = columns, []
        print(f"\n| {' | '.join(title for _, title, _ in columns)} |\n{'| --- ' * len(columns)}|", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        values = [(row.get(key), form) for key, _, form in self.columns]
        words = ["" if value is None else form.format(_word(value)) for value, form in values]
        print(f"| {' | '.join(words)} |", flush=True)


def _word(value: Any) -> Any:
    return ("no", "yes")[value] if isinstance(value, bool) else value


def machine() -> dict[str, Any]:
    """Where and with what this runs."""
    model = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), model)
    names = ("jaxsim", "jax", "jaxlib", "numpy")
    versions = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "versions": versions,
    }


def grids(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The grid, and by AISimulate in the same run if it is there."""
    table = Table(GRID)
    peer = None
    if options.aisimulate:
        peer = min((grid.aisimulate(options.aisimulate, 1000) for _ in range(2)), key=lambda one: one.seconds)
    for requests, seeds in [(1000, 1)] if options.quick else [(1000, 1), (10_000, 8)]:
        grid.search(requests, seeds, rounds=1)  # compiles
        tries = [grid.search(requests, seeds) for _ in range(options.repeats if seeds == 1 else 1)]
        found = min(tries, key=lambda one: one.seconds)
        row = {"grid": f"{requests:,} requests x {seeds}", "simulations": found.simulations, "seconds": found.seconds}
        ratio = peer.seconds / found.seconds if peer and seeds == 1 else None
        table.add(
            row | {"requests": found.simulations * requests, "ratio": ratio, "loads": found.capacities_rps.tolist()}
        )
    if peer:
        row = {"grid": "AISimulate, 1,000 requests x 1", "simulations": peer.simulations, "seconds": peer.seconds}
        table.add(row | {"requests": peer.simulations * 1000, "loads": peer.capacities_rps.tolist()})
    return table.rows


def main() -> None:
    parser = argparse.ArgumentParser(description="The benchmark suite: ratios and counts.")
    parser.add_argument("--quick", action="store_true", help="fewer cases, settings and repeats")
    parser.add_argument("--json", type=Path, help="file to write everything to")
    parser.add_argument("--only", default="", help='cases whose name holds this; "programs" and "grid" are such names')
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--aisimulate", help="a Python interpreter that has AISimulate")
    options = parser.parse_args()
    options.repeats = options.repeats or (2 if options.quick else 3)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    jax.config.update("jax_num_cpu_devices", 1)
    report: dict[str, Any] = {"machine": machine(), "quick": options.quick, "repeats": options.repeats}
    print(json.dumps(report["machine"]))
    with tempfile.TemporaryDirectory() as name:
        program = yardstick.build(Path(name))
        if program is None:
            print("no C compiler: times of this engine alone")
        chosen = [case for case in cases(options.quick) if options.only in case.name]
        if chosen:
            table = Table(CASES)
            with watching() as watch:
                for case in chosen:
                    table.add(measure(case, watch, program, Path(name), options.repeats))
            report["cases"] = table.rows
    if options.only in "grid":
        report["grid"] = grids(options)
    if options.only in "programs":
        table = Table(STARTS)
        for one in [MAIN] if options.quick else PROGRAMS:
            table.add(start(one))
        report["programs"] = table.rows
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if wrong := [row["case"] for row in report.get("cases", []) if row["agrees"] is False]:
        raise SystemExit(f"the engine and the native program disagree: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
