"""Where the time of a command went: in this process, on the wire, on the node by stage, in the server itself.

Moments are taken one after another, and what lies between two of them is one row, or is shared out to several; so the
rows add up to the whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamplighter.report.report import ServerReport
from lamplighter.report.summary import table

CONTROL, WIRE, NODE, SERVER = "control", "wire", "node", "server"
#: Stages that are this process's own.
OURS = ("verify",)


@dataclass(frozen=True)
class Row:
    """``seconds`` that were spent in one place; ``about`` is the host, or host/server, or nothing."""

    where: str
    what: str
    about: str
    seconds: float


class Timings:
    """The rows of one command, from the start of its process."""

    def __init__(self, began: float | None = None) -> None:
        self._last = _process_began() if began is None else began
        self._heard: float | None = None
        self.rows: list[Row] = []

    def spent(self, where: str, what: str, about: str = "") -> None:
        """The time since the last moment went there."""
        self._add(where, what, about, self._since_last())

    def heard(self) -> None:
        """A node has said something: the first word after a moment is one, too."""
        self._heard = self._heard or time.monotonic()

    def asked(self, about: str, on_node: float) -> None:
        """A question was answered: ``on_node`` are the seconds that the node's program took for it."""
        waited = self._since_last()
        on_node = min(on_node, waited)
        self._add(NODE, "answer", about, on_node)
        self._add(WIRE, "login, question and answer", about, waited - on_node)

    def ran(self, about: str, run: ServerReport) -> None:
        """A run came to its end: its stages say what they took, and the first word of it came when it came."""
        first = (self._heard or time.monotonic()) - self._last
        rest = self._since_last() - first
        self._add(WIRE, "request, until the first word", about, first)
        for stage in run.stages:
            seconds = stage.seconds or 0.0
            rest -= seconds
            own = min(run.ready_seconds or 0.0, seconds) if stage.name == "ready" else 0.0
            if own:
                self._add(SERVER, "getting ready", about, own)
            self._add(CONTROL if stage.name in OURS else NODE, stage.name, about, seconds - own)
        self._add(WIRE, "words that travel, and what lies between stages", about, max(0.0, rest))

    def _since_last(self) -> float:
        now = time.monotonic()
        taken, self._last, self._heard = now - self._last, now, None
        return taken

    def _add(self, where: str, what: str, about: str, seconds: float) -> None:
        self.rows.append(Row(where, what, about, round(seconds, 3)))

    def to_json(self) -> list[dict[str, Any]]:
        return [vars(row) for row in self.rows]

    def text(self) -> str:
        """The rows as a table, and what each place took in all."""
        whole = sum(row.seconds for row in self.rows) or 1.0
        shown = [(row.where, row.about, row.what, f"{row.seconds:.3f}") for row in self.rows]
        places = [(place, "", "in all", f"{taken:.3f}") for place, taken in self._by_place().items()]
        lines = table(
            ("where", "of", "what", "seconds"), [*shown, *places, ("", "", "all", f"{whole:.3f}")], right=(3,)
        )
        return "\n".join(lines)

    def _by_place(self) -> Mapping[str, float]:
        places = {
            place: [row.seconds for row in self.rows if row.where == place] for place in (CONTROL, WIRE, NODE, SERVER)
        }
        return {place: sum(taken) for place, taken in places.items() if taken}


def _process_began() -> float:
    """When this process began, by the monotonic clock; now, where the system does not tell."""
    now = time.monotonic()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(0.0, age)
