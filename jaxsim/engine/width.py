"""How many lanes a device gets: as many as its memory holds, and not more than are fast."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxsim.engine.layout import Limits
from jaxsim.engine.statistics import BINS
from jaxsim.errors import ConfigError

LEAST = 2  # lanes: of a single one, XLA for CPUs copies the memory in every step
MOST_CELLS = 1 << 31  # of one memory: cells are numbered in int32
FAST = {"cpu": 256}  # lanes: fewer and the dispatch of operations dominates, more and their state outgrows the cache
FAST_ELSEWHERE = 1 << 18  # kernels cost the same for one lane as for thousands
STEADY = {"cpu": 64}  # lanes that every call gets, where calls of any length are to share one program
STEADY_ELSEWHERE = 1 << 12
LIGHT = 1 << 28  # bytes of lanes, of which any number may be idle
SCALARS = 768  # bytes, at most, of what is neither a memory nor a table
SHARE = 0.5  # of the free memory; the rest is for copies on the way in and out, and for whoever else is there
CGROUP = Path("/sys/fs/cgroup")


def lane_bytes(limits: Limits) -> int:
    """Bytes of one simulation's state, rounded up."""
    words = limits.memory + limits.tops + limits.phases + BINS + (limits.prefix_memory if limits.prefix else 0)
    return 4 * words + SCALARS


def width(limits: Limits, asked: int | None, jobs: int, devices: Sequence[Any]) -> int:
    """Lanes of each device for so many jobs; `asked` for, there are as many, but never more than fit.

    Nor are many idle on a CPU where they would take a lot of memory: a program for fewer is compiled sooner than they
    have run along.
    Raises ConfigError where not even the least number does, and for more requests than can be addressed.
    """
    if max(limits.memory, limits.prefix_memory if limits.prefix else 0) >= MOST_CELLS:
        raise ConfigError("requests", limits.requests, "must be fewer: a memory has 2^31 cells, see docs/size.md")
    room = int(SHARE * free_bytes(devices)) // lane_bytes(limits)
    if room < LEAST:
        free = free_bytes(devices) / 2**30
        need = LEAST * lane_bytes(limits) / SHARE / 2**30
        allowed = f"must be fewer: so many need {need:.2g} GiB, of which {free:.2g} GiB are free on each device"
        raise ConfigError("requests", limits.requests, allowed)
    share = -(-jobs // len(devices))
    needed = max(1 << (share - 1).bit_length(), LEAST)
    if asked is None:
        return min(needed, FAST.get(devices[0].platform, FAST_ELSEWHERE), room)
    light = devices[0].platform != "cpu" or asked * lane_bytes(limits) <= LIGHT
    return min(max(asked, LEAST), room, *([] if light else [needed]))


def steady(asked: int | None) -> int:
    """Lanes for calls of any length that are to share one program: those `asked` for, else what is fast here."""
    return asked or STEADY.get(jax.default_backend(), STEADY_ELSEWHERE)


def free_bytes(devices: Sequence[Any]) -> int:
    """Free memory of each of the devices; what CPU devices have is this machine's, in equal parts."""
    if devices[0].platform == "cpu":
        return available_bytes() // len(devices)
    stats = [device.memory_stats() or {} for device in devices]
    free = [one.get("bytes_limit", 0) - one.get("bytes_in_use", 0) for one in stats]
    # What ends on a device is copied to this machine, all lanes at once in the worst case.
    return min([available_bytes() // len(devices), *(each for each in free if each > 0)])


def available_bytes() -> int:
    """Memory of this machine that a new program may use, by the kernel and, in a container, by its limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        try:
            found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        except (AttributeError, OSError, ValueError):
            found = 4 << 30  # nobody says
    try:
        limit = int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text())
        found = min(found, limit)
    except (OSError, ValueError):  # no container, or "max"
        pass
    return max(found, 0)
