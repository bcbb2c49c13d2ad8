"""Several instances behind a load balancer that deals the requests out in turn."""

import numpy as np
import pytest

from jaxsim.composition import defaults
from jaxsim.engine import Requests
from jaxsim.metrics import Interval
from jaxsim.settings import EngineSettings, SearchSettings, SloSettings, read
from jaxsim.tuning.evaluate import RATES, Simulator, Task
from jaxsim.tuning.figures import number_of_instances
from jaxsim.tuning.replicates import Replicates, replicates
from jaxsim.tuning.space import Server, Space
from jaxsim.tuning.stored import Keys
from jaxsim.workload import workload_from_config

SEARCH = SearchSettings(
    max_num_seqs=(8,), max_num_batched_tokens=(512,), instances=(1, 2), seeds=1, num_requests=40, first_seed=3
)


def sampled(**workload) -> Replicates:
    kind = {"arrival": {"process": "constant"}, "prompt": {"value": 300}, "output": {"value": 20}} | workload
    composed = defaults(["workload=synthetic"])["workload"]
    return replicates(workload_from_config(composed | kind, False), SEARCH, 4096, "error")


def settings():
    composed = defaults([])
    return Space.of(Server.of(composed, read(EngineSettings, "engine", composed["engine"])), SEARCH).grid()


def test_each_of_two_that_take_turns_gets_half_of_a_regular_stream():
    """At twice the load each is sent the very requests of one alone: the same latencies, twice the throughputs."""
    one, two = settings()
    simulator = Simulator(sampled(), SloSettings(), SEARCH)
    alone, together = simulator([Task(one, 0, load_rps=20.0), Task(two, 0, load_rps=40.0)])
    assert together.verdict == alone.verdict
    for key, value in alone.figures.items():
        if value is not None and not np.isnan(value):
            assert together.figures[key] == pytest.approx(value * (2 if key in RATES else 1), rel=1e-12), key


def test_an_instance_has_as_many_requests_whatever_their_number():
    found = sampled(arrival={"process": "poisson"})
    assert len(found.of(0, 40, 4).prompt_len) == len(found.of(0, 40).prompt_len) == 40
    whole = found.of(0, 160).arrival_s
    assert found.of(0, 40, 4).arrival_s.tolist() == whole[::4].tolist()
    # The load is that of all: the whole stream is stretched to it.
    assert found.stretch(0, 8.0, 40, 4) == pytest.approx((159 / whole[-1]) / 8.0)


def test_instances_share_the_rows_of_a_trace():
    rows = Requests(np.arange(10.0), np.arange(1, 11), np.ones(10, int))
    asked = []

    def draw(place, count):
        asked.append(count)
        return Requests(*(None if field is None else field[:count] for field in rows)), 1.0

    found = Replicates([rows], [1.0], [0], draw, rows=10)
    assert found.of(0, 10, 4).prompt_len.tolist() == [1, 5, 9]
    assert found.of(0, 2, 4).prompt_len.tolist() == [1, 5]
    assert asked == [10, 8]


def test_what_two_carry_says_how_many_a_load_needs():
    assert number_of_instances(100.0, Interval(18.0, 2.0), carrying=2) == (12, 10, 13)


def test_the_store_tells_them_apart():
    one, two = settings()
    keys = Keys(sampled(), SloSettings(), SEARCH)
    assert keys(Task(one, 0, load_rps=20.0)) != keys(Task(two, 0, load_rps=40.0))
    assert keys(Task(one, 0, clients=4)) != keys(Task(two, 0, clients=4))
