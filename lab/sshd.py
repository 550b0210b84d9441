"""The SSH server of a lab node: one user, one key, commands that run like sshd runs them.

Promise: what a client sees of a command (bytes, exit status or signal, environment, what survives the channel) is what
OpenSSH with its defaults and without a terminal shows; the channel ends as soon as the command has ended and what it
wrote is delivered, even when a daemon that it started keeps the pipes open.

Facts: closing a channel or cutting the wire ends no process, it only closes the pipes; a command killed by a signal is
reported as ``exit-signal`` (paramiko shows -1); of the client's variables only LANG and LC_* are accepted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import asyncssh

#: Unread input beyond which the client is told to wait.
INPUT_BYTES = 1 << 20
#: What is still read from the pipes after the command's end: they hold 64 KiB, a daemon behind them may write for ever.
LAST_BYTES = 1 << 18


@dataclass(frozen=True)
class Account:
    """The one user of a node and what a command of that user starts with."""

    name: str
    home: Path
    shell: str
    path: str
    public_key: bytes


class Door(asyncssh.SSHServer):
    """One connection: lets the account in with its key, and refuses all but commands and plain shells."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return username == self._account.name and key.public_data == self._account.public_key

    def session_requested(self) -> tuple[asyncssh.SSHServerChannel[bytes], Command]:
        assert self._connection is not None
        channel = self._connection.create_server_channel(encoding=None)
        return channel, Command(self._account)


class Command(asyncssh.SSHServerSession[bytes]):
    """One channel and the process behind it."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._loop = asyncio.get_running_loop()
        self._channel: asyncssh.SSHServerChannel[bytes] | None = None
        self._argv: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_handle = -1
        self._outputs: dict[int, int | None] = {}  # file descriptor -> SSH data type
        self._stdin: int | None = None
        self._input = bytearray()
        self._input_ended = False

    # What the client asks for.

    def connection_made(self, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        self._channel = chan

    def pty_requested(self, _term_type: str, _term_size: object, _term_modes: object) -> bool:
        return False

    def exec_requested(self, command: str) -> bool:
        self._argv = [self._account.shell, "-c", command]
        return True

    def shell_requested(self) -> bool:
        self._argv = ["-sh"]
        return True

    def session_started(self) -> None:
        assert self._channel is not None
        process = subprocess.Popen(
            self._argv,
            executable=self._account.shell,
            cwd=self._account.home,
            env=self._environment(self._channel),
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        # The file objects would buffer and close by themselves: keep bare descriptors.
        self._stdin = _take(process.stdin.fileno())
        self._outputs = {
            _take(process.stdout.fileno()): None,
            _take(process.stderr.fileno()): asyncssh.EXTENDED_DATA_STDERR,
        }
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
        self._exit_handle = os.pidfd_open(process.pid)
        self._loop.add_reader(self._exit_handle, self._ended)
        self.resume_writing()
        self._feed()

    def _environment(self, channel: asyncssh.SSHServerChannel[bytes]) -> dict[str, str]:
        account = self._account
        peer = channel.get_extra_info("peername") or ("127.0.0.1", 0)
        here = channel.get_extra_info("sockname") or ("127.0.0.1", 0)
        wanted = {name: value for name, value in channel.get_environment().items() if _is_accepted(name)}
        return {
            **wanted,
            "USER": account.name,
            "LOGNAME": account.name,
            "HOME": str(account.home),
            "PATH": account.path,
            "SHELL": account.shell,
            "SSH_CLIENT": f"{peer[0]} {peer[1]} {here[1]}",
            "SSH_CONNECTION": f"{peer[0]} {peer[1]} {here[0]} {here[1]}",
        }

    # Client -> command.

    def data_received(self, data: bytes, datatype: int | None) -> None:
        del datatype
        if self._process is not None and self._stdin is None:
            return  # the command closed its stdin
        self._input += data
        if len(self._input) > INPUT_BYTES and self._channel is not None:
            self._channel.pause_reading()
        self._feed()

    def eof_received(self) -> bool:
        self._input_ended = True
        self._feed()
        return True  # output may still come

    def signal_received(self, signal: str) -> None:
        number = getattr(_SIGNALS, f"SIG{signal}", None)
        if self._process is not None and self._process.returncode is None and number is not None:
            os.killpg(self._process.pid, number)

    def _feed(self) -> None:
        if self._stdin is None:
            return
        self._loop.remove_writer(self._stdin)
        try:
            while self._input:
                del self._input[: os.write(self._stdin, self._input[:65536])]
        except BlockingIOError:
            self._loop.add_writer(self._stdin, self._feed)
            return
        except BrokenPipeError:
            self._input.clear()
            self._input_ended = True
        if self._channel is not None:
            self._channel.resume_reading()  # may deliver, and come back here, at once
        if self._input_ended and not self._input:
            self._close_input()

    def _close_input(self) -> None:
        if self._stdin is not None:
            self._loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = None

    # Command -> client.

    def pause_writing(self) -> None:
        for pipe in self._outputs:
            self._loop.remove_reader(pipe)

    def resume_writing(self) -> None:
        for pipe in self._outputs:
            self._loop.add_reader(pipe, self._relay, pipe)

    def _relay(self, pipe: int) -> int:
        """Pass one read on; returns its length, 0 when there is nothing more (for now)."""
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return 0
        datatype = self._outputs[pipe]
        if not data:
            self._close_output(pipe)
        elif self._channel is not None and not self._channel.is_closing():
            self._channel.write(data, datatype)
        return len(data)

    def _close_output(self, pipe: int) -> None:
        self._loop.remove_reader(pipe)
        del self._outputs[pipe]
        os.close(pipe)

    # The end, of the command or of the channel, whichever comes first.

    def _ended(self) -> None:
        assert self._process is not None
        self._loop.remove_reader(self._exit_handle)
        os.close(self._exit_handle)
        status = self._process.wait()
        for pipe in list(self._outputs):
            rest = LAST_BYTES
            while rest > 0 and (count := self._relay(pipe)):
                rest -= count
        self._close_pipes()
        channel, self._channel = self._channel, None
        if channel is None:
            return
        if status < 0:
            channel.exit_with_signal(signal.Signals(-status).name.removeprefix("SIG"))
        else:
            channel.exit(status)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._channel = None
        self._close_pipes()

    def _close_pipes(self) -> None:
        self._close_input()
        for pipe in list(self._outputs):
            self._close_output(pipe)


_SIGNALS = signal.Signals


def _is_accepted(name: str) -> bool:
    return name == "LANG" or name.startswith("LC_")


def _take(descriptor: int) -> int:
    """Our own non-blocking duplicate of a pipe end."""
    copy = os.dup(descriptor)
    os.set_blocking(copy, False)
    return copy
