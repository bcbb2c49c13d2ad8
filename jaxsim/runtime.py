"""What a command sets in JAX before its first use: devices and the compilation cache. Never called on import."""

import contextlib
import logging
import os
from pathlib import Path

import jax

from jaxsim.errors import ConfigError
from jaxsim.folders import cache_dir
from jaxsim.settings import RuntimeSettings


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(settings: RuntimeSettings) -> None:
    """One CPU device per core, and the cache. Devices stay as they are where JAX has been used before."""
    logging.getLogger("jax").setLevel(logging.WARNING)  # Hydra's root logger would print which backends are missing
    with contextlib.suppress(RuntimeError):  # JAX has been used before
        jax.config.update("jax_num_cpu_devices", settings.devices or cores())
    if settings.compilation_cache is None:
        return
    if settings.compilation_cache == "auto" and jax.config.jax_compilation_cache_dir:  # pyright: ignore
        return  # the user has said where, in JAX's own way
    auto = settings.compilation_cache == "auto"
    try:
        folder = cache_dir() / "xla" if auto else Path(settings.compilation_cache)
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:  # not writable, no home folder, no path at all
        if auto:
            return
        why = getattr(error, "strerror", None) or str(error)
        allowed = f"must be a writable folder ({why})"
        raise ConfigError("runtime.compilation_cache", settings.compilation_cache, allowed) from None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
