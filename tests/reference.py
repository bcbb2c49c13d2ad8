"""A slow simulator of the scheduler in plain Python: the oracle for the engine.

Rules: vLLM 0.33.0's V1 scheduler (v1/core/sched/scheduler.py, v1/core/kv_cache_manager.py), sync and async, both
policies, with and without prefix caching (blocks in block_pool.py), and the three rules in which 0.11 and 0.20 differ;
static batching to compare with; open and closed loop. Every iteration visits every running request and every block. All
times are integer picoseconds, all arithmetic is Python's: nothing rounds, nothing overflows.

Where the rules leave room, this is what is meant:
- A pool too small for a request can make it preempt and recompute itself for ever. Progress is a sampled token, or a
  chunk that takes a request further than it ever was. The oldest running request advances in each iteration until it
  samples, so a run that can go on progresses at least once in max(P + O) iterations; STUCK is declared after
  4 * requests + 1000 + max(P + O) rows without progress.
- With `static_padding`, n_decode, ctx_sum and totals.decode_tokens count the rows billed; `sched` lists those that
  still produce.
- In static batching a request is first scheduled when its own first chunk is, admitted when its batch starts.
- max_iters bounds the number of rows (zero-duration rows included); a run that needs more is TRUNCATED.
- A victim's tokens whose KV goes to CPU memory are those of all iterations scheduled before, the one in flight among
  them. One that the iteration in flight ends is not swapped: it only waits for its last token.
- Blocks that a swapped request leaves on the GPU keep their keys until they are taken, and it may find them when it
  comes back: what it finds need not be copied.
- A client that max_queued_requests turns away hears of it at the end of the iteration that this schedule() call
  schedules; if that is none, at the end of the one in flight or, without one, at once. Then it thinks and comes again
  with the next request, as after an answer.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from block_pool import BlockPool, chains, token_identities


class Case(NamedTuple):
    """One simulation. `engine` and `cost` have the attributes of EngineConfig and CostTable of the engine."""

    arrivals_ps: list[int]  # [N], any order
    prompts: list[int]  # [N] tokens, 1 <= P < max_model_len
    outputs: list[int]  # [N] tokens, >= 1; min(O, max_model_len - P) are produced
    engine: Any
    cost: Any
    clients: int | None = None  # closed loop with so many clients; arrivals_ps is ignored
    think_ps: int = 0  # from a client's finish to its next request
    segments: list | None = None  # per request its prompt's (stream, start, length), or None for a private stream
    output_streams: list | None = None  # per request the stream of its output tokens, or None for a private one
    priorities: list[int] | None = None  # lower is served first under the policy "priority"


class Totals(NamedTuple):
    """Exact sums over iterations (schedule() calls with tokens), all counts taken right after schedule()."""

    iterations: int
    t0: int  # first arrival
    t1: int  # end of the last iteration, or the later arrival of the request that is stuck
    prefill_tokens: int
    decode_tokens: int
    kv_block_ps: int  # blocks in use x duration
    kv_peak_blocks: int
    above_90_ps: int  # time with more than 90 % of the usable blocks in use
    running_max: int
    running_ps: int  # running requests x duration
    waiting_max: int  # zero-duration rows included
    waiting_ps: int  # requests x time between arrival or preemption and being scheduled (or t1)
    slot_rows: int  # running requests; static: those not finished
    num_preemptions: int
    recomputed_tokens: int  # tokens that victims had computed
    refused_seats: int  # iterations that left somebody waiting, by reason
    refused_budget: int
    refused_kv: int
    itl: dict[int, int]  # bin (see itl_bin) -> output tokens after a request's first


class Result(NamedTuple):
    iters: list[list[Any]]  # golden columns, times in ps
    reqs: list[list[Any]]  # golden columns, times in ps, None for never
    status: str  # DONE, STUCK or TRUNCATED
    recomputed: list[int]  # [N] tokens
    totals: Totals
    rejected: list[bool]  # [N]
    stalled: int = 0  # rows without progress at the end: 0 where a STUCK head was refused, many in an endless loop


@dataclass(eq=False)
class Request:
    rid: int
    prompt: int
    output: int  # tokens it will produce
    arrival: int | None  # None: its client has not sent it
    computed: int = 0  # tokens with KV
    out: int = 0  # tokens sampled
    in_flight: int = 0  # tokens that scheduled iterations will sample
    held: int = 0  # KV blocks
    priority: int = 0
    chain: list[int] = field(default_factory=list)  # keys of its full blocks, outputs included
    blocks: list[int] = field(default_factory=list)
    hashed: int = 0  # of its blocks, those that have their key
    furthest: int = 0  # largest `computed` so far
    waiting_since: int | None = None
    first_sched: int | None = None
    first_token: int | None = None
    last_token: int = 0
    finish: int | None = None
    preemptions: int = 0
    recomputed: int = 0
    hit_first: int | None = None
    hit_resumed: int = 0
    swapped: int = 0  # tokens whose KV is in CPU memory
    rejected: bool = False

    @property
    def known(self) -> int:
        return self.prompt + self.out

    @property
    def expected(self) -> int:
        return self.known + self.in_flight

    @property
    def ends_in_flight(self) -> bool:
        return self.in_flight > 0 and self.computed + 2 - self.in_flight >= self.prompt + self.output

    @property
    def done(self) -> bool:
        return self.out >= self.output


class Row(NamedTuple):
    """One request's part in an iteration."""

    request: Request
    n: int
    computed: int  # before the iteration
    decode: bool
    samples: bool


@dataclass
class Step:
    """What one schedule() call decided."""

    rows: list[Row] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[tuple[Request, int, int]] = field(default_factory=list)  # request, tokens at hand, cached ones
    padding: list[int] = field(default_factory=list)  # contexts after the step of finished rows that are billed
    refused: str | None = None  # why the head of the queue stays there
    wake: int | None = None  # an empty step: when to try again, arrivals apart

    def run(self, request: Request, n: int) -> None:
        decode = request.out + request.in_flight > 0 and request.computed + 1 == request.expected
        self.rows.append(Row(request, n, request.computed, decode, request.computed + n == request.expected))

    def commit(self) -> "Step":
        for row in self.rows:
            row.request.computed += row.n
            row.request.in_flight += row.samples
        return self


@dataclass
class Flight:
    """An iteration under way."""

    row: list[Any]  # golden columns
    rows: list[Row]
    end: int
    rejected: int = 0  # clients that hear at its end that they were turned away


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class Continuous:
    """vLLM's scheduler: pass 1 over the running requests, pass 2 over the queue, one token budget."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.usable = engine.num_gpu_blocks - 1
        self.pool = BlockPool(self.usable, engine.freed_unhashed_blocks == "front")
        self.watermark = int(engine.watermark * engine.num_gpu_blocks)
        self.cap = engine.max_num_active_seqs or engine.max_num_seqs
        self.by_priority = engine.policy == "priority"
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.swapped: deque[Request] = deque()
        self.swaps = getattr(engine, "preemption_mode", "recompute") == "swap"
        self.cpu_free = getattr(engine, "num_cpu_blocks", 0)
        self.moved = 0  # blocks, out and in, that no iteration has paid for yet
        self.queue_limit = getattr(engine, "max_queued_requests", None)

    @property
    def free(self) -> int:
        return self.pool.free

    @property
    def queue(self) -> list[Request]:
        """All that wait, those in CPU memory first."""
        return [*self.swapped, *self.waiting]

    def arrive(self, requests: list[Request]) -> int:
        """Queue those that find room; how many do not."""
        rejected = 0
        for request in requests:
            if self.queue_limit is not None and len(self.queue) >= self.queue_limit:
                request.rejected, request.waiting_since = True, None
                rejected += 1
            else:
                self.waiting.append(request)
        self.sort()
        return rejected

    def sort(self) -> None:
        if self.by_priority:
            key = lambda r: (r.priority, r.arrival, r.rid)  # noqa: E731
            self.waiting, self.swapped = deque(sorted(self.waiting, key=key)), deque(sorted(self.swapped, key=key))

    def schedule(self, clock: int) -> Step:
        step, budget, threshold = Step(), self.engine.max_num_batched_tokens, self.threshold()
        budget = self.continue_running(step, budget, threshold)
        if not step.preempted:
            budget = self.admit(step, budget, threshold)
        if self.queue:
            step.refused = self.refusal(step, budget, threshold)
        return step.commit()

    def threshold(self) -> int:
        """Longest chunk of this call, 0 for no limit."""
        load, threshold = len(self.running) + len(self.queue), self.engine.long_prefill_token_threshold
        if threshold <= 0 or (load <= 1 and self.engine.lone_request_without_threshold):
            return 0
        if self.engine.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, self.engine.max_num_batched_tokens // max(load, 1))
        return threshold

    def continue_running(self, step: Step, budget: int, threshold: int) -> int:
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            if request.ends_in_flight:
                position += 1
                continue
            n = self.chunk(request.expected - request.computed, threshold)
            n = min(n, budget, self.engine.max_model_len - request.computed - 1)
            target = self.blocks(request.computed + n)
            victim = None
            while max(target - len(request.blocks), 0) > self.free:
                victim = self.victim()
                before = self.running.index(victim) < position
                budget += self.preempt(victim, step)
                position -= before
                if victim is request:
                    break
            if victim is request:
                if self.by_priority and self.engine.self_preemption == "continues":
                    continue
                return budget
            self.allocate(request, target, request.computed + n)
            step.run(request, n)
            budget -= n
            position += 1
        return budget

    def victim(self) -> Request:
        if self.by_priority:
            return max(self.running, key=lambda r: (r.priority, r.arrival))
        return self.running[-1]

    def admit(self, step: Step, budget: int, threshold: int) -> int:
        while budget > 0 and len(self.running) < self.cap:
            # Requests preempted with an iteration in flight are passed over until that has ended.
            request = next((request for request in self.queue if not request.in_flight), None)
            if request is None:
                break
            hits = self.lookup(request)
            hit = max(len(hits) * self.engine.block_size, request.swapped)
            n = self.chunk(request.known - hit, threshold)
            if n > budget and not self.engine.enable_chunked_prefill:
                break
            n = min(n, budget)
            spare = self.free - self.pool.idle(hits) - (self.watermark if self.running else 0)
            if self.engine.scheduler_reserve_full_isl and self.blocks(request.known) - len(hits) > spare:
                break
            if self.blocks(hit + n) - len(hits) > spare:
                break
            self.leave_queue(request, len(hits))
            self.running.append(request)
            step.admitted.append((request, hit, len(hits) * self.engine.block_size))
            request.computed, request.hashed = hit, len(hits)
            self.pool.touch(hits)
            request.blocks = hits
            self.allocate(request, self.blocks(hit + n), hit + n)
            step.run(request, n)
            budget -= n
        return budget

    def leave_queue(self, request: Request, hits: int) -> None:
        if request.swapped:
            self.swapped.remove(request)
            blocks = self.blocks(request.swapped)
            self.cpu_free += blocks
            self.moved += max(blocks - hits, 0)
            request.swapped = 0
        else:
            self.waiting.remove(request)

    def lookup(self, request: Request) -> list[int]:
        if not self.engine.enable_prefix_caching:
            return []
        return self.pool.lookup(request.chain, (request.known - 1) // self.engine.block_size)

    def refusal(self, step: Step, budget: int, threshold: int) -> str:
        if step.preempted:
            return "kv"
        if len(self.running) >= self.cap:
            return "seats"
        head = self.queue[0]
        hit = max(len(self.lookup(head)) * self.engine.block_size, head.swapped)
        n = self.chunk(head.known - hit, threshold)
        if budget == 0 or (n > budget and not self.engine.enable_chunked_prefill):
            return "budget"
        return "kv"

    def chunk(self, n: int, threshold: int) -> int:
        return min(n, threshold) if threshold > 0 else n

    def blocks(self, tokens: int) -> int:
        return blocks_for(min(tokens, self.engine.max_model_len), self.engine.block_size)

    def allocate(self, request: Request, target: int, computed: int) -> None:
        """Take blocks up to `target` and give those that will be full with `computed` tokens their keys."""
        request.blocks += self.pool.take(max(target - len(request.blocks), 0))
        self.register(request, min(computed, request.known))

    def register(self, request: Request, tokens: int) -> None:
        if self.engine.enable_prefix_caching:
            full = tokens // self.engine.block_size
            for j in range(request.hashed, full):
                self.pool.register(request.blocks[j], request.chain[j])
            request.hashed = max(request.hashed, full)

    def release(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.blocks)
        request.blocks, request.hashed = [], 0

    def preempt(self, victim: Request, step: Step) -> int:
        """Preempt; the tokens that this step had given to the victim."""
        self.release(victim)
        victim.preemptions += 1
        blocks = self.blocks(victim.computed)
        if self.swaps and not victim.ends_in_flight and 0 < blocks <= self.cpu_free:
            self.cpu_free -= blocks
            self.moved += blocks
            victim.swapped = victim.computed
            self.swapped.appendleft(victim)
        else:
            victim.recomputed += victim.computed
            self.waiting.appendleft(victim)
        victim.computed = 0
        self.sort()
        step.preempted.append(victim)
        returned = sum(row.n for row in step.rows if row.request is victim)
        step.rows = [row for row in step.rows if row.request is not victim]
        return returned

    def sampled(self, request: Request) -> None:
        """Give its key to a block that the token just sampled completes (async: it had none when it was scheduled)."""
        if request in self.running:
            self.register(request, min(request.computed - request.in_flight, request.known))

    def finish(self, request: Request) -> None:
        if request in self.running:
            self.release(request)
        else:
            self.waiting.remove(request)

    def pay(self, step: Step) -> int:
        """Blocks that an iteration pays for moving; one that schedules nothing leaves them to the next."""
        moved = self.moved if step.rows else 0
        self.moved -= moved
        return moved

    def slots_used(self) -> int:
        return len(self.running)


class Static:
    """A batch is prefilled, then decoded in lockstep, and holds its slots and blocks until its longest row ends."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.usable = self.free = engine.num_gpu_blocks - 1
        self.running: list[Request] = []  # the batch in progress, finished rows included
        self.waiting: deque[Request] = deque()
        self.decoded = 0  # lockstep iterations of the batch so far

    @property
    def queue(self) -> deque[Request]:
        return self.waiting

    def pay(self, step: Step) -> int:
        return 0

    def arrive(self, requests: list[Request]) -> int:
        self.waiting.extend(requests)
        return 0

    def schedule(self, clock: int) -> Step:
        step = Step()
        if not self.running:
            self.start_batch(step, clock)
        if any(request.computed < request.prompt for request in self.running):
            self.prefill(step)
        elif self.running:
            self.decode(step)
        step.refused = "seats" if self.waiting else None
        return step.commit()

    def start_batch(self, step: Step, clock: int) -> None:
        batch, free = [], self.free
        for request in self.waiting:
            request.held = blocks_for(request.prompt + request.output, self.engine.block_size)
            if len(batch) == self.engine.max_num_seqs or request.held > free:
                break
            batch.append(request)
            free -= request.held
        if self.engine.static_wait_s > 0 and len(batch) < self.engine.max_num_seqs and len(batch) == len(self.waiting):
            head = batch[0]
            assert head.arrival is not None
            deadline = head.arrival + round(self.engine.static_wait_s * 1e12)
            if clock < deadline:
                step.wake = deadline
                return
        for request in batch:
            self.waiting.popleft()
            step.admitted.append((request, 0, 0))
        self.running, self.free, self.decoded = batch, free, 0

    def prefill(self, step: Step) -> None:
        budget = self.engine.max_num_batched_tokens
        for request in self.running:
            left = request.prompt - request.computed
            n = min(left, budget)
            if n < left and not self.engine.enable_chunked_prefill:
                break
            if n > 0:
                step.run(request, n)
                budget -= n

    def decode(self, step: Step) -> None:
        self.decoded += 1
        for request in self.running:
            if not request.done:
                step.run(request, 1)
            elif self.engine.static_padding:
                step.padding.append(request.prompt + self.decoded)

    def sampled(self, request: Request) -> None:
        pass

    def finish(self, request: Request) -> None:
        if all(row.done for row in self.running):
            self.free += sum(row.held for row in self.running)
            self.running = []

    def slots_used(self) -> int:
        return sum(not request.done for request in self.running)


class Arrivals:
    """Requests still to come, in (arrival, index) order."""

    def __init__(self, case: Case, requests: list[Request]):
        self.think_ps = case.think_ps
        sent = [(request.arrival, request) for request in requests if request.arrival is not None]
        self.coming = deque(sorted(sent, key=lambda pair: (pair[0], pair[1].rid)))
        self.unsent = deque(requests[len(sent) :])  # closed loop: those that wait for a client, in list order

    def next(self) -> int | None:
        return self.coming[0][0] if self.coming else None

    def take(self, clock: int) -> list[Request]:
        arrived = []
        while self.coming and self.coming[0][0] <= clock:
            arrived.append(self.coming.popleft()[1])
        return arrived

    def clients_return(self, clock: int, clients: int) -> None:
        for _ in range(min(clients, len(self.unsent))):
            request = self.unsent.popleft()
            request.arrival = request.waiting_since = clock + self.think_ps
            self.coming.append((request.arrival, request))


class Bill(NamedTuple):
    """An iteration's columns: tokens, rows, tokens of context and picoseconds."""

    prefill_tokens: int
    decode_rows: int
    ctx_sum: int
    duration: int


def bill(cost: Any, step: Step, swapped: int = 0) -> Bill:
    """The price of an iteration under a CostTable, and the quantities that it depends on; blocks of `swapped` tokens
    were moved out and in."""
    chunks = [(row.computed, row.n) for row in step.rows if not row.decode]
    contexts = [row.computed + row.n for row in step.rows if row.decode] + step.padding
    prefill_tokens, prefill_ctx = sum(n for _, n in chunks), sum(computed + n for computed, n in chunks)
    decode_rows, decode_ctx = len(contexts), sum(contexts)
    if not step.rows:
        return Bill(0, 0, 0, 0)

    def entry(table: Any, index: int) -> int:
        return 0 if table is None else int(table[index])

    duration = (
        int(cost.step_ps)
        + entry(cost.linear_ps, prefill_tokens + decode_rows)
        + int(cost.prefill_token_ps) * prefill_tokens
        + int(cost.prefill_seq_ps) * len(chunks)
        + int(cost.decode_seq_ps) * decode_rows
        + entry(cost.decode_base_ps, decode_rows)
        + (int(cost.decode_ctx_ps) + entry(cost.decode_ctx_table_ps, decode_rows)) * decode_ctx
        + int(cost.prefill_ctx_ps) * prefill_ctx
        + int(cost.pair_ps) * sum(n * computed + n * (n + 1) // 2 for computed, n in chunks)
        + int(getattr(cost, "swap_token_ps", 0)) * swapped
    )
    return Bill(prefill_tokens, decode_rows, prefill_ctx + decode_ctx, duration)


def itl_bin(gap_ps: int) -> int:
    """Index of the histogram bin: eight per octave from 2**26 ps on, 200 in all, the ends open."""
    octave = gap_ps.bit_length() - 1
    if octave < 26:
        return 0
    return min(8 * (octave - 26) + ((gap_ps >> (octave - 3)) & 7), 199)


def simulate(case: Case, max_iters: int | None = None) -> Result:
    """Run one case to its end. ValueError for a request that the front end would refuse."""
    requests = make_requests(case)
    arrivals = Arrivals(case, requests)
    policy = Static(case.engine) if case.engine.batching == "static" else Continuous(case.engine)
    patience = 4 * len(requests) + 1000 + max((r.prompt + r.output for r in requests), default=0)
    first = arrivals.next() or 0
    asynchronous = getattr(case.engine, "async_scheduling", False)
    depth = 2 if asynchronous else 1
    in_flight: deque[Flight] = deque()
    clock, last_end, stalled, iters, count, itl = first, first, 0, [], Counter(), Counter()

    while True:
        rejected = policy.arrive(arrivals.take(clock))
        if max_iters is not None and len(iters) >= max_iters:
            status = "TRUNCATED"
            break
        if stalled > patience:
            status = "STUCK"
            break
        step = Step()
        if len(in_flight) < depth and (policy.running or policy.queue):
            step = policy.schedule(clock)
        if step.rows or step.preempted:
            price, start = bill(case.cost, step, policy.pay(step) * case.engine.block_size), max(clock, last_end)
            row = [len(iters), start, price.duration, len(policy.running), len(policy.queue)]
            row += [price.prefill_tokens, price.decode_rows, price.ctx_sum, policy.free]
            row += [[value for r in step.rows for value in (r.request.rid, r.n)], [r.rid for r in step.preempted]]
            row += [[value for r, hit, _ in step.admitted for value in (r.rid, hit)], []]
            row += [clock] if asynchronous else []
            iters.append(row)
            note_queue_times(step, start, count)
            count["waiting_max"] = max(count["waiting_max"], len(policy.queue))
            stalled = 0 if makes_progress(step) else stalled + 1
            if step.rows:
                last_end = start + price.duration
                note_iteration(policy, step, price, count)
                in_flight.append(Flight(row, step.rows, last_end))
        if in_flight:
            in_flight[-1].rejected += rejected
        else:
            arrivals.clients_return(clock, rejected)
        if step.rows or (step.preempted and not in_flight):
            continue
        if in_flight:
            flight = in_flight.popleft()
            row, end = flight.row, flight.end
            clock = max(clock, end)
            arrivals.clients_return(end, flight.rejected)
            for request in [r.request for r in flight.rows if r.samples]:
                finished = sample(request, end, itl)
                policy.sampled(request)
                if finished:
                    row[12].append(request.rid)
                    if request.waiting_since is not None:  # preempted with its last token in flight
                        count["waiting_ps"] += end - request.waiting_since
                        request.waiting_since = None
                    policy.finish(request)
                    arrivals.clients_return(end, 1)
            continue
        later = [time for time in (arrivals.next(), step.wake) if time is not None]
        if not later:
            status = "STUCK" if policy.running or policy.queue else "DONE"
            if policy.queue:
                last_end = max(last_end, policy.queue[0].waiting_since or 0)
            break
        clock = min(later)

    for request in requests:
        if request.waiting_since is not None:
            count["waiting_ps"] += max(last_end - request.waiting_since, 0)
    recomputed = [request.recomputed for request in requests]
    count["recomputed_tokens"] = sum(recomputed)
    sums = {name: count[name] for name in Totals._fields if name not in ("t0", "t1", "itl")}
    totals = Totals(**sums, t0=first, t1=last_end, itl=dict(itl))
    reqs = [
        [r.rid, r.arrival, r.first_sched, r.first_token, r.finish, r.preemptions, r.hit_first, r.hit_resumed, r.out]
        for r in requests
    ]
    return Result(iters, reqs, status, recomputed, totals, [r.rejected for r in requests], stalled)


def make_requests(case: Case) -> list[Request]:
    limit, requests = case.engine.max_model_len, []
    sent = len(case.prompts) if case.clients is None else case.clients
    for rid, (arrival, prompt, output) in enumerate(zip(case.arrivals_ps, case.prompts, case.outputs, strict=True)):
        if not 1 <= prompt < limit or output < 1:
            raise ValueError(f"request {rid}: prompt {prompt}, output {output}, max_model_len {limit}")
        when = None if rid >= sent else int(arrival) if case.clients is None else 0
        produced = min(int(output), limit - int(prompt), getattr(case.engine, "max_new_tokens", None) or limit)
        requests.append(Request(rid, int(prompt), produced, when, waiting_since=when))
    if case.priorities is not None:
        for request, priority in zip(requests, case.priorities, strict=True):
            request.priority = priority
    if case.engine.enable_prefix_caching:
        prompts, outputs = [r.prompt for r in requests], [r.output for r in requests]
        sequences = token_identities(prompts, outputs, case.segments, case.output_streams)
        for request, chain in zip(requests, chains(sequences, case.engine.block_size), strict=True):
            request.chain = chain
    return requests


def note_queue_times(step: Step, clock: int, count: Counter) -> None:
    """Open and close the requests' spells of waiting; hits by admission and re-admission."""
    for request in step.preempted:
        request.waiting_since = clock
        count["num_preemptions"] += 1
    for request, _, hit in step.admitted:
        if request.hit_first is None:
            request.hit_first = hit
        else:
            request.hit_resumed += hit
    for row in step.rows:
        request = row.request
        if request.first_sched is None:
            request.first_sched = clock
        if request.waiting_since is not None:
            count["waiting_ps"] += clock - request.waiting_since
            request.waiting_since = None


def note_iteration(policy: Continuous | Static, step: Step, price: Bill, count: Counter) -> None:
    used, running = policy.usable - policy.free, len(policy.running)
    count["iterations"] += 1
    count["prefill_tokens"] += price.prefill_tokens
    count["decode_tokens"] += price.decode_rows
    count["kv_block_ps"] += used * price.duration
    count["kv_peak_blocks"] = max(count["kv_peak_blocks"], used)
    count["above_90_ps"] += price.duration if 10 * used > 9 * policy.usable else 0
    count["running_max"] = max(count["running_max"], running)
    count["running_ps"] += running * price.duration
    count["slot_rows"] += policy.slots_used()
    if step.refused is not None:
        count[f"refused_{step.refused}"] += 1


def makes_progress(step: Step) -> bool:
    """Whether the step samples a token or computes one that its request never had computed before."""
    progress = any(row.samples for row in step.rows)
    for row in step.rows:
        if row.request.computed > row.request.furthest:
            row.request.furthest, progress = row.request.computed, True
    return progress


def sample(request: Request, end: int, itl: Counter) -> bool:
    """Give the request a token at `end`; True if it was its last."""
    if request.out == 0:
        request.first_token = end
    else:
        itl[itl_bin(end - request.last_token)] += 1
    request.out += 1
    request.in_flight -= 1
    request.last_token = end
    if request.done:
        request.finish = end
    return request.done
