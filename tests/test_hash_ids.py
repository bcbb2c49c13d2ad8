"""Hash ids of traces: segments, the size of their blocks, and the hit rate of a cache that never evicts."""

import json

import numpy as np
import pytest

from jaxsim.engine import AffineCost, EngineConfig, Requests, Status, simulate
from jaxsim.errors import ConfigError
from jaxsim.workload import TraceWorkload, read_trace, reusable_share, reusable_tokens, workload_from_config

PUBLISHED = 0.37338  # of the prompt tokens of the Mooncake conversation trace, full blocks of 512, last token computed


def written(tmp_path, records, **more):
    path = tmp_path / "trace.jsonl"
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, record, strict=False)) | more) + "\n" for record in records))
    return path


def segments(path, size, **options):
    return read_trace(path, hash_block_size=size, prefix_caching=True, **options).segments


def test_ids_become_slices_of_one_stream(tmp_path):
    path = written(tmp_path, [(0, 20, 1, [70, 71, 9]), (0, 24, 1, [70, 71, 8]), (0, 5, 1), (0, 8, 1, [9])])
    # Ids are numbered 0 (70), 1 (71), 2 (9), 3 (8); the last block of 20 tokens is half full.
    expected = [[("h", 0, 20)], [("h", 0, 16), ("h", 24, 8)], None, [("h", 16, 8)]]
    assert segments(path, 8) == expected
    assert segments(path, 8, limit=2) == expected[:2]
    assert read_trace(path).segments is None  # without prefix caching no size is asked for


def test_tokens_without_an_id_are_the_requests_own(tmp_path):
    path = written(tmp_path, [(0, 20, 1, ["a", "b"]), (0, 17, 1, ["a", "b"]), (0, 3, 1, [])])
    assert segments(path, 8) == [
        [("h", 0, 16), ("t0", 0, 4)],
        [("h", 0, 16), ("t1", 0, 1)],
        [("t2", 0, 3)],
    ]


@pytest.mark.parametrize(
    ("records", "size", "message"),
    [
        (
            [(0, 6758, 1, range(14))],
            None,
            "hash_block_size=null: must be the tokens of a hash id, .* 512 fits",
        ),
        ([(0, 6758, 1, range(14))], 16, "=16: line 1 has 14 hash ids for 6758 tokens, not 423; 512 fits the file"),
        ([(0, n, 1, [1]) for n in (512, 513, 9)], 512, "=512: line 2 has 1 hash ids for 513 tokens, not 2; 1024 fits"),
        ([(0, 30, 1, [1, 2]), (0, 30, 1, [1])], 16, "=16: line 2 has 1 hash ids .* no size fits all lines"),
        ([(0, 32, 1, [1, 2]), (0, 31, 1, [1]), (0, 15, 1, [])], 512, "=512: line 1 .* 16 fits the file"),
        ([(0, 32, 1)], 16, "=16: must be null: the trace has no hash ids"),
        ([(0, 32, 1, [1])], 0, "=0: must be a number of tokens"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(tmp_path, records, size, message):
    path = written(tmp_path, [(*record[:3], *(list(ids) for ids in record[3:])) for record in records])
    with pytest.raises(ConfigError, match=f"workload.hash_block_size{message.removeprefix('hash_block_size')}"):
        segments(path, size)


def test_ids_that_are_no_list_name_their_line(tmp_path):
    for ids in (3, [1.5], [True]):
        with pytest.raises(ConfigError, match="line 2: hash_ids .*expected a list"):
            segments(written(tmp_path, [(0, 8, 1, [1]), (0, 8, 1, ids)]), 8)


def test_bailian_and_timed_trace_count_in_seconds(tmp_path):
    records = [(1.5, 16, 1, [1]), (61.25, 16, 2, [1])]
    path = written(tmp_path, records, chat_id=5, turn=1)
    assert read_trace(path).ticks.tolist() == [0, 597_500_000]
    path = written(tmp_path, records)
    assert read_trace(path, "timed_trace").ticks.tolist() == [0, 597_500_000]
    with pytest.raises(ConfigError, match="line 1: timestamp '1.5'; expected an integer; format=timed_trace reads sec"):
        read_trace(path)


def test_a_config_needs_the_size_under_prefix_caching_only(tmp_path):
    path = written(tmp_path, [(0, 600, 1, [1, 2])])
    config = {"kind": "trace", "path": str(path), "hash_block_size": None}
    assert isinstance(workload_from_config(config), TraceWorkload)
    with pytest.raises(ConfigError, match="workload.hash_block_size=null"):
        workload_from_config(config, prefix_caching=True)
    workload = workload_from_config(config | {"hash_block_size": 512}, prefix_caching=True)
    assert workload.sample(0, 3).segments == [[("h", 0, 600)]] * 3


def by_hand(records, size):
    """Hit tokens per request: leading ids seen as full blocks of earlier requests, the last token never hit."""
    seen, hits = set(), []
    for record in records:
        ids, tokens = record["hash_ids"], record["input_length"]
        found = 0
        while found < (tokens - 1) // size and ids[found] in seen:
            found += 1
        hits.append(found * size)
        seen.update(ids[: tokens // size])
    return np.array(hits)


def mooncake(data):
    path = data / "traces" / "mooncake_conversation.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    workload = read_trace(path, hash_block_size=512, prefix_caching=True)
    assert isinstance(workload, TraceWorkload)
    return records, workload.sample(0)


def test_infinite_cache_on_mooncake(data):
    records, requests = mooncake(data)
    hits = by_hand(records, 512)
    assert hits.sum() / requests.prompt_len.sum() == pytest.approx(PUBLISHED, abs=5e-6)
    np.testing.assert_array_equal(reusable_tokens(requests, 512), hits)
    assert reusable_share(requests, 512) == pytest.approx(PUBLISHED, abs=5e-6)
    with pytest.raises(ConfigError, match="hash_block_size=16: line 1 has 14 hash ids .* 512 fits the file"):
        read_trace(data / "traces" / "mooncake_conversation.jsonl", hash_block_size=16, prefix_caching=True)


def test_an_engine_that_evicts_nothing_finds_the_same(data):
    """The first 600 requests, one at a time, so that each finds all blocks of those before it."""
    records, whole = mooncake(data)
    requests = Requests(*(field if field is None else field[:600] for field in whole))  # pyright: ignore
    engine = EngineConfig(1, 16384, 30_000, 131_072, block_size=512, enable_prefix_caching=True)
    done = simulate(requests, engine, AffineCost(1e-3, 1e-6, 1e-5, 1e-9), clients=1)
    assert done.status == Status.DONE
    np.testing.assert_array_equal(done.hit_tokens, by_hand(records[:600], 512))


def test_reuse_counts_outputs_and_never_the_last_token():
    requests = Requests(
        arrival_s=np.array([2.0, 0.0, 1.0]),
        prompt_len=np.array([32, 16, 24]),
        output_len=np.array([4, 9, 1]),
        segments=[[("a", 0, 16), ("out", 0, 16)], [("a", 0, 16)], [("a", 0, 16), ("out", 0, 8)]],
        output_stream=["x", "out", "y"],
    )
    # Request 1 computes 24 tokens: 3 blocks of 8. Request 2 may find 2 of its 3 blocks, request 0 all that exist.
    assert reusable_tokens(requests, 8).tolist() == [24, 0, 16]
