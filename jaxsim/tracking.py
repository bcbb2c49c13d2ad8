"""Weights & Biases, offline unless asked otherwise. The only module that imports wandb.

A failure in here never stops a job: it is said once, in one line, and the run goes on. Where the server cannot be
reached the run is kept offline; what could not be uploaded in time stays on disk. Both can be uploaded later.
"""

import functools
import logging
import netrc
import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from jaxsim.settings import TrackingSettings

Result = TypeVar("Result")
QUIET = {"silent": True, "console": "off", "disable_git": True, "disable_code": True, "x_disable_stats": True}
# Seconds that a sweep waits for the server, when it starts and when it ends. Releases differ in what they know.
PATIENCE = {"init_timeout": 15, "login_timeout": 10, "finish_timeout": 60, "finish_timeout_raises": True}


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
    """One W&B run, or none. It starts beside the job, which waits for it where something is to be logged.

    The same `run_id` continues the same run; steps that it has already are not logged twice.
    """

    def __init__(
        self,
        settings: TrackingSettings,
        config: Mapping[str, Any],
        folder: Path,
        *,
        name: str,
        job_type: str,
        group: str | None = None,
        run_id: str | None = None,
    ):
        self._run: Any = None
        self._starting: threading.Thread | None = None
        self._online = False
        if settings.mode == "disabled":
            return
        more: dict[str, Any] = {"group": settings.group or group, "name": name, "job_type": job_type}
        if run_id is not None and "WANDB_RUN_ID" not in os.environ:  # a W&B agent names the runs of its sweep
            more |= {"id": run_id, "resume": "allow"}
        more |= {"project": settings.project, "dir": str(folder), "config": dict(config)}
        self._starting = threading.Thread(target=self._start, args=(settings.mode, more))
        self._starting.start()

    @property
    def run(self) -> Any:
        """W&B's run, once it has started; None if there is none."""
        if self._starting is not None:
            self._starting.join()
        return self._run

    @property
    def online(self) -> bool:
        """Whether a server has taken the run on."""
        return self.run is not None and self._online

    def _start(self, mode: str, more: Mapping[str, Any]) -> None:
        try:
            logging.getLogger("wandb").setLevel(logging.ERROR)
            import wandb

            self.wandb = wandb
            self._reach(mode, more)
        except Exception as error:  # no space, no package: the simulation does not depend on any of it
            self.fail(error)

    def _reach(self, mode: str, more: Mapping[str, Any]) -> None:
        if mode == "online" or mode == "auto" and logged_in():
            try:
                if not logged_in():
                    raise RuntimeError("no API key; log in with `wandb login`")
                self._run = self._init("online", more)
                self._online = True
                return
            except Exception as error:  # no network, a wrong key
                print(f"warning: W&B stays offline: {_line(error)}", file=sys.stderr)
                self.wandb.teardown()  # what is left of the attempt
        self._run = self._init("offline", more)

    def _init(self, mode: Any, more: Mapping[str, Any]) -> Any:
        self.wandb.setup(self.wandb.Settings(**QUIET))
        patience = PATIENCE if mode == "online" else {}
        known = {key: value for key, value in patience.items() if key in self.wandb.Settings.model_fields}
        return self.wandb.init(mode=mode, settings=self.wandb.Settings(**QUIET, **known), **more)

    def fail(self, error: Exception) -> None:
        run, self._run = self._run, None
        print(f"warning: W&B tracking is off from here on: {_line(error)}", file=sys.stderr)
        if run is not None:
            try:
                run.finish(exit_code=1, quiet=True)
            except Exception:
                pass

    @_guarded
    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """One line of the history."""
        self.run.log({key: value for key, value in values.items() if value is not None}, step=step)

    @_guarded
    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows as a W&B table, columns in the order in which they first occur."""
        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        data = [[row.get(key) for key in columns] for row in rows]
        self.run.log({name: self.wandb.Table(columns=columns, data=data, allow_mixed_types=True)})

    @_guarded
    def picture(self, name: str, svg: str) -> None:
        """A drawing, as a panel of its own."""
        self.run.log({name: self.wandb.Html(svg, inject=False)})

    @_guarded
    def curves(self, name: str, title: str, x: str, xs: Sequence[float], ys: Mapping[str, Sequence[float]]) -> None:
        """Lines over common `xs`, one per key of `ys`."""
        chart = self.wandb.plot.line_series(list(xs), [list(y) for y in ys.values()], list(ys), title, x)
        self.run.log({name: chart})

    @_guarded
    def summary(self, values: Mapping[str, Any]) -> None:
        self.run.summary.update({key: value for key, value in values.items() if value is not None})

    @_guarded
    def artifact(self, name: str, files: Sequence[Path]) -> None:
        """Those of the files that exist, as one artifact."""
        artifact = self.wandb.Artifact(name, type="results")
        for path in files:
            if path.is_file():
                artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    @_guarded
    def finish(self) -> list[str]:
        """Ends the run; the lines that say how to look at it and how to upload it."""
        folder = Path(self.run.dir).parent
        shown = shlex.quote(os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder))
        sync = f"sync it    wandb sync {shown}"
        online, run, self._run = self.online, self._run, None
        if not online:
            run.finish()
            return [f"view it    wandb leet {shown}", sync]
        url = run.url
        try:
            run.finish()
        except TimeoutError:
            print("warning: W&B did not take all of the run in time; it is on disk", file=sys.stderr)
            return [f"W&B run    {url}", sync]
        return [f"W&B run    {url}"]


def logged_in() -> bool:
    """Whether there is an API key for the server, from where wandb takes it; nobody is asked."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    settings = wandb.Settings()
    if settings.api_key:
        return True
    url = os.environ.get("WANDB_BASE_URL")
    hosts = [urlsplit(url or settings.base_url).netloc, *([] if url else ["api.wandb.ai"])]  # the last is its old name
    for path in [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]:
        try:
            if path and any(map(netrc.netrc(os.path.expanduser(path)).authenticators, hosts)):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
