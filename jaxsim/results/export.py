"""The store as a table for other tools: `python -m jaxsim.results.export simulations.csv`, or `.parquet`."""

import argparse
import csv
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from jaxsim.errors import ConfigError
from jaxsim.folders import cache_dir
from jaxsim.results.store import NAME, Store

FORMATS = (".csv", ".parquet")


def export(store: Store, path: Path) -> int:
    """Writes a row per simulation, what was asked for first; how many. Raises `ConfigError`, `OSError`."""
    if path.suffix not in FORMATS:
        raise ConfigError("FILE", path, f"must end in {' or '.join(FORMATS)}")
    write = _csv if path.suffix == ".csv" else _parquet
    columns = list(dict.fromkeys(key for row in _rows(store) for key in row))
    draft = path.with_suffix(f"{path.suffix}.part")
    count = write(store, draft, columns)
    draft.replace(path)
    return count


def _rows(store: Store) -> Iterator[dict[str, Any]]:
    for row, made in store.rows():
        yield row.task | row.verdict | row.figures | {"made": made}


def _csv(store: Store, path: Path, columns: Sequence[str]) -> int:
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for count, row in enumerate(_rows(store), 1):  # noqa: B007, the last number counts
            writer.writerow(row)
    return count


def _parquet(store: Store, path: Path, columns: Sequence[str]) -> int:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("FILE", path.stem, "needs pyarrow: pip install 'jaxsim[parquet]', or name a .csv") from None
    values: dict[str, list[Any]] = {column: [] for column in columns}
    for row in _rows(store):
        for column in columns:
            values[column].append(row.get(column))
    pyarrow.parquet.write_table(pyarrow.table(values), path)
    return len(values["made"]) if columns else 0


def main(words: Sequence[str] | None = None) -> int:
    """The command; the exit code is 0, or 2 after one line about what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m jaxsim.results.export", description=__doc__)
    parser.add_argument("file", metavar="FILE", type=Path, help="to write: .csv or .parquet")
    parser.add_argument("--store", type=Path, help=f"to read; the default is {NAME} in the user's cache folder")
    asked = parser.parse_args(words)
    path = asked.store
    try:
        path = path or cache_dir() / NAME
        if not path.is_file():
            raise ConfigError("--store", path, "no such file")
        try:
            store = Store(path)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError("--store", path, f"must be a store that can be written ({error})") from None
        with closing(store):
            count = export(store, asked.file)
    except OSError as error:
        print(f"FILE={asked.file}: {error.strerror or error}", file=sys.stderr)
        return 2
    except (ConfigError, RuntimeError, sqlite3.Error) as error:  # no home folder, a store that broke
        print(error, file=sys.stderr)
        return 2
    print(f"{count:,} simulations in {asked.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
