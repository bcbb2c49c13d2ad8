"""Synthetic workloads: published statistics, closed forms, common random numbers, bad input."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from jaxsim.errors import ConfigError
from jaxsim.workload import Arrival, Length, Priority, Workload, workload_from_config

CONF = Path(__file__).parents[1] / "conf" / "workload"
N = 200_000


def preset(name: str) -> Workload:
    config: Any = OmegaConf.load(CONF / f"{name}.yaml")
    if config.pop("defaults", None):
        config = OmegaConf.merge(OmegaConf.load(CONF / "synthetic.yaml"), config)
    container: Any = OmegaConf.to_container(config)
    workload = workload_from_config(container)
    assert isinstance(workload, Workload)
    return workload


def simple(**changes) -> Workload:
    fields = dict(rate_rps=1.0, arrival=Arrival(), prompt=Length(value=100), output=Length(value=10)) | changes
    return Workload(**fields)  # pyright: ignore[reportArgumentType]


# Published with the traces: requests/s, CV of the gaps, then mean, p50, p95, p99 of prompts and outputs.
@pytest.mark.parametrize(
    ("name", "rate", "cv", "prompt", "output"),
    [
        ("azure_conv", 5.53, 1.09, (1155, 1020, 4083, 4142), (211, 129, 451, 601)),
        ("azure_code", 2.57, 13.2, (2048, 1469, 7303, 7436), (28, 13, 90, 251)),
    ],
)
def test_presets_have_the_published_statistics(name, rate, cv, prompt, output):
    workload = preset(name)
    requests = workload.sample(0, N)
    gaps = np.diff(requests.arrival_s)
    # The mean of n gaps has a standard error of cv / sqrt(n); the CV of a heavy tail settles slowly.
    assert workload.rate_rps == rate
    assert gaps.mean() == pytest.approx(1 / rate, rel=4 * cv / math.sqrt(N))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.01 if cv < 2 else 0.08)
    for tokens, (mean, *points) in ((requests.prompt_len, prompt), (requests.output_len, output)):
        assert tokens.mean() == pytest.approx(mean, rel=0.02)
        np.testing.assert_allclose(np.percentile(tokens, (50, 95, 99)), points, rtol=0.05)
    assert abs(np.corrcoef(requests.prompt_len, requests.output_len)[0, 1]) < 0.02


def test_the_synthetic_preset_is_vllm_bench_random():
    workload = preset("synthetic")
    requests = workload.sample(0, 10)
    assert set(requests.prompt_len) == {1024}
    assert set(requests.output_len) == {128}
    assert workload.arrival == Arrival("poisson", 1.0)


@pytest.mark.parametrize(
    ("arrival", "cv"),
    [(Arrival(), 1.0), (Arrival("gamma", 0.25), 2.0), (Arrival("gamma", 4.0), 0.5), (Arrival("constant"), 0.0)],
)
def test_gaps_have_the_mean_and_cv_of_the_process(arrival, cv):
    gaps = np.diff(simple(rate_rps=8.0, arrival=arrival).sample(1, N).arrival_s)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.02, abs=1e-9)


def test_gamma_with_burstiness_1_is_poisson():
    a = simple(arrival=Arrival("gamma", 1.0)).sample(5, 100)
    np.testing.assert_array_equal(a.arrival_s, simple().sample(5, 100).arrival_s)
    b = simple(arrival=Arrival("gamma", 1.0 + 1e-9)).sample(5, 100)
    np.testing.assert_allclose(a.arrival_s, b.arrival_s, rtol=1e-6)


def test_common_random_numbers():
    base = simple(prompt=Length("lognormal", mean=1000, cv=1.0), output=Length("lognormal", mean=200, cv=0.5))
    requests = base.sample(7, 500)
    faster = simple(rate_rps=4.0, prompt=base.prompt, output=base.output).sample(7, 500)
    np.testing.assert_allclose(faster.arrival_s * 4.0, requests.arrival_s, rtol=1e-15)
    np.testing.assert_array_equal(faster.prompt_len, requests.prompt_len)
    burstier = simple(arrival=Arrival("gamma", 0.5), prompt=Length(value=7), output=base.output).sample(7, 500)
    np.testing.assert_array_equal(burstier.output_len, requests.output_len)
    shorter = base.sample(7, 50)
    for whole, part in zip(requests[:3], shorter[:3], strict=True):
        np.testing.assert_array_equal(whole[:50], part)
    other = base.sample(8, 500)
    assert (other.arrival_s != requests.arrival_s).sum() == 499  # all start at 0
    assert (other.prompt_len != requests.prompt_len).any()
    correlation = np.corrcoef([np.diff(requests.arrival_s), requests.prompt_len[1:], requests.output_len[1:]])
    assert np.abs(correlation[~np.eye(3, dtype=bool)]).max() < 0.2


@pytest.mark.parametrize(
    ("given", "mu", "sigma"),
    [
        ({"mu": 5.0, "sigma": 0.5}, 5.0, 0.5),
        ({"mean": math.exp(5.125), "cv": math.sqrt(math.exp(0.25) - 1)}, 5.0, 0.5),
        ({"mean": math.exp(5.125), "p50": math.exp(5.0)}, 5.0, 0.5),
        ({"p50": math.exp(5.0), "sigma": 0.5}, 5.0, 0.5),
        ({"mean": math.exp(5.125), "p95": math.exp(5.0 + 0.5 * 1.6448536269514722)}, 5.0, 0.5),
        ({"mean": math.exp(5.125), "p99": math.exp(5.0 + 0.5 * 2.3263478740408408)}, 5.0, 0.5),
        ({"p50": math.exp(5.0), "p99": math.exp(5.0 + 0.5 * 2.3263478740408408)}, 5.0, 0.5),
        ({"mean": 100.0, "cv": 0.0}, math.log(100), 0.0),
    ],
)
def test_lognormal_from_any_two_figures(given, mu, sigma):
    assert Length("lognormal", **given).lognormal_parameters() == pytest.approx((mu, sigma), abs=1e-9)


def test_lognormal_sample_and_clipping():
    tokens = simple(prompt=Length("lognormal", mean=1000, p99=4000)).sample(0, N).prompt_len
    assert tokens.mean() == pytest.approx(1000, rel=0.01)
    assert np.percentile(tokens, 99) == pytest.approx(4000, rel=0.02)
    clipped = Length("lognormal", mean=1000, p99=4000, min=500, max=3000).sample(np.linspace(0, 0.999999, 1000))
    assert (clipped.min(), clipped.max()) == (500, 3000)
    assert Length("lognormal", mu=0.0, sigma=500.0).sample(np.array([0.0, 0.999])).tolist() == [1, 2**22 - 1]


def test_empirical_values_and_weights():
    u = (np.arange(100) + 0.5) / 100
    tokens = Length("empirical", values=(30, 10, 20), weights=(1, 1, 2)).sample(u)
    assert np.unique(tokens, return_counts=True)[1].tolist() == [25, 50, 25]
    assert sorted(set(Length("empirical", values=(5, 5, 9)).sample(u))) == [5, 9]
    assert Length("empirical", values=(10, 20), weights=(0, 1)).sample(np.array([0.0])).tolist() == [20]


def test_quantile_points_are_kept_and_the_mean_is_met():
    u = (np.arange(100_000) + 0.5) / 100_000
    straight = Length("empirical", values=(1, 101), quantiles=(0, 1))
    assert straight.quantile(np.array([0.0, 0.25, 0.5])).tolist() == [1, 26, 51]
    for mean in (20.0, 51.0, 90.0):
        length = Length("empirical", values=(1, 11, 101), quantiles=(0, 0.1, 1), mean=mean)
        assert length.quantile(u).mean() == pytest.approx(mean, rel=1e-3)
        assert length.quantile(np.array([0.1])) == pytest.approx(11)
        assert (np.diff(length.quantile(u)) >= 0).all()


BAD_LENGTHS = [
    ({"dist": "normal"}, "dist"),
    ({"value": None}, "value"),
    ({"value": 0}, "value"),
    ({"value": 1.5}, "value"),
    ({"value": True}, "value"),
    ({"value": 10, "max": 5}, "value"),
    ({"value": 10, "min": 0}, "min"),
    ({"value": 10, "min": 9, "max": 8}, "max"),
    ({"value": 2**22}, "value"),
    ({"dist": "lognormal"}, "dist"),
    ({"dist": "lognormal", "mean": 5.0}, "dist"),
    ({"dist": "lognormal", "mean": 5.0, "p50": 4.0, "p99": 9.0}, "dist"),
    ({"dist": "lognormal", "mu": 5.0, "p50": 4.0}, "dist"),
    ({"dist": "lognormal", "cv": 5.0, "sigma": 4.0}, "dist"),
    ({"dist": "lognormal", "mean": 4.0, "p50": 5.0}, "mean"),
    ({"dist": "lognormal", "mean": 10.0, "p95": 1000.0}, "mean"),
    ({"dist": "lognormal", "p50": 10.0, "p95": 5.0}, "p50"),
    ({"dist": "lognormal", "mean": -4.0, "cv": 1.0}, "mean"),
    ({"dist": "lognormal", "mean": 4.0, "cv": -1.0}, "cv"),
    ({"dist": "lognormal", "mean": math.nan, "cv": 1.0}, "mean"),
    ({"dist": "empirical"}, "values"),
    ({"dist": "empirical", "values": ()}, "values"),
    ({"dist": "empirical", "values": (0, 5)}, "values"),
    ({"dist": "empirical", "values": ("a", 5)}, "values"),
    ({"dist": "empirical", "values": (1, 5), "weights": (1,)}, "weights"),
    ({"dist": "empirical", "values": (1, 5), "weights": (1, -1)}, "weights"),
    ({"dist": "empirical", "values": (1, 5), "weights": (0, 0)}, "weights"),
    ({"dist": "empirical", "values": (1, 5), "quantiles": (0, 0.9)}, "quantiles"),
    ({"dist": "empirical", "values": (1, 5, 6), "quantiles": (0, 0, 1)}, "quantiles"),
    ({"dist": "empirical", "values": (5, 1), "quantiles": (0, 1)}, "values"),
    ({"dist": "empirical", "values": (1, 5), "quantiles": (0, 1), "weights": (1, 1)}, "weights"),
    ({"dist": "empirical", "values": (1, 5), "quantiles": (0, 1), "mean": 5.0}, "mean"),
]


@pytest.mark.parametrize(("fields", "key"), BAD_LENGTHS, ids=range(len(BAD_LENGTHS)))
def test_bad_lengths_name_their_key(fields, key):
    with pytest.raises(ConfigError) as error:
        Length(**fields)
    assert error.value.key == key
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "replay"}, "workload.kind=replay: one of synthetic, trace"),
        ({"rate_rps": 0}, "workload.rate_rps=0: "),
        ({"rate_rps": None}, "workload.rate_rps=None: "),
        ({"rate_rps": "fast"}, "workload.rate_rps=fast: "),
        ({"arrival": {"process": "weibull"}}, "workload.arrival.process=weibull: one of poisson, gamma, constant"),
        ({"arrival": {"process": "gamma", "burstiness": 0}}, "workload.arrival.burstiness=0: "),
        ({"arrival": {"burstiness": 0.5}}, "workload.arrival.burstiness=0.5: 1 with process=poisson"),
        ({"arrival": 5}, "workload.arrival=5: "),
        ({"prompt": {"value": 0}}, "workload.prompt.value=0: "),
        ({"output": {"length": 5}}, "workload.output.length=5: no such key"),
        ({"path": "x.csv"}, "workload.path=x.csv: "),
        ({"too_long": "keep"}, "workload.too_long=keep: error or drop"),
    ],
)
def test_bad_configs_name_the_full_key(changes, message):
    config = {"kind": "synthetic", "rate_rps": 1.0, "prompt": {"value": 5}, "output": {"value": 5}}
    workload_from_config(config)
    with pytest.raises(ConfigError) as error:
        workload_from_config(config | changes)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(("seed", "n", "key"), [(-1, 5, "seed"), (0.5, 5, "seed"), (0, 0, "n"), (0, None, "n")])
def test_bad_samples_name_their_key(seed, n, key):
    with pytest.raises(ConfigError, match=f"^{key}="):
        simple().sample(seed, n)


def test_priorities_are_drawn_without_touching_the_rest():
    plain, classed = simple(), simple(priority=Priority((2, 0, 1), (1, 0, 3)))
    one, other = plain.sample(3, 4000), classed.sample(3, 4000)
    assert one.priority is None and set(other.priority.tolist()) == {1, 2}
    assert np.mean(other.priority == 1) == pytest.approx(0.75, abs=0.03)
    for name in ("arrival_s", "prompt_len", "output_len"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(classed.sample(3, 100).priority, other.priority[:100])
    assert np.any(classed.sample(4, 4000).priority != other.priority)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"values": []}, "workload.priority.values=[]: a list of integers"),
        ({"values": [0, True]}, "workload.priority.values=[0, True]: a list of integers"),
        ({"values": [0, 1], "weights": [1]}, "workload.priority.weights=[1]: as many numbers"),
        ({"values": [0, 1], "weights": [0, 0]}, "workload.priority.weights=[0, 0]: as many numbers"),
        ({"value": 1}, "workload.priority.value=1: no such key"),
    ],
)
def test_impossible_priorities(section, message):
    lengths = {"prompt": {"value": 1}, "output": {"value": 1}}
    with pytest.raises(ConfigError) as error:
        workload_from_config({"kind": "synthetic", "rate_rps": 1.0, "priority": section} | lengths)
    assert str(error.value).startswith(message)
