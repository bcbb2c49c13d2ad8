"""The settings to try: a server on one deployment, its default flags, and the space of candidates around it."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxsim.cost.roofline import Roofline
from jaxsim.defaults import Default, batch_defaults, resolve
from jaxsim.engine import CostTable, EngineConfig
from jaxsim.errors import ConfigError
from jaxsim.hardware import HardwareSpec, hardware_from_mapping
from jaxsim.memory import GIB, Capacity, kv_capacity
from jaxsim.model import ModelSpec, kv_bytes_per_token, model_from_mapping
from jaxsim.settings import SEARCHED, EngineSettings, SearchSettings, show

LONGEST_DEFAULT = 16384  # tokens; max_model_len when none is asked for, so that small GPUs start too


@dataclass(frozen=True, eq=False)
class Candidate:
    """One setting; `engine` is None where the server would not start, and `reason` says why."""

    setting: Mapping[str, Any]  # searched key -> value, always with max_num_seqs and max_num_batched_tokens
    engine: EngineConfig | None
    capacity: Capacity | None
    flags: EngineSettings | None = None
    cost: "FixedCost | None" = None
    error: ConfigError | None = None

    @property
    def reason(self) -> str:
        return str(self.error) if self.error else ""

    @property
    def max_num_seqs(self) -> int:
        return self.setting["max_num_seqs"]

    @property
    def max_num_batched_tokens(self) -> int:
        return self.setting["max_num_batched_tokens"]

    @property
    def name(self) -> str:
        """The values, as in 32/4096."""
        return "/".join(show(value) for value in self.setting.values())

    @property
    def instances(self) -> int:
        return self.flags.instances if self.flags else 1

    @property
    def gpus(self) -> int:
        """Of all instances."""
        return self.instances * self.flags.tensor_parallel_size if self.flags else 1


@dataclass(frozen=True)
class Server:
    """A model on a GPU (or a tensor-parallel group) with the flags that a search does not vary."""

    model: ModelSpec
    hardware: HardwareSpec
    flags: EngineSettings
    defaults: Mapping[str, Default]  # of the flags, those that were not given
    given: EngineSettings  # as they were given, with nulls

    @classmethod
    def of(cls, settings: Mapping[str, Any], flags: EngineSettings) -> "Server":
        """From the groups model and hardware as plain mappings. Raises `ConfigError`."""
        model, hardware = model_from_mapping(settings["model"]), hardware_from_mapping(settings["hardware"])
        server = cls(model, hardware, *resolve(flags), flags)
        longest = server.model.max_position_embeddings
        if server.max_model_len > longest:
            allowed = f"must be at most {longest}, the max_position_embeddings of {server.model.name}"
            raise ConfigError("engine.max_model_len", server.max_model_len, allowed)
        return server

    def changed(self, flags: Mapping[str, Any]) -> "Server":
        """With other flags; what was not given may follow from them."""
        given = dataclasses.replace(self.given, **flags)
        return Server(self.model, self.hardware, *resolve(given), given)

    @property
    def max_model_len(self) -> int:
        return self.flags.max_model_len or min(self.model.max_position_embeddings, LONGEST_DEFAULT)

    def batch_defaults(self) -> tuple[int, int]:
        """(max_num_seqs, max_num_batched_tokens): what is asked for, else vLLM's choice."""
        found = self._batch_defaults()
        return found["max_num_seqs"].value, found["max_num_batched_tokens"].value

    def taken(self, searched: Collection[str] = ()) -> dict[str, Default]:
        """Values that were not given, without those that are searched."""
        found = {**self.defaults, **self._batch_defaults()}
        return {key: default for key, default in found.items() if key not in searched and default.source != "given"}

    def _batch_defaults(self) -> dict[str, Default]:
        return batch_defaults(self.flags, self.hardware.memory_gib, self.hardware.name, self.max_model_len)

    def candidate(self, max_num_seqs: int, max_num_batched_tokens: int, **changes: Any) -> Candidate:
        """One setting, ready to simulate. Raises `ConfigError` with vLLM's reason if the server would not start."""
        flags = self.flags
        assert flags.gpu_memory_utilization is not None
        capacity = kv_capacity(
            self.model,
            self.hardware,
            tensor_parallel_size=flags.tensor_parallel_size,
            gpu_memory_utilization=flags.gpu_memory_utilization,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            block_size=flags.block_size,
            num_gpu_blocks_override=flags.num_gpu_blocks_override,
        )
        setting = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        given = {key: value for key, value in vars(flags).items() if key in EngineConfig.__dataclass_fields__}
        if flags.preemption_mode == "swap":
            block_bytes = kv_bytes_per_token(self.model, flags.tensor_parallel_size) * flags.block_size
            given["num_cpu_blocks"] = int(flags.swap_space * GIB // block_bytes)
        given |= setting | {"num_gpu_blocks": capacity.num_gpu_blocks, "max_model_len": self.max_model_len}
        return Candidate(setting, EngineConfig(**(given | changes)), capacity, flags)

    def cost(self, max_tokens: int, max_seqs: int) -> "FixedCost":
        """Iteration times up to these sizes; one table for all settings, so that they share one compiled engine."""
        roofline = Roofline(self.model, self.hardware, self.flags.tensor_parallel_size)
        return FixedCost(roofline.table(max_tokens, max_seqs))


@dataclass(frozen=True, eq=False)
class FixedCost:
    """A cost whose table has been made, for the largest sizes it will be asked for."""

    costs: CostTable

    def table(self, max_tokens: int, max_seqs: int) -> CostTable:
        return self.costs


@dataclass(frozen=True, eq=False)
class Space:
    """Every combination of the searched values. `D` is the number of searched keys.

    A point is a tuple of D places, each into the values of its key; strategies think in the unit cube, of which a key's
    values share an edge evenly, in their order. So integers, powers of two and flags are nothing special to them.
    """

    server: Server
    values: Mapping[str, tuple]  # key -> values, [D]; at least max_num_seqs and max_num_batched_tokens
    searched: Collection[str]  # keys that were given values to try
    baseline: Mapping[str, Any] | None = None  # what the server runs with now: changes of its flags, to compare with
    _made: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    _costs: dict[tuple[int, ...], FixedCost] = field(default_factory=dict)

    @classmethod
    def of(cls, server: Server, search: SearchSettings, baseline: Mapping[str, Any] | None = None) -> "Space":
        """The space of a search around a server. Raises `ConfigError` for a key that is both given and searched."""
        chosen = {key: getattr(search, key) for key in SEARCHED if getattr(search, key) is not None}
        for key in ("max_num_seqs", "max_num_batched_tokens"):
            given = getattr(server.flags, key)
            if given is not None and key in chosen:
                allowed = f"is searched: use search.{key}=[{given}], or search.{key}=null"
                raise ConfigError(f"engine.{key}", given, allowed)
        defaults = dict(zip(("max_num_seqs", "max_num_batched_tokens"), server.batch_defaults(), strict=True))
        return cls(server, {key: (value,) for key, value in defaults.items()} | chosen, list(chosen), baseline)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.values.values())

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def varied(self) -> np.ndarray:
        """Keys with more than one value, [V] places."""
        return np.flatnonzero(np.array(self.shape) > 1)

    def points(self) -> list[tuple[int, ...]]:
        """All of them, the last key varying fastest."""
        return list(itertools.product(*(range(length) for length in self.shape)))

    def decode(self, units: np.ndarray) -> list[tuple[int, ...]]:
        """Points of positions [K, V] in the unit cube of the varied keys; what lies outside counts as on its face."""
        shape = np.array(self.shape)[self.varied]
        places = np.zeros((len(units), len(self.shape)), int)
        places[:, self.varied] = np.clip(np.floor(np.asarray(units) * shape), 0, shape - 1).astype(int)
        return [tuple(row) for row in places.tolist()]

    def candidate(self, point: tuple[int, ...]) -> Candidate:
        """The setting of a point, always the same object; one that cannot start says why."""
        if point not in self._made:
            self._made[point] = self._make(point)
        return self._made[point]

    def baseline_candidate(self) -> Candidate | None:
        """The baseline, with the values of all searched keys; vLLM's defaults where it gives none."""
        if self.baseline is None:
            return None
        server = self.server.changed(self.baseline)
        flags, defaults = server.flags, server.batch_defaults()
        setting = dict(zip(("max_num_seqs", "max_num_batched_tokens"), defaults, strict=True))
        return self._made_of({key: getattr(flags, key) for key in {**self.values, **self.baseline}} | setting)

    def _make(self, point: tuple[int, ...]) -> Candidate:
        return self._made_of(
            {key: values[place] for (key, values), place in zip(self.values.items(), point, strict=True)}
        )

    def _made_of(self, setting: Mapping[str, Any]) -> Candidate:
        server = self.server.changed(setting)
        try:
            made = server.candidate(setting["max_num_seqs"], setting["max_num_batched_tokens"])
        except ConfigError as error:
            return Candidate(setting, None, None, server.flags, error=error)
        return dataclasses.replace(made, setting=setting, cost=self._cost(server, setting))

    def _cost(self, server: Server, setting: Mapping[str, Any]) -> FixedCost:
        """One table per tensor-parallel size, for the largest settings of the space; a larger baseline has its own."""
        keys = ("max_num_batched_tokens", "max_num_seqs")
        sizes = tuple(max(*self.values[key], setting[key]) for key in keys)
        place = (server.flags.tensor_parallel_size, *sizes)
        if place not in self._costs:
            self._costs[place] = server.cost(*sizes)
        return self._costs[place]

    def grid(self) -> list[Candidate]:
        """Every setting; one that cannot start stays in, with the reason. Raises `ConfigError` if not one can."""
        candidates = [self.candidate(point) for point in self.points()]
        self.refuse(candidates)
        return candidates

    def refuse(self, candidates: Sequence[Candidate]) -> None:
        """Raises `ConfigError` with the reason if not one of the candidates can start."""
        errors = [candidate.error for candidate in candidates if candidate.error is not None]
        if not errors or len(errors) < len(candidates):
            return
        if len({(error.key, str(error.value)) for error in errors}) == 1 and len(errors) > 1:
            raise errors[0]  # nothing that is searched has to do with it
        reason = f"none of these settings can start; the first: {errors[0]}"
        raise ConfigError("search.max_num_seqs", show(self.values["max_num_seqs"]), reason)
