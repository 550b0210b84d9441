"""Every event as one JSON object a line, for programs; the report is the last line.

Pure ASCII (other characters are escaped), so that no locale can spoil it. See docs/json.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from lamplighter.errors import LamplighterError
from lamplighter.node import events
from lamplighter.report.output import Output
from lamplighter.report.report import Report, Seen
from lamplighter.report.wording import number, spoken


class JsonLines:
    """Writes events to ``output`` as they come, each flushed; an event that is repeated is written once."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._seen = Seen()
        self._lock = threading.Lock()

    def event(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            # Beats only keep the wire alive; a reader on this machine learns nothing from them.
            if event.get("event") != events.BEAT and self._seen.is_new(event):
                self._output.line(encode(event))

    def error(self, host: str | None, server: str | None, error: LamplighterError) -> None:
        what = f"{error.origin}: {error.what}" if error.origin else error.what
        told = {
            "event": "error",
            "host": host,
            "server": server,
            "exit_code": int(error.exit_code),
            "message": what,
            "evidence": error.why,
            "serving": error.serving,
            "hint": error.next_step,
            "t": round(time.time(), 3),
        }
        with self._lock:
            self._output.line(encode(told))

    def close(self, report: Report | None) -> None:
        if report is not None:
            with self._lock:
                self._output.line(encode(report.to_json()))


def encode(value: Mapping[str, Any]) -> str:
    """``value`` as one line of strict JSON; what JSON lacks (NaN, infinity, foreign objects) becomes null or text."""
    return spoken(json.dumps(_strict(value), separators=(",", ":"), allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float):
        return value if number(value) is not None else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
