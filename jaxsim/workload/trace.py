"""Recorded workloads: a trace, its replicates by circular shift, and requests too long for the server."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxsim.engine import Requests
from jaxsim.errors import ConfigError
from jaxsim.workload.priority import Priority
from jaxsim.workload.synthetic import check_seed, uniform_numbers

TICKS_PER_S = 10**7  # a tick is 100 ns, the resolution of the Azure traces
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: seeds start as far from each other as they can


@dataclass(frozen=True, eq=False)
class TraceWorkload:
    """Requests of a trace in arrival order; times are integers, so replays are exact.

    ticks: int64 [N], time since the first request in ticks of 100 ns. prompt_len, output_len: int64 [N], tokens.
    segments: [N] token identities of the prompts as in `Requests`, None where a prompt shares nothing.
    priority: int64 [N] as recorded, or how to draw them, anew for every seed.
    """

    ticks: np.ndarray
    prompt_len: np.ndarray
    output_len: np.ndarray
    segments: list | None = None
    source: str = ""
    priority: np.ndarray | Priority = Priority()

    @cached_property
    def rate_rps(self) -> float:
        """Mean rate in requests/s: gaps / time from first to last arrival; inf if all arrive at once."""
        span = int(self.ticks[-1] - self.ticks[0])
        return (len(self.ticks) - 1) * TICKS_PER_S / span if span else float("inf")

    def start_row(self, seed: int) -> int:
        """Row with which a seed's replay starts: 0 for seed 0, further seeds spread evenly over the trace."""
        return ((check_seed(seed) * _GOLDEN) % 2**64) * len(self.ticks) >> 64

    def sample(self, seed: int, n: int | None = None) -> Requests:
        """`n` requests (None: each row once) from the seed's start row on, the first at 0 s.

        The trace is a ring: the gaps are those recorded, the one between last row and first is the mean gap, and
        an `n` above the trace's length goes round again.
        """
        total = len(self.ticks)
        n = total if n is None else n
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise ConfigError("n", n, "a number of requests from 1, or None for the whole trace")
        span = int(self.ticks[-1] - self.ticks[0])
        wrap = round(span / (total - 1)) if total > 1 else 0
        gaps = np.append(np.diff(self.ticks), wrap)  # [N], from row i to the next on the ring
        rows = (self.start_row(seed) + np.arange(n)) % total
        ticks = np.append(0, np.cumsum(gaps[rows[:-1]]))
        segments = None if self.segments is None else [self.segments[row] for row in rows]
        if isinstance(self.priority, Priority):
            priority = self.priority.sample(uniform_numbers(seed, "priority", int(n)))
        else:
            priority = self.priority[rows]
        return Requests(ticks / TICKS_PER_S, self.prompt_len[rows], self.output_len[rows], priority, segments)


def drop_or_refuse(requests: Requests, max_model_len: int, too_long: str = "error") -> tuple[Requests, int]:
    """Requests a server takes, and how many were dropped.

    vLLM refuses a prompt that leaves no room for a token, prompt_len >= max_model_len; a longer output is only cut, by
    the engine. "drop" leaves such requests out (arrivals of the others unchanged). Errors: ConfigError with "error" if
    there are any, and if none are left.
    """
    if too_long not in ("error", "drop"):
        raise ConfigError("workload.too_long", too_long, "error or drop")
    prompt = np.asarray(requests.prompt_len)
    keep = prompt < max_model_len
    dropped = int((~keep).sum())
    if dropped == 0:
        return requests, 0
    first = int(np.argmin(keep))
    what = (
        f"{dropped} of {len(prompt)} requests have prompts of max_model_len={max_model_len} tokens or more, "
        f"the first is request {first + 1} with {prompt[first]}"
    )
    if too_long == "error":
        raise ConfigError("workload.too_long", too_long, f"{what}; raise max_model_len or set workload.too_long=drop")
    if dropped == len(prompt):
        raise ConfigError("workload.too_long", too_long, f"{what}; none is left, raise max_model_len")
    return Requests(*(None if field is None else _select(field, keep) for field in requests)), dropped


def _select(field, keep: np.ndarray):
    """Items of an array or a sequence [N] where `keep` [N] holds."""
    if isinstance(field, np.ndarray):
        return field[keep]
    return type(field)(item for item, kept in zip(field, keep, strict=True) if kept)
