"""The main job from Python."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from jaxsim.composition import defaults
from jaxsim.errors import ConfigError
from jaxsim.results import terminal
from jaxsim.studies import slo_search
from jaxsim.studies.job import Job
from jaxsim.tuning.explore import Exploration
from jaxsim.tuning.result import Result

Group = str | Mapping[str, Any] | None


def search(
    space: Mapping[str, Sequence | str] | None = None,
    slo: Group = None,
    workload: Group = None,
    *,
    model: Group = None,
    hardware: Group = None,
    strategy: str = "grid",
    engine: Mapping[str, Any] | None = None,
    baseline: Mapping[str, Any] | None = None,
    runtime: Mapping[str, Any] | None = None,
    store: str | None = None,
    on_round: Callable[[Exploration], None] | None = None,
    **search: Any,
) -> Result:
    """What `python -m jaxsim +sweep=slo_search` finds, as an object; W&B stays out and nothing is written but,
    where it is named, the store.

    `space` holds the values or the range of every searched key, {"max_num_seqs": [32, 64], "block_size": "8..64:pow2"};
    None searches the default grid, and a key that it lacks keeps the engine's value. `slo`, `workload`, `model` and
    `hardware` name a preset, or give keys of the group, whose key `preset` may name the preset that they change.
    `strategy` is a preset of the group `search`; further keywords are its keys (`seeds=5`). `store` is a file that
    keeps simulations, "auto" the one of the command line. JAX's devices are taken as they are: one core unless
    `jax.config.update("jax_num_cpu_devices", N)` came first. Raises `ConfigError`.
    """
    groups = {"slo": slo, "workload": workload, "model": model, "hardware": hardware}
    words = [f"search={strategy}"]
    for group, asked in groups.items():
        preset = asked if isinstance(asked, str) else (asked or {}).get("preset")
        words += [f"{group}={preset}"] if preset else []
    settings = defaults(["+sweep=slo_search", *words])
    for group, asked in groups.items():
        if isinstance(asked, Mapping):
            settings[group] = _merged(settings[group], {key: value for key, value in asked.items() if key != "preset"})
    if space is not None:
        settings["search"] |= {"max_num_seqs": None, "max_num_batched_tokens": None} | dict(space)
    for group, asked in {"search": search, "engine": engine, "baseline": baseline, "runtime": runtime}.items():
        settings[group] = settings[group] | dict(asked or {})
    settings["store"] = {"path": store}
    with closing(Job.of(settings, Path.cwd(), terminal.console())) as job:
        return slo_search.search(job, on_round)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, group by group."""
    result = dict(base)
    for key, value in changes.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return result


__all__ = ["ConfigError", "Result", "search"]
