"""Runs that others began: followed, cancelled, or kept from beginning."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Optional

from lamplighter.node import events, journal, relay
from lamplighter.node.events import Exit
from lamplighter.node.health import (
    serving,
)
from lamplighter.node.layout import RunDirectory, ServerHome, read_json, server_home
from lamplighter.node.system import files, lock
from lamplighter.node.verbs import history
from lamplighter.node.worker import RESERVES, is_at_work, take_place


def _forbid(home: ServerHome, request: dict[str, Any], outcome: str, code: Exit, message: str, **fields: Any) -> bool:
    """See that the run asked for never begins, if it has not; tell whether that is so, and its journal says it.

    The request that asks for it may still be on its way here, or looking at the server before it begins.
    """
    run = home.run(request["to"])
    try:
        if not take_place(run):
            return False
        about = {"host": request["host"], "server": home.name, "run": run.run_id}
        told = journal.Journal(run.journal, run.ballast, about)
    except OSError:  # nothing is sure then, and nothing is claimed
        return False
    asked = request["forbid"]
    told.write(events.run_started(asked["verb"], asked["by"], None))
    told.write(ended(outcome, code, message, serving.look(home).record, release=None, **fields))
    told.close()
    return True


def cancel(request: dict[str, Any], root: str) -> None:
    """Ask the run at work to end: before ``stop`` all stays as it is, afterwards it rolls back. Shows its events.

    An order that has been heard before only shows the run that it was for.
    """
    home = server_home(root, request["servers"][0])
    is_forbidden = request.get("forbid") and _forbid(
        home,
        request,
        "refused",
        Exit.INTERRUPTED,
        f"cancelled by {request['by']} before it began; nothing was touched",
        cause="cancelled",
        hint="deploy again when you like",
    )
    directory = _run_told(home, request.get("order"))
    if directory is not None:
        relay.follow(directory, after=int(request.get("after") or 0))
        return
    directory = home.run(request["to"]) if is_forbidden else _run_to_cancel(home, request.get("to"))
    if directory is None:
        relay.send({"event": events.RESULT, "error": _why_nothing_to_cancel(home, request.get("to"))})
        relay.send({"event": events.BYE})
        return
    files.Room.give_back = lambda: _give_back_reserve(directory)
    try:
        known = read_json(directory.cancel, orders=list) or {"by": request["by"], "t": time.time(), "orders": []}
        files.write_json(directory.cancel, {**known, "orders": [*known["orders"], request.get("order")]})
    except OSError as error:
        told = f"the node takes no writes, so the run cannot be shown: {error}"
        relay.send({"event": events.RESULT, "error": told, "hint": "make room there, then cancel again"})
        relay.send({"event": events.BYE})
        return
    relay.follow(directory, after=int(request.get("after") or 0))


def _why_nothing_to_cancel(home: ServerHome, wanted: Optional[str]) -> str:
    if not wanted:
        return f"no run of server {home.name} is at work on this node"
    if not os.path.isdir(home.run(wanted).path):
        return f"there is no run {wanted} of server {home.name} on this node"
    known = history.run_of(home.run(wanted))
    how = f"it ended {known['outcome']}" if known["state"] == "ended" else "it was killed"
    return f"run {wanted} of server {home.name} is not at work: {how}"


def _run_told(home: ServerHome, order: Optional[str]) -> Optional[RunDirectory]:
    """Return the run that has been told to end by ``order``."""
    for directory in reversed(home.all_runs()):
        if order is not None and order in (read_json(directory.cancel, orders=list) or {"orders": ()})["orders"]:
            return directory
    return None


def _give_back_reserve(directory: RunDirectory) -> bool:
    """Free the room for one record, the one that the run itself would use last."""
    for reserve in map(directory.reserve, range(RESERVES)):
        with contextlib.suppress(OSError):
            os.unlink(reserve)
            return True
    return False


def _run_to_cancel(home: ServerHome, wanted: Optional[str]) -> Optional[RunDirectory]:
    """Return the run asked for, or the one that holds the server's lock (others may wait for it), if it is at work."""
    holder = lock.holder_of(home.lock) or {}
    run_id = wanted or holder.get("run")
    for directory in reversed(home.all_runs()):
        if run_id in (None, directory.run_id) and is_at_work(directory) and not journal.has_ended(directory.journal):
            return directory
    return None


def ended(outcome: str, code: Exit, message: str, record: Optional[dict[str, Any]], **fields: Any) -> events.Event:
    known: dict[str, Any] = {"stage": None, "phase": None, "cause": None, "evidence": None, "hint": "", "durations": {}}
    release = record["release"] if record else None
    times = {"ready_seconds": None, "downtime_seconds": None}
    return events.ended(outcome, code, message, **{**known, **times, "release": release, "serving": record, **fields})


def attach(request: dict[str, Any], root: str) -> None:
    """Show a run from its first event (or from ``after``), and follow it if it is still going on.

    With ``forbid`` the run that is asked for ends here, if it has not begun: the control side has lost contact.
    """
    home = server_home(root, request["servers"][0])
    wanted = request.get("to")
    if wanted and request.get("forbid"):
        message = "contact was lost before the run began; nothing was touched"
        _forbid(home, request, "unreachable", Exit.UNREACHABLE, message, hint="run the same command again")
    runs = [run for run in home.all_runs() if not wanted or run.run_id == wanted]
    runs = [run for run in runs if os.path.exists(run.journal) or is_at_work(run)]
    at_work = (lock.holder_of(home.lock) or {}).get("run")  # not a newer one that was refused because of it
    runs = [run for run in runs if run.run_id == at_work] or runs
    if not runs:
        which = f"run {wanted}" if wanted else "run"
        relay.send({"event": events.RESULT, "error": f"no {which} of server {home.name} on this node"})
        relay.send({"event": events.BYE})
        return
    relay.follow(runs[-1], after=int(request.get("after") or 0))
