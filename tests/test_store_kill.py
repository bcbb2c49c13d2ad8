"""A search that is killed again and again ends with the results of one that was left alone.

JAXSIM_KILLS=20 kills it 20 times; without it 3 times.
"""

import csv
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import jaxsim

KILLS = int(os.environ.get("JAXSIM_KILLS", "3"))
WORDS = [
    "+sweep=slo_search",
    "search.max_num_seqs=[8,32,128]",
    "search.max_num_batched_tokens=[2048,8192]",
    "search.seeds=4",
    "search.num_requests=300",
    "runtime.lanes=8",
    "runtime.devices=1",
    "tracking=disabled",
]
PATIENCE_S = 300


def start(folder: Path, name: str, *words: str) -> subprocess.Popen:
    cache = {"PYTHONPATH": str(Path(jaxsim.__file__).parents[1]), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "jaxsim", *WORDS, f"hydra.run.dir={name}", *words]
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | cache, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return out


def results(folder: Path) -> tuple[dict, list]:
    with (folder / "candidates.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    summary = json.loads((folder / "summary.json").read_text())
    return {key: value for key, value in summary.items() if key != "seconds"}, rows


def rows(path: Path) -> int:
    """Simulations in the file, which another process may be about to make."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
            return file.execute("SELECT count(*) FROM simulations").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


def counts(out: str) -> tuple[int, int]:
    """Simulations that a command found in its store and those that it added."""
    found, added = re.findall(r"([\d,]+) found in it, ([\d,]+) added", out)[0]
    return int(found.replace(",", "")), int(added.replace(",", ""))


def test_killed_at_random_moments_it_ends_with_the_same_results(tmp_path, monkeypatch, compiled_engines):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled_engines))
    finish(start(tmp_path, "undisturbed", "store.path=null"))
    expected = results(tmp_path / "undisturbed")
    simulations = expected[0]["simulations"] + 8 * 4  # with the curve: loads and seeds
    path, chance = tmp_path / "cache" / "jaxsim" / "simulations.sqlite", random.Random(0)
    killed, before = [], 0
    while len(killed) < KILLS:
        # A moment at random, in what is left: after so many simulations, and then a while.
        until = before + chance.randrange(max(1, (simulations - before) // (KILLS - len(killed))))
        process, end = start(tmp_path, "killed"), time.monotonic() + PATIENCE_S
        while rows(path) <= until and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(chance.random() / 20)
        process.kill()
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"it ended before it was killed: {err}"
        killed.append(rows(path))
        assert killed[-1] > before
        before = killed[-1]
        with closing(sqlite3.connect(path)) as file:
            assert file.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    out = finish(start(tmp_path, "killed"))
    assert results(tmp_path / "killed") == expected
    found, added = counts(out)
    # Some are asked for twice in one search: what was kept is never simulated again.
    assert found + added == simulations and found >= before and rows(path) == before + added
    assert counts(finish(start(tmp_path, "again"))) == (simulations, 0)
    assert results(tmp_path / "again") == expected
    print(f"{simulations} simulations, killed after {killed}")
