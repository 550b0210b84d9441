"""Servers that lamplighter keeps here and the inventory names no more: nobody would see them go on. Reads only."""

from __future__ import annotations

import os
from typing import Any, Iterator, Mapping

from lamplighter.node import events
from lamplighter.node.finding import Finding
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import ServerHome, all_servers


def findings(home: ServerHome, request: Mapping[str, Any]) -> Iterator[Finding]:
    """Warn of each server below our root that runs, or will, and is none of the request's ``inventory``."""
    if "inventory" not in request:
        return
    for other in all_servers(os.path.dirname(os.path.dirname(home.path))):
        is_known = other.name in request["inventory"] or other.name == request.get("was")
        state = "" if is_known else _state_of(other)
        if state:
            message = f"the inventory names no server {other.name}, and lamplighter keeps one here: {state}"
            command = events.invocation("undeploy", request["host"], other.name, "--stop")
            hint = f"`{command}` ends it; where it has another name now, that says `was: {other.name}`"
            yield Finding("unlisted_server", "warning", message, "", hint)


def _state_of(home: ServerHome) -> str:
    record = launcher.read_record(home)
    now = launcher.present(record) if record is not None else launcher.Present(None)
    if record is not None and now.main is not None:
        return f"release {record['release']} runs (pid {now.main.pid}, port {record['port']})"
    unit = launcher.returns_at_boot(home)
    return now.note if now.is_restarting else f"the next boot of the node starts it ({unit} is enabled)" if unit else ""
