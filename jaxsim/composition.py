"""Where the YAML files are, which presets exist, and what is wrong with an override that Hydra refuses."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jaxsim.errors import ConfigError
from jaxsim.settings import show, unknown_key

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException)


def conf_dir() -> Path:
    """The folder of the config groups: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"the config folder of jaxsim is missing beside or inside {package}")


def presets(group: str) -> list[str]:
    """Names that `group=NAME` accepts, sorted; empty if there is no such group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def sweeps() -> dict[str, str]:
    """Name and one line of description of every `+sweep=NAME`."""
    lines = {name: (conf_dir() / "sweep" / f"{name}.yaml").read_text().splitlines() for name in presets("sweep")}
    return {name: next(line[2:] for line in text if not line.startswith("# @")) for name, text in lines.items()}


def defaults(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The composed settings as plain dicts and lists, interpolations resolved."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = OmegaConf.to_container(compose("config", list(overrides)), resolve=True, throw_on_missing=True)
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}


def explain(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """The one line about overrides that Hydra refused with `error`."""
    try:
        for text in overrides:
            try:
                override = OverridesParser.create().parse_override(text)
            except HydraException:
                key, _, value = text.partition("=")
                return ConfigError(key, value, "cannot be read; must be key=value, lists as 'key=[1,2]' in quotes")
            for found in _faults(override, overrides):
                return found
    except COMPOSITION_ERRORS:
        pass
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ConfigError("overrides", " ".join(overrides), first)


def _faults(override: Override, overrides: Sequence[str]) -> Iterator[ConfigError]:
    key = override.get_key_element().lstrip("+~")
    value = override.value()
    choices = list(override.sweep_string_iterator()) if override.is_sweep_override() else [value]
    if key.startswith("hydra"):
        return
    if (conf_dir() / key).is_dir():
        for choice in choices:
            if str(choice) not in presets(key):
                yield ConfigError(key, show(choice), f"no such preset; must be one of {', '.join(presets(key))}")
        if key == "sweep" and not override.is_add():
            yield ConfigError(key, show(value), f"needs a plus: +sweep={show(value)}")
        if key != "sweep" and override.is_add():
            yield ConfigError(f"+{key}", show(value), f"must go without the plus: {key}={show(value)}")
        return
    groups = [text for text in overrides if (conf_dir() / text.partition("=")[0].lstrip("+")).is_dir()]
    node: Any = defaults([text for text in groups if "," not in text])
    for part in key.split("."):
        if not isinstance(node, Mapping):
            yield ConfigError(key, show(value), "no such key")
            return
        if part not in node:
            yield unknown_key(key, value, node)
            return
        node = node[part]
