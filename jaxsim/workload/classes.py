"""Classes of requests in one workload, each with lengths (and a priority) of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from jaxsim.errors import ConfigError
from jaxsim.workload.lengths import Length

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class RequestClass:
    """`share` of the requests in proportion to the other classes'; what is None is as in the workload."""

    name: str
    share: float = 1.0
    prompt: Length | None = None
    output: Length | None = None
    priority: int | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError("classes", self.name, "names of letters, digits, - and _, a letter first")
        number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        if not number or not 0 < self.share < np.inf:
            raise ConfigError(f"classes.{self.name}.share", self.share, "a finite number above 0")
        if self.priority is not None and type(self.priority) is not int:
            raise ConfigError(f"classes.{self.name}.priority", self.priority, "an integer, or null")


def chosen(classes: tuple[RequestClass, ...], uniform: np.ndarray) -> np.ndarray:
    """Places of the classes of requests, int64 [N], from uniform numbers [N] in [0, 1)."""
    shares = np.array([each.share for each in classes], np.float64)
    return np.minimum(np.searchsorted(np.cumsum(shares) / shares.sum(), uniform, side="right"), len(classes) - 1)


def by_class(places: np.ndarray, values: list[np.ndarray]) -> np.ndarray:
    """For each request the value of its class; places [N], values one array [N] per class."""
    return np.stack(values)[places, np.arange(len(places))]
