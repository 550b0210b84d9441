"""One open SSH connection to one node: strict about keys, quick on the wire, and every failure in plain words.

The only module that knows Fabric and paramiko. Fabric reads ssh_config; the sockets, the host key check, the choice of
keys and the channels are ours, because its defaults accept any host key, add 45 ms a connect for want of TCP_NODELAY,
never notice a cut wire, and read a command's input one character per 10 ms.

Touches nothing on the node. Writes known_hosts on this machine only where the inventory says ``accept-new``.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import logging
import os
import re
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import fabric
import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from paramiko.ssh_exception import (
    AuthenticationException,
    BadAuthenticationType,
    ChannelException,
    IncompatiblePeer,
    SSHException,
)

from lamplighter.errors import ContactLost, LamplighterError, LoginFailed, NodeRefused, Unreachable, UsageError
from lamplighter.run.known_hosts import KnownHosts, KnownKey, fingerprint, host_names, known_line, remember
from lamplighter.run.ssh_config import expand

if TYPE_CHECKING:
    from lamplighter.inventory.schema import ConnectionSpec

#: Seconds for one login attempt; a node with a slow directory service or DNS takes its time here.
AUTH_TIMEOUT = 30.0
#: Seconds for opening a channel and for the node's answer to exec; paramiko itself would wait an hour and for ever.
CHANNEL_TIMEOUT = 20.0
#: Seconds without any progress after which a write counts as stuck.
WRITE_TIMEOUT = 30.0
#: Seconds between two attempts when nobody listens: long enough for an sshd that is being restarted.
REFUSED_PAUSE = 0.5
#: Seconds that an exit status may lag behind the end of the output.
EXIT_LAG = 5.0
#: Bytes of a command's stderr that are kept, the newest.
STDERR_LIMIT = 64 * 1024

_CHUNK = 32 * 1024
_UNTOUCHED = "unchanged; nothing was touched"
_UNKNOWN_STATE = "not known from here; the node finishes what it started"

# Failures are told by our exceptions; paramiko's own tracebacks would only bury them.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)


class HostKeyUnknown(Unreachable):
    """No known_hosts file vouches for the key that the host showed; ``fingerprint`` is that key's."""

    fingerprint = ""


class HostKeyChanged(Unreachable):
    """The host showed another key than the known one, or a revoked one; ``fingerprint`` is what it showed."""

    fingerprint = ""


class SilenceTimeout(ContactLost):
    """Nothing arrived within the time that the reader allowed; the channel is still open."""


class CommandTimedOut(ContactLost):
    """The command did not end in time; it may still be running on the node."""


@dataclass(frozen=True)
class CommandResult:
    """What a command left behind; ``exit_status`` is None when a signal, the sshd or the wire ended it."""

    exit_status: int | None
    stdout: bytes
    stderr: bytes


class Node:
    """One SSH connection to one host, opened by ``open`` or ``with`` and never reopened behind the caller's back.

    ``user_ssh`` and ``system_ssh`` are the directories of ssh_config and known_hosts. Times are seconds.
    Not for use by several threads at once, except that each Channel may have its own.
    """

    def __init__(
        self,
        name: str,
        spec: ConnectionSpec,
        *,
        user_ssh: Path | None = None,
        system_ssh: Path = Path("/etc/ssh"),
    ) -> None:
        self.name = name
        self.spec = spec
        self._user_ssh = Path.home() / ".ssh" if user_ssh is None else user_ssh
        self._system_ssh = system_ssh
        self._hops: list[_Hop] = []
        self._knows_sudo = False
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
        if not self._hops:
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
            self._log_in()
        except BaseException as error:
            self._trouble = error
        if self._is_closed:  # given up meanwhile, by Ctrl-C
            self._hang_up()

    def _log_in(self) -> None:
        try:
            for hop in self._route():
                before = self._hops[-1] if self._hops else None
                self._hops.append(hop)
                hop.login(before.dial(hop) if before else hop.connect_socket())
        except BaseException:
            self._hang_up()
            raise

    def close(self) -> None:
        """End the connection and the jumps that it went through; commands on it lose their channel, no more."""
        self._is_closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(IndexError):  # empty: two threads may be at it
            while True:
                self._hops.pop().close()

    @property
    def is_alive(self) -> bool:
        """Whether the connection still stands, as far as this side can tell."""
        return bool(self._hops) and self._hops[-1].transport.is_active()

    @property
    def user(self) -> str:
        """The user that the login is for: the inventory's, else ssh_config's, else this machine's."""
        return str((self._hops or self._route())[-1].user)

    def stream(self, command: str) -> Channel:
        """Start ``command`` in the login shell, without a terminal, and hand over its raw channel.

        Raises Unreachable while nothing has started; whether it did start is told by the channel's first `read`.
        """
        self.open()
        return Channel(self._hops[-1], command)

    def run(self, command: str, timeout: float | None = None, stdin: bytes = b"") -> CommandResult:
        """Run ``command`` to its end with ``stdin`` as its whole input; any exit status is a result.

        Raises CommandTimedOut after ``timeout`` seconds, ContactLost when the wire broke first.
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
                status = channel.wait(timeout=_left(deadline))
            except SilenceTimeout as error:
                raise CommandTimedOut(
                    f"{self.name}: the command did not end within {timeout:g} s: {_shortened(command)}",
                    why=_last_line(channel.read_stderr()) or "it wrote nothing to stderr",
                    serving=_UNKNOWN_STATE,
                    next_step="look on the node whether it is still running",
                ) from error
            if status is None and not self.is_alive:
                raise channel.lost()
            return CommandResult(status, bytes(output), channel.read_stderr())

    def refuse_sudo_that_logs_input(self) -> None:
        """Raise NodeRefused where sudo would keep a copy of what we send to the node, secrets included.

        Asks once for a connection, one round trip. A sudo that lists nothing is left to fail by itself.
        """
        if not self.spec.become or self._knows_sudo:
            return
        listed = self.run("exec sudo -n -l", timeout=CHANNEL_TIMEOUT)
        found = sudo_logs_input(listed.stdout.decode(errors="replace"))
        if found:
            raise NodeRefused(
                f"{self.name}: sudo on the node would keep a copy of what we send, secrets included",
                why=f"`sudo -l` says {found}",
                serving=_UNTOUCHED,
                next_step="on the node, with `visudo -f /etc/sudoers.d/lamplighter`, add the line: "
                f"Defaults:{self.user} !log_input,!log_stdin (sudo before 1.9.14 knows the first alone), or log in "
                "as root and leave out become",
            )
        self._knows_sudo = True

    def wrap(self, command: str) -> str:
        """The command line, run by root through sudo where the inventory says ``become``."""
        return "exec " + shlex.join(become_words(["/bin/sh", "-c", command])) if self.spec.become else command

    def _route(self) -> list[_Hop]:
        """The hops in the order in which they are opened: the outermost jump host first, the node itself last."""
        spec = self.spec
        place = parse_place(spec.host)
        user = spec.user or place.user
        port = spec.port or place.port
        config = self._fabric_config(place.host, user, port)
        target = _connection(self.name, config, place.host, user, port)
        jumps = _jumps(self.name, config, target)
        connections = [*jumps, target]
        hops: list[_Hop] = []
        for connection in connections:
            key_file = spec.key_file if connection is target else None
            known = _known_hosts_files(connection.ssh_config, spec.known_hosts, self._user_ssh, self._system_ssh)
            keys = _HostKeys(self.name, connection, known, spec.host_key_checking, bool(hops))
            login = _Login(self.name, connection, key_file, self._user_ssh)
            hops.append(_Hop(self.name, connection, keys, login, spec.connect_timeout))
        return hops

    def _fabric_config(self, host: str, user: str | None, port: int | None) -> Any:
        # ssh_config keeps the first value that it meets: put before the files, the inventory wins everywhere, also in
        # the %p and %r of a ProxyCommand and in `Match user`.
        text = f"Host {host}\n" + (f"User {user}\n" if user else "") + (f"Port {port}\n" if port else "")
        for directory, name in ((self._user_ssh, "config"), (self._system_ssh, "ssh_config")):
            text += "Host *\n" + expand(directory / name, directory)
        with _usage_errors(self.name):
            # lazy: a stray ~/.fabric.yaml or FABRIC_* variable has no say in where we connect.
            return fabric.Config(ssh_config=paramiko.SSHConfig.from_text(text), lazy=True)


class Channel:
    """A command's raw input and output. One reader, one writer; its stderr is drained in the background, bounded.

    Input may be written at once, in the flight that asks for the command: that saves a round trip. Whether the node
    runs it is told by `read` and `wait`.
    """

    def __init__(self, hop: _Hop, command: str) -> None:
        self._hop = hop
        self._early = bytearray()
        self._stderr = bytearray()
        self._stderr_dropped = 0
        self._stderr_guard = threading.Lock()
        self._channel = hop.execute(command)
        self._is_agreed = False
        self._drain = threading.Thread(target=self._drain_stderr, name=f"stderr of {hop.name}", daemon=True)
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
            self._channel.settimeout(0.1)
            try:
                sent = self._channel.send(bytes(view[:_CHUNK]))
            except TimeoutError:
                self._keep_early()
                if timeout is not None and time.monotonic() - moved > timeout:
                    raise SilenceTimeout(
                        f"{self._hop.name}: the node took no input for {timeout:g} s", serving=_UNKNOWN_STATE
                    ) from None
                continue
            except (OSError, EOFError, SSHException):
                sent = 0
            if sent == 0:
                if not self._hop.transport.is_active():
                    raise self.lost()
                return
            view = view[sent:]
            moved = time.monotonic()

    def close_write(self) -> None:
        """Tell the command that its input has ended."""
        with contextlib.suppress(OSError, EOFError, SSHException):
            self._channel.shutdown_write()

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
        self._channel.settimeout(None if timeout is None else max(timeout, 0.001))
        try:
            return self._channel.recv(_CHUNK)
        except TimeoutError:
            raise SilenceTimeout(
                f"{self._hop.name}: no word from the node for {timeout:g} s", serving=_UNKNOWN_STATE
            ) from None

    def read_stderr(self) -> bytes:
        """What stderr said so far, complete once `read` has given ``b""``; of a flood, the last 64 KiB."""
        if self._channel.closed or self._channel.eof_received:
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
        if not self._channel.status_event.wait(timeout):
            raise SilenceTimeout(f"{self._hop.name}: no exit status within {timeout:g} s", serving=_UNKNOWN_STATE)
        status = self._channel.exit_status
        return None if status < 0 else status

    @property
    def exit_status(self) -> int | None:
        """As `wait`, for a command whose output has ended: waits 5 s at most, then None."""
        try:
            return self.wait(EXIT_LAG)
        except SilenceTimeout:
            return None

    def close(self) -> None:
        """Give the channel up; the command is not ended by that, it only loses its input and output."""
        with contextlib.suppress(OSError, EOFError, SSHException):
            self._channel.close()

    def lost(self) -> ContactLost:
        """The error to raise when the output ended without the end that the caller expected."""
        return ContactLost(
            f"{self._hop.name}: the connection to {self._hop.label} broke",
            why=self._hop.last_words or _last_line(self.read_stderr()) or "the wire was cut, or the sshd was ended",
            serving=_UNKNOWN_STATE,
            next_step="attach to the run, or start the same task again: it picks up what the node did",
        )

    def _await_agreement(self) -> None:
        if not self._is_agreed:
            self._hop.await_agreement(self._channel)
            self._is_agreed = True

    def _drain_stderr(self) -> None:
        while True:
            try:
                piece = self._channel.recv_stderr(_CHUNK)
            except TimeoutError:
                continue
            except (OSError, EOFError, SSHException):
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
            if not self._channel.recv_ready():
                return
            self._early += self._channel.recv(_CHUNK)


def become_words(words: Sequence[str]) -> list[str]:
    """``words`` as root: sudo never asks (-n), and HOME is root's (-H)."""
    return ["sudo", "-n", "-H", *words]


_LOGS_INPUT = re.compile(r"(?<![!\w])(log_input|log_stdin)\b|(?<!NO)(LOG_INPUT):")


def sudo_logs_input(listing: str) -> str:
    """The setting in the output of ``sudo -l`` by which input is logged; empty where there is none.

    facts: log_input stores all of a command's standard input below /var/log/sudo-io; a rule's own tag wins over the
    default, so NOLOG_INPUT: on the only rule makes it harmless.
    """
    found = _LOGS_INPUT.search(listing)
    if found is None or (found.group(1) and "NOLOG_INPUT:" in listing):
        return ""
    return found.group(0)


def sudo_refusal(user: str, stderr: bytes, exit_status: int | None) -> LamplighterError | None:
    """The error behind a ``become`` command that ended before it began, or None where sudo is not to blame.

    To be asked only when the command gave no sign of life of its own: a program's own stderr may speak of sudo too.
    """
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines()]
    said = next((line for line in reversed(lines) if "sudo" in line.lower() or "not allowed to" in line), "")
    if exit_status == 0 or not said:
        return None
    grant = f"{user} ALL=(root) NOPASSWD: ALL"
    add = "on the node, with `visudo -f /etc/sudoers.d/lamplighter`, add the line: "
    if "must have a tty" in said:
        return NodeRefused(
            "sudo on the node insists on a terminal (requiretty)",
            why=said,
            serving=_UNTOUCHED,
            next_step=f"{add}Defaults:{user} !requiretty",
        )
    if exit_status == 127 or "not found" in said:
        return NodeRefused(
            "the node has no sudo",
            why=said,
            serving=_UNTOUCHED,
            next_step="install sudo there, or log in as root and leave out become",
        )
    if "no new privileges" in said:
        return NodeRefused(
            "sudo cannot work in this login: it runs without new privileges",
            why=said,
            serving=_UNTOUCHED,
            next_step="log in to the node itself, not to a container on it",
        )
    # Without -n's password, an unlisted user and a translated message all look alike; the cure is the same.
    if exit_status == 1:
        return LoginFailed(
            f"sudo on the node does not let {user} become root without a password",
            why=said,
            serving=_UNTOUCHED,
            next_step=add + grant,
        )
    return None


@dataclass(frozen=True)
class Place:
    """``[user@]host[:port]``, taken apart."""

    host: str
    user: str | None = None
    port: int | None = None


def parse_place(text: str) -> Place:
    """Read ``[user@]host[:port]`` or ``ssh://...``, IPv6 with or without brackets. Raises UsageError for a bad port."""
    rest = text.strip().removeprefix("ssh://").rstrip("/")
    user, _, rest = rest.rpartition("@")
    host, port = rest, ""
    if rest.startswith("["):
        host, _, port = rest[1:].partition("]")
        port = port.removeprefix(":")
    elif rest.count(":") == 1:
        host, _, port = rest.partition(":")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(f"{text!r} has no usable port", why="expected [user@]host[:port]")
    return Place(host, user or None, int(port) if port else None)


class _Transport(paramiko.Transport):
    """paramiko's transport, which keeps the reason of its last failure instead of logging it.

    The server's own words about a refused channel or a disconnect reach the log and nothing else.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.words: deque[str] = deque(maxlen=4)
        self.preamble = ""  # what came before, or instead of, the SSH banner
        super().__init__(*args, **kwargs)

    def _log(self, level: int, msg: Any, *args: Any) -> None:
        text = msg if isinstance(msg, str) else ""
        if text.startswith("Banner: "):
            self.preamble = self.preamble or text.removeprefix("Banner: ").strip()
        elif text and (level >= logging.ERROR or text.startswith("Disconnect")):
            self.words.append(text % args if args else text)


class _Hop:
    """One SSH login on the way: a Fabric connection, its socket, its host key check."""

    def __init__(self, name: str, connection: Any, keys: _HostKeys, login: _Login, timeout: float) -> None:
        self.name = name
        self.label = _label(connection)
        self.user: str = connection.user
        self._connection = connection
        self._keys = keys
        self._login = login
        self._timeout = timeout
        self._proxy: _ProxyProcess | None = None

    @property
    def transport(self) -> _Transport:
        transport: _Transport = self._connection.transport
        return transport

    @property
    def last_words(self) -> str:
        """What the other side, or paramiko, last said about a failure."""
        transport = self._connection.client.get_transport()
        words = list(transport.words) if isinstance(transport, _Transport) else []
        return words[-1] if words else ""

    @property
    def _preamble(self) -> str:
        transport = self._connection.client.get_transport()
        return transport.preamble if isinstance(transport, _Transport) else ""

    @property
    def _handshake_timed_out(self) -> bool:
        # paramiko tells this as the same EOFError that a hang-up gives
        transport = self._connection.client.get_transport()
        return transport is not None and bool(transport.packetizer.handshake_timed_out())

    def connect_socket(self) -> Any:
        """A socket to this host, tuned; through its ProxyCommand where ssh_config has one."""
        command = self._connection.ssh_config.get("proxycommand")
        with self._told():
            if command:
                self._proxy = _ProxyProcess(command)
                return self._proxy.socket
            return _connect_tcp(
                self._connection.host, int(self._connection.port), _family(self._connection.ssh_config), self._timeout
            )

    def dial(self, inner: _Hop) -> Any:
        """A way through this host to the next one."""
        place = (inner._connection.host, int(inner._connection.port))
        with inner._told(through=self):
            return self.transport.open_channel("direct-tcpip", place, ("", 0), timeout=self._timeout)

    def login(self, sock: Any) -> None:
        """Shake hands over ``sock``, check the host key, log in."""
        connection = self._connection
        connection.client.set_missing_host_key_policy(self._keys)
        connection.connect_timeout = 2 * self._timeout  # the whole negotiation: banner and key exchange
        connection.connect_kwargs = {
            "sock": sock,
            "banner_timeout": self._timeout,
            "auth_timeout": AUTH_TIMEOUT,
            "channel_timeout": CHANNEL_TIMEOUT,
            "auth_strategy": self._login,
            "transport_factory": self._make_transport,
        }
        try:
            with self._told():
                connection.open()
        except BaseException:
            sock.close()
            raise

    def execute(self, command: str) -> paramiko.Channel:
        """A channel on which the node was asked to run ``command``; `await_agreement` tells what it said to that."""
        try:
            channel = self.transport.open_session(timeout=CHANNEL_TIMEOUT)
        except ChannelException as error:
            raise Unreachable(
                f"{self.name}: {self.label} refuses another session on this connection",
                why=self.last_words or str(error),
                serving=_UNTOUCHED,
                next_step="MaxSessions in the node's sshd_config may be too low (default 10)",
            ) from error
        except (SSHException, EOFError, OSError) as error:
            raise Unreachable(
                f"{self.name}: the connection to {self.label} is gone",
                why=self.last_words or str(error) or "it ended without a word",
                serving=_UNTOUCHED,
                next_step="try again",
            ) from error
        # paramiko's exec_command would wait a round trip for the node's word; what we write next may travel meanwhile
        channel._wait_for_event = lambda: None  # type: ignore[attr-defined]
        try:
            channel.exec_command(command)
        except (SSHException, EOFError, OSError) as error:
            raise self._unanswered(self.last_words or str(error)) from error
        return channel

    def await_agreement(self, channel: paramiko.Channel) -> None:
        """Wait for the node's word that it runs the command. Raises NodeRefused, or ContactLost for no word at all."""
        # paramiko would wait without any limit, and a stopped sshd never gives this answer
        if not channel.event.wait(CHANNEL_TIMEOUT):
            channel.close()
            raise self._unanswered(f"no answer within {CHANNEL_TIMEOUT:g} s")
        if channel.event_ready:
            return
        if not self.transport.is_active():
            raise self._unanswered(self.last_words or "the wire was cut, or the sshd was ended")
        raise NodeRefused(
            f"{self.name}: {self.label} lets us in but runs no commands",
            why="the sshd refused the exec request",
            serving=_UNTOUCHED,
            next_step="look for ForceCommand, a restricted key or a no-login shell on the node",
        )

    def _unanswered(self, why: str) -> ContactLost:
        return ContactLost(
            f"{self.name}: {self.label} did not say whether it started the command",
            why=why,
            serving=_UNKNOWN_STATE,
            next_step="try again; the same task picks up what the node did",
        )

    def close(self) -> None:
        """End this login, also a half-made one."""
        with contextlib.suppress(OSError, EOFError, SSHException):
            self._connection.close()
            self._connection.client.close()
        if self._proxy:
            self._proxy.close()

    def _make_transport(self, sock: Any, **options: Any) -> _Transport:
        transport = _Transport(sock, **options)
        transport.handshake_timeout = self._timeout
        wanted = self._keys.algorithms()
        offered = list(transport.get_security_options().key_types)
        first = [kind for kind in wanted if kind in offered]
        transport.get_security_options().key_types = first + [kind for kind in offered if kind not in first]
        return transport

    @contextlib.contextmanager
    def _told(self, through: _Hop | None = None) -> Iterator[None]:
        """Translate what the libraries raise while this host is being reached."""
        try:
            yield
        except LamplighterError:
            raise
        except (OSError, EOFError, SSHException) as error:
            raise self._translate(error, through) from error

    def _translate(self, error: Exception, through: _Hop | None) -> LamplighterError:
        host, port = self._connection.host, self._connection.port
        words = through.last_words if through else self.last_words
        said = str(error) or words or type(error).__name__

        def unreachable(what: str, why: str, next_step: str) -> Unreachable:
            return Unreachable(f"{self.name}: {what}", why=why, serving=_UNTOUCHED, next_step=next_step)

        if isinstance(error, ChannelException) and through:
            return unreachable(
                f"the jump host {through.label} cannot connect to {host}:{port}",
                words or said,
                "check the name and port as seen from the jump host, and AllowTcpForwarding there",
            )
        if isinstance(error, socket.gaierror):
            return unreachable(
                f"the name {host} does not resolve",
                error.strerror or said,
                "check ansible_host, HostName in ssh_config, and DNS",
            )
        if isinstance(error, ConnectionRefusedError):
            return unreachable(
                f"nobody listens on {host}:{port}",
                f"connection refused, twice, {REFUSED_PAUSE:g} s apart",
                "is sshd running there, and is ansible_port right?",
            )
        if isinstance(error, AuthenticationException):  # ours says more; this is paramiko's own timeout
            return LoginFailed(
                f"{self.name}: the login as {self.label} did not come to an end",
                why=words or said,
                serving=_UNTOUCHED,
                next_step=f"try `ssh -v {self.label}`",
            )
        if isinstance(error, IncompatiblePeer):
            return unreachable(
                f"no encryption method in common with {host}:{port}", said, "update the SSH server on the node"
            )
        if self._proxy and self._proxy.has_ended():
            return unreachable(
                f"the ProxyCommand for {host}:{port} ended with exit status {self._proxy.exit_status}",
                self._proxy.last_words or "it said nothing",
                "run the command of ssh_config by hand to see what it does",
            )
        preamble = self._preamble if "protocol banner" in said or "No existing session" in said else ""
        if preamble or "protocol version" in said or "SSH banner" in said:
            return unreachable(
                f"{host}:{port} is not an SSH server",
                f"it says {preamble!r}" if preamble else said,
                "is ansible_port right?",
            )
        cause = error.__context__ if "protocol banner" in said else error
        if (
            self._handshake_timed_out
            or isinstance(cause, TimeoutError)
            or "No existing session" in said
            or "Timeout opening channel" in said
        ):
            if isinstance(error, OSError):
                what, why = f"{host}:{port} does not answer", f"no TCP connection within {self._timeout:g} s"
                advice = "is the node up, and does a firewall let this machine in?"
            else:
                what = f"{host}:{port} accepts connections but does not speak SSH in time"
                why = f"waited {self._timeout:g} s for its part of the handshake"
                advice = "the node may be overloaded or stopped, or something else listens on that port"
            return unreachable(what, why, advice)
        if isinstance(cause, (EOFError, ConnectionResetError)):
            return unreachable(
                f"{host}:{port} hung up during the handshake",
                words or "the connection was closed",
                "look at the sshd log of the node: MaxStartups, fail2ban, a host that is still booting",
            )
        return unreachable(f"no SSH connection to {host}:{port}", said, f"try `ssh -v {self.label}`")


class _ProxyProcess:
    """A ProxyCommand of ssh_config, on one end of a socket pair.

    Not paramiko's own: that one does not notice when the command ends, and leaves it behind unreaped.
    """

    def __init__(self, command: str) -> None:
        self.socket, end = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        with end:
            # Its own session: Ctrl-C is for us alone, the proxy still has to carry what we say next.
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=end.fileno(),
                stdout=end.fileno(),
                stderr=self._errors,
                start_new_session=True,
            )

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def has_ended(self) -> bool:
        """Whether the command has ended; right after it hung up, that may take a moment to show."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        return self._process.returncode is not None

    @property
    def last_words(self) -> str:
        """The last line of its stderr."""
        return _last_line(os.pread(self._errors.fileno(), _CHUNK, 0))

    def close(self) -> None:
        """Hang up, and end the command if that does not end it."""
        self.socket.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


class _HostKeys(paramiko.MissingHostKeyPolicy):
    """Decides about a shown host key. paramiko is given no keys of its own, so it asks here every time."""

    def __init__(self, name: str, connection: Any, files: Sequence[Path], checking: str, through_jump: bool) -> None:
        self._name = name
        self._label = _label(connection)
        self._host, self._port = connection.host, int(connection.port)
        self._alias: str | None = connection.ssh_config.get("hostkeyalias")
        self._names = host_names(self._host, self._port, self._alias)
        self._file = files[0]
        self._known = KnownHosts.read(files)
        self._hashes = str(connection.ssh_config.get("hashknownhosts", "no")).lower() == "yes"
        self._checking = checking
        self._through_jump = through_jump

    def algorithms(self) -> list[str]:
        """Signature algorithms of the known keys: a host with several keys must be asked for one that we know."""
        found: list[str] = []
        for kind in self._known.kinds(self._names):
            found += ["rsa-sha2-512", "rsa-sha2-256"] if kind == "ssh-rsa" else [kind]
        return found

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        """Return to accept the key, raise to refuse it."""
        kind, blob = key.get_name(), key.asbytes()
        if self._checking == "off":
            return
        verdict = self._known.judge(self._names, kind, blob)
        if verdict.word == "known":
            return
        if verdict.word == "unknown":
            if self._checking != "accept-new":
                raise self._unknown(kind, blob)
            try:
                remember(self._file, self._names[0], kind, blob, hashed=self._hashes)
            except OSError as error:
                raise Unreachable(
                    f"{self._name}: cannot write down the new host key", why=str(error), serving=_UNTOUCHED
                ) from error
            return
        raise self._changed(verdict.word, verdict.lines, kind, blob)

    def _unknown(self, kind: str, blob: bytes) -> HostKeyUnknown:
        shown = fingerprint(blob)
        why = f"it showed {kind} {shown}, and no known_hosts file vouches for that"
        for problem in self._known.problems:
            why += f"; not readable: {problem}"
        for line in self._known.authorities(self._names):
            why += f"; {line} is for host certificates, which are not checked here"
        error = HostKeyUnknown(
            f"{self._name}: the host key of {self._host}:{self._port} is unknown",
            why=why,
            serving=_UNTOUCHED,
            next_step=f"compare the fingerprint with the node's own (on its console: {_own_fingerprint(kind)}), "
            f"then run: {self._add_command(kind, blob)}",
        )
        error.fingerprint = shown
        return error

    def _changed(self, word: str, lines: Sequence[KnownKey], kind: str, blob: bytes) -> HostKeyChanged:
        shown = fingerprint(blob)
        known = ", ".join(f"{line.kind} {line.fingerprint} ({line})" for line in lines)
        if word == "revoked":
            what, why = "is revoked", f"it showed {kind} {shown}, revoked by {', '.join(map(str, lines))}"
            advice = "do not connect; find out why this key was revoked"
        else:
            what, why = "has changed", f"it showed {kind} {shown}; known is {known}"
            forget = " && ".join(
                dict.fromkeys(shlex.join(["ssh-keygen", "-R", self._names[0], "-f", str(line.file)]) for line in lines)
            )
            advice = (
                f"either the node was installed anew or somebody is listening in: compare with its console "
                f"({_own_fingerprint(kind)}); if it is right: {forget} && {self._add_command(kind, blob)}"
            )
        error = HostKeyChanged(
            f"{self._name}: the host key of {self._host}:{self._port} {what}",
            why=why,
            serving=_UNTOUCHED,
            next_step=advice,
        )
        error.fingerprint = shown
        return error

    def _add_command(self, kind: str, blob: bytes) -> str:
        file = shlex.quote(str(self._file))
        if self._alias or self._through_jump:  # ssh-keyscan knows neither aliases nor jump hosts
            return f"echo {shlex.quote(known_line(self._names[0], kind, blob))} >> {file}"
        port = "" if self._port == 22 else f"-p {self._port} "
        return f"ssh-keyscan {port}{shlex.quote(self._host)} >> {file}"


class _Login:
    """Tries keys as OpenSSH would, and remembers what it tried; paramiko calls this an auth strategy."""

    def __init__(self, name: str, connection: Any, key_file: str | None, user_ssh: Path) -> None:
        self._name = name
        self._label = _label(connection)
        self._user: str = connection.user
        config = connection.ssh_config
        self._only_identities = str(config.get("identitiesonly", "no")).lower() == "yes"
        self._use_agent = str(config.get("identityagent", "")).lower() != "none"
        wanted = [key_file] if key_file else []
        wanted += [file for file in config.get("identityfile", []) if file.lower() != "none"]
        self._explicit = key_file
        self._identities = [Path(file).expanduser() for file in wanted]
        named = config.get("certificatefile")
        self._certificates = [Path(named).expanduser()] if named else []
        self._defaults = [user_ssh / name for name in ("id_ed25519", "id_ecdsa", "id_rsa")]
        self._tried: list[str] = []
        self._unusable: list[str] = []
        self._encrypted: list[Path] = []

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Log in, or raise LoginFailed with everything that was tried."""
        allowed: Sequence[str] = ()
        agent = self._open_agent()
        try:
            for key, told in self._keys(agent):
                try:
                    more = transport.auth_publickey(self._user, key)
                except BadAuthenticationType as error:
                    allowed = error.allowed_types
                    self._tried.append(told)
                    break
                except (SSHException, EOFError, OSError, ValueError) as error:
                    rejected = type(error) is AuthenticationException
                    self._tried.append(told if rejected else f"{told}: {error or type(error).__name__}")
                    if not transport.is_active():
                        break
                    continue
                if not more:
                    return
                allowed = more
                self._unusable.append(f"{told} was accepted, but the node wants {' and '.join(more)} as well")
                break
            else:
                allowed = self._ask_without_key(transport)
                if transport.is_authenticated():
                    return
        finally:
            if agent:
                agent.close()
        raise self._failed(transport, allowed)

    def _ask_without_key(self, transport: paramiko.Transport) -> Sequence[str]:
        """Some nodes know their users by the network alone; the others say which methods they allow."""
        try:
            transport.auth_none(self._user)
        except BadAuthenticationType as error:
            return error.allowed_types
        except (SSHException, EOFError, OSError):
            pass
        return ()

    def _open_agent(self) -> paramiko.Agent | None:
        if not self._use_agent:
            return None
        try:
            return paramiko.Agent()
        except (SSHException, OSError, EOFError) as error:
            self._unusable.append(f"ssh-agent: {error}")
            return None

    def _keys(self, agent: paramiko.Agent | None) -> Iterator[tuple[paramiko.PKey, str]]:
        """Named key files first: an agent full of other keys would use up the node's MaxAuthTries before them."""
        held = list(agent.get_keys()) if agent else []
        seen: set[bytes] = set()
        for file in self._identities or [file for file in self._defaults if file.exists()]:
            key = self._load(file)
            public = key.asbytes() if key else _public_blob(file)
            from_agent = [one for one in held if public and _certified_blob(one.asbytes()) == public]
            if public in seen:
                continue
            if key is not None:
                seen.add(key.asbytes())
                for certificate in (Path(f"{file}-cert.pub"), *self._certificates):
                    if _certified_by(certificate) == public:
                        yield _with_certificate(key, certificate), f"{file} with {certificate}"
                yield key, f"{file} ({fingerprint(key.asbytes())})"
            elif from_agent:
                for one in sorted(from_agent, key=lambda one: one.asbytes() == public):  # a certificate first
                    seen.add(one.asbytes())
                    yield one, f"{file} by the agent" + ("" if one.asbytes() == public else ", with its certificate")
            elif file in self._encrypted:
                self._unusable.append(f"{file} is encrypted and no ssh-agent holds it")
        if self._only_identities:
            return
        for one in held:
            if one.asbytes() not in seen:
                yield one, f"agent key {getattr(one, 'comment', '') or one.get_name()} ({fingerprint(one.asbytes())})"

    def _load(self, file: Path) -> paramiko.PKey | None:
        try:
            key: paramiko.PKey = paramiko.PKey.from_path(file)
        except TypeError:  # cryptography's word for "needs a passphrase"
            self._encrypted.append(file)
        except FileNotFoundError:
            # ssh_config often names files that exist on some machines only; the inventory should know better.
            if str(file) == str(Path(self._explicit or "").expanduser()):
                self._unusable.append(f"{file} does not exist")
        except OSError as error:
            self._unusable.append(f"{file}: {error.strerror or error}")
        except Exception as error:  # a broken key makes three libraries raise what they like
            self._unusable.append(f"{file} is not a usable private key ({error or type(error).__name__})")
        else:
            key.public_blob = None  # a certificate beside it is tried apart, and the key without it after that
            return key
        return None

    def _failed(self, transport: paramiko.Transport, allowed: Sequence[str]) -> LoginFailed:
        said = transport.words[-1] if isinstance(transport, _Transport) and transport.words else ""
        why = f"tried {'; '.join(self._tried)}" if self._tried else "there was no key to try"
        for unusable in self._unusable:
            why += f"; {unusable}"
        if not self._use_agent or "SSH_AUTH_SOCK" not in os.environ:
            why += "; no ssh-agent"
        if allowed:
            why += f"; the node allows {', '.join(allowed)}"
        if said:
            why += f"; it said: {said}"
        if self._encrypted:
            advice = f"load the key: ssh-add {shlex.quote(str(self._encrypted[0]))}"
        elif self._tried:
            advice = f"put one of these keys into ~{self._user}/.ssh/authorized_keys on the node, or set ansible_user"
        else:
            advice = "set ansible_ssh_private_key_file, or load a key with ssh-add"
        return LoginFailed(
            f"{self._name}: the login as {self._label} failed", why=why, serving=_UNTOUCHED, next_step=advice
        )


def _jumps(name: str, config: Any, connection: Any, passed: frozenset[str] = frozenset()) -> list[Any]:
    """Fabric connections to the jump hosts before ``connection``, outermost first.

    Of a chain only the first host may have a ProxyJump of its own, as with OpenSSH. A host that is named as its own
    jump (`Host *`) is reached directly.
    """
    value = str(connection.ssh_config.get("proxyjump") or "none")
    if value.lower() == "none":
        return []
    passed = passed | {connection.original_host, connection.host}
    hops = []
    for word in value.split(","):
        place = parse_place(word)
        if place.host in passed:
            return []
        hops.append(_connection(name, config, place.host, place.user, place.port))
    return [*_jumps(name, config, hops[0], passed), *hops]


def _connection(name: str, config: Any, host: str, user: str | None, port: int | None) -> Any:
    with _usage_errors(name):
        # Fabric would build the jumps itself and check no key on them; it also trips over words of ssh_config that it
        # does not know (ConnectTimeout none, ForwardAgent $SOCKET), hence no None here.
        return fabric.Connection(
            host, user=user, port=port, config=config, gateway=False, forward_agent=False, connect_timeout=1
        )


@contextlib.contextmanager
def _usage_errors(name: str) -> Iterator[None]:
    try:
        yield
    except (SSHException, ValueError, KeyError, OSError) as error:
        raise UsageError(
            f"{name}: the SSH client configuration does not make sense",
            why=str(error),
            next_step="`ssh -G HOST` shows how OpenSSH reads it",
        ) from error


def _known_hosts_files(config: Any, from_inventory: str | None, user_ssh: Path, system_ssh: Path) -> list[Path]:
    """Files that may vouch for a host; the first is where a new key belongs."""
    files = [Path(from_inventory).expanduser()] if from_inventory else []
    for option, defaults in (
        ("userknownhostsfile", [user_ssh / "known_hosts", user_ssh / "known_hosts2"]),
        ("globalknownhostsfile", [system_ssh / "ssh_known_hosts", system_ssh / "ssh_known_hosts2"]),
    ):
        said = config.get(option)
        files += [Path(word).expanduser() for word in shlex.split(said) if word != "none"] if said else defaults
    return files


class _PromptSocket(socket.socket):
    """A TCP socket that acknowledges at once; Linux forgets TCP_QUICKACK by itself, so each read says it again.

    facts: sshd holds back small packets until the last one is acknowledged, 40 ms later by default; the first command
    on a connection took 50 ms without this and takes 12 ms with it.
    """

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data = super().recv(size, flags)
        if hasattr(socket, "TCP_QUICKACK"):
            with contextlib.suppress(OSError):
                self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return data


def _connect_tcp(host: str, port: int, family: int, timeout: float) -> socket.socket:
    """A tuned TCP connection to the first address that answers; a refused one is tried once more."""
    try:
        return _try_addresses(host, port, family, timeout)
    except ConnectionRefusedError:
        time.sleep(REFUSED_PAUSE)
        return _try_addresses(host, port, family, timeout)


def _try_addresses(host: str, port: int, family: int, timeout: float) -> socket.socket:
    addresses = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    deadline = time.monotonic() + timeout
    failure: OSError | None = None
    for position, (kind, style, protocol, _, address) in enumerate(addresses):
        # A share of what is left: an address that swallows packets must leave time for the others.
        share = max(0.1, (deadline - time.monotonic()) / (len(addresses) - position))
        sock = _PromptSocket(kind, style, protocol)
        try:
            sock.settimeout(share)
            _tune(sock)
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = failure or error
        else:
            return sock
    raise failure or OSError(f"{host} has no address")


def _tune(sock: socket.socket) -> None:
    """Send small packets at once, and notice a cut wire in about 15 s.

    facts: without TCP_NODELAY a connect takes 45 ms longer and each command 40 ms; keepalive alone does not notice a
    cut while data is on its way, TCP_USER_TIMEOUT does. Systems without an option do without it.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_NODELAY", 1),
        ("TCP_QUICKACK", 1),
        ("TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE", 5),  # macOS has the second
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 10_000),
    ):
        number = getattr(socket, option, None)
        if number is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, number, value)


def _family(config: Any) -> int:
    names = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
    return names.get(str(config.get("addressfamily", "any")).lower(), socket.AF_UNSPEC)


def _label(connection: Any) -> str:
    port = "" if int(connection.port) == 22 else f":{connection.port}"
    return f"{connection.user}@{connection.host}{port}"


def _own_fingerprint(kind: str) -> str:
    short = "rsa" if "rsa" in kind else "ecdsa" if kind.startswith("ecdsa") else "ed25519"
    return f"ssh-keygen -lf /etc/ssh/ssh_host_{short}_key.pub"


def _public_blob(file: Path) -> bytes | None:
    """The public key beside a private key that we cannot open: enough to find it in an agent."""
    try:
        return base64.b64decode(Path(f"{file}.pub").read_text(encoding="utf-8").split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _certified_by(file: Path) -> bytes | None:
    """The public key for which ``file`` is a certificate; None where it is none, or is not there."""
    try:
        blob = base64.b64decode(file.read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    certified = _certified_blob(blob)
    return None if certified == blob else certified


def _certified_blob(blob: bytes) -> bytes:
    """The public key that a certificate speaks of; anything else as it is."""
    kind = blob[4 : 4 + int.from_bytes(blob[:4], "big")]
    if not kind.endswith(b"-cert-v01@openssh.com"):
        return blob
    try:
        identity = serialization.load_ssh_public_identity(kind + b" " + base64.b64encode(blob))
    except (ValueError, UnsupportedAlgorithm):
        return blob
    if not isinstance(identity, serialization.SSHCertificate):
        return blob
    key = identity.public_key()
    text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return base64.b64decode(text.split()[1])


def _with_certificate(key: paramiko.PKey, file: Path) -> paramiko.PKey:
    certified = copy.copy(key)
    certified.load_certificate(str(file))
    return certified


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
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
