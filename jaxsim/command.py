"""The command line: compose the settings, check them, run the named sweep."""

import argparse
import os
import sys
from collections.abc import Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from jaxsim.composition import COMPOSITION_ERRORS, conf_dir, explain, presets, sweeps
from jaxsim.errors import ConfigError
from jaxsim.results.files import unwritable
from jaxsim.settings import show

BAD_INPUT = 2


class Refused(Exception):
    """Bad input that has been reported already."""


def run(settings: Mapping[str, Any], folder: Path, group: str | None = None) -> None:
    """Checks composed settings and runs the sweep they name. Raises `ConfigError`."""
    name = settings.get("sweep")
    if name is None:
        lines = [f"  +sweep={name:<22}{text}" for name, text in sweeps().items()]
        print("\n".join(["name a sweep:", *lines]), file=sys.stderr)
        raise Refused
    if name not in presets("sweep"):
        raise ConfigError("sweep", show(name), f"no such preset; must be one of {', '.join(presets('sweep'))}")
    # JAX takes a second to import: mistakes above are told before that.
    from jaxsim.results import terminal
    from jaxsim.runtime import prepare
    from jaxsim.studies.job import Job

    with closing(Job.of(settings, folder, terminal.console(), group)) as job:
        prepare(job.runtime)
        import_module(f"jaxsim.studies.{name}").run(job)


def command() -> int:
    """Runs `sys.argv`; the exit code is 0, or 2 after one line about bad input."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of being printed by Hydra
    codes: list[int] = []
    here = os.getpid()
    running = False  # a sweep, not Hydra

    @hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
    def task(composed: DictConfig) -> None:
        nonlocal running
        running = True
        hydra_config = HydraConfig.get()
        multirun = hydra_config.mode == RunMode.MULTIRUN
        try:
            settings: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
            run(settings, Path(hydra_config.runtime.output_dir), hydra_config.sweep.dir if multirun else None)
        except Refused:
            codes.append(BAD_INPUT)
        except ConfigError as error:  # of one job: the others of a --multirun go on
            codes.append(_refuse(error))
        except COMPOSITION_ERRORS as error:
            overrides: Any = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
            codes.append(_refuse(explain(error, overrides)))
        running = False
        if codes and os.getpid() != here:  # a launcher's: it hands on what was raised, after the other jobs
            raise Refused

    parser = get_args_parser()
    parser.error = _bad_flag
    flags = argparse.Namespace(overrides=[], multirun=False)
    try:
        flags = parser.parse_args()
        task()
    except Refused:
        codes.append(BAD_INPUT)
    except ConfigError as error:
        codes.append(_refuse(error))
    except (*COMPOSITION_ERRORS, ValueError) as error:
        if running:
            raise
        codes.append(_refuse(explain(error, flags.overrides)))
    except OSError as error:
        if running or isinstance(error, BrokenPipeError):
            raise
        codes.append(_refuse(_unwritable(error, flags)))
    return max(codes, default=0)


def _unwritable(error: OSError, flags: argparse.Namespace) -> ConfigError:
    """Hydra could not write into the run folder."""
    key = "hydra.sweep.dir" if flags.multirun else "hydra.run.dir"
    given = [text.partition("=")[2] for text in flags.overrides if text.startswith(f"{key}=")]
    return unwritable(key, given[-1] if given else error.filename, error)


def _refuse(error: ConfigError) -> int:
    print(" ".join(str(error).split()), file=sys.stderr)
    return BAD_INPUT


def _bad_flag(message: str) -> Any:
    raise ConfigError("flags", " ".join(sys.argv[1:]), f"{message}; --hydra-help lists them")
