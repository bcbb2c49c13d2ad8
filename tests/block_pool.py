"""KV blocks one by one for the oracle: ids, hashes of whole prefixes, reference counts, the free queue in LRU order.

Rules: vLLM 0.33.0, v1/core/block_pool.py and v1/core/kv_cache_utils.py. A token is a pair (stream, offset); two blocks
have the same key if and only if all tokens up to and including theirs are the same.
"""

from collections import OrderedDict
from typing import Any


def token_identities(
    prompts: list[int], outputs: list[int], segments: list | None, streams: list | None
) -> list[list[tuple[Any, int]]]:
    """Per request the identities of its prompt and output tokens; private streams "p<i>" and "o<i>" by default."""
    sequences = []
    for rid, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        parts = segments[rid] if segments is not None and segments[rid] is not None else [(f"p{rid}", 0, prompt)]
        stream = streams[rid] if streams is not None and streams[rid] is not None else f"o{rid}"
        tokens = [(name, start + j) for name, start, length in parts for j in range(length)]
        if len(tokens) != prompt:
            raise ValueError(f"request {rid}: segments of {len(tokens)} tokens for a prompt of {prompt}")
        sequences.append(tokens + [(stream, j) for j in range(output)])
    return sequences


def chains(sequences: list[list[tuple[Any, int]]], block_size: int) -> list[list[int]]:
    """Per request the keys of its full blocks, numbered in the order in which they are first met."""
    names: dict[tuple, int] = {}
    result = []
    for tokens in sequences:
        keys, parent = [], -1
        for end in range(block_size, len(tokens) + 1, block_size):
            parent = names.setdefault((parent, *tokens[end - block_size : end]), len(names))
            keys.append(parent)
        result.append(keys)
    return result


class BlockPool:
    """Blocks 1 ... usable; block 0 is the null block."""

    def __init__(self, usable: int, plain_first: bool = True):
        self.plain_first = plain_first
        self.queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, usable + 1))
        self.references = [0] * (usable + 1)
        self.keys: list[int | None] = [None] * (usable + 1)
        self.resident: dict[int, OrderedDict[int, None]] = {}  # key -> blocks in the order of their registration

    @property
    def free(self) -> int:
        return len(self.queue)

    def lookup(self, chain: list[int], limit: int) -> list[int]:
        """The blocks that hold the longest resident prefix of the first `limit` keys of a chain."""
        hits = []
        for key in chain[:limit]:
            if key not in self.resident:
                break
            hits.append(next(iter(self.resident[key])))
        return hits

    def idle(self, blocks: list[int]) -> int:
        """How many of the blocks stand in the free queue."""
        return sum(self.references[block] == 0 for block in blocks)

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.references[block] == 0:
                del self.queue[block]
            self.references[block] += 1

    def take(self, count: int) -> list[int]:
        """Blocks from the head of the queue; what they held is forgotten."""
        taken = []
        for _ in range(count):
            block, _ = self.queue.popitem(last=False)
            key, self.keys[block] = self.keys[block], None
            if key is not None:
                del self.resident[key][block]
                if not self.resident[key]:
                    del self.resident[key]
            self.references[block] = 1
            taken.append(block)
        return taken

    def register(self, block: int, key: int) -> None:
        assert self.keys[block] is None
        self.keys[block] = key
        self.resident.setdefault(key, OrderedDict())[block] = None

    def release(self, blocks: list[int]) -> None:
        """Give back a request's blocks, the last one first: hashed ones to the tail, the others to the front.

        Before vLLM 0.33 (not `plain_first`) all go to the tail.
        """
        plain = []
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                if self.keys[block] is None and self.plain_first:
                    plain.append(block)
                else:
                    self.queue[block] = None
        for block in reversed(plain):
            self.queue[block] = None
            self.queue.move_to_end(block, last=False)
