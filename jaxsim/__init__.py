"""Simulates an LLM server's scheduler for thousands of settings at once."""

from jaxsim.errors import ConfigError

__all__ = ["ConfigError"]
__version__ = "0.1.0"
