"""Who tells the news: the protocol of a reporter and the choice between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from lamplighter.errors import LamplighterError
from lamplighter.report.jsonlines import JsonLines, encode
from lamplighter.report.lines import Lines
from lamplighter.report.output import Output
from lamplighter.report.report import Report
from lamplighter.report.summary import result


class Reporter(Protocol):
    """Tells what happens while it happens, from any thread, and never raises because of its streams.

    Give it every line of the relay, beats too: they let it say that a silent stage is still alive.
    """

    def event(self, event: Mapping[str, Any]) -> None:
        """Tell one event."""

    def error(self, host: str | None, server: str | None, error: LamplighterError) -> None:
        """Tell an error of our own about a server, a host, or (no host) the command itself."""

    def close(self, report: Report | None) -> None:
        """Say the closing words; None only leaves the terminal as it was."""


class Together:
    """Several reporters that hear the same."""

    def __init__(self, *reporters: Reporter) -> None:
        self._reporters = reporters

    def event(self, event: Mapping[str, Any]) -> None:
        for reporter in self._reporters:
            reporter.event(event)

    def error(self, host: str | None, server: str | None, error: LamplighterError) -> None:
        for reporter in self._reporters:
            reporter.error(host, server, error)

    def close(self, report: Report | None) -> None:
        for reporter in self._reporters:
            reporter.close(report)


class ResultAlone:
    """Passes on the report and nothing before it; errors are part of it."""

    def __init__(self, tell: Callable[[Report], list[str]], output: Output) -> None:
        self._tell = tell
        self._output = output

    def event(self, event: Mapping[str, Any]) -> None:
        """Nothing is told while it goes on."""

    def error(self, host: str | None, server: str | None, error: LamplighterError) -> None:
        """The report tells it."""

    def close(self, report: Report | None) -> None:
        for line in [] if report is None else self._tell(report):
            self._output.line(line)


def reporter_for(as_json: bool, stdout: TextIO | None, stderr: TextIO | None, volume: int = 0) -> Reporter:
    """With ``as_json`` stdout carries JSON alone and stderr the plain lines; else people's text goes to stdout.

    The live view needs a terminal that can move its cursor; cron, a pipe and ``TERM=dumb`` get plain lines.
    ``volume`` below 0 asks for the result alone, above 0 for plain lines that leave nothing out.
    """
    if volume < 0:
        return ResultAlone((lambda report: [encode(report.to_json())]) if as_json else result, Output(stdout))
    if as_json:
        return Together(JsonLines(Output(stdout)), Lines(Output(stderr), tells_all=volume > 0))
    output = Output(stdout)
    if volume > 0:
        return Lines(output, tells_all=True)
    if output.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown"):
        from lamplighter.report.live import Live  # rich takes a tenth of a second to load; cron does not need it

        return Live(output)
    return Lines(output)
