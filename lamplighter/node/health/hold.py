"""A server on hold: somebody has asked that no run touches it until a certain time.

``hold.json`` in the server's home: ``message`` (why), ``by`` (user@machine), ``since`` and ``until`` (wall clock
seconds of this node). A hold whose time is over is none, and so is a file that is damaged.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Optional

from lamplighter.node import events
from lamplighter.node.finding import Finding
from lamplighter.node.layout import ServerHome, read_json


@dataclasses.dataclass(frozen=True)
class Hold:
    """Who holds a server, why, since when and until when."""

    message: str
    by: str
    since: float
    until: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"on hold until {_moment(self.until)}, by {self.by} since {_moment(self.since)}"


def of(home: ServerHome) -> Optional[Hold]:
    """Return the hold that is on the server now."""
    moment = (int, float)
    said = read_json(home.hold, message=str, by=str, since=moment, until=moment)
    if said is None or said["until"] <= time.time():
        return None
    return Hold(said["message"], said["by"], float(said["since"]), float(said["until"]))


def how_to_end(home: ServerHome, host: str) -> str:
    """The command line that ends the hold."""
    return f"{events.invocation('hold', host, home.name, '--end')} ends it"


def findings(home: ServerHome, host: str) -> list[Finding]:
    """Say that a deploy would be refused for it; no error of the node."""
    found = of(home)
    if found is None:
        return []
    message = f"every run is refused (exit 10): {home.name} is {found}"
    return [Finding("hold", "warning", message, found.message, how_to_end(home, host))]


def _moment(stamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(stamp))
