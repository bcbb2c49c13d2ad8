"""Strict JAX for every test, and the folder of outside data."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from absl import logging as absl_logging
from hypothesis import settings

from jaxsim.__main__ import main

# The same random cases in every run; HYPOTHESIS_PROFILE=random hunts for others.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("random", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# optax brings absl, whose log handler closes its stream when Hydra sets up logging, unless that is the process's own:
# at import it would be the stream by which pytest captures the output of all tests.
absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__

jax.config.update("jax_num_cpu_devices", 2)  # so that sharding is exercised
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def data() -> Path:
    """The folder that $JAXSIM_DATA names, with traces/, measured/ and vllm/cases/; the test skips without it."""
    folder = os.environ.get("JAXSIM_DATA")
    if not folder:
        pytest.skip("JAXSIM_DATA is not set: no traces or measurements to test against")
    return Path(folder)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch) -> None:
    """No test sees the simulations that the user, or another test, has kept."""
    folder = str(tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setenv("LOCALAPPDATA", folder)


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Lets compiled programs go before Linux refuses a process more mappings, 65,530: a program takes hundreds."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_text().count("\n") > 25_000:
        jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def compiled_engines(tmp_path_factory, worker_id) -> Path:
    """A compilation cache for this session: its workers, and the processes that they start."""
    root = tmp_path_factory.getbasetemp()
    folder = (root if worker_id == "master" else root.parent) / "xla"
    folder.mkdir(exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return folder


@pytest.fixture
def run_alone(tmp_path, compiled_engines):
    """Runs the command in a process of its own, as one does, W&B included; returns (exit code, stdout, stderr)."""

    def command(*words: str) -> tuple[int, str, str]:
        call = [sys.executable, "-m", "jaxsim", *words, f"runtime.compilation_cache={compiled_engines}"]
        root = str(Path(__file__).resolve().parent.parent)
        done = subprocess.run(call, cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    return command


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs the command in this process, so that compiled engines are shared; returns (exit code, stdout, stderr).

    W&B is off unless asked for: its service lives on with the process, beyond the output that a test captures.
    """

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        quiet = any(word.startswith("+sweep=") for word in words) and not any("tracking" in word for word in words)
        monkeypatch.setattr(sys, "argv", ["jaxsim", *words, *(["tracking=disabled"] if quiet else [])])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capfd.readouterr()
        return int(exit_.value.code or 0), out, err

    return command
