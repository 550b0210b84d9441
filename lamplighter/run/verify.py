"""Checks of the node's state: ordinary pytest files, run here, whose testinfra ``host`` asks over our open connection.

A check file gets two fixtures: testinfra's ``host``, and ``server``, what the inventory and the node say of the server.
Checks lie in ``roles/node/checks``, ``roles/<engine>/checks`` and ``inventory/checks``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import testinfra.backend.base
import testinfra.host

from lamplighter.inventory import Server
from lamplighter.node import events
from lamplighter.node.events import Event, Exit
from lamplighter.release.engine import load_engine
from lamplighter.report import Fold
from lamplighter.run.deploy import HostSession
from lamplighter.run.ssh import Node

COMMAND_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class ServerUnderCheck:
    """What a check may ask about the server: the inventory's words, and where the node keeps it.

    ``directory`` is ``<root>/servers/<name>`` on the node, ``python`` the node's own interpreter (not the server's).
    """

    name: str
    engine: dict[str, Any]
    host: str
    port: int
    served_name: str
    directory: str
    release: str
    pid: int
    python: str


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One check: ``outcome`` is passed, failed, error or skipped; ``evidence`` is the line that says why."""

    name: str
    outcome: str
    evidence: str
    seconds: float


class NodeBackend(testinfra.backend.base.BaseBackend):  # type: ignore[misc]  # testinfra ships no types
    """A testinfra backend on a connection that is open already: no second login, jump hosts and become included."""

    NAME = "lamplighter"

    def __init__(self, node: Node) -> None:
        super().__init__(node.name)
        self._node = node
        self._encoding = "utf-8"  # asking the node for its encoding would cost a command

    def run(self, command: str, *args: str, **kwargs: Any) -> testinfra.backend.base.CommandResult:
        line = self.get_command(command, *args)
        done = self._node.run(self._node.wrap(line), timeout=COMMAND_SECONDS)
        status = 255 if done.exit_status is None else done.exit_status
        return self.result(status, self.encode(line), done.stdout, done.stderr)


class _Fixtures:
    def __init__(self, host: testinfra.host.Host, server: ServerUnderCheck) -> None:
        self._host = host
        self._server = server

    @pytest.fixture(scope="session")
    def host(self) -> testinfra.host.Host:
        return self._host

    @pytest.fixture(scope="session")
    def server(self) -> ServerUnderCheck:
        return self._server


class _Collector:
    def __init__(self) -> None:
        self.results: list[CheckResult] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            outcome = "error" if report.failed and report.when != "call" else report.outcome
            name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
            self.results.append(CheckResult(name, outcome, _evidence(report), round(report.duration, 3)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.results.append(CheckResult(report.nodeid, "error", _evidence(report), 0.0))


def _evidence(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).splitlines()[0]
    if report.outcome == "passed":
        return ""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    return (text.strip().splitlines() or [""])[-1]


def verify(session: HostSession, server: Server, inventory: Path, only: str = "") -> dict[str, Any]:
    """Run the checks of ``server`` against the node; return {"checks": [...]}. Reads only.

    ``only`` is a pytest ``-k`` expression. Raises LamplighterError when the node cannot be asked.
    """
    subject = _subject(session, server)
    host = testinfra.host.Host(NodeBackend(session.node))
    collector = _Collector()
    words = [
        *("-p", "no:pytest11.testinfra"),  # its own `host` fixture would win, and test the control machine
        *("-p", "no:testinfra", "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:timeout"),
        *(
            "-c",
            str(session.project / "roles" / "checks.ini"),
            "--rootdir",
            str(session.project),
            "--import-mode=importlib",
        ),
        *(("-k", only) if only else ()),
        *map(str, _directories(server, session.project, inventory)),
    ]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = pytest.main(words, plugins=[_Fixtures(host, subject), collector])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not collector.results:
        collector.results.append(CheckResult("checks", "error", f"pytest ended with {status!r}; no check ran", 0.0))
    return {"checks": [dataclasses.asdict(result) for result in collector.results]}


def afterwards(
    session: HostSession, server: Server, inventory: Path, fold: Fold, listen: Callable[[Event], None]
) -> None:
    """Verify a server that was just put into service, as one more stage; a failed check makes it *degraded*."""
    if fold.outcome(session.host.name, server.name) != "deployed":
        return
    run = fold.report().hosts[session.host.name].servers[server.name].run
    where = {"host": session.host.name, "server": server.name, "run": run}
    listen({**events.stage_started("verify"), **where})
    began = time.monotonic()
    checks = verify(session, server, inventory)["checks"]
    failed = [check for check in checks if check["outcome"] in ("failed", "error")]
    message = f"{len(checks) - len(failed)} of {len(checks)} checks passed"
    listen({**events.stage_ended("verify", not failed, time.monotonic() - began, message=message), **where})
    if failed:
        names = ", ".join(check["name"] for check in failed)
        fold.add_degraded(
            session.host.name,
            server.name,
            f"serving, but {len(failed)} of {len(checks)} checks failed: {names}",
            cause="verify",
            evidence=failed[0]["evidence"],
            hint=f"./inv verify --host {session.host.name} --server {server.name}",
        )


def judge_checks(answer: Mapping[str, Any]) -> Exit:
    """Return the exit code that the results of ``verify`` mean."""
    return Exit.DEGRADED if any(check["outcome"] in ("failed", "error") for check in answer["checks"]) else Exit.OK


def _directories(server: Server, project: Path, inventory: Path) -> list[Path]:
    beside = inventory if inventory.is_dir() else inventory.parent
    wanted = (project / "roles" / "node" / "checks", project / "roles" / server.engine / "checks", beside / "checks")
    return [directory for directory in wanted if directory.is_dir()]


def _subject(session: HostSession, server: Server) -> ServerUnderCheck:
    found = session.status([server.name])
    state = found["servers"][0]
    return ServerUnderCheck(
        name=server.name,
        engine=load_engine(server.engine, session.project / "roles").compiled,
        host=server.host,
        port=server.port,
        served_name=server.served_name or server.model,
        directory=f"{found['root']}/servers/{server.name}",
        release=state.get("release") or "",
        pid=int(state.get("pid") or 0),
        python=session.host.connection.python,
    )
