"""Many simulations at once: lanes that are stepped together and refilled as their simulations end.

Simulations end at different times; a batch that waited for its slowest would waste lanes as static batching wastes
slots. So a fixed number of lanes runs in chunks of scan steps, and between chunks each finished lane hands over its
records and takes the next simulation of the queue: one compile for a sweep of any size.

In the shapes, `W` is the number of lanes of all devices together, `N` the padded number of requests, `K` the number of
distinct request lists.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import experimental, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from jaxsim.engine import static_batch
from jaxsim.engine.chains import Chains
from jaxsim.engine.layout import INFINITE, Knobs, Limits, Tables
from jaxsim.engine.state import Event, State, initial
from jaxsim.engine.step import step
from jaxsim.engine.types import Status

AXIS = "lanes"
STEPS = 256  # scan steps between two looks at the lanes
UNROLL = 1  # steps in one pass of the compiled loop: more are no faster on a CPU
BLOCK = 256  # lanes that an accelerator loads, or gives out, at once

# A scope around the engine's own calls: 64 bits are never turned on for the caller.
_enable_x64: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else experimental.enable_x64  # pyright: ignore[reportAttributeAccessIssue]
x64 = functools.partial(_enable_x64, True)


class Traces(NamedTuple):
    """Lists of requests in order of arrival, padded; on every device."""

    prompt: Any  # [K, N] int32
    output: Any  # [K, N] int32
    arrival_ps: Any  # [K, N] int64, INFINITE beyond the end
    ranked: Any = None  # [K, 3, N] int32 under the policy "priority", see priority.ranks


class Job(NamedTuple):
    """Simulations to run; arrays with one leading axis, or scalars for one."""

    trace: Any  # int32, index into Traces
    stretch: Any  # float64, factor on arrival times
    clients: Any  # int32, 0 for an open loop
    max_model_len: Any  # int32
    knobs: Knobs


class Ending(NamedTuple):
    """What the records need of a state besides its memory."""

    status: Any
    clock_ps: Any
    iterations: Any
    scan_steps: Any
    fresh_head: Any
    preempted_count: Any
    statistics: Any
    inflow: Any


class Outcome(NamedTuple):
    """What is left of one finished simulation, on the host: copies, so that its lane can go on."""

    memory: np.ndarray  # [Limits.memory] int32
    state: Ending
    cache: np.ndarray | None = None  # [Limits.prefix_memory] int32


def devices_mesh(devices: list[Any]) -> Mesh:
    axis_types = getattr(jax.sharding, "AxisType", None)
    more = {} if axis_types is None else {"axis_types": (axis_types.Auto,)}
    return jax.make_mesh((len(devices),), (AXIS,), devices=devices, **more)


def load(limits: Limits, traces: Traces, job: Job) -> State:
    """The initial state of a job."""
    prompt, output, arrival_ps, ranked = jax.tree.map(lambda table: table[job.trace], traces)
    index = jnp.arange(limits.requests, dtype=jnp.int32)
    exists = arrival_ps < INFINITE
    stretched = jnp.rint(arrival_ps.astype(jnp.float64) * job.stretch).astype(jnp.int64)
    sent = jnp.where(index < job.clients, 0, INFINITE)
    start = jnp.where(exists, jnp.where(job.clients > 0, sent, stretched), INFINITE)
    output = jnp.minimum(output, job.max_model_len - prompt)
    return initial(limits, prompt, output, start, job.knobs, ranked)


def advance(
    limits: Limits,
    steps: int,
    on: jax.Array,
    knobs: Knobs,
    tables: Tables | None,
    chains: Chains | None,
    state: State,
) -> tuple[State, Event | None]:
    """`steps` steps of all lanes; events have the shape [steps, W]. `on` is true, see `fence`."""

    def one(knobs: Knobs, state: State) -> tuple[State, Event | None]:
        if limits.static:
            return static_batch.step(limits, knobs, tables, state, on if limits.fenced else None)
        return step(limits, knobs, tables, chains, state, on if limits.fenced else None)

    return lax.scan(lambda state, _: jax.vmap(one)(knobs, state), state, length=steps, unroll=UNROLL)


def refill(
    limits: Limits,
    block: int,
    traces: Traces,
    knobs: Knobs,
    state: State,
    count: jax.Array,
    lanes: jax.Array,
    jobs: Job,
) -> tuple[Knobs, State]:
    """Load jobs[i] into lane lanes[i] for i < count[0], `block` at a time; one device's share.

    Of the last block some may be beyond the count: their lanes must not exist.
    """

    def put(i: jax.Array, carry: tuple[Knobs, State]) -> tuple[Knobs, State]:
        places, some = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, i * block, block), (lanes, jobs))
        fresh = some.knobs, jax.vmap(functools.partial(load, limits, traces))(some)
        return jax.tree.map(lambda old, new: old.at[places].set(new, mode="drop"), carry, fresh)

    return lax.fori_loop(0, (count[0] + block - 1) // block, put, (knobs, state))


def left(state: State) -> tuple[Ending, jax.Array, jax.Array | None]:
    """What an Outcome is made of, of all lanes."""
    ending = Ending(*(getattr(state, name) for name in Ending._fields))
    return ending, state.memory, None if state.cache is None else state.cache.memory


@functools.cache
def compiled(limits: Limits, mesh: Mesh, steps: int) -> tuple[Callable, Callable, Callable]:
    """The engine's only jits: a refill, a chunk and, of lanes that ended, what is left; sharded over the mesh."""
    lanes, everywhere = Spec(AXIS), Spec()

    def sharded(function: Callable, arguments: tuple, results: Any, donate: tuple[int, ...] = ()) -> Callable:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=arguments, out_specs=results, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)

    arguments = (everywhere, lanes, lanes, lanes, lanes, lanes)
    fill = sharded(functools.partial(refill, limits, blocks(limits)), arguments, lanes, donate=(1, 2))
    arguments = (everywhere, lanes, everywhere, everywhere, lanes)
    chunk = sharded(functools.partial(advance, limits, steps), arguments, (lanes, Spec(None, AXIS)), donate=(4,))
    pick = sharded(lambda some, state: jax.tree.map(lambda leaf: leaf[some], left(state)), (lanes, lanes), lanes)
    return fill, chunk, pick


def blocks(limits: Limits) -> int:
    """How many lanes are loaded at once: on an accelerator one by one would be all overhead."""
    return 1 if limits.fenced else BLOCK


def blank(limits: Limits, traces: Traces, jobs: Job) -> tuple[Knobs, State]:
    """Lanes in which nothing is loaded yet, one for each of the jobs: zeros, on the host, which cost no compile."""
    each = jax.vmap(functools.partial(load, limits), in_axes=(None, 0))
    shapes = jax.eval_shape(lambda traces, jobs: (jobs.knobs, each(traces, jobs)), traces, jobs)
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def run(
    limits: Limits,
    traces: Traces,
    tables: Tables | None,
    chains: Chains | None,
    jobs: Job,
    width: int,
    devices: list[Any],
    steps: int = STEPS,
    on_events: Callable[[Event], None] | None = None,
) -> Iterator[tuple[int, Outcome]]:
    """Run jobs, arrays of [J], in lanes, `width` per device, and yield (index, outcome) as they end.

    The next chunk is under way while the outcomes of the last one are looked at.
    """
    with x64():
        mesh = devices_mesh(devices)
        fill, chunk, pick = compiled(limits, mesh, steps)
        whole, split = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec(AXIS))
        traces, tables, chains, on = jax.device_put((traces, tables, chains, np.bool_(True)), whole)
        total, waiting = width * len(devices), len(jobs.trace)
        slots = -(-width // blocks(limits)) * blocks(limits)

        def take(index: np.ndarray) -> Job:
            return jax.tree.map(lambda column: column[index], jobs)

        knobs, state = jax.device_put(blank(limits, traces, take(np.zeros(total, np.int64))), split)
        stepping = on, knobs, tables, chains, state
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), stepping
        )
        compiling = threading.Thread(target=_compile, args=(chunk, shapes))
        compiling.start()
        holds = np.full(total, -1)  # the job in each lane
        queued = 0
        empty, outcomes = True, []
        while True:
            free = np.flatnonzero(holds < 0)
            # Spread what is left over the devices.
            free = free[np.argsort(free % width, kind="stable")][: waiting - queued]
            holds[free] = np.arange(queued, queued + free.size)
            queued += free.size
            # At first every lane gets a simulation; those without one of their own run the first one along.
            loaded = np.arange(total) if empty else free
            if loaded.size:
                empty = False
                lanes = np.full((len(devices), slots), width, np.int32)
                order = np.zeros((len(devices), slots), np.int64)
                count = np.zeros(len(devices), np.int32)
                for device in range(len(devices)):
                    mine = loaded[loaded // width == device]
                    count[device] = mine.size
                    lanes[device, : mine.size] = mine % width
                    order[device, : mine.size] = np.maximum(holds[mine], 0)
                places = jax.device_put((count, lanes.reshape(-1), take(order.reshape(-1))), split)
                knobs, state = fill(traces, knobs, state, *places)
            if not (holds >= 0).any():
                yield from outcomes
                return
            compiling.join()
            state, events = chunk(on, knobs, tables, chains, state)
            yield from outcomes
            if on_events is not None:
                on_events(jax.tree.map(np.asarray, events))
            status = np.asarray(state.status)
            ended = np.flatnonzero((holds >= 0) & (status != Status.RUNNING))
            outcomes = []
            if ended.size:
                found = copied(state, ended, width) if limits.fenced else fetched(pick, state, ended, width)
                outcomes = list(zip(holds[ended].tolist(), found, strict=True))
                holds[ended] = -1


def _compile(function: Any, shapes: tuple) -> None:
    """Compile a function that was jitted: JAX keeps what it has compiled, so that the first call finds it.

    What goes wrong goes wrong again in that call.
    """
    with x64(), contextlib.suppress(Exception):
        function.lower(*shapes).compile()


def copied(state: State, ended: np.ndarray, width: int) -> list[Outcome]:
    """The outcomes of the lanes `ended`, in their order, where devices share this machine's memory."""
    ending, *memories = left(state)
    ending = jax.tree.map(np.asarray, ending)
    memory, cache = map(_by_device, memories)
    return [
        Outcome(
            memory[lane // width][lane % width].copy(),
            jax.tree.map(lambda leaf, lane=lane: leaf[lane].copy(), ending),
            cache[lane // width][lane % width].copy() if cache else None,
        )
        for lane in ended
    ]


def fetched(pick: Callable, state: State, ended: np.ndarray, width: int) -> list[Outcome]:
    """The same, where they do not: nothing but these lanes leaves the devices."""
    found: dict[int, Outcome] = {}
    mine = [ended[ended // width == device] for device in range(len(state.status) // width)]
    for first in range(0, max(map(len, mine)), BLOCK):
        some = [lanes[first : first + BLOCK] for lanes in mine]
        places = np.stack([np.pad(lanes % width, (0, BLOCK - len(lanes))) for lanes in some]).astype(np.int32)
        picked = pick(jax.device_put(places.reshape(-1), state.status.sharding), state)
        ending, memory, cache = jax.tree.map(np.asarray, picked)
        for device, lanes in enumerate(some):
            for row, lane in enumerate(lanes, device * BLOCK):
                small = jax.tree.map(lambda leaf, row=row: leaf[row], ending)
                found[lane] = Outcome(memory[row], small, None if cache is None else cache[row])
    return [found[lane] for lane in ended]


def _by_device(array: jax.Array | None) -> list[np.ndarray]:
    """Each device's part, without copying it where it is in this machine's memory."""
    shards = [] if array is None else array.addressable_shards
    return [np.asarray(shard.data) for shard in sorted(shards, key=lambda shard: shard.index[0].start or 0)]
