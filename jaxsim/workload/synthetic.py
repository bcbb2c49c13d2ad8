"""Synthetic workloads: arrivals at a rate and lengths from distributions.

Arrivals, prompts and outputs of a seed come from independent streams of uniform numbers, one number a request, each
turned into a gap or a length by a quantile function; so does what prompts have in common (`prefix.py`). So common
random numbers hold: changing one distribution leaves the others as they were, arrivals at rate r are those at rate 1
divided by r, and a longer sample begins with the shorter one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jaxsim.engine import Requests
from jaxsim.errors import ConfigError
from jaxsim.workload.classes import RequestClass, by_class, chosen
from jaxsim.workload.lengths import Length
from jaxsim.workload.prefix import Prefix
from jaxsim.workload.priority import Priority

PROCESSES = ("poisson", "gamma", "constant")
_STREAMS = ("arrivals", "prompts", "outputs", "turns", "thinking", "groups", "unique", "system", "priority", "classes")


@dataclass(frozen=True)
class Arrival:
    """Process of the gaps between arrivals.

    `burstiness` is that of `vllm bench serve --burstiness`: gaps are Gamma distributed with this shape, so their
    coefficient of variation is burstiness ** -0.5; 1 is Poisson, below 1 is burstier. Only `gamma` uses it.
    """

    process: str = "poisson"
    burstiness: float = 1.0

    def __post_init__(self):
        if self.process not in PROCESSES:
            raise ConfigError("process", self.process, "one of " + ", ".join(PROCESSES))
        _check_positive("burstiness", self.burstiness)
        if self.process != "gamma" and self.burstiness != 1:
            raise ConfigError("burstiness", self.burstiness, f"1 with process={self.process}, others with gamma")

    def gaps(self, uniform: np.ndarray) -> np.ndarray:
        """Gaps of mean 1, float64 [N], of uniform numbers [N] in [0, 1)."""
        if self.process == "constant":
            return np.ones(len(uniform))
        if self.burstiness == 1:
            return -np.log1p(-uniform)
        from scipy.special import gammaincinv

        return gammaincinv(self.burstiness, uniform) / self.burstiness


@dataclass(frozen=True)
class Workload:
    """Requests arriving at `rate_rps` (requests/s), with prompts and outputs drawn independently of each other.

    Conversations of several turns arrive by the process, at rate_rps / mean turns; a sample begins with first turns, so
    its own rate is below `rate_rps` until conversations end as fast as they start.
    """

    rate_rps: float
    arrival: Arrival
    prompt: Length
    output: Length
    prefix: Prefix | None = None  # what prompts have in common; None: nothing
    priority: Priority = Priority()  # of a request; the turns of a conversation have one
    classes: tuple[RequestClass, ...] = ()  # none: all requests are alike

    def __post_init__(self):
        _check_positive("rate_rps", self.rate_rps)
        if self.classes and self.prefix is not None and not self.prefix.is_off:
            names = ", ".join(each.name for each in self.classes)
            raise ConfigError("classes", names, "null where prompts have something in common (workload.prefix)")

    def sample(self, seed: int, n: int) -> Requests:
        """`n` requests of a seed, in arrival order, the first at 0 s."""
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise ConfigError("n", n, "a number of requests from 1")
        gaps = self.arrival.gaps(uniform_numbers(seed, "arrivals", int(n)))
        gaps[0] = 0.0
        arrival_s = np.cumsum(gaps) / self.rate_rps
        priority = self.priority.sample(uniform_numbers(seed, "priority", int(n)))
        if self.prefix is not None and not self.prefix.is_off:
            starts_s = arrival_s * self.prefix.mean_turns()

            def draw(stream: str, turn: int, numbers: int) -> np.ndarray:
                return uniform_numbers(seed, stream, numbers, turn)

            return self.prefix.requests(starts_s, self.prompt, self.output, draw, priority)
        prompts, outputs = (uniform_numbers(seed, stream, int(n)) for stream in ("prompts", "outputs"))
        if not self.classes:
            return Requests(arrival_s, self.prompt.sample(prompts), self.output.sample(outputs), priority)
        places = chosen(self.classes, uniform_numbers(seed, "classes", int(n)))
        alike = np.zeros(int(n), np.int64) if priority is None else priority
        levels = [alike if each.priority is None else np.full(int(n), each.priority) for each in self.classes]
        return Requests(
            arrival_s=arrival_s,
            prompt_len=by_class(places, [(each.prompt or self.prompt).sample(prompts) for each in self.classes]),
            output_len=by_class(places, [(each.output or self.output).sample(outputs) for each in self.classes]),
            priority=by_class(places, levels),
            label=np.array([each.name for each in self.classes])[places],
        )


def check_seed(seed: object) -> int:
    """`seed` as an int; ConfigError unless it is an integer from 0."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ConfigError("seed", seed, "an integer from 0")
    return int(seed)


def uniform_numbers(seed: int, stream: str, n: int, turn: int = 0) -> np.ndarray:
    """`n` uniform numbers in [0, 1) of one stream of a seed, float64 [n]; every turn has a stream of its own."""
    place = (_STREAMS.index(stream), *((turn,) if turn else ()))
    sequence = np.random.SeedSequence(check_seed(seed), spawn_key=place)
    return np.random.Generator(np.random.PCG64(sequence)).random(n)


def _check_positive(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigError(key, value, "a finite number above 0")
