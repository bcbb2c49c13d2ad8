"""summary.json and candidates.csv in the run folder."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Indented JSON; NaN and infinity become null, which JSON has no number for."""
    _replace(path, json.dumps(plain(values), indent=2, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One row per mapping; columns in the order in which they first occur, empty cells for what a row lacks."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    draft = path.with_suffix(".part")
    with draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows({key: "" if value is None else value for key, value in plain(row).items()} for row in rows)
    draft.replace(path)


def plain(value: Any) -> Any:
    """The same in Python's own types: tuples and arrays as lists, numbers that are not finite as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _replace(path: Path, text: str) -> None:
    """Writes in one move, so that an interrupted command leaves the old file or the new one."""
    draft = path.with_suffix(".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
