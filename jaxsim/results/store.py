"""Finished simulations in one SQLite file: what has been simulated once is found again, by any later command.

Any number of processes may use one file at once. Rows are written as simulations end; a process that is killed loses
what was under way and no more. Where several machines see the same folder SQLite's write-ahead log, which lives in
shared memory, would not do; there rows wait for each other up to `PAUSE_S`, because every write is a slow one.
"""

import functools
import glob
import json
import sqlite3
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxsim.errors import ConfigError
from jaxsim.folders import cache_dir, is_network
from jaxsim.settings import StoreSettings, show

NAME = "simulations.sqlite"
APPLICATION = 0x6A786C73  # marks the file as one of these
LAYOUT = 1
BUSY_S = 60.0  # how long to wait for other processes
PAUSE_S = 1.0
MOST_BYTES = 2**31  # of the automatic store; the older half is dropped when it has grown to that
MANY = 500  # keys in one query
TABLE = """CREATE TABLE IF NOT EXISTS simulations (
    key BLOB NOT NULL UNIQUE, task TEXT NOT NULL, verdict TEXT NOT NULL, figures BLOB NOT NULL, made TEXT NOT NULL
)"""

Result = TypeVar("Result")


class Row(NamedTuple):
    """What is kept of a simulation; everything but the key is what JSON can hold, floats exactly."""

    key: bytes  # digest of all that determines the rest
    task: dict[str, Any]  # what was simulated, for people
    verdict: dict[str, Any]
    figures: dict[str, Any]


def _guarded(method: Callable[..., Result]) -> Callable[..., Result | None]:
    """The method, doing nothing once the file has failed: it is said in one line, and simulations go on unkept."""

    @functools.wraps(method)
    def guarded(self: "Store", *args: Any) -> Result | None:
        if self.failed:
            return None
        try:
            return method(self, *args)
        except sqlite3.Error as error:
            self.failed = True
            print(f"warning: simulations are not kept from here on: {self.path}: {error}", file=sys.stderr)
            return None

    return guarded


class Store:
    """An open file. Raises `sqlite3.Error` or `OSError` where it cannot be one, or cannot be written."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.failed = path, False
        self.shared = is_network(path.parent)
        self.waiting: list[Row] = []
        self.written = time.monotonic()
        self.file = _connect(path)
        try:
            self._prepare()
        except BaseException:
            self.file.close()
            raise

    def _prepare(self) -> None:
        with _transaction(self.file):  # another process may be about to do the same
            mark = self.file.execute("PRAGMA application_id").fetchone()[0]
            layout = self.file.execute("PRAGMA user_version").fetchone()[0]
            if mark != APPLICATION and self.file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError("holds something else")
            if mark == APPLICATION and layout != LAYOUT:
                raise sqlite3.DatabaseError("was written by another version")
            self.file.execute(TABLE)
            self.file.execute(f"PRAGMA application_id={APPLICATION}")
            self.file.execute(f"PRAGMA user_version={LAYOUT}")
        _patiently(lambda: self.file.execute(f"PRAGMA journal_mode={'TRUNCATE' if self.shared else 'WAL'}"))
        self.file.execute("PRAGMA synchronous=NORMAL")

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows that are there, by key."""
        return self._find(keys) or {}

    @_guarded
    def _find(self, keys: Sequence[bytes]) -> dict[bytes, Row]:
        found = {}
        for start in range(0, len(keys), MANY):
            some = keys[start : start + MANY]
            query = f"SELECT key, task, verdict, figures FROM simulations WHERE key IN ({','.join('?' * len(some))})"
            found |= {values[0]: _row(*values) for values in self.file.execute(query, some)}
        return found

    def add(self, row: Row) -> None:
        """Keeps a row, at once or, where writing is slow, with the next ones."""
        self.waiting.append(row)
        if not self.shared or time.monotonic() - self.written > PAUSE_S:
            self.flush()

    def flush(self) -> None:
        """Writes what waits."""
        waiting, self.waiting = self.waiting, []
        if waiting:
            self._write(waiting)
            self.written = time.monotonic()

    @_guarded
    def _write(self, rows: Sequence[Row]) -> None:
        made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        values = [
            (row.key, _json(row.task), _json(row.verdict), zlib.compress(_json(row.figures).encode(), 1), made)
            for row in rows
        ]
        with _transaction(self.file):
            self.file.executemany("INSERT OR IGNORE INTO simulations VALUES (?, ?, ?, ?, ?)", values)

    def merge(self, path: Path) -> int:
        """Takes over the rows of another store that are missing here; how many. Raises `sqlite3.Error`."""
        with closing(_connect(path, "ro")) as other:
            if other.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
                raise sqlite3.DatabaseError("is no store of simulations")
            before = self.file.total_changes
            with _transaction(self.file):
                rows = other.execute("SELECT key, task, verdict, figures, made FROM simulations")
                self.file.executemany("INSERT OR IGNORE INTO simulations VALUES (?, ?, ?, ?, ?)", rows)
            return self.file.total_changes - before

    def bound(self, most_bytes: int = MOST_BYTES) -> None:
        """Drops the older half of the rows where they take more than that; their room is used again."""
        pages, free, size = (
            self.file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        if (pages - free) * size > most_bytes:
            self.file.execute(
                "DELETE FROM simulations WHERE rowid <= (SELECT (min(rowid) + max(rowid)) / 2 FROM simulations)"
            )

    def rows(self) -> Iterator[tuple[Row, str]]:
        """All rows and when each was made, in UTC, the oldest first. Raises `sqlite3.Error`."""
        for *values, made in self.file.execute("SELECT key, task, verdict, figures, made FROM simulations"):
            yield _row(*values), made

    def close(self) -> None:
        self.flush()
        self.file.close()


def open_store(settings: StoreSettings) -> Store | None:
    """The store that the settings name, what they merge included; None if there is to be none.

    Raises `ConfigError` for a path that cannot be used. The automatic store is no reason to stop: without it, in one
    line of warning, nothing is kept.
    """
    if settings.path is None:
        if settings.merge:
            raise ConfigError("store.merge", show(settings.merge), "must be null when store.path=null")
        return None
    auto, store = settings.path == "auto", None
    try:
        path = cache_dir() / NAME if auto else Path(settings.path)
        store = Store(path)
        if auto:
            store.bound()
    except (OSError, RuntimeError, ValueError, sqlite3.Error) as error:
        why = getattr(error, "strerror", None) or str(error)
        if store is not None:
            store.close()
        if not auto:
            raise ConfigError("store.path", settings.path, f"must be a store that can be written ({why})") from None
        print(f"warning: simulations are not kept: {why}; store.path=FILE keeps them there", file=sys.stderr)
        return None
    for other in _expanded(settings.merge or ()):
        try:
            store.merge(Path(other))
        except (OSError, sqlite3.Error) as error:
            store.close()
            raise ConfigError("store.merge", other, f"must be a store of simulations ({error})") from None
    return store


def _expanded(patterns: Iterable[str]) -> Iterator[str]:
    """Paths that the patterns match; a pattern that matches none stands for itself, to be reported as missing."""
    for pattern in patterns:
        yield from sorted(glob.glob(pattern)) or [pattern]


def _connect(path: Path, mode: str = "rwc") -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, timeout=BUSY_S, isolation_level=None, uri=True)


def _patiently(action: Callable[[], object]) -> None:
    """The action, again while another process is in the way: SQLite may not wait for a change of journal by itself."""
    end = time.monotonic() + BUSY_S
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.02)


class _transaction:
    """All or nothing; the lock on writing is taken at the start, so that waiting for it is SQLite's own."""

    def __init__(self, file: sqlite3.Connection):
        self.file = file

    def __enter__(self) -> None:
        self.file.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.file.execute("COMMIT")
        elif self.file.in_transaction:  # a full disk has ended it already
            self.file.execute("ROLLBACK")


def _row(key: bytes, task: str, verdict: str, figures: bytes) -> Row:
    return Row(key, json.loads(task), json.loads(verdict), json.loads(zlib.decompress(figures)))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=lambda number: number.item())  # NumPy's numbers
