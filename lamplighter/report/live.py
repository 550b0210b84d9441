"""A live view for a person at a terminal: each server's stages, the current phase with its bar, the last log line.

It is drawn in place and vanishes at the end; failures, warnings and the closing summary stay on the screen.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live as RichLive
from rich.text import Text

from lamplighter.errors import LamplighterError
from lamplighter.node import events
from lamplighter.node.events import Exit
from lamplighter.report.output import Output
from lamplighter.report.progress import Progress
from lamplighter.report.report import Report, Seen, is_of_a_run
from lamplighter.report.summary import summary
from lamplighter.report.wording import clean, clean_lines, clock

_BAR, _SHORTEST_BAR = 16, 6
#: Of one server at the most.
_LINES = 6


class Live:
    """Draws on ``output``, a terminal, from the first event on; tests give their own ``console`` and ``now``."""

    def __init__(
        self, output: Output, console: Console | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console(
            file=cast("IO[str]", output),
            highlight=False,
            markup=False,
            emoji=False,
            no_color=True if os.environ.get("NO_COLOR") else None,
        )
        self._now = now
        self._seen = Seen()
        self._warned: set[tuple[str, str]] = set()
        self._servers: dict[tuple[str, str], Progress] = {}
        self._lock = threading.RLock()
        self._live: RichLive | None = None

    def event(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            kind = event.get("event")
            if not is_of_a_run(event) or not self._seen.is_new(event):
                return
            host, server, now = clean(event.get("host")), clean(event.get("server")), self._now()
            if (host, server) not in self._servers:
                self._servers[host, server] = Progress(host, server, now)
            self._servers[host, server].take(event, now)
            self._begin()
            name = "/".join(part for part in (host, server) if part)
            if kind == events.WARNING and (host, clean(event.get("message"))) not in self._warned:
                self._warned.add((host, clean(event.get("message"))))
                self._keep(f"{name}  warning: {clean(event.get('message'))}", "yellow")
            elif kind == events.FAILURE:
                self._keep(f"{name}  {clean(event.get('stage'))}: ERROR {clean(event.get('message'))}", "red")
                for line in clean_lines(event.get("evidence")):
                    self._keep(f"  why: {line}", "red")

    def error(self, host: str | None, server: str | None, error: LamplighterError) -> None:
        with self._lock:
            name = "/".join(part for part in (clean(host), clean(server)) if part)
            for index, line in enumerate(clean_lines(str(error))):
                self._keep((f"{name}  " if name and index == 0 else "") + line, "red")

    def close(self, report: Report | None) -> None:
        with self._lock:
            self._end()
            if report is None:
                return
            first, *rest = summary(report, self._console.width)
            style = "bold green" if report.exit_code == Exit.OK else "bold red"
            self._keep(first, style)
            for line in rest:
                self._keep(line, "")

    def view(self) -> View:
        """What is on the screen now."""
        return View(list(self._servers.values()), self._now())

    def _keep(self, line: str, style: str) -> None:
        self._console.print(Text(line, style=style), soft_wrap=True)

    def _begin(self) -> None:
        if self._live is None:
            # rich redirects sys.stdout to itself by default: our streams are not sys.stdout.
            self._live = RichLive(
                get_renderable=self.view,
                console=self._console,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
            atexit.register(self._end)  # gives the cursor back, whatever ends us

    def _end(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            atexit.unregister(self._end)


class View:
    """The drawing of some servers at one moment; one line a server where they do not all fit."""

    def __init__(self, servers: list[Progress], now: float) -> None:
        self._servers = servers
        self._now = now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        is_plain = options.ascii_only
        has_room = _LINES * len(self._servers) < console.height
        for progress in self._servers:
            for line in self._full(progress, options) if has_room else self._short(progress):
                line.no_wrap = True
                # The ellipsis is not ASCII: where it cannot be shown its stand-in would be too wide.
                line.truncate(options.max_width, overflow="crop" if is_plain else "ellipsis")
                yield line

    def _full(self, progress: Progress, options: ConsoleOptions) -> Iterator[Text]:
        yield self._head(progress)
        if progress.past:
            yield _stages(progress, options.max_width)
        if progress.stage:
            current, rest = self._current(progress, options.ascii_only, options.max_width)
            yield current
            if rest:
                yield Text(f"  {'  '.join(rest)}")
            if progress.ranks:
                yield Text(f"  {progress.ranks}", style="yellow")
            if last := progress.news:
                yield Text(f"  {last}", style="dim")

    def _short(self, progress: Progress) -> Iterator[Text]:
        line = self._head(progress)
        if progress.stage:
            percent = "" if progress.percent is None else f" {progress.percent:.0f}%"
            line.append(f"  {progress.stage} {progress.phase}{percent}".rstrip())
        yield line

    def _head(self, progress: Progress) -> Text:
        name = "/".join(part for part in (progress.host, progress.server) if part)
        style = "bold red" if progress.has_failed else "bold"
        line = Text(name, style=style)
        line.append(f"  {progress.verb}" if progress.verb else "", style="not bold")
        line.append(f" {progress.release}" if progress.release else "", style="not bold")
        line.append(f"  {progress.outcome}" if progress.outcome else f"  {clock(progress.elapsed(self._now))}")
        return line

    def _current(self, progress: Progress, is_plain: bool, width: int) -> tuple[Text, list[str]]:
        """The line of the stage, and what it has no room for: how long it takes yet is the last to go."""
        line = Text(f"  {progress.stage}", style="cyan")
        if progress.phase:
            line.append(f"  {progress.phase}")
        ready = f"  ready in {progress.eta}" if progress.eta else ""
        more = [f"{progress.phase} {progress.phase_eta} more"] if progress.phase_eta else []
        more += [f"GPU memory {progress.memory}"] if progress.memory else []
        time_in_stage = f"  {clock(progress.in_stage(self._now))}"
        if progress.percent is not None:
            percent = f" {progress.percent:3.0f}%"
            bar = min(_BAR, width - line.cell_len - 2 - len(percent) - len(time_in_stage) - len(ready))
            if bar >= _SHORTEST_BAR:
                full = round(bar * progress.percent / 100)
                done, left = ("#", "-") if is_plain else ("\u2501", "\u2500")
                line.append(f"  {done * full}{left * (bar - full)}")
            line.append(percent)
        line.append(f"{time_in_stage}{ready}")
        while more and line.cell_len + 2 + len(more[0]) <= width:
            line.append(f"  {more.pop(0)}")
        return line, more


def _stages(progress: Progress, width: int) -> Text:
    """The stages that are over; where they do not all fit, the latest ones."""
    line = Text()
    for stage in reversed(progress.past):
        if stage.skipped:
            told = Text(f" {stage.name} -", style="dim")
        elif stage.ok:
            told = Text(f" {stage.name} {stage.seconds:.1f}", style="green")
        else:
            told = Text(f" {stage.name} FAILED", style="bold red")
        if line and told.cell_len + line.cell_len + 1 > width:
            break
        line = told + line
    return Text(" ") + line
