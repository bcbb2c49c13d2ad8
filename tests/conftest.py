"""Strict JAX for every test, and the folder of outside data."""

import os
import sys
from pathlib import Path

import jax
import pytest
from hypothesis import settings

from jaxsim.__main__ import main

# The same random cases in every run; HYPOTHESIS_PROFILE=random hunts for others.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("random", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

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


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs the command in this process, so that compiled engines are shared; returns (exit code, stdout, stderr)."""

    def command(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["jaxsim", *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capfd.readouterr()
        return int(exit_.value.code or 0), out, err

    return command
