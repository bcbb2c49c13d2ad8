"""The SLO language: what can be limited, how it is read, and what a run is judged by."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_search import judged, simulation

from jaxsim.composition import defaults
from jaxsim.engine import itl_edges_s
from jaxsim.errors import ConfigError
from jaxsim.settings import SloSettings, read
from jaxsim.tuning.figures import figures, percentiles
from jaxsim.tuning.slo import Limit, limits, of_a_request, share_above


def slo(**keys: Any) -> SloSettings:
    return read(SloSettings, "slo", {"ttft_ms": None} | keys)


def test_shorthands_are_limits_at_one_percentile():
    assert limits(SloSettings()) == [Limit("p99_ttft_ms", 200.0, "ttft", 99.0)]
    found = limits(slo(ttft_ms=100, tpot_ms=50, itl_ms=40, e2el_ms=900, queue_wait_ms=5, percentile=99.9))
    assert [limit.figure for limit in found] == [
        f"p99.9_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el", "queue_wait")
    ]
    assert [limit.allowed for limit in found] == [0.001] * 5
    assert limits(slo()) == []


def test_any_statistic_can_be_limited_and_the_tighter_bound_counts():
    found = limits(
        slo(ttft_ms=200, limits={"p99_ttft_ms": 100, "mean_tpot_ms": 50, "median_itl_ms": 9, "p95.0_e2el_ms": 7})
    )
    assert [(limit.figure, limit.bound, limit.percentile) for limit in found] == [
        ("p99_ttft_ms", 100, 99), ("mean_tpot_ms", 50, None), ("median_itl_ms", 9, 50), ("p95_e2el_ms", 7, 95),
    ]  # fmt: skip
    assert percentiles(slo(limits={"p90_ttft_ms": 1})) == (50, 90, 95, 99)
    with pytest.raises(ConfigError, match="^slo.limits.std_ttft_ms=1.0: must be mean_"):
        limits(slo(limits={"std_ttft_ms": 1.0}))


def test_a_limit_names_itself_what_was_measured_and_its_bound():
    run = simulation(np.arange(1.0, 101.0))
    assert judged(run, slo(limits={"mean_ttft_ms": 50})).reason == "mean TTFT 50.5 ms above 50 ms"
    assert judged(run, slo(limits={"median_e2el_ms": 50})).reason == "median E2EL 50.5 ms above 50 ms"
    assert judged(run, slo(limits={"mean_ttft_ms": 51, "p99_ttft_ms": 100})).passed
    crowded = simulation(np.ones(100), num_preemptions=3, kv_usage_peak=0.95)
    assert judged(crowded, slo(limits={"num_preemptions": 0})).reason == "num_preemptions 3 above 0"
    assert judged(crowded, slo(limits={"kv_usage_peak": 0.9})).reason == "kv_usage_peak 0.95 above 0.9"
    assert judged(crowded, slo(limits={"kv_usage_peak": 0.96, "preemptions_per_request": 0.03})).passed


def test_goodput_is_written_as_vllm_bench_serve_has_it():
    run = simulation(np.arange(1.0, 101.0))  # ms, TTFT and E2EL alike
    asked = slo(goodput="ttft:90 e2el:80", goodput_share=0.8)
    assert judged(run, asked).passed and of_a_request(asked) == {"ttft": 90, "e2el": 80}
    missed = slo(goodput="ttft:90 e2el:80", goodput_share=0.81)
    assert judged(run, missed).reason == "goodput 0.8 of the requests, below 0.81"
    assert figures(run, missed, 0.0)["request_goodput"] == pytest.approx(80 / run.totals.duration_s)
    for text in ("ttft", "ttft:0", "ttft:inf", "itl:5", "ttft:5,tpot:6"):
        with pytest.raises(ConfigError, match="^slo.goodput="):
            limits(slo(goodput=text))


def test_the_gaps_between_tokens_are_limited_by_their_histogram():
    edges = itl_edges_s() * 1000
    counts = np.zeros(len(edges) - 1, np.int64)
    counts[80], counts[120] = 98, 2
    run = simulation(np.ones(10), itl_histogram=counts)
    between = float(edges[100])
    assert figures(run, slo(itl_ms=between), 0.0)["share_above_p99_itl_ms"] == pytest.approx(0.02)
    assert "p99 ITL" in judged(run, slo(itl_ms=between)).reason
    assert judged(run, slo(itl_ms=between, percentile=98)).passed


@given(
    st.lists(st.floats(0, 1e3), min_size=2, max_size=60), st.floats(0, 1e3), st.sampled_from([50.0, 90.0, 95.0, 99.0])
)
def test_the_share_above_a_bound_is_the_percentile_read_backwards(values, bound, q):
    percentile = np.percentile(values, q)
    if abs(percentile - bound) > 1e-6:  # at the bound itself rounding decides
        assert (share_above(np.array(values), bound) <= 1 - q / 100 + 1e-9) == (percentile <= bound)


def test_a_request_that_never_finished_is_above_any_bound():
    assert share_above(np.array([1.0, 2.0, np.inf]), 2.0) == 0.5
    assert share_above(np.array([3.0]), 2.0) == 1 and share_above(np.array([]), 2.0) == 0


@pytest.mark.parametrize("preset", ["ttft", "chat", "code_completion", "rag", "batch"])
def test_presets(preset):
    found = limits(read(SloSettings, "slo", defaults([f"slo={preset}"])["slo"]))
    assert [(limit.figure, limit.bound) for limit in found] == {
        "ttft": [("p99_ttft_ms", 200)],
        "chat": [("p99_ttft_ms", 200), ("p99_tpot_ms", 50)],
        "code_completion": [("p95_ttft_ms", 100)],
        "rag": [("p99_ttft_ms", 2000), ("p99_tpot_ms", 200)],
        "batch": [],
    }[preset]


def test_limits_on_the_command_line():
    words = ["slo.limits={p95_ttft_ms:100,mean_tpot_ms:50,p99.9_e2el_ms:900}", "slo.goodput='ttft:200 tpot:50'"]
    found = limits(read(SloSettings, "slo", defaults(words)["slo"]))
    assert [limit.figure for limit in found] == [
        "p99_ttft_ms", "p95_ttft_ms", "mean_tpot_ms", "p99.9_e2el_ms", "goodput_missed",
    ]  # fmt: skip
