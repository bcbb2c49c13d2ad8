"""Trace files: exact times, statistics as published, circular shifts, and one line for every broken file."""

import os
from pathlib import Path

import numpy as np
import pytest

from jaxsim.engine import Requests
from jaxsim.errors import ConfigError
from jaxsim.workload import TraceWorkload, drop_or_refuse, read_trace, workload_from_config
from jaxsim.workload.readers import spread

AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_ROW = "2023-11-16 18:15:46.6805900,374,44\n"
MOONCAKE_ROW = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'


def data(name: str) -> Path:
    folder = os.environ.get("JAXSIM_DATA")
    if not folder:
        pytest.skip("JAXSIM_DATA is not set: no traces")
    return Path(folder) / "traces" / name


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "trace.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# Published with the traces: rows, requests/s, CV of the gaps, then mean, p50, p95, p99 of prompts and outputs.
AZURE = {
    "conv": (19366, 5.53, 1.09, (1155, 1020, 4083, 4142), (211, 129, 451, 601)),
    "code": (8819, 2.57, 13.2, (2048, 1469, 7303, 7436), (28, 13, 90, 251)),
}


@pytest.mark.parametrize("name", AZURE)
def test_azure_statistics_are_those_published(name):
    workload = read_trace(data(f"azure_2023_{name}.csv"))
    rows, rate, cv, prompt, output = AZURE[name]
    gaps = np.diff(workload.ticks)
    assert len(workload.ticks) == rows
    assert workload.rate_rps == pytest.approx(rate, abs=0.005)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.05)
    for tokens, (mean, *points) in ((workload.prompt_len, prompt), (workload.output_len, output)):
        assert tokens.mean() == pytest.approx(mean, abs=0.5)
        np.testing.assert_allclose(np.percentile(tokens, (50, 95, 99)), points, atol=0.5)


def test_mooncake_statistics_are_those_published():
    workload = read_trace(data("mooncake_conversation.jsonl"))
    assert len(workload.ticks) == 12031
    assert workload.rate_rps == pytest.approx(3.40, abs=0.005)
    assert workload.prompt_len.mean() == pytest.approx(12035, abs=0.5)
    assert np.percentile(workload.prompt_len, 50) == pytest.approx(6909, abs=0.5)
    assert workload.output_len.mean() == pytest.approx(343, abs=0.5)


def test_mooncake_times_are_spread_inside_their_windows():
    path = data("mooncake_conversation.jsonl")
    recorded = read_trace(path, spread_s=0).ticks
    times = read_trace(path)
    np.testing.assert_array_equal(times.ticks, read_trace(path).ticks)
    assert (np.diff(times.ticks) >= 0).all()
    assert len(np.unique(times.ticks)) > 12000
    distinct = np.unique(recorded)
    ends = np.append(distinct[1:], distinct[-1] + 30_000_000)
    group = np.searchsorted(distinct, recorded)
    # Times count from the first request, which lies inside the first window.
    low, high = (recorded - times.ticks).max(), (ends[group] - times.ticks).min()
    assert 0 <= low < high <= 30_000_000


def test_times_are_exact_to_100_ns(tmp_path):
    rows = [
        "2023-11-30 23:59:59.9999999,1,1",
        "2023-12-01 00:00:00,2,1",
        "2023-12-01T00:00:00.5,3,1",
        "2023-12-01 01:00:00.500001+01:00,4,1",  # half an hour and more is an offset from UTC
        "2023-12-01 00:00:00.5000011Z,5,1",
    ]
    workload = read_trace(written(tmp_path, AZURE_HEAD + "\r\n".join(rows)))
    assert workload.ticks.tolist() == [0, 1, 5_000_001, 5_000_011, 5_000_012]
    assert workload.prompt_len.tolist() == [1, 2, 3, 4, 5]


def test_columns_are_found_by_name_and_blank_lines_ignored(tmp_path):
    text = "\ufeffGeneratedTokens,model,TIMESTAMP,ContextTokens\n\n7,m,2023-11-16 18:15:46,374\n\n"
    workload = read_trace(written(tmp_path, text))
    assert (workload.prompt_len.tolist(), workload.output_len.tolist()) == ([374], [7])


def test_limit_keeps_the_first_requests(tmp_path):
    path = written(tmp_path, "".join(MOONCAKE_ROW.replace("27482", str(3000 * (i // 4))) for i in range(40)))
    whole, part = read_trace(path), read_trace(path, limit=6)
    np.testing.assert_array_equal(part.ticks, whole.ticks[:6])


def test_only_quantised_times_are_spread():
    second = 10_000_000
    quantised = np.repeat(np.arange(5) * 3 * second, 4)
    moved = spread(quantised, 3 * second)
    assert (moved // (3 * second) == quantised // (3 * second)).all()
    for times in (np.arange(20) * 3 * second, np.array([0, 0, 1, 2, 2]) * second):  # no repeats; closer than a window
        np.testing.assert_array_equal(spread(times, 3 * second), times)


BROKEN = [
    (AZURE_HEAD, "auto", "no requests in the trace"),
    ("", "auto", "the file is empty"),
    ("\n\n", "auto", "the file is empty"),
    ("TIMESTAMP,ContextTokens\n" + AZURE_ROW, "auto", "line 1: GeneratedTokens missing"),
    (AZURE_ROW, "auto", "line 1: TIMESTAMP, ContextTokens, GeneratedTokens missing"),
    (AZURE_HEAD + AZURE_ROW + "2023-11-16 18:15:47,374\n", "auto", "line 3: 2 fields"),
    (AZURE_HEAD + "2023-11-16 18:15:47,374,44,1\n", "auto", "line 2: 4 fields"),
    (AZURE_HEAD + "2023-11-16 18:15:46,374,4.5\n", "auto", "line 2: GeneratedTokens '4.5'; expected an integer"),
    (AZURE_HEAD + "2023-11-16 18:15:46,,4\n", "auto", "line 2: ContextTokens ''"),
    (AZURE_HEAD + "2023-11-16 18:15:46,1_000,4\n", "auto", "line 2: ContextTokens '1_000'"),
    (AZURE_HEAD + "2023-11-16 18:15:46,0,4\n", "auto", "line 2: prompt length 0; expected tokens from 1"),
    (AZURE_HEAD + "2023-11-16 18:15:46,5,-4\n", "auto", "line 2: output length -4; expected tokens from 1"),
    (AZURE_HEAD + "2023-11-16 18:15:46," + "9" * 17 + ",4\n", "auto", "line 2: prompt length 9999"),
    (AZURE_HEAD + "2023-11-16 18:15:46," + "9" * 40 + ",4\n", "auto", "line 2: ContextTokens '9999"),
    (AZURE_HEAD + "2023-11-31 18:15:46,5,4\n", "auto", "line 2: TIMESTAMP '2023-11-31 18:15:46'"),
    (AZURE_HEAD + "2023-11-16 24:15:46,5,4\n", "auto", "line 2: TIMESTAMP"),
    (AZURE_HEAD + "2023-11-16 18:15:46.12345678,5,4\n", "auto", "line 2: TIMESTAMP"),
    (AZURE_HEAD + "-2023-11-16 18:15:46,5,4\n", "auto", "line 2: TIMESTAMP"),
    (AZURE_HEAD + AZURE_ROW + "2023-11-16 18:15:46.6805899,5,4\n", "auto", "line 3: its time is before that of line 2"),
    (AZURE_HEAD + AZURE_ROW + "2033-11-16 18:15:46,5,4\n", "auto", "line 3: 50 days after the first"),
    (AZURE_HEAD + '2023-11-16 18:15:46,"5,4\n', "auto", "line 2: broken CSV"),
    (MOONCAKE_ROW + "{\n", "auto", "line 2: '{'; expected a JSON object"),
    (MOONCAKE_ROW + "[1]\n", "auto", "line 2: '[1]'; expected a JSON object"),
    (MOONCAKE_ROW + "\n" + MOONCAKE_ROW.replace("27482", "27481"), "auto", "line 3: its time is before that of line 1"),
    (MOONCAKE_ROW.replace("27482", "-1"), "auto", "line 1: timestamp -1; expected milliseconds from 0"),
    (MOONCAKE_ROW.replace("6955", "0"), "auto", "line 1: prompt length 0"),
    (MOONCAKE_ROW.replace("52", "0"), "auto", "line 1: output length 0"),
    (MOONCAKE_ROW.replace("52", "5.5"), "auto", "line 1: output_length '5.5'; expected an integer"),
    (MOONCAKE_ROW.replace("52", "true"), "auto", "line 1: output_length 'True'"),
    (MOONCAKE_ROW.replace("output_length", "output"), "auto", "line 1: output_length missing"),
    (MOONCAKE_ROW.replace("52", "9" * 5000), "auto", "line 1: '{"),
    (AZURE_HEAD + AZURE_ROW, "mooncake", "line 1: 'TIMESTAMP,ContextTokens,GeneratedTokens'; expected a JSON object"),
    (MOONCAKE_ROW, "azure", "line 1: TIMESTAMP, ContextTokens, GeneratedTokens missing"),
    (b"\xff\xfe\x00", "auto", "a text file in UTF-8"),
]


@pytest.mark.parametrize(("text", "format", "message"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_trace_is_one_line_with_its_number(tmp_path, text, format, message):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_trace(path, format)
    assert str(error.value).startswith(f"workload.path={path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_missing_file_and_bad_options(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(ConfigError, match="workload.path=.*a readable trace file"):
            read_trace(path)
    path = written(tmp_path, MOONCAKE_ROW)
    for options, key in (({"format": "csv"}, "format"), ({"limit": 0}, "limit"), ({"spread_s": -1}, "spread_s")):
        with pytest.raises(ConfigError, match=f"workload.{key}="):
            read_trace(path, **options)  # pyright: ignore[reportArgumentType]


def trace() -> TraceWorkload:
    return TraceWorkload(np.array([0, 10, 40, 60, 100]) * 10**6, np.arange(1, 6), np.arange(11, 16))


def test_a_seed_shifts_the_start_row():
    workload = trace()
    assert workload.rate_rps == pytest.approx(4 / 10.0)
    assert workload.start_row(0) == 0
    shifted = next(seed for seed in range(20) if workload.start_row(seed) == 3)
    requests = workload.sample(shifted)
    assert requests.prompt_len.tolist() == [4, 5, 1, 2, 3]
    assert requests.output_len.tolist() == [14, 15, 11, 12, 13]
    # recorded 60 and 100 (a gap of 4 s), the mean gap of 2.5 s at the wrap, then 0, 10, 40
    assert requests.arrival_s.tolist() == [0.0, 4.0, 6.5, 7.5, 10.5]
    assert workload.sample(shifted, 2).arrival_s.tolist() == [0.0, 4.0]
    assert workload.sample(0, 7).prompt_len.tolist() == [1, 2, 3, 4, 5, 1, 2]


def test_seeds_start_far_apart():
    workload = TraceWorkload(np.arange(10_000), np.ones(10_000, np.int64), np.ones(10_000, np.int64))
    starts = np.sort([workload.start_row(seed) for seed in range(5)])
    assert np.diff(np.append(starts, starts[0] + 10_000)).min() > 1000


def test_one_request_and_bad_samples():
    workload = TraceWorkload(np.array([0]), np.array([5]), np.array([6]))
    assert workload.rate_rps == np.inf
    assert workload.sample(3).arrival_s.tolist() == [0.0]
    for seed, n, key in ((-1, 1, "seed"), (1.5, 1, "seed"), (0, 0, "n"), (0, 2.5, "n")):
        with pytest.raises(ConfigError, match=f"^{key}="):
            workload.sample(seed, n)  # pyright: ignore[reportArgumentType]


def test_too_long_requests_are_refused_or_dropped_with_the_count():
    segments = [[("a", 0, 9)], [("b", 0, 100)], [("c", 0, 99)], [("d", 0, 300)]]
    requests = Requests(np.arange(4.0), np.array([9, 100, 99, 300]), np.array([500, 1, 1, 1]), segments=segments)
    with pytest.raises(ConfigError) as error:
        drop_or_refuse(requests, 100)
    assert "workload.too_long=error: 2 of 4 requests" in str(error.value)
    assert "the first is request 2 with 100" in str(error.value)
    kept, dropped = drop_or_refuse(requests, 100, "drop")
    assert (dropped, kept.arrival_s.tolist(), kept.prompt_len.tolist()) == (2, [0.0, 2.0], [9, 99])
    assert kept.output_len.tolist() == [500, 1]  # a long output is only cut, by the engine
    assert kept.segments == [segments[0], segments[2]]
    assert drop_or_refuse(requests, 301) == (requests, 0)
    with pytest.raises(ConfigError, match="4 of 4 .* none is left"):
        drop_or_refuse(requests, 9, "drop")
    with pytest.raises(ConfigError, match="error or drop"):
        drop_or_refuse(requests, 9, "keep")


def test_trace_from_a_config(tmp_path):
    config = {"kind": "trace", "path": None, "format": "auto", "limit": 1, "spread_s": 3.0, "too_long": "drop"}
    with pytest.raises(ConfigError, match="workload.path=None"):
        workload_from_config(config)
    path = written(tmp_path, MOONCAKE_ROW * 2)
    workload = workload_from_config(config | {"path": str(path), "rate_rps": None})
    assert isinstance(workload, TraceWorkload)
    assert workload.prompt_len.tolist() == [6955]
    with pytest.raises(ConfigError, match="workload.rate_rps=3: "):
        workload_from_config(config | {"path": str(path), "rate_rps": 3})


def test_priorities_are_those_of_the_file_or_drawn(tmp_path):
    row = '{"timestamp": %d, "input_length": 5, "output_length": 5%s}\n'
    path = written(tmp_path, row % (0, ', "priority": 2') + row % (1, "") + row % (2, ', "priority": -1'))
    assert read_trace(path).sample(0).priority.tolist() == [2, 0, -1]
    assert read_trace(path, limit=2).sample(0, 3).priority.tolist() == [2, 0, 2]
    drawn = workload_from_config({"kind": "trace", "path": path, "priority": {"values": [3, 4]}})
    assert set(drawn.sample(0, 100).priority.tolist()) == {3, 4}
    kept, _ = drop_or_refuse(read_trace(path).sample(0)._replace(prompt_len=np.array([5, 90, 5])), 50, "drop")
    assert kept.priority.tolist() == [2, -1]
    path = written(tmp_path, row % (0, ', "priority": "high"'))
    with pytest.raises(ConfigError, match="line 1: priority 'high'; expected an integer"):
        read_trace(path)
