"""The command line: compose the settings, check them, run the named sweep."""

import os
import sys
from collections.abc import Mapping
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
from jaxsim.settings import show

BAD_INPUT, INTERRUPTED = 2, 130


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

    job = Job.of(settings, folder, terminal.console(), group)
    prepare(job.runtime)
    import_module(f"jaxsim.studies.{name}").run(job)


def main() -> None:
    """Runs `sys.argv`; exits with 0, with 2 after one line about bad input, with 130 when interrupted."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of being printed by Hydra
    codes: list[int] = []

    @hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
    def task(composed: DictConfig) -> None:
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
            codes.append(_refuse(explain(error, hydra_config.overrides.task)))

    parser = get_args_parser()
    parser.error = _bad_flag
    overrides: list[str] = []
    try:
        overrides = parser.parse_args().overrides
        task()
    except COMPOSITION_ERRORS as error:
        codes.append(_refuse(explain(error, overrides)))
    except ConfigError as error:
        codes.append(_refuse(error))
    except KeyboardInterrupt:
        codes.append(INTERRUPTED)
    sys.exit(max(codes, default=0))


def _refuse(error: ConfigError) -> int:
    print(" ".join(str(error).split()), file=sys.stderr)
    return BAD_INPUT


def _bad_flag(message: str) -> Any:
    raise ConfigError("flags", " ".join(sys.argv[1:]), f"{message}; --hydra-help lists them")


if __name__ == "__main__":
    main()
