"""Simulations that are carried out once: what a store holds is taken from it, what is missing is kept in it."""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import numpy as np

from jaxsim.engine import CostTable, EngineConfig, Requests
from jaxsim.results.store import Row, Store
from jaxsim.settings import SearchSettings, SloSettings
from jaxsim.tuning.evaluate import Evaluate, OnDone, Outcome, Task
from jaxsim.tuning.load import Verdict
from jaxsim.tuning.replicates import Replicates
from jaxsim.tuning.space import Candidate

# What turns a task into figures. A change of any of it, even of a comment, makes all keys new.
SOURCES = (
    "engine",
    "metrics.py",
    "tuning/evaluate.py",
    "tuning/figures.py",
    "tuning/load.py",
    "tuning/replicates.py",
    "tuning/slo.py",
)
SEARCH_KEYS = ("warmup", "think_time_s")  # those that enter a simulation or its figures
NOT_THE_SLO = ("target_rps",)  # enters neither verdict nor figures
# Entries of a cost table that a setting can come to, by the key that bounds them: longer tables are the same to it.
BOUNDS = {
    "linear_ps": "max_num_batched_tokens",
    "decode_base_ps": "max_num_seqs",
    "decode_ctx_table_ps": "max_num_seqs",
}


class Keys:
    """The key of a task: a digest of everything that determines its outcome, and of nothing else.

    Neither lanes nor devices are in it, nor how the task came up: one simulation has one key in every search.
    """

    def __init__(self, replicates: Replicates, slo: SloSettings, search: SearchSettings):
        self.replicates = replicates
        limits = {key: value for key, value in asdict(slo).items() if key not in NOT_THE_SLO}
        self.judged = digest(sources(), _bytes(limits), _bytes([getattr(search, key) for key in SEARCH_KEYS]))
        self._settings: dict[Candidate, bytes] = {}
        self._requests: dict[int, tuple[Requests, bytes]] = {}  # by identity, which lasts as long as they are held

    def __call__(self, task: Task) -> bytes:
        requests, stretch = task.sent(self.replicates)
        loop = _bytes([task.clients, float(stretch), task.candidate.instances])
        return digest(self.judged, self._setting(task.candidate), self._of(requests), loop)

    def _setting(self, candidate: Candidate) -> bytes:
        if candidate not in self._settings:
            engine, cost = candidate.engine, candidate.cost
            assert engine is not None and cost is not None
            table = cost.table(engine.max_num_batched_tokens, engine.max_num_seqs)
            self._settings[candidate] = digest(_bytes(asdict(engine)), costdigest(table, engine))
        return self._settings[candidate]

    def _of(self, requests: Requests) -> bytes:
        if id(requests) not in self._requests:
            self._requests[id(requests)] = requests, requestsdigest(requests)
        return self._requests[id(requests)][1]


class StoredEvaluate:
    """An `Evaluate` that asks another one for what the store lacks only.

    `about` says in words what the tasks have in common, for whoever reads the store.
    """

    def __init__(self, evaluate: Evaluate, store: Store, keys: Keys, about: Mapping[str, Any]):
        self.evaluate, self.store, self.keys, self.about = evaluate, store, keys, about
        self.found = self.made = 0

    def __call__(self, tasks: Sequence[Task], on_done: OnDone | None = None) -> list[Outcome]:
        keys = [self.keys(task) for task in tasks]
        kept = self.store.find(keys)
        outcomes: list[Any] = [None] * len(tasks)
        missing = []
        for index, key in enumerate(keys):
            if key not in kept:
                missing.append(index)
                continue
            outcomes[index] = Outcome(Verdict(**kept[key].verdict), kept[key].figures, computed=False)
            self.found += 1
            if on_done is not None:
                on_done(index, outcomes[index])

        def keep(place: int, outcome: Outcome) -> None:
            index = missing[place]
            outcomes[index] = outcome
            self.store.add(Row(keys[index], self._words(tasks[index]), outcome.verdict._asdict(), outcome.figures))
            self.made += 1
            if on_done is not None:
                on_done(index, outcome)

        if missing:
            try:
                self.evaluate([tasks[index] for index in missing], keep)
            finally:
                self.store.flush()
        return outcomes

    def _words(self, task: Task) -> dict[str, Any]:
        chosen = {"seed": task.seed, "load_rps": task.load_rps, "clients": task.clients, "num_requests": task.count}
        return {**self.about, **task.candidate.setting, **chosen}


@functools.cache
def sources() -> bytes:
    """Digest of the sources that turn a task into figures."""
    return digest(*(part for name, text in source_files() for part in (name.encode(), text)))


def source_files() -> list[tuple[str, bytes]]:
    """Names and contents of what SOURCES names: modules, and all modules of a folder."""
    found = []
    for name in SOURCES:
        entry = files("jaxsim") / name
        modules = [entry]
        if entry.is_dir():
            modules = sorted((one for one in entry.iterdir() if one.name.endswith(".py")), key=lambda one: one.name)
        found += [(f"{name}/{one.name}" if entry.is_dir() else name, one.read_bytes()) for one in modules]
    return found


def costdigest(table: CostTable, engine: EngineConfig) -> bytes:
    """Digest of what a setting can see of a table. A static batch is bounded by no budget and sees all of it."""
    parts = []
    for name, value in sorted(vars(table).items()):
        if isinstance(value, np.ndarray):
            seen = len(value)
            if name in BOUNDS and engine.batching == "continuous":
                seen = getattr(engine, BOUNDS[name]) + 1
            value = value[:seen].astype(np.int64).tobytes()
        parts += [name.encode(), value if isinstance(value, bytes) else _bytes(value)]
    return digest(*parts)


def requestsdigest(requests: Requests) -> bytes:
    parts = [np.asarray(requests.arrival_s, np.float64).tobytes()]
    parts += [np.asarray(field, np.int64).tobytes() for field in (requests.prompt_len, requests.output_len)]
    return digest(*parts, *map(_bytes, requests[3:]))


def _bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=lambda other: other.tolist()).encode()  # NumPy's


def digest(*parts: bytes) -> bytes:
    """128 bits; each part goes in with its length, so that no two lists of parts read the same."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()
