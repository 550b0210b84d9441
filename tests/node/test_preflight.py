"""The look before anything is touched, while a server of ours is still starting: it takes its port at some moment."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lamplighter.node.finding import Finding
from lamplighter.node.gpu import choice, gpus
from lamplighter.node.health import preflight
from lamplighter.node.layout import RunDirectory, ServerHome
from lamplighter.node.plan import Plan
from lamplighter.node.system import ports, processes
from tests.node.living import PROJECT, SLEEP, Living, until

#: Binds a port, says which in a file, and listens when another file is there.
STARTING = """
import os, socket, sys, time
told, may_listen = sys.argv[1:]
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", 0))
with open(told + ".new", "w") as file:
    file.write(str(server.getsockname()[1]))
os.rename(told + ".new", told)
while not os.path.exists(may_listen):
    time.sleep(0.001)
server.listen()
time.sleep(600)
"""


class Starting:
    """A server of ours that has bound its port and does not listen yet."""

    def __init__(self, living: Living, directory: Path, runner: str) -> None:
        self.home = ServerHome(str(directory / "demo"))
        run = RunDirectory(f"{self.home.runs}/20261129T120000Z-abcdef")
        launch = run.launch("new")
        Path(launch.directory).mkdir(parents=True)
        self._told, self._may_listen = directory / "port", directory / "listen"
        words = [sys.executable, "-I", "-S", "-c", STARTING, str(self._told), str(self._may_listen)]
        self.pid = living.launch(words, launch, runner).main.pid
        assert until(self._told.exists)
        self.port = int(self._told.read_text())
        self.record(self.port)

    def record(self, port: int) -> None:
        mine = {"boot_id": processes.boot_id(), "pid": self.pid, "start": 1, "host": "127.0.0.1", "port": port}
        launched = {"release": "0123456789ab", "run": "20261129T120000Z-abcdef", "attempt": "new", "log": ""}
        Path(self.home.record).write_text(json.dumps({**mine, **launched}))

    def listen(self) -> None:
        self._may_listen.touch()
        assert until(lambda: self.pid in ports.owners(self.port))

    def plan(self, engine: dict[str, Any] | None = None) -> Plan:
        data: dict[str, Any] = {
            "name": "demo", "engine": "demo", "engine_version": None, "model": "tiny", "served_name": "tiny",
            "host": "127.0.0.1", "port": self.port, "gpus": [], "python": sys.executable, "argv": [], "env": {},
            "launcher": "detached", "stale": {"policy": "engine", "kill": []}, "allow": [], "keep_releases": 5,
            "timeouts": {"stop": 5, "free": 5, "ready": 60}, "gpus_unified": "refuse",
            "sitecustomize": {"scope": "server"},
        }  # fmt: skip
        return Plan.load({"server": data, "engine": engine or {}})

    def findings(self) -> dict[str, Finding]:
        found = preflight.examine(self.plan(), self.home, gpus.Resolved(()), "gpu1")
        return {finding.id: finding for finding in found.findings}


@pytest.fixture
def starting(living: Living, tmp_path: Path, runner_home: str) -> Starting:
    return Starting(living, tmp_path, runner_home)


def and_then(act: Callable[[], None], question: Callable[..., Any]) -> Callable[..., Any]:
    """``question``, right after whose answer ``act`` happens, the first time."""
    acts = [act]

    def asked(*arguments: Any) -> Any:
        answer = question(*arguments)
        if acts:
            acts.pop()()
        return answer

    return asked


def test_a_port_that_ours_has_bound_is_no_obstacle(starting: Starting) -> None:
    finding = starting.findings()["port"]
    assert finding.level == "ok"
    assert str(starting.pid) in finding.evidence


def test_nor_where_its_run_was_killed_before_it_wrote_a_record(starting: Starting) -> None:
    Path(starting.home.record).unlink()
    assert starting.findings()["port"].level == "ok"


@pytest.mark.parametrize("moment", ["can_bind", "owners"])
def test_nor_one_on_which_it_begins_to_listen_meanwhile(
    starting: Starting, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(ports, moment, and_then(starting.listen, getattr(ports, moment)))
    assert starting.findings()["port"].level == "ok"
    assert starting.pid in ports.owners(starting.port)


def test_a_port_bound_by_a_stranger_is_refused_though_ours_runs_on_another(starting: Starting) -> None:
    starting.record(starting.port + 1)
    finding = starting.findings()["port_in_use"]
    assert finding.level == "error"
    assert "without listening" in finding.evidence


def test_a_host_that_is_not_this_nodes_is_refused_though_our_own_server_has_the_port(starting: Starting) -> None:
    starting.listen()
    elsewhere = dataclasses.replace(starting.plan(), host="203.0.113.7")
    found = preflight.examine(elsewhere, starting.home, gpus.Resolved(()), "gpu1").findings
    told = {finding.id: finding for finding in found}
    assert told["listen_address"].level == "error"
    assert "servers.demo.host" in told["listen_address"].hint
    assert "port_in_use" not in told


# ------------------------------------------------------------------------------------------------------ who may stay

PROGRAMS = yaml.safe_load((PROJECT / "roles/node/programs.yml").read_text())
MPS, TRAINER = "nvidia-cuda-mps-control", "trainer"


@pytest.mark.parametrize(
    ("listed", "others", "says"),
    [
        (["/usr/lib/xorg/Xorg"], [], "/usr/lib/xorg/Xorg may stay: list it in servers.demo.allow"),
        ([], [MPS], f"{MPS} may stay: list it in servers.demo.allow"),
        (["nvtop"], [MPS], f"{MPS}, nvtop may stay: list them in servers.demo.allow"),
        ([], [MPS, TRAINER], f"{MPS} may stay: list it in servers.demo.allow; the others: end them, or list"),
        ([], [TRAINER], "end them, or list their names in servers.demo.stale.kill"),
    ],
)
def test_monitors_and_mps_are_hinted_to_allow_by_the_names_that_count(
    starting: Starting, living: Living, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    listed: list[str], others: list[str], says: str,
) -> None:  # fmt: skip
    """``listed``: by nvidia-smi, under that name; ``others`` only have the devices open."""
    for name in others:
        (tmp_path / name).symlink_to(SLEEP)
    pids = [living.start([SLEEP, "600"]).pid for _ in listed]
    apps = tuple(gpus.AppRow("GPU-a", pid, name, "5", True) for pid, name in zip(pids, listed, strict=True))
    pids += [living.start([str(tmp_path / name), "600"]).pid for name in others]
    held = gpus.Verdict(gpus.HELD, tuple(pids), "held", foreign=tuple(pids), apps=apps)
    monkeypatch.setattr(choice, "settled_verdict", lambda *_: held)
    monkeypatch.setattr(choice, "unfit_gpus", lambda *_: ())
    monkeypatch.setattr(preflight.census, "find_claims", lambda *_: ())
    plan, resolved = starting.plan({"programs": PROGRAMS}), gpus.Resolved(("GPU-a",))
    found = preflight.examine(plan, starting.home, resolved, "gpu1").findings
    assert says in next(each.hint for each in found if each.id == "gpu_held")
