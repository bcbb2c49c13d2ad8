"""The largest load of 30 settings whose p99 TTFT stays within 200 ms: the work that other simulators were timed on.

max_num_batched_tokens 512 to 8192 and max_num_seqs 16 to 512, prompts of 512 and outputs of 128 tokens, Poisson
arrivals, no prefix caching. Halving 0 to 40 requests/s eight times takes 240 simulations and ends on one of 256 rungs.

AISimulate runs with its built-in polynomial model of the iteration time, which is not a sum of `CostTable`'s terms: it
bills 16.5 ms once per iteration that has prompts, and squares. With `GridCost` the capacities are the same on the
average, and lie between 0.7 and 1.2 of AISimulate's, so that both simulate the same requests at about the same loads.
"""

import itertools
import json
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.workloads import BLOCK_SIZE, US, fixed_lengths
from jaxsim.engine import CostTable, EngineConfig, Simulation, simulate_many

TOKENS = (512, 1024, 2048, 4096, 8192)
SEATS = (16, 32, 64, 128, 256, 512)
BLOCKS = 20_000
HIGHEST_RPS = 40.0
TTFT_S = 0.2  # p99
ROUNDS = 8
LANES = 256
PEER = Path(__file__).with_name("aisimulate_grid.py")


class GridCost:
    """5.74 ms an iteration, 7 ms a prompt's chunk and 20 us a token of it, 169 ns a token of the context of decodes."""

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        return CostTable(
            step_ps=5740 * US,
            prefill_seq_ps=7000 * US,
            prefill_token_ps=20 * US,
            decode_ctx_ps=169 * US // 1000,
        )


class Found(NamedTuple):
    """The outcome of the search and what it took."""

    capacities_rps: np.ndarray  # [30, seeds]
    simulations: int
    seconds: float  # CPU time


def settings(**options: Any) -> list[EngineConfig]:
    return [
        EngineConfig(seats, tokens, BLOCKS + 1, 4096, **options) for tokens, seats in itertools.product(TOKENS, SEATS)
    ]


def search(requests: int, seeds: int, rounds: int = ROUNDS, **options: Any) -> Found:
    """Halves the range of every setting and seed in each round; options are those of the engine."""
    engines = settings(**options)
    lists = [fixed_lengths(requests, seed) for seed in range(seeds)]
    searches = list(itertools.product(engines, lists))
    low, width = np.zeros(len(searches)), HIGHEST_RPS
    start = time.process_time()
    for _ in range(rounds):
        width /= 2
        runs = simulate_many(
            [one for _, one in searches],
            [engine for engine, _ in searches],
            GridCost(),
            stretch=(1 / (low + width)).tolist(),
            statistics=False,
            lanes=min(LANES, len(searches)),
        )
        low += width * np.array([p99_ttft_s(run) <= TTFT_S for run in runs])
    seconds = time.process_time() - start
    return Found(low.reshape(len(engines), seeds), rounds * len(searches), seconds)


def p99_ttft_s(run: Simulation) -> float:
    return float(np.percentile(run.first_token_s - run.arrival_s, 99))


def aisimulate(interpreter: str, requests: int) -> Found:
    """The same search by AISimulate, installed for another Python: one simulation after the other, eight halvings."""
    words = [interpreter, str(PEER), json.dumps({
        "tokens": TOKENS, "seats": SEATS, "blocks": BLOCKS, "block_size": BLOCK_SIZE, "highest_rps": HIGHEST_RPS,
        "ttft_ms": 1000 * TTFT_S, "requests": requests, "rounds": ROUNDS,
    })]  # fmt: skip
    done = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return Found(np.array(done["capacities_rps"])[:, None], done["simulations"], done["seconds"])
