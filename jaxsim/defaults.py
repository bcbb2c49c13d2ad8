"""The values a server starts with where none is given, by vLLM version, GPU and use, and where each comes from.

Sources: vllm/engine/arg_utils.py (get_batch_defaults), config/cache.py, config/scheduler.py, config/vllm.py and
v1/core/sched/scheduler.py of the wheels 0.11.0, 0.20.0 and 0.33.0.
"""

import dataclasses
import re
from typing import Any, NamedTuple

from jaxsim.errors import ConfigError
from jaxsim.settings import EngineSettings, show


class Version(NamedTuple):
    """What a version of vLLM starts with, and the rules in which it differs."""

    name: str
    flags: dict[str, Any]  # key of EngineSettings -> value
    large_gpus: bool  # GPUs of 160 GiB and more have a token budget of their own


_V33 = {
    "enable_prefix_caching": True,
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
    "async_scheduling": True,
    "gpu_memory_utilization": 0.92,
    "lone_request_without_threshold": True,
    "freed_unhashed_blocks": "front",
    "self_preemption": "continues",
}
_V20 = _V33 | {"lone_request_without_threshold": False, "freed_unhashed_blocks": "tail", "self_preemption": "ends"}
_V11 = _V20 | {"scheduler_reserve_full_isl": False, "async_scheduling": False, "gpu_memory_utilization": 0.9}
VERSIONS = (Version("v0.11", _V11, False), Version("v0.20", _V20, False), Version("v0.33", _V33, True))


class Default(NamedTuple):
    """A value that was not given, and where it comes from."""

    value: Any
    source: str


class Resolved(NamedTuple):
    flags: EngineSettings  # without a null where the version has a value
    defaults: dict[str, Default]  # by key


def version_of(name: str) -> Version:
    """The version of that name, as in v0.33 or 0.33.0, else the nearest lower one that is known. Raises ConfigError."""
    match = re.fullmatch(r"v?0\.(\d+)(?:\.\d+)?", name)
    known = ", ".join(version.name for version in VERSIONS)
    if match is None or int(match[1]) < _minor(VERSIONS[0]):
        raise ConfigError("engine.vllm_version", name, f"must be {VERSIONS[0].name} or later; known are {known}")
    return [version for version in VERSIONS if _minor(version) <= int(match[1])][-1]


def _minor(version: Version) -> int:
    return int(version.name.removeprefix("v0."))


def resolve(flags: EngineSettings) -> Resolved:
    """The flags with the version's values where they hold null. Raises ConfigError for a version that is too old.

    Where a default cannot be simulated together with what was given, the nearest value that can be is taken, and its
    source says so.
    """
    version = version_of(flags.vllm_version)
    source = f"vLLM {version.name}"
    asked = re.sub(r"^v?(0\.\d+).*", r"v\1", flags.vllm_version)
    if asked != version.name:
        source += f", the nearest known below {asked}"
    defaults = {key: Default(value, source) for key, value in version.flags.items() if getattr(flags, key) is None}
    key, swaps = "enable_prefix_caching", flags.preemption_mode == "swap" and flags.policy == "fcfs"
    if swaps and key in defaults and defaults[key].value:
        said = f"true in {version.name} is not modelled together with preemption_mode=swap and policy=fcfs"
        defaults[key] = Default(False, said)
    given = {key: default.value for key, default in defaults.items()}
    return Resolved(dataclasses.replace(flags, **given), defaults)


def batch_defaults(flags: EngineSettings, memory_gib: float, gpu: str, max_model_len: int) -> dict[str, Default]:
    """max_num_seqs and max_num_batched_tokens: what is given, else vLLM's choice, with its caps."""
    version = version_of(flags.vllm_version)
    offline = flags.usage == "offline"
    source = f"vLLM {version.name}, {flags.usage} on "
    if memory_gib >= 160 and version.large_gpus:
        seqs, tokens = 1024, 16384
        source += "160 GiB or more"
    elif memory_gib >= 70 and "a100" not in gpu.lower():
        seqs, tokens = 1024, 16384 if offline else 8192
        source += "70 GiB or more"
    else:
        seqs, tokens = 256, 8192 if offline else 2048
        source += "an A100" if "a100" in gpu.lower() else "less than 70 GiB"
    if not flags.enable_chunked_prefill and tokens < max_model_len:
        tokens, source = max_model_len, f"{source}, raised to max_model_len without chunked prefill"
    seqs = flags.max_num_seqs or min(seqs, flags.max_num_batched_tokens or tokens)
    tokens = flags.max_num_batched_tokens or max(seqs, min(tokens, seqs * max_model_len))
    return {
        "max_num_seqs": Default(seqs, source if flags.max_num_seqs is None else "given"),
        "max_num_batched_tokens": Default(tokens, source if flags.max_num_batched_tokens is None else "given"),
    }


def lines(defaults: dict[str, Default]) -> list[str]:
    """What was taken for granted, a line per source."""
    by_source: dict[str, list[str]] = {}
    for key, default in defaults.items():
        by_source.setdefault(default.source, []).append(f"{key}={show(default.value)}")
    return [f"{', '.join(words)} ({source})" for source, words in by_source.items()]
