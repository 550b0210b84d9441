"""One open SSH connection to one node, the same whoever drives SSH: Fabric by default, or the system's ssh.

Strict about keys, quick on the wire, and every failure in plain words. Touches nothing on the node.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from lamplighter.errors import (
    UNTOUCHED,
    ContactLost,
    LoginFailed,
    NodeRefused,
    SessionRefused,
    SilenceTimeout,
    Unreachable,
    UsageError,
)
from lamplighter.ssh.become import SUDOERS_FILE, become_words, stop_logging_input, sudo_logs_input, sudo_refusal
from lamplighter.ssh.config import Reading, Settings, Values, has_ssh, ssh_line
from lamplighter.ssh.trouble import CHANNEL_SECONDS, UNKNOWN_STATE, given_up

if TYPE_CHECKING:
    from lamplighter.inventory.schema import ConnectionSpec
    from lamplighter.ssh.fabric import FabricWay

#: Seconds without any progress after which a write counts as stuck.
WRITE_TIMEOUT = 30.0
#: Seconds, a day. facts: poll() takes milliseconds in an int of C; of more than 24 days it makes any other time.
LONGEST_TIMEOUT = 86400.0
#: Seconds that an exit status may lag behind the end of the output.
EXIT_LAG = 5.0
#: Bytes of a command's output that are taken, the rest of this machine's memory being for others.
OUTPUT_LIMIT = 64 << 20
#: Bytes of a command's stderr that are kept, the newest.
STDERR_LIMIT = 64 * 1024
#: Seconds for sessions that we have closed to end on the node, and between two tries; their last word is a beat.
TEARDOWN_SECONDS = 10.0
TEARDOWN_PAUSE = 0.02

#: How long a busy thread goes on while another one wants to: during a login, and else.
PROMPT_SECONDS, USUAL_SECONDS = 0.0002, sys.getswitchinterval()

_CHUNK = 32 * 1024


class Way(Protocol):
    """A login, by whatever means. Its sessions are used as sockets are; `close` may come from another thread.

    ``broken`` is what they raise when the wire is gone.
    """

    @property
    def broken(self) -> tuple[type[Exception], ...]: ...

    def open(self) -> None: ...
    def close(self) -> None: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def last_words(self) -> str: ...
    def execute(self, command: str) -> Any: ...
    def agree(self, session: Any) -> None: ...
    def status(self, session: Any, timeout: float | None) -> int | None: ...


class CommandTimedOut(ContactLost):
    """The command did not end in time; it may still be running on the node."""


class TooMuchOutput(ContactLost):
    """The command wrote more than anybody would read, and was given up."""


@dataclass(frozen=True)
class CommandResult:
    """What a command left behind; ``exit_status`` is None when a signal, the sshd or the wire ended it."""

    exit_status: int | None
    stdout: bytes
    stderr: bytes


class Node:
    """One SSH connection to one host, opened by ``open`` or ``with`` and never reopened behind the caller's back.

    Times are seconds. Not for use by several threads at once, except that each Channel may have its own.
    """

    def __init__(self, name: str, spec: ConnectionSpec) -> None:
        self.name = name
        self.spec = spec
        self._route: list[Settings] = []
        self._way: Way | None = None
        self._knows_sudo = False
        self._lent: list[Callable[[], None]] = []
        self._channels: list[Channel] = []
        self._login: threading.Thread | None = None
        self._trouble: BaseException | None = None
        self._is_closed = False

    def __enter__(self) -> Node:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def open(self) -> None:
        """Connect and log in, through every jump host; does nothing when already done.

        Raises Unreachable (also HostKeyUnknown, HostKeyChanged), LoginFailed, or UsageError for a broken ssh_config.
        """
        login, self._login = self._login, None
        if login is not None:
            login.join()
            if self._trouble is not None:
                raise self._trouble
            if self._is_closed:
                raise given_up(self.name)
        if self._way is None:
            self._is_closed = False
            self._log_in()

    def begin(self) -> None:
        """Log in beside whatever the caller has to do before its first command, which waits for the rest.

        What goes wrong is raised by `open`, or by the first command.
        """
        self._is_closed, self._trouble = False, None
        self._login = threading.Thread(target=self._log_in_beside, name=f"login to {self.name}", daemon=True)
        self._login.start()

    def _log_in_beside(self) -> None:
        try:
            with prompt_threads():
                self._log_in()
        except BaseException as error:
            self._trouble = error

    def _log_in(self) -> None:
        try:
            if self._wants_ssh():
                return self._try(self._by_ssh())
            fabric = self._by_fabric()
            try:
                self._try(fabric)
            except Unreachable:
                if self.spec.transport == "fabric" or fabric.is_sure or self._is_closed or not has_ssh():
                    raise
                self._try(self._by_ssh())  # it gets in, or knows better why not
        except BaseException:
            self._hang_up()
            raise

    def _try(self, way: Way) -> None:
        self._way = way
        try:
            if not self._is_closed:
                way.open()
        finally:
            if self._is_closed:  # given up meanwhile, by Ctrl-C
                way.close()
        if self._is_closed:
            raise given_up(self.name)

    def _wants_ssh(self) -> bool:
        """Whether the login is ssh's from the beginning. Raises LoginFailed for a file that nobody should read."""
        wish, route = self.spec.transport, self.route
        if wish == "openssh" and not has_ssh():
            raise UsageError(f"{self.name}: transport: openssh needs ssh, which is not installed here")
        for stop in route:
            try:
                stop.refuse_odd_files()
            except OSError as error:
                raise LoginFailed(
                    f"{self.name}: the login as {stop.label} failed",
                    why=f"{error.filename}: {error.strerror or error}",
                    serving=UNTOUCHED,
                    next_step="set ansible_ssh_private_key_file, or the host variable known_hosts, to a file",
                ) from error
        return wish == "openssh" or (wish == "auto" and has_ssh() and any(stop.beyond_paramiko for stop in route))

    def _by_fabric(self) -> FabricWay:
        from lamplighter.ssh.fabric import FabricWay

        return FabricWay(self.name, self.route, self._connect_timeout)

    def _by_ssh(self) -> Way:
        from lamplighter.ssh.openssh import OpenSSHWay

        return OpenSSHWay(self.name, self.route, self._connect_timeout)

    def close(self) -> None:
        """End the connection and the jumps that it went through; commands on it lose their channel, no more.

        A login that another thread is at ends too, and dials no further host.
        """
        self._is_closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        way, self._way = self._way, None
        if way is not None:
            way.close()

    @property
    def is_alive(self) -> bool:
        """Whether the connection still stands, as far as this side can tell."""
        return self._way is not None and self._way.is_alive

    @property
    def route(self) -> list[Settings]:
        """The hosts of the login, as ssh_config and the inventory have them: the node itself is the last."""
        if not self._route:
            self._route = Reading(self.spec, _without_ssh).route()
        return self._route

    @property
    def user(self) -> str:
        """The user that the login is for: the inventory's, else ssh_config's, else this machine's."""
        return self.route[-1].user

    @property
    def ssh_line(self) -> str:
        """The same login by hand."""
        return ssh_line(self.spec)

    def stream(self, command: str) -> Channel:
        """Start ``command`` in the login shell, without a terminal, and hand over its raw channel.

        Where the node takes no further session, what is idle is closed, and what was closed is given time to end
        there. facts: sshd counts a session until its command has ended and was waited for.
        Raises Unreachable while nothing has started; whether it did start is told by the channel's first `read`.
        """
        self.open()
        deadline = None
        while True:
            try:
                assert self._way is not None
                channel = Channel(self, self._way, command)
            except SessionRefused:
                if deadline is None:
                    deadline = time.monotonic() + TEARDOWN_SECONDS
                    while self._lent:
                        self._lent.pop()()
                if not any(each.is_closed for each in self._channels) or time.monotonic() >= deadline:
                    raise
                time.sleep(TEARDOWN_PAUSE)
            else:
                self._channels = [*self._channels[-8:], channel]
                return channel

    def lend(self, close: Callable[[], None]) -> None:
        """Take note of a channel that stays open between two commands: ``close`` ends it where the node takes one only.

        Whoever lends it must be able to open it again.
        """
        self._lent.append(close)

    def run(self, command: str, timeout: float | None = None, stdin: bytes = b"") -> CommandResult:
        """Run ``command`` to its end with ``stdin`` as its whole input; any exit status is a result.

        Raises CommandTimedOut after ``timeout`` seconds, TooMuchOutput, ContactLost when the wire broke first.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        output = bytearray()
        with self.stream(command) as channel:
            try:
                for start in range(0, len(stdin), _CHUNK):
                    channel.write(stdin[start : start + _CHUNK], timeout=_left(deadline))
                channel.close_write()
                while chunk := channel.read(timeout=_left(deadline)):
                    output += chunk
                    if len(output) > OUTPUT_LIMIT:
                        limit = f"{OUTPUT_LIMIT >> 20} MiB"
                        raise TooMuchOutput(
                            f"{self.name}: more than {limit} came of: {_shortened(command)}", serving=UNKNOWN_STATE
                        )
                status = channel.wait(timeout=_left(deadline))
            except SilenceTimeout as error:
                raise CommandTimedOut(
                    f"{self.name}: the command did not end within {timeout:g} s: {_shortened(command)}",
                    why=_last_line(channel.read_stderr()) or "it wrote nothing to stderr",
                    serving=UNKNOWN_STATE,
                    next_step="look on the node whether it is still running",
                ) from error
            if status is None and not self.is_alive:
                raise channel.lost()
            return CommandResult(status, bytes(output), channel.read_stderr())

    def refuse_sudo_that_logs_input(self) -> None:
        """Raise NodeRefused where sudo would keep a copy of what we send to the node, secrets included.

        Asks once for a connection, one round trip. A sudo that does not work at all is told as `sudo_refusal` does.
        """
        if not self.spec.become or self._knows_sudo:
            return
        listed = self.run("exec sudo -n -l", timeout=CHANNEL_SECONDS)
        if listed.exit_status != 0:
            self._refuse_sudo_that_lists_nothing()
            return
        found = sudo_logs_input(listed.stdout.decode(errors="replace"))
        if found:
            raise NodeRefused(
                f"{self.name}: sudo on the node would keep a copy of what we send, secrets included",
                why=f"`sudo -l` says {found}",
                serving=UNTOUCHED,
                next_step=stop_logging_input(self.user, found),
            )
        self._knows_sudo = True

    def _refuse_sudo_that_lists_nothing(self) -> None:
        tried = self.run(self.wrap(":"), timeout=CHANNEL_SECONDS)
        if tried.exit_status == 0:  # it may well keep a copy, secrets included
            raise NodeRefused(
                f"{self.name}: sudo on the node does not tell whether it would keep a copy of what we send",
                why="`sudo -n -l` fails, though commands run",
                serving=UNTOUCHED,
                next_step=f"on the node, with `visudo -f {SUDOERS_FILE}`, add the line: "
                f"Defaults:{self.user} listpw=never",
            )
        refusal = sudo_refusal(self.name, self.user, tried.stderr, tried.exit_status)
        if refusal is not None:
            raise refusal

    def wrap(self, command: str) -> str:
        """The command line, run by root through sudo where the inventory says ``become``."""
        return "exec " + shlex.join(become_words(["/bin/sh", "-c", command])) if self.spec.become else command

    @property
    def _connect_timeout(self) -> float:
        """The inventory's time where it differs from the default, else that of ssh_config, else the default."""
        wanted, usual = self.spec.connect_timeout, type(self.spec).connect_timeout
        said = self.route[-1].get("connecttimeout")
        return min(wanted if wanted != usual or not said.isdigit() else float(said) or usual, LONGEST_TIMEOUT)


@contextlib.contextmanager
def prompt_threads() -> Iterator[None]:
    """Let a thread that has been waiting for the wire go on at once while another one is busy with imports.

    facts: by default it waits 5 ms each time, and the threads of a login change hands some 20 times.
    """
    sys.setswitchinterval(PROMPT_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(USUAL_SECONDS)


class Channel:
    """A command's raw input and output. One reader, one writer; its stderr is drained in the background, bounded.

    Input may be written at once, in the flight that asks for the command: that saves a round trip. Whether the node
    runs it is told by `read` and `wait`.
    """

    def __init__(self, node: Node, way: Way, command: str) -> None:
        self._node = node
        self._way = way
        self._early = bytearray()
        self._stderr = bytearray()
        self._stderr_dropped = 0
        self._stderr_guard = threading.Lock()
        self._session = way.execute(command)
        self._is_agreed = self._has_ended = self.is_closed = False
        self._drain = threading.Thread(target=self._drain_stderr, name=f"stderr of {node.name}", daemon=True)
        self._drain.start()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def write(self, data: bytes, timeout: float | None = WRITE_TIMEOUT) -> None:
        """Send all of ``data``; output that arrives meanwhile is kept for `read`, so neither side can block the other.

        What a command that has ended can no longer read is dropped: `read` and `exit_status` tell that story better.
        Raises SilenceTimeout after ``timeout`` seconds without progress, ContactLost when the wire is gone.
        """
        view = memoryview(data)
        moved = time.monotonic()
        while view:
            self._session.settimeout(0.1)
            try:
                sent = self._session.send(bytes(view[:_CHUNK]))
            except TimeoutError:
                self._keep_early()
                if timeout is not None and time.monotonic() - moved > timeout:
                    raise SilenceTimeout(
                        f"{self._node.name}: the node took no input for {timeout:g} s", serving=UNKNOWN_STATE
                    ) from None
                continue
            except self._way.broken:
                sent = 0
            if sent == 0:
                if not self._way.is_alive:
                    raise self.lost()
                return
            view = view[sent:]
            moved = time.monotonic()

    def close_write(self) -> None:
        """Tell the command that its input has ended."""
        with contextlib.suppress(*self._way.broken):
            self._session.shutdown_write()

    def read(self, timeout: float | None = None) -> bytes:
        """The next piece of stdout as it comes, at most 32 KiB; ``b""`` is the end: of the command, or of the wire.

        Raises SilenceTimeout when nothing came within ``timeout`` seconds; reading may go on afterwards. Before the
        first word, NodeRefused where the node runs no commands, ContactLost when it did not say whether it does.
        """
        self._await_agreement()
        if self._early:
            piece = bytes(self._early[:_CHUNK])
            del self._early[:_CHUNK]
            return piece
        # Zero would make paramiko's calls non-blocking, also those of the thread that drains stderr.
        self._session.settimeout(None if timeout is None else max(timeout, 0.001))
        try:
            piece = bytes(self._session.recv(_CHUNK))
        except TimeoutError:
            silence = f"{self._node.name}: no word from the node for {timeout:g} s"
            raise SilenceTimeout(silence, serving=UNKNOWN_STATE) from None
        except self._way.broken:
            piece = b""
        self._has_ended = not piece
        return piece

    def read_stderr(self) -> bytes:
        """What stderr said so far, complete once `read` has given ``b""``; of a flood, the last 64 KiB."""
        if self._has_ended or self.is_closed:
            self._drain.join(1.0)
        kept = bytes(self._stderr)
        return b"[%d bytes left out]\n" % self._stderr_dropped + kept if self._stderr_dropped else kept

    def take_stderr(self) -> bytes:
        """What stderr said since the last call, as far as it has arrived; of a flood, the last 64 KiB."""
        with self._stderr_guard:
            taken = bytes(self._stderr)
            self._stderr.clear()
            self._stderr_dropped = 0
        return taken

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit status; None when a signal, the sshd or the wire ended the command: SSH does not tell which.

        Raises SilenceTimeout when the command has not ended within ``timeout`` seconds, and what `read` raises.
        """
        self._await_agreement()
        try:
            return self._way.status(self._session, timeout)
        except TimeoutError:
            silence = f"{self._node.name}: no exit status within {timeout:g} s"
            raise SilenceTimeout(silence, serving=UNKNOWN_STATE) from None

    @property
    def exit_status(self) -> int | None:
        """As `wait`, for a command whose output has ended: waits 5 s at most, then None."""
        try:
            return self.wait(EXIT_LAG)
        except SilenceTimeout:
            return None

    def close(self) -> None:
        """Give the channel up; the command is not ended by that, it only loses its input and output."""
        self.is_closed = True
        with contextlib.suppress(*self._way.broken):
            self._session.close()

    def lost(self) -> ContactLost:
        """The error to raise when the output ended without the end that the caller expected."""
        return ContactLost(
            f"{self._node.name}: the connection to {self._node.route[-1].label} broke",
            why=self._way.last_words or _last_line(self.read_stderr()) or "the wire was cut, or the sshd was ended",
            serving=UNKNOWN_STATE,
            next_step="attach to the run, or start the same task again: it picks up what the node did",
        )

    def _await_agreement(self) -> None:
        if not self._is_agreed:
            self._way.agree(self._session)
            self._is_agreed = True

    def _drain_stderr(self) -> None:
        while True:
            try:
                piece = self._session.recv_stderr(_CHUNK)
            except TimeoutError:
                continue
            except self._way.broken:
                return
            if not piece:
                return
            with self._stderr_guard:
                self._stderr += piece
                excess = len(self._stderr) - STDERR_LIMIT
                if excess > 0:
                    del self._stderr[:excess]
                    self._stderr_dropped += excess

    def _keep_early(self) -> None:
        for _ in range(2 * 1024 * 1024 // _CHUNK):  # a window's worth: a flood would keep us here for ever
            if not self._session.recv_ready() or not (piece := self._session.recv(_CHUNK)):
                return
            self._early += piece


def _without_ssh(spec: ConnectionSpec) -> Values:
    from lamplighter.ssh.fabric import read_ssh_config

    return read_ssh_config(spec)


def _left(deadline: float | None) -> float | None:
    """Seconds until ``deadline``; SilenceTimeout once it has passed, also when the command never falls silent."""
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise SilenceTimeout("the time is up")
    return left


def _shortened(command: str) -> str:
    return command if len(command) <= 80 else command[:77] + "..."


def _last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or [""])[-1].strip()
