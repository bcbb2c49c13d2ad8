"""Trace files: Azure LLM inference CSV, and JSONL of Mooncake, Qwen-Bailian or vLLM's `timed_trace`.

Every error is a ConfigError of `workload.path` that names the line and what was expected there; those about hash ids
are of `workload.hash_block_size`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from datetime import date
from itertools import chain
from pathlib import Path
from typing import NoReturn

import numpy as np

from jaxsim.errors import ConfigError
from jaxsim.workload.hash_ids import HashIds
from jaxsim.workload.lengths import LONGEST
from jaxsim.workload.priority import LARGEST, Priority
from jaxsim.workload.trace import TICKS_PER_S, TraceWorkload

TICKS_PER_UNIT = {"mooncake": TICKS_PER_S // 1000, "bailian": TICKS_PER_S, "timed_trace": TICKS_PER_S}
FORMATS = ("auto", "azure", *TICKS_PER_UNIT)
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
JSON_KEYS = ("timestamp", "input_length", "output_length")
_LONGEST_SPAN_S = 50 * 86400  # int64 picoseconds end at 106 days; half is left for stretching
_LATEST_TICK = 10**18  # the year 5138, counted from 1970: ticks stay in int64
_TIMESTAMP = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:\.(\d{1,7}))?(?:Z|([+-])(\d\d):(\d\d))?", re.ASCII
)

Row = tuple[int, int, int, int]  # line number, ticks, prompt tokens, output tokens


def read_trace(
    path: str | Path,
    format: str = "auto",
    limit: int | None = None,
    spread_s: float = 3.0,
    hash_block_size: int | None = None,
    priority: Priority | None = None,
    prefix_caching: bool = False,
) -> TraceWorkload:
    """Trace file as a workload, its first request at tick 0.

    format: "azure" (CSV with a header), "mooncake" (JSONL, times in ms), "bailian" (JSONL, seconds since the start, as
    its repository specifies) or "timed_trace" (JSONL, seconds, as `vllm bench serve` reads it without
    --timed-trace-sec-multiplier), or "auto": by the first line, where JSON with a chat_id is Bailian's and any other
    Mooncake's.
    limit: keep the first so many requests. spread_s: see `spread`; 0 leaves the times of JSONL as recorded.
    priority: how to draw priorities; None: the `priority` of each JSON object, 0 where there is none.
    hash_block_size: tokens of a hash id. Ids are read with `prefix_caching` only and then become token segments.
    """
    path = Path(path).expanduser()
    if format not in FORMATS:
        raise ConfigError("workload.format", format, "one of " + ", ".join(FORMATS))
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | np.integer) or limit < 1):
        raise ConfigError("workload.limit", limit, "a number of requests from 1, or null for all")
    if isinstance(spread_s, bool) or not isinstance(spread_s, int | float) or not 0 <= spread_s <= 3600:
        raise ConfigError("workload.spread_s", spread_s, "seconds from 0 to 3600")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = next((line for line in file if line.strip()), "")
            if not head:
                _fail(path, "the file is empty; expected at least one request")
            if format == "auto":
                format = "azure" if not head.lstrip().startswith("{") else "mooncake"
                format = "bailian" if format == "mooncake" and '"chat_id"' in head else format
            file.seek(0)
            ids = HashIds() if prefix_caching else None
            recorded: list[int] = []
            found = _azure_rows(path, file) if format == "azure" else _json_rows(path, file, format, ids, recorded)
            rows = _checked(path, found)
            table = np.fromiter(chain.from_iterable(rows), dtype=np.int64).reshape(-1, 3)
    except OSError as error:
        raise ConfigError("workload.path", path, f"a readable trace file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError("workload.path", path, "a text file in UTF-8") from None
    if not len(table):
        _fail(path, "no requests in the trace; expected at least one")
    ticks = table[:, 0]
    if format != "azure":
        ticks = spread(ticks, round(spread_s * TICKS_PER_S))
    ticks, prompt_len, output_len = (column[:limit] for column in (ticks - ticks[0], table[:, 1], table[:, 2]))
    segments = ids.segments(table[:, 1], hash_block_size) if ids is not None and format != "azure" else None
    segments = None if segments is None else segments[:limit]
    if priority is None:
        levels = np.array(recorded[:limit], np.int64) if any(recorded) else Priority()
    else:
        levels = priority
    return TraceWorkload(ticks, prompt_len.copy(), output_len.copy(), segments, str(path), levels)


def spread(ticks: np.ndarray, window: int) -> np.ndarray:
    """Times of a trace quantised to `window` ticks, spread inside their windows, int64 [N], in order.

    The k requests of one recorded time get k sorted uniform offsets below the window (or the next recorded time, if
    that comes sooner), which is what a Poisson process looks like given its counts; even spacing would hide bursts.
    The numbers come from a fixed seed: a file always gives the same times. A trace is taken as quantised if recorded
    times repeat and distinct ones are at least half a window apart; otherwise its times are returned as they are.
    """
    distinct, group, count = np.unique(ticks, return_inverse=True, return_counts=True)
    gaps = np.append(np.diff(distinct), window)
    if window == 0 or count.max() == 1 or gaps.min() < window / 2:
        return ticks
    offsets = np.random.Generator(np.random.PCG64(0)).random(len(ticks))
    offsets = offsets[np.lexsort((offsets, group))]
    return ticks + (offsets * np.minimum(gaps, window)[group]).astype(np.int64)


def _checked(path: Path, rows: Iterator[Row]) -> Iterator[tuple[int, int, int]]:
    """Rows without their line numbers, after the checks that both formats share."""
    first = last = last_line = None
    for line, ticks, prompt, output in rows:
        for name, tokens in (("prompt", prompt), ("output", output)):
            if not 1 <= tokens <= LONGEST:
                _fail(path, f"line {line}: {name} length {tokens}; expected tokens from 1 to {LONGEST}")
        if first is None or last is None:
            first = ticks
        elif ticks < last:
            _fail(path, f"line {line}: its time is before that of line {last_line}; expected times in order")
        elif ticks - first > _LONGEST_SPAN_S * TICKS_PER_S:
            days = _LONGEST_SPAN_S // 86400
            _fail(path, f"line {line}: {days} days after the first request; expected at most {days} days")
        last, last_line = ticks, line
        yield ticks, prompt, output


def _azure_rows(path: Path, file: Iterable[str]) -> Iterator[Row]:
    """Rows of a CSV whose header names the three Azure columns, in any order."""
    reader = csv.reader(file, strict=True)
    try:
        header = [name.strip() for name in next((row for row in reader if row), [])]
        if missing := [name for name in AZURE_COLUMNS if name not in header]:
            _fail(
                path,
                f"line {reader.line_num}: {', '.join(missing)} missing; expected a CSV header with "
                f"{','.join(AZURE_COLUMNS)} or JSON objects with {', '.join(JSON_KEYS)}",
            )
        columns = [header.index(name) for name in AZURE_COLUMNS]
        for row in reader:
            if not row:
                continue
            line = reader.line_num
            if len(row) != len(header):
                _fail(path, f"line {line}: {len(row)} fields {_excerpt(','.join(row))}; expected {len(header)}")
            time, *lengths = (row[column].strip() for column in columns)
            prompt, output = (_azure_tokens(path, line, *item) for item in zip(AZURE_COLUMNS[1:], lengths, strict=True))
            yield line, _azure_ticks(path, line, time), prompt, output
    except csv.Error as error:
        _fail(path, f"line {reader.line_num}: broken CSV ({error}); expected {','.join(AZURE_COLUMNS)}")


def _azure_tokens(path: Path, line: int, name: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
        _fail(path, f"line {line}: {name} {_excerpt(text)}; expected an integer from 1 to {LONGEST}")
    return int(text)


def _azure_ticks(path: Path, line: int, text: str) -> int:
    """Ticks since the year 1 of a time in text, without passing through floats."""
    if match := _TIMESTAMP.fullmatch(text):
        year, month, day, hour, minute, second, fraction, sign, off_hour, off_minute = match.groups()
        try:
            days = date(int(year), int(month), int(day)).toordinal()
        except ValueError:
            pass
        else:
            seconds = ((days * 24 + int(hour)) * 60 + int(minute)) * 60 + int(second)
            if sign:
                offset = (int(off_hour) * 60 + int(off_minute)) * 60
                seconds += -offset if sign == "+" else offset
            return seconds * TICKS_PER_S + int((fraction or "0").ljust(7, "0"))
    _fail(path, f"line {line}: TIMESTAMP {_excerpt(text)}; expected YYYY-MM-DD HH:MM:SS with up to 7 more digits")


def _json_rows(
    path: Path, file: Iterable[str], format: str, ids: HashIds | None, priorities: list[int]
) -> Iterator[Row]:
    """Rows of JSON objects, one a line: timestamp, lengths in tokens and, if asked for, hash ids into `ids`."""
    unit = TICKS_PER_UNIT[format]
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            _fail(path, f"line {line}: {_excerpt(text.strip())}; expected a JSON object with {', '.join(JSON_KEYS)}")
        if missing := [key for key in JSON_KEYS if key not in record]:
            _fail(path, f"line {line}: {', '.join(missing)} missing; expected {', '.join(JSON_KEYS)}")
        time, prompt, output = (record[key] for key in JSON_KEYS)
        for key in JSON_KEYS:
            # Milliseconds are whole numbers in every Mooncake trace: a fraction gives seconds away.
            whole = format == "mooncake" or key != "timestamp"
            if type(record[key]) is not int and (whole or type(record[key]) is not float):
                hint = "; format=timed_trace reads seconds" if key == "timestamp" and whole else ""
                kind = "an integer" if whole else "a number of seconds"
                _fail(path, f"line {line}: {key} {_excerpt(str(record[key]))}; expected {kind}{hint}")
        if not 0 <= time <= _LATEST_TICK / unit:  # a NaN is refused too
            name = "milliseconds" if format == "mooncake" else "seconds"
            _fail(path, f"line {line}: timestamp {time}; expected {name} from 0 to {_LATEST_TICK // unit}")
        if ids is not None:
            ids.add(line, _ids(path, line, record))
        priorities.append(record.get("priority", 0))
        if type(priorities[-1]) is not int or abs(priorities[-1]) > LARGEST:
            _fail(path, f"line {line}: priority {_excerpt(str(priorities[-1]))}; expected an integer")
        yield line, round(time * unit), prompt, output


def _ids(path: Path, line: int, record: dict) -> list[int | str] | None:
    """The record's hash ids, None if it has none."""
    found = record.get("hash_ids")
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(item) in (int, str) for item in found):
        _fail(path, f"line {line}: hash_ids {_excerpt(str(found))}; expected a list of integers or texts")
    return found


def _excerpt(text: str) -> str:
    """Start of `text`, quoted and without line breaks."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _fail(path: Path, problem: str) -> NoReturn:
    raise ConfigError("workload.path", path, problem)
