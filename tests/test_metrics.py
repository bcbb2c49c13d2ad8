"""Metrics against hand calculation; the stability rule on queues whose stability is known."""

import heapq
import math
from types import SimpleNamespace

import numpy as np
import pytest

from jaxsim import engine, metrics
from jaxsim.errors import ConfigError

MS = 10**9  # picoseconds
EDGES_S = np.array([0.0, 0.01, 0.02, 0.04])


@pytest.fixture(autouse=True)
def edges(monkeypatch):
    monkeypatch.setattr(engine, "itl_edges_s", lambda: EDGES_S, raising=False)


def simulation(arrival, scheduled, first, finish, prompt, output, histogram=(0, 0, 0), duration_s=1.0):
    """Times in ms, -1 for never."""
    times = {
        name: np.array([ms * MS if ms >= 0 else -1 for ms in values], np.int64)
        for name, values in (
            ("arrival_ps", arrival),
            ("first_scheduled_ps", scheduled),
            ("first_token_ps", first),
            ("finish_ps", finish),
        )
    }
    totals = SimpleNamespace(duration_s=duration_s, itl_histogram=np.array(histogram, np.int64))
    return SimpleNamespace(
        **times,
        prompt_len=np.array(prompt, np.int32),
        output_tokens=np.array(output, np.int32),
        hit_tokens=np.zeros(len(prompt), np.int32),
        totals=totals,
        closed_loop=False,
    )


def four():
    """TTFT 10, 20, 30; TPOT 10, -, 25; E2EL 40, 20, 130; the last request never finishes."""
    return simulation(
        arrival=[0, 100, 200, 300],
        scheduled=[0, 105, 210, 300],
        first=[10, 120, 230, 310],
        finish=[40, 120, 330, -1],
        prompt=[5, 6, 7, 8],
        output=[4, 1, 5, 2],
        histogram=(4, 0, 4),
        duration_s=0.5,
    )


def test_figures_by_hand():
    result = metrics.summarise(four(), warmup=0)
    assert (result["num_prompts"], result["completed"], result["failed"]) == (4, 3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (18, 10)
    assert result["request_throughput"] == pytest.approx(6.0)
    assert result["output_throughput"] == pytest.approx(20.0)
    assert result["total_token_throughput"] == pytest.approx(56.0)
    assert result["request_goodput"] is None
    assert result["mean_ttft_ms"] == pytest.approx(20.0)
    assert result["median_ttft_ms"] == result["p50_ttft_ms"] == pytest.approx(20.0)
    assert result["p95_ttft_ms"] == pytest.approx(29.0)  # 0.95 x 2 = 1.9 between 20 and 30
    assert result["p99_ttft_ms"] == pytest.approx(29.8)
    assert result["std_ttft_ms"] == pytest.approx(math.sqrt(200 / 3))
    # the request of one output token has no TPOT
    assert (result["mean_tpot_ms"], result["p99_tpot_ms"]) == (pytest.approx(17.5), pytest.approx(24.85))
    assert result["mean_e2el_ms"] == pytest.approx(190 / 3)
    assert result["mean_queue_wait_ms"] == pytest.approx(5.0)
    # gaps: (30 + 100) ms over 3 + 4 tokens; half of the histogram in 0-10 ms, half in 20-40 ms
    assert result["mean_itl_ms"] == pytest.approx(130 / 7)
    assert result["median_itl_ms"] == pytest.approx(10.0)
    assert result["p95_itl_ms"] == pytest.approx(38.0)
    # second moments of uniform bins: (100 + 2800) / 6 around the centre 17.5
    assert result["std_itl_ms"] == pytest.approx(math.sqrt((100 / 3 + 2800 / 3) / 2 - 17.5**2))


def test_keys_are_those_of_vllm_bench():
    keys = metrics.summarise(four(), percentiles=(99, 99.9)).keys()
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{figure}_{name}_ms" for figure in ("mean", "median", "std", "p99", "p99.9")} <= keys
    assert {"duration", "completed", "failed", "num_prompts", "total_input_tokens", "total_output_tokens"} <= keys
    assert {"request_throughput", "request_goodput", "output_throughput", "total_token_throughput"} <= keys


def test_warmup_leaves_out_the_first_to_arrive():
    run = four()
    for name in ("arrival_ps", "first_scheduled_ps", "first_token_ps", "finish_ps", "prompt_len", "output_tokens"):
        setattr(run, name, getattr(run, name)[[2, 0, 3, 1]])  # the caller's order is not that of arrival
    assert metrics.latencies(run, 0.25).ttft.tolist() == [20.0, 30.0]
    assert metrics.latencies(run, 0.49).ttft.tolist() == [20.0, 30.0]
    assert metrics.latencies(run, 0.5).ttft.tolist() == [30.0]
    assert metrics.latencies(run, 0.5).requests == 2
    whole, warm = metrics.summarise(run, 0), metrics.summarise(run, 0.5)
    for key in ("request_throughput", "completed", "median_itl_ms"):  # of the whole run
        assert whole[key] == warm[key]


def test_hit_rates_by_hand():
    run = simulation(
        [0, 10, 20, 30], [0, 10, 20, -1], [5, 15, 25, -1], [6, 16, 26, -1], [100, 50, 200, 80], [1, 1, 1, 0]
    )
    run.hit_tokens = np.array([0, 40, 160, 0], np.int32)
    # The last request was never admitted; warm-up leaves out the first.
    rates = metrics.hit_rates(run, 0.25)
    assert (rates.cold, rates.warm) == (pytest.approx(200 / 350), pytest.approx(200 / 250))
    assert rates.per_request.tolist() == [0.8, 0.8]
    result = metrics.summarise(run, 0.25)
    assert result["prefix_cache_hit_rate"] == rates.cold
    assert result["prefix_cache_hit_rate_warm"] == rates.warm
    assert result["mean_request_hit_rate"] == result["median_request_hit_rate"] == pytest.approx(0.8)


def test_never_sent_requests_come_last():
    run = simulation([-1, 0], [-1, 0], [-1, 5], [-1, 9], [1, 1], [0, 3])
    assert metrics.latencies(run, 0.5).requests == 1
    assert len(metrics.latencies(run, 0.5).ttft) == 0


def test_empty_sets_are_nan():
    run = simulation([0], [-1], [-1], [-1], [5], [0], duration_s=0.0)
    result = metrics.summarise(run)
    assert (result["completed"], result["failed"]) == (0, 1)
    for key in ("mean_ttft_ms", "p99_tpot_ms", "std_e2el_ms", "p99_itl_ms", "mean_itl_ms", "request_throughput"):
        assert math.isnan(result[key]), key


def test_goodput_counts_what_meets_every_limit():
    run = four()
    assert metrics.goodput(run, {"ttft": 20}, warmup=0) == (pytest.approx(4.0), 0.5)  # limits are inclusive
    assert metrics.goodput(run, {"ttft": 30, "tpot": 10}, warmup=0).share == 0.5  # one token: TPOT counts as 0
    assert metrics.goodput(run, {"e2el": 1000}, warmup=0).share == 0.75  # the unfinished one missed
    assert metrics.goodput(run, {"ttft": 30, "e2el": 100}, warmup=0.5) == (0.0, 0.0)
    assert metrics.summarise(run, 0, slo_ms={"ttft": 20})["request_goodput"] == pytest.approx(4.0)
    with pytest.raises(ConfigError, match="slo=itl"):
        metrics.goodput(run, {"itl": 5})


@pytest.mark.parametrize("warmup", [-0.1, 1.0])
def test_bad_warmup(warmup):
    with pytest.raises(ConfigError, match="warmup="):
        metrics.latencies(four(), warmup)


def test_percentiles_are_numpys_to_the_last_bit():
    rng, asked = np.random.default_rng(5), (0, 12.5, 50, 66.6, 95, 99, 99.9, 100)
    for count in (1, 2, 3, 7, 100, 1801):
        values = rng.exponential(300, count)
        run = simulation(np.zeros(count), values, values, 2 * values, [1] * count, [1] * count)
        found, ttft = metrics.summarise(run, 0, asked), metrics.latencies(run, 0).ttft
        expected = np.percentile(ttft, asked).tolist()
        assert [found[f"p{percentile:g}_ttft_ms"] for percentile in asked] == expected


def test_histogram_percentiles():
    counts, edges = np.array([0, 10, 0, 30]), np.array([0.0, 1.0, 2.0, 4.0, np.inf])
    assert metrics.histogram_percentile(counts, edges, 0) == 1.0
    assert metrics.histogram_percentile(counts, edges, 12.5) == 1.5
    assert metrics.histogram_percentile(counts, edges, 25) == 2.0
    assert metrics.histogram_percentile(counts, edges, 100) == 4.0  # an endless bin counts as its lower edge
    assert math.isnan(metrics.histogram_percentile(np.zeros(4, int), edges, 50))


def test_intervals_by_hand():
    # t(0.975, 2) = 4.302653, t(0.975, 1) = 12.706205 (tables of Student's t); standard deviation of 1, 2, 3 is 1
    assert metrics.t_interval([1, 2, 3]) == pytest.approx((2.0, 4.302653 / math.sqrt(3)), rel=1e-6)
    assert metrics.paired_interval([3, 6], [1, 2]) == pytest.approx((3.0, 12.706205), rel=1e-6)
    single = metrics.t_interval([5.0])
    assert single.mean == 5.0 and math.isnan(single.half_width)
    assert math.isnan(metrics.t_interval([]).mean)
    with pytest.raises(ValueError, match="2 and 1"):
        metrics.paired_interval([1, 2], [1])


def queue(load: float, n: int = 2000, seed: int = 0, servers: int = 1, shape: float = 1.0):
    """A queue with `servers` servers at `load`, gamma gaps of mean 1 s, exponential service; it is stable below 1."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.gamma(shape, 1 / shape, n))
    service = rng.exponential(load * servers, n)
    free, start = [0.0] * servers, np.empty(n)
    for i in range(n):
        start[i] = max(heapq.heappop(free), arrival[i])
        heapq.heappush(free, start[i] + service[i])
    return simulation(arrival * 1000, start * 1000, start * 1000, (start + service) * 1000, [1] * n, [1] * n)


@pytest.mark.parametrize("servers", [1, 32])
def test_growing_queues_are_told_from_stable_ones(servers):
    def share(load, **kwargs):
        return np.mean([metrics.is_growing(queue(load, seed=seed, servers=servers, **kwargs)) for seed in range(20)])

    assert share(0.7) == 0
    assert share(0.9) == 0
    assert share(0.95) <= 0.1
    assert share(1.2) == 1
    assert share(1.5, n=500) == 1
    assert share(0.8, shape=1 / 9) <= 0.05  # bursts, CV 3
    assert share(1.3, shape=1 / 9) >= 0.9


def test_a_burst_at_the_end_is_not_growth():
    arrival = np.concatenate([np.arange(1500) * 10.0, np.full(500, 15000.0)])
    scheduled = np.concatenate([np.arange(1500) * 10.0, 15000.0 + np.arange(500) * 5.0])
    run = simulation(arrival, scheduled, scheduled, scheduled, [1] * 2000, [1] * 2000)
    assert not metrics.is_growing(run)


def test_never_scheduled_requests_are_a_growing_queue():
    n = 400
    arrival = np.arange(n) * 10.0
    scheduled = np.where(np.arange(n) % 2 == 0, arrival, -1)
    assert metrics.is_growing(simulation(arrival, scheduled, scheduled, scheduled, [1] * n, [1] * n))


def test_batches_and_closed_loops_never_grow():
    n = 100
    batch = simulation([0] * n, np.arange(n) * 10, np.arange(n) * 10, np.arange(n) * 10, [1] * n, [1] * n)
    assert not metrics.is_growing(batch)
    loop = queue(1.5)
    loop.closed_loop = True
    assert not metrics.is_growing(loop)
    assert not metrics.is_growing(queue(1.5, n=1))


def test_growth_is_the_share_of_the_arrivals_that_stays():
    def shares(load, n=2000, **kwargs):
        found = [metrics.growth(queue(load, n=n, seed=seed, servers=8, **kwargs)) for seed in range(20)]
        return np.mean([one.share for one in found]), np.mean([one.clear for one in found])

    steady, flagged = shares(0.7)
    assert abs(steady) < 0.002 and flagged <= 0.05
    growing, flagged = shares(1.25)
    assert growing == pytest.approx(1 - 1 / 1.25, abs=0.02) and flagged == 1
    slowly, _ = shares(1.05, n=4000)
    assert slowly == pytest.approx(1 - 1 / 1.05, abs=0.02)
    loop = queue(1.5)
    loop.closed_loop = True
    assert metrics.growth(loop) == (0.0, False) and metrics.growth(queue(1.5, n=20)) == (0.0, False)


def test_share_of_gaps_above_a_limit():
    run = simulation([0], [0], [0], [1], [1], [1], histogram=(10, 10, 20))
    assert metrics.itl_share_above(run, 20.0) == pytest.approx(0.5)
    assert metrics.itl_share_above(run, 15.0) == pytest.approx(0.625)  # half of the second bin
    assert metrics.itl_share_above(simulation([0], [0], [0], [1], [1], [1]), 1.0) == 0
