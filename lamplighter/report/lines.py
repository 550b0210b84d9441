"""Plain lines for cron, CI and log files: no colours, one line per news, nothing that moves the cursor.

Progress is throttled to what a reader of the mail wants: each new phase, every ten percent, each new kind of message
once, whatever names a process, and a sign of life after half a minute of silence. `-v` tells all that there is.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lamplighter.errors import LamplighterError
from lamplighter.node import events
from lamplighter.report.output import Output
from lamplighter.report.progress import Progress
from lamplighter.report.report import Report, Seen
from lamplighter.report.summary import summary
from lamplighter.report.wording import clean, clean_lines, clock, number, seconds, time_of_day

#: Seconds without a line about a server after which one says that it is still at work.
SIGN_OF_LIFE = 30.0

#: Stages that are over in a moment: their end is news enough.
_SHORT = ("lock", "preflight", "stage", "start", "commit")

_NUMBERS = re.compile(r"\d+")


class Lines:
    """Writes one line per news to ``output``: the time of day (UTC, the node's clock), the run's age, the news.

    ``now`` gives monotonic seconds, ``wall`` those since 1970.
    """

    def __init__(
        self,
        output: Output,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        *,
        tells_all: bool = False,
    ) -> None:
        self._output = output
        self._tells_all = tells_all
        self._now = now
        self._wall = wall
        self._warned: set[tuple[str, str]] = set()
        self._began = now()
        self._seen = Seen()
        self._told: dict[tuple[str, str], _Told] = {}
        self._lock = threading.Lock()

    def event(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            if not self._seen.is_new(event):
                return
            now = self._now()
            if event.get("event") == events.BEAT:
                self._beat(event, now)
                return
            host, server = clean(event.get("host")), clean(event.get("server"))
            told = self._told.get((host, server))
            if told is None:
                told = self._told[host, server] = _Told(Progress(host, server, now), now, self._tells_all)
            told.progress.take(event, now)
            for line in [] if self._is_repeated(event) else told.news(event):
                self._say(told, line, now)
            self._sign_of_life(told, now)

    def _is_repeated(self, event: Mapping[str, Any]) -> bool:
        """Whether this is a warning that the same host has given already, of another server or run."""
        if event.get("event") != events.WARNING:
            return False
        warning = (clean(event.get("host")), clean(event.get("message")))
        is_repeated = warning in self._warned
        self._warned.add(warning)
        return is_repeated

    def error(self, host: str | None, server: str | None, error: LamplighterError) -> None:
        with self._lock:
            name = "/".join(part for part in (clean(host), clean(server)) if part)
            for line in clean_lines(str(error)):
                times = f"{time_of_day(self._wall())}  {clock(self._now() - self._began)}"
                self._output.line(f"{times}  {name + '  ' if name else ''}ERROR {line}")

    def close(self, report: Report | None) -> None:
        if report is not None:
            with self._lock:
                for line in ["", *summary(report)]:
                    self._output.line(line)

    def _say(self, told: _Told, line: str, now: float) -> None:
        name = "/".join(part for part in (told.progress.host, told.progress.server) if part)
        stamp = told.progress.wall_clock(now)
        day = time_of_day(self._wall() if stamp is None else stamp)
        self._output.line(f"{day}  {clock(told.progress.elapsed(now))}  {name}  {line}")
        told.spoke_at = now

    def _beat(self, event: Mapping[str, Any], now: float) -> None:
        host, server = clean(event.get("host")), clean(event.get("server"))
        for (its_host, its_server), told in self._told.items():
            if its_host == host and server in ("", its_server):
                self._sign_of_life(told, now)

    def _sign_of_life(self, told: _Told, now: float) -> None:
        progress = told.progress
        if not progress.is_over and progress.stage and now - told.spoke_at >= SIGN_OF_LIFE:
            parts = [f"{progress.stage}: still at it for {seconds(progress.in_stage(now))}"]
            if progress.phase:
                percent = "" if progress.percent is None else f" {progress.percent:.0f} %"
                parts.append(f"phase {progress.phase}{percent}")
            if progress.eta:
                parts.append(f"ready in {progress.eta}")
            if progress.ranks:
                parts.append(progress.ranks)
            if progress.memory:
                parts.append(f"GPU memory {progress.memory}")
            if last := progress.news:
                parts.append(clean(last, 120))
            self._say(told, ", ".join(parts), now)


class _Told:
    """What was said about one server already, and what of an event is news."""

    def __init__(self, progress: Progress, now: float, tells_all: bool) -> None:
        self.progress = progress
        self._tells_all = tells_all
        self.spoke_at = now
        self._phase = ""
        self._tenth = 0
        self._kinds: set[str] = set()

    def news(self, event: Mapping[str, Any]) -> list[str]:
        tellers: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
            events.RUN: self._run,
            events.STAGE_START: self._stage_start,
            events.STAGE_END: self._stage_end,
            events.PROGRESS: self._progress,
            events.WARNING: self._warning,
            events.FAILURE: self._failure,
            events.END: self._end,
        }
        teller = tellers.get(str(event.get("event")), self._other)
        return teller(event)

    def _run(self, event: Mapping[str, Any]) -> list[str]:
        words = [clean(event.get("verb")) or "run"]
        if release := clean(event.get("release")):
            words.append(f"of release {release}")
        if by := clean(event.get("by")):
            words.append(f"asked for by {by}")
        if run := clean(event.get("run")):
            words.append(f"(run {run})")
        return [" ".join(words)]

    def _stage_start(self, event: Mapping[str, Any]) -> list[str]:
        self._phase, self._tenth = "", 0
        self._kinds.clear()
        stage = clean(event.get("stage")) or "?"
        return [] if stage in _SHORT and not self._tells_all else [f"{stage}: begins"]

    def _stage_end(self, event: Mapping[str, Any]) -> list[str]:
        stage = clean(event.get("stage")) or "?"
        spent = number(event.get("seconds"))
        took = "" if spent is None else seconds(spent)
        if skipped := clean(event.get("skipped")):
            return [f"{stage}: skipped, {skipped}"]
        if event.get("ok") is False:
            return [f"{stage}: FAILED after {took}" if took else f"{stage}: FAILED"]
        message = clean(event.get("message"))
        return [f"{stage}: done in {took}{', ' + message if message else ''}" if took else f"{stage}: done"]

    def _progress(self, event: Mapping[str, Any]) -> list[str]:
        progress = self.progress
        stage = clean(event.get("stage")) or progress.stage or "progress"
        message = clean(event.get("message"), 160)
        if self._tells_all:
            percent = "" if progress.percent is None else f" {progress.percent:.0f} %"
            phase = f"phase {progress.phase}{percent}" if progress.phase else ""
            said = (phase, message if message != progress.phase else "", clean(event.get("line"), 160))
            return [f"{stage}: {', '.join(word for word in said if word)}"]
        if progress.phase and progress.phase != self._phase:
            self._phase, self._tenth = progress.phase, int((progress.percent or 0) // 10)
            percent = "" if progress.percent is None else f" {progress.percent:.0f} %"
            news = "" if message in ("", progress.phase) else f", {message}"
            return [f"{stage}: phase {progress.phase}{percent}{news}"]
        if number(event.get("percent")) is not None and progress.percent is not None:
            tenth = int(progress.percent // 10)
            if tenth <= self._tenth:
                return []
            self._tenth = tenth
            return [f"{stage}: {progress.phase + ' ' if progress.phase else ''}{progress.percent:.0f} %"]
        kind = message if event.get("pids") else _NUMBERS.sub("0", message)  # one pid does not stand for another
        if not message or kind in self._kinds:
            return []
        self._kinds.add(kind)
        return [f"{stage}: {message}"]

    def _warning(self, event: Mapping[str, Any]) -> list[str]:
        lines = [f"warning: {clean(event.get('message'))}"]
        return lines + [f"  next: {line}" for line in clean_lines(event.get("hint"))]

    def _failure(self, event: Mapping[str, Any]) -> list[str]:
        stage, phase = clean(event.get("stage")), clean(event.get("phase"))
        where = stage + (f" (phase {phase})" if phase else "")
        lines = [f"{where or 'run'}: ERROR {clean(event.get('message'))}"]
        lines += [f"  why: {line}" for line in clean_lines(event.get("evidence"))]
        return lines + [f"  next: {line}" for line in clean_lines(event.get("hint"))]

    def _end(self, event: Mapping[str, Any]) -> list[str]:
        outcome = self.progress.outcome
        message = re.sub(rf"^{re.escape(outcome)}[:;,] ", "", clean(event.get("message")))
        return [f"run ended: {outcome}{', ' + message if message not in ('', outcome) else ''}"]

    def _other(self, event: Mapping[str, Any]) -> list[str]:
        # A newer node may know kinds of news that we do not: its own words are the best we have.
        return [line] if (line := clean(event.get("message"))) else []
