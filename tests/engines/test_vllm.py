"""vLLM itself, on the CPU, deployed to a node with real OpenSSH: from what refuses it to every kind of its death.

One node and one sequence, since a start takes most of a minute: the tests run in this order, and each goes on where
the one before it ended. Nothing good is on the node at first, so that a failed start needs no roll back.

facts: its API server ignores TERM while the engine loads; engine and workers outlive a killed API server; a start on
a port that was taken meanwhile prints its ready line and never listens; with a stopped engine /health still says 200.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from tests.driver import Done, Driver, eventually
from tests.nodes.park import Node, NodePark

pytestmark = [pytest.mark.timeout(1500)]  # the first test may have to wait for the environment
PORT = 8000
START_SECONDS = 900
#: What all of vLLM's processes have in their command line: titles, and the interpreter of those without one.
OURS = "VLLM::|/vllm-[0-9a-f]{12}/bin/python"
#: What a child is called until it takes its title.
SPAWNED = "from multiprocessing.spawn import"
#: Answers on the port as a vLLM with our model would; says its pid when it listens.
IMPOSTOR = """
import http.server, json, os, socketserver, sys
REPLY = {"data": [{"id": "tiny"}], "choices": [{"text": "x"}], "usage": {"completion_tokens": 1}}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(REPLY).encode())
    do_POST = do_GET
    def log_message(self, *words):
        pass
socketserver.TCPServer.allow_reuse_address = True
server = socketserver.ThreadingTCPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(os.getpid(), flush=True)
server.serve_forever()
"""


class Served:
    """A node with vLLM, and an inventory that wants it there."""

    def __init__(self, park: NodePark, node: Node, engine: Path, model: Path, directory: Path) -> None:
        self.node = node
        self.model = str(model)
        self.python = str(engine / "bin" / "python")
        self.driver = Driver(directory / "inventory", prefix=tuple(park.hub_words([])), home=park.home)

    def configure(self, *, one_process: bool = False, **server: Any) -> None:
        """``one_process``: engine and model in one, as on one GPU. Else vLLM has, on a CPU, a worker for each rank."""
        backend, several = ("uni", "0") if one_process else ("mp", "1")
        wanted = {
            "engine": "vllm",
            "model": self.model,
            "served_name": "tiny",
            "python": self.python,
            "port": PORT,
            "gpus": [],
            "args": {
                "max-model-len": 256,
                "dtype": "float32",
                "enforce-eager": True,
                "distributed-executor-backend": backend,
            },
            "env": {
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": several,
                "VLLM_NO_USAGE_STATS": "1",
                "NCCL_PROTO": {"value": "LL", "mode": "force"},
            },
            "checks": {"shm_free_gib": 0, "disk_free_gib": 0},  # a test node is small
            **server,
        }
        self.driver.write("gpu1", {**self.node.connection(), "servers": {"tiny": wanted}})

    def deploy(self, **server: Any) -> Done:
        self.configure(**server)
        return self.driver.run("deploy", "--json", "--host", "gpu1", timeout=START_SECONDS)

    def status(self) -> dict[str, Any]:
        told = json.loads(self.driver.run("status", "--json", "--host", "gpu1").stdout)
        return told["status"]["hosts"]["gpu1"]["servers"]["tiny"]

    def pids(self, pattern: str = OURS) -> list[int]:
        return [int(pid) for pid in self.node.exec(["pgrep", "-f", pattern], check=False).stdout.split()]

    def engine(self) -> int:
        [pid] = self.pids("^VLLM::EngineCore")
        return pid

    def await_pid(self, pattern: str) -> int:
        """The oldest process with this in its command line."""
        deadline = time.monotonic() + START_SECONDS
        while not (found := self.node.exec(["pgrep", "-o", "-f", pattern], check=False).stdout):
            assert time.monotonic() < deadline, f"no process has {pattern} in its command line"
            time.sleep(0.2)
        return int(found)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        self.node.sh(f"kill -{int(number)} {pid}")

    def segments(self) -> list[str]:
        return self.node.sh("ls /dev/shm").split()

    def health(self) -> str:
        words = ["curl", "-s", "-m", "25", "-o", "/dev/null", "-w", "%{http_code}", f"http://127.0.0.1:{PORT}/health"]
        return self.node.exec(words, check=False).stdout

    def interfere(self, until: Callable[[dict[str, Any]], bool], act: Callable[[], object]) -> Done:
        """Deploy, and do something at the first event that is the one waited for."""
        with self.driver.started("deploy", "--json", "--host", "gpu1") as process:
            assert process.stdout is not None
            told = []
            for line in process.stdout:
                told.append(line)
                if until(json.loads(line)):
                    break
            act()
            told += process.stdout
            return Done(process.wait(240), "".join(told), "")


@pytest.fixture(scope="module")
def served(
    park: NodePark, vllm_engine: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    node = park.node("vllm")
    node.sh("mount -o remount,size=1g /dev/shm")  # a queue between its processes wants 160 MiB
    yield Served(park, node, vllm_engine, tiny_model, tmp_path_factory.mktemp("vllm"))
    park.forget("vllm")


def is_started(event: dict[str, Any]) -> bool:
    return event.get("stage") == "start" and bool(event.get("pids"))


def test_a_model_that_is_not_there(served: Served) -> None:
    missing = served.deploy(model="/models/is-not-there")
    assert missing.code == Exit.REFUSED, missing
    report = missing.server("gpu1", "tiny")
    assert report["cause"] == "model_path"
    assert "servers.tiny.model" in report["hint"]

    unknown = served.deploy(model="nobody/no-such-model")
    assert unknown.code == Exit.CRASHED, unknown
    report = unknown.server("gpu1", "tiny")
    assert report["cause"] in ("hub_offline", "model_path")
    assert "servers.tiny.model" in report["hint"]
    assert served.pids() == []


def test_cancelled_in_its_first_seconds_nothing_of_it_is_left(served: Served) -> None:
    served.configure()
    done = served.interfere(is_started, lambda: served.driver.run("cancel", "--host", "gpu1"))
    assert done.server("gpu1", "tiny")["cause"] == "cancelled", done
    assert (served.pids(), served.segments()) == ([], [])


def test_its_api_server_killed_before_the_engine_has_a_name(served: Served) -> None:
    served.configure()

    def kill_it() -> None:
        served.await_pid(SPAWNED)
        served.kill(served.await_pid("bin/vllm serve"))

    done = served.interfere(is_started, kill_it)
    assert done.code == Exit.CRASHED, done
    assert "SIGKILL" in done.server("gpu1", "tiny")["message"]
    assert (served.pids(), served.segments()) == ([], [])


def test_its_engine_killed_while_it_loads(served: Served) -> None:
    served.configure(one_process=True)
    done = served.interfere(
        lambda event: event.get("phase") in ("distributed", "weights"),
        lambda: served.kill(served.engine()),
    )
    assert done.code == Exit.CRASHED, done
    assert done.server("gpu1", "tiny")["cause"] == "worker_died", done
    assert (served.pids(), served.segments()) == ([], [])


def test_a_port_that_was_taken_while_it_loaded(served: Served) -> None:
    served.configure(one_process=True)
    words = served.node.inside(["/usr/bin/python3", "-c", IMPOSTOR, str(PORT)], user="ops")
    pids = []

    with contextlib.ExitStack() as stack:

        def take_it() -> None:  # vLLM has bound the port by now, and listens when its engine is there
            served.await_pid(SPAWNED)
            impostor = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            assert impostor.stdout is not None
            pids.append(int(impostor.stdout.readline()))
            stack.callback(served.kill, pids[0])

        done = served.interfere(is_started, take_it)
        assert done.code == Exit.NOT_READY, done
        report = done.server("gpu1", "tiny")
        assert report["cause"] == "port_in_use"
        assert report["evidence"] == f"port {PORT}: pid {pids[0]} (ops, /usr/bin/python3)"
        assert pids[0] in served.pids("http.server")
        assert served.pids() == []


def test_deployed_and_every_worker_carries_the_variables(served: Served) -> None:
    done = served.deploy()
    assert done.code == Exit.OK, done
    phases = list(dict.fromkeys(event["phase"] for event in done.events if event.get("phase")))
    assert [phase for phase in phases if phase in ("boot", "weights", "kv_cache", "ready")] == [
        "boot", "weights", "kv_cache", "ready",
    ]  # fmt: skip
    said = [event["message"] for event in done.events if event.get("stage") == "confirm" and "message" in event]
    assert any(re.search(r"\b2/2 workers carry (\d+)/\1 variables", message) for message in said), said

    proof = json.loads(served.driver.run("env", "--json", "--host", "gpu1").stdout)
    found = proof["env"]["hosts"]["gpu1"]["servers"]["tiny"]
    assert found["state"] == "carries", found
    assert {worker["title"] for worker in found["workers"]} == {"VLLM::EngineCore", "VLLM::Worker"}
    assert served.status()["state"] == "serving"


def test_words_that_its_own_parser_refuses_stop_nothing(served: Served, odd_model: Path) -> None:
    for words, server in {
        "unrecognized arguments: --no-such-flag": {"args": {"no-such-flag": 7}},
        "argument --max-model-len: invalid": {"args": {"max-model-len": "lots"}},
        "does not recognize this architecture": {"model": str(odd_model)},
    }.items():
        refused = served.deploy(**server)
        assert refused.code == Exit.REFUSED, refused
        assert words in json.dumps(refused.server("gpu1", "tiny")), refused
        assert not [event for event in refused.events if event.get("stage") == "stop"]
    assert served.status()["state"] == "serving"


def test_its_engine_stopped_is_not_healthy(served: Served) -> None:
    engine = served.engine()
    served.kill(engine, signal.SIGSTOP)
    assert served.health() == "200"
    found = served.status()
    assert found["state"] == "unknown", found
    assert f"stopped by a signal or a debugger: VLLM::EngineCore (pid {engine})" in found["message"]
    served.kill(engine, signal.SIGCONT)
    assert served.status()["state"] == "serving"


def test_its_api_server_killed_and_deployed_again(served: Served) -> None:
    orphans = served.pids("^VLLM::")
    served.kill(served.status()["pid"])
    now = eventually(lambda: (found := served.status())["state"] == "stopped" and found)
    assert "SIGKILL" in now["message"]
    assert set(served.pids("^VLLM::")) == set(orphans)  # they outlive their API server

    done = served.deploy(one_process=True)
    assert done.code == Exit.OK, done
    assert not set(orphans) & set(served.pids())
    assert len(served.pids("^VLLM::")) == 1


def test_its_engine_killed_while_it_serves(served: Served) -> None:
    served.kill(served.engine())
    found = eventually(lambda: (now := served.status())["state"] == "stopped" and now)
    assert "its process ended" in found["message"]
    stopped = served.driver.run("stop", "--json", "--host", "gpu1")
    assert stopped.code == Exit.OK, stopped
    assert (served.pids(), served.segments()) == ([], [])
