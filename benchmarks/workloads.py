"""What the suite simulates: lists of requests, settings and the cost of an iteration."""

import math
from typing import NamedTuple

import numpy as np

from jaxsim.engine import CostTable, EngineConfig, Requests

US = 10**6  # ps
BLOCK_SIZE = 16


class YardstickCost:
    """6 ms, 60 us per prompt token, 20 us per decode and 40 ns per token of its context before the step.

    The engine and the native program bill the context after the step: one token more per decode.
    """

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        context = US // 25
        return CostTable(6000 * US, prefill_token_ps=60 * US, decode_seq_ps=20 * US - context, decode_ctx_ps=context)


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
    random = np.random.default_rng(0)
    prompt = np.clip(np.exp(random.normal(9.9, 0.8, count)), 2000, 100_000).astype(int)
    output = np.clip(np.exp(random.normal(5.0, 0.8, count)), 1, 1500).astype(int)
    return Requests(np.cumsum(random.exponential(1.0, count)), prompt, output)


def system_prompts(count: int, shared: int = 800) -> Requests:
    """Prompts of 1,000 tokens, the first `shared` of them one of eight system prompts; gaps of 1 s on average."""
    random = np.random.default_rng(0)
    output = np.clip(np.exp(random.normal(5.0, 0.8, count)), 1, 1500).astype(int)
    group = random.integers(0, 8, count)
    segments = [[(f"s{group[i]}", 0, shared), (f"u{i}", 0, 1000 - shared)] for i in range(count)]
    return Requests(np.cumsum(random.exponential(1.0, count)), np.full(count, 1000), output, segments=segments)


def fixed_lengths(count: int, seed: int, prompt: int = 512, output: int = 128) -> Requests:
    """Requests of one size; gaps of 1 s on average."""
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    return Requests(np.cumsum(gaps), np.full(count, prompt), np.full(count, output))


class Case(NamedTuple):
    """Settings that are run on one list of requests."""

    name: str
    requests: Requests
    rate_rps: float  # requests per second: the list's gaps are 1 s on average
    engines: list[EngineConfig]
    lanes: int


def settings(
    count: int, fewest: int, most: int, blocks: int, max_model_len: int = 8192, **options
) -> list[EngineConfig]:
    """max_num_seqs in geometric steps from `fewest` to `most`; `blocks` are usable ones."""
    steps = [i / max(1, count - 1) for i in range(count)]
    return [
        EngineConfig(
            max_num_seqs=int(fewest * (most / fewest) ** step + 1e-9),
            max_num_batched_tokens=2048,
            num_gpu_blocks=blocks + 1,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            scheduler_reserve_full_isl=False,
            **options,
        )
        for step in steps
    ]
