"""What a prefix cache that never evicts would find: the upper bound on hits, from the requests alone."""

from __future__ import annotations

import numpy as np

from jaxsim.engine import Requests
from jaxsim.engine.chains import trie_of
from jaxsim.engine.types import LARGEST


def reusable_tokens(requests: Requests, block_size: int, max_model_len: int = LARGEST) -> np.ndarray:
    """Prompt tokens of each request, int64 [N], that are in full blocks of earlier requests' prompts and outputs.

    Earlier requests (by arrival, ties in list order) count as finished. The last token is computed anyway: of a prompt
    of P tokens at most (P - 1) // block_size blocks can be found.
    """
    order = np.argsort(np.asarray(requests.arrival_s, np.float64), kind="stable")
    trie = trie_of(requests, order, block_size, max_model_len)
    resident = trie.nodes[:, 0].copy()  # per node, the end of the blocks that earlier chains have computed
    hits = np.zeros(len(order), np.int64)
    for request, (first, end, length, _) in zip(order, trie.requests, strict=True):
        most = (int(np.asarray(requests.prompt_len)[request]) - 1) // block_size
        path, found, gap = trie.path[first:end], 0, False
        for node in path:
            if not gap:
                found = int(resident[node])
                gap = found < trie.nodes[node, 1]
            resident[node] = max(resident[node], min(length, trie.nodes[node, 1]))
        hits[request] = min(found, most) * block_size
    return hits


def reusable_share(requests: Requests, block_size: int) -> float:
    """`reusable_tokens` of all requests over all their prompt tokens."""
    return float(reusable_tokens(requests, block_size).sum() / np.asarray(requests.prompt_len).sum(dtype=np.int64))
