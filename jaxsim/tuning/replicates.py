"""The requests of every seed, the same for every setting: common random numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxsim.engine import Requests
from jaxsim.errors import ConfigError
from jaxsim.settings import SearchSettings
from jaxsim.workload import TraceWorkload, Workload, drop_or_refuse


@dataclass(frozen=True)
class Replicates:
    """Requests by seed and length; `S` seeds are at hand, further ones and other lengths are drawn when asked for.

    A seed is named by its place, from 0 on. `draw(place, count)` gives `count` requests and the rate at which the
    workload sends them in the long run; without it there are only the seeds at hand. With several `instances` the
    requests are those of the first of them, to which every n-th of n times as many is dealt.
    """

    requests: list[Requests]  # [S]
    rates_rps: list[float]  # [S], load at which they arrive as they stand; stretched to any other
    dropped: list[int]  # [S], requests too long for the server
    draw: Callable[[int, int], tuple[Requests, float]] | None = None
    rows: int | None = None  # of a trace: instances share them; more are drawn only if one instance is to have more
    drawn: dict[tuple[int, int, int], tuple[Requests, float]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Requests per seed."""
        return len(self.requests[0].prompt_len)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every request at hand, prompt and output; [S * N]."""
        return np.concatenate([np.add(one.prompt_len, one.output_len) for one in self.requests])

    def of(self, seed: int, count: int | None = None, instances: int = 1) -> Requests:
        """`count` requests of a seed, None: as many as are at hand."""
        return self._of(seed, count, instances)[0]

    def stretch(self, seed: int, load_rps: float, count: int | None = None, instances: int = 1) -> float:
        """Factor on the arrival times of the seed's requests that makes the load of all instances `load_rps`."""
        return self._of(seed, count, instances)[1] / load_rps

    def drawable(self, count: int) -> bool:
        """Whether every seed has `count` requests that the server takes."""
        try:
            return all(len(self.of(seed, count).prompt_len) > 0 for seed in range(len(self.requests)))
        except (ConfigError, ValueError):
            return False

    def changed(self, change: Callable[[Requests], Requests]) -> "Replicates":
        """With other requests at the same times."""

        def draw(place: int, count: int) -> tuple[Requests, float]:
            assert self.draw is not None
            requests, nominal_rps = self.draw(place, count)
            return change(requests), nominal_rps

        return replace(self, requests=[*map(change, self.requests)], draw=self.draw and draw, drawn={})

    def _of(self, seed: int, count: int | None, instances: int) -> tuple[Requests, float]:
        if seed < len(self.requests) and count in (None, self.count) and instances == 1:
            return self.requests[seed], self.rates_rps[seed]
        if self.draw is None:
            raise ValueError(f"seed {seed} with {count} requests: there are {len(self.requests)} seeds of {self.count}")
        each = count or self.count
        key = (seed, each, instances)
        if key not in self.drawn:
            most = instances * each if self.rows is None else min(instances * each, max(each, self.rows))
            requests, nominal_rps = self.draw(seed, most)
            self.drawn[key] = dealt(requests, instances), rate_rps(requests, nominal_rps)
        return self.drawn[key]


def replicates(
    workload: Workload | TraceWorkload, search: SearchSettings, max_model_len: int, too_long: str
) -> Replicates:
    """Requests of every seed. Raises `ConfigError` for prompts that do not fit and are not to be dropped."""
    count = search.num_requests
    if isinstance(workload, TraceWorkload):
        count = min(count or len(workload.ticks), len(workload.ticks))
        if not math.isfinite(workload.rate_rps):
            raise ConfigError("workload.path", workload.source, "needs arrival times: all requests arrive at once")
    elif count is None:
        raise ConfigError("search.num_requests", "null", "must be an integer for a workload that is not a trace")

    def sample(place: int, number: int) -> tuple[Requests, int]:
        return drop_or_refuse(workload.sample(search.first_seed + place, number), max_model_len, too_long)

    requests, dropped = map(list, zip(*(sample(place, count) for place in range(search.seeds)), strict=True))
    shortest = min(len(kept.prompt_len) for kept in requests)
    cut = [_sliced(kept, slice(shortest)) for kept in requests]
    rates = [rate_rps(requests, workload.rate_rps) for requests in cut]
    rows = len(workload.ticks) if isinstance(workload, TraceWorkload) else None
    return Replicates(cut, rates, dropped, lambda place, number: (sample(place, number)[0], workload.rate_rps), rows)


def joined(several: Sequence[Replicates]) -> Replicates:
    """Of several workloads with as many seeds each: the places of the first come first."""
    seeds = len(several[0].requests)

    def draw(place: int, count: int) -> tuple[Requests, float]:
        workload = several[place // seeds]
        assert workload.draw is not None
        return workload.draw(place % seeds, count)

    return Replicates(
        requests=[requests for one in several for requests in one.requests],
        rates_rps=[rate for one in several for rate in one.rates_rps],
        dropped=[dropped for one in several for dropped in one.dropped],
        draw=draw,
        rows=several[0].rows,
    )


def dealt(requests: Requests, instances: int) -> Requests:
    """What the first of so many instances gets of requests that are dealt out in turn."""
    return _sliced(requests, slice(None, None, instances))


def _sliced(requests: Requests, places: slice) -> Requests:
    return Requests(*(None if field is None else field[places] for field in requests))  # pyright: ignore[reportArgumentType]


def rate_rps(requests: Requests, nominal_rps: float) -> float:
    """The rate at which these very requests arrive: of a short sample or a trace's window it is not the nominal one."""
    last = float(requests.arrival_s[-1] - requests.arrival_s[0])
    return (len(requests.arrival_s) - 1) / last if last > 0 else nominal_rps


def warmup_share(warmup: float, clients: int | None, count: int) -> float:
    """Share of requests that no latency counts: in a closed loop at least the first of every client."""
    return max(warmup, min(0.9, (clients or 0) / count))
