"""Simulations on a Ray cluster: the same outcomes, also when a machine dies on the way."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_search import simulation

import jaxsim
from jaxsim.engine import AffineCost, EngineConfig, Requests
from jaxsim.errors import ConfigError
from jaxsim.settings import EngineSettings, LauncherSettings, RuntimeSettings, SearchSettings, SloSettings
from jaxsim.tuning import cluster as subject
from jaxsim.tuning.cluster import Cluster, launched
from jaxsim.tuning.evaluate import Simulator, Task
from jaxsim.tuning.replicates import Replicates
from jaxsim.tuning.space import Candidate, FixedCost

RUNTIME = RuntimeSettings(devices=1, lanes=4, compilation_cache=None)
MEMORY = 100 * 2**20  # bytes of a node's object store

try:
    import ray  # pyright: ignore[reportMissingImports]
    from ray.cluster_utils import Cluster as Nodes  # pyright: ignore[reportMissingImports]
except ImportError:
    ray: Any = None
    Nodes: Any = None

needs_ray = pytest.mark.skipif(ray is None, reason="ray is not installed: no cluster to run on")
pytestmark = pytest.mark.filterwarnings("default")  # Ray warns of its own


def simulator(**more: Any) -> Simulator:
    def draw(place: int, count: int) -> tuple[Requests, float]:
        rng = np.random.default_rng(place)
        gaps, sizes = rng.exponential(0.1, count), (rng.integers(1, most, count) for most in (90, 60))
        return Requests(np.cumsum(gaps), *sizes), 10.0

    requests = [draw(place, 50)[0] for place in range(2)]
    return Simulator(Replicates(requests, [10.0, 10.0], [0, 0], draw), SloSettings(), SearchSettings(), 4, **more)


def tasks(count: int) -> list[Task]:
    cost = FixedCost(AffineCost(5e-3, 5e-5, 2e-5, 1e-8).table(64, 8))
    candidates = [
        Candidate({"max_num_seqs": seats}, EngineConfig(seats, 64, 99, 200), None, EngineSettings(instances=many), cost)
        for seats, many in ((2, 1), (8, 2))
    ]
    return [Task(candidates[i % 2], i // 2 % 2, load_rps=1.0 + i) for i in range(count)]


@pytest.fixture
def nodes(monkeypatch):
    """A cluster of two machines, each with one core."""
    monkeypatch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
    paths = [str(Path(jaxsim.__file__).parents[1]), str(Path(__file__).parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    made = Nodes(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": MEMORY})
    made.workers = [made.add_node(num_cpus=1, object_store_memory=MEMORY) for _ in range(2)]
    made.wait_for_nodes()
    ray.init(made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()


@needs_ray
def test_a_cluster_says_what_this_machine_says(nodes):
    asked, done = tasks(10), []
    settings = LauncherSettings("ray", batch=3)
    outcomes = Cluster(settings, RUNTIME, simulator())(asked, lambda index, outcome: done.append((index, outcome)))
    assert [one[:2] for one in outcomes] == [one[:2] for one in simulator()(asked)]
    assert sorted(done, key=lambda one: one[0]) == list(enumerate(outcomes))


@needs_ray
def test_what_a_dead_machine_had_is_done_again(nodes, tmp_path):
    """Each batch leaves a mark with its machine as it starts; all but the first wait until the other machine is killed.

    A worker outlives its machine for a moment: there a batch never ends, so that no result of it can come.
    """
    make = simulation  # goes along by value
    marks, gone = tmp_path / "marks", tmp_path / "gone"
    marks.mkdir()
    asked, doomed = tasks(6), nodes.workers[1]
    first, dies = asked[0].sent(simulator().replicates)[1], doomed.node_id

    def slow(requests: Any, *_: Any, stretch: list[float], on_done: Any, **__: Any) -> list[Any]:
        machine = ray.get_runtime_context().get_node_id()
        (marks / f"{stretch[0]} {machine} {os.getpid()} {time.time_ns()}").touch()
        while stretch[0] != first and (machine == dies or not gone.exists()):
            time.sleep(0.01)
        for place, factor in enumerate(stretch):
            on_done(place, make([100.0 * factor] * 20))
        return []

    def started() -> list[list[str]]:
        return [path.name.split() for path in marks.iterdir()]

    def kill(*_: Any) -> None:
        while not any(machine == dies and factor != str(first) for factor, machine, *_ in started()):
            time.sleep(0.01)
        if not gone.exists():
            nodes.remove_node(doomed, allow_graceful=False)
            gone.touch()

    inner = simulator(simulate=slow)
    outcomes = Cluster(LauncherSettings("ray", batch=1), RUNTIME, inner)(asked, kill)
    batches = [pid for _, _, pid, _ in started()]
    assert gone.exists() and len(batches) > len(asked)  # the batch of the dead machine has begun twice
    assert repr(outcomes) == repr(inner(asked))  # NaN among them


@needs_ray
def test_an_error_on_the_cluster_is_the_error(nodes):
    def broken(*_: Any, **__: Any) -> None:
        raise ConfigError("engine.block_size", 3, "must be even")

    with pytest.raises(ConfigError, match="^engine.block_size=3: must be even$"):
        Cluster(LauncherSettings("ray"), RUNTIME, simulator(simulate=broken))(tasks(2))


@needs_ray
def test_a_machine_that_is_too_small_is_said(nodes):
    with pytest.raises(ConfigError, match="^launcher.num_cpus=2: must be at most 1, the cores of a machine"):
        Cluster(LauncherSettings("ray", num_cpus=2), RUNTIME, simulator())


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9"])
def test_a_cluster_that_is_not_there_is_said(address):
    with pytest.raises(ConfigError, match=f"^launcher.address={address}: must be a Ray cluster .*refused"):
        Cluster(LauncherSettings("ray", address=address), RUNTIME, simulator())


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^launcher=ray: needs Ray: pip install 'jaxsim\[ray\]'$"):
        launched(LauncherSettings("ray"), RUNTIME, simulator())


def test_locally_nothing_stands_between():
    local = simulator()
    assert launched(LauncherSettings(), RUNTIME, local) is local
    assert subject._smallest([{"CPU": 4.0}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 0.0}], "CPU") == 2
