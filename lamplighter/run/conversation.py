"""One conversation with a node: stream the program and the request over one exec, read events until ``bye``.

Measured: four round trips from exec to first event when the node has the program cached. The command is one line
without ``!``, a backslash, an inner ``'`` or a leading assignment, so that it means the same to bash, dash, fish, csh
and tcsh. All output before the marker line (banners, noise of rc files) is kept aside. Only ``bye`` ends a
conversation: an exit status of -1, or the end of the stream, may be the death of sshd or of the wire.

What we send holds secrets, and what reads it in our program's place may print it: nothing of it is ever quoted.
"""

from __future__ import annotations

import binascii
import contextlib
import itertools
import json
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lamplighter.errors import UNTOUCHED, ContactLost, LamplighterError, NodeRefused, SilenceTimeout, Unreachable
from lamplighter.node import events
from lamplighter.node.events import Event
from lamplighter.run.payload import boot_source, pack
from lamplighter.ssh.become import sudo_refusal

if TYPE_CHECKING:
    from lamplighter.ssh.connection import Channel, Node

MARKER_SECONDS = 20.0
#: paramiko ends the channels of a wire that broke, and only then says of the connection that it is gone.
SETTLE_SECONDS = 0.3
#: Bytes that are kept of what the login shell prints, the last ones.
NOISE_LIMIT = 64 << 10
#: Bytes that are kept of a line without an end, the last ones: more than any event has.
LINE_LIMIT = 64 << 20
#: Exit statuses that speak of the interpreter: Python 2 knows no -I, or the shell could not execute it, or found none.
NO_PYTHON = (2, 126, 127)
#: The exit status of our program where it is not what we sent; its boot stage has the same.
NOT_OURS = 97
PYTHON_PATH = re.compile(r"^[A-Za-z0-9_./+-]+$")


class NoAnswer(ContactLost):
    """The request was sent over a connection that stands, and no word came back: our program may have begun."""


def converse(
    node: Node,
    python: str,
    request: Mapping[str, Any],
    on_event: Callable[[Event], None],
    on_sending: Callable[[], None] = lambda: None,
) -> Event:
    """Send ``request`` to ``node`` and hand each line to ``on_event``, heartbeats too; return the ``bye``.

    Calls ``on_sending`` before the first byte of the request leaves. Raises Unreachable or NodeRefused where it is sure
    that nothing was done there, and nothing will be; ContactLost once the node may be at work, NoAnswer among them.
    """
    if not PYTHON_PATH.match(python):
        raise NodeRefused(
            f"ansible_python_interpreter is {python!r}",
            why="every login shell must read it alike, so it may hold letters, digits and _ . / + - alone",
            next_step="make a symbolic link with a plain name and give that",
        )
    with _nothing_sent(node):
        node.refuse_sudo_that_logs_input()
    nonce = secrets.token_hex(8)
    runner = pack()
    boot = boot_source(nonce)
    sudo = "sudo -n -H " if node.spec.become else ""
    # Python quotes what it cannot read: it gets to read nothing but what we sent.
    program = (
        f"import sys,binascii;b=sys.stdin.buffer.read({len(boot)});"
        f"binascii.crc32(b)=={binascii.crc32(boot)} or sys.exit({NOT_OURS});exec(b)"
    )
    command = f"""exec /bin/sh -c 'exec {sudo}{python} -I -S -c "{program}"'"""
    data = boot + _frame(json.dumps({**request, "runner": runner.digest}).encode())
    sent = _Sent(data, request.get("secrets", {}).values())
    with _nothing_sent(node):
        channel = node.stream(command)
    try:
        on_sending()
        channel.write(data)
        lines = _Lines(channel)
        if _await_marker(node, python, lines, nonce, sent) == "need":
            channel.write(_frame(runner.data))
        return _read_events(node, lines, nonce, sent, on_event)
    finally:
        channel.close()


@contextlib.contextmanager
def _nothing_sent(node: Node) -> Iterator[None]:
    """No request is on its way yet, so nothing goes on without us: lost contact is a node that cannot be reached."""
    try:
        yield
    except ContactLost as lost:
        raise Unreachable(
            lost.what,
            why=lost.why,
            serving=UNTOUCHED,
            next_step=f"look how long `{node.ssh_line}` takes, and there `sudo -n -l`"
            if node.spec.become
            else "run the same command again",
        ) from lost


def _frame(data: bytes) -> bytes:
    return b"%d\n" % len(data) + data


class _Sent:
    """What was sent to a node, known again in what comes back."""

    #: Characters of a secret that give it away; of all else, which has words of any message; a line that is all ours.
    PART, PIECE, LINE = 6, 32, 12

    def __init__(self, data: bytes, values: Iterable[str]) -> None:
        self._text = text = data.decode("utf-8", "replace")
        secret = {form for value in values for form in (value, json.dumps(value)[1:-1]) if value}
        self._short = {value for value in secret if len(value) < self.PART}
        self._known = {
            self.PART: {part for value in secret for part in _parts(value, self.PART)},
            self.PIECE: {text[start : start + self.PIECE] for start in range(0, len(text), self.PIECE)},
        }

    def quotable(self, text: str) -> str:
        """Return ``text`` up to the first line that repeats what we sent: who does that goes on with it."""
        lines = text.splitlines()
        others = list(itertools.takewhile(lambda line: not self._is_in(line), lines))
        return "\n".join(others if len(others) == len(lines) else [*others, "(here it repeats what we sent)"])

    def _is_in(self, line: str) -> bool:
        return (
            any(value in line for value in self._short)
            or any(part in known for size, known in self._known.items() for part in _parts(line, size))
            or (len(line.strip()) >= self.LINE and line.strip() in self._text)
        )


def _parts(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(len(text) - size + 1))


class _Lines:
    """Cuts what the channel yields into lines, and knows how long it has been silent."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rest = bytearray()  # what came of the next line
        self._ready: deque[bytes] = deque()

    def next(self, timeout: float, deadline: float = math.inf) -> bytes | None:
        """Return the next line, or None at the end of the stream.

        Raises SilenceTimeout after ``timeout`` seconds without a word, and after ``deadline`` whatever comes.
        """
        while (left := deadline - time.monotonic()) > 0:
            if self._ready:
                return self._ready.popleft()
            data = self.channel.read(min(timeout, left))
            if not data:
                return None
            first, *others = data.split(b"\n")
            self.rest += first
            for line in others:
                self._ready.append(bytes(self.rest))
                self.rest[:] = line
            del self.rest[:-LINE_LIMIT]
        raise SilenceTimeout("the time is up")


def _await_marker(node: Node, python: str, lines: _Lines, nonce: str, sent: _Sent) -> str:
    prefix = _marker(nonce)
    deadline = time.monotonic() + MARKER_SECONDS
    noise = bytearray()
    while True:
        try:
            line = lines.next(MARKER_SECONDS, deadline)
        except SilenceTimeout as error:
            if not node.is_alive:
                raise _lost(lines.channel, sent) from error
            raise NoAnswer(
                f"{node.name} did not start our program within {MARKER_SECONDS:.0f} s",
                why=_quote_noise(noise + lines.rest[-NOISE_LIMIT:], sent)
                or "nothing came back: the login shell is slow, an rc file of it reads stdin, or a jump host lost it",
                next_step=f"look at what `{node.ssh_line} true` does, and how long it takes",
            ) from error
        except NodeRefused as error:
            if not _stays_alive(node):
                raise _lost(lines.channel, sent) from error
            raise
        if line is None:
            raise _no_marker(node, python, lines.channel, noise, sent)
        if line.startswith(prefix):
            word, _, detail = line[len(prefix) :].decode("utf-8", "replace").partition(" ")
            if word in ("have", "need"):
                return word
            raise _refusal(node, word, detail.strip())
        noise += line + b"\n"
        del noise[:-NOISE_LIMIT]


def _stays_alive(node: Node) -> bool:
    """Tell whether the connection stands, when a channel of it has just ended."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while node.is_alive and time.monotonic() < deadline:
        time.sleep(0.01)
    return node.is_alive


def _marker(nonce: str) -> bytes:
    return f"@@lamplighter {nonce} ".encode()


def _refusal(node: Node, word: str, detail: str) -> NodeRefused:
    if word == "python":
        return NodeRefused(
            f"{node.name} has Python {detail}; the node side needs 3.9 or newer",
            next_step="name a newer one with the host variable ansible_python_interpreter",
        )
    return NodeRefused(
        f"{node.name} refused our root directory", why=detail, next_step="fix it, or set the host variable root"
    )


def _lost(channel: Channel, sent: _Sent) -> ContactLost:
    lost = channel.lost()
    lost.why = sent.quotable(lost.why)
    return lost


def _no_marker(node: Node, python: str, channel: Channel, noise: bytearray, sent: _Sent) -> LamplighterError:
    """What to say of a stream that ended without our marker: only an exit status proves that the node ended it."""
    if channel.exit_status is None or not _stays_alive(node):
        return _lost(channel, sent)
    if channel.exit_status == NOT_OURS:
        return NodeRefused(
            f"{node.name}: something on the way took the beginning of our input",
            why="the login shell, or an rc file of it, reads standard input",
            serving=UNTOUCHED,
            next_step=f"`echo all | {node.ssh_line} cat` has to print all: fix the shell in /etc/passwd, or its rc "
            "files",
        )
    stderr = sent.quotable(channel.read_stderr().decode("utf-8", "replace").strip())
    if node.spec.become:
        refusal = sudo_refusal(node.name, node.user, stderr.encode(), channel.exit_status)
        if refusal is not None:
            return refusal
    why = "; ".join(part for part in (stderr[-500:], _quote_noise(noise, sent)) if part)
    if channel.exit_status not in NO_PYTHON:
        return NodeRefused(
            f"{node.name}: the login ended before our program began (exit status {channel.exit_status})",
            why=why or "the login shell ended without a word",
            next_step=f"see whether `{node.ssh_line} {python} -V` works: the shell in /etc/passwd, its rc files, "
            "a ForceCommand in sshd_config or that Python end it",
        )
    return NodeRefused(
        f"{node.name}: python3 could not be started (exit status {channel.exit_status})",
        why=why,
        next_step="install python3 >= 3.9 there, or name one with the host variable ansible_python_interpreter",
    )


def _quote_noise(noise: bytearray, sent: _Sent) -> str:
    said = sent.quotable(noise.decode("utf-8", "replace"))
    text = " | ".join(line for line in said.splitlines() if line.strip())[-300:]
    return f"the login shell printed: {text}" if text else ""


def _read_events(node: Node, lines: _Lines, nonce: str, sent: _Sent, on_event: Callable[[Event], None]) -> Event:
    while True:
        try:
            line = lines.next(events.SILENCE_SECONDS)
        except SilenceTimeout as error:
            raise ContactLost(
                f"{node.name} has been silent for {events.SILENCE_SECONDS:.0f} s",
                why="the wire is cut or the node hangs",
            ) from error
        if line is None:
            raise _lost(lines.channel, sent)
        if not line:
            continue
        if line.startswith(_marker(nonce)):  # the program could not be unpacked
            word, _, detail = line[len(_marker(nonce)) :].decode("utf-8", "replace").partition(" ")
            raise _refusal(node, word, detail.strip())
        event = _event_in(line)
        if event is None:
            continue
        if event["event"] == events.BYE:
            return event
        on_event(event)


def _event_in(line: bytes) -> Event | None:
    """Read one line; None where somebody else wrote it to the channel: a background job of an rc file does."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and isinstance(said.get("event"), str) else None
