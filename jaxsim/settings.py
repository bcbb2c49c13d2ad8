"""Typed settings of the config groups: every key, its type and range in one place.

The classes mirror the YAML files in `conf/`. `read` turns a plain mapping into one of them and raises `ConfigError`,
naming key, value and what is allowed. The groups model, hardware and workload are read where their subject lives.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from jaxsim import ranges
from jaxsim.errors import ConfigError

Settings = TypeVar("Settings")

HIGHEST = 1e9  # of any number without a bound of its own: products of a few stay far from the end of a float or int64
MOST_TOKENS = 2**22 - 1  # scheduled in one iteration: the cost table has an entry for each number of tokens
MOST_INSTANCES = 256  # as many times the requests of one are drawn


@dataclass(frozen=True)
class Rule:
    """What one key may hold."""

    kind: Literal["integer", "number", "flag", "text", "choice", "numbers"]  # numbers: a mapping of names to numbers
    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # the low end itself is not allowed
    choices: tuple[str, ...] = ()
    optional: bool = False
    many: Literal["no", "list", "either", "range"] = "no"  # range: a list, or a text as in ranges.py

    def allowed(self) -> str:
        """The rule in words, to follow `key=value:`."""
        if self.kind in ("integer", "number"):
            words = "an integer" if self.kind == "integer" else "a number"
            if self.low > -math.inf:
                words += f" {'above' if self.above else 'from'} {self.low:.10g}"
            if self.high < math.inf:
                words += f" {'up ' if self.low > -math.inf else ''}to {self.high:.10g}"
        elif self.kind == "flag":
            words = "true or false"
        elif self.kind == "numbers":
            words = f"a mapping to numbers from {self.low:g}, as in {{p95_ttft_ms:100}}"
        else:
            words = f"one of {', '.join(self.choices)}" if self.choices else "a text"
        if self.many != "no":
            single = words
            words = f"a list, not empty, each {single}"
            words += f", or {single}" if self.many == "either" else ""
            words += f", or a range: {ranges.FORMS}" if self.many == "range" else ""
        return f"must be {words}{', or null' if self.optional else ''}"

    def read(self, key: str, value: Any) -> Any:
        """The value, converted; a tuple where the rule asks for many. Raises `ConfigError`."""
        if value is None and self.optional:
            return None
        if self.kind == "numbers":
            if not isinstance(value, Mapping):
                raise ConfigError(key, show(value), self.allowed())
            each = dataclasses.replace(self, kind="number")
            return {str(name): each.read(f"{key}.{name}", item) for name, item in value.items()}
        if self.many == "range" and isinstance(value, str):
            try:
                value = ranges.values(value, self.kind == "integer")
            except ValueError as error:
                raise ConfigError(key, show(value), f"{error}; {self.allowed()}") from None
        listed = isinstance(value, list | tuple)
        if listed != (self.many in ("list", "range")) and self.many != "either" or (listed and not value):
            raise ConfigError(key, show(value), self.allowed())
        if not self.many == "no":
            return tuple(self._one(key, item, value) for item in (value if listed else [value]))
        return self._one(key, value, value)

    def _one(self, key: str, item: Any, value: Any) -> Any:
        number = isinstance(item, int | float) and not isinstance(item, bool)
        if self.kind in ("integer", "number") and number and (self.kind == "number" or isinstance(item, int)):
            inside = (item > self.low if self.above else item >= self.low) and item <= self.high
            if inside:
                return float(item) if self.kind == "number" else item
        elif self.kind == "flag" and isinstance(item, bool):
            return item
        elif self.kind == "choice" and item in self.choices or self.kind == "text" and isinstance(item, str):
            return item
        raise ConfigError(key, show(value), self.allowed())


def _setting(rule: Rule, default: Any) -> Any:
    return field(default=default, metadata={"rule": rule})


def integer(default: Any, low: float = 1, high: float = HIGHEST, **rule: Any) -> Any:
    return _setting(Rule("integer", low=low, high=high, **rule), default)


def number(default: Any, low: float = 0, high: float = HIGHEST, **rule: Any) -> Any:
    return _setting(Rule("number", low=low, high=high, **rule), default)


def flag(default: bool | None, **rule: Any) -> Any:
    return _setting(Rule("flag", **rule), default)


def text(default: Any, **rule: Any) -> Any:
    return _setting(Rule("choice" if "choices" in rule else "text", **rule), default)


@dataclass(frozen=True)
class EngineSettings:
    """The server's flags in vLLM's names; null where the value follows from the model, the GPU or the workload."""

    max_num_seqs: int | None = integer(None, high=MOST_TOKENS, optional=True)
    max_num_batched_tokens: int | None = integer(None, high=MOST_TOKENS, optional=True)
    max_model_len: int | None = integer(None, low=2, optional=True)
    vllm_version: str = text("v0.33")
    usage: str = text("server", choices=("server", "offline"))
    gpu_memory_utilization: float | None = number(None, above=True, high=1, optional=True)
    block_size: int = integer(16, high=1024)
    num_gpu_blocks_override: int | None = integer(None, low=2, optional=True)
    tensor_parallel_size: int = integer(1, high=1024)
    instances: int = integer(1, high=MOST_INSTANCES)
    enable_chunked_prefill: bool = flag(True)
    long_prefill_token_threshold: int = integer(0, low=0)
    long_prefill_token_threshold_adaptive: bool = flag(False)
    policy: str = text("fcfs", choices=("fcfs", "priority"))
    watermark: float | None = number(None, high=1, optional=True)
    scheduler_reserve_full_isl: bool | None = flag(None, optional=True)
    max_num_active_seqs: int | None = integer(None, optional=True)
    enable_prefix_caching: bool | None = flag(None, optional=True)
    async_scheduling: bool | None = flag(None, optional=True)
    lone_request_without_threshold: bool | None = flag(None, optional=True)
    freed_unhashed_blocks: str | None = text(None, choices=("front", "tail"), optional=True)
    self_preemption: str | None = text(None, choices=("continues", "ends"), optional=True)
    preemption_mode: str = text("recompute", choices=("recompute", "swap"))
    swap_space: float = number(4.0, high=1e5)
    max_queued_requests: int | None = integer(None, high=MOST_TOKENS, optional=True)
    max_new_tokens: int | None = integer(None, high=MOST_TOKENS, optional=True)
    batching: str = text("continuous", choices=("continuous", "static"))
    static_padding: bool = flag(False)
    static_wait_s: float = number(0.0)

    @property
    def caches(self) -> bool:
        """Whether prefix caching is simulated: static batching has none."""
        return bool(self.enable_prefix_caching) and self.batching == "continuous"


@dataclass(frozen=True)
class SloSettings:
    """Limits on latency, each at one percentile of the requests, and on any other figure (`jaxsim.tuning.slo`)."""

    ttft_ms: float | None = number(200.0, above=True, optional=True)
    tpot_ms: float | None = number(None, above=True, optional=True)
    itl_ms: float | None = number(None, above=True, optional=True)
    e2el_ms: float | None = number(None, above=True, optional=True)
    queue_wait_ms: float | None = number(None, above=True, optional=True)
    percentile: float = number(99.0, above=True, high=100)
    limits: Mapping[str, float] | None = _setting(Rule("numbers", low=0, high=HIGHEST, optional=True), None)
    goodput: str | None = text(None, optional=True)
    goodput_share: float = number(0.99, above=True, high=1)
    target_rps: float | None = number(100.0, above=True, optional=True)


@dataclass(frozen=True)
class SearchSettings:
    """The settings to search, the replicates and the precision of a search.

    The keys that are also keys of `EngineSettings` (`SEARCHED`) hold the values to try, null where the engine's own
    value is taken.
    """

    max_num_seqs: tuple[int, ...] | None = integer(
        (8, 16, 32, 64, 128, 256), high=MOST_TOKENS, many="range", optional=True
    )
    max_num_batched_tokens: tuple[int, ...] | None = integer(
        (2048, 4096, 8192), high=MOST_TOKENS, many="range", optional=True
    )
    gpu_memory_utilization: tuple[float, ...] | None = number(None, above=True, high=1, many="range", optional=True)
    block_size: tuple[int, ...] | None = integer(None, high=1024, many="range", optional=True)
    tensor_parallel_size: tuple[int, ...] | None = integer(None, high=1024, many="range", optional=True)
    instances: tuple[int, ...] | None = integer(None, high=MOST_INSTANCES, many="range", optional=True)
    enable_chunked_prefill: tuple[bool, ...] | None = flag(None, many="list", optional=True)
    long_prefill_token_threshold: tuple[int, ...] | None = integer(None, low=0, many="range", optional=True)
    watermark: tuple[float, ...] | None = number(None, high=1, many="range", optional=True)
    max_num_active_seqs: tuple[int, ...] | None = integer(None, many="range", optional=True)
    scheduler_reserve_full_isl: tuple[bool, ...] | None = flag(None, many="list", optional=True)
    enable_prefix_caching: tuple[bool, ...] | None = flag(None, many="list", optional=True)
    async_scheduling: tuple[bool, ...] | None = flag(None, many="list", optional=True)
    preemption_mode: tuple[str, ...] | None = text(None, choices=("recompute", "swap"), many="list", optional=True)
    swap_space: tuple[float, ...] | None = number(None, high=1e5, many="range", optional=True)
    max_queued_requests: tuple[int, ...] | None = integer(None, high=MOST_TOKENS, many="range", optional=True)
    max_new_tokens: tuple[int, ...] | None = integer(None, high=MOST_TOKENS, many="range", optional=True)
    strategy: str = text("grid", choices=("grid", "random", "sobol", "latin", "cem", "es", "cmaes"))
    settings: int | None = integer(None, optional=True)
    population: int | None = integer(None, low=2, optional=True)
    halving: int | None = integer(None, low=2, high=100, optional=True)
    max_simulations: int | None = integer(None, optional=True)
    max_seconds: float | None = number(None, above=True, optional=True)
    max_seeds: int | None = integer(20, high=1000, optional=True)
    indifference: float = number(0.05, high=1)
    confidence: float = number(0.95, low=0.5, high=0.9999)
    load: bool = flag(True)
    concurrency: bool = flag(True)
    seeds: int = integer(10, high=1000)
    first_seed: int = integer(0, low=0)
    num_requests: int | None = integer(2000, low=10, high=10**7, optional=True)
    warmup: float = number(0.1, high=0.9)
    max_num_requests: int | None = integer(None, low=10, high=10**7, optional=True)
    precision: float | None = number(None, low=0.001, high=1, optional=True)
    step: float = number(0.02, low=0.001, high=1)
    think_time_s: float = number(0.0, high=1e4)


@dataclass(frozen=True)
class TrackingSettings:
    mode: str = text("offline", choices=("auto", "online", "offline", "disabled"))
    project: str = text("jaxsim")
    group: str | None = text(None, optional=True)


@dataclass(frozen=True)
class RuntimeSettings:
    devices: int | None = integer(None, high=1024, optional=True)
    lanes: int | None = integer(None, high=1 << 20, optional=True)
    compilation_cache: str | None = text("auto", optional=True)


@dataclass(frozen=True)
class LauncherSettings:
    """Which machines simulate, and which share of the settings."""

    kind: str = text("local", choices=("local", "ray"))
    shard: str | None = text(None, optional=True)
    address: str | None = text(None, optional=True)
    num_cpus: int | None = integer(None, high=65536, optional=True)
    num_gpus: int | None = integer(None, low=0, high=1024, optional=True)
    batch: int | None = integer(None, optional=True)
    max_retries: int = integer(5, low=-1)


@dataclass(frozen=True)
class StoreSettings:
    """Where finished simulations are kept, and further stores to take some from."""

    path: str | None = text("auto", optional=True)
    merge: tuple[str, ...] | None = text(None, many="either", optional=True)


@dataclass(frozen=True)
class EvaluateSettings:
    load_rps: tuple[float, ...] | None = number(None, above=True, many="either", optional=True)
    clients: tuple[int, ...] | None = integer(None, many="either", optional=True)
    series: bool = flag(False)


@dataclass(frozen=True)
class StaticSettings:
    loads_rps: tuple[float, ...] | None = number(None, above=True, many="list", optional=True)


@dataclass(frozen=True)
class PrefixCacheSettings:
    prefix_len: tuple[int, ...] = integer((256, 1024, 2048), many="list")
    share: tuple[float, ...] = number((0.0, 0.5, 1.0), high=1, many="list")
    groups: int = integer(8, high=1_000_000)
    num_gpu_blocks: tuple[int, ...] | None = integer(None, low=2, many="list", optional=True)
    load_rps: float | None = number(None, above=True, optional=True)


@dataclass(frozen=True)
class ParetoSettings:
    shares: tuple[float, ...] = number(
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95), above=True, high=2, many="list"
    )


SEARCHED = tuple(
    entry.name for entry in dataclasses.fields(SearchSettings) if entry.name in EngineSettings.__dataclass_fields__
)

# What the server runs with now, to compare with: any searched key, null = as in `engine`.
BaselineSettings = dataclasses.make_dataclass(
    "BaselineSettings",
    [
        (key, Any, field(default=None, metadata={"rule": dataclasses.replace(rule, optional=True)}))
        for key in SEARCHED
        for rule in [EngineSettings.__dataclass_fields__[key].metadata["rule"]]
    ],
    frozen=True,
)

GROUPS: dict[str, type] = {
    "baseline": BaselineSettings,
    "engine": EngineSettings,
    "slo": SloSettings,
    "search": SearchSettings,
    "tracking": TrackingSettings,
    "runtime": RuntimeSettings,
    "launcher": LauncherSettings,
    "store": StoreSettings,
    "evaluate": EvaluateSettings,
    "static_vs_continuous": StaticSettings,
    "prefix_cache": PrefixCacheSettings,
    "pareto": ParetoSettings,
}


def read(kind: type[Settings], group: str, values: Any) -> Settings:
    """An instance of a settings class from a mapping; a missing key takes its default. Raises `ConfigError`."""
    rules = {entry.name: entry.metadata["rule"] for entry in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    if not isinstance(values, Mapping):
        raise ConfigError(group, show(values), f"must be a group of keys: {', '.join(rules)}")
    for key in values:
        if key not in rules:
            raise unknown_key(f"{group}.{key}", values[key], rules)
    return kind(**{key: rules[key].read(f"{group}.{key}", value) for key, value in values.items()})


def unknown_key(key: str, value: Any, known: Any) -> ConfigError:
    """The error for a key that does not exist, with the one that was probably meant."""
    close = difflib.get_close_matches(key.rpartition(".")[2], list(known), 1)
    meant = f"no such key, did you mean {close[0]}?" if close else "no such key."
    return ConfigError(key, show(value), f"{meant} Allowed: {', '.join(known)}")


def show(value: Any) -> str:
    """A value as one would type it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(show(item) for item in value)}]"
    return " ".join(str(value).split())
