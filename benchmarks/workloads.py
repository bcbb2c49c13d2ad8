"""What the suite simulates: lists of requests, settings and the cost of an iteration."""

import math
import random
from typing import Any, NamedTuple

import numpy as np

from jaxsim.engine import Cost, CostTable, EngineConfig, Requests

US = 10**6  # ps
BLOCK_SIZE = 16


class YardstickCost:
    """6 ms, 60 us per prompt token, 20 us per decode and 40 ns per token of its context before the step.

    The engine and the native program bill the context after the step: one token more per decode.
    """

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        context = US // 25
        return CostTable(6000 * US, prefill_token_ps=60 * US, decode_seq_ps=20 * US - context, decode_ctx_ps=context)


class TabledCost:
    """The same times with tables for the step and the decodes: the form that the main job's roofline has."""

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        plain = YardstickCost().table(max_tokens, max_seqs)
        rows = np.arange(max_seqs + 1)
        return CostTable(
            prefill_token_ps=plain.prefill_token_ps,
            linear_ps=np.full(max_tokens + 1, plain.step_ps),
            decode_base_ps=rows * plain.decode_seq_ps,
            decode_ctx_table_ps=np.full(max_seqs + 1, plain.decode_ctx_ps),
        )


def default_mix(count: int) -> Requests:
    """Lognormal lengths and exponential gaps of 1 s on average, from a xorshift generator that C programs share.

    Prompts have mu 5.5, sigma 1.0 and 1 to 3,000 tokens, outputs mu 5.0, sigma 0.8 and 1 to 1,500.
    """
    state = 88172645463325252

    def uniform() -> float:
        nonlocal state
        state ^= state << 13 & (1 << 64) - 1
        state ^= state >> 7
        state ^= state << 17 & (1 << 64) - 1
        return ((state >> 11) + 0.5) / 2**53

    def normal() -> float:
        radius = math.sqrt(-2 * math.log(uniform()))
        return radius * math.cos(6.283185307179586 * uniform())

    prompts, outputs, arrivals, time = [], [], [], 0.0
    for _ in range(count):
        prompts.append(int(min(max(math.exp(5.5 + normal()), 1), 3000)))
        outputs.append(int(min(max(math.exp(5 + 0.8 * normal()), 1), 1500)))
        time -= math.log(uniform())
        arrivals.append(time)
    return Requests(np.array(arrivals), np.array(prompts), np.array(outputs))


def long_prompts(count: int) -> Requests:
    """Prompts of 2,000 to 100,000 tokens around 20,000, outputs around 150; gaps of 1 s on average."""
    draw = np.random.default_rng(0)
    prompt = np.clip(np.exp(draw.normal(9.9, 0.8, count)), 2000, 100_000).astype(int)
    output = np.clip(np.exp(draw.normal(5.0, 0.8, count)), 1, 1500).astype(int)
    return Requests(np.cumsum(draw.exponential(1.0, count)), prompt, output)


def system_prompts(count: int, shared: int = 800) -> Requests:
    """Prompts of 1,000 tokens, the first `shared` of them one of eight system prompts; gaps of 1 s on average."""
    draw = np.random.default_rng(0)
    output = np.clip(np.exp(draw.normal(5.0, 0.8, count)), 1, 1500).astype(int)
    group = draw.integers(0, 8, count)
    segments = [[(f"s{group[i]}", 0, shared), (f"u{i}", 0, 1000 - shared)] for i in range(count)]
    return Requests(np.cumsum(draw.exponential(1.0, count)), np.full(count, 1000), output, segments=segments)


def fixed_lengths(count: int, seed: int, prompt: int = 512, output: int = 128) -> Requests:
    """Requests of one size; gaps of 1 s on average, with seed 0 those that AISimulate draws by default."""
    source = random.Random(42 + seed)
    gaps = [0.0] + [source.expovariate(1.0) for _ in range(count - 1)]
    return Requests(np.cumsum(gaps), np.full(count, prompt), np.full(count, output))


class Case(NamedTuple):
    """Settings that are run on one list of requests."""

    name: str
    requests: Requests
    rate_rps: float  # requests per second: the gaps of the list are 1 s on average
    engines: list[EngineConfig]
    lanes: int
    cost: Cost = YardstickCost()

    @property
    def native(self) -> bool:
        """Whether the native program knows all the rules; else it runs the same requests without some."""
        return not (self.engines[0].async_scheduling or self.engines[0].enable_prefix_caching)


def settings(seats: int, fewest: int = 1, most: int = 512, blocks: int = 20_000, **options: Any) -> list[EngineConfig]:
    """`seats` settings with max_num_seqs in geometric steps from `fewest` to `most`; `blocks` are usable ones."""
    fixed = {"max_num_batched_tokens": 2048, "max_model_len": 8192, "scheduler_reserve_full_isl": False} | options
    steps = [i / max(1, seats - 1) for i in range(seats)]
    chosen = [int(fewest * (most / fewest) ** step + 1e-9) for step in steps]
    return [EngineConfig(max_num_seqs=one, num_gpu_blocks=blocks + 1, block_size=BLOCK_SIZE, **fixed) for one in chosen]


VLLM = {"async_scheduling": True, "enable_prefix_caching": True}  # vLLM's defaults


def cases(quick: bool) -> list[Case]:
    """The suite's cases; `quick` leaves out what takes long to run or to compile and takes fewer settings."""
    count, lanes = (128, 128) if quick else (512, 256)
    mix, prompts = default_mix(1000), system_prompts(1000)
    many = settings(count)
    pool: dict[str, Any] = {"fewest": 8, "most": 48, "blocks": 4000}
    uncached = VLLM | {"enable_prefix_caching": False}
    found = [
        Case("light load, 2 req/s", mix, 2, many, lanes),
        Case("default mix, 12 req/s", mix, 12, many, lanes),
        Case("overload, 100 req/s", mix, 100, many, lanes),
        Case("heavy preemption, 400 blocks", mix, 12, settings(count, fewest=8, blocks=400), lanes),
        Case("long prompts, 20,000 tokens", long_prompts(1000), 0.5, settings(count, max_model_len=131_072), lanes),
        Case("default mix, vLLM's defaults", mix, 12, settings(count, **VLLM), lanes, TabledCost()),
        Case("system prompts, no caching", prompts, 12, settings(lanes, **pool, **uncached), lanes, TabledCost()),
    ]
    if not quick:
        found += [
            Case("system prompts, caching", prompts, 12, settings(lanes, **pool, **VLLM), lanes, TabledCost()),
            Case("10,000 requests", default_mix(10_000), 12, settings(256), 256),
            Case("100,000 requests", default_mix(100_000), 12, settings(64), 64),
        ]
    return found
