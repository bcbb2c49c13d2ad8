"""Many simulations at once: lanes that are stepped together and refilled as their simulations end.

Simulations end at different times; a batch that waited for its slowest would waste lanes as static batching wastes
slots. So a fixed number of lanes runs in chunks of scan steps, and between chunks each finished lane hands over its
records and takes the next simulation of the queue: one compile for a sweep of any size.

In the shapes, `W` is the number of lanes of all devices together, `N` the padded number of requests, `K` the number of
distinct request lists.
"""

import functools
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

    return lax.scan(lambda state, _: jax.vmap(one)(knobs, state), state, length=steps)


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
    limits: Limits, traces: Traces, knobs: Knobs, state: State, count: jax.Array, lanes: jax.Array, jobs: Job
) -> tuple[Knobs, State]:
    """Load jobs[lane] into the lanes lanes[i] for i < count[0]; one device's share.

    The small arrays are chosen for all lanes at once; the large ones are written for these lanes only.
    """
    old, large = apart(state)
    old = old._replace(memory=state.status)
    if old.cache is not None:
        old = old._replace(cache=old.cache._replace(memory=state.status))
    width = state.status.shape[0]
    listed = jnp.where(jnp.arange(width, dtype=jnp.int32) < count[0], lanes, width)
    starts = jnp.zeros(width, bool).at[listed].set(True, mode="drop")
    fresh = jax.vmap(lambda job: apart(load(limits, traces, job))[0])(jobs)

    def pick(old: jax.Array, fresh: jax.Array) -> jax.Array:
        return jnp.where(starts.reshape(-1, *[1] * (old.ndim - 1)), fresh, old)

    def put(i: jax.Array, large: list[jax.Array]) -> list[jax.Array]:
        job = jax.tree.map(lambda leaf: leaf[lanes[i]], jobs)
        _, arrays = apart(load(limits, traces, job))
        return [old.at[lanes[i]].set(new) for old, new in zip(large, arrays, strict=True)]

    knobs, small = jax.tree.map(pick, (knobs, old), (jobs.knobs, fresh))
    return knobs, together(small, lax.fori_loop(0, count[0], put, large))


@functools.cache
def compiled(limits: Limits, mesh: Mesh, steps: int) -> tuple[Callable, Callable, Callable]:
    """The engine's only jits: an empty set of lanes, a refill and a chunk, sharded over the mesh."""
    lanes, everywhere = Spec(AXIS), Spec()

    def sharded(function: Callable, arguments: tuple, results: Any, donate: tuple[int, ...] = ()) -> Callable:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=arguments, out_specs=results, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)

    def blank(traces: Traces, jobs: Job) -> tuple[Knobs, State]:
        shapes = jax.eval_shape(jax.vmap(lambda job: load(limits, traces, job)), jobs)
        state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jobs.knobs, state._replace(status=jnp.full_like(state.status, Status.DONE))

    empty = sharded(blank, (everywhere, lanes), lanes)
    fill = sharded(
        functools.partial(refill, limits), (everywhere, lanes, lanes, lanes, lanes, lanes), lanes, donate=(1, 2)
    )
    events = Spec(None, AXIS)
    chunk = functools.partial(advance, limits, steps)
    arguments = (everywhere, lanes, everywhere, everywhere, lanes)
    return empty, fill, sharded(chunk, arguments, (lanes, events), donate=(4,))


def run(
    limits: Limits,
    traces: Traces,
    tables: Tables | None,
    chains: Chains | None,
    jobs: Job,
    width: int,
    devices: list[Any],
    collect: Callable[[int, Outcome], Result],
    steps: int = STEPS,
    on_events: Callable[[Event], None] | None = None,
) -> Iterator[tuple[int, Result]]:
    """Run jobs, arrays of [J], in lanes, `width` per device, and yield (index, what `collect` makes of the outcome,
    none of whose arrays it may keep) as they end."""
    with x64():
        mesh = devices_mesh(devices)
        empty, fill, chunk = compiled(limits, mesh, steps)
        whole, split = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec(AXIS))
        traces, tables, chains, on = jax.device_put((traces, tables, chains, np.bool_(True)), whole)
        total, waiting = width * len(devices), len(jobs.trace)

        def take(index: np.ndarray) -> Job:
            return jax.device_put(jax.tree.map(lambda column: column[index], jobs), split)

        knobs, state = empty(traces, take(np.zeros(total, np.int64)))
        holds = np.full(total, -1)  # the job in each lane
        queued = 0
        while True:
            free = np.flatnonzero(holds < 0)
            # Spread what is left over the devices.
            free = free[np.argsort(free % width, kind="stable")][: waiting - queued]
            if free.size:
                holds[free] = np.arange(queued, queued + free.size)
                queued += free.size
                lanes = np.zeros((len(devices), width), np.int32)
                order = np.zeros((len(devices), width), np.int64)
                count = np.zeros(len(devices), np.int32)
                for device in range(len(devices)):
                    mine = free[free // width == device]
                    count[device] = mine.size
                    lanes[device, : mine.size] = mine % width
                    order[device, mine % width] = holds[mine]
                places = jax.device_put((count, lanes.reshape(-1)), split)
                knobs, state = fill(traces, knobs, state, *places, take(order.reshape(-1)))
            if not (holds >= 0).any():
                return
            state, events = chunk(on, knobs, tables, chains, state)
            if on_events is not None:
                on_events(jax.tree.map(np.asarray, events))
            status = np.asarray(state.status)
            ended = np.flatnonzero((holds >= 0) & (status != Status.RUNNING))
            if ended.size:
                names = [*KEPT, *(["statistics"] if limits.statistics else [])]
                kept: Any = State(*[getattr(state, name) if name in names else None for name in State._fields])  # type: ignore
                kept = jax.tree.map(np.asarray, kept)
                memories = [np.asarray(shard.data) for shard in _in_order(state.memory)]
                caches = []
                if state.cache is not None:
                    caches = [np.asarray(shard.data) for shard in _in_order(state.cache.memory)]
                results = []
                for lane in ended.tolist():
                    mine = jax.tree.map(lambda leaf, lane=lane: leaf[lane], kept)
                    device, place = divmod(lane, width)
                    cache = caches[device][place] if caches else None
                    job = int(holds[lane])
                    results.append((job, collect(job, Outcome(memories[device][place], mine, cache))))
                holds[ended] = -1
                del memories, caches, cache
                yield from results


def _in_order(array: jax.Array) -> list[Any]:
    return sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
