"""What goes into a simulation and what comes out, as NumPy arrays and plain numbers.

In the shapes, `N` is the number of requests. Times with the suffix `_ps` are int64 picoseconds since the start of the
simulation, those with `_s` float64 seconds.
"""

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxsim.errors import ConfigError

PS_PER_S = 10**12
NEVER = -1
LATEST_S = 2.0e6  # times that are given must be earlier: far below the int64 limit of 9.2e6 s
MOST_TOKENS = 1 << 31  # of a pool, and of all outputs of a simulation, must stay below: they are counted in int32
LARGEST = 1 << 22  # tokens of one request, blocks of a pool and seats must stay below: quotients are exact in float32


class Status(enum.IntEnum):
    """How a simulation ended."""

    RUNNING = 0
    DONE = 1
    STUCK = 2  # requests remain that can never be scheduled, or that preempt and recompute themselves for ever
    OVERTIME = 3  # the simulated time has left the range of the clock
    OVERFLOW = 4  # the prefix cache ran out of rows; `simulate` and `simulate_many` then try again with more


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number of Python's or NumPy's, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Requests(NamedTuple):
    """Requests in the order in which clients send them; ties of `arrival_s` keep this order."""

    arrival_s: Any  # [N] float64, seconds; ignored in a closed loop
    prompt_len: Any  # [N] int, tokens, >= 1
    output_len: Any  # [N] int, tokens asked for (vLLM's max_tokens with ignore_eos), >= 1
    priority: Any = None  # [N] int, lower is served first under policy "priority"
    segments: Any = None  # per request a list of (stream, start, length): identities of the prompt's tokens
    output_stream: Any = None  # [N] names of the streams of output tokens
    label: Any = None  # [N] names of the requests' classes; handed on to the Simulation


@dataclass(frozen=True)
class EngineConfig:
    """One setting of the server, in vLLM's names. Raises `ConfigError` for a value that vLLM would refuse.

    `num_gpu_blocks` is the total that vLLM prints, with the null block: one less is usable. A pool in which a request
    of `max_model_len` does not fit is accepted here (vLLM refuses to start): such a simulation runs and may end STUCK.
    The defaults are the plain scheduler; vLLM's own, prefix caching and async scheduling, are those of `conf/engine`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_gpu_blocks: int
    max_model_len: int
    block_size: int = 16
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    enable_prefix_caching: bool = False
    policy: str = "fcfs"
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    max_num_active_seqs: int | None = None
    async_scheduling: bool = False
    preemption_mode: str = "recompute"  # "swap" as vLLM's V0 had it
    num_cpu_blocks: int = 0  # for swapped requests
    max_queued_requests: int | None = None  # a request that finds so many waiting is rejected
    max_new_tokens: int | None = None  # cap on every request's output
    batching: str = "continuous"
    static_padding: bool = False  # static batching bills every row of a batch until the batch ends
    static_wait_s: float = 0.0  # static batching waits at most this long, from the head's arrival, for a full batch
    # Where vLLM 0.11 and 0.20 differ from 0.33: there these are False, "tail" and "ends".
    lone_request_without_threshold: bool = True  # a request alone in the engine is not cut to the prefill threshold
    freed_unhashed_blocks: str = "front"  # where in the free queue blocks that hold no full prefix go
    self_preemption: str = "continues"  # policy priority: what pass 1 does when a request has preempted itself

    @property
    def overlaps(self) -> bool:
        """Whether iterations are scheduled while the one before runs: a batch of static batching never is."""
        return self.async_scheduling and self.batching == "continuous"

    @property
    def by_priority(self) -> bool:
        return self.policy == "priority"

    @property
    def misses_turns(self) -> bool:
        """Whether running requests behind one that preempted itself wait for the next iteration."""
        return self.by_priority and self.self_preemption == "ends"

    @property
    def caches(self) -> bool:
        """Whether blocks outlive their requests: static batching has no prefix cache."""
        return self.enable_prefix_caching and self.batching == "continuous"

    def __post_init__(self) -> None:
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError("engine.policy", self.policy, "must be fcfs or priority")
        positive = ["max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks", "max_model_len", "block_size"]
        for key in positive + (["max_num_active_seqs"] if self.max_num_active_seqs is not None else []):
            value = getattr(self, key)
            if not is_integer(value) or not 1 <= value < LARGEST:
                raise ConfigError(f"engine.{key}", value, f"must be an integer from 1 to {LARGEST - 1}")
        if self.num_gpu_blocks < 2:
            raise ConfigError("engine.num_gpu_blocks", self.num_gpu_blocks, "must be at least 2: one is the null block")
        if self.num_gpu_blocks * self.block_size >= MOST_TOKENS:
            allowed = f"must be below {-(-MOST_TOKENS // self.block_size)} at block_size={self.block_size}"
            raise ConfigError("engine.num_gpu_blocks", self.num_gpu_blocks, allowed)
        threshold = self.long_prefill_token_threshold
        if not is_integer(threshold) or not 0 <= threshold < LARGEST:
            allowed = "must be 0 (off) or a number of tokens"
            raise ConfigError("engine.long_prefill_token_threshold", self.long_prefill_token_threshold, allowed)
        if not 0.0 <= self.watermark <= 1.0:
            raise ConfigError("engine.watermark", self.watermark, "must be a share of the blocks, from 0 to 1")
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > self.max_num_seqs:
            allowed = f"must be at most max_num_seqs={self.max_num_seqs}, or None"
            raise ConfigError("engine.max_num_active_seqs", self.max_num_active_seqs, allowed)
        if self.max_num_batched_tokens < self.max_num_seqs:
            allowed = f"must be at least max_num_seqs={self.max_num_seqs}"
            raise ConfigError("engine.max_num_batched_tokens", self.max_num_batched_tokens, allowed)
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            allowed = f"must be at least max_model_len={self.max_model_len} when enable_chunked_prefill=false"
            raise ConfigError("engine.max_num_batched_tokens", self.max_num_batched_tokens, allowed)
        if self.by_priority and self.batching == "static":
            raise ConfigError("engine.policy", self.policy, "must be fcfs when batching=static")
        if self.freed_unhashed_blocks not in ("front", "tail"):
            raise ConfigError("engine.freed_unhashed_blocks", self.freed_unhashed_blocks, "must be front or tail")
        if self.self_preemption not in ("continues", "ends"):
            raise ConfigError("engine.self_preemption", self.self_preemption, "must be continues or ends")
        self._check_relief()
        if self.batching not in ("continuous", "static"):
            raise ConfigError("engine.batching", self.batching, "must be continuous or static")
        if not 0 <= self.static_wait_s < LATEST_S:
            raise ConfigError("engine.static_wait_s", self.static_wait_s, f"must be from 0 to {LATEST_S:g} seconds")

    def _check_relief(self) -> None:
        """What operators reach for when the queue grows or blocks run out."""
        for key in ("max_queued_requests", "max_new_tokens"):
            value = getattr(self, key)
            if value is not None and (not is_integer(value) or not 1 <= value < LARGEST):
                raise ConfigError(f"engine.{key}", value, f"must be an integer from 1 to {LARGEST - 1}, or None")
        if self.preemption_mode not in ("recompute", "swap"):
            raise ConfigError("engine.preemption_mode", self.preemption_mode, "must be recompute or swap")
        if not is_integer(self.num_cpu_blocks) or not 0 <= self.num_cpu_blocks < LARGEST:
            raise ConfigError("engine.num_cpu_blocks", self.num_cpu_blocks, f"must be from 0 to {LARGEST - 1}")
        if self.preemption_mode == "swap" and self.caches and not self.by_priority:
            # Where CPU memory is full requests come back in another order than they arrived, which is the order of the
            # prefix cache under this policy.
            allowed = "is not modelled together with enable_prefix_caching=true and policy=fcfs"
            raise ConfigError("engine.preemption_mode", "swap", allowed)
        if self.batching == "static":
            for key, absent in (("preemption_mode", "recompute"), ("max_queued_requests", None)):
                if (value := getattr(self, key)) != absent:
                    raise ConfigError(f"engine.{key}", value, "is not modelled together with batching=static")


class Totals(NamedTuple):
    """What one simulation did as a whole. Shares are in 0..1; means are over time, first arrival to last token."""

    iterations: int  # schedule() calls that scheduled tokens
    scan_steps: int  # steps of the array program that computed them
    duration_s: float  # first arrival to the end of the last iteration
    num_preemptions: int
    recomputed_tokens: int  # tokens whose KV was dropped by preemption
    scheduled_tokens: int
    prefill_tokens: int
    decode_tokens: int
    output_tokens: int
    kv_usage_mean: float
    kv_usage_peak: float
    kv_time_above_90: float  # share of the time with more than 90 % of the blocks in use
    running_mean: float
    running_max: int
    waiting_mean: float
    waiting_max: int  # right after a schedule() call
    waiting_growth_rps: float  # requests per second by which the waiting queue grows while requests arrive
    slot_occupancy: float  # rows in `running` (static: rows still producing) / (max_num_seqs x iterations)
    budget_use: float  # scheduled tokens / (max_num_batched_tokens x iterations)
    refused_seats: int  # iterations that left a request waiting because max_num_seqs requests ran
    refused_kv: int  # ... because its KV blocks did not fit, or a running request was preempted
    refused_budget: int  # ... because the token budget was used up
    itl_histogram: np.ndarray  # [bins] int64, gaps between the tokens of a request; edges: `itl_edges_s()`


@dataclass(frozen=True, eq=False)
class Simulation:
    """The outcome of one simulation; arrays are in the caller's order of requests."""

    arrival_ps: np.ndarray  # [N] int64
    first_scheduled_ps: np.ndarray  # [N] int64, NEVER where it did not happen; so the next two
    first_token_ps: np.ndarray
    finish_ps: np.ndarray
    prompt_len: np.ndarray  # [N] int32
    output_tokens: np.ndarray  # [N] int32, tokens produced
    num_preemptions: np.ndarray  # [N] int32
    recomputed_tokens: np.ndarray  # [N] int32
    hit_tokens: np.ndarray  # [N] int32, tokens found in the prefix cache at first admission
    status: Status
    totals: Totals
    closed_loop: bool = False
    resumed_hit_tokens: Any = 0  # [N] int32, tokens found when preempted requests were admitted again
    rejected: Any = False  # [N] bool, turned away by max_queued_requests
    label: Any = None  # [N] names of the requests' classes, if they have any
    iterations: list = field(default_factory=list)  # rows in the golden columns, with trace=True; times in ps
    series: np.ndarray | None = None  # with series=True: a structured array, one element per iteration

    @property
    def arrival_s(self) -> np.ndarray:
        return seconds(self.arrival_ps)

    @property
    def first_scheduled_s(self) -> np.ndarray:
        return seconds(self.first_scheduled_ps)

    @property
    def first_token_s(self) -> np.ndarray:
        return seconds(self.first_token_ps)

    @property
    def finish_s(self) -> np.ndarray:
        return seconds(self.finish_ps)


def seconds(time_ps: np.ndarray) -> np.ndarray:
    """Seconds of a time in picoseconds, NaN for NEVER; any shape, float64."""
    return np.where(time_ps == NEVER, np.nan, time_ps / PS_PER_S)


def picoseconds(time_s: Any) -> np.ndarray:
    """Nearest picosecond of a time in seconds; any shape, int64."""
    return np.rint(np.asarray(time_s, np.float64) * PS_PER_S).astype(np.int64)
