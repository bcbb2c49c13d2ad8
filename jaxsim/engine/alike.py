"""Settings that differ only in seats and blocks of which there are always enough: one simulation answers for all.

A decision depends on them in two ways only: whether a seat is free, and whether so many blocks are. While all were
yes with a few blocks to spare, they would have been with any larger number.
"""

import math
from collections.abc import Sequence

import numpy as np

from jaxsim.engine.prepare import Settings
from jaxsim.engine.types import EngineConfig, Requests, Simulation, Status

THEIR_OWN = ("max_num_seqs", "max_num_active_seqs", "num_gpu_blocks")


def families(settings: Settings, caches: bool) -> dict[int, list[int]]:
    """Settings that differ in nothing else, under the one of them with the most seats and of these the most blocks.

    Static batches fill all seats, and the policy "priority" asks for blocks in other ways: such settings are alone.
    What a prefix cache holds depends on the blocks even where there are enough: with one they have to be equal.
    """
    own = THEIR_OWN[:-1] if caches else THEIR_OWN
    rest: dict[int, tuple] = {}  # by identity of an engine
    found: dict[tuple, list[int]] = {}
    for i, (requests, engine, cost, *loop) in enumerate(zip(*settings, strict=True)):
        if id(engine) not in rest:
            rest[id(engine)] = tuple(value for name, value in vars(engine).items() if name not in own)
        alone = i if engine.batching == "static" or engine.by_priority else None
        found.setdefault((id(requests), rest[id(engine)], id(cost), *loop, alone), []).append(i)

    def first(i: int) -> tuple[int, int]:
        return -seats(settings.engine[i]), -settings.engine[i].num_gpu_blocks

    return {i: others for i, *others in (sorted(family, key=first) for family in found.values())}


def served(settings: Settings, i: int, others: Sequence[int], simulation: Simulation) -> list[int]:
    """Those of the `others`, of the family of the i-th, whose simulations are the i-th's, `simulation`, too."""
    engine, found = settings.engine[i], []
    fewest_seats, fewest_blocks = enough(simulation, settings.requests[i], engine) if others else (math.inf, math.inf)
    for other in others:
        blocks = settings.engine[other].num_gpu_blocks
        same = blocks == engine.num_gpu_blocks or min(blocks, engine.num_gpu_blocks) >= fewest_blocks
        if same and seats(settings.engine[other]) >= fewest_seats:
            found.append(other)
    return found


def enough(simulation: Simulation, requests: Requests, engine: EngineConfig) -> tuple[float, float]:
    """Seats and blocks with which a simulation of `engine` would have been the same; rather too many than too few.

    With so many blocks even the scan steps are the same: no leap comes near the end of the pool, or nine tenths of it.
    Nothing is enough for one that did not end, filled its own seats or has no statistics.
    """
    totals = simulation.totals
    if simulation.status != Status.DONE or not totals.running_max < seats(engine):
        return math.inf, math.inf
    size, share = engine.block_size, 0.9 - engine.watermark
    output = int(np.max(requests.output_len))
    longest = int(np.max(requests.prompt_len)) + output
    # A leap ends early if the blocks that its decodes may all take until the first of them ends might not fit.
    blocks = (totals.running_max + 1) * (-(-output // size) + 2) - (-longest // size) + 2
    blocks += totals.kv_usage_peak * (engine.num_gpu_blocks - 1)
    return totals.running_max + 1, blocks / share + 2 if share > 0 else math.inf


def seats(engine: EngineConfig) -> int:
    return engine.max_num_active_seqs or engine.max_num_seqs
