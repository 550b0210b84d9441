"""A node in a box without SSH: the node side's own functions work on it, in this very process."""

from __future__ import annotations

import io
import signal
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab import control
from lab import node as lab_node
from lamplighter.node.gpu import choice, freeing, gpus
from lamplighter.node.health import census
from lamplighter.node.keeper import ownership, stop
from lamplighter.node.keeper.launcher import Launched
from lamplighter.node.layout import ServerHome
from lamplighter.node.plan import Plan
from lamplighter.node.stages.values import Allocation
from lamplighter.node.system import processes
from lamplighter.node.worker import Run
from lamplighter.release.engine import load_engine
from lamplighter.run.payload import pack
from tests.driver import PROJECT, free_port
from tests.node.living import Living

SPEED = "30"

ENGINE = load_engine("demo", PROJECT / "roles").compiled


@dataclass
class Bench:
    """The node, the home of its one server, and the processes that a test started on it."""

    directory: Path
    home: ServerHome
    runner: str
    port: int
    living: Living
    gpus: str | list[int] = "all"
    started: int = 0

    @property
    def node(self) -> Path:
        return self.directory / "box"

    @property
    def plan(self) -> Plan:
        return Plan.load({"server": self.server, "engine": ENGINE})

    def run(self) -> Run:
        """A run as its worker has it when the stage ``stop`` begins."""
        directory = self.home.run("20261129T230000Z-abcdef")
        Path(directory.path).mkdir(parents=True)
        request = {"server": self.server, "engine": ENGINE, "host": "box", "verb": "deploy"}
        return Run(request, self.home, directory, self.runner)

    @property
    def allocation(self) -> Allocation:
        return Allocation(self.plan, self.uuids)

    @property
    def server(self) -> dict[str, Any]:
        return {
            "name": "demo",
            "engine": "demo",
            "engine_version": None,
            "model": "demo-model",
            "served_name": "demo-model",
            "host": "127.0.0.1",
            "port": self.port,
            "gpus": self.gpus,
            "python": "python3",
            "argv": [],
            "env": {},
            "launcher": "detached",
            "stale": {"policy": "engine", "kill": []},
            "timeouts": {"stop": 5, "free": 30, "ready": 60, "stall": 30},
            "keep_releases": 5,
            "gpus_unified": "refuse",
            "allow": [],
            "secrets": [],
            "sitecustomize": {"scope": "none"},
        }

    def start(self, *words: str) -> Launched:
        self.started += 1
        run = self.home.run(f"20261129T{self.started:06d}Z-abcdef")
        Path(run.path).mkdir(parents=True)
        command = [str(self.node / "bin" / "lamplighter-demo-server"), "--model-path", "demo-model"]
        command += ["--port", str(self.port), "--tp", "2", "--lab-speed", SPEED, *words]
        return self.living.launch(command, run.launch("new"), self.runner)

    @property
    def uuids(self) -> tuple[str, ...]:
        return choice.resolve_gpus(self.plan).uuids

    def claims(self) -> list[ownership.Claim]:
        return census.find_claims(self.plan, self.home, self.uuids, "box")

    def stoppable(self) -> list[processes.Process]:
        return [claim.process for claim in self.claims() if claim.may_be_stopped]

    def stop(self, grace: float = 5.0) -> None:
        """Stop all that may be stopped, as the stage does."""
        assert stop.stop(self.stoppable, stop.Manner(signal.SIGTERM, grace), lambda text: None) == []

    def await_freed(self) -> freeing.Freed | freeing.NotFreed:
        """Wait as the stage does."""
        return freeing.await_freed(
            self.plan,
            self.home,
            self.uuids,
            lambda _: [process.pid for process in self.stoppable()],
            lambda *_, **__: None,
        )

    def end(self) -> None:
        self.stop()
        found = self.await_freed()
        assert isinstance(found, freeing.Freed), found

    def remains(self, launched: Launched) -> list[str]:
        """What is left of a launch: its processes, and whatever holds memory."""
        table = processes.processes()
        left = ownership.members(ownership.Recorded(launched.main, launched.supervisor), table)
        left += [process for process in table.values() if process.sid == launched.main.pid and not process.is_dead]
        return [f"{process.pid} {process.title}" for process in left] + [str(held) for held in control.held(self.node)]


def furnish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Make the node and the bench on it, and end all of it afterwards; the body of a fixture."""
    lab_node.prepare("box", tmp_path)
    node = tmp_path / "box"
    monkeypatch.setenv("PATH", f"{node}/bin:/usr/local/bin:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(node / "home"))
    monkeypatch.setattr(gpus, "SAMPLE_SECONDS", 0.05)
    runner = tmp_path / "runner"
    zipfile.ZipFile(io.BytesIO(pack().data)).extractall(runner)
    living = Living()
    home = ServerHome(str(tmp_path / "root" / "servers" / "demo"))
    try:
        yield Bench(tmp_path, home, str(runner), free_port(), living)
    finally:
        living.end()
        lab_node.down("box", tmp_path)
