"""What `simulate` refuses, each with the name of the key."""

import math

import numpy as np
import pytest
import reference
from random_cases import Priced, requests_of, small

from jaxsim.engine import AffineCost, EngineConfig, Requests, Status, simulate, simulate_many
from jaxsim.errors import ConfigError


def arguments(case: reference.Case) -> tuple[Requests, EngineConfig, Priced]:
    return requests_of(case), case.engine, Priced(case.cost)


@pytest.mark.parametrize(
    ("changes", "options", "key"),
    [
        ({"prompt_len": [3, 9]}, {}, "requests.prompt_len[1]"),
        ({"prompt_len": [0, 1]}, {}, "requests.prompt_len[0]"),
        ({"prompt_len": [1.5, 1]}, {}, "requests.prompt_len"),
        ({"output_len": [1, 0]}, {}, "requests.output_len[1]"),
        ({"output_len": [1, 1 << 32]}, {}, "requests.output_len[1]"),
        ({"arrival_s": [0.0, -1.0]}, {}, "requests.arrival_s[1]"),
        ({"arrival_s": [0.0, math.nan]}, {}, "requests.arrival_s[1]"),
        ({"arrival_s": [0.0, 5e6]}, {}, "requests.arrival_s[1]"),
        ({"arrival_s": [0.0, 5e4]}, {"stretch": 100.0}, "requests.arrival_s[1]"),
        ({"arrival_s": [0.0]}, {}, "requests"),
        ({"priority": [1.0, 0.0]}, {}, "requests.priority"),
        ({"priority": [1]}, {}, "requests.priority"),
        ({"arrival_s": [], "prompt_len": [], "output_len": []}, {}, "requests"),
        ({}, {"clients": 0}, "clients"),
        ({}, {"clients": 1.5}, "clients"),
        ({}, {"clients": 1, "think_time_s": 1.5e6}, "think_time_s"),
        ({}, {"stretch": math.inf}, "stretch"),
        ({}, {"stretch": 0.0}, "stretch"),
        ({}, {"think_time_s": -1.0}, "think_time_s"),
    ],
)
def test_impossible_requests_are_refused(changes, options, key):
    good = {"arrival_s": [0.0, 1.0], "prompt_len": [1, 2], "output_len": [1, 1]}
    requests = Requests(**{name: np.array(value) for name, value in (good | changes).items()})
    _, engine, cost = arguments(small([(0, 1, 1)]))
    with pytest.raises(ConfigError) as error:
        simulate(requests, engine, cost, **options)
    assert error.value.key == key and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 1},
        {"num_gpu_blocks": 1},
        {"block_size": 0},
        {"max_model_len": 1 << 40},
        {"long_prefill_token_threshold": -1},
        {"watermark": -0.1},
        {"watermark": 1.5},
        {"max_num_active_seqs": 0},
        {"max_num_active_seqs": 3},
        {"max_num_batched_tokens": 8, "enable_chunked_prefill": False},
        {"batching": "dynamic"},
        {"static_wait_s": -1.0},
        {"policy": "sjf"},
        {"freed_unhashed_blocks": "back"},
        {"self_preemption": "stops"},
        {"policy": "priority", "batching": "static"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_settings_that_cannot_be_simulated_are_refused(changes):
    with pytest.raises(ConfigError) as error:
        small([(0, 1, 1)], **changes)
    name, value = next(iter(changes.items()))
    assert str(error.value).startswith(f"engine.{name}={value}: ")


def test_a_clock_that_leaves_its_range_ends_the_simulation():
    requests, engine, _ = arguments(small([(0, 1, 200)] * 20, max_model_len=300, num_gpu_blocks=500, max_num_seqs=1))
    run = simulate(requests, engine, AffineCost(1000, 0, 0, 0))
    assert run.status == Status.OVERTIME
    finished = run.finish_ps >= 0
    assert 0 < finished.sum() < 20 and np.all(run.finish_s[finished] < 2.4e6)


def test_lanes_are_at_least_one():
    requests, engine, cost = arguments(small([(0, 1, 1)]))
    with pytest.raises(ConfigError, match=r"^lanes=0: "):
        simulate_many(requests, engine, cost, lanes=0)
