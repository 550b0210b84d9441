"""The log of a server, and the log of the server that a run started. Reads only."""

from __future__ import annotations

import os
import time
from typing import Any, BinaryIO, Callable, Optional

from lamplighter.node import confidential, events, relay
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import ServerHome, server_home

#: How often who follows a log looks whether it is still the one.
LOOK_SECONDS = 1.0


def logs(request: dict[str, Any], root: str) -> None:
    """Send the last lines of the log of what serves (or served last), or of the server that the run ``to`` started.

    And what the log gains, when asked to follow.
    """
    home = server_home(root, request["servers"][0])
    wanted = request.get("to")
    if wanted:
        path, why = _log_of_run(home, wanted)
    else:
        path, why = _log_of_record(home), "nothing has been deployed there"
    if path is None:
        relay.send({"event": events.LOG, "server": home.name, "text": "", "missing": True, "why": why})
        return
    try:
        with open(path, "rb") as file:
            hide = confidential.of_homes([home]).hide
            _send_tail(file, home.name, hide, int(request.get("lines") or 100))
            if request.get("follow"):
                _follow(home, file, path, follows_launches=not wanted)
    except OSError as error:
        relay.send(
            {"event": events.LOG, "server": home.name, "text": "", "missing": True, "path": path, "why": error.strerror}
        )


def _log_of_record(home: ServerHome) -> Optional[str]:
    return (launcher.read_record(home) or {}).get("log")


def _follow(home: ServerHome, file: BinaryIO, path: str, *, follows_launches: bool) -> None:
    """Send what the log gains, until nobody reads it; where another one goes on in its place, say so and follow that.

    Each new launch has its own log; and somebody may rotate one, by a copy that is cut or by a new file.
    """
    hide = confidential.of_homes([home]).hide
    looked = time.monotonic()
    while True:
        data = file.read(65536)
        if data:
            _send_text(home.name, hide, data)
            continue
        relay.send({"event": events.BEAT})
        time.sleep(0.25)
        if time.monotonic() - looked < LOOK_SECONDS:
            continue
        looked = time.monotonic()
        now = _log_of_record(home) if follows_launches else path
        note = _why_elsewhere(file, path, now or path)
        late = file.read(65536) if note else b""  # what came while we looked is still of the old one
        if late:
            _send_text(home.name, hide, late)
        elif note and (fresh := _opened(now or path)) is not None:
            file, path = fresh, now or path
            hide = confidential.of_homes([home]).hide  # a new release may have secrets of its own
            relay.send({"event": events.LOG, "server": home.name, "text": "", "note": note})


def _why_elsewhere(file: BinaryIO, path: str, now: str) -> str:
    """Say why the log goes on elsewhere than in ``file``, the log at ``path``; "" where it does not."""
    if now != path:
        return f"the server was launched again, by run {os.path.basename(os.path.dirname(now))}: its log follows"
    try:
        there = os.stat(path)
    except OSError:
        return ""
    if not os.path.samestat(there, os.fstat(file.fileno())):
        return "the log was moved away: the new one follows"
    return "the log was cut: it follows from its beginning" if there.st_size < file.tell() else ""


def _opened(path: str) -> Optional[BinaryIO]:
    try:
        return open(path, "rb")
    except OSError:
        return None


def _log_of_run(home: ServerHome, wanted: str) -> tuple[Optional[str], str]:
    """Return the log of the server that a run started (of the new one, where it rolled back), or why there is none."""
    run = next((run for run in home.all_runs() if run.run_id == wanted), None)
    if run is None:
        return None, f"the node has no run {wanted} of it"
    found = [path for path in (run.launch("new").log, run.launch("old").log) if os.path.exists(path)]
    return (found[0], "") if found else (None, f"run {wanted} started no server")


def _send_tail(file: Any, name: str, hide: Callable[[Any], Any], lines: int) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - lines * 400))
    data = file.read()
    _send_text(name, hide, b"\n".join(data.split(b"\n")[-lines - 1 :]))


def _send_text(name: str, hide: Callable[[Any], Any], data: bytes) -> None:
    relay.send({"event": events.LOG, "server": name, "text": hide(data.decode("utf-8", "replace"))})
