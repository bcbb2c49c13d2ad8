"""Hydra's launchers: the jobs of a multirun in processes of their own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import SMALL, results

import jaxsim


@pytest.mark.parametrize(("launcher", "plugin"), [("joblib", "joblib"), ("submitit_local", "submitit")])
def test_each_job_of_a_multirun_leaves_its_results(tmp_path, launcher, plugin):
    try:
        missing = importlib.util.find_spec(f"hydra_plugins.hydra_{plugin}_launcher") is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        pytest.skip(f"hydra-{plugin}-launcher is not installed")
    words = ["--multirun", "+sweep=slo_search", "hardware=a100,h100", f"hydra/launcher={launcher}"]
    words += ["hydra.sweep.dir=many", "tracking=disabled", "runtime.devices=1", "slo.ttft_ms=1000", *SMALL]
    environment = os.environ | {"PYTHONPATH": str(Path(jaxsim.__file__).parents[1])}
    command = [sys.executable, "-m", "jaxsim", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summaries = [results(tmp_path / "many" / place)[0] for place in ("0", "1")]
    assert [summary["hardware"] for summary in summaries] == ["A100-80GB", "H100-80GB"]
    assert 0 < summaries[0]["load_rps"] < summaries[1]["load_rps"]
