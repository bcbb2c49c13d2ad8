"""The state of one simulation: a flat int32 memory with named regions, and a handful of scalars.

XLA copies, converts or recomputes whole arrays when a loop writes several of them, so everything that is indexed by a
request or by an iteration lives in one array per simulation and each event writes it once. Times are int64, in two
words, the low one first.

In the shapes, `N` is the padded number of requests, `R` the number of calendar buckets, `P` the number of block phases.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

NONE = -1
INFINITE = 1 << 62  # the arrival of a request that will not come
OVERTIME = 1 << 61  # 2.3e6 s: a simulation whose clock comes so far is ended
WINDOW = 8
ROW = 2 * WINDOW

# The half of a request's row that admission writes.
NEXT, PREV = 0, 1  # neighbours in the calendar bucket (decoding) or in the list of prompts in progress
FIT = 2  # decoding: the iteration at whose start it is finished; prompt in progress: ~computed tokens
BELOW = 3  # the running request admitted before it
FIRST_SCHEDULED = 4  # two words: picoseconds, NONE before
FIRST_TOKEN = 6  # position in the log of ends of iterations, NONE before
SWAPPED = 7  # computed tokens whose KV is in CPU memory; only with Limits.swap
# The half that finishing and preemption write.
LAST_TOKEN = 8  # two words: when the last token known at that moment appeared, NONE before
PREEMPTIONS = 10
RECOMPUTED = 11
GENERATED = 12  # output tokens, up to date when waiting or finished
PROMPT = 13
OUTPUT = 14
LINK = 15  # the next in the waiting queue, of preempted and, across a hole, of fresh requests; resumed: the next whose
# gap is to be counted

# Under the policy "priority" each request has a ticket and each rank a place; see priority.py.
TICKET, PLACE = 4, 3
ROSTER_TICKET = 7  # with Limits.roster
RANK = 0
PREVIOUS = 1  # the request of the same priority that arrived before it, or NONE
CLASS = 2  # rank of the first request of the same priority and arrival, once it has arrived
PLAN = 3  # tokens that the iteration being planned gives to the prompt in progress
ORDER = 4  # a request that runs: how many were admitted before it
AHEAD, BEHIND = 5, 6  # its neighbours in that order
REQUEST = 0  # of the rank
OLDEST, NEWEST = 1, 2  # a class that runs: first and last of the list of its running requests, which BELOW links

# Widths of the prefix cache's rows, whose fields prefix.py names.
SEGMENT, NODE, VISITOR, HOLD = 9, 3, 11, 3
ROSTER_VISITOR = 12  # with Limits.roster

SINKS = 16  # cells that take the writes of what did not happen, one each so that no index occurs twice
PRIORITY_SINKS = 32  # SINKS under the policy "priority"
PREFIX_SINKS, TAIL_SINKS = 48, 64  # the latter with Limits.tail


@dataclass(frozen=True)
class Limits:
    """Static sizes and features: each distinct value compiles once."""

    requests: int  # N
    ring: int  # R, a power of two above the longest output
    phases: int  # P, at least the largest block size
    threshold: bool = False  # long_prefill_token_threshold is set somewhere: several prompts in progress
    tables: int = 0  # length of the longest cost table, 0 for plain coefficients
    closed_loop: bool = False
    statistics: bool = True
    trace: bool = False
    static: bool = False  # static batching
    asynchronous: bool = False  # async scheduling
    inflow: bool = False  # max_queued_requests is set somewhere
    returns: bool = False  # and so is a number of clients: those that are turned away come again
    swap: bool = False  # preemption_mode="swap" somewhere
    priority: bool = False  # the policy "priority"
    ends: bool = False  # self_preemption="ends" with it: running requests may miss a turn; has `threshold` as well
    fenced: bool = True  # store intermediate results: on CPUs
    nodes: int = 0  # prefix caching: nodes of the trie, rows for segments (0 for no caching) and for holds
    segments: int = 0
    holds: int = 0
    tail: bool = False  # freed blocks without a key go to the tail of the free queue: vLLM before 0.33

    @property
    def arrivals(self) -> int:
        return (self.requests + 1) * ROW

    @property
    def log(self) -> int:
        return self.arrivals + 2 * (self.requests + 2)

    @property
    def buckets(self) -> int:
        return self.log + 2 * self.requests

    @property
    def words(self) -> int:
        return self.buckets + self.ring

    @property
    def tickets(self) -> int:
        return self.words + self.ring // 32

    @property
    def places(self) -> int:
        return self.tickets + (self.requests + 1) * self.ticket

    @property
    def waiting_words(self) -> int:
        return self.places + self.requests * PLACE

    @property
    def ahead(self) -> int:
        """Positions of swapped requests in the queue of the policy "priority", ahead of those of waiting ones."""
        return self.requests if self.swap else 0

    @property
    def class_words(self) -> int:
        return self.waiting_words + (self.ahead + self.requests) // 32

    @property
    def sinks(self) -> int:
        return self.class_words + self.requests // 32 if self.priority else self.tickets

    @property
    def memory(self) -> int:
        size = self.sinks + (PRIORITY_SINKS if self.priority else SINKS)
        return -(-size // ROW) * ROW  # rows do not straddle cache lines

    @property
    def prefix(self) -> bool:
        """Whether blocks have an identity: prefix caching."""
        return self.segments > 0

    @property
    def loops(self) -> bool:
        """Whether there may be clients that send their next request when the last one has ended."""
        return self.returns if self.inflow else self.closed_loop

    @property
    def roster(self) -> bool:
        """Whether running requests are listed in the order of admission, which is not that of arrival: roster.py."""
        return self.ends or (self.priority and self.prefix)

    @property
    def ticket(self) -> int:
        return ROSTER_TICKET if self.roster else TICKET

    @property
    def visitor(self) -> int:
        return ROSTER_VISITOR if self.roster else VISITOR

    @property
    def segment_rows(self) -> int:
        return 0

    @property
    def node_rows(self) -> int:
        return (self.segments + 1) * SEGMENT

    @property
    def visitor_rows(self) -> int:
        return self.node_rows + (self.nodes + self.tail) * NODE  # the last node stands for blocks without a key

    @property
    def hold_rows(self) -> int:
        return self.visitor_rows + (self.requests + 1) * self.visitor

    @property
    def prefix_sinks(self) -> int:
        return self.hold_rows + (self.holds + 1) * HOLD

    @property
    def prefix_memory(self) -> int:
        return self.prefix_sinks + (TAIL_SINKS if self.tail else PREFIX_SINKS)

    @property
    def tops(self) -> int:
        """Words of 32 bits that say which of the calendar's words are not empty."""
        return -(-self.ring // 1024)


class Knobs(NamedTuple):
    """What one simulation is run with; scalars, int32 unless noted."""

    num_requests: jax.Array
    seats: jax.Array  # max_num_active_seqs or max_num_seqs
    slots: jax.Array  # max_num_seqs
    budget: jax.Array  # max_num_batched_tokens
    blocks: jax.Array  # usable: without the null block
    block_size: jax.Array
    watermark: jax.Array  # blocks
    chunked: jax.Array  # bool
    full_isl: jax.Array  # bool, scheduler_reserve_full_isl
    threshold: jax.Array
    adaptive: jax.Array  # bool
    lifted: jax.Array  # bool, the threshold does not hold for a lone request
    patience: jax.Array  # iterations without a token after which the simulation is stuck
    leap: jax.Array  # most iterations in one step beyond the first
    padding: jax.Array  # bool, static batching bills finished rows
    wait_ps: jax.Array  # int64, static batching waits for a full batch
    think_ps: jax.Array  # int64, a client's pause between requests
    queue_limit: jax.Array  # max_queued_requests
    swaps: jax.Array  # bool, preemption_mode="swap"
    cpu_blocks: jax.Array  # num_cpu_blocks
    swap_block_ps: jax.Array  # int64, to move a block between GPU and CPU memory
    chains: jax.Array  # which of the tables of chains
    table: jax.Array  # which of the cost tables
    step_ps: jax.Array  # int64, as the next ones
    prefill_token_ps: jax.Array
    prefill_seq_ps: jax.Array
    decode_seq_ps: jax.Array
    decode_ctx_ps: jax.Array
    prefill_ctx_ps: jax.Array
    pair_ps: jax.Array


class Tables(NamedTuple):
    """Cost tables that simulations share; shape [tables, length] int64 each."""

    linear_ps: jax.Array
    decode_base_ps: jax.Array
    decode_ctx_ps: jax.Array


def join_time(low: jax.Array, high: jax.Array) -> jax.Array:
    """int64 from its two int32 words, any shape."""
    return (high.astype(jnp.int64) << 32) | low.astype(jnp.uint32).astype(jnp.int64)


def split_time(time_ps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The low and the high int32 word of an int64, any shape."""
    return time_ps.astype(jnp.int32), (time_ps >> 32).astype(jnp.int32)


def read(memory: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """`size` consecutive cells; the start must be within bounds."""
    dimensions = lax.GatherDimensionNumbers(offset_dims=(0,), collapsed_slice_dims=(), start_index_map=(0,))
    return lax.gather(memory, start[None], dimensions, (size,), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def read_row(memory: jax.Array, request: jax.Array) -> jax.Array:
    """The row of a request, [ROW] int32; any row for NONE."""
    return read(memory, jnp.maximum(request, 0) * ROW, ROW)


def arrivals(limits: Limits, memory: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Arrival times of requests `first` and `first + 1`, int64, INFINITE where unknown."""
    words = read(memory, limits.arrivals + 2 * first, 4)
    return join_time(words[0], words[1]), join_time(words[2], words[3])


def arrived_by(limits: Limits, memory: jax.Array, first: jax.Array, time_ps: jax.Array) -> jax.Array:
    """How many of the requests from `first` on have arrived at a time, by bisection; int32."""
    position = first
    for power in reversed(range(limits.requests.bit_length())):
        probe = position + (1 << power)
        last = jnp.minimum(probe, limits.requests + 1) - 1
        words = read(memory, limits.arrivals + 2 * last, 2)
        inside = (probe <= limits.requests) & (join_time(words[0], words[1]) <= time_ps)
        position = jnp.where(inside, probe, position)
    return position - first


def read_cell(memory: jax.Array, index: jax.Array) -> jax.Array:
    return read(memory, index, 1)[0]


def write_windows(memory: jax.Array, starts: list[jax.Array], windows: list[jax.Array]) -> jax.Array:
    """Write windows of WINDOW cells that do not overlap."""
    dimensions = lax.ScatterDimensionNumbers((1,), (), (0,))
    return lax.scatter(
        memory,
        jnp.stack(starts)[:, None],
        jnp.stack(windows),
        dimensions,
        indices_are_sorted=False,
        unique_indices=True,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def write_cells(memory: jax.Array, sinks: int, cells: list[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
    """Write `(condition, index, value)` where the condition holds; indices of writes that happen must differ."""
    indices = jnp.stack([jnp.where(happens, index, sinks + i) for i, (happens, index, _) in enumerate(cells)])
    values = jnp.stack([value for _, _, value in cells])
    return memory.at[indices].set(values, unique_indices=True, mode="promise_in_bounds")
