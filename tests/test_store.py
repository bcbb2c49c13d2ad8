"""Finished simulations are kept, found again, and survive whatever happens to the process or the file."""

import csv
import dataclasses
import inspect
import json
import math
import multiprocessing
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxsim.engine import CostTable, EngineConfig, Requests
from jaxsim.errors import ConfigError
from jaxsim.folders import cache_dir, is_network
from jaxsim.results import export, store
from jaxsim.results.store import NAME, Row, Store, open_store
from jaxsim.settings import SearchSettings, SloSettings, StoreSettings
from jaxsim.tuning import stored
from jaxsim.tuning.evaluate import Outcome, Simulator, Task
from jaxsim.tuning.load import Verdict
from jaxsim.tuning.replicates import Replicates
from jaxsim.tuning.space import Candidate, FixedCost
from jaxsim.tuning.stored import Keys, StoredEvaluate

FIGURES = {"third": 1 / 3, "tiny": 5e-324, "none": None, "count": 2**60, "endless": math.inf}


def row(number: int, **figures) -> Row:
    return Row(number.to_bytes(16, "big"), {"seed": number}, {"passed": True, "reason": ""}, FIGURES | figures)


def count(path: Path) -> int:
    file = sqlite3.connect(path)
    try:
        return file.execute("SELECT count(*) FROM simulations").fetchone()[0]
    finally:
        file.close()


@pytest.fixture
def kept(tmp_path):
    made = Store(tmp_path / "kept.sqlite")
    yield made
    made.file.close()


def test_rows_come_back_as_they_were(kept):
    kept.add(row(1, array=np.float64(0.1), integer=np.int32(7), nan=math.nan))
    found = kept.find([row(1).key, row(2).key])
    assert list(found) == [row(1).key]
    figures = found[row(1).key].figures
    assert math.isnan(figures.pop("nan"))
    assert figures == FIGURES | {"array": 0.1, "integer": 7}
    assert {key: type(value) for key, value in figures.items()} == {
        **{key: type(value) for key, value in FIGURES.items()},
        "array": float,
        "integer": int,
    }


def test_a_row_is_in_the_file_as_soon_as_it_is_added(kept):
    for number in range(3):
        kept.add(row(number))
        assert count(kept.path) == number + 1


def test_many_keys_are_looked_up(kept):
    kept._write([row(number) for number in range(0, 3000, 2)])
    assert set(kept.find([row(number).key for number in range(3000)])) == {row(n).key for n in range(0, 3000, 2)}


def test_where_writing_is_slow_rows_wait_for_each_other(kept, monkeypatch):
    kept.shared = True
    clock = [kept.written]
    monkeypatch.setattr(store.time, "monotonic", lambda: clock[0])
    kept.add(row(1))
    assert count(kept.path) == 0
    clock[0] += 2 * store.PAUSE_S
    kept.add(row(2))
    assert count(kept.path) == 2
    kept.add(row(3))
    kept.flush()
    assert count(kept.path) == 3


def test_network_folders_are_told_by_their_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nhost:/h /home nfs4 rw 0 0\n/dev/b /home/me/disk xfs rw 0 0\n")
    assert is_network(Path("/home/me/.cache"), mounts)
    assert not is_network(Path("/home/me/disk/x"), mounts)
    assert not is_network(Path("/var"), mounts) and not is_network(Path("/homely"), mounts)
    assert not is_network(Path("/home"), tmp_path / "missing")


def test_a_full_disk_is_one_line_and_keeps_what_is_there(kept, capfd):
    kept.add(row(1))
    kept.file.execute(f"PRAGMA max_page_count={kept.file.execute('PRAGMA page_count').fetchone()[0]}")
    noise = np.random.default_rng(0).random(3000).tolist()
    for number in range(2, 6):
        kept.add(row(number, noise=noise))
    err = capfd.readouterr().err
    assert err == f"warning: simulations are not kept from here on: {kept.path}: database or disk is full\n"
    assert count(kept.path) == 1
    with closing(Store(kept.path).file) as file:
        assert file.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_the_automatic_store_is_bounded(kept):
    for number in range(400):
        kept.add(row(number, text=str(np.random.default_rng(number).random(20))))
    kept.bound(2**30)
    assert count(kept.path) == 400
    kept.bound(2**16)
    assert count(kept.path) == 200
    assert not kept.find([row(0).key, row(199).key]) and len(kept.find([row(200).key, row(399).key])) == 2


def test_stores_are_merged(tmp_path):
    for name, numbers in (("a", range(5)), ("b", range(3, 9))):
        part = Store(tmp_path / f"part_{name}.sqlite")
        part._write([row(number) for number in numbers])
        part.close()
    settings = StoreSettings(str(tmp_path / "all.sqlite"), (str(tmp_path / "part_*.sqlite"),))
    whole = open_store(settings)
    assert whole is not None and count(whole.path) == 9
    assert whole.find([row(8).key])[row(8).key].figures == FIGURES
    whole.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "unable to open database file"),
        (b"", "is no store of simulations"),
        (b"no database at all " * 99, "file is not a database"),
    ],
)
def test_what_cannot_be_merged_is_named(tmp_path, text, expected):
    other = tmp_path / "other.sqlite"
    if text is not None:
        other.write_bytes(text)
    with pytest.raises(ConfigError, match=f"^store.merge={other}: must be a store of simulations .{expected}"):
        open_store(StoreSettings(str(tmp_path / "own.sqlite"), (str(other),)))
    with pytest.raises(ConfigError, match="^store.merge=.*: must be null when store.path=null"):
        open_store(StoreSettings(None, (str(other),)))


def spoil(path: Path, how: str) -> str:
    """Makes a file that is no store; the reason that is to be given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if how == "folder":
        path.mkdir()
        return "unable to open database file"
    if how == "garbage":
        path.write_bytes(b"garbage" * 1000)
        return "file is not a database"
    with closing(sqlite3.connect(path)) as file, file:
        if how == "foreign":
            file.execute("CREATE TABLE addresses (name TEXT)")
            return "holds something else"
        file.execute(f"PRAGMA application_id={store.APPLICATION}")
        file.execute("PRAGMA user_version=999")
    return "was written by another version"


def test_a_job_that_is_refused_closes_its_store(run, tmp_path, monkeypatch):
    closed, close = [], store.Store.close
    monkeypatch.setattr(store.Store, "close", lambda self: (closed.append(self.path), close(self)))
    code, _, err = run("+sweep=slo_search", "launcher.shard=9/8", "store.path=kept.sqlite")
    assert code == 2 and err.startswith("launcher.shard=9/8: ")
    assert closed == [Path("kept.sqlite")]


@pytest.mark.parametrize("how", ["folder", "garbage", "foreign", "other version"])
def test_a_file_that_is_no_store(tmp_path, capfd, how):
    """A path that was asked for is bad input; the automatic one is a line of warning."""
    path = tmp_path / "file.sqlite"
    reason = spoil(path, how)
    with pytest.raises(ConfigError, match=f"^store.path={path}: must be a store that can be written .{reason}.$"):
        open_store(StoreSettings(str(path)))
    reason = spoil(cache_dir() / NAME, how)
    assert open_store(StoreSettings()) is None
    assert capfd.readouterr().err == f"warning: simulations are not kept: {reason}; store.path=FILE keeps them there\n"


def test_a_file_that_is_broken_on_the_way_stops_nothing(kept, capfd):
    for number in range(200):
        kept.add(row(number, noise=np.random.default_rng(number).random(99).tolist()))
    kept.file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    kept.file.close()
    with kept.path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096 * 40)
    again = Store(kept.path)
    assert again.find([row(number).key for number in range(200)]) == {}
    again.add(row(200))
    assert capfd.readouterr().err.count("\n") == 1
    again.file.close()


def test_no_store_is_asked_for(tmp_path):
    assert open_store(StoreSettings(None)) is None
    assert not (cache_dir() / NAME).exists()


WRITER = """
import sys
from pathlib import Path
from test_store import row
from jaxsim.results.store import Store
kept = Store(Path(sys.argv[1]))
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    kept.add(row(number))
    assert row(number).key in kept.find([row(number).key])
kept.close()
assert not kept.failed
"""


def test_processes_share_a_file(tmp_path):
    """Four at once, opening it for the first time in the same moment, with rows in common."""
    path = tmp_path / "shared.sqlite"
    words = [sys.executable, "-c", WRITER, str(path)]
    paths = {"PYTHONPATH": ":".join([str(Path(__file__).parent), str(Path(store.__file__).parents[2])])}
    writers = [
        subprocess.Popen([*words, str(50 * k), str(50 * k + 100)], stderr=subprocess.PIPE, text=True, env=paths)
        for k in range(4)
    ]
    assert [(writer.communicate()[1], writer.returncode) for writer in writers] == [("", 0)] * 4
    assert count(path) == 250


FILES = 20


def open_each(folder: Path, barrier: Any, said: Any) -> None:
    for number in range(FILES):
        barrier.wait()
        try:
            Store(folder / f"{number}.sqlite").close()
            said.put("")
        except sqlite3.Error as error:
            said.put(str(error))


def test_processes_make_a_file_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, said = context.Barrier(6), context.Queue()
    openers = [context.Process(target=open_each, args=(tmp_path, barrier, said)) for _ in range(6)]
    for opener in openers:
        opener.start()
    assert {said.get(timeout=60) for _ in range(6 * FILES)} == {""}
    for opener in openers:
        opener.join()


# Keys


def replicates(arrival=(0.0, 1.0, 2.5), **fields) -> Replicates:
    values = {"prompt_len": np.array([5, 6, 7]), "output_len": np.array([1, 2, 3])} | fields
    return Replicates([Requests(np.array(arrival), **values)], [0.8], [0])


def candidate(table: CostTable | None = None, **engine: Any) -> Candidate:
    values = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "num_gpu_blocks": 9, "max_model_len": 20} | dict(engine)
    table = table or CostTable(step_ps=5, linear_ps=np.arange(9), decode_base_ps=np.arange(3))
    return Candidate({"max_num_seqs": 2}, EngineConfig(**values), None, cost=FixedCost(table))  # pyright: ignore


def key(task=None, slo=None, search=None, requests=None, **changes) -> bytes:
    task = task or Task(candidate(), 0, load_rps=0.5)._replace(**changes)
    return Keys(requests or replicates(), slo or SloSettings(), search or SearchSettings())(task)


def test_everything_that_determines_an_outcome_is_in_its_key():
    segments = {"segments": [[("a", 0, 5)], [], []]}
    tables = [
        CostTable(step_ps=6, linear_ps=np.arange(9), decode_base_ps=np.arange(3)),
        CostTable(step_ps=5, linear_ps=np.arange(9) ** 2, decode_base_ps=np.arange(3)),
        CostTable(step_ps=5, linear_ps=np.arange(9), decode_ctx_table_ps=np.arange(3)),
    ]
    keys = [
        key(),
        key(load_rps=0.25),
        key(load_rps=None, clients=2),
        key(load_rps=None, clients=3),
        *(key(candidate=candidate(table)) for table in tables),
        key(candidate=candidate(max_num_seqs=3)),
        key(candidate=candidate(num_gpu_blocks=3)),
        key(candidate=candidate(block_size=3)),
        key(slo=SloSettings(ttft_ms=100.0)),
        key(slo=SloSettings(percentile=95.0)),
        key(search=SearchSettings(warmup=0.2)),
        key(search=SearchSettings(think_time_s=1.0)),
        key(requests=replicates((0.0, 1.0, 2.0))),
        key(requests=replicates(output_len=np.array([1, 2, 4]))),
        key(requests=replicates(priority=np.array([0, 0, 1]))),
        key(requests=replicates(**segments)),
        key(requests=replicates(**segments, output_stream=["x", "y", "z"])),
    ]
    assert len(set(keys)) == len(keys)


def test_nothing_else_is_in_a_key():
    longer = CostTable(step_ps=5, linear_ps=np.arange(99), decode_base_ps=np.arange(99))
    same = [
        key(candidate=candidate(longer)),
        key(slo=SloSettings(target_rps=3.0)),
        key(search=SearchSettings(seeds=3, step=0.1, max_num_seqs=(4,))),
        key(requests=replicates(prompt_len=np.array([5, 6, 7], np.int32))),
        key(requests=dataclasses.replace(replicates(), rates_rps=[1.6]), load_rps=1.0),  # the same stretch
    ]
    assert set(same) == {key()}
    # A static batch is bounded by no budget.
    assert key(candidate=candidate(longer, batching="static")) != key(candidate=candidate(batching="static"))


def test_every_setting_of_the_search_that_a_simulation_uses_is_in_the_key():
    source = inspect.getsource(Simulator)
    assert set(re.findall(r"self\.search\.(\w+)", source)) == set(stored.SEARCH_KEYS)
    assert not re.findall(r"self\.search\b(?!\.)", source)


def test_the_sources_are_in_the_key(monkeypatch):
    before = key()
    monkeypatch.setattr(stored, "sources", lambda: b"other")
    assert key() != before
    package = Path(stored.__file__).parents[1]
    assert all((package / name).exists() for name in stored.SOURCES)


# The wrapper


class Counting:
    """Stands for the simulator: outcomes that tell tasks apart, and which tasks it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, tasks, on_done=None):
        outcomes = []
        for place, task in enumerate(tasks):
            self.asked.append(task)
            outcome = Outcome(Verdict(task.seed > 0, f"load {task.load_rps}"), {"rate": task.load_rps / 3})
            outcomes.append(outcome)
            if on_done is not None:
                on_done(place, outcome)
        return outcomes


def test_only_what_is_missing_is_carried_out(kept):
    made, inner = candidate(), Counting()
    tasks = [Task(made, 0, load_rps=rate) for rate in (1.0, 2.0, 3.0, 4.0)]
    wrapper = StoredEvaluate(inner, kept, Keys(replicates(), SloSettings(), SearchSettings()), {"model": "m"})
    some = wrapper([tasks[1], tasks[3]])
    done = []
    outcomes = wrapper(tasks, lambda index, outcome: done.append((index, outcome)))
    assert [task.load_rps for task in inner.asked] == [2.0, 4.0, 1.0, 3.0]
    assert [outcome[:2] for outcome in outcomes] == [outcome[:2] for outcome in Counting()(tasks)]
    assert [outcome.computed for outcome in outcomes] == [True, False, True, False]
    assert [outcome.computed for outcome in some] == [True, True]
    assert sorted(done, key=lambda item: item[0]) == list(enumerate(outcomes))
    assert all(type(outcome.verdict) is Verdict for outcome in outcomes)
    assert (wrapper.found, wrapper.made) == (2, 4)
    (asked,) = {tuple(row.task) for row, _ in kept.rows()}
    assert asked == ("model", "max_num_seqs", "seed", "load_rps", "clients", "num_requests")


def test_what_ended_before_an_interrupt_is_kept(kept):
    class Interrupted(Counting):
        def __call__(self, tasks, on_done=None):
            super().__call__(tasks[:2], on_done)
            raise KeyboardInterrupt

    kept.shared = True  # rows wait
    tasks = [Task(candidate(), 0, load_rps=rate) for rate in (1.0, 2.0, 3.0)]
    keys = Keys(replicates(), SloSettings(), SearchSettings())
    with pytest.raises(KeyboardInterrupt):
        StoredEvaluate(Interrupted(), kept, keys, {})(tasks)
    assert count(kept.path) == 2


# Export


def test_export_to_csv(kept, tmp_path, capsys):
    kept.add(row(1))
    kept.add(row(2, extra=0.1))
    path = tmp_path / "out.csv"
    assert export.main([str(path), "--store", str(kept.path)]) == 0
    assert capsys.readouterr().out == f"2 simulations in {path}\n"
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["seed"], first["passed"], first["extra"], first["none"]) == ("1", "True", "", "")
    assert float(first["third"]) == 1 / 3 and second["extra"] == "0.1"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", second["made"])


def test_export_to_parquet(kept, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: no Parquet to write")
    kept.add(row(1))
    kept.add(row(2, extra=0.1))
    assert export.main([str(tmp_path / "out.parquet"), "--store", str(kept.path)]) == 0
    table = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert table["seed"] == [1, 2] and table["extra"] == [None, 0.1] and table["third"] == [1 / 3] * 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["out.xlsx"], "FILE=out.xlsx: must end in .csv or .parquet"),
        (["out.csv", "--store", "nowhere.sqlite"], "--store=nowhere.sqlite: no such file"),
        (["nowhere/out.csv"], "FILE=nowhere/out.csv: No such file or directory"),
        (["out.parquet"], "FILE=out.parquet: needs pyarrow: pip install 'jaxsim[parquet]', or name a .csv"),
    ],
)
def test_an_export_that_cannot_be_is_one_line(tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    made = Store(cache_dir() / NAME)
    made.add(row(1))
    made.close()
    assert export.main(words) == 2
    assert capsys.readouterr().err == f"{expected}\n"


def test_rows_are_json_in_a_file_that_says_what_it_is(kept):
    kept.add(row(1))
    kept.file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert kept.path.read_bytes()[68:72] == b"jxls"
    assert json.loads(kept.file.execute("SELECT task FROM simulations").fetchone()[0]) == {"seed": 1}


def test_the_engines_sources_enter_the_key():
    found = dict(stored.source_files())
    assert {"engine/step.py", "engine/schedule.py", "engine/lanes.py", "metrics.py", "tuning/slo.py"} <= found.keys()
    assert all(found.values())
