"""The command line end to end, W&B offline."""

import csv
import json
import os
import subprocess
import sys

import pytest

from jaxsim import __main__ as cli
from jaxsim.composition import presets

SMALL = [
    "search.max_num_seqs=[8,64]",
    "search.max_num_batched_tokens=[2048]",
    "search.seeds=2",
    "search.num_requests=100",
    "runtime.lanes=4",
    "runtime.compilation_cache=null",
]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs the command in this process, so that compiled engines are shared; returns (exit code, stdout, stderr)."""

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["jaxsim", *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capfd.readouterr()
        return int(exit_.value.code or 0), out, err

    return command


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
        (["+sweep=nothing"], "sweep=nothing: no such preset; must be one of evaluate, slo_search, static_vs_"),
        (["model=llama9"], "model=llama9: no such preset; must be one of deepseek_v3, llama3_1_70b"),
        (["engine.max_num_seq=3"], "engine.max_num_seq=3: no such key, did you mean max_num_seqs?"),
        (["+engine.foo=3"], "engine.foo=3: no such key."),
        (["+foo=3"], "foo=3: no such key."),
        (["foo"], "foo=: cannot be read; must be key=value"),
        (["search.max_num_seqs=[1,2"], "search.max_num_seqs=[1,2: cannot be read; must be key=value"),
        (["--nonsense"], "flags=--nonsense +sweep=slo_search: unrecognized arguments"),
        (["engine.max_num_seqs=many"], "engine.max_num_seqs=many: must be an integer from 1, or null"),
        (["slo.percentile=0"], "slo.percentile=0: must be a number above 0 up to 100"),
        (["slo.ttft_ms=null"], "slo.ttft_ms=null: must be a number unless slo.tpot_ms or slo.e2el_ms is one"),
        (["search.load=false", "search.concurrency=false"], "search.load=false: must be true unless"),
        (["search.num_requests=null"], "search.num_requests=null: must be an integer for a workload that is not a tr"),
        (["engine.policy=priority"], "engine.policy=priority: "),
        (["engine.enable_prefix_caching=true"], "engine.enable_prefix_caching=True: "),
        (["engine.tensor_parallel_size=3"], "engine.tensor_parallel_size=3: "),
        (["model=llama3_1_70b"], "=llama3_1_70b: no memory is left"),
        (["model.hidden_size=-1"], "model.hidden_size=-1: "),
        (["model.config_json=/nowhere/config.json"], "model.config_json=/nowhere/config.json: "),
        (["hardware.memory_gib=big"], "hardware.memory_gib=big: "),
        (["engine.max_model_len=1000000"], "engine.max_model_len=1000000: must be at most 131072"),
        (["search.max_num_seqs=[4096]", "search.max_num_batched_tokens=[2048]"], "must be at least max_num_seqs=4096"),
        (["engine.enable_chunked_prefill=false"], "must be at least max_model_len=16384"),
        (["engine.max_model_len=1000"], "workload.too_long=error: "),
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


def test_slo_search_finds_a_setting_and_leaves_its_files(run, tmp_path):
    code, out, err = run("+sweep=slo_search", "hydra.run.dir=made", *SMALL)
    assert code == 0, err
    summary, rows = results(tmp_path / "made")
    assert [(row["max_num_seqs"], row["status"]) for row in rows] == [("8", "ok"), ("64", "ok")]
    assert summary["max_num_seqs"] in (8, 64) and summary["max_num_batched_tokens"] == 2048
    assert summary["p99_ttft_ms"] <= 200 and summary["slo_met"] == 1 and summary["stable"]
    assert summary["completed"] == 100 and summary["failed"] == 0
    assert summary["limited_by"] in ("seats", "KV cache", "token budget", "compute")
    best = next(row for row in rows if int(row["max_num_seqs"]) == summary["max_num_seqs"])
    assert float(best["load_rps"]) == pytest.approx(summary["load_rps"]) and float(best["clients"]) >= 1
    for name in ("ttft", "tpot", "itl", "e2el", "queue_wait"):
        for figure in ("mean", "p50", "p95", "p99"):
            assert summary[f"{figure}_{name}_ms"] >= 0 and f"{figure}_{name}_ms" in summary["ci95"]
    assert summary["vllm_serve"].endswith("--no-enable-prefix-caching")
    assert summary["vllm_serve"] in out
    folder = next((tmp_path / "made" / "wandb").glob("offline-run-*"))
    assert list(folder.glob("*.wandb"))
    assert f"wandb sync {folder.relative_to(tmp_path)}" in out and "wandb leet" in out


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
    from jaxsim.studies import slo_search

    rounds = []

    def interrupted(*args, **options):
        rounds.append(1)
        if len(rounds) == 4:
            raise KeyboardInterrupt
        return slo_search_many(*args, **options)

    slo_search_many = slo_search.simulate_many
    monkeypatch.setattr(slo_search, "simulate_many", interrupted)
    code, _, _ = run("+sweep=slo_search", "tracking=disabled", "hydra.run.dir=made", *SMALL)
    assert code == 130
    summary, rows = results(tmp_path / "made")
    assert summary["status"] == "interrupted"
    assert [row["status"] for row in rows] == ["unfinished", "unfinished"]
    assert all(float(row["load_rps"]) > 0 for row in rows)


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
    assert "Latencies at 50 req/s" in out


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
    return os.path.dirname(os.path.dirname(os.path.abspath(cli.__file__)))
