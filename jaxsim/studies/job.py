"""A command's settings, checked and turned into the things to simulate, and where its results go."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxsim import settings as schema
from jaxsim.defaults import lines
from jaxsim.errors import ConfigError
from jaxsim.results.files import plain, unwritable, write_csv, write_json
from jaxsim.results.store import open_store
from jaxsim.settings import RuntimeSettings, SearchSettings, SloSettings, TrackingSettings
from jaxsim.tracking import Tracking
from jaxsim.tuning.cluster import Shard, launched
from jaxsim.tuning.evaluate import Evaluate, Simulator
from jaxsim.tuning.replicates import Replicates, replicates
from jaxsim.tuning.slo import limits
from jaxsim.tuning.space import Server
from jaxsim.tuning.stored import Keys, StoredEvaluate, digest, sources
from jaxsim.workload import workload_from_config

MEANS = ("launcher", "runtime", "store", "tracking")  # groups that say how, not what
OTHER_GROUPS = ("sweep", "model", "hardware", "workload")


@dataclass
class Job:
    """Everything a study needs. `start` is when the command began, in seconds of `time.monotonic`."""

    sweep: str
    settings: Mapping[str, Any]  # as composed, plain
    groups: Mapping[str, Any]  # group -> its typed settings
    server: Server
    replicates: Replicates
    folder: Path
    console: Console
    group: str | None = None  # of runs that belong together
    stored: StoredEvaluate | None = None  # the store in use
    start: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, settings: Mapping[str, Any], folder: Path, console: Console, group: str | None = None) -> "Job":
        """Checks every group. Raises `ConfigError`."""
        for key in settings:
            if key not in schema.GROUPS and key not in OTHER_GROUPS:
                raise schema.unknown_key(key, settings[key], [*schema.GROUPS, *OTHER_GROUPS])
        for key in ("model", "hardware", "workload"):
            if not isinstance(settings.get(key), Mapping):
                raise ConfigError(key, schema.show(settings.get(key)), "must be a preset of that group")
        groups = {key: schema.read(kind, key, settings.get(key, {})) for key, kind in schema.GROUPS.items()}
        asked = limits(groups["slo"])
        server = Server.of(settings, groups["engine"])
        path = settings["workload"].get("path")
        if path is not None and not isinstance(path, str):
            raise ConfigError("workload.path", schema.show(path), "must be a text, the path of a trace file")
        caching = server.flags.caches or True in (groups["search"].enable_prefix_caching or ())
        workload = workload_from_config(settings["workload"], caching)
        names = [each.name for each in getattr(workload, "classes", ())]
        for limit in asked:
            if limit.label is not None and limit.label not in names:
                allowed = f"no such class; workload.classes has {', '.join(names) or 'none'}"
                raise ConfigError(f"slo.limits.{limit.figure}", schema.show(limit.bound), allowed)
        too_long = settings["workload"].get("too_long", "error")
        sampled = replicates(workload, groups["search"], server.max_model_len, too_long)
        return cls(str(settings["sweep"]), settings, groups, server, sampled, folder, console, group)

    @property
    def search(self) -> SearchSettings:
        return self.groups["search"]

    @property
    def baseline(self) -> dict[str, Any] | None:
        """Flags of the baseline that are given; None if there are none."""
        given = {key: value for key, value in vars(self.groups["baseline"]).items() if value is not None}
        return given or None

    @property
    def slo(self) -> SloSettings:
        return self.groups["slo"]

    @property
    def ttft(self) -> str:
        """The figure of TTFT at the SLO's percentile."""
        return f"p{self.slo.percentile:g}_ttft_ms"

    @property
    def runtime(self) -> RuntimeSettings:
        return self.groups["runtime"]

    def evaluate(self, sampled: Replicates | None = None) -> Evaluate:
        """Carries simulations out, but those that the store holds; `sampled` are other requests than the job's own.

        Raises `ConfigError` for a store of no use.
        """
        sampled = sampled or self.replicates
        simulator = Simulator(sampled, self.slo, self.search, self.runtime.lanes)
        carried_out = launched(self.groups["launcher"], self.runtime, simulator)
        store = open_store(self.groups["store"])
        if store is None:
            return carried_out
        about = {"model": self.server.model.name, "hardware": self.server.hardware.name}
        self.stored = StoredEvaluate(carried_out, store, Keys(sampled, self.slo, self.search), about)
        return self.stored

    @property
    def shard(self) -> Shard:
        """The share of the settings that this job is to try. Raises `ConfigError`."""
        return Shard.of(self.groups["launcher"].shard)

    def track(self) -> Tracking:
        """Starts the W&B run."""
        tracking: TrackingSettings = self.groups["tracking"]
        name = f"{self.sweep} {self.server.model.name} {self.server.hardware.name}"
        return Tracking(
            tracking, self.settings, self.folder, name=name, job_type=self.sweep, group=self.group, run_id=self.run_id()
        )

    def run_id(self) -> str:
        """The same for every command that asks for the same: so a command that is run again continues its W&B run."""
        asked = {key: value for key, value in self.settings.items() if key not in MEANS}
        return digest(sources(), json.dumps(asked, sort_keys=True).encode()).hex()[:16]

    def finish(
        self, tracking: Tracking, summary: Mapping[str, Any], tables: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> None:
        """Writes summary.json and a CSV file per table, hands them to W&B and says where they are.

        Raises `ConfigError` where the run folder cannot be written into.
        """
        files = {name: self.folder / f"{name}.csv" for name in tables}
        try:
            write_json(self.folder / "summary.json", summary)
            for name, rows in tables.items():
                write_csv(files[name], rows)
        except OSError as error:
            tracking.finish()
            raise unwritable(f"hydra.{'sweep' if self.group else 'run'}.dir", self.folder, error) from None
        tracking.table("candidates", [plain(row) for row in tables["candidates"]])
        flat = {**summary} | {f"{key}_ci95": half_width for key, half_width in summary.get("ci95", {}).items()}
        tracking.summary({key: value for key, value in plain(flat).items() if not isinstance(value, dict | list)})
        config = self.folder / ".hydra" / "config.yaml"
        tracking.artifact("results", [config, self.folder / "summary.json", *files.values()])
        for line in [*self._kept(), f"results    {self.folder}", *(tracking.finish() or [])]:
            self.console.print(line, soft_wrap=True)

    def say_defaults(self, searched: Collection[str] = ()) -> None:
        """Prints what was not given and where it comes from."""
        for line in lines(self.server.taken(searched)):
            self.console.print(f"taken      {line}", soft_wrap=True)

    def _kept(self) -> list[str]:
        """The line about the store."""
        if self.stored is None:
            return []
        self.close()
        return [f"store      {self.stored.store.path}: {self.stored.found:,} found in it, {self.stored.made:,} added"]

    def close(self) -> None:
        """Writes what the store still holds back, and closes it."""
        if self.stored is not None:
            self.stored.store.close()

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def title(self) -> str:
        """What is simulated, in one line."""
        server, sampled = self.server, self.replicates
        gpus = f"{server.flags.tensor_parallel_size} x " if server.flags.tensor_parallel_size > 1 else ""
        text = f"{server.flags.instances} instances of " if server.flags.instances > 1 else ""
        text += f"{server.model.name} on {gpus}{server.hardware.name}"
        text += f", {len(sampled.requests)} seeds of {sampled.count} requests"
        lost = max(sampled.dropped)
        return text + (f", up to {lost} a seed dropped (max_model_len={server.max_model_len})" if lost else "")
