"""W&B runs, read back with W&B's own tools; no account, and servers that are not there."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import wandb
from test_cli import SMALL, results

from jaxsim import tracking
from jaxsim.settings import TrackingSettings
from jaxsim.tracking import Tracking


def inspect(folder: Path) -> list[dict[str, Any]]:
    """The records of the latest run below a folder, in order."""
    (log,) = folder.glob("wandb/latest-run/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "No such command" in done.stderr + done.stdout:
        pytest.skip("this wandb has no `leet inspect` to read a run back with")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def summary_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for record in records:
        if record["type"] == "summary":
            merged |= record["summary"].get("update", {})
    return merged


def description(records: list[dict[str, Any]]) -> dict[str, Any]:
    return next(record["run"] for record in records if record["type"] == "run")


def artifacts(records: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Files of each artifact, by its name."""
    found = [record["artifact"] for record in records if record["type"] == "artifact"]
    return {each["name"]: {entry["path"] for entry in each["manifest"]["contents"]} for each in found}


@pytest.fixture(autouse=True)
def no_login(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    wandb.teardown()


class Server:
    """Stands for W&B's: takes runs on, and nothing else."""

    def __init__(self, monkeypatch):
        self.asked: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                try:
                    body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)))
                except ValueError:
                    body = {}
                server.asked.append(body)
                answer = json.dumps({"data": server.answer(str(body.get("query")), body.get("variables") or {})})
                self.send_response(200)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{self.http.server_port}")

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" not in query:
            return {"model": None, "project": None}
        project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "b", "name": variables["name"], "displayName": "", "config": "{}", "project": project}
        return {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}}

    def die(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch):
    made = Server(monkeypatch)
    yield made
    made.die()


def track(tmp_path, mode: str, **more: Any) -> Tracking:
    return Tracking(TrackingSettings(mode), {"engine": {"a": 1}}, tmp_path, name="n", job_type="j", **more)


def test_a_search_leaves_a_run_that_says_all(run_alone, tmp_path):
    code, _, err = run_alone("+sweep=slo_search", "hydra.run.dir=made", "tracking.group=mine", *SMALL)
    assert code == 0, err
    records = inspect(tmp_path / "made")
    summary, rows = results(tmp_path / "made")
    about = description(records)
    assert about["run_group"] == "mine" and about["job_type"] == "slo_search" and about["project"] == "jaxsim"
    assert about["display_name"] == "slo_search llama3_1_8b H100-80GB"
    rounds = [line for line in history(records) if "round" in line]
    assert [line["round"] for line in rounds] == list(range(1, summary["rounds"] + 1))
    assert [line["_step"] for line in rounds] == list(range(1, summary["rounds"] + 1))
    last = rounds[-1]
    assert last["simulations"] == summary["simulations"] and last["simulated_requests_per_s"] > 0
    assert last["best_load_rps"] == pytest.approx(max(float(row["load_rps"]) for row in rows))
    assert last["best_load_rps_ci95"] > 0 and last["feasible_share"] == 1 and last["settings"] == 2
    kept = summary_of(records)
    for key in ("load_rps", "clients", "max_num_seqs", "limited_by", "p99_ttft_ms", "vllm_serve"):
        assert kept[key] == summary[key]
    assert kept["load_rps_ci95"] == summary["ci95"]["load_rps"]
    drawn = {key for line in history(records) for key in line}
    assert {"maps/load_rps._type", "maps/clients._type", "candidates._type"} <= drawn
    curves = [path.name for path in (tmp_path / "made" / "wandb").glob("*run-*/files/media/table/curves/*.json")]
    assert sorted(name.partition("_ms_")[0] for name in curves) == ["e2el", "tpot", "ttft"]
    files = artifacts(records)
    assert files["results"] == {"config.yaml", "summary.json", "candidates.csv", "curve.csv"}


def test_loads_and_their_latencies_are_drawn(run_alone, tmp_path):
    words = ["evaluate.load_rps=[0.5,1,5]", "engine.max_num_seqs=8", "engine.max_num_batched_tokens=2048"]
    code, _, err = run_alone("+sweep=evaluate", "hydra.run.dir=made", *words, *SMALL)
    assert code == 0, err
    _, rows = results(tmp_path / "made")
    (table,) = (tmp_path / "made" / "wandb").glob("*run-*/files/media/table/curves/ttft_ms*.table.json")
    points = {tuple(point[:3]) for point in json.loads(table.read_text())["data"]}
    assert len(points) == 9  # three loads, three percentiles
    assert {float(row["p99_ttft_ms"]) for row in rows} <= {
        value for point in points for value in point if value != "p99"
    }


def test_the_same_command_is_the_same_run(run_alone, tmp_path):
    words = ["+sweep=evaluate", "engine.max_num_seqs=8", "engine.max_num_batched_tokens=2048", *SMALL]
    ids = []
    for name, more in (("a", "runtime.lanes=8"), ("b", "tracking.group=mine"), ("c", "search.seeds=3")):
        assert run_alone(*words, f"hydra.run.dir={name}", more)[0] == 0
        about = description(inspect(tmp_path / name))
        assert about["resume"] is True
        ids.append(about["run_id"])
    assert ids[0] == ids[1] != ids[2]


def test_an_agents_run_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "agents")
    track(tmp_path, "offline", run_id="ours").finish()
    assert description(inspect(tmp_path))["run_id"] == "agents"


@pytest.mark.parametrize("mode", ["online", "auto"])
def test_without_a_login_it_is_offline(tmp_path, capfd, mode):
    run = track(tmp_path, mode)
    run.log({"load": 3.0})
    assert (run.finish() or [""])[-1].startswith("sync it    wandb sync ")
    assert [line["load"] for line in history(inspect(tmp_path))] == [3.0]
    warning = "warning: W&B stays offline: no API key; log in with `wandb login`\n"
    assert capfd.readouterr().err == (warning if mode == "online" else "")


def test_a_login_is_found_where_wandb_keeps_it(tmp_path, monkeypatch):
    assert not tracking.logged_in()
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {'a' * 40}\n")
    assert tracking.logged_in()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not tracking.logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert tracking.logged_in()


@pytest.mark.parametrize("mode", ["online", "auto"])
def test_a_server_that_is_not_there_costs_nothing_but_a_line(tmp_path, monkeypatch, server, capfd, mode):
    server.die()
    monkeypatch.setitem(tracking.PATIENCE, "init_timeout", 1)
    run = track(tmp_path, mode, run_id="ours")
    run.log({"load": 3.0}, 1)
    assert (run.finish() or [""])[-1].startswith("sync it    wandb sync ")
    assert [line["load"] for line in history(inspect(tmp_path))] == [3.0]
    err = capfd.readouterr().err
    assert err.startswith("warning: W&B stays offline: ") and err.count("\n") == 1


def test_a_server_that_dies_on_the_way_leaves_all_on_disk(tmp_path, monkeypatch, server, capfd):
    if "finish_timeout" not in wandb.Settings.model_fields:
        pytest.skip("this wandb waits for its server without end")
    monkeypatch.setitem(tracking.PATIENCE, "finish_timeout", 1)
    run = track(tmp_path, "auto", run_id="ours")
    assert run.online
    server.die()
    for step in range(3):
        run.log({"load": float(step)}, step)
    url, sync = run.finish() or ["", ""]
    assert "/runs/ours" in url and sync.startswith("sync it    wandb sync ")
    assert [line["load"] for line in history(inspect(tmp_path))] == [0.0, 1.0, 2.0]
    assert "warning: W&B did not take all of the run in time; it is on disk\n" in capfd.readouterr().err


def test_online_the_server_is_asked_to_go_on_with_the_run(tmp_path, monkeypatch, server):
    monkeypatch.setitem(tracking.PATIENCE, "finish_timeout", 1)
    run = track(tmp_path, "online", run_id="ours", group="mine")
    assert run.online
    queries = {str(asked.get("query")).split("(")[0].split()[-1]: asked["variables"] for asked in server.asked}
    assert queries["RunResumeStatus"]["name"] == "ours"
    sent = queries["UpsertBucket"]
    assert (sent["name"], sent["groupName"], sent["jobType"], sent["displayName"]) == ("ours", "mine", "j", "n")
    server.die()
    run.finish()


def test_a_failure_ends_the_tracking_and_nothing_else(tmp_path, monkeypatch, capfd):
    run = track(tmp_path, "offline")

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("No space left\non device")

    monkeypatch.setattr(run.run, "log", broken)
    run.log({"load": 1.0})
    run.table("rows", [{"a": 1}])
    run.summary({"a": 1})
    assert run.finish() is None
    assert capfd.readouterr().err == "warning: W&B tracking is off from here on: No space left on device\n"


def test_disabled_leaves_nothing(tmp_path):
    run = track(tmp_path, "disabled")
    run.log({"load": 1.0})
    assert run.finish() is None and not os.listdir(tmp_path)
