"""Hash ids of traces: each stands for a block of prompt tokens and all tokens before it.

Traces with them: Mooncake (blocks of 512 tokens), Qwen-Bailian usage traces and vLLM's `timed_trace` (16). The files do
not say the size of their blocks, and a wrong one would silently share too little or too much: it is asked for, and
checked against every line.

In the shapes, `N` is the number of requests, `R` the number of runs of consecutive ids.
"""

from __future__ import annotations

import math

import numpy as np

from jaxsim.errors import ConfigError
from jaxsim.workload.lengths import LONGEST

KEY = "workload.hash_block_size"

Segments = list[tuple[str, int, int]]  # (stream, start, length) of a prompt's tokens


class HashIds:
    """The ids of a file, collected line by line as runs of consecutive numbers."""

    def __init__(self) -> None:
        self.numbers: dict[int | str, int] = {}  # of the ids, in order of their first occurrence
        self.runs: list[list[tuple[int, int]] | None] = []  # [N], per request (first, number of blocks); None: no ids
        self.counts: list[int] = []  # [N]
        self.lines: list[int] = []  # [N]

    def add(self, line: int, ids: list[int | str] | None) -> None:
        """The ids of one request."""
        runs: list[tuple[int, int]] = []
        for name in ids or ():
            number = self.numbers.setdefault(name, len(self.numbers))
            if runs and sum(runs[-1]) == number:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((number, 1))
        self.runs.append(None if ids is None else runs)
        self.counts.append(len(ids or ()))
        self.lines.append(line)

    def segments(self, prompt_len: np.ndarray, size: int | None) -> list[Segments | None] | None:
        """Token segments of every request ([N] prompt lengths), for blocks of `size` tokens; None without any ids.

        An id is a slice of one stream. The last id of a prompt may stand for a part of a block, or tokens that fill no
        block may have no id: which of the two holds is found from the file. Errors: ConfigError of
        workload.hash_block_size if it is missing or contradicts a line.
        """
        known = np.array([runs is not None for runs in self.runs])
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LONGEST):
            raise ConfigError(KEY, size, f"must be a number of tokens from 1 to {LONGEST}, or null")
        if not known.any():
            if size is not None:
                raise ConfigError(KEY, size, "must be null: the trace has no hash ids")
            return None
        tokens, counts = prompt_len[known], np.array(self.counts)[known]
        suggestion = _suggestion(tokens, counts)
        if size is None:
            allowed = f"must be the tokens of a hash id, unless engine.enable_prefix_caching=false; {suggestion}"
            raise ConfigError(KEY, "null", allowed)
        wrong = min((-(-tokens // size) != counts, tokens // size != counts), key=lambda misses: int(misses.sum()))
        if wrong.any():
            at = int(np.argmax(wrong))
            line = np.array(self.lines)[known][at]
            found = f"line {line} has {counts[at]} hash ids for {tokens[at]} tokens, not {-(-tokens[at] // size)}"
            raise ConfigError(KEY, size, f"{found}; {suggestion}")
        return [
            None if runs is None else _slices(runs, size, int(prompt), row)
            for row, (runs, prompt) in enumerate(zip(self.runs, prompt_len, strict=True))
        ]


def _slices(runs: list[tuple[int, int]], size: int, prompt: int, row: int) -> Segments:
    """Segments of `prompt` tokens; those without an id are the request's own."""
    slices: Segments = []
    for first, blocks in runs:
        length = min(blocks * size, prompt)
        prompt -= length
        slices.append(("h", first * size, length))
    return [*slices, (f"t{row}", 0, prompt)] if prompt else slices


def _suggestion(tokens: np.ndarray, counts: np.ndarray) -> str:
    """The size that fits all requests, in words. ceil(t / s) = n is t / n <= s < t / (n - 1), floor one block on."""
    one_less, one_more = np.maximum(counts - 1, 0.5), counts + 1
    with_part = (tokens / np.maximum(counts, 0.5), np.where(counts > 1, tokens / one_less, math.inf))
    without = (tokens / one_more, np.where(counts > 0, tokens / np.maximum(counts, 0.5), math.inf))
    for (low, high), rule in ((with_part, lambda s: -(-tokens // s)), (without, lambda s: tokens // s)):
        least, most = math.ceil(low.max()), int(min(high.min(), LONGEST))
        powers = [1 << bit for bit in range(LONGEST.bit_length()) if least <= 1 << bit <= most]
        for size in [*powers, least, least + 1, most]:
            if size >= 1 and bool((rule(size) == counts).all()):
                return f"{size} fits the file"
    return "no size fits all lines of the file"
