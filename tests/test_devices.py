"""The same bits on one device and on eight."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from test_lanes import everything, run, settings

import jaxsim

SCRIPT = """
import json
import jax
jax.config.update("jax_num_cpu_devices", 8)
from test_devices import simulated
print(json.dumps([len(jax.local_devices()), simulated()]))
"""


def simulated() -> list[str]:
    """Everything that is known of each simulation, floats to the last bit."""
    return [repr(sorted(everything(simulation).items())) for simulation in run(settings())]


@pytest.mark.parametrize("devices", [1, 2])
def test_eight_devices_equal_fewer(devices, monkeypatch):
    paths = [str(Path(__file__).parent), str(Path(jaxsim.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    count, there = json.loads(done.stdout)
    here = jax.local_devices()[:devices]
    monkeypatch.setattr(jax, "local_devices", lambda: here)
    assert count == 8 and len(here) == devices
    assert simulated() == there
