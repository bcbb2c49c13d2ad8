"""The search over settings: a strategy proposes, few seeds sort out, more seeds decide."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxsim.errors import ConfigError
from jaxsim.settings import SearchSettings, SloSettings
from jaxsim.tuning.capacity import CapacitySearch, Choice, Found, choose
from jaxsim.tuning.cluster import Shard
from jaxsim.tuning.evaluate import Evaluate
from jaxsim.tuning.ranking import Ranking, ranking
from jaxsim.tuning.space import Candidate, Space
from jaxsim.tuning.strategies import UNTOLD, Problem, strategy

WHOLE = Shard(1, 1)
MARGIN = 0.1  # settings this close to the best (relative) go on whatever their rank
SHORTEST = 2000  # requests; shorter runs say too little about a p99
IDLE = 5  # generations that bring nothing unknown, after which a strategy is done
DOUBT = 0.01  # settings less likely than this to be clearly better than the choice get no more seeds


@dataclass
class Known:
    """What is known of one setting."""

    count: int  # requests of a simulation
    seeds: list[int] = field(default_factory=list)
    found: dict[str, Found] = field(default_factory=dict)  # "load", "clients"


@dataclass
class Level:
    """How closely settings are looked at."""

    seeds: int
    count: int  # requests


class Exploration:
    """One search. `rounds` carries it out; what is known can be read at any time between and after.

    `seeds` replicates of `count` requests are what a setting gets that is in the running to the end. Of what the
    strategy proposes only the share of `shard` is tried. Raises `ConfigError` for a strategy that learns from the rest.
    """

    def __init__(
        self,
        space: Space,
        search: SearchSettings,
        slo: SloSettings,
        evaluate: Evaluate,
        seeds: int,
        count: int,
        drawable: Callable[[int], bool] = lambda count: True,  # whether runs may be as long
        shard: Shard = WHOLE,
        request_tokens: float = 1.0,  # prompt and output, mean
    ):
        self.space, self.search, self.slo, self.evaluate, self.drawable = space, search, slo, evaluate, drawable
        self.shard, self.request_tokens = shard, request_tokens
        self.most = min(space.size, search.settings or space.size)  # settings that the strategy may propose
        if shard.count > 1 and search.strategy not in UNTOLD:
            allowed = f"must be null unless search.strategy is one of {', '.join(UNTOLD)}"
            raise ConfigError("launcher.shard", f"{shard.place}/{shard.count}", allowed)
        if shard.count > self.most:
            allowed = f"must have at most {self.most} shards, the number of settings"
            raise ConfigError("launcher.shard", f"{shard.place}/{shard.count}", allowed)
        self.baseline = space.baseline_candidate()
        self.levels = levels(search.halving, seeds, count, self.most)
        self.main = "load" if search.load else "clients"
        self.known: dict[Candidate, Known] = {}
        self.proposed: list[Candidate] = []  # in the order in which they came up
        self.tried: list[Candidate] = []  # those of the shard
        self.simulations = self.computed = self.rounds_done = 0
        self.capacity: CapacitySearch | None = None  # under way
        self.start = time.monotonic()

    @property
    def spent(self) -> bool:
        """Whether the budget is."""
        simulations, seconds = self.search.max_simulations, self.search.max_seconds
        over = simulations is not None and self.simulations >= simulations
        return over or (seconds is not None and time.monotonic() - self.start >= seconds)

    @property
    def finalists(self) -> list[Candidate]:
        """Settings that got every seed of the last level."""
        last = self.levels[-1]
        return [
            one
            for one, known in self.known.items()
            if one is not self.baseline and len(known.seeds) >= last.seeds and known.count == last.count
        ]

    def rounds(self, on_done: Callable[[], None] | None = None) -> Iterator[None]:
        """The search, pausing after each batch of simulations. Raises `ConfigError` if no setting can start."""
        yield from self._propose(on_done)
        for level in self.levels[1:]:
            yield from self._search(self._survivors(), level, on_done)
        yield from self._decide(on_done)
        if self.baseline is not None:
            choice = self.choice()
            seeds = len(self.known[choice.best].seeds) if choice else self.levels[-1].seeds
            yield from self._search([self.baseline], Level(seeds, self.levels[-1].count), on_done)

    def remaining(self) -> int:
        """About how many simulations the batch under way still needs."""
        return self.capacity.remaining() if self.capacity else 0

    def _propose(self, on_done: Callable[[], None] | None) -> Iterator[None]:
        shape = tuple(np.array(self.space.shape)[self.space.varied].tolist())
        most = self.most
        # One setting needs no strategy, and a cube without edges has no positions.
        name = self.search.strategy if shape else "grid"
        chosen = strategy(name, Problem(shape, most, self.search.first_seed, self.search.population))
        idle = 0
        while idle < IDLE and len(self.proposed) < most and not self.spent:
            units = chosen.ask() if shape else np.zeros((0 if self.proposed else 1, 0))
            if not len(units):
                break
            candidates = [self.space.candidate(point) for point in self.space.decode(units)]
            fresh = list(dict.fromkeys(one for one in candidates if one not in self.proposed))
            fresh = fresh[: most - len(self.proposed)]
            idle = 0 if fresh else idle + 1
            mine = self.shard.mine(fresh, len(self.proposed))
            self.proposed += fresh
            self.tried += mine
            if len(self.tried) == len(mine) and len(self.proposed) == most:
                self.space.refuse(mine)
            yield from self._search(mine, self.levels[0], on_done)
            if all(one in self.proposed for one in candidates):
                chosen.tell(units, np.array([self.score(one) for one in candidates]))
        self.space.refuse(self.tried)

    def score(self, candidate: Candidate) -> float:
        """Mean capacity per GPU, requests/s or clients: 0 if no load meets the SLO, -1 if the server cannot start."""
        if candidate.engine is None:
            return -1.0
        known = self.known.get(candidate)
        found = known.found.get(self.main) if known else None
        return float(found.values.mean()) / self._gpus(candidate) if found is not None and len(found.values) else 0.0

    def values(self, candidates: Sequence[Candidate]) -> dict[Candidate, np.ndarray]:
        """Capacity per GPU under each seed, of the candidates for which it is known under all of theirs."""
        found = {one: self.known[one].found.get(self.main) for one in candidates if one in self.known}
        return {one: each.values / self._gpus(one) for one, each in found.items() if each and each.known}

    def _gpus(self, candidate: Candidate) -> int:
        """Those that carry the capacity: a load is of all instances, clients are of each."""
        return candidate.gpus if self.main == "load" else candidate.gpus // candidate.instances

    def choice(self) -> Choice | None:
        """The best of the finalists, or of what there is if the search was broken off before there were any."""
        among = self.finalists or [one for one in self.known if one is not self.baseline]
        seeds = max((len(self.known[one].seeds) for one in among), default=0)
        return choose(self.values([one for one in among if len(self.known[one].seeds) == seeds]))

    def ranking(self) -> tuple[list[Candidate], Ranking] | None:
        """The contenders with the most seeds, and how likely each is the best; None for fewer than two seeds."""
        values = self.values(self.finalists)
        seeds = max((len(value) for value in values.values()), default=0)
        contenders = [one for one, value in values.items() if len(value) == seeds and value.any()]
        if seeds < 2 or not contenders:
            return None
        return contenders, ranking(np.stack([values[one] for one in contenders]), self.search.indifference)

    def _survivors(self) -> list[Candidate]:
        """The better ones of the last level: the share that halving keeps, and whatever is close to the best."""
        ranked = sorted(self.known, key=self.score, reverse=True)
        ranked = [one for one in ranked if self.score(one) > 0]
        keep = math.ceil(len(self.known) / (self.search.halving or 1))
        return [
            one for i, one in enumerate(ranked) if i < keep or self.score(one) >= (1 - MARGIN) * self.score(ranked[0])
        ]

    def _decide(self, on_done: Callable[[], None] | None) -> Iterator[None]:
        """More seeds for the contenders, until the choice is within the indifference with the asked confidence."""
        last = self.levels[-1]
        seeds = last.seeds
        while not self.spent and seeds < (self.search.max_seeds or 0):
            ranked, choice = self.ranking(), self.choice()
            if ranked is None or choice is None:
                return
            contenders, chances = ranked
            place = contenders.index(choice.best)
            if chances.near[place] >= self.search.confidence:
                return
            seeds = min(seeds + max(2, last.seeds // 2), self.search.max_seeds or 0)
            ahead = chances.ahead(place)
            rivals = [one for i, one in enumerate(contenders) if i == place or ahead[i] >= DOUBT]
            yield from self._search(rivals, Level(seeds, last.count), on_done)

    def _search(
        self, candidates: Sequence[Candidate], level: Level, on_done: Callable[[], None] | None
    ) -> Iterator[None]:
        """Capacities of the candidates up to the level; seeds that they have at the same length are kept."""
        groups: dict[int, list[Candidate]] = {}  # by the number of seeds that they have
        for one in candidates:
            if one.engine is not None:
                known = self.known.get(one)
                groups.setdefault(len(known.seeds) if known and known.count == level.count else 0, []).append(one)
        for have, group in groups.items():
            if have >= level.seeds or self.spent:
                continue
            capacity = self.capacity = CapacitySearch(
                group,
                range(level.seeds),
                level.count,
                self.search,
                self.slo,
                self.evaluate,
                before=[self.known[one].found for one in group] if have else None,
                drawable=self.drawable,
                request_tokens=self.request_tokens,
            )
            try:
                while not capacity.done and not self.spent:
                    before = capacity.simulations, capacity.computed
                    capacity.round(on_done)
                    self.simulations += capacity.simulations - before[0]
                    self.computed += capacity.computed - before[1]
                    self.rounds_done += 1
                    self._record(capacity, have)
                    yield
            finally:
                self._record(capacity, have)
        self.capacity = None

    def _record(self, capacity: CapacitySearch, have: int) -> None:
        """What a batch has found so far; what was known from `have` seeds stands until more of them have decided."""
        for index, one in enumerate(capacity.candidates):
            found = {kind: each for kind in ("load", "clients") if (each := capacity.found(kind, index)) is not None}
            if not have or all(each.finished for each in found.values()):
                self.known[one] = Known(capacity.count, [*capacity.seeds], found)


def levels(halving: int | None, seeds: int, count: int, settings: int) -> list[Level]:
    """From a first look to all seeds: each level has `halving` times the seeds of the one before, at least 2.

    Long runs are shortened with them, down to 2,000 requests. Without halving, or with too few settings for it to
    leave any out, there is one level.
    """
    result = [Level(seeds, count)]
    while halving and settings > halving and result[0].seeds > 2:
        shorter = max(min(count, SHORTEST), result[0].count // halving)
        result.insert(0, Level(max(2, math.ceil(result[0].seeds / halving)), shorter))
        settings = math.ceil(settings / halving)
    return result
