"""Which requests share which blocks: the trie of block keys, cut into nodes, built once per list of requests.

Request i's chain is its first (P + O - 1) // block_size blocks, O capped by max_model_len: the block that only the last
sampled token would fill is never computed. Two chains share a block if and only if all tokens up to and including its
own are the same. A node is a maximal run of blocks without a branch; chains may end within it.

In the shapes, `N` is the padded number of requests, `K` the number of distinct (list, block size, max_model_len).
"""

from collections.abc import Iterable, Sequence
from functools import cmp_to_key
from typing import Any, NamedTuple

import numpy as np

from jaxsim.engine.types import Requests
from jaxsim.errors import ConfigError

Parts = list[tuple[int, int, int]]  # (stream, start, length) in the order of the tokens


class Chains(NamedTuple):
    """Tables of int32; positions count blocks from the start of the chain."""

    requests: Any  # [K, N, 4] first and end of the request's path in `path`; of its chain the blocks and the tokens
    path: Any  # [K, paths] nodes from the first block to the last
    nodes: Any  # [K, nodes, 2] first block and end


class Trie(NamedTuple):
    """One element of `Chains`, not padded."""

    requests: np.ndarray
    path: np.ndarray
    nodes: np.ndarray


def trie_of(requests: Requests, order: np.ndarray, block_size: int, max_model_len: int) -> Trie:
    """The trie of the requests in the given order ([N] caller's index of the k-th). Raises ConfigError."""
    parts, tokens = token_parts(requests, order, block_size, max_model_len)
    blocks = [count // block_size for count in tokens]
    shared, ranked = common_tokens(parts)
    parent, start, end, leaf = [-1], [0], [0], [0] * len(parts)  # node 0 is the empty root
    stack = [0]
    for place, request in enumerate(ranked):
        depth = shared[place] // block_size
        popped = False
        while start[stack[-1]] >= depth and stack[-1] != 0:
            below = stack.pop()
            popped = True
        top, length = stack[-1], blocks[request]
        if top != 0 and depth < end[top]:
            # The new chain leaves within `top`: its first part becomes a node of its own.
            parent += [parent[top]]
            start += [start[top]]
            end += [depth]
            parent[top], start[top] = len(parent) - 1, depth
            stack[-1] = len(parent) - 1
            if popped:
                assert parent[below] == top
        elif top != 0 and length > depth and not popped:
            end[top] = length
            leaf[request] = top
            continue
        if length > depth:
            parent.append(stack[-1])
            start.append(depth)
            end.append(length)
            stack.append(len(parent) - 1)
        leaf[request] = stack[-1]
    paths: list[int] = []
    table = np.zeros((len(parts), 4), np.int32)
    for request, node in enumerate(leaf):
        while node != 0 and start[node] >= blocks[request]:
            node = parent[node]
        steps = []
        while node != 0:
            steps.append(node)
            node = parent[node]
        table[request] = len(paths), len(paths) + len(steps), blocks[request], tokens[request]
        paths += reversed(steps)
    return Trie(table, np.array(paths, np.int32), np.array([start, end], np.int32).T)


def shared_blocks(requests: Requests, block_size: int, max_model_len: int) -> bool:
    """Whether two requests have a block in common, for which their first ones must be the same. Raises ConfigError."""
    if requests.segments is None:
        return False  # each prompt is a stream of its own
    chains, _ = token_parts(requests, np.arange(len(requests.prompt_len)), block_size, max_model_len)
    firsts = []
    for parts in filter(None, chains):
        block, left = [], block_size
        for stream, start, length in parts:
            block.append((stream, start, min(length, left)))
            left -= length
            if left <= 0:
                break
        firsts.append(tuple(block))
    return len(set(firsts)) < len(firsts)


def token_parts(
    requests: Requests, order: np.ndarray, block_size: int, max_model_len: int
) -> tuple[list[Parts], list[int]]:
    """The tokens of each chain's blocks as slices of numbered streams, adjoining slices joined, and how many tokens a
    request computes: P + O - 1."""
    names: dict[Any, int] = {}
    chains, tokens = [], []
    prompts, outputs = np.asarray(requests.prompt_len), np.asarray(requests.output_len)
    for i in np.asarray(order).tolist():
        prompt = int(prompts[i])
        output = min(int(outputs[i]), max_model_len - prompt)
        listed = None if requests.segments is None else requests.segments[i]
        pieces: Iterable = [(f"p{i}", 0, prompt)] if listed is None else listed
        stream = None if requests.output_stream is None else requests.output_stream[i]
        computed = prompt + output - 1
        left = computed // block_size * block_size
        parts: Parts = []
        total = 0
        for name, first, length in [*pieces, (f"o{i}" if stream is None else stream, 0, output)]:
            total += length
            length = min(length, left)
            left -= length
            if length <= 0:
                continue
            key = names.setdefault(name, len(names))
            if parts and parts[-1][0] == key and parts[-1][1] + parts[-1][2] == first:
                parts[-1] = (key, parts[-1][1], parts[-1][2] + length)
            else:
                parts.append((key, first, length))
        if total != prompt + output:
            allowed = f"must have as many tokens as the prompt, {prompt}"
            raise ConfigError(f"requests.segments[{i}]", total - output, allowed)
        chains.append(parts)
        tokens.append(computed)
    return chains, tokens


def common_tokens(chains: Sequence[Parts]) -> tuple[list[int], list[int]]:
    """Chains in lexical order, and the tokens that each has in common with the one before it."""

    def compare(one: int, other: int) -> int:
        common, first, second = _first_difference(chains[one], chains[other])
        return (first > second) - (first < second)

    ranked = sorted(range(len(chains)), key=cmp_to_key(compare))
    shared = [_first_difference(chains[a], chains[b])[0] for a, b in zip(ranked, ranked[1:], strict=False)]
    return [0, *shared], ranked


def _first_difference(one: Parts, other: Parts) -> tuple[int, tuple, tuple]:
    """Tokens in common, and the first token of each that differs; () stands for the end."""
    common, i, j, skip_i, skip_j = 0, 0, 0, 0, 0
    while i < len(one) and j < len(other):
        stream, start, length = one[i]
        stream_j, start_j, length_j = other[j]
        if stream != stream_j or start + skip_i != start_j + skip_j:
            return common, (stream, start + skip_i), (stream_j, start_j + skip_j)
        step = min(length - skip_i, length_j - skip_j)
        common, skip_i, skip_j = common + step, skip_i + step, skip_j + step
        if skip_i == length:
            i, skip_i = i + 1, 0
        if skip_j == length_j:
            j, skip_j = j + 1, 0
    first = (one[i][0], one[i][1] + skip_i) if i < len(one) else ()
    second = (other[j][0], other[j][1] + skip_j) if j < len(other) else ()
    return common, first, second


def padded(tries: list[Trie], size: int, requests: int, paths: int, nodes: int) -> Chains:
    """Tries as tables of one shape, `size` of each."""
    result = Chains(
        np.zeros((size, requests, 4), np.int32),
        np.zeros((size, paths), np.int32),
        np.zeros((size, nodes, 2), np.int32),
    )
    for i, trie in enumerate(tries):
        for table, values in zip(result, trie, strict=True):
            table[i, : len(values)] = values
    return result
