"""Whether a server that was deployed is well now: what a hung engine goes on answering does not count."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.health import drift, liveness
from lamplighter.node.layout import ServerHome
from lamplighter.node.system import processes
from lamplighter.node.verbs import status
from lamplighter.release.engine import load_engine
from tests.node.living import Living, until

PROJECT = Path(__file__).parents[2]
ENGINES = {name: load_engine(name, PROJECT / "roles").compiled for name in ("sglang", "vllm", "transformers")}
SECONDS = 0.5
HEALTHS = ("/health", "/health_generate")


class Server(http.server.ThreadingHTTPServer):
    """Says that it is well and which model it has, as long as this process lives; ``generates`` says the rest."""

    daemon_threads = True
    generates = True
    health = 200
    counted = 0
    grows = False
    on_question: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.over = threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path in HEALTHS:
            self.answer(self.server.health, "")
        elif self.path == "/metrics":
            self.server.counted += self.server.grows
            self.answer(200, f'# TYPE x counter\nvllm:generation_tokens_total{{engine="0"}} {self.server.counted}.0\n')
        else:
            self.answer(200, json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.on_question()
        if not self.server.generates:
            self.server.over.wait(60)
        self.answer(200, json.dumps({"model": "tiny@main", "choices": [{"text": "x"}]}))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        with contextlib.suppress(OSError):  # who asked has gone
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.over.set()
    made.shutdown()
    thread.join()
    made.server_close()


def plan_of(engine: str, port: int) -> dict[str, Any]:
    """What a release's plan says of its server."""
    return {
        "name": "x", "engine": engine, "engine_version": None, "model": "tiny", "served_name": "tiny",
        "host": "127.0.0.1", "port": port, "gpus": [], "python": "python3", "argv": [], "env": {},
        "launcher": "detached", "stale": {"policy": "engine", "kill": []}, "allow": [], "keep_releases": 5,
        "timeouts": {"stop": 5, "free": 5, "ready": 60}, "gpus_unified": "refuse", "sitecustomize": {"scope": "server"},
    }  # fmt: skip


def deployed(directory: Path, server: Server, engine: str) -> ServerHome:
    """Written down as one that became ready, with this very process as its main process."""
    home = ServerHome(str(directory))
    release = home.release("a" * 12)
    me = processes.read_process(os.getpid())
    assert me is not None
    os.makedirs(release.path)
    Path(release.plan).write_text(
        json.dumps({"server": plan_of(engine, server.server_port), "engine": ENGINES[engine]})
    )
    record = {
        "boot_id": me.identity.boot_id, "pid": me.pid, "start": me.start, "release": release.digest, "ready": True,
        "host": "127.0.0.1", "port": server.server_port, "run": "r", "attempt": "new", "log": "",
    }  # fmt: skip
    Path(home.record).write_text(json.dumps(record))
    return home


@pytest.mark.parametrize("engine", ENGINES)
def test_one_that_generates_is_well(tmp_path: Path, server: Server, engine: str) -> None:
    assert liveness.trouble_of(deployed(tmp_path, server, engine)) is None


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_hung_engine_is_not_well_though_its_health_is_200(tmp_path: Path, server: Server, engine: str) -> None:
    server.generates = False
    found = liveness.trouble_of(deployed(tmp_path, server, engine), SECONDS)
    assert found is not None
    assert "does not answer a question" in found


def test_a_busy_one_is_well_while_its_tokens_are_counted(tmp_path: Path, server: Server) -> None:
    server.generates, server.grows = False, True
    assert liveness.trouble_of(deployed(tmp_path, server, "vllm"), SECONDS) is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("health", [200, 503])
def test_no_health_makes_up_for_a_token_that_did_not_come(
    tmp_path: Path, server: Server, engine: str, health: int
) -> None:
    server.generates, server.health = False, health
    assert liveness.trouble_of(deployed(tmp_path, server, engine), SECONDS) is not None


@pytest.mark.parametrize(("line", "is_well"), [("Decode batch, #running-req: 64", True), ("GET /health 200 OK", False)])
def test_a_busy_one_is_well_while_its_log_says_that_it_works(
    tmp_path: Path, server: Server, line: str, is_well: bool
) -> None:
    server.generates = False
    home = deployed(tmp_path, server, "sglang")
    log = tmp_path / "server.log"
    log.write_text("Decode batch, of an earlier time\n")
    record = json.loads(Path(home.record).read_text())
    Path(home.record).write_text(json.dumps({**record, "log": str(log)}))

    def write_on() -> None:
        with log.open("a") as file:
            file.write(f"{line}\n")

    server.on_question = write_on
    assert (liveness.trouble_of(home, SECONDS) is None) == is_well


def with_crew(home: ServerHome, *workers: processes.Process) -> None:
    """Note that these were there when it became ready."""
    record = json.loads(Path(home.record).read_text())
    crew = [{"pid": each.pid, "start": each.start, "title": each.title} for each in workers]
    known = {name: record[name] for name in ("run", "attempt", "release")}
    Path(home.deployed).write_text(json.dumps({**known, "crew": crew}))


TITLE = "sglang::scheduler_TP3"


def test_a_server_with_all_its_workers_has_lost_none(tmp_path: Path, server: Server, living: Living) -> None:
    home = deployed(tmp_path, server, "sglang")
    assert liveness.lost_workers(home) == []  # nothing is known
    with_crew(home, living.titled(TITLE))
    assert liveness.lost_workers(home) == []


@pytest.mark.parametrize(
    ("how", "says"),
    [("KILL", "is dead, and its parent has not noticed"), ("STOP", "is stopped by a signal"), ("reaped", "is gone")],
)
def test_a_lost_worker_is_named(tmp_path: Path, server: Server, living: Living, how: str, says: str) -> None:
    """Though the HTTP process goes on answering, with tokens even."""
    home = deployed(tmp_path, server, "sglang")
    worker = living.titled(TITLE)
    with_crew(home, worker, living.titled("sglang::detokenizer"))
    os.kill(worker.pid, signal.SIGSTOP if how == "STOP" else signal.SIGKILL)
    if how == "reaped":
        living.exit_code(worker.pid)
    assert until(lambda: liveness.lost_workers(home))
    (told,) = liveness.lost_workers(home)
    assert told.startswith(f"{TITLE} (pid {worker.pid}, rank 3) {says}")
    assert liveness.trouble_of(home, SECONDS) is None
    assert told in status.describe(home, "gpu1", SECONDS)["message"]


def test_a_worker_that_is_held_for_a_moment_is_not_lost(tmp_path: Path, server: Server, living: Living) -> None:
    home = deployed(tmp_path, server, "sglang")
    worker = living.titled(TITLE)
    with_crew(home, worker)
    os.kill(worker.pid, signal.SIGSTOP)
    assert until(lambda: (found := processes.read_process(worker.pid)) is not None and found.state == "T")
    threading.Timer(0.3, os.kill, (worker.pid, signal.SIGCONT)).start()
    assert liveness.lost_workers(home) == []


def test_another_one_of_that_title_is_in_its_place(tmp_path: Path, server: Server, living: Living) -> None:
    """As after a restart by systemd."""
    home = deployed(tmp_path, server, "sglang")
    gone = living.titled(TITLE)
    with_crew(home, gone)
    os.kill(gone.pid, signal.SIGKILL)
    living.exit_code(gone.pid)
    living.titled(TITLE)
    assert liveness.lost_workers(home) == []


def test_a_process_of_it_that_is_stopped_is_named(tmp_path: Path, server: Server, living: Living) -> None:
    server.generates = False
    home = deployed(tmp_path, server, "vllm")
    child: subprocess.Popen[bytes] = living.start(["sleep", "600"])
    child.send_signal(signal.SIGSTOP)
    assert until(lambda: (found := processes.read_process(child.pid)) is not None and found.state == "T")
    found = liveness.trouble_of(home, SECONDS)
    assert found is not None
    assert f"stopped by a signal or a debugger: sleep (pid {child.pid})" in found


@pytest.mark.parametrize("damage", ['{"files": 5}', '{"files": {"launch.sh": {}}}', '{"files": {"launch.sh": 1}}'])
def test_a_damaged_list_of_files_is_told_and_hinders_no_comparison(tmp_path: Path, server: Server, damage: str) -> None:
    home = deployed(tmp_path, server, "vllm")
    Path(home.release("a" * 12).path, "release.json").write_text(damage)
    Path(home.deployed).write_text('{"environment": [1, ["A", "1"]]}')
    found = drift.find_drift(home, None)
    assert f"files of release {'a' * 12}: its release.json cannot be read" in found.unknown
    assert drift.since_deploy(home, found) == list(found.differences)
