"""Weights & Biases, offline unless asked otherwise. The only module that imports wandb.

A failure in here never stops a job: it is said once, in one line, and the run goes on without tracking.
"""

import functools
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxsim.settings import TrackingSettings

Result = TypeVar("Result")
QUIET = {"silent": True, "console": "off", "disable_git": True, "disable_code": True, "x_disable_stats": True}


def _guarded(method: Callable[..., Result]) -> Callable[..., Result | None]:
    """The method, doing nothing without a run and ending the tracking at the first failure."""

    @functools.wraps(method)
    def guarded(self: "Tracking", *args: Any, **kwargs: Any) -> Result | None:
        if self.run is None:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # whatever wandb raises
            self.fail(error)
            return None

    return guarded


class Tracking:
    """One W&B run, or none."""

    def __init__(
        self, settings: TrackingSettings, config: Mapping[str, Any], folder: Path, name: str, group: str | None
    ):
        self.run: Any = None
        self.settings = settings
        if settings.mode == "disabled":
            return
        try:
            self._start(config, folder, name, group)
        except Exception as error:  # no network, no key, no space: the simulation does not depend on any of it
            self.fail(error)

    def _start(self, config: Mapping[str, Any], folder: Path, name: str, group: str | None) -> None:
        logging.getLogger("wandb").setLevel(logging.ERROR)
        import wandb

        if self.settings.mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.Api().api_key):
            raise RuntimeError("no API key; log in with `wandb login` or use tracking.mode=offline")
        self.wandb = wandb
        self.run = wandb.init(
            mode="online" if self.settings.mode == "online" else "offline",
            project=self.settings.project,
            group=self.settings.group or group,
            name=name,
            job_type=name,
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(**QUIET),
        )

    def fail(self, error: Exception) -> None:
        run, self.run = self.run, None
        words = " ".join(str(error).split()) or type(error).__name__
        print(f"warning: W&B tracking is off from here on: {words}", file=sys.stderr)
        if run is not None:
            try:
                run.finish(exit_code=1, quiet=True)
            except Exception:
                pass

    @_guarded
    def log(self, values: Mapping[str, Any]) -> None:
        """One line of the history."""
        self.run.log({key: value for key, value in values.items() if value is not None})

    @_guarded
    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows as a W&B table, columns in the order in which they first occur."""
        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(key) for key in columns] for row in rows]
        self.run.log({name: self.wandb.Table(columns=columns, data=data, allow_mixed_types=True)})

    @_guarded
    def summary(self, values: Mapping[str, Any]) -> None:
        self.run.summary.update({key: value for key, value in values.items() if value is not None})

    @_guarded
    def artifact(self, name: str, files: Sequence[Path]) -> None:
        """The files of the run folder that exist, as one artifact."""
        artifact = self.wandb.Artifact(name, type="results")
        for path in files:
            if path.is_file():
                artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    @_guarded
    def finish(self) -> list[str]:
        """Ends the run; the lines that say how to look at it and how to upload it."""
        folder = str(Path(self.run.dir).parent)
        url = self.run.url if self.settings.mode == "online" else ""
        self.run.finish()
        self.run = None
        if self.settings.mode == "online":
            return [f"W&B run    {url}"]
        shown = os.path.relpath(folder) if Path(folder).is_relative_to(Path.cwd()) else folder
        return [f"view it    wandb leet {shlex.quote(shown)}", f"sync it    wandb sync {shlex.quote(shown)}"]
