"""Whether a server that was deployed is well now: what a hung engine goes on answering does not count."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node import standing
from lamplighter.node.layout import ServerHome
from lamplighter.node.observe import processes
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
        if not self.server.generates:
            self.server.over.wait(60)
        self.answer(200, json.dumps({"model": "tiny@main", "choices": [{"text": "x"}]}))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
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
    assert standing.trouble_of(deployed(tmp_path, server, engine)) is None


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_hung_engine_is_not_well_though_its_health_is_200(tmp_path: Path, server: Server, engine: str) -> None:
    server.generates = False
    found = standing.trouble_of(deployed(tmp_path, server, engine), SECONDS)
    assert found is not None
    assert "does not answer a question" in found


def test_a_busy_one_is_well_while_its_tokens_are_counted(tmp_path: Path, server: Server) -> None:
    server.generates, server.grows = False, True
    assert standing.trouble_of(deployed(tmp_path, server, "vllm"), SECONDS) is None


@pytest.mark.parametrize(("health", "is_well"), [(200, True), (503, False)])
def test_a_health_that_generates_is_believed(tmp_path: Path, server: Server, health: int, is_well: bool) -> None:
    server.generates, server.health = False, health
    assert (standing.trouble_of(deployed(tmp_path, server, "sglang"), SECONDS) is None) == is_well


def test_a_process_of_it_that_is_stopped_is_named(tmp_path: Path, server: Server, living: Living) -> None:
    server.generates = False
    home = deployed(tmp_path, server, "vllm")
    child: subprocess.Popen[bytes] = living.start(["sleep", "600"])
    child.send_signal(signal.SIGSTOP)
    assert until(lambda: (found := processes.read_process(child.pid)) is not None and found.state == "T")
    found = standing.trouble_of(home, SECONDS)
    assert found is not None
    assert f"stopped by a signal or a debugger: sleep (pid {child.pid})" in found


@pytest.mark.parametrize("damage", ['{"files": 5}', '{"files": {"launch.sh": {}}}', '{"files": {"launch.sh": 1}}'])
def test_a_damaged_list_of_files_is_told_and_hinders_no_comparison(tmp_path: Path, server: Server, damage: str) -> None:
    home = deployed(tmp_path, server, "vllm")
    Path(home.release("a" * 12).path, "release.json").write_text(damage)
    Path(home.deployed).write_text('{"environment": [1, ["A", "1"]]}')
    found = standing.find_drift(home, None)
    assert f"files of release {'a' * 12}: its release.json cannot be read" in found.unknown
    assert standing.since_deploy(home, found) == list(found.differences)
