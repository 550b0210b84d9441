"""One open SSH connection to one node: strict about keys, quick on the wire, and every failure in plain words.

With its parts (`hop`, `login`, `host_keys`, `wire`) the only place that knows Fabric and paramiko. ssh_config, the
sockets, the host key check, the choice of keys and the channels are ours, because Fabric's defaults read ssh_config
otherwise than ssh, accept any host key, add 45 ms a connect for want of TCP_NODELAY, never notice a cut wire, and read
a command's input one character per 10 ms.

Touches nothing on the node. Writes known_hosts on this machine only where the inventory says ``accept-new``.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import fabric
import paramiko
from paramiko.ssh_exception import SSHException

from lamplighter.errors import UNTOUCHED, ContactLost, NodeRefused, SilenceTimeout, Unreachable, UsageError
from lamplighter.paths import at_home
from lamplighter.ssh.become import SUDOERS_FILE, become_words, stop_logging_input, sudo_logs_input, sudo_refusal
from lamplighter.ssh.config import Line, Settings, SshConfig, local_home, local_user, read_lines
from lamplighter.ssh.hop import CHANNEL_TIMEOUT, UNKNOWN_STATE, Hop
from lamplighter.ssh.host_keys import HostKeys
from lamplighter.ssh.known_hosts import DEFAULT_PORT
from lamplighter.ssh.login import Login
from lamplighter.ssh.wire import last_line

if TYPE_CHECKING:
    from lamplighter.inventory.schema import ConnectionSpec

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

#: How long a busy thread goes on while another one wants to: during a login, and else.
PROMPT_SECONDS, USUAL_SECONDS = 0.0002, sys.getswitchinterval()

_CHUNK = 32 * 1024

# Failures are told by our exceptions; paramiko's own tracebacks would only bury them.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)


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
        self._user_ssh = local_home() / ".ssh" if user_ssh is None else user_ssh
        self._system_ssh = system_ssh
        self._hops: list[Hop] = []
        self._knows_sudo = False
        self._lent: list[Callable[[], None]] = []
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
                raise self._given_up()
        if not self._hops:
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
        if self._is_closed:  # given up meanwhile, by Ctrl-C
            self._hang_up()

    def _log_in(self) -> None:
        before: Hop | None = None  # not the last of the hops: `close` may have emptied them, from another thread
        try:
            for hop in self._route():
                self._hops.append(hop)
                if self._is_closed:
                    raise self._given_up()
                hop.login(before.dial(hop) if before else hop.connect_socket())
                before = hop
        except BaseException:
            self._hang_up()
            raise

    def _given_up(self) -> Unreachable:
        return Unreachable(f"{self.name}: the connection was given up", serving=UNTOUCHED, next_step="try again")

    def close(self) -> None:
        """End the connection and the jumps that it went through; commands on it lose their channel, no more.

        A login that another thread is at ends too, and dials no further host.
        """
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

    @property
    def ssh_line(self) -> str:
        """The same login by hand, in the inventory's words: ssh adds what ssh_config says of them, jumps included."""
        asked, key = self._asked, self.spec.key_file
        words = [*(["-p", str(asked.port)] if asked.port else []), *(["-i", key] if key else [])]
        words += [word for name, value in self.spec.ssh_options for word in ("-o", f"{name}={value}")]
        return shlex.join(["ssh", *words, f"{asked.user}@{asked.host}" if asked.user else asked.host])

    @property
    def _asked(self) -> Place:
        """Where the inventory wants to go; what it leaves open is ssh_config's."""
        place = parse_place(self.spec.host)
        return Place(place.host, self.spec.user or place.user, self.spec.port or place.port)

    def stream(self, command: str) -> Channel:
        """Start ``command`` in the login shell, without a terminal, and hand over its raw channel.

        Raises Unreachable while nothing has started; whether it did start is told by the channel's first `read`.
        """
        self.open()
        return Channel(self._hops[-1], command, self._make_room)

    def lend(self, close: Callable[[], None]) -> None:
        """Take note of a channel that stays open between two commands: ``close`` ends it where the node takes one only.

        Whoever lends it must be able to open it again.
        """
        self._lent.append(close)

    def _make_room(self) -> None:
        while self._lent:
            self._lent.pop()()

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
                    why=last_line(channel.read_stderr()) or "it wrote nothing to stderr",
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
        listed = self.run("exec sudo -n -l", timeout=CHANNEL_TIMEOUT)
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
        tried = self.run(self.wrap(":"), timeout=CHANNEL_TIMEOUT)
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

    def _route(self) -> list[Hop]:
        """The hops in the order in which they are opened: the outermost jump host first, the node itself last."""
        spec = self.spec
        directories = ((self._user_ssh, "config"), (self._system_ssh, "ssh_config"))
        config = SshConfig(tuple(read_lines(directory / name, directory) for directory, name in directories))
        # The inventory wins everywhere, also in the %p and %r of a ProxyCommand and in `Match user`.
        target = _look_up(replace(config, files=(_lines_of(spec.ssh_options), *config.files)), self._asked)
        hops: list[Hop] = []
        for stop in [*_jumps(config, target), target]:
            connection = _connection(self.name, stop)
            key_file = spec.key_file if stop is target else None
            known = _known_hosts_files(stop.settings, spec.known_hosts, self._user_ssh, self._system_ssh)
            keys = HostKeys(self.name, connection, stop.settings, known, spec.host_key_checking, bool(hops))
            login = Login(self.name, connection, stop.settings, key_file, self._user_ssh, is_jump=stop is not target)
            timeout = _connect_timeout(spec, stop.settings)
            hops.append(Hop(self.name, connection, stop.settings, keys, login, timeout, self.ssh_line))
        return hops


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

    def __init__(self, hop: Hop, command: str, make_room: Callable[[], None]) -> None:
        self._hop = hop
        self._early = bytearray()
        self._stderr = bytearray()
        self._stderr_dropped = 0
        self._stderr_guard = threading.Lock()
        self._channel = hop.execute(command, make_room)
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
                        f"{self._hop.name}: the node took no input for {timeout:g} s", serving=UNKNOWN_STATE
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
                f"{self._hop.name}: no word from the node for {timeout:g} s", serving=UNKNOWN_STATE
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
            raise SilenceTimeout(f"{self._hop.name}: no exit status within {timeout:g} s", serving=UNKNOWN_STATE)
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
            why=self._hop.last_words or last_line(self.read_stderr()) or "the wire was cut, or the sshd was ended",
            serving=UNKNOWN_STATE,
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
    if port and not (re.fullmatch("0*[0-9]{1,5}", port) and 0 < int(port[-5:]) < 65536):
        raise UsageError(f"{text!r} has no usable port", why="expected [user@]host[:port]")
    return Place(host, user or None, int(port[-5:]) if port else None)


@dataclass(frozen=True)
class _Stop:
    """A host on the way, and what the SSH client configuration says of it."""

    place: Place
    settings: Settings


def _lines_of(options: Iterable[tuple[str, str]]) -> tuple[Line, ...]:
    """What `ssh -o` says, as lines that stand before those of all files."""
    return tuple(Line("ansible_ssh_common_args of the inventory", keyword, value) for keyword, value in options)


def _look_up(config: SshConfig, asked: Place) -> _Stop:
    settings = replace(config, user=asked.user, port=asked.port).lookup(asked.host)
    user, port = settings.get("user") or local_user(), int(settings.get("port") or DEFAULT_PORT)
    return _Stop(Place(settings.get("hostname"), user, port), settings)


def _jumps(config: SshConfig, stop: _Stop, passed: frozenset[Place] = frozenset()) -> list[_Stop]:
    """The jump hosts before ``stop``, outermost first.

    Of a chain only the first host may have a ProxyJump of its own, as with OpenSSH. A login that is named as its own
    jump (`Host *`) is reached directly.
    """
    value = stop.settings.get("proxyjump") or "none"
    if value.lower() == "none":
        return []
    passed = passed | {stop.place}
    jumps = [_look_up(config, parse_place(word)) for word in value.split(",")]
    if any(jump.place in passed for jump in jumps):
        return []
    return [*_jumps(config, jumps[0], passed), *jumps]


def _connection(name: str, stop: _Stop) -> Any:
    place = stop.place
    with _usage_errors(name):
        # lazy: a stray ~/.fabric.yaml or FABRIC_* variable has no say in where we connect; nor has Fabric's own reading
        # of ssh_config, by which it would build the jumps itself and check no key on them.
        config = fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True)
        return fabric.Connection(
            place.host,
            user=place.user,
            port=place.port,
            config=config,
            gateway=False,
            forward_agent=False,
            connect_timeout=1,
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


def _known_hosts_files(settings: Settings, from_inventory: str | None, user_ssh: Path, system_ssh: Path) -> list[Path]:
    """Files that may vouch for a host; the first is where a new key belongs. Empty where ssh_config wants none."""
    files = [at_home(from_inventory)] if from_inventory else []
    for option, defaults in (
        ("userknownhostsfile", [user_ssh / "known_hosts", user_ssh / "known_hosts2"]),
        ("globalknownhostsfile", [system_ssh / "ssh_known_hosts", system_ssh / "ssh_known_hosts2"]),
    ):
        said = settings.all(option)
        files += defaults if said is None else [Path(word) for word in said if word.lower() != "none"]
    return files


def _connect_timeout(spec: ConnectionSpec, settings: Settings) -> float:
    """The inventory's time where it differs from the default, else that of ssh_config, else the default."""
    usual = type(spec).connect_timeout
    wanted = spec.connect_timeout if spec.connect_timeout != usual else settings.seconds("connecttimeout") or usual
    return min(wanted, LONGEST_TIMEOUT)


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
