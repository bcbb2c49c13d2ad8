"""The search for capacity, on stand-ins whose answer is known."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsim.engine import Requests, Simulation, Status, Totals
from jaxsim.memory import Capacity
from jaxsim.metrics import Interval
from jaxsim.settings import SearchSettings, SloSettings
from jaxsim.tuning import capacity
from jaxsim.tuning.capacity import CapacitySearch, choose
from jaxsim.tuning.evaluate import Simulator
from jaxsim.tuning.figures import figures, limited_by, number_of_instances, over_seeds
from jaxsim.tuning.load import Ladder, Probe, Verdict, integer_ladder, load_ladder
from jaxsim.tuning.replicates import Replicates, warmup_share
from jaxsim.tuning.slo import judge
from jaxsim.tuning.space import Candidate

PS_PER_MS = 10**9


def simulation(ttft_ms, arrival_ms=None, status=Status.DONE, closed=False, **totals) -> Simulation:
    """A run in which every request has one token and waits for nothing but its prefill."""
    ttft = np.asarray(ttft_ms, np.float64)
    arrival = np.asarray(arrival_ms if arrival_ms is not None else 1000.0 * np.arange(len(ttft)), np.float64)
    sent, first = (np.rint(times * PS_PER_MS).astype(np.int64) for times in (arrival, arrival + ttft))
    ones = np.ones(len(ttft), np.int32)
    known: Any = dict.fromkeys(Totals._fields, 0) | {"duration_s": (arrival + ttft).max() / 1000} | totals
    return Simulation(
        sent, sent, first, first, ones, ones, 0 * ones, 0 * ones, 0 * ones, status, Totals(**known), closed
    )


def search_all(rungs, truth, guesses, each, near=False):
    ladder, rounds = Ladder(rungs, guesses, near), 0
    while not ladder.done:
        probes = ladder.ask(each)
        assert {probe.search for probe in probes} == set(np.flatnonzero(ladder.open))
        assert all(0 <= probe.rung < len(rungs) for probe in probes)
        ladder.tell(probes, [Verdict(probe.rung <= truth[probe.search], "above") for probe in probes])
        rounds += 1
        assert rounds < 60
    return ladder


@given(
    st.lists(st.tuples(st.integers(-1, 99), st.floats(0, 1e3)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_search_ends_at_the_highest_rung_that_passes(searches, each, near):
    truth, guesses = zip(*searches, strict=True)
    rungs = np.arange(1.0, 101.0)
    ladder = search_all(rungs, truth, guesses, each, near)
    assert ladder.low.tolist() == list(truth)
    assert ladder.values().tolist() == [0.0 if rung < 0 else rungs[rung] for rung in truth]
    assert ladder.capped.tolist() == [rung == 99 for rung in truth]
    assert [bool(reason) for reason in ladder.reason] == [rung < 99 for rung in truth]


def test_a_good_guess_takes_few_rounds():
    rungs = load_ladder(0.01, 1e5, 0.02)
    truth = len(rungs) // 2
    ladder, rounds = Ladder(rungs, [rungs[truth + 5]]), 0
    while not ladder.done:
        probes = ladder.ask()
        ladder.tell(probes, [Verdict(probe.rung <= truth, "") for probe in probes])
        rounds += 1
    assert ladder.low[0] == truth and rounds <= 6  # a first round, one gallop, log2 of the stride


def test_a_near_guess_takes_fewer_probes_and_a_restart_finds_another_answer():
    ladder = Ladder(np.arange(1.0, 101.0), [50.0, 50.0], near=True)
    assert ladder.ask() == [Probe(0, 49), Probe(1, 49)]  # and not the lowest
    ladder.tell([Probe(0, 49), Probe(1, 49)], [Verdict(True, ""), Verdict(None, "cannot be told")])
    assert ladder.ask() == [Probe(0, 51), Probe(1, 47)]
    ladder.tell([Probe(0, 51), Probe(1, 47)], [Verdict(False, "slow"), Verdict(True, "")])
    ladder.tell([Probe(0, 50), Probe(1, 48)], [Verdict(False, "slow"), Verdict(True, "")])
    assert ladder.done and ladder.values().tolist() == [50, 49] and ladder.reason == ["slow", "cannot be told"]
    ladder.restart(0, 60.0)
    assert ladder.open.tolist() == [True, False] and ladder.ask() == [Probe(0, 59)]


def test_a_failure_below_what_passed_takes_it_back():
    ladder = Ladder(np.arange(1.0, 101.0), [50.0])
    ladder.tell([Probe(0, 0), Probe(0, 49)], [Verdict(True, ""), Verdict(True, "")])
    ladder.tell([Probe(0, 30), Probe(0, 50)], [Verdict(False, "slow"), Verdict(False, "slower")])
    assert (ladder.low[0], ladder.high[0]) == (0, 30) and ladder.reason == ["slow"] and ladder.passed[0] == {0, 49}


def test_what_passes_above_a_failure_does_not_count():
    ladder = Ladder(np.arange(1.0, 101.0), [50.0])
    ladder.tell([Probe(0, 0), Probe(0, 49)], [Verdict(False, "slow"), Verdict(True, "")])
    assert ladder.done and ladder.values()[0] == 0 and ladder.reason[0] == "slow"


def test_ladders():
    loads = load_ladder(0.5, 20.0, 0.02)
    assert loads[0] == 0.5 and loads[-2] < 20.0 <= loads[-1]
    assert np.allclose(loads[1:] / loads[:-1], 1.02)
    seats = integer_ladder(1000, 0.02)
    assert seats[0] == 1 and seats[-1] == 1000 and (seats[:100] == np.arange(1, 101)).all()
    assert ((seats[1:] - seats[:-1]) <= np.maximum(1, 0.02 * seats[:-1])).all()


def candidates(*seats: int) -> list[Candidate]:
    # The number of seats is all that the stand-in wants of an engine.
    return [Candidate({"max_num_seqs": count, "max_num_batched_tokens": 2048}, count, None) for count in seats]  # type: ignore[arg-type]


def stand_in(carries, holds):
    """TTFT is 100 ms up to `carries(seats)` req/s or `holds(seats)` clients, and 300 ms above."""

    def simulate(requests, engine, cost, *, clients, stretch, on_done=None, **_):
        runs = []
        for seats, users, factor in zip(engine, clients, stretch, strict=True):
            good = users <= holds(seats) if users else 1 / factor <= carries(seats)
            runs.append(simulation(np.full(40, 100.0 if good else 300.0), closed=users is not None))
            if on_done:
                on_done(len(runs) - 1, runs[-1])
        return runs

    return simulate


def run_search(carries, holds, seats=(8, 32), seeds=3, **settings):
    requests = [Requests(np.arange(40.0), np.full(40, seed), np.ones(40, int)) for seed in range(seeds)]
    sampled, asked = Replicates(requests, [1.0] * seeds, [0] * seeds), SearchSettings(**settings)
    simulator = Simulator(sampled, SloSettings(), asked, simulate=stand_in(carries, holds))
    search = CapacitySearch(
        candidates(*seats), range(seeds), sampled.count, asked, SloSettings(), simulator, drawable=sampled.drawable
    )
    simulated = []
    while not search.done:
        search.round(lambda: simulated.append(1))
    assert len(simulated) == search.simulations
    return search


def found(search, kind, candidate):
    result = search.found(kind, candidate)
    assert result is not None
    return result


def test_capacity_is_found_within_a_step_for_every_setting():
    search = run_search(lambda seats: seats / 8, lambda seats: seats // 2)
    for index, seats in enumerate((8, 32)):
        load, clients = found(search, "load", index), found(search, "clients", index)
        assert seats / 8 / 1.02 < load.interval.mean < seats / 8 * 1.02
        assert clients.values.tolist() == [min(seats // 2, 20)] * 3
        assert load.finished and len(load.outcomes) == 3
        assert load.values.mean() == pytest.approx(load.interval.mean)


def test_the_first_clients_fill_the_seats_or_four_fifths_of_the_blocks():
    pool, asked = Capacity(1000, 0, 0, 0, 16_000, 1.0), {}
    some = [dataclasses.replace(one, capacity=pool) for one in candidates(64, 400)]

    def evaluate(tasks, on_done=None):
        asked.update((task.candidate.max_num_seqs, task.clients) for task in tasks)  # the lowest, then the guess
        raise KeyboardInterrupt

    for request_tokens, first in ((1.0, [64, 400]), (64.0, [64, 200]), (400.0, [32, 32]), (1e6, [1, 1])):
        asked.clear()
        search = CapacitySearch(
            some, [0], 9000, SearchSettings(), SloSettings(), evaluate, request_tokens=request_tokens
        )
        with pytest.raises(KeyboardInterrupt):
            search.round()
        assert list(asked.values()) == pytest.approx(first, rel=0.02)  # as near as the ladder has it


def test_what_the_slo_forbids_at_any_load_is_zero_with_the_reason():
    load = found(run_search(lambda seats: 0.0, lambda seats: 0), "load", 0)
    assert load.values.tolist() == [0, 0, 0] and load.outcomes == []
    assert load.reason == "p99 TTFT above 200 ms: 100.00% of the requests are, 0.01 may"


def test_a_seed_that_was_not_told_anything_yet_has_no_value():
    requests = [Requests(np.arange(40.0), np.ones(40, int), np.ones(40, int))]
    sampled = Replicates(requests, [1.0], [0])
    simulator = Simulator(sampled, SloSettings(), SearchSettings(), simulate=stand_in(lambda *_: 1, lambda _: 4))
    search = CapacitySearch(candidates(8), range(1), 40, SearchSettings(), SloSettings(), simulator)
    assert not found(search, "clients", 0).known
    while not search.done:
        search.round()
    assert found(search, "clients", 0).known and not found(search, "clients", 0).capped


def test_only_what_is_asked_for_is_searched():
    assert run_search(lambda _: 1.0, lambda _: 4, concurrency=False).found("clients", 0) is None
    assert run_search(lambda _: 1.0, lambda _: 4, load=False).found("load", 0) is None


def test_loads_are_shared_rungs_so_that_equal_capacities_tie():
    search = run_search(lambda _: 3.0, lambda _: 4)
    assert (found(search, "load", 0).values == found(search, "load", 1).values).all()


def test_the_best_is_the_largest_mean_and_ties_go_to_fewer_seats():
    few, some, many = candidates(8, 32, 64)
    values = {
        few: np.array([1.0, 1.1, 0.9]),
        some: np.array([2.0, 2.1, 1.9]),
        many: np.array([2.02, 2.09, 1.92]),
    }
    assert choose(values) == (some, many)  # paired differences 0.02, -0.01, 0.02: an interval around 0
    values[many] = np.array([2.1, 2.21, 2.0])  # 0.1, 0.11, 0.1: clearly more
    assert choose(values) == (many, many)
    # Of two seeds the interval is 12.7 standard errors wide: no tie.
    two = {key: value[:2] for key, value in values.items()}
    assert choose(two) == (many, many)
    assert choose({few: np.zeros(3)}) is None and choose({}) is None


def judged(run: Simulation, slo: SloSettings, warmup: float = 0.0) -> Verdict:
    return judge(figures(run, slo, warmup), slo, run.status)


def test_judge_names_what_was_missed():
    slo = SloSettings()
    assert judged(simulation(np.full(100, 199.0)), slo) == Verdict(True, "")
    assert judged(simulation(np.full(100, 201.0)), slo).reason == "p99 TTFT 201 ms above 200 ms"
    assert judged(simulation(np.full(100, 1.0), status=Status.STUCK), slo).reason == "the run ended as STUCK"
    e2el = SloSettings(ttft_ms=None, e2el_ms=50.0, percentile=50.0)
    assert judged(simulation(np.arange(1.0, 101.0)), e2el).reason == "p50 E2EL 50.5 ms above 50 ms"


def test_warmup_requests_do_not_count():
    times = np.concatenate([np.full(10, 999.0), np.full(90, 1.0)])
    assert judged(simulation(times), SloSettings(), 0.1).passed
    assert not judged(simulation(times), SloSettings(), 0.0).passed
    assert warmup_share(0.1, None, 100) == 0.1 and warmup_share(0.1, 50, 100) == 0.5  # the first wave of 50 clients


def test_a_growing_queue_is_unstable_whatever_its_percentile():
    arrival = 10.0 * np.arange(400)
    served = simulation(np.full(400, 1.0), arrival)
    grown = Simulation(**{**vars(served), "first_scheduled_ps": (arrival * 2 * PS_PER_MS).astype(np.int64)})
    assert judged(grown, SloSettings()).reason == "the waiting queue grows"


def test_limited_by_is_the_most_frequent_refusal():
    def row(seats=0, kv=0, budget=0):
        return {"refused_seats": seats, "refused_kv": kv, "refused_budget": budget}

    assert limited_by([row(seats=3), row(kv=4, seats=2)]) == "seats"
    assert limited_by([row()]) == "compute"
    assert limited_by([row(kv=1)]) == "KV cache"
    assert limited_by([row(kv=6, seats=4)]) == "KV cache"


def test_instances_carry_the_interval_of_the_capacity():
    assert number_of_instances(100.0, Interval(9.0, 1.0)) == (12, 10, 13)
    assert number_of_instances(100.0, Interval(9.0, 9.5)) == (12, 6, None)
    assert number_of_instances(100.0, Interval(10.0, math.nan)) == (10, 10, 10)


def test_figures_over_seeds_have_student_intervals():
    # Two values 1 and 3: mean 2, standard error 1, t(0.975, 1) = 12.706.
    assert over_seeds([{"a": 1.0}, {"a": 3.0}])["a"] == pytest.approx((2.0, 12.706), abs=1e-3)


def test_a_lone_search_with_room_for_thousands_of_probes_stays_on_the_ladder():
    ladder = search_all(np.arange(1.0, 101.0), [97], [0.0], 2000)
    assert ladder.low[0] == 97


def test_a_round_of_any_size_is_taken_in_bounded_parts(monkeypatch):
    """The parts hold whole values, all seeds of each, and the answer does not depend on them."""
    whole = run_search(lambda seats: seats / 8, lambda seats: seats // 2)
    sizes, call = [], Simulator.__call__

    def counted(self, tasks, *more):
        sizes.append(len(tasks))
        return call(self, tasks, *more)

    monkeypatch.setattr(Simulator, "__call__", counted)
    monkeypatch.setattr(capacity, "AT_ONCE", 7)
    parts = run_search(lambda seats: seats / 8, lambda seats: seats // 2)
    assert max(sizes) == 6 and len(sizes) > parts.rounds and sum(sizes) == parts.simulations == whole.simulations
    for kind in ("load", "clients"):
        for index in range(2):
            one, other = found(whole, kind, index), found(parts, kind, index)
            assert one.interval == other.interval and repr(one.outcomes) == repr(other.outcomes)
