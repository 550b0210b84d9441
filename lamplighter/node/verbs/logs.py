"""The log of a server, and the log of the server that a run started. Reads only."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Optional

from lamplighter.node import confidential, events, relay
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import ServerHome, server_home


def logs(request: dict[str, Any], root: str) -> None:
    """Send the last lines of the log of what serves (or served last), or of the server that the run ``to`` started.

    And what the log gains, when asked to follow.
    """
    home = server_home(root, request["servers"][0])
    wanted = request.get("to")
    record = launcher.read_record(home)
    if wanted:
        path, why = _log_of_run(home, wanted)
    else:
        path, why = (record or {}).get("log"), "nothing has been deployed there"
    if path is None:
        relay.send({"event": events.LOG, "server": home.name, "text": "", "missing": True, "why": why})
        return
    try:
        with open(path, "rb") as file:
            hide = confidential.of_homes([home]).hide
            _send_tail(file, home.name, hide, int(request.get("lines") or 100))
            while request.get("follow"):
                data = file.read(65536)
                if data:
                    _send_text(home.name, hide, data)
                else:
                    relay.send({"event": events.BEAT})
                    time.sleep(0.25)
    except OSError as error:
        relay.send(
            {"event": events.LOG, "server": home.name, "text": "", "missing": True, "path": path, "why": error.strerror}
        )


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
