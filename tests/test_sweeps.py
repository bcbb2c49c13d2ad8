"""The W&B sweeps: the command line that an agent makes of each is executed."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cli import SMALL, results

from jaxsim.composition import presets

agents = pytest.importorskip("wandb.sdk.launch.sweeps.utils", reason="this wandb keeps its agent elsewhere")

FOLDER = Path(__file__).resolve().parents[1] / "sweeps"
SWEEPS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
BOUNDED = {"uniform": float, "int_uniform": int}  # and the type of what is drawn
FINE = [word for word in SMALL if not word.startswith("search.max_num")]


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def choices(parameter: dict[str, Any]) -> list[Any]:
    """All values of a parameter, or the ends of its range as the agent would draw them."""
    if "values" in parameter:
        return parameter["values"]
    kind = BOUNDED[parameter["distribution"]]
    return [kind(parameter["min"]), kind(parameter["max"])]


def command(sweep: dict[str, Any], last: bool) -> list[str]:
    """The words that the agent would execute."""
    chosen = {key: {"value": choices(value)[-1 if last else 0]} for key, value in sweep["parameters"].items()}
    parts = agents.create_sweep_command(sweep["command"])
    arguments = {"env": ["/usr/bin/env"]} | agents.create_sweep_command_args({"args": chosen})
    words = []
    for part in parts:
        name = part[2:-1] if part.startswith("${") else ""
        words += arguments[name] if name in arguments else [part]
    return words


def test_there_are_the_three_methods():
    assert {read(name)["method"] for name in SWEEPS} == {"grid", "random", "bayes"}


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("last", [False, True])
def test_the_command_of_the_agent_runs(run, tmp_path, name, last):
    sweep = read(name)
    env, python, *words = command(sweep, last)
    assert (env, python, words[:2]) == ("/usr/bin/env", "python", ["-m", "jaxsim"])
    assert "tracking.mode=online" in words and not any("${" in word for word in words)
    small = FINE + (["search.max_num_seqs=[8]", "search.max_num_batched_tokens=[2048]"] if name == "grid" else [])
    tests = ["slo.ttft_ms=2000", "hydra.run.dir=made", "tracking.mode=disabled"]
    code, _, err = run(*words[2:], *small, *tests)
    assert code == 0, err
    summary, _ = results(tmp_path / "made")
    assert summary[sweep["metric"]["name"]] > 0
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        if (parameter := sweep["parameters"].get(f"engine.{key}")) is not None:
            assert summary[key] == choices(parameter)[-1 if last else 0]


def test_names_are_those_of_presets():
    for group, parameter in read("grid")["parameters"].items():
        assert set(parameter["values"]) <= set(presets(group))
