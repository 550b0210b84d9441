"""Printing servers' logs: of one as it is, of several with a name before each line, all at once while they grow."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from invoke.exceptions import Exit as Leave

from lamplighter.errors import LamplighterError, NodeRefused, UsageError
from lamplighter.inventory import Host
from lamplighter.node.events import Exit
from lamplighter.project import Project
from lamplighter.report.wording import LogText, printable
from lamplighter.run import command
from lamplighter.run.host_session import Named, begin_session

Target = tuple[Host, Named]
Write = Callable[[str], None]


def print_logs(
    settings: command.Settings,
    patterns: Sequence[str],
    server: str | None,
    lines: str,
    follow: bool,
    run: str | None = None,
) -> None:
    """Print the logs of the chosen servers: of what serves, or served last, or of what ``run`` started.

    To follow them ends with Ctrl-C, and that is no failure.
    """
    with command.guarded(settings):
        count = command.whole_number(lines, "--lines")
        targets = [(host, one) for host, servers in command.reach(settings, patterns, server) for one in servers]
        try:
            errors = _print(targets, settings.project, count, follow, run)
        except command.Interrupted as interrupted:
            if follow and interrupted.exit_code == Exit.INTERRUPTED:
                raise Leave(code=Exit.OK) from None
            raise
        if run is not None and len(errors) < len(targets):  # a run is of one server
            errors = [error for error in errors if not isinstance(error, NodeRefused)]
        for error in errors:
            command.complain(command.traced(settings, error))
        codes = {error.exit_code for error in errors} | ({Exit.OK} if len(errors) < len(targets) else set())
        if codes != {Exit.OK}:
            raise Leave(code=codes.pop() if len(codes) == 1 else Exit.MIXED)


def _print(
    targets: Sequence[Target], project: Path | Project, lines: int, follow: bool, run: str | None
) -> list[LamplighterError]:
    """Print them one after another, or all at once where they are followed; return what went wrong."""
    screen, errors = Screen(), list[LamplighterError]()

    def show(target: Target, name: str) -> None:
        host, one = target
        piece = screen.place(name)
        try:
            with begin_session(host, project) as session:
                session.logs(one, piece.write, lines, follow, run, piece.tell)
        except LamplighterError as error:
            errors.append(error)
        finally:
            piece.finish()

    names = [f"{host.name}/{one.name}" if len(targets) > 1 else "" for host, one in targets]
    if not follow or len(targets) == 1:
        for target, name in zip(targets, names, strict=True):
            show(target, name)
            if screen.is_gone:
                break
        return errors
    threads = [
        threading.Thread(target=show, args=each, daemon=True) for each in zip(targets, names, strict=True)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not screen.is_gone:
        for thread in threads:
            thread.join(0.1)
    return errors


class _ReaderGone(UsageError):
    """`logs --follow | head`: the reader has seen enough."""

    exit_code = Exit.OK


class Screen:
    """stdout, to which several logs may be written at once, each line whole."""

    def __init__(self) -> None:
        self.is_gone = False
        self._lock = threading.Lock()

    def place(self, name: str) -> Place:
        """Where the log of ``name`` is written to; the only log has no name."""
        return Place(self, name)

    def put(self, text: str) -> None:
        with self._lock:
            if text and not self.is_gone and not command.put(text):
                self.is_gone = True
        if self.is_gone:
            raise _ReaderGone("the reader of the log is gone")


class Place:
    """One log: made safe where a terminal shows it, as it is for a file or a program.

    Of several, each line has its name before it, and no colours at a terminal: they would run into the next one's.
    """

    def __init__(self, screen: Screen, name: str) -> None:
        self._screen = screen
        self._prefix = f"{name}  " if name else ""
        self._is_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._shown = LogText() if self._is_terminal and not name else None
        self._rest = ""

    def write(self, piece: str) -> None:
        if not self._prefix:
            self._screen.put(self._shown.feed(piece) if self._shown is not None else piece)
            return
        *lines, self._rest = (self._rest + piece).split("\n")
        self._screen.put("".join(map(self._line, lines)))

    def _line(self, line: str) -> str:
        shown = printable(line.rstrip("\r")) if self._is_terminal else line
        return "".join(f"{self._prefix}{each}\n" for each in shown.split("\n"))

    def tell(self, note: str) -> None:
        """Say something of the log itself, on stderr: stdout is the log."""
        command.complain(f"{self._prefix}-- {note} --")

    def finish(self) -> None:
        """Write what has not been ended by a line break, and give the terminal its colours back."""
        with contextlib.suppress(_ReaderGone):
            if self._rest:
                self._screen.put(self._line(self._rest))
            elif self._shown is not None:
                self._screen.put(self._shown.finish())
