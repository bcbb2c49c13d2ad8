"""The time of one iteration, in integer picoseconds.

    t = step + linear[tokens] + prefill_token * prefill tokens + prefill_seq * prefill rows
      + decode_seq * decode rows + decode_base[decode rows]
      + (decode_ctx + decode_ctx_table[decode rows]) * sum of context after the step over decode rows
      + prefill_ctx * sum(computed + n) over prefill rows
      + pair * sum(n * computed + n * (n + 1) / 2) over prefill rows
      + swap_token * block size * blocks swapped out and in by the schedule

A decode row has at least one output token and lacks the KV of exactly one known token; every other scheduled row is a
prefill row with n tokens (a prompt's chunk, or the recomputation of a preempted request). For a fixed batch t is affine
in the iteration number, which is what lets the engine leap.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxsim.engine.types import picoseconds
from jaxsim.errors import ConfigError


@dataclass(frozen=True, eq=False)
class CostTable:
    """Coefficients of the iteration time, int picoseconds each; tables are None where they would be all zero."""

    step_ps: int = 0
    prefill_token_ps: int = 0
    prefill_seq_ps: int = 0
    decode_seq_ps: int = 0
    decode_ctx_ps: int = 0
    prefill_ctx_ps: int = 0
    pair_ps: int = 0
    swap_token_ps: int = 0  # to move the KV of one token between GPU and CPU memory; whole blocks move
    linear_ps: np.ndarray | None = None  # [T + 1] int64 by scheduled tokens, T >= max_num_batched_tokens
    decode_base_ps: np.ndarray | None = None  # [B + 1] int64 by decode rows, B >= max_num_seqs
    decode_ctx_table_ps: np.ndarray | None = None  # [B + 1] int64 by decode rows


class Cost(Protocol):
    """Anything that can state its iteration time as a table."""

    def table(self, max_tokens: int, max_seqs: int) -> CostTable: ...


@dataclass(frozen=True)
class AffineCost:
    """Four plain coefficients in seconds, the cost model of the reference scheduler's golden cases."""

    base_s: float
    per_prefill_token_s: float
    per_decode_seq_s: float
    per_ctx_token_s: float  # per token of context, after the step, of every scheduled row

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if not 0 <= value <= 1000:
                raise ConfigError(f"cost.{key}", value, "must be from 0 to 1000 seconds")

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        base, prefill, decode, ctx = (int(picoseconds(value)) for value in vars(self).values())
        return CostTable(
            step_ps=base, prefill_token_ps=prefill, decode_seq_ps=decode, decode_ctx_ps=ctx, prefill_ctx_ps=ctx
        )
