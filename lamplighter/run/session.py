"""One conversation with a node: stream the program and the request over one exec, read events until ``bye``.

Measured: four round trips from exec to first event when the node has the program cached. The command is one line
without ``!``, a backslash, an inner ``'`` or a leading assignment, so that it means the same to bash, dash, fish, csh
and tcsh. All output before the marker line (banners, noise of rc files) is kept aside. Only ``bye`` ends a
conversation: an exit status of -1, or the end of the stream, may be the death of sshd or of the wire.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lamplighter.errors import UNTOUCHED, ContactLost, LamplighterError, NodeRefused, Unreachable
from lamplighter.node import events
from lamplighter.node.events import Event
from lamplighter.run.become import sudo_refusal
from lamplighter.run.runner import boot_source, pack
from lamplighter.run.ssh import Channel, Node, SilenceTimeout

MARKER_SECONDS = 20.0
#: paramiko ends the channels of a wire that broke, and only then says of the connection that it is gone.
SETTLE_SECONDS = 0.3
#: Exit statuses that speak of the interpreter: Python 2 knows no -I, or the shell could not execute it, or found none.
NO_PYTHON = (2, 126, 127)
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
    command = (
        f"""exec /bin/sh -c 'exec {sudo}{python} -I -S -c "import sys;exec(sys.stdin.buffer.read({len(boot)}))"'"""
    )
    body = json.dumps({**request, "runner": runner.digest}).encode()
    with _nothing_sent(node):
        channel = node.stream(command)
    try:
        on_sending()
        channel.write(boot + _frame(body))
        lines = _Lines(channel)
        if _await_marker(node, python, lines, nonce) == "need":
            channel.write(_frame(runner.data))
        return _read_events(node, lines, nonce, on_event)
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


class _Lines:
    """Cuts what the channel yields into lines, and knows how long it has been silent."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._rest = b""
        self._ready: list[bytes] = []

    def next(self, timeout: float) -> bytes | None:
        """Return the next line, or None at the end of the stream. Raises SilenceTimeout after ``timeout`` seconds."""
        while not self._ready:
            data = self.channel.read(timeout)
            if not data:
                return None
            *self._ready, self._rest = (self._rest + data).split(b"\n")
        return self._ready.pop(0)


def _await_marker(node: Node, python: str, lines: _Lines, nonce: str) -> str:
    prefix = _marker(nonce)
    deadline = time.monotonic() + MARKER_SECONDS
    noise: list[str] = []
    while True:
        try:
            line = lines.next(max(0.1, deadline - time.monotonic()))
        except SilenceTimeout as error:
            if not node.is_alive:
                raise lines.channel.lost() from error
            raise NoAnswer(
                f"{node.name} did not start our program within {MARKER_SECONDS:.0f} s",
                why=_quote_noise(noise)
                or "nothing came back: the login shell is slow, an rc file of it reads stdin, or a jump host lost it",
                next_step=f"look at what `{node.ssh_line} true` does, and how long it takes",
            ) from error
        except NodeRefused as error:
            if not _stays_alive(node):
                raise lines.channel.lost() from error
            raise
        if line is None:
            raise _no_marker(node, python, lines.channel, noise)
        if line.startswith(prefix):
            word, _, detail = line[len(prefix) :].decode("utf-8", "replace").partition(" ")
            if word in ("have", "need"):
                return word
            raise _refusal(node, word, detail.strip())
        noise.append(line.decode("utf-8", "replace"))


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
        f"{node.name} refused our root directory", why=detail, next_step="mend it, or set the host variable root"
    )


def _no_marker(node: Node, python: str, channel: Channel, noise: list[str]) -> LamplighterError:
    """What to say of a stream that ended without our marker: only an exit status proves that the node ended it."""
    if channel.exit_status is None or not _stays_alive(node):
        return channel.lost()
    stderr = channel.read_stderr().decode("utf-8", "replace").strip()
    if node.spec.become:
        refusal = sudo_refusal(node.name, node.user, stderr.encode(), channel.exit_status)
        if refusal is not None:
            return refusal
    why = "; ".join(part for part in (stderr[-500:], _quote_noise(noise)) if part)
    if channel.exit_status not in NO_PYTHON:
        return NodeRefused(
            f"{node.name}: the login ended before our program began (exit status {channel.exit_status})",
            why=why or "the login shell ended without a word",
            next_step=f"see whether `{node.ssh_line} {python} -V` works: the shell in /etc/passwd, its rc files or "
            "that Python end it",
        )
    return NodeRefused(
        f"{node.name}: python3 could not be started (exit status {channel.exit_status})",
        why=why,
        next_step="install python3 >= 3.9 there, or name one with the host variable ansible_python_interpreter",
    )


def _quote_noise(noise: list[str]) -> str:
    text = " | ".join(line for line in noise if line.strip())[-300:]
    return f"the login shell printed: {text}" if text else ""


def _read_events(node: Node, lines: _Lines, nonce: str, on_event: Callable[[Event], None]) -> Event:
    while True:
        try:
            line = lines.next(events.SILENCE_SECONDS)
        except SilenceTimeout as error:
            raise ContactLost(
                f"{node.name} has been silent for {events.SILENCE_SECONDS:.0f} s",
                why="the wire is cut or the node hangs",
            ) from error
        if line is None:
            raise lines.channel.lost()
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
