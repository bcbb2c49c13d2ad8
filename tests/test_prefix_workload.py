"""Shared system prompts and conversations: hand calculation, common random numbers, bad input."""

from typing import Any

import numpy as np
import pytest

from jaxsim.engine import AffineCost, EngineConfig, Status, simulate
from jaxsim.errors import ConfigError
from jaxsim.workload import Arrival, Length, Prefix, Workload, reusable_share, reusable_tokens, workload_from_config


def workload(prefix: Prefix | None = None, **changes) -> Workload:
    fields: dict[str, Any] = dict(rate_rps=2.0, arrival=Arrival(), prompt=Length("lognormal", mean=100, cv=1))
    fields |= dict(output=Length("lognormal", mean=50, cv=1), prefix=prefix)
    return Workload(**fields | changes)


def by_conversation(requests) -> dict[str, list[int]]:
    talks: dict[str, list[int]] = {}
    for i, name in enumerate(requests.output_stream):
        talks.setdefault(name.partition(".")[0], []).append(i)
    return talks


def test_no_structure_changes_nothing():
    plain, off = workload().sample(3, 50), workload(Prefix()).sample(3, 50)
    assert off.segments is None
    for one, other in zip(plain[:3], off[:3], strict=True):
        np.testing.assert_array_equal(one, other)


def test_system_prompts_stand_in_front_of_the_same_requests():
    plain, shared = workload().sample(3, 500), workload(Prefix(groups=4, length=Length(value=64))).sample(3, 500)
    np.testing.assert_array_equal(shared.prompt_len, plain.prompt_len + 64)
    np.testing.assert_array_equal(shared.output_len, plain.output_len)
    np.testing.assert_array_equal(shared.arrival_s, plain.arrival_s)
    assert {parts[0] for parts in shared.segments} == {(f"s{group}", 0, 64) for group in range(4)}
    assert all(sum(part[2] for part in parts) == n for parts, n in zip(shared.segments, shared.prompt_len, strict=True))
    # All but the first request of a group find its 64 tokens.
    assert reusable_tokens(shared, 16).tolist().count(64) == 496


def test_popularity_follows_zipf_and_the_unique_share_nothing():
    prefix = Prefix(groups=3, length=Length(value=32), zipf=1.0, unique=0.25)
    requests = workload(prefix).sample(0, 20_000)
    names = [parts[0][0] for parts in requests.segments]
    own = np.array([name.startswith("c") for name in names])
    assert own.mean() == pytest.approx(0.25, abs=0.01)
    for group, weight in enumerate((6, 3, 2)):  # 1, 1/2, 1/3 over 11/6
        assert names.count(f"s{group}") / (~own).sum() == pytest.approx(weight / 11, abs=0.012)
    alone = workload(Prefix(groups=3, length=Length(value=32), unique=1.0)).sample(0, 200)
    assert reusable_share(alone, 16) == 0.0
    np.testing.assert_array_equal(alone.prompt_len, workload(prefix).sample(0, 200).prompt_len)


def test_a_follow_up_quotes_all_that_was_said():
    prefix = Prefix(groups=1, length=Length(value=10), turns=Length(value=3), think_time_s=5.0)
    requests = workload(prefix).sample(1, 400)
    whole = [mine for mine in by_conversation(requests).values() if len(mine) == 3]
    assert len(whole) > 50
    for first, second, third in whole:
        assert requests.arrival_s[first] < requests.arrival_s[second] < requests.arrival_s[third]
        for earlier, later in ((first, second), (second, third)):
            quoted = [*requests.segments[earlier], (requests.output_stream[earlier], 0, requests.output_len[earlier])]
            assert requests.segments[later][:-1] == quoted
            new = requests.segments[later][-1][2]
            assert requests.prompt_len[later] == requests.prompt_len[earlier] + requests.output_len[earlier] + new
    assert (np.diff(requests.arrival_s) >= 0).all()
    np.testing.assert_array_equal(workload(prefix).sample(1, 100).prompt_len, requests.prompt_len[:100])


def test_conversations_arrive_at_the_rate_over_their_turns():
    prefix = Prefix(turns=Length("empirical", values=(1, 3)), think_time_s=2.0)
    requests = workload(prefix, rate_rps=4.0).sample(0, 40_000)
    assert len(requests.arrival_s) / requests.arrival_s[-1] == pytest.approx(4.0, rel=0.03)
    gaps = [
        requests.arrival_s[later] - requests.arrival_s[earlier]
        for mine in by_conversation(requests).values()
        for earlier, later in zip(mine, mine[1:], strict=False)
    ]
    assert np.mean(gaps) == pytest.approx(2.0, rel=0.03)


def test_the_engine_finds_what_conversations_share():
    """One client: every request finds all full blocks of those before it, outputs of earlier turns included."""
    prefix = Prefix(groups=2, length=Length(value=40), unique=0.3, turns=Length(value=3), think_time_s=1.0)
    requests = workload(prefix).sample(5, 60)
    engine = EngineConfig(1, 4096, 4000, 4096, enable_prefix_caching=True)
    done = simulate(requests, engine, AffineCost(1e-3, 1e-6, 1e-5, 1e-9), clients=1)
    assert done.status == Status.DONE
    np.testing.assert_array_equal(done.hit_tokens, reusable_tokens(requests, 16))
    assert done.hit_tokens.sum() > 0.3 * requests.prompt_len.sum()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"groups": -1}, "workload.prefix.groups=-1: an integer from 0"),
        ({"groups": 1.5}, "workload.prefix.groups=1.5: an integer from 0"),
        ({"unique": 2}, "workload.prefix.unique=2: a number from 0 to 1"),
        ({"zipf": -1}, "workload.prefix.zipf=-1: a number from 0 to 10"),
        ({"length": {"value": 0}}, "workload.prefix.length.value=0: "),
        ({"length": {"valu": 3}}, "workload.prefix.length.valu=3: no such key"),
        ({"turns": {"value": 5000}}, "workload.prefix.turns.value=5000: at most 1000"),
        ({"think_time_s": "long"}, "workload.prefix.think_time_s=long: a number"),
        ({"share": 1}, "workload.prefix.share=1: no such key; there are groups, length"),
        (3, "workload.prefix=3: a group of settings"),
    ],
)
def test_bad_settings_name_their_key(section, message):
    config = {"kind": "synthetic", "rate_rps": 1.0, "prompt": {"value": 8}, "output": {"value": 8}, "prefix": section}
    with pytest.raises(ConfigError) as error:
        workload_from_config(config)
    assert str(error.value).startswith(message)
