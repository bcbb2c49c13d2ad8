"""What a person reads while a sweep runs and when it has ended."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from jaxsim.metrics import Interval

WIDTH = 120  # columns where the output is no terminal
SHORT = {"max_num_seqs": "seqs", "max_num_batched_tokens": "tokens"}  # headings of columns
LATENCIES = {"queue_wait": "queue wait", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def console() -> Console:
    """Standard output, wide enough for the tables when it is a file or a pipe."""
    found = Console(highlight=False, soft_wrap=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


class Bar:
    """A progress bar with the estimated time left; the total may change on the way."""

    def __init__(self, progress: Progress, text: str):
        self.progress, self.task = progress, progress.add_task(text, total=None)
        self.completed = 0

    def advance(self) -> None:
        self.completed += 1
        self.progress.advance(self.task)

    def expect(self, remaining: int, text: str) -> None:
        """Sets how much is still to come and what is going on."""
        self.progress.update(self.task, total=self.completed + remaining, description=text)


@contextmanager
def progress(where: Console, text: str) -> Iterator[Bar]:
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} simulations")]
    with Progress(*columns, TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=where) as bar:
        yield Bar(bar, text)


def number(value: float | None) -> str:
    """Four significant digits without an exponent; "-" where there is no number."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}" if abs(value) >= 0.001 else f"{value:.2g}"


def interval(found: Interval | None) -> str:
    """Mean and half width of the 95 % interval."""
    if found is None or not math.isfinite(found.mean):
        return "-"
    if not math.isfinite(found.half_width):
        return number(found.mean)
    return (
        f"{number(found.mean)} ± {found.half_width:.2g}"
        if found.half_width < 100
        else (f"{number(found.mean)} ± {found.half_width:,.0f}")
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], chosen: int | None = None) -> Table:
    """Right-aligned columns, the last to the left for words; the chosen row stands out."""
    made = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == len(columns) - 1 else "right", overflow="fold")
    for index, row in enumerate(rows):
        made.add_row(*row, style="bold green" if index == chosen else None)
    return made


def latency_table(title: str, figures: Mapping[str, Interval], percentiles: Sequence[float]) -> Table:
    """Latencies in milliseconds: mean and percentiles, each with its interval over seeds."""
    names = ["mean", *(f"p{percentile:g}" for percentile in percentiles)]
    made = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    made.add_column("ms")
    for name in names:
        made.add_column(name, justify="right")
    for key, label in LATENCIES.items():
        made.add_row(label, *(interval(figures.get(f"{name}_{key}_ms")) for name in names))
    return made


def class_tables(figures: Mapping[str, Interval], percentiles: Sequence[float]) -> list[Table]:
    """A latency table per class of requests, whose figures are named as in mean_ttft_ms@chat; none without classes."""
    classes: dict[str, dict[str, Interval]] = {}
    for key, found in figures.items():
        name, _, label = key.partition("@")
        if label:
            classes.setdefault(label, {})[name] = found
    return [latency_table(f"Latencies of the class {label}", found, percentiles) for label, found in classes.items()]


def facts(pairs: Iterable[tuple[str, str]]) -> Table:
    """Names on the left, what is known on the right."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold")
    made.add_column(overflow="fold")
    for name, text in pairs:
        made.add_row(name, text)
    return made
