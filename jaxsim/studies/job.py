"""A command's settings, checked and turned into the things to simulate, and where its results go."""

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
from jaxsim.search.replicates import Replicates, replicates
from jaxsim.search.slo import limits
from jaxsim.search.space import Server
from jaxsim.settings import RuntimeSettings, SearchSettings, SloSettings, TrackingSettings
from jaxsim.tracking import Tracking
from jaxsim.workload import workload_from_config

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
        limits(groups["slo"])
        server = Server.of(settings, groups["engine"])
        path = settings["workload"].get("path")
        if path is not None and not isinstance(path, str):
            raise ConfigError("workload.path", schema.show(path), "must be a text, the path of a trace file")
        caching = groups["engine"].caches or True in (groups["search"].enable_prefix_caching or ())
        workload = workload_from_config(settings["workload"], caching)
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
    def runtime(self) -> RuntimeSettings:
        return self.groups["runtime"]

    def track(self) -> Tracking:
        """Starts the W&B run."""
        tracking: TrackingSettings = self.groups["tracking"]
        return Tracking(tracking, self.settings, self.folder, self.sweep, self.group)

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
        tracking.summary({key: value for key, value in plain(summary).items() if not isinstance(value, dict | list)})
        tracking.artifact("results", [self.folder / "summary.json", *files.values()])
        for line in [f"results    {self.folder}", *(tracking.finish() or [])]:
            self.console.print(line, soft_wrap=True)

    def say_defaults(self, searched: Collection[str] = ()) -> None:
        """Prints what was not given and where it comes from."""
        for line in lines(self.server.taken(searched)):
            self.console.print(f"taken      {line}", soft_wrap=True)

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def title(self) -> str:
        """What is simulated, in one line."""
        server, sampled = self.server, self.replicates
        gpus = f"{server.flags.tensor_parallel_size} x " if server.flags.tensor_parallel_size > 1 else ""
        text = f"{server.model.name} on {gpus}{server.hardware.name}"
        text += f", {len(sampled.requests)} seeds of {sampled.count} requests"
        lost = max(sampled.dropped)
        return text + (f", up to {lost} a seed dropped (max_model_len={server.max_model_len})" if lost else "")
