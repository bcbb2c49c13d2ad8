"""The command line end to end, W&B offline."""

import csv
import json
import os
import re
import subprocess
import sys

import pytest

import jaxsim
from jaxsim.composition import presets
from jaxsim.tuning.curve import SHARES

SMALL = [
    "search.max_num_seqs=[8,64]",
    "search.max_num_batched_tokens=[2048]",
    "search.seeds=2",
    "search.num_requests=100",
    "search.max_num_requests=100",
    "runtime.lanes=4",
    "runtime.compilation_cache=null",
]


def results(folder):
    with (folder / "candidates.csv").open(newline="") as file:
        return json.loads((folder / "summary.json").read_text()), list(csv.DictReader(file))


def test_without_a_sweep_they_are_listed(run):
    code, _, err = run()
    assert code == 2
    assert all(f"+sweep={name}" in err for name in presets("sweep"))


def test_hydras_own_flags_work(run):
    code, out, _ = run("--help")
    assert code == 0 and "max_num_batched_tokens" in out and "llama3_1_8b" in out
    code, out, _ = run("--cfg", "job", "model=qwen3_14b")
    assert code == 0 and "Qwen/Qwen3-14B" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sweep=slo_search"], "sweep=slo_search: needs a plus: +sweep=slo_search"),
        (["+sweep=nothing"], "sweep=nothing: no such preset; must be one of evaluate, pareto, prefix_cache, slo"),
        (["model=llama9"], "model=llama9: no such preset; must be one of deepseek_v3, llama3_1_70b"),
        (["engine.max_num_seq=3"], "engine.max_num_seq=3: no such key, did you mean max_num_seqs?"),
        (["+engine.foo=3"], "engine.foo=3: no such key."),
        (["+foo=3"], "foo=3: no such key."),
        (["foo"], "foo=: cannot be read; must be key=value"),
        (["search.max_num_seqs=[1,2"], "search.max_num_seqs=[1,2: cannot be read; must be key=value"),
        (["--nonsense"], "flags=--nonsense +sweep=slo_search tracking=disabled: unrecognized arguments"),
        (["engine.max_num_seqs=many"], "engine.max_num_seqs=many: must be an integer from 1 up to 4194303, or null"),
        (["slo.percentile=0"], "slo.percentile=0: must be a number above 0 up to 100"),
        (
            ["slo.limits={p95_tttf_ms:100}"],
            "slo.limits.p95_tttf_ms=100.0: must be mean_, median_ or pNN_, then queue_wait, ttft",
        ),
        (["slo.limits={p0_ttft_ms:100}"], "slo.limits.p0_ttft_ms=100.0: must name a percentile above 0 up to 100"),
        (["slo.limits=5"], "slo.limits=5: must be a mapping to numbers from 0, as in {p95_ttft_ms:100}, or null"),
        (["slo.limits={p95_ttft_ms:-1}"], "slo.limits.p95_ttft_ms=-1: must be a number from 0"),
        (["slo.goodput=ttft:200 itl:5"], "slo.goodput=ttft:200 itl:5: must be as in ttft:200 tpot:50 e2el:9000, in ms"),
        (["slo.goodput=fast"], "slo.goodput=fast: must be as in ttft:200 tpot:50"),
        (["search.load=false", "search.concurrency=false"], "search.load=false: must be true unless"),
        (["search.num_requests=null"], "search.num_requests=null: must be an integer for a workload that is not a tr"),
        (["workload.priority.values=[0.5]"], "workload.priority.values=[0.5]: a list of integers"),
        (["engine.tensor_parallel_size=3"], "engine.tensor_parallel_size=3: "),
        (["+sweep=prefix_cache", "engine.batching=static"], "engine.batching=static: must be continuous: "),
        (
            ["+sweep=prefix_cache", "engine.enable_prefix_caching=false"],
            "engine.enable_prefix_caching=false: must be",
        ),
        (["model=llama3_1_70b"], "=llama3_1_70b: no memory is left"),
        (["model.hidden_size=-1"], "model.hidden_size=-1: "),
        (["model.config_json=/nowhere/config.json"], "model.config_json=/nowhere/config.json: "),
        (["hardware.memory_gib=big"], "hardware.memory_gib=big: "),
        (["engine.max_model_len=1000000"], "engine.max_model_len=1000000: must be at most 131072"),
        (["search.max_num_seqs=[4096]", "search.max_num_batched_tokens=[2048]"], "must be at least max_num_seqs=4096"),
        (["engine.enable_chunked_prefill=false"], "must be at least max_model_len=16384"),
        (["engine.max_model_len=1000"], "workload.too_long=error: "),
        (["engine=null"], "engine=null: no such preset; must be one of vllm"),
        (["search.seeds=2", "search=5"], "search=5: no such preset; must be one of cem, cmaes"),
        (["engine=5"], "engine=5: no such preset; must be one of vllm"),
        (["search.max_num_seqs=8.."], "search.max_num_seqs=8..: is no range; must be a list"),
        (["search.strategy=best"], "search.strategy=best: must be one of grid, random, sobol"),
        (["+search.gpu=1"], "search.gpu=1: no such key"),
        (["baseline.block_size=0"], "baseline.block_size=0: must be an integer from 1 up to 1024, or null"),
        (["slo.ttft_ms=${foo}"], "slo.ttft_ms=${foo}: Interpolation key 'foo' not found"),
        (["slo.ttft_ms=4,6"], "slo.ttft_ms=4,6: must be one value: lists as '[1,2]', several runs with --multirun"),
        (["engine.max_num_seqs=8"], "engine.max_num_seqs=8: is searched: use search.max_num_seqs=[8]"),
        (["engine.max_num_batched_tokens=9"], "engine.max_num_batched_tokens=9: is searched: use search.max_num_ba"),
        (["hydra.run.dir=/dev/null/made"], "hydra.run.dir=/dev/null/made: must be a writable folder (Not a directory)"),
        (["model.config_json=5"], "model.config_json=5: a path to"),
        (["workload.path=5", "workload=trace"], "workload.path=5: must be a text"),
        (["hardware.memory_bandwidth_gbps=1e-9"], "hardware=H100-80GB: must be fast enough"),
        (["hardware.tflops_16bit=1e300"], "hardware.tflops_16bit=1e+300: above 0 and at most 1e+06"),
        (["workload=trace", "workload.path=/nowhere.csv"], "workload.path=/nowhere.csv: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, words, expected):
    code, _, err = run(*words, *([] if "sweep" in words[0] else ["+sweep=slo_search"]))
    assert code == 2
    assert err.count("\n") == 1 and expected in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", ""),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\nbroken\n", "line 3"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,0,44\n", "line 2"),
    ],
)
def test_a_bad_trace_is_one_line_with_its_number(run, tmp_path, text, expected):
    (tmp_path / "trace.csv").write_text(text)
    code, _, err = run("+sweep=slo_search", "workload=trace", "workload.path=trace.csv")
    assert code == 2
    assert err.count("\n") == 1 and err.startswith("workload.path=trace.csv: ") and expected in err


def test_slo_search_finds_a_setting_and_leaves_its_files(run_alone, tmp_path):
    code, out, err = run_alone("+sweep=slo_search", "hydra.run.dir=made", *SMALL)
    assert code == 0, err
    summary, rows = results(tmp_path / "made")
    assert [(row["max_num_seqs"], row["status"]) for row in rows] == [("8", "ok"), ("64", "ok")]
    assert summary["max_num_seqs"] in (8, 64) and summary["max_num_batched_tokens"] == 2048
    assert summary["share_above_p99_ttft_ms"] <= 0.01 and 0 < summary["slo_met"] <= 1 and summary["stable"] is True
    assert summary["tied_with"] is None and summary["largest_load_rps"] == summary["load_rps"]  # 2 seeds: no ties
    assert summary["completed"] == 100 and summary["failed"] == 0
    assert summary["limited_by"] in ("seats", "KV cache", "token budget", "compute")
    best = next(row for row in rows if int(row["max_num_seqs"]) == summary["max_num_seqs"])
    assert float(best["load_rps"]) == pytest.approx(summary["load_rps"]) and float(best["clients"]) >= 1
    for name in ("ttft", "tpot", "itl", "e2el", "queue_wait"):
        for figure in ("mean", "p50", "p95", "p99"):
            assert summary[f"{figure}_{name}_ms"] >= 0 and f"{figure}_{name}_ms" in summary["ci95"]
    assert summary["vllm_serve"].endswith("--max-num-batched-tokens 2048 --max-model-len 16384")  # vLLM's defaults
    assert summary["vllm_serve"] in out
    assert "warning" not in err
    folder = next((tmp_path / "made" / "wandb").glob("offline-run-*"))
    assert list(folder.glob("*.wandb"))
    assert f"wandb sync {folder.relative_to(tmp_path)}" in out and "wandb leet" in out
    with (tmp_path / "made" / "curve.csv").open(newline="") as file:
        curve = list(csv.DictReader(file))
    assert [float(row["load_rps"]) / summary["load_rps"] for row in curve] == pytest.approx(SHARES)
    assert float(curve[0]["p99_ttft_ms"]) < 200 < float(curve[-1]["p99_ttft_ms"])


def test_any_key_is_searched_by_a_strategy_and_compared_with_a_baseline(run, tmp_path):
    words = ["search=cem", "search.settings=3", "search.max_num_seqs=8..64:pow2", "search.block_size=[16,32]"]
    words += ["baseline.max_num_seqs=4", "baseline.max_num_batched_tokens=2048", "hardware.price_per_hour=2"]
    words += ["search.max_num_batched_tokens=[2048]", "tracking=disabled", "hydra.run.dir=made"]
    code, out, err = run("+sweep=slo_search", *[word for word in SMALL if "max_num" not in word], *words)
    assert code == 0, err
    summary, rows = results(tmp_path / "made")
    assert summary["strategy"] == "cem" and summary["settings"] == 3 and len(rows) == 4
    assert rows[-1]["baseline"] == "True" and rows[-1]["max_num_seqs"] == "4" == str(
        summary["baseline"]["max_num_seqs"]
    )
    assert summary["block_size"] in (16, 32) and "block_size=" in out and "baseline" in out
    gain = summary["load_rps"] / float(rows[-1]["load_rps"]) - 1
    assert summary["gain_over_baseline"] == pytest.approx(gain)
    # 2 per hour and GPU.
    cost = 2 / 3600 / summary["output_throughput"] * 1e6
    assert summary["cost_per_million_output_tokens"] == pytest.approx(cost)
    assert 0 <= summary["probability_best"] <= summary["probability_within_indifference"] <= 1


def test_pareto_marks_what_no_other_point_beats(run, tmp_path):
    words = ["pareto.shares=[0.2,0.8]", "tracking=disabled", "hydra.run.dir=made", "hardware.price_per_hour=2"]
    code, out, err = run("+sweep=pareto", *SMALL, *words)
    assert code == 0, err
    summary, rows = results(tmp_path / "made")
    assert len(rows) == 4 and summary["front_ttft"] and summary["front_interactivity"]
    on = [row for row in rows if row["front_interactivity"] == "True"]
    assert max(rows, key=lambda row: float(row["interactivity"])) in on
    assert "Throughput per GPU against TTFT" in out
    assert float(rows[0]["cost_per_million_output_tokens"]) > float(rows[1]["cost_per_million_output_tokens"])


def test_a_setting_that_cannot_start_is_a_row_with_its_reason(run, tmp_path):
    words = ["search.max_num_seqs=[8,4096]", "tracking=disabled", "hydra.run.dir=made"]
    code, _, err = run("+sweep=slo_search", *[word for word in SMALL if "max_num_seqs" not in word], *words)
    assert code == 0, err
    _, rows = results(tmp_path / "made")
    assert rows[1]["status"] == "infeasible" and "must be at least max_num_seqs=4096" in rows[1]["reason"]
    assert not (tmp_path / "made" / "wandb").exists()


def test_an_slo_that_nothing_meets_is_bad_input_but_leaves_the_rows(run, tmp_path):
    code, _, err = run("+sweep=slo_search", "slo.ttft_ms=1", "tracking=disabled", "hydra.run.dir=made", *SMALL)
    assert code == 2
    assert err.startswith("search.max_num_seqs=[8,64]: no setting meets the SLO; p99 TTFT") and err.count("\n") == 1
    summary, rows = results(tmp_path / "made")
    assert summary["status"] == "infeasible"
    assert all(row["status"] == "infeasible" and "above 1 ms" in row["reason"] for row in rows)


def test_an_interrupted_search_leaves_what_it_has(run, tmp_path, monkeypatch):
    from jaxsim.tuning import evaluate

    rounds = []

    def interrupted(*args, **options):
        rounds.append(1)
        if len(rounds) == 4:
            raise KeyboardInterrupt
        return slo_search_many(*args, **options)

    slo_search_many = evaluate.simulate_many
    monkeypatch.setattr(evaluate, "simulate_many", interrupted)
    code, _, _ = run("+sweep=slo_search", "tracking=disabled", "hydra.run.dir=made", *SMALL)
    assert code == 130
    summary, rows = results(tmp_path / "made")
    assert summary["status"] == "interrupted"
    assert [row["status"] for row in rows] == ["unfinished", "unfinished"]
    assert all(float(row["load_rps"]) > 0 for row in rows)


def test_a_search_is_finished_by_running_it_again(run, tmp_path, monkeypatch):
    """What was simulated before the interrupt is found, the rest is made; a third run simulates nothing."""
    from jaxsim.tuning import evaluate

    simulated, rounds = [], []

    def counting(requests, *args, **options):
        rounds.append(1)
        if len(rounds) == 4:
            raise KeyboardInterrupt
        simulated.append(len(requests))
        return simulate_many(requests, *args, **options)

    simulate_many = evaluate.simulate_many
    monkeypatch.setattr(evaluate, "simulate_many", counting)
    words = ["+sweep=slo_search", "tracking=disabled", *SMALL]
    assert run(*words, "hydra.run.dir=broken")[0] == 130
    before = sum(simulated)
    code, out, _ = run(*words, "hydra.run.dir=whole", "runtime.lanes=3")  # lanes are no part of a simulation
    whole, total, calls = results(tmp_path / "whole"), sum(simulated), len(rounds)
    assert code == 0 and f"{before:,} found in it, {total - before:,} added" in out
    assert total == whole[0]["simulations"] + 8 * 2  # loads of the curve and seeds
    code, out, _ = run(*words, "hydra.run.dir=again")
    assert code == 0 and f"{total:,} found in it, 0 added" in out and len(rounds) == calls
    assert run(*words, "hydra.run.dir=unkept", "store.path=null")[0] == 0 and len(rounds) > calls
    for name in ("again", "unkept"):
        summary, rows = results(tmp_path / name)
        assert rows == whole[1] and summary | {"seconds": 0} == whole[0] | {"seconds": 0}


def test_shards_are_merged(run, tmp_path):
    """Each has every second setting and a store of its own; all together they leave little to simulate."""
    words = ["+sweep=slo_search", "tracking=disabled", *SMALL]
    for place in (1, 2):
        shard = [f"launcher.shard={place}/2", f"store.path=parts/{place}.sqlite", f"hydra.run.dir=part{place}"]
        assert run(*words, *shard)[0] == 0
        _, rows = results(tmp_path / f"part{place}")
        assert [row["max_num_seqs"] for row in rows] == [("8", "64")[place - 1]]
    code, out, _ = run(*words, "store.merge=parts/*.sqlite", "hydra.run.dir=whole")
    assert code == 0
    found, added = (int(re.findall(rf"([\d,]+) {word}", out)[0].replace(",", "")) for word in ("found in it", "added"))
    assert found > 10 * added
    assert run(*words, "store.path=null", "hydra.run.dir=sole")[0] == 0
    (summary, rows), (sole, expected) = results(tmp_path / "whole"), results(tmp_path / "sole")
    assert rows == expected and summary | {"seconds": 0} == sole | {"seconds": 0}


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1of2", "1/2/3", "a/b", "-1/2"])
def test_a_shard_that_is_none(run, shard):
    code, _, err = run("+sweep=slo_search", f"launcher.shard={shard}", *SMALL)
    assert code == 2 and err == f"launcher.shard={shard}: must be i/n with i from 1 to n, as in 1/8, or null\n"


def test_there_are_no_more_shards_than_settings(run):
    code, _, err = run("+sweep=slo_search", "launcher.shard=1/3", *SMALL)
    assert code == 2 and err == "launcher.shard=1/3: must have at most 2 shards, the number of settings\n"


def test_a_store_that_cannot_be_written_is_said_before_anything_is_simulated(run, tmp_path, monkeypatch):
    from jaxsim.tuning import evaluate

    monkeypatch.setattr(evaluate, "simulate_many", None)
    (tmp_path / "list.txt").write_text("no store " * 1000)
    words = ["+sweep=slo_search", "tracking=disabled", *SMALL]
    code, _, err = run(*words, "store.path=list.txt")
    assert code == 2 and err == "store.path=list.txt: must be a store that can be written (file is not a database)\n"
    code, _, err = run(*words, "store.path=list.txt/store.sqlite")
    assert code == 2 and err.startswith("store.path=list.txt/store.sqlite: must be a store that can be written (")
    code, _, err = run(*words, "store.merge=[nowhere.sqlite]")
    assert code == 2 and err.startswith("store.merge=nowhere.sqlite: must be a store of simulations (")


def test_without_a_place_for_the_store_a_search_goes_on(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    code, out, err = run("+sweep=slo_search", "tracking=disabled", "hydra.run.dir=made", *SMALL)
    assert code == 0 and "vllm serve" in out and "found in it" not in out
    assert err == "warning: simulations are not kept: Not a directory; store.path=FILE keeps them there\n"


def test_an_interrupted_first_round_says_nothing_about_capacity(run, tmp_path, monkeypatch):
    from jaxsim.tuning import evaluate

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "simulate_many", interrupted)
    code, _, err = run("+sweep=slo_search", "tracking=disabled", "hydra.run.dir=made", *SMALL)
    assert code == 130 and err == ""
    summary, rows = results(tmp_path / "made")
    assert summary["status"] == "interrupted" and summary["max_num_seqs"] is None
    assert all(row["status"] == "unfinished" and not row.get("clients") for row in rows)


def test_a_run_folder_that_fails_costs_the_files_only(run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxsim.studies.job.write_json", full)
    words = ["engine.max_num_seqs=8", "engine.max_num_batched_tokens=2048", "slo.percentile=90", "tracking=disabled"]
    code, out, err = run("+sweep=evaluate", "hydra.run.dir=made", *words, *SMALL)
    assert code == 2 and "Latencies at" in out and "p90" in out and "vllm serve" in out
    assert err.startswith("hydra.run.dir=") and err.endswith("must be a writable folder (No space left on device)\n")
    assert err.count("\n") == 1


def test_a_cap_is_shown_as_such_and_static_batching_has_no_serve_line(run, tmp_path):
    words = ["slo.ttft_ms=1e6", "search.load=false", "engine.batching=static", "tracking=disabled"]
    code, out, err = run("+sweep=slo_search", "hydra.run.dir=made", *SMALL, *words)
    assert code == 0, err
    summary, rows = results(tmp_path / "made")
    assert summary["clients"] == 50 and summary["capped"] == "clients"  # half of the requests
    assert summary["reason"] == "the highest clients tried passed" and "concurrency" in out and ">= 50" in out
    assert "vllm serve" not in out and "vllm_serve" not in summary


def test_no_home_is_no_error(monkeypatch):
    from jaxsim import runtime
    from jaxsim.settings import RuntimeSettings

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(runtime, "cache_dir", homeless)
    monkeypatch.setattr(runtime.jax.config, "update", lambda *_: None)
    runtime.prepare(RuntimeSettings())


def test_an_interrupt_during_the_imports_leaves_no_traceback(run, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxsim.command.command", interrupted)
    code, _, err = run("+sweep=slo_search")
    assert code == 130 and err == ""


def test_evaluate_says_everything_about_each_load(run, tmp_path):
    words = ["evaluate.load_rps=[0.5,50]", "engine.max_num_seqs=8", "engine.max_num_batched_tokens=2048"]
    code, out, err = run("+sweep=evaluate", "hydra.run.dir=made", *words, *SMALL)
    assert code == 0, err
    _, (light, heavy) = results(tmp_path / "made")
    assert float(light["stable"]) == 1 and float(light["slo_met"]) >= 0
    assert (
        float(heavy["slo_met"]) == 0 and float(heavy["mean_queue_wait_ms"]) > 1000 * float(light["mean_ttft_ms"]) / 1000
    )
    assert float(heavy["running_max"]) == 8 and heavy["limited_by"] == "seats"
    assert "Latencies at 50 req/s" in out and "0 found in it, 4 added" in out
    code, out, err = run("+sweep=evaluate", "hydra.run.dir=again", *words, *SMALL)
    assert code == 0 and "4 found in it, 0 added" in out
    assert results(tmp_path / "again")[1] == [light, heavy]


def test_evaluate_takes_clients(run, tmp_path):
    words = ["evaluate.clients=4", "engine.max_num_seqs=8", "engine.max_num_batched_tokens=2048", "tracking=disabled"]
    code, _, err = run("+sweep=evaluate", "hydra.run.dir=made", "evaluate.series=true", *words, *SMALL)
    assert code == 0, err
    summary, _ = results(tmp_path / "made")
    assert summary["running_max"] == 4 and summary["clients"] == 4
    with (tmp_path / "made" / "series.csv").open() as file:
        series = list(csv.DictReader(file))
    assert max(int(row["running"]) for row in series) == 4 and max(float(row["kv_usage"]) for row in series) > 0
    assert [float(row["time_s"]) for row in series] == sorted(float(row["time_s"]) for row in series)
    code, _, err = run("+sweep=evaluate", "evaluate.load_rps=1", *words, *SMALL)
    assert code == 2 and err.startswith("evaluate.clients=[4]: must be null")


def test_static_vs_continuous_shows_where_the_ratio_is_one_and_where_not(run, tmp_path):
    code, _, err = run("+sweep=static_vs_continuous", "tracking=disabled", "hydra.run.dir=made", *SMALL)
    assert code == 0, err
    summary, rows = results(tmp_path / "made")
    mixed = [row for row in rows if row["outputs"] == "as they are"]
    equal = [row for row in rows if row["outputs"] == "all equal"]
    assert float(mixed[0]["throughput_ratio"]) == pytest.approx(1, abs=0.1)
    # The longest of 32 outputs holds the batch: the fewer slots are in use, the larger the ratio.
    assert float(mixed[-1]["throughput_ratio"]) > float(equal[-1]["throughput_ratio"])
    assert summary["largest_ratio"] == pytest.approx(max(float(row["throughput_ratio"]) for row in rows))
    code, out, err = run("+sweep=static_vs_continuous", "tracking=disabled", "hydra.run.dir=again", *SMALL)
    assert code == 0 and ", 0 added" in out, err
    assert results(tmp_path / "again")[1] == rows


def test_prefix_cache_gains_where_prompts_share_and_only_there(run, tmp_path):
    words = [
        "prefix_cache.prefix_len=[1024]",
        "prefix_cache.share=[0,1]",
        "engine.max_num_seqs=64",
        "tracking=disabled",
    ]
    code, out, err = run("+sweep=prefix_cache", "hydra.run.dir=made", *words, *SMALL)
    assert code == 0, err
    _, rows = results(tmp_path / "made")
    assert len(rows) == 6 and "Throughput under saturation" in out
    for row in (row for row in rows if row["share"] == "0.0"):
        assert float(row["prefix_cache_hit_rate"]) == float(row["infinite_hit_rate"]) == 0
    alone, shared = [row for row in rows if row["num_gpu_blocks"] == rows[-1]["num_gpu_blocks"]]
    assert float(alone["saved_p99_ttft_ms"]) == 0 and float(alone["peak_throughput_ratio"]) == 1
    assert float(shared["saved_mean_ttft_ms"]) > 0 and float(shared["peak_throughput_ratio"]) > 1
    assert alone["off_p99_ttft_ms"] == shared["off_p99_ttft_ms"]
    assert 0 < float(shared["prefix_cache_hit_rate"]) <= float(shared["infinite_hit_rate"])
    code, out, err = run("+sweep=prefix_cache", "hydra.run.dir=again", *words, *SMALL)
    assert code == 0 and ", 0 added" in out, err
    assert results(tmp_path / "again")[1] == rows


def test_prefix_cache_takes_traces_with_hash_ids_only(run, tmp_path):
    line = '{"timestamp": %d, "input_length": 1000, "output_length": 20, "hash_ids": [1, %d]}\n'
    (tmp_path / "ids.jsonl").write_text("".join(line % (100 * i, i + 2) for i in range(100)))
    (tmp_path / "none.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46,9,4\n" * 9)
    words = ["+sweep=prefix_cache", "workload=trace", "tracking=disabled", "hydra.run.dir=made", *SMALL]
    code, _, err = run(*words, "workload.path=ids.jsonl")
    assert code == 2 and err.startswith("workload.hash_block_size=null: ") and "512 fits the file" in err
    code, _, err = run(*words, "workload.path=none.csv", "workload.spread_s=0")
    assert code == 2 and err.startswith("workload.path=none.csv: ")
    more = ["workload.path=ids.jsonl", "workload.hash_block_size=512", "engine.max_num_seqs=64", "search.seeds=1"]
    code, _, err = run(*words, *more, "prefix_cache.num_gpu_blocks=[2000]", "prefix_cache.load_rps=1")
    assert code == 0, err
    _, (row,) = results(tmp_path / "made")
    # At one request a second each of the 99 others finds the first 512 of its 1,000 tokens.
    assert float(row["prefix_cache_hit_rate"]) == float(row["infinite_hit_rate"]) == pytest.approx(99 * 0.512 / 100)
    code, _, err = run(*words, *more, "prefix_cache.num_gpu_blocks=[1000]")
    assert code == 2 and err.startswith("prefix_cache.num_gpu_blocks=1000: must be at least 1025")


def test_a_multirun_goes_on_after_a_bad_job(run, tmp_path):
    words = [
        "engine.max_num_seqs=0,8",
        "engine.max_num_batched_tokens=2048",
        "evaluate.load_rps=1",
        "tracking=disabled",
    ]
    code, _, err = run("--multirun", "+sweep=evaluate", "hydra.sweep.dir=many", *words, *SMALL)
    assert code == 2
    assert err.splitlines()[-1].startswith("engine.max_num_seqs=0: ")
    assert results(tmp_path / "many" / "1")[0]["status"] == "ok"


def test_the_command_runs_as_a_module_from_another_folder(tmp_path):
    words = [sys.executable, "-m", "jaxsim", "+sweep=slo_search", "hardware=abacus"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": _root()})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("hardware=abacus: no such preset; must be one of a100,")


def _root() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(jaxsim.__file__)))


def test_classes_have_limits_and_tables_of_their_own(run, tmp_path):
    classes = "workload.classes={chat:{share:3,prompt:{value:200}},batch:{prompt:{value:2000}}}"
    words = [
        classes,
        "slo.ttft_ms=null",
        "slo.limits={p95_ttft_ms@chat:200}",
        "tracking=disabled",
        "hydra.run.dir=made",
    ]
    code, out, err = run("+sweep=slo_search", *SMALL, *words)
    assert code == 0, err
    summary, _ = results(tmp_path / "made")
    assert summary["p95_ttft_ms@chat"] < summary["p95_ttft_ms@batch"]
    assert "p95 TTFT of chat <= 200 ms" in out and "Latencies of the class batch" in out
    code, _, err = run("+sweep=slo_search", *SMALL, classes, "slo.limits={p95_ttft_ms@bulk:200}")
    assert code == 2 and err.startswith(
        "slo.limits.p95_ttft_ms@bulk=200.0: no such class; workload.classes has chat, b"
    )
