"""Carrying one request to one host and bringing back what it says: deploy, its sister verbs, and the reading ones."""

from __future__ import annotations

import contextlib
import getpass
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lamplighter.errors import ContactLost, LamplighterError, NodeRefused
from lamplighter.inventory import Host, Server, resolve_secrets
from lamplighter.node import events
from lamplighter.node.events import Event
from lamplighter.release.engine import load_engine
from lamplighter.release.release import build_release
from lamplighter.run.session import converse
from lamplighter.run.ssh import Node

OnEvent = Callable[[Event], None]


class HostSession:
    """An open connection to one host of the inventory; every verb is one exec on it."""

    def __init__(self, host: Host, node: Node, project: Path) -> None:
        self.host = host
        self.node = node
        self.project = project

    def run(self, verb: str, server: Server, on_event: OnEvent, **options: Any) -> None:
        """Have the node do ``verb`` (deploy, rollback, start, stop) for ``server``, in a run of its own.

        Touches the node as the verb says. A run that has begun there ends there, whoever is still connected: then
        ContactLost names the run. Raises LamplighterError for all that kept it from beginning.
        """
        prepared = self.prepare(verb, server)
        run = prepared["run"]
        begun = False

        def listen(event: Event) -> None:
            nonlocal begun
            begun = begun or event["event"] == events.RUN
            on_event(self._about(event, server.name))

        try:
            bye = converse(self.node, self.host.connection.python, {**prepared, **options}, listen)
        except ContactLost as lost:
            raise _detached(lost, self.host.name, server.name, run) if begun else lost from lost
        self._check_farewell(bye, server.name, run)

    def attach(self, server: Server, on_event: OnEvent, run: str | None = None) -> None:
        """Show a run of ``server`` from its first event, and follow it while it goes on. Reads only."""

        def listen(event: Event) -> None:
            if event["event"] == events.RESULT and event.get("error"):
                raise NodeRefused(
                    event["error"], next_step=f"`./inv status --host {self.host.name}` shows what there is"
                )
            on_event(self._about(event, server.name))

        bye = self._ask({"verb": "attach", "servers": [server.name], "to": run}, listen)
        self._check_farewell(bye, server.name, run or "the last run")

    def logs(self, server: Server, write: Callable[[str], None], lines: int, follow: bool) -> None:
        """Hand the last ``lines`` lines of the server's log to ``write``, then what it gains. Reads only."""

        def listen(event: Event) -> None:
            if event.get("missing"):
                raise NodeRefused(
                    f"{self.host.name}: server {server.name} has no log",
                    why=event.get("why", "nothing has been deployed there"),
                )
            if event["event"] == events.LOG:
                write(event["text"])

        self._ask({"verb": "logs", "servers": [server.name], "lines": lines, "follow": follow}, listen)

    def status(self, servers: Sequence[str]) -> dict[str, Any]:
        """Ask what serves and which run is in progress: {"root", "servers": [...]}. Reads only."""
        return self._result({"verb": "status", "servers": list(servers)})

    def statuses(self, servers: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return ``status`` of each server, by name."""
        return {found["name"]: found for found in self.status(servers)["servers"]}

    def check(self, server: Server) -> dict[str, Any]:
        """Ask the preflight's questions, and who would be stopped by a deploy. Reads only."""
        engine = load_engine(server.engine, self.project / "roles")
        release = build_release(self.host, server, engine, self.project)
        plan = release.manifest["server"]
        return self._result({"verb": "check", "server": plan, "engine": engine.compiled})

    def diagnose(self, server: Server) -> dict[str, Any]:
        """Diagnose the last run of ``server`` on its node, with what the node itself knows of it. Reads only."""
        engine = load_engine(server.engine, self.project / "roles")
        return self._result({"verb": "diagnose", "servers": [server.name], "engine": engine.compiled})

    def prepare(self, verb: str, server: Server) -> dict[str, Any]:
        """Build the request: everything the node needs, so that it depends on nobody afterwards."""
        engine = load_engine(server.engine, self.project / "roles")
        release = build_release(self.host, server, engine, self.project)
        return {
            "verb": verb,
            "run": new_run_id(),
            "host": self.host.name,
            "root": self.host.root,
            "by": f"{getpass.getuser()}@{socket.gethostname()}",
            "started": time.time(),
            "server": release.manifest["server"],
            "engine": engine.compiled,
            "release": {
                "digest": release.digest,
                "files": {name: {"text": file.text, "mode": file.mode} for name, file in release.files.items()},
            },
            "secrets": resolve_secrets(server),
        }

    def _result(self, request: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def listen(event: Event) -> None:
            if event["event"] == events.RESULT:
                found.update(event)

        self._ask(request, listen)
        return {name: value for name, value in found.items() if name != "event"}

    def _ask(self, request: Mapping[str, Any], listen: OnEvent) -> Event:
        whole = {"host": self.host.name, "root": self.host.root, **request}
        bye = converse(self.node, self.host.connection.python, whole, listen)
        _raise_defect(self.host.name, bye)
        return bye

    def _about(self, event: Event, server: str) -> Event:
        return event if "host" in event else {**event, "host": self.host.name, "server": server}

    def _check_farewell(self, bye: Event, server: str, run: str) -> None:
        _raise_defect(self.host.name, bye)
        if bye.get("worker_gone"):
            raise LamplighterError(
                f"{self.host.name}: run {run} of server {server} ended without a last word",
                why=bye.get("errors") or "its worker process was killed",
                serving="unknown: the run may have stopped the old server",
                next_step="deploy again: it repairs from what the run wrote down",
            )


@contextlib.contextmanager
def open_session(host: Host, project: Path) -> Iterator[HostSession]:
    """Connect to ``host``. Raises Unreachable or one of its kinds."""
    with Node(host.name, host.connection) as node:
        yield HostSession(host, node, project)


def new_run_id() -> str:
    """Name a run: its UTC time, so that names sort by age, and six random hex digits."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"


def _raise_defect(host: str, bye: Event) -> None:
    if bye.get("error"):
        raise LamplighterError(
            f"{host}: our program on the node failed",
            why=str(bye["error"]),
            next_step="report it; --debug shows its trace",
        )


def _detached(lost: ContactLost, host: str, server: str, run: str) -> ContactLost:
    return ContactLost(
        lost.what,
        why=lost.why,
        serving=f"run {run} of server {server} goes on by itself on the node",
        next_step=f"./inv attach --host {host} --server {server}",
    )
