"""What prompts have in common: shared system prompts, and conversations whose turns quote all that was said before.

Draws of a seed come from streams of their own, one number a conversation (a group's, for system prompts), so that
adding structure leaves arrivals, new tokens and outputs as they were.

In the shapes, `C` is the number of conversations, `T` of turns in the longest, `N` of requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxsim.engine import Requests
from jaxsim.errors import ConfigError
from jaxsim.workload.lengths import Length

MOST_TURNS = 1000
MOST_GROUPS = 1_000_000

Draw = Callable[..., np.ndarray]  # (stream, turn, numbers): uniform numbers in [0, 1), float64 [numbers]


@dataclass(frozen=True)
class Prefix:
    """Structure of the prompts; off with no groups and one turn. A request's drawn prompt is what it adds.

    groups: number of system prompts; 0: none. A conversation uses one of them, in front of its first prompt.
    length: tokens of a group's system prompt. zipf: the k-th group is chosen in proportion to k ** -zipf.
    unique: share of conversations with a system prompt of their own instead, of the length of the one they would use.
    turns: turns of a conversation. Each follow-up's prompt is all earlier prompts and outputs and the new tokens.
    think_time_s: mean time from one turn's arrival to the next, exponential. It stands for the answer and the thought:
        in an open loop a turn that comes before the answer is complete finds only a part of it in the cache.
    """

    groups: int = 0
    length: Length = field(default_factory=lambda: Length(value=1024))
    zipf: float = 0.0
    unique: float = 0.0
    turns: Length = field(default_factory=lambda: Length(value=1))
    think_time_s: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or not 0 <= self.groups <= MOST_GROUPS:
            raise ConfigError("groups", self.groups, f"an integer from 0 to {MOST_GROUPS}")
        for key, most in (("zipf", 10.0), ("unique", 1.0), ("think_time_s", 1e5)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise ConfigError(key, value, f"a number from 0 to {most:g}")
        if self.turns.dist == "fixed" and self.turns.value is not None and self.turns.value > MOST_TURNS:
            raise ConfigError("turns.value", self.turns.value, f"at most {MOST_TURNS} turns")

    @property
    def is_off(self) -> bool:
        return self.groups == 0 and self.turns.dist == "fixed" and self.turns.value == 1

    def mean_turns(self) -> float:
        """Expected turns of a conversation, from 4,096 quantiles."""
        return float(self._turns((np.arange(4096) + 0.5) / 4096).mean())

    def requests(
        self, starts_s: np.ndarray, prompt: Length, output: Length, draw: Draw, priority: np.ndarray | None = None
    ) -> Requests:
        """The first C requests, in order of arrival, of C conversations that start at `starts_s` [C], in order.

        priority: [C]. The first C conversations hold the first C requests: each has at least one, at its start.
        """
        count = len(starts_s)
        turns = self._turns(draw("turns", 0, count))
        group, unique = self._group(draw("groups", 0, count)), draw("unique", 0, count) < self.unique
        heads = self.length.sample(draw("system", 0, self.groups)) if self.groups else np.zeros(1, np.int64)
        longest = int(turns.max())
        new = np.stack([prompt.sample(draw("prompts", turn, count)) for turn in range(longest)], 1)  # [C, T]
        said = np.stack([output.sample(draw("outputs", turn, count)) for turn in range(longest)], 1)
        gaps = [-np.log1p(-draw("thinking", turn, count)) * self.think_time_s for turn in range(1, longest)]
        times = starts_s[:, None] + np.cumsum(np.stack([np.zeros(count), *gaps], 1), 1)
        head = heads[group] if self.groups else np.zeros(count, np.int64)
        known = head[:, None] + np.cumsum(new, 1) + np.cumsum(said, 1) - said
        talk, turn = np.nonzero(np.arange(longest) < turns[:, None])
        first = np.argsort(times[talk, turn], kind="stable")[:count]
        talk, turn = talk[first], turn[first]
        parts = []
        for c, t in zip(talk.tolist(), turn.tolist(), strict=True):
            listed = [(f"c{c}" if unique[c] else f"s{group[c]}", 0, int(head[c]))] if head[c] else []
            for earlier in range(t):
                listed += [(f"u{c}.{earlier}", 0, int(new[c, earlier])), (f"a{c}.{earlier}", 0, int(said[c, earlier]))]
            parts.append([*listed, (f"u{c}.{t}", 0, int(new[c, t]))])
        names = [f"a{c}.{t}" for c, t in zip(talk.tolist(), turn.tolist(), strict=True)]
        levels = None if priority is None else priority[talk]
        return Requests(times[talk, turn], known[talk, turn], said[talk, turn], levels, parts, names)

    def _turns(self, uniform: np.ndarray) -> np.ndarray:
        return np.clip(self.turns.sample(uniform), 1, MOST_TURNS)

    def _group(self, uniform: np.ndarray) -> np.ndarray:
        """Group of each conversation, int64 [C]."""
        weights = np.arange(1, max(self.groups, 1) + 1, dtype=np.float64) ** -self.zipf
        shares = np.cumsum(weights) / math.fsum(weights)
        return np.minimum(np.searchsorted(shares, uniform, side="right"), len(shares) - 1)
