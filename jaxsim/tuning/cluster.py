"""Simulations on the machines of a Ray cluster; their results come to the one process that asked.

A batch of simulations is a Ray task that takes the devices of one machine. Ray runs it again elsewhere when its worker
or its machine dies. Requests and iteration times go to a machine once; a batch itself is a list of small numbers.
"""

import functools
import logging
import math
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from jaxsim.errors import ConfigError
from jaxsim.runtime import prepare
from jaxsim.settings import LauncherSettings, RuntimeSettings
from jaxsim.tuning.evaluate import Evaluate, OnDone, Outcome, Simulator, Task

Item = TypeVar("Item")

BATCHES = 4  # for each that can run at once, so that a fast machine takes more of them than a slow one
ANSWER_S = 10.0
LANES = 64  # at least so many simulations of a batch on each device


def launched(settings: LauncherSettings, runtime: RuntimeSettings, simulator: Simulator) -> Evaluate:
    """What carries tasks out as the launcher says. Raises `ConfigError` where there is no such cluster."""
    return simulator if settings.kind == "local" else Cluster(settings, runtime, simulator)


class Shard(NamedTuple):
    """One of `count` shares that together are everything; `place` is from 1 on."""

    place: int
    count: int

    @classmethod
    def of(cls, text: str | None) -> "Shard":
        """From i/n; None is all there is. Raises `ConfigError`."""
        place, _, count = (text or "1/1").partition("/")
        if not (place.isdecimal() and count.isdecimal() and 1 <= int(place) <= int(count)):
            raise ConfigError("launcher.shard", text, "must be i/n with i from 1 to n, as in 1/8, or null")
        return cls(int(place), int(count))

    def mine(self, items: Sequence[Item], start: int = 0) -> list[Item]:
        """Every n-th of a list, of which `items` are those from place `start` on."""
        return [item for place, item in enumerate(items, start) if place % self.count == self.place - 1]


class Cluster:
    """An `Evaluate` on a Ray cluster. Raises `ConfigError`."""

    def __init__(self, settings: LauncherSettings, runtime: RuntimeSettings, simulator: Simulator):
        self.ray = ray = _connected(settings)
        machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
        self.cpus = settings.num_cpus or int(_smallest(machines, "CPU")) or 1
        self.gpus = settings.num_gpus if settings.num_gpus is not None else _smallest(machines, "GPU")
        self.at_once = sum(int(machine.get("CPU", 0) // self.cpus) for machine in machines)
        if not self.at_once:
            allowed = f"must be at most {int(_smallest(machines, 'CPU'))}, the cores of a machine of the cluster"
            raise ConfigError("launcher.num_cpus", self.cpus, allowed)
        self.settings = settings
        self.runtime = ray.put(replace(runtime, devices=runtime.devices or self.cpus))
        self.simulator = ray.put(simulator)
        self.costs: dict[int, tuple[Any, Any]] = {}  # by identity: the cost, held, and Ray's reference to it
        resources = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": settings.max_retries}
        self.carry_out = ray.remote(**resources)(_carry_out)

    def __call__(self, tasks: Sequence[Task], on_done: OnDone | None = None) -> list[Outcome]:
        size = self.settings.batch or max(LANES * self.cpus, math.ceil(len(tasks) / (BATCHES * self.at_once)))
        waiting = {
            self._send(tasks[i : i + size]): range(i, min(i + size, len(tasks))) for i in range(0, len(tasks), size)
        }
        outcomes: list[Any] = [None] * len(tasks)
        try:
            while waiting:
                (ready,), _ = self.ray.wait(list(waiting), num_returns=1)
                for index, outcome in zip(waiting.pop(ready), self._result(ready), strict=True):
                    outcomes[index] = outcome
                    if on_done is not None:
                        on_done(index, outcome)
        finally:
            for reference in waiting:
                self.ray.cancel(reference, force=True)
        return outcomes

    def _send(self, tasks: Sequence[Task]) -> Any:
        light = [task._replace(candidate=replace(task.candidate, cost=None, capacity=None)) for task in tasks]
        costs = [self._cost(task.candidate.cost) for task in tasks]
        return self.carry_out.remote([self.runtime, self.simulator], light, costs)

    def _cost(self, cost: Any) -> Any:
        if id(cost) not in self.costs:
            self.costs[id(cost)] = cost, self.ray.put(cost)
        return self.costs[id(cost)][1]

    def _result(self, reference: Any) -> list[Outcome]:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from None  # what went wrong in there, as if it had here


def _carry_out(shared: list[Any], tasks: list[Task], costs: list[Any]) -> list[Outcome]:
    """One batch, on a machine of the cluster."""
    runtime, simulator = map(_fetched, shared)
    prepare(runtime)
    whole = [
        task._replace(candidate=replace(task.candidate, cost=_fetched(cost)))
        for task, cost in zip(tasks, costs, strict=True)
    ]
    return simulator(whole)


@functools.lru_cache(maxsize=256)
def _fetched(reference: Any) -> Any:
    """The object, kept between the batches of a worker."""
    import ray  # pyright: ignore[reportMissingImports]

    return ray.get(reference)


def _connected(settings: LauncherSettings) -> Any:
    """Ray, connected to the cluster."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("launcher", "ray", "needs Ray: pip install 'jaxsim[ray]'") from None
    if not ray.is_initialized():
        try:
            _reach(settings.address)
            ray.init(settings.address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            why = " ".join(str(error).split())
            raise ConfigError("launcher.address", settings.address, f"must be a Ray cluster ({why})") from None
    return ray


def _reach(address: str | None) -> None:
    """Raises `OSError` where nobody answers at HOST:PORT; Ray itself tries for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), ANSWER_S).close()


def _smallest(machines: Sequence[dict[str, float]], resource: str) -> float:
    """The least that a machine has of a resource, those without it left out; 0 where none has it."""
    return min((machine[resource] for machine in machines if machine.get(resource, 0) >= 1), default=0)
