"""The verb ``hold``: keep every run away from a server until a certain time, or end that. Writes one small file."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from lamplighter.node.health import hold
from lamplighter.node.layout import ServerHome, server_home
from lamplighter.node.system import files
from lamplighter.node.verbs import status


def set_hold(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Put the servers asked for on hold, or end their holds, and tell how they stand; without an order only tell.

    A run that is at work goes on. ``seconds``: for how long. ``end``: end it.
    """
    homes = [server_home(root, name) for name in request["servers"]]
    return {"servers": [_hold(home, request) for home in homes]}


def _hold(home: ServerHome, request: dict[str, Any]) -> dict[str, Any]:
    before = hold.of(home)
    if request.get("end"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(home.hold)
    elif request.get("seconds"):
        now = time.time()
        files.make_directory(home.path)
        asked = hold.Hold(request["message"], request["by"], round(now, 3), round(now + request["seconds"], 3))
        files.write_json(home.hold, asked.to_json())
    found = hold.of(home)
    return {
        "name": home.name,
        "hold": None if found is None else found.to_json(),
        "ended": before.to_json() if before is not None and found is None else None,
        "run": status.run_at_work(home),
    }
