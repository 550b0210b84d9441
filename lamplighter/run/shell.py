"""A shell on the node for many commands: on a connection that is open already, jump hosts and become included.

All commands go through one channel, so that each costs one round trip. Its input carries one line a command; on both
outputs a mark with a random name ends what the command said, so that any bytes may come before it.

facts: over SSH a command in a channel of its own costs three round trips, testinfra's own ssh backend a connection.
"""

from __future__ import annotations

import re
import secrets
import shlex
import threading
import time
from collections.abc import Sequence
from typing import Any

from lamplighter.errors import LamplighterError, SessionRefused, SilenceTimeout
from lamplighter.ssh.become import sudo_refusal
from lamplighter.ssh.connection import (
    OUTPUT_LIMIT,
    Channel,
    CommandResult,
    CommandTimedOut,
    Node,
    TooMuchOutput,
    prompt_threads,
)

COMMAND_SECONDS = 60.0
#: For the shell to begin: a login with slow rc files, and sudo.
START_SECONDS = 20.0
#: How often we look whether the end of stderr has come when that of stdout has.
PAUSE_SECONDS = 0.001

#: Kills a process and all below it, it first so that it starts nothing new. The shell on the other channel is killed
#: so, with what hangs in it. No process group: it may be shared with the server that let us in.
KILL_TREE = (
    "k() { set -- $1 $(cat /proc/$1/task/$1/children 2>/dev/null); kill -9 $1 2>/dev/null; shift;"
    ' for c in "$@"; do k $c; done; }; k'
)


class Shell:
    """One ``/bin/sh`` on the node that runs commands one after another, each in a shell of its own.

    ``commands`` counts them. A command that does not end in time costs its shell; the next one gets another. One thread
    at a time runs commands; only `begin` has one of its own.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._channel: Channel | None = None
        self._pid = 0
        self._mark = b""
        self._out = bytearray()
        self._err = bytearray()
        self._beginning: threading.Thread | None = None
        self._trouble: BaseException | None = None
        self.commands = 0
        #: What came of the commands that it began with.
        self.known: dict[str, CommandResult | CommandTimedOut | TooMuchOutput] = {}
        #: What ended the conversation for good; every later command fails with it.
        self.broken: LamplighterError | None = None

    def begin(self, first: Sequence[str] = ()) -> None:
        """Log in, where that is not done, and begin beside whatever the caller has to do before the next command.

        ``known`` then tells what came of the ``first`` ones.
        """
        name = f"shell of {self._node.name}"
        self._beginning = threading.Thread(target=self._begin_beside, args=(first,), name=name, daemon=True)
        self._beginning.start()

    def open(self) -> None:
        """Wait until the shell is asked for. Raises what keeps the login, or a channel, from being had."""
        beginning, self._beginning = self._beginning, None
        if beginning is not None:
            beginning.join()
        trouble = self._trouble or self.broken
        if trouble is not None:
            raise trouble
        if self._channel is None:
            self._open()

    def stands(self) -> bool:
        """Wait until it is asked for, and tell whether it is, on a connection that is there."""
        try:
            self.open()
        except LamplighterError:
            return False
        return self._node.is_alive

    def _begin_beside(self, first: Sequence[str]) -> None:
        try:
            self._node.open()
            with prompt_threads():
                self._open()
            if first:
                self.known = dict(zip(first, self._run_all(first, COMMAND_SECONDS), strict=True))
        except BaseException as error:  # told by `open`
            self._trouble = error

    def run(self, command: str, timeout: float = COMMAND_SECONDS) -> CommandResult:
        """Run ``command`` with ``/bin/sh -c``, without input.

        Raises CommandTimedOut, TooMuchOutput, ContactLost, Unreachable.
        """
        (found,) = self.run_all([command], timeout)
        if isinstance(found, LamplighterError):
            raise found
        return found

    def run_all(
        self, commands: Sequence[str], seconds: float | None = None
    ) -> list[CommandResult | CommandTimedOut | TooMuchOutput]:
        """Run ``commands`` one after another, sent together, so that all cost one round trip.

        Each may take ``seconds``, and COMMAND_SECONDS at most. One that does not end, or says too much, has an error in
        its place. Raises ContactLost, Unreachable.
        """
        self.open()
        return self._run_all(commands, COMMAND_SECONDS if seconds is None else min(seconds, COMMAND_SECONDS))

    def _run_all(
        self, commands: Sequence[str], timeout: float
    ) -> list[CommandResult | CommandTimedOut | TooMuchOutput]:
        self.commands += len(commands)
        found: list[CommandResult | CommandTimedOut | TooMuchOutput] = []
        while len(found) < len(commands):
            try:
                self._run_rest(commands, found, timeout)
            except (CommandTimedOut, TooMuchOutput) as error:
                found.append(error)
                self._give_up()
            except LamplighterError as error:
                self.broken = error
                self.close()
                raise
            except BaseException:  # interrupted: the next command must not take this one's output for its own
                self.close()
                raise
        return found

    def _run_rest(self, commands: Sequence[str], found: list[Any], timeout: float) -> None:
        """Send those of ``commands`` that nothing was found of yet, and add what comes of each."""
        if self._channel is None:
            self._open()
        assert self._channel is not None
        self._channel.write(b"".join(map(self._line, commands[len(found) :])))
        if not self._pid:
            self._await_beginning(self._channel)
        while len(found) < len(commands):
            found.append(self._result(self._channel, commands[len(found)], timeout))

    def close(self) -> None:
        """End the shell."""
        if self._channel is not None:
            self._channel.close_write()
            self._channel.close()
        self._channel = None
        self._pid = 0
        self._out.clear()
        self._err.clear()

    def _open(self) -> None:
        """Open the channel, and have the shell say when it begins: rc files may have written before.

        Its word is waited for together with the first command's, which travels with it.
        """
        self._mark = f"lamplighter-{secrets.token_hex(12)}".encode()
        self._channel = channel = self._node.stream(self._node.wrap("exec /bin/sh"))
        self._node.lend(self.close)
        mark = self._mark.decode()
        channel.write(
            f"LC_ALL=C; export LC_ALL; printf '%s begin %d\\n' {mark} $$; printf '%s begin\\n' {mark} >&2\n".encode()
        )

    def _line(self, command: str) -> bytes:
        mark = self._mark.decode()
        quoted = shlex.quote(command)
        line = f"/bin/sh -c {quoted} </dev/null; printf '\\n%s %d\\n' {mark} $?; printf '\\n%s\\n' {mark} >&2\n"
        return line.encode("utf-8", "surrogateescape")

    def _await_beginning(self, channel: Channel) -> None:
        deadline = time.monotonic() + START_SECONDS
        beginning = re.compile(re.escape(self._mark) + rb" begin (\d+)\n")
        while not (found := beginning.search(self._out)):
            self._read(channel, deadline, "the shell")
        self._pid = int(found.group(1))
        del self._out[: found.end()]
        silent = self._mark + b" begin\n"
        while silent not in self._err:
            self._read_stderr(channel, deadline)
        del self._err[: self._err.index(silent) + len(silent)]

    def _result(self, channel: Channel, command: str, timeout: float) -> CommandResult:
        deadline = time.monotonic() + timeout
        end = re.compile(rb"\n" + re.escape(self._mark) + rb" (\d+)\n")
        looked = 0
        while not (found := end.search(self._out, looked)):
            looked = max(0, len(self._out) - len(self._mark) - 16)
            self._read(channel, deadline, command)
        silent = b"\n" + self._mark + b"\n"
        while silent not in self._err:
            self._read_stderr(channel, deadline)
        stdout, stderr = bytes(self._out[: found.start()]), bytes(self._err[: self._err.index(silent)])
        result = CommandResult(int(found.group(1)), stdout, stderr)
        del self._out[: found.end()]
        del self._err[: self._err.index(silent) + len(silent)]
        return result

    def _read(self, channel: Channel, deadline: float, command: str) -> None:
        try:
            piece = channel.read(max(0.001, deadline - time.monotonic()))
        except SilenceTimeout as error:
            raise _timed_out(self._node.name, command) from error
        if not piece:
            raise self._ended(channel)
        self._out += piece
        if len(self._out) > OUTPUT_LIMIT:
            limit = f"{OUTPUT_LIMIT >> 20} MiB"
            raise TooMuchOutput(f"{self._node.name}: more than {limit} came, the command was killed: {command[:200]}")
        if time.monotonic() > deadline:
            raise _timed_out(self._node.name, command)

    def _read_stderr(self, channel: Channel, deadline: float) -> None:
        piece = channel.take_stderr()
        self._err += piece
        if not piece:
            if time.monotonic() > deadline:
                raise _timed_out(self._node.name, "the end of stderr")
            time.sleep(PAUSE_SECONDS)

    def _ended(self, channel: Channel) -> LamplighterError:
        if self._node.spec.become and not self._pid:
            refusal = sudo_refusal(self._node.name, self._node.user, channel.read_stderr(), channel.exit_status)
            if refusal is not None:
                return refusal
        return channel.lost()

    def _give_up(self) -> None:
        """Kill the shell with what hangs in it, by way of another one.

        facts: sshd keeps the session of a command that hangs. Where it takes no second one, another login has one.
        """
        pid = self._pid
        self.close()
        if not pid:
            return
        try:
            self._open()
        except SessionRefused:
            self._node.close()
            self._node.open()
        (killed,) = self._run_all([f"{KILL_TREE} {pid}"], START_SECONDS)
        if isinstance(killed, LamplighterError):
            raise killed


def _timed_out(name: str, command: str) -> CommandTimedOut:
    return CommandTimedOut(f"{name}: the command did not end in time and was killed: {command[:200]}")
