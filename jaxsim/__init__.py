"""Simulates an LLM server's scheduler for thousands of settings at once."""

from typing import TYPE_CHECKING, Any

from jaxsim.errors import ConfigError

if TYPE_CHECKING:
    from jaxsim.api import search
    from jaxsim.engine import simulate, simulate_many

__all__ = ["ConfigError", "search", "simulate", "simulate_many"]
__version__ = "0.1.0"

_HOMES = {"search": "jaxsim.api", "simulate": "jaxsim.engine", "simulate_many": "jaxsim.engine"}


def __getattr__(name: str) -> Any:
    """The functions, imported when they are asked for: JAX takes a second."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
