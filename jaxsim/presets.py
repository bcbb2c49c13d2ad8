"""Typed specs out of the plain mappings that configuration files hold."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxsim.errors import ConfigError

Spec = TypeVar("Spec")

_MEANING = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def typed(group: str, cls: type[Spec], values: Mapping[str, Any]) -> Spec:
    """An instance of the dataclass `cls` from `values`; keys in errors are prefixed with `group`.

    Field annotations are the plain types int, float, bool, str, each optionally `| None`.
    Raises ConfigError for an unknown or missing key and for a value of another type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    given = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{group}.{key}", value, f"unknown key, known are {', '.join(fields)}")
        given[key] = _cast(f"{group}.{key}", value, fields[key].type)
    for key, field in fields.items():
        if field.default is dataclasses.MISSING and key not in given:
            raise ConfigError(f"{group}.{key}", "", "missing, a value is required")
    return cls(**given)


def require(group: str, spec: Any, keys: str, upto: float = float("inf"), zero: bool = False) -> None:
    """Raises ConfigError unless each of the space-separated `keys` of `spec` is above 0 (or 0) and at most `upto`."""
    for key in keys.split():
        value = getattr(spec, key)
        if not (0 < value or zero and value == 0) or not value <= upto or value == float("inf"):
            limit = ", a finite number" if upto == float("inf") else f" and at most {upto:g}"
            raise ConfigError(f"{group}.{key}", value, ("at least 0" if zero else "above 0") + limit)


def _cast(key: str, value: Any, annotation: Any) -> Any:
    kinds = getattr(annotation, "__args__", (annotation,))
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(key, value, _MEANING[kind])
