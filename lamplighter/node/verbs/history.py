"""What has been done to the servers of a node, told from the journals that it keeps. Reads only."""

from __future__ import annotations

import os
import time
from typing import Any, Optional

from lamplighter.node import events, journal
from lamplighter.node.layout import RunDirectory, all_servers, server_home
from lamplighter.node.worker import is_at_work


def history(request: dict[str, Any], root: str) -> dict[str, Any]:
    """List the runs of the servers asked for, oldest first; with ``everything`` of all that the node knows, too.

    ``since``: only those that began within the last so many seconds.
    """
    span = request.get("since")
    earliest = float("-inf") if span is None else time.time() - float(span)
    homes = {name: server_home(root, name) for name in request.get("servers") or []}
    if request.get("everything"):
        homes = {**{home.name: home for home in all_servers(root)}, **homes}
    return {
        "servers": [
            {"name": name, "runs": [run_of(run) for run in homes[name].all_runs() if run.began >= earliest]}
            for name in sorted(homes)
        ]
    }


def run_of(directory: RunDirectory) -> dict[str, Any]:
    """Tell how a run stands or ended: at work, ended, or killed without a last word, and at which stage.

    Of one whose journal was removed that is unknown.
    """
    told = journal.read(directory.journal)
    end = end_in(told)
    first = told[0] if told else {}
    known: dict[str, Any] = {
        "id": directory.run_id,
        "verb": first.get("verb"),
        "by": first.get("by"),
        "since": first.get("t"),
        "stage": next((event["stage"] for event in reversed(told) if event.get("stage")), None),
        "ended": None,
        "outcome": None,
        "exit_code": None,
    }
    if end is not None:
        known.update({"state": "ended", "ended": end.get("t")})
        known.update({name: end.get(name) for name in _OF_THE_END})
    elif is_at_work(directory):
        known["state"] = "at work"
    else:
        known["state"] = "killed" if os.path.exists(directory.journal) else "unknown"
    return known


_OF_THE_END = ("outcome", "exit_code", "stage", "cause", "message", "release", "ready_seconds", "downtime_seconds")


def end_in(told: list[events.Event]) -> Optional[events.Event]:
    """Return the end event of a journal; None where the run goes on or was killed."""
    return next((event for event in reversed(told) if event["event"] == events.END), None)
