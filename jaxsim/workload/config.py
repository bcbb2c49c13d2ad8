"""The workload that a config group `conf/workload/*.yaml` describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from jaxsim.errors import ConfigError
from jaxsim.workload.classes import RequestClass
from jaxsim.workload.lengths import Length
from jaxsim.workload.prefix import Prefix
from jaxsim.workload.priority import Priority
from jaxsim.workload.readers import read_trace
from jaxsim.workload.synthetic import Arrival, Workload
from jaxsim.workload.trace import TraceWorkload

KINDS = ("synthetic", "trace")
_SYNTHETIC_KEYS = ("rate_rps", "arrival", "prompt", "output", "prefix", "priority", "classes")
_TRACE_KEYS = ("path", "format", "limit", "spread_s", "hash_block_size", "priority")

T = TypeVar("T")


def workload_from_config(config: Mapping[str, Any], prefix_caching: bool = False) -> Workload | TraceWorkload:
    """Workload of a mapping with the keys of `conf/workload/synthetic.yaml` or `trace.yaml`.

    `too_long` is for `drop_or_refuse` and only checked here. Keys of the other kind may be present if null.
    Hash ids of a trace are read, and workload.hash_block_size is required for them, with `prefix_caching` only.
    Errors: ConfigError whose key starts with `workload.`.
    """
    kind = config.get("kind")
    if kind not in KINDS:
        raise ConfigError("workload.kind", kind, "one of " + ", ".join(KINDS))
    if config.get("too_long", "error") not in ("error", "drop"):
        raise ConfigError("workload.too_long", config.get("too_long"), "error or drop")
    keys = _SYNTHETIC_KEYS if kind == "synthetic" else _TRACE_KEYS
    for key, value in config.items():
        if value is not None and key not in ("kind", "too_long", *keys):
            raise ConfigError(f"workload.{key}", value, f"with kind={kind} one of {', '.join(keys)}, too_long")
    if kind == "trace":
        if not config.get("path"):
            raise ConfigError("workload.path", config.get("path"), "a trace file (CSV or JSONL)")
        chosen = {key: config[key] for key in _TRACE_KEYS if config.get(key) is not None}
        drawn, section = _part("priority", Priority, config), chosen.pop("priority", {})
        if section.get("values") is not None:
            chosen["priority"] = drawn
        return read_trace(**chosen, prefix_caching=prefix_caching)
    parts = {
        "arrival": _part("arrival", Arrival, config),
        "prompt": _part("prompt", Length, config),
        "output": _part("output", Length, config),
        "prefix": _prefix(config.get("prefix") or {}),
        "priority": _part("priority", Priority, config),
        "classes": _classes(config.get("classes") or {}),
    }
    return _named("", lambda: Workload(rate_rps=config.get("rate_rps"), **parts))  # type: ignore[arg-type]


def _classes(section: Any) -> tuple[RequestClass, ...]:
    if not isinstance(section, Mapping):
        raise ConfigError("workload.classes", section, "a mapping of names to {share, prompt, output, priority}")
    found = []
    for name, values in section.items():
        key = f"classes.{name}"
        if not isinstance(values, Mapping):
            raise ConfigError(f"workload.{key}", values, "a group of settings: share, prompt, output, priority")
        lengths = {
            part: _part(f"{key}.{part}", Length, {f"{key}.{part}": values[part]})
            for part in ("prompt", "output")
            if values.get(part) is not None
        }
        rest = {part: value for part, value in values.items() if part not in ("prompt", "output")}
        for part in rest:
            if part not in ("share", "priority"):
                raise ConfigError(
                    f"workload.{key}.{part}", rest[part], "no such key; there are share, prompt, output, priority"
                )
        given: dict[str, Any] = {"name": str(name), **rest, **lengths}
        found.append(_named("", lambda given=given: RequestClass(**given)))
    return tuple(found)


def _prefix(section: Any) -> Prefix:
    lengths = {}
    if isinstance(section, Mapping):
        for key in ("length", "turns"):
            if section.get(key) is not None:
                lengths[key] = _part(f"prefix.{key}", Length, {f"prefix.{key}": section[key]})
        section = {key: value for key, value in section.items() if key not in lengths}
    return _part("prefix", lambda **values: Prefix(**values, **lengths), {"prefix": section}, Prefix)


def _part(name: str, build: Callable[..., T], config: Mapping[str, Any], cls: Any = None) -> T:
    """`build` with the values of one section, whose keys are the fields of `cls`, or of the class `build`."""
    section = config.get(name) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"workload.{name}", section, "a group of settings")
    known = [field.name for field in fields(cls or build)]  # type: ignore[arg-type]
    for key in section:
        if key not in known:
            raise ConfigError(f"workload.{name}.{key}", section[key], f"no such key; there are {', '.join(known)}")
    values = {
        key: value if isinstance(value, str) or not hasattr(value, "__iter__") else tuple(value)
        for key, value in section.items()
        if value is not None
    }
    return _named(f"{name}.", lambda: build(**values))


def _named(prefix: str, build: Callable[[], T]) -> T:
    """`build()`, with the full key in its errors."""
    try:
        return build()
    except ConfigError as error:
        raise ConfigError(f"workload.{prefix}{error.key}", error.value, error.allowed) from None
