"""How close each search strategy comes to the exhaustive answer, and what it costs: python benchmarks/strategies.py

The truth is the mean load of 12 x 8 settings over 10 seeds (Llama 3.1 8B on an H100, synthetic requests, p99 TTFT of
300 ms and TPOT of 25 ms), simulated once and kept in TRUTH.json; then every strategy starts 20 times and is told the
score that a setting has over the first two seeds. Regret is the share by which the true mean of the setting that it
ranks highest is below the best; simulations are those of the settings that it asked for.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from jaxsim.composition import defaults
from jaxsim.settings import EngineSettings, SearchSettings, SloSettings, read
from jaxsim.tuning.capacity import CapacitySearch
from jaxsim.tuning.evaluate import Simulator
from jaxsim.tuning.replicates import replicates
from jaxsim.tuning.space import Server, Space
from jaxsim.tuning.strategies import NAMES, Problem, strategy
from jaxsim.workload import workload_from_config

SEATS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TOKENS = (256, 384, 512, 768, 1024, 2048, 4096, 8192)
FIRST = 2  # seeds that a strategy sees


def truth(path: Path, seeds: int, requests: int) -> tuple[np.ndarray, np.ndarray]:
    """Loads [12, 8, S] and simulations spent on each seed [12, 8, S]."""
    if path.is_file():
        kept = json.loads(path.read_text())
        return np.array(kept["loads"]), np.array(kept["simulations"])
    search = SearchSettings(
        max_num_seqs=SEATS, max_num_batched_tokens=TOKENS, seeds=seeds, num_requests=requests, concurrency=False
    )
    composed = defaults(["workload=synthetic"])
    space = Space.of(Server.of(composed, read(EngineSettings, "engine", composed["engine"])), search)
    sampled = replicates(workload_from_config(composed["workload"]), search, space.server.max_model_len, "error")
    spent: dict[tuple, int] = {}
    slo = SloSettings(ttft_ms=300.0, tpot_ms=25.0)
    simulator = Simulator(sampled, slo, search, 64)

    def counted(tasks, on_done=None):
        for task in tasks:
            key = (task.candidate.max_num_seqs, task.candidate.max_num_batched_tokens, task.seed)
            spent[key] = spent.get(key, 0) + 1
        return simulator(tasks, on_done)

    capacity = CapacitySearch(space.grid(), range(seeds), sampled.count, search, slo, counted)
    while not capacity.done:
        capacity.round()
        print(f"truth: round {capacity.rounds}, {capacity.simulations} simulations", flush=True)
    shape = (len(SEATS), len(TOKENS), seeds)
    found = [capacity.found("load", index) for index in range(len(SEATS) * len(TOKENS))]
    loads = np.array([one.values for one in found if one]).reshape(shape)
    simulations = np.array([spent[a, b, s] for a in SEATS for b in TOKENS for s in range(seeds)]).reshape(shape)
    path.write_text(json.dumps({"loads": loads.tolist(), "simulations": simulations.tolist()}))
    return loads, simulations


def start(name: str, seed: int, settings: int, loads: np.ndarray, simulations: np.ndarray) -> tuple[float, int, int]:
    """Regret, settings and simulations of one start."""
    shape = loads.shape[:2]
    problem = Problem(shape, settings, seed)
    tried = strategy(name, problem)
    score = loads[..., :FIRST].mean(axis=2)
    seen: dict[tuple[int, ...], float] = {}
    idle = 0
    while idle < 5 and len(seen) < settings:
        units = tried.ask()
        if not len(units):
            break
        cells = [tuple(row) for row in np.minimum(np.floor(units * shape), np.array(shape) - 1).astype(int).tolist()]
        fresh = list(dict.fromkeys(cell for cell in cells if cell not in seen))[: settings - len(seen)]
        idle = 0 if fresh else idle + 1
        seen |= {cell: float(score[cell]) for cell in fresh}
        if all(cell in seen for cell in cells):
            tried.tell(units, np.array([seen[cell] for cell in cells]))
    best = max(seen, key=lambda cell: seen[cell])
    mean = loads.mean(axis=2)
    spent = sum(int(simulations[cell][:FIRST].sum()) for cell in seen)
    return float(1 - mean[best] / mean.max()), len(seen), spent


def main() -> None:
    parser = argparse.ArgumentParser(description="Search strategies against the exhaustive answer.")
    parser.add_argument("--truth", type=Path, default=Path("TRUTH.json"))
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--settings", type=int, default=32, help="that a strategy may try, of 96")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=1000)
    given = parser.parse_args()
    loads, simulations = truth(given.truth, given.seeds, given.requests)
    whole = int(simulations[..., :FIRST].sum())
    mean = loads.mean(axis=2)
    seats, tokens = np.unravel_index(int(mean.argmax()), mean.shape)
    print(
        f"best {SEATS[seats]}/{TOKENS[tokens]} with {mean.max():.4g} req/s; {(mean >= 0.98 * mean.max()).sum()} of 96 "
    )
    print(f"settings within 2 %; the exhaustive search takes {whole} simulations for {FIRST} seeds\n")
    print("| strategy | settings | simulations, of the exhaustive | regret mean | median | worst | within 2 % |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in NAMES:
        most = 96 if name == "grid" else given.settings
        runs = [start(name, seed, most, loads, simulations) for seed in range(given.starts)]
        regret, tried, spent = (np.array(column) for column in zip(*runs, strict=True))
        share = spent.mean() / whole
        print(
            f"| {name} | {tried.mean():.0f} | {share:.0%} | {regret.mean():.1%} | {np.median(regret):.1%} "
            f"| {regret.max():.1%} | {(regret <= 0.02).mean():.0%} |"
        )


if __name__ == "__main__":
    main()
