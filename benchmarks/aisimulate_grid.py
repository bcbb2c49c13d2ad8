"""Runs `grid.py`'s search with AISimulate (PyPI `aisimulate`), for which it needs an environment of its own.

    pip install --pre --only-binary aisimulate aisimulate && python aisimulate_grid.py OPTIONS

`grid.py` calls it with OPTIONS in JSON; prints JSON: largest loads, number of simulations, CPU seconds.
"""

import itertools
import json
import logging
import sys
import time

from aisimulate import BackendDeploymentSpec, EngineReplayRunnerFactory, ReplaySpec  # pyright: ignore[reportMissingImports]


def main() -> None:
    logging.disable()
    options = json.loads(sys.argv[1])
    runner = EngineReplayRunnerFactory().create(0)

    def p99_ttft_ms(tokens: int, seats: int, load_rps: float) -> float:
        engine = {
            "engine_type": "vllm",
            "num_gpu_blocks": options["blocks"],
            "block_size": options["block_size"],
            "max_num_seqs": seats,
            "max_num_batched_tokens": tokens,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
            "timing_model": {"type": "polynomial"},
        }
        deployment = BackendDeploymentSpec("agg", "vllm", "0.11.0", agg_engine_args=engine, num_workers=1)
        workload = {"isl": 512, "osl": 128, "request_rate": load_rps, "request_count": options["requests"]}
        return runner.run(ReplaySpec(deployment, workload, goal={})).metrics["p99_ttft_ms"]

    p99_ttft_ms(options["tokens"][0], options["seats"][0], 1.0)
    start, found, simulations = time.process_time(), [], 0
    for tokens, seats in itertools.product(options["tokens"], options["seats"]):
        low, width = 0.0, options["highest_rps"]
        for _ in range(options["rounds"]):
            width /= 2
            low += width * (p99_ttft_ms(tokens, seats, low + width) <= options["ttft_ms"])
            simulations += 1
        found.append(low)
    seconds = time.process_time() - start
    print(json.dumps({"capacities_rps": found, "simulations": simulations, "seconds": seconds}))


if __name__ == "__main__":
    main()
