"""Hydra's launchers: the jobs of a multirun in processes of their own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import SMALL, results

import jaxsim

LAUNCHERS = [("joblib", "joblib"), ("submitit_local", "submitit")]


def needs(plugin: str) -> None:
    try:
        missing = importlib.util.find_spec(f"hydra_plugins.hydra_{plugin}_launcher") is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        pytest.skip(f"hydra-{plugin}-launcher is not installed")


def command(folder: Path, launcher: str, *words: str) -> subprocess.CompletedProcess[str]:
    fixed = [f"hydra/launcher={launcher}", "tracking=disabled", "runtime.devices=1", *SMALL]
    environment = os.environ | {"PYTHONPATH": str(Path(jaxsim.__file__).parents[1])}
    call = [sys.executable, "-m", "jaxsim", *words, *fixed]
    return subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("launcher", "plugin"), LAUNCHERS)
def test_each_job_of_a_multirun_leaves_its_results(tmp_path, launcher, plugin):
    needs(plugin)
    words = ["--multirun", "+sweep=slo_search", "hardware=a100,h100", "slo.ttft_ms=1000", "hydra.sweep.dir=many"]
    done = command(tmp_path, launcher, *words)
    assert done.returncode == 0, done.stderr
    summaries = [results(tmp_path / "many" / place)[0] for place in ("0", "1")]
    assert [summary["hardware"] for summary in summaries] == ["A100-80GB", "H100-80GB"]
    assert 0 < summaries[0]["load_rps"] < summaries[1]["load_rps"]


@pytest.mark.parametrize(("launcher", "plugin"), LAUNCHERS)
def test_a_job_that_is_refused_is_in_the_exit_code(tmp_path, launcher, plugin):
    needs(plugin)
    words = ["--multirun", "+sweep=evaluate", "engine.max_num_seqs=0,1", "evaluate.load_rps=0.1"]
    done = command(tmp_path, launcher, *words, "hydra.sweep.dir=many")
    assert done.returncode == 2, done.stderr
    assert results(tmp_path / "many" / "1")[0]["status"] == "ok"
    assert not (tmp_path / "many" / "0" / "summary.json").exists()
