"""What `simulate` refuses, each with the name of the key."""

import math

import numpy as np
import pytest
import reference
from random_cases import Priced, requests_of, small

from jaxsim.engine import EngineConfig, Requests, simulate
from jaxsim.errors import ConfigError


def arguments(case: reference.Case) -> tuple[Requests, EngineConfig, Priced]:
    return requests_of(case), case.engine, Priced(case.cost)


@pytest.mark.parametrize(
    ("changes", "options", "key"),
    [
        ({"prompt_len": [3, 9]}, {}, "requests.prompt_len[1]"),
        ({"prompt_len": [0, 1]}, {}, "requests.prompt_len[0]"),
        ({"output_len": [1, 0]}, {}, "requests.output_len[1]"),
        ({"arrival_s": [0.0, -1.0]}, {}, "requests.arrival_s[1]"),
        ({"arrival_s": [0.0, math.nan]}, {}, "requests.arrival_s[1]"),
        ({"arrival_s": [0.0, 5e6]}, {}, "requests.arrival_s[1]"),
        ({"arrival_s": [0.0, 5e4]}, {"stretch": 100.0}, "requests.arrival_s[1]"),
        ({"arrival_s": [0.0]}, {}, "requests"),
        ({"arrival_s": [], "prompt_len": [], "output_len": []}, {}, "requests"),
        ({}, {"clients": 0}, "clients"),
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
        {"enable_prefix_caching": True},
        {"policy": "priority"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_settings_that_cannot_be_simulated_are_refused(changes):
    with pytest.raises(ConfigError) as error:
        small([(0, 1, 1)], **changes)
    name, value = next(iter(changes.items()))
    assert str(error.value).startswith(f"engine.{name}={value}: ")
