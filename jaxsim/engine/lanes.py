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
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

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


Result = TypeVar("Result")


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


class Outcome(NamedTuple):
    """What one finished simulation leaves, on the host: views that the next chunk of steps invalidates."""

    memory: np.ndarray  # [Limits.memory] int32
    state: State  # `KEPT`, None for the rest
    cache: np.ndarray | None = None  # [Limits.prefix_memory] int32


KEPT = ("status", "clock_ps", "iterations", "scan_steps", "fresh_head", "preempted_count", "inflow")


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


def apart(state: State) -> tuple[State, list[jax.Array]]:
    """The state without its large arrays, and these."""
    small, large = state._replace(memory=jnp.int32(0)), [state.memory]
    if state.cache is not None:
        small, large = small._replace(cache=state.cache._replace(memory=jnp.int32(0))), [*large, state.cache.memory]
    return small, large


def together(state: State, large: list[jax.Array]) -> State:
    """The inverse of `apart`."""
    cache = state.cache if state.cache is None else state.cache._replace(memory=large[1])
    return state._replace(memory=large[0], cache=cache)


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
    """Load jobs[lane] into the lanes lanes[i] for i < count[0]; one device's share.

    The small arrays are chosen for all lanes at once; the large ones are written for these lanes only, `block` at a
    time: of the last block some may be beyond the count, whose lanes must not exist.
    """
    old, large = apart(state)
    width = state.status.shape[0]
    listed = jnp.where(jnp.arange(lanes.shape[0], dtype=jnp.int32) < count[0], lanes, width)
    starts = jnp.zeros(width, bool).at[listed].set(True, mode="drop")
    fresh = jax.vmap(lambda job: apart(load(limits, traces, job))[0])(jobs)

    def pick(old: jax.Array, fresh: jax.Array) -> jax.Array:
        return jnp.where(starts.reshape(-1, *[1] * (old.ndim - 1)), fresh, old)

    def put(i: jax.Array, large: list[jax.Array]) -> list[jax.Array]:
        places = lax.dynamic_slice_in_dim(lanes, i * block, block)
        some = jax.tree.map(lambda leaf: leaf.at[places].get(mode="clip"), jobs)
        arrays = jax.vmap(lambda job: apart(load(limits, traces, job))[1])(some)
        return [old.at[places].set(new, mode="drop") for old, new in zip(large, arrays, strict=True)]

    knobs, small = jax.tree.map(pick, (knobs, old), (jobs.knobs, fresh))
    return knobs, together(small, lax.fori_loop(0, (count[0] + block - 1) // block, put, large))


def left(limits: Limits, state: State) -> tuple[State, jax.Array, jax.Array | None]:
    """What an Outcome is made of, of all lanes: the small part, the memory and the cache's."""
    names = [*KEPT, *(["statistics"] if limits.statistics else [])]
    kept: Any = [getattr(state, name) if name in names else None for name in State._fields]
    return State(*kept), state.memory, None if state.cache is None else state.cache.memory


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

    def pick(some: jax.Array, state: State) -> Any:
        return jax.tree.map(lambda leaf: leaf[some], left(limits, state))

    return fill, chunk, sharded(pick, (lanes, lanes), lanes)


def blocks(limits: Limits) -> int:
    """How many lanes are loaded at once: on an accelerator one by one would be all overhead."""
    return 1 if limits.fenced else BLOCK


@functools.cache
def _loaded(limits: Limits) -> Any:
    each = jax.vmap(functools.partial(load, limits), in_axes=(None, 0))
    return jax.jit(lambda traces, jobs: (jobs.knobs, each(traces, jobs)))


def blank(limits: Limits, traces: Traces, jobs: Job) -> tuple[Knobs, State]:
    """Lanes in which nothing is loaded yet, one for each of the jobs: zeros, on the host, which cost no compile."""
    shapes = _loaded(limits).eval_shape(traces, jobs)
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def run(
    limits: Limits,
    traces: Traces,
    tables: Tables | None,
    chains: Chains | None,
    jobs: Job,
    queue: deque[int],
    width: int,
    devices: list[Any],
    collect: Callable[[int, Outcome], Result],
    steps: int = STEPS,
    on_events: Callable[[Event], None] | None = None,
) -> Iterator[Result]:
    """Run the jobs of the queue, indices into arrays of [J], in lanes, `width` per device, and yield what `collect`
    makes of each job and its outcome, none of whose arrays it may keep, as they end. It may lengthen the queue.

    The next chunk is under way while what is yielded is looked at.
    """
    with x64():
        mesh = devices_mesh(devices)
        fill, chunk, pick = compiled(limits, mesh, steps)
        whole, split = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec(AXIS))
        traces, tables, chains, on = jax.device_put((traces, tables, chains, np.bool_(True)), whole)
        total = width * len(devices)
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
        empty, results = True, []
        while True:
            free = np.flatnonzero(holds < 0)
            # Spread what is left over the devices.
            free = free[np.argsort(free % width, kind="stable")][: len(queue)]
            holds[free] = [queue.popleft() for _ in free]
            # At first every lane gets a simulation; those without one of their own run the first one along.
            loaded = np.arange(total) if empty else free
            if loaded.size:
                empty = False
                lanes = np.full((len(devices), slots), width, np.int32)
                order = np.zeros((len(devices), width), np.int64)
                count = np.zeros(len(devices), np.int32)
                for device in range(len(devices)):
                    mine = loaded[loaded // width == device]
                    count[device] = mine.size
                    lanes[device, : mine.size] = mine % width
                    order[device, mine % width] = np.maximum(holds[mine], 0)
                places = jax.device_put((count, lanes.reshape(-1), take(order.reshape(-1))), split)
                knobs, state = fill(traces, knobs, state, *places)
            if not (holds >= 0).any():
                yield from results
                return
            compiling.join()
            state, events = chunk(on, knobs, tables, chains, state)
            yield from results
            if on_events is not None:
                on_events(jax.tree.map(np.asarray, events))
            status = np.asarray(state.status)
            ended = np.flatnonzero((holds >= 0) & (status != Status.RUNNING))
            results = []
            if ended.size:
                outcomes = shared(limits, state, ended, width)
                if not limits.fenced:
                    outcomes = fetched(pick, state, ended, width)
                results = [collect(int(holds[lane]), outcome) for lane, outcome in outcomes]
                del outcomes  # no view may live on: the memory would be copied instead of donated
                holds[ended] = -1


def _compile(function: Any, shapes: tuple) -> None:
    """Compile a function that was jitted: JAX keeps what it has compiled, so that the first call finds it.

    What goes wrong goes wrong again in that call.
    """
    with x64(), contextlib.suppress(Exception):
        function.lower(*shapes).compile()


def shared(limits: Limits, state: State, ended: np.ndarray, width: int) -> Iterator[tuple[int, Outcome]]:
    """The lanes `ended` and their outcomes, where devices share this machine's memory."""
    kept, *memories = left(limits, state)
    kept = jax.tree.map(np.asarray, kept)
    memory, cache = map(_by_device, memories)
    for lane in ended.tolist():
        device, place = divmod(lane, width)
        small = jax.tree.map(lambda leaf, lane=lane: leaf[lane], kept)
        yield lane, Outcome(memory[device][place], small, cache[device][place] if cache else None)


def fetched(pick: Callable, state: State, ended: np.ndarray, width: int) -> Iterator[tuple[int, Outcome]]:
    """The same, where they do not: nothing but these lanes leaves the devices."""
    mine = [ended[ended // width == device] for device in range(len(state.status) // width)]
    for first in range(0, max(map(len, mine)), BLOCK):
        some = [lanes[first : first + BLOCK] for lanes in mine]
        places = np.stack([np.pad(lanes % width, (0, BLOCK - len(lanes))) for lanes in some]).astype(np.int32)
        picked = pick(jax.device_put(places.reshape(-1), state.status.sharding), state)
        kept, memory, cache = jax.tree.map(np.asarray, picked)
        for device, lanes in enumerate(some):
            for row, lane in enumerate(lanes.tolist(), device * BLOCK):
                small = jax.tree.map(lambda leaf, row=row: leaf[row], kept)
                yield lane, Outcome(memory[row], small, None if cache is None else cache[row])


def _by_device(array: jax.Array | None) -> list[np.ndarray]:
    """Each device's part, without copying it where it is in this machine's memory."""
    shards = [] if array is None else array.addressable_shards
    return [np.asarray(shard.data) for shard in sorted(shards, key=lambda shard: shard.index[0].start or 0)]
