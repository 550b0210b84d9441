"""``status --watch``, and the conditions of ``deploy --if-changed``: the control side's part in telling drift."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from invoke.exceptions import Exit as Leave

from lamplighter.errors import LamplighterError
from lamplighter.inventory import Host
from lamplighter.node.events import Exit
from lamplighter.project import Project
from lamplighter.report import status_text
from lamplighter.run import command
from lamplighter.run.host_session import HostSession, Named
from lamplighter.ssh.connection import Node


def conditions(if_changed: bool, max_age: str | None) -> dict[str, Any]:
    """Return what the node is told of ``--if-changed`` and ``--max-age``; {} for a deploy without conditions.

    Raises UsageError for an age that is none.
    """
    if max_age is None:
        return {"if_changed": True} if if_changed else {}
    return {"if_changed": True, "max_age": command.seconds_in(max_age, "--max-age")}


def watch(
    settings: command.Settings, patterns: Sequence[str], server: str | None, pause: str, *, everything: bool = False
) -> NoReturn:
    """Show the status of the chosen servers again and again, ``pause`` apart, until Ctrl-C; then leave with 0.

    Each host keeps its connection; a lost one is opened again at the next look.
    """
    with command.guarded(settings), contextlib.ExitStack() as open_nodes:
        seconds = max(0.1, command.seconds_in(pause, "--watch"))
        reached = command.reach(settings, patterns, server, everything=everything)
        watched = [_Watched(host, servers, everything, settings.project, open_nodes) for host, servers in reached]
        try:
            while True:
                answers: dict[str, Mapping[str, Any]] = {}
                errors: dict[str, LamplighterError] = {}
                for each in watched:
                    try:
                        answers[each.host.name] = each.look()
                    except LamplighterError as error:
                        errors[each.host.name] = command.traced(settings, error)
                if not _show(settings, answers, errors):
                    raise Leave(code=Exit.OK)
                time.sleep(seconds)
        except command.Interrupted:
            raise Leave(code=Exit.OK) from None
    raise AssertionError  # guarded() lets nothing else through


class _Watched:
    """One host, and the connection that it keeps."""

    def __init__(
        self,
        host: Host,
        servers: list[Named],
        everything: bool,
        project: Path | Project,
        open_nodes: contextlib.ExitStack,
    ) -> None:
        self.host = host
        self._everything = everything
        self._project = project
        self._servers = servers
        self._node = Node(host.name, host.connection)
        open_nodes.callback(self._node.close)

    def look(self) -> dict[str, dict[str, Any]]:
        if not self._node.is_alive:
            self._node.close()
            self._node.open()
        try:
            session = HostSession(self.host, self._node, self._project)
            return session.standings(self._servers, everything=self._everything)
        except LamplighterError:
            self._node.close()
            raise


def _show(
    settings: command.Settings, answers: Mapping[str, Mapping[str, Any]], errors: Mapping[str, LamplighterError]
) -> bool:
    """Print one look; False when its reader is gone."""
    if settings.as_json:
        hosts: dict[str, Any] = {host: {"servers": found} for host, found in answers.items()}
        hosts |= {host: {"error": str(bad), "exit_code": int(bad.exit_code)} for host, bad in errors.items()}
        return command.say_json({"status": {"t": round(time.time(), 3), "hosts": hosts}})
    clear = "\x1b[H\x1b[2J" if sys.stdout is not None and sys.stdout.isatty() else ""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    table = [status_text(answers, command.columns())] if answers else []
    return command.put(clear) and command.say("\n".join([now, *table, *map(str, errors.values()), ""]))
