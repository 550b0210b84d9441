"""Runs checks in a process of their own, which asks the node through this one.

A check may do to its process what it likes: leave it, crash it, hang in it, change what all of it shares. This process
keeps the connection and takes down every result when it is there, so that none is lost; what ends the other one before
its end is told of the check that was running. pytest takes half a second to import: `begin` does that beforehand, while
a login travels or a server gets ready.

The two talk over a socket, one JSON text a line: `lamplighter.run.checks` is the other end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeAlias

from lamplighter.errors import LamplighterError, UsageError
from lamplighter.run.outcome import ERROR, OVERDUE, CheckResult, Collected, unfinished, unreadable

if TYPE_CHECKING:
    from lamplighter.ssh.connection import CommandResult, CommandTimedOut, TooMuchOutput

#: Runs the other end with the places of modules that this process has, and none besides.
PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from lamplighter.run import checks; checks.main(%d)"
#: A check that is overdue is ended by a signal in its own process; one that no signal reaches is given so much more.
GRACE_SECONDS = 30.0
#: Between two looks whether a process that says nothing is still there: another one may have its socket open.
LOOK_SECONDS = 0.5


Found: TypeAlias = "CommandResult | CommandTimedOut | TooMuchOutput"


class Node(Protocol):
    """What is asked for the checks."""

    def connect(self) -> Mapping[str, Found]:
        """Wait until the node can be asked; return what came of commands that were run ahead."""

    def facts(self) -> Mapping[str, Any]:
        """Ask the node's program all that it knows."""

    def run_all(self, commands: Sequence[str], seconds: float | None) -> Sequence[Found]:
        """Run all ``commands``, together; none shall take longer than ``seconds``."""


class Inspector:
    """A process that runs the checks of one server, once."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._said: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        program = PROGRAM % theirs.fileno()
        dropped = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")  # meant for another pytest
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps([path for path in sys.path if path])],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
                env={name: value for name, value in os.environ.items() if name not in dropped},
                start_new_session=True,  # Ctrl-C is for this process, which then ends that one
            )
        self._socket = ours
        self._pending = b""

    def send(self, message: object) -> None:
        """Say something to it; what one that has ended cannot hear is dropped."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, patience: float) -> Any:
        """Return what it says next; None where it has ended, or says nothing for ``patience`` seconds."""
        until = time.monotonic() + patience
        while b"\n" not in self._pending:
            left = until - time.monotonic()
            is_there = self._process.poll() is None
            if not select.select([self._socket], [], [], max(0.0, min(LOOK_SECONDS, left)) if is_there else 0.0)[0]:
                if not is_there or left <= 0:
                    return None
                continue
            try:
                piece = self._socket.recv(1 << 20)
            except ConnectionResetError:
                piece = b""
            if not piece:
                return None
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def ending(self) -> str:
        """End it, and say how it has ended where it had."""
        try:
            self._process.wait(1.0)  # its socket may have been closed just before
        except subprocess.TimeoutExpired:
            return "the process of the checks hung, and was killed"
        status = self._process.returncode
        said = self._last_words()
        how = f"left with exit status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
        return f"the process of the checks {how}" + (f": {said}" if said else "")

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read()[-10_000:].decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """End it, with what it has started and left behind."""
        self._socket.close()
        if self._process.returncode is None:  # its number is nobody else's yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._said.close()


class Inspectors:
    """Has the next `Inspector` at hand: one that was begun beforehand has imported already what takes time.

    ``expected`` is how many will be wanted one after another: when one is taken the next begins.
    """

    def __init__(self, expected: int = 1) -> None:
        self._expected = expected
        self._begun: Inspector | None = None

    def begin(self) -> None:
        """Begin one, unless that is done."""
        self._begun = self._begun or Inspector()

    def take(self) -> Inspector:
        """Return the one that is begun, or begin one; whoever takes it closes it."""
        begun, self._begun = self._begun or Inspector(), None
        self._expected -= 1
        if self._expected > 0:
            self.begin()
        return begun

    def close(self) -> None:
        """End one that nobody has taken."""
        if self._begun is not None:
            self._begun.close()
        self._begun = None


@dataclasses.dataclass
class _Progress:
    """How far an `Inspector` has come: what it knows of each check, the results, and what is going on."""

    known: dict[str, Collected] = dataclasses.field(default_factory=dict)
    results: dict[str, list[CheckResult]] = dataclasses.field(default_factory=dict)
    used: Sequence[str] = ()
    running: str = ""
    reading: str = ""
    finished: list[CheckResult] | None = None

    def hear(self, what: str, said: Sequence[Any]) -> None:
        if what == "known":
            self.known = {node_id: Collected(*each) for node_id, each in said[0].items()}
        elif what == "result":
            self.results.setdefault(said[0], []).append(CheckResult(**said[1]))
            self.used = said[2]
        elif what == "running":
            self.running = said[0]
        elif what == "reading":
            self.reading = said[0]
        elif what == "finished":
            self.finished = [CheckResult(**each) for each in said[0]]

    def not_run(self) -> list[str]:
        return [known.name for node_id, known in self.known.items() if node_id not in self.results]


def inspect(node: Node, order: Mapping[str, Any], inspectors: Inspectors) -> list[CheckResult]:
    """Run the checks that ``order`` says (see `lamplighter.run.checks.Order`); return what each found.

    A check, or a file, whose process ends before its end is an error, and another process runs the rest; where nobody
    can be blamed the rest is named. Raises UsageError for an ``only`` that is no expression, and what ``node`` raises.
    """
    results: list[CheckResult] = []
    rest = {"done": [], "unread": [], "used": [], **order}
    while True:
        inspector = inspectors.take()
        try:
            progress = _converse(inspector, node, rest)
            if progress.finished is not None:
                return results + progress.finished
            why = inspector.ending()
        finally:
            inspector.close()
        results += [result for found in progress.results.values() for result in found]
        rest["done"] = [*rest["done"], *progress.results]
        rest["used"] = [*progress.used]
        if progress.reading and progress.reading not in rest["unread"]:
            rest["unread"] = [*rest["unread"], progress.reading]
            results.append(unreadable(progress.reading, ERROR, why))
        elif progress.running in progress.known:
            rest["done"].append(progress.running)
            results.append(progress.known[progress.running].result(ERROR, why))
        else:
            return [*results, unfinished(why, progress.not_run())]


def _converse(inspector: Inspector, node: Node, order: Mapping[str, Any]) -> _Progress:
    """Answer what the checks ask until they are through, or their process is."""
    patience = float(order["limits"][OVERDUE]) + GRACE_SECONDS
    answers: dict[str, Callable[..., Any]] = {
        "connect": lambda: {command: _told(each) for command, each in node.connect().items()},
        "facts": node.facts,
        "run": lambda commands, seconds: [_told(each) for each in node.run_all(commands, seconds)],
    }
    progress = _Progress()
    inspector.send(order)
    if not order["only"]:  # the shipped checks want the facts: they are asked for while the check files are read
        node.connect()
        facts = node.facts()
        answers["facts"] = lambda: facts
    while progress.finished is None and (message := inspector.receive(patience)) is not None:
        what, *said = message
        if what in answers:
            inspector.send([said[0], answers[what](*said[1:])])
        elif what == "refused":
            raise UsageError(said[0], next_step=said[1])
        else:
            progress.hear(what, said)
    return progress


def _told(found: Found) -> Any:
    """A command's result as JSON takes it: bytes as the characters of their numbers."""
    if isinstance(found, LamplighterError):
        return found.what
    return [found.exit_status, found.stdout.decode("latin-1"), found.stderr.decode("latin-1")]
