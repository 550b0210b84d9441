"""The default way to a node: Fabric, in this process, with its gateways for jump hosts.

The only place that knows Fabric and paramiko. The socket is ours, since paramiko sets no TCP_NODELAY and notices no cut
wire; Fabric's own reading of ssh_config, and its acceptance of any host key, are off.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import fabric
import paramiko
from paramiko.ssh_exception import ChannelException, SSHException

from lamplighter.errors import LamplighterError, Unreachable, UsageError
from lamplighter.paths import at_home, read_file
from lamplighter.ssh.config import Known, Settings, Values, asked_for, fingerprint, ssh_line
from lamplighter.ssh.host_keys import host_key_changed, host_key_unknown
from lamplighter.ssh.trouble import (
    AUTH_SECONDS,
    CHANNEL_SECONDS,
    REFUSED_PAUSE,
    connection_gone,
    given_up,
    login_failed,
    runs_no_commands,
    session_refused,
    unanswered,
    unreachable,
)

if TYPE_CHECKING:
    from lamplighter.inventory.schema import ConnectionSpec

#: Seconds for an ssh-agent to tell its keys; less than those for the whole login.
AGENT_SECONDS = 20.0

# Failures are told by our exceptions; paramiko's own tracebacks would only bury them.
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)


class FabricWay:
    """A login by Fabric through every jump host. `close` may come from another thread at any moment of it."""

    broken = (OSError, EOFError, SSHException)

    def __init__(self, name: str, route: Sequence[Settings], timeout: float) -> None:
        self._name = name
        self._route = route
        self._timeout = timeout
        self._hops: list[Any] = []
        self._is_closed = False
        #: Whether ssh could say no more of what went wrong.
        self.is_sure = False

    def open(self) -> None:
        """Log in. Raises Unreachable or one of its kinds, and leaves nothing open then."""
        gateway: Any = None
        for stop in self._route:
            gateway = self._log_in(stop, gateway)

    def close(self) -> None:
        """End the login and its jumps, also half-made ones: what is being made ends as soon as it is there."""
        self._is_closed = True
        while self._hops:
            with contextlib.suppress(OSError, EOFError, SSHException, IndexError):
                hop = self._hops.pop()
                hop.client.close()

    @property
    def is_alive(self) -> bool:
        return bool(self._hops) and bool(self._hops[-1].transport.is_active())

    @property
    def last_words(self) -> str:
        """What the other side, or paramiko, last said about a failure."""
        return _words_of(self._hops[-1]) if self._hops else ""

    def execute(self, command: str) -> paramiko.Channel:
        """A channel on which the node was asked to run ``command``; `agree` tells what it said to that."""
        stop = self._route[-1]
        try:
            channel: paramiko.Channel = self._hops[-1].transport.open_session(timeout=CHANNEL_SECONDS)
        except ChannelException as error:
            raise session_refused(self._name, stop, self.last_words or str(error)) from error
        except (SSHException, EOFError, OSError, IndexError) as error:
            raise connection_gone(self._name, stop, self.last_words or str(error)) from error
        # paramiko's exec_command would wait a round trip for the node's word; what we write next may travel meanwhile
        channel._wait_for_event = lambda: None  # type: ignore[attr-defined]
        try:
            channel.exec_command(command)
        except (SSHException, EOFError, OSError) as error:
            raise unanswered(self._name, stop, self.last_words or str(error)) from error
        return channel

    def agree(self, channel: paramiko.Channel) -> None:
        """Wait for the node's word that it runs the command. Raises NodeRefused, or ContactLost for no word at all."""
        stop = self._route[-1]
        # paramiko would wait without any limit, and a stopped sshd never gives this answer
        if not channel.event.wait(CHANNEL_SECONDS):
            channel.close()
            raise unanswered(self._name, stop, f"no answer within {CHANNEL_SECONDS:g} s")
        if not channel.event_ready:
            if not self.is_alive:
                raise unanswered(self._name, stop, self.last_words or "the wire was cut, or the sshd was ended")
            raise runs_no_commands(self._name, stop)

    def status(self, channel: paramiko.Channel, timeout: float | None) -> int | None:
        """The exit status, None where there is none. Raises TimeoutError."""
        if not channel.status_event.wait(timeout):
            raise TimeoutError
        return None if channel.exit_status < 0 else channel.exit_status

    def _log_in(self, stop: Settings, gateway: Any) -> Any:
        if stop.get("revokedhostkeys") != "none":
            raise UsageError(
                f"{self._name}: RevokedHostKeys of ssh_config needs ssh",
                why="Fabric cannot follow it, and no host key can be accepted without",
                next_step="set transport: auto for this host, and install ssh here",
            )
        policy = _HostKeys(self._name, stop, is_behind=gateway is not None)
        proxy = stop.get("proxycommand")
        uses_agent = stop.get("identitiesonly") != "yes"
        connection = fabric.Connection(
            stop.host,
            user=stop.user,
            port=stop.port,
            # lazy: a stray ~/.fabric.yaml or FABRIC_* variable has no say in where we connect
            config=fabric.Config(ssh_config=paramiko.SSHConfig(), lazy=True),
            gateway=gateway or (proxy if proxy != "none" else False),
            forward_agent=False,
            connect_timeout=2 * self._timeout,  # the whole negotiation: banner and key exchange
            connect_kwargs={
                "banner_timeout": self._timeout,
                "auth_timeout": AUTH_SECONDS,
                "channel_timeout": CHANNEL_SECONDS,
                "key_filename": [str(file) for file in stop.identities if file.exists()],
                "look_for_keys": False,
                "allow_agent": uses_agent,
                "transport_factory": lambda sock, **options: _Transport(sock, policy, self._timeout, **options),
            },
        )
        connection.client.set_missing_host_key_policy(policy)
        with self._told(connection, stop, gateway):
            if not connection.gateway:
                connection.connect_kwargs["sock"] = _connect_tcp(stop, self._timeout)
            if self._is_closed:
                connection.connect_kwargs.get("sock", io.BytesIO()).close()
                raise given_up(self._name)
            if uses_agent:
                _await_agent()
            self._hops.append(connection)
            connection.open()
            if self._is_closed:
                raise given_up(self._name)
            if not connection.transport.is_authenticated():
                raise SSHException("a key was accepted, and the node wants more than that")
        return connection

    @contextlib.contextmanager
    def _told(self, connection: Any, stop: Settings, gateway: Any) -> Iterator[None]:
        """Translate what the libraries raise while ``stop`` is being reached."""
        began = time.monotonic()
        try:
            yield
        except BaseException as error:
            told = error
            if isinstance(error, Exception) and not isinstance(error, LamplighterError):
                told = self._translated(error, connection, stop, gateway, time.monotonic() - began)
            with contextlib.suppress(OSError, EOFError, SSHException):
                connection.client.close()
            self.close()
            if told is error:
                raise
            raise told from error

    def _translated(
        self, error: Exception, connection: Any, stop: Settings, gateway: Any, waited: float
    ) -> Unreachable:
        transport = connection.client.get_transport()
        is_behind = isinstance(error, ChannelException) and gateway is not None
        words = _words_of(gateway if is_behind else connection)
        said = str(error) or words or type(error).__name__
        cause = error.__context__ if "protocol banner" in said else error
        kind, why = "other", said if words in said else f"{said}; it said: {words}"
        if is_behind:
            kind, why = "behind", words or said
        elif isinstance(error, socket.gaierror):
            kind, why = "unresolved", error.strerror or said
        elif isinstance(error, ConnectionRefusedError):
            kind, why = "refused", f"connection refused, twice, {REFUSED_PAUSE:g} s apart"
        elif transport is None:
            if isinstance(error, TimeoutError):
                kind, why = "silent", f"no TCP connection within {self._timeout:g} s"
        elif transport.initial_kex_done:
            if "imeout" not in said or not transport.is_active():
                tried = ", ".join(connection.connect_kwargs["key_filename"]) or "no key file"
                return login_failed(
                    self._name, stop, f"{why}; tried {tried}", f"see what `{ssh_line(stop.spec)} -v` says"
                )
            kind = "slow login"
        elif (
            isinstance(cause, TimeoutError)
            or "No existing session" in said
            or transport.packetizer.handshake_timed_out()
        ):
            # a banner that drips is waited for twice as long as silence
            kind, why = "slow", f"waited {round(waited, 1):g} s for its part of the handshake"
        self.is_sure = kind != "other"
        return unreachable(self._name, stop, kind, why)


class _HostKeys(paramiko.MissingHostKeyPolicy):
    """Decides about a shown host key. paramiko is given no keys of its own, so it asks here every time."""

    def __init__(self, name: str, stop: Settings, *, is_behind: bool) -> None:
        self._name = name
        self._stop = stop
        self._is_behind = is_behind
        self.known: list[Known] = stop.known_keys or []

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        """Return to accept the key, raise to refuse it."""
        stop, checking = self._stop, self._stop.spec.host_key_checking
        shown = f"{key.get_name()} {fingerprint(key.asbytes())}"
        if checking == "off" or any(known.blob == key.asbytes() for known in self.known):
            return
        if self.known:
            raise host_key_changed(self._name, stop, shown, self.known[0].origin)
        if checking == "strict" or stop.known_keys is None:
            raise host_key_unknown(self._name, stop, shown, is_behind=self._is_behind)
        for file in stop.known_hosts[:1]:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with file.open("a") as lines:
                lines.write(f"{stop.host_names[0]} {key.get_name()} {key.get_base64()}\n")


class _Transport(paramiko.Transport):
    """paramiko's transport, which keeps the reason of its last failure instead of logging it.

    The server's own words about a refused channel or a disconnect reach the log and nothing else.
    """

    def __init__(self, sock: Any, policy: _HostKeys, timeout: float, **options: Any) -> None:
        self.words: deque[str] = deque(maxlen=4)
        super().__init__(sock, **options)
        self.handshake_timeout = timeout
        # a host with several keys must be asked for one that we know
        security = self.get_security_options()
        rsa = ("rsa-sha2-512", "rsa-sha2-256")
        wanted = [each for key in policy.known for each in (rsa if key.kind == "ssh-rsa" else (key.kind,))]
        first = [kind for kind in dict.fromkeys(wanted) if kind in security.key_types]
        security.key_types = [*first, *(kind for kind in security.key_types if kind not in first)]

    def _log(self, level: int, msg: Any, *args: Any) -> None:
        text = msg if isinstance(msg, str) else ""
        if text and (level >= logging.ERROR or text.startswith("Disconnect")):
            self.words.append(text % args if args else text)


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


def _connect_tcp(stop: Settings, timeout: float) -> socket.socket:
    """A tuned TCP connection to the first address that answers; a refused one is tried once more."""
    try:
        return _dial(stop, timeout)
    except ConnectionRefusedError:
        time.sleep(REFUSED_PAUSE)
        return _dial(stop, timeout)


def _dial(stop: Settings, timeout: float) -> socket.socket:
    try:
        plain = socket.create_connection((stop.host, stop.port), timeout)
    except ValueError as error:  # an empty part between dots, one of more than 63 letters: nobody is asked then
        raise socket.gaierror(socket.EAI_NONAME, f"it can be no name: {error.__cause__ or error}") from error
    sock = _PromptSocket(fileno=plain.detach())
    sock.settimeout(timeout)
    _tune(sock)
    return sock


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


def _await_agent() -> None:
    """Raise SSHException for an ssh-agent that does not tell its keys in time: paramiko would wait for ever."""
    with socket.socket(socket.AF_UNIX) as agent, contextlib.suppress(OSError):
        agent.settimeout(AGENT_SECONDS)
        agent.connect(os.environ.get("SSH_AUTH_SOCK", ""))
        agent.sendall(b"\0\0\0\1\x0b")  # SSH_AGENTC_REQUEST_IDENTITIES
        try:
            agent.recv(1)
        except TimeoutError:
            raise SSHException(f"the ssh-agent did not answer within {AGENT_SECONDS:g} s") from None


def _words_of(connection: Any) -> str:
    transport = connection.client.get_transport()
    return transport.words[-1] if isinstance(transport, _Transport) and transport.words else ""


def read_ssh_config(spec: ConnectionSpec) -> Values:
    """What paramiko's reader of ssh_config makes of a host, in the form of `ssh -G`. Raises UsageError."""
    config, asked = paramiko.SSHConfig(), asked_for(spec)
    here = (spec.ssh_config,) if spec.ssh_config else ("~/.ssh/config", "/etc/ssh/ssh_config")
    for file in map(at_home, here):
        try:
            config.parse(io.StringIO(read_file(file).decode(errors="replace")))
            found = config.lookup(asked.host)
        except FileNotFoundError:
            continue
        except Exception as error:  # its parser raises whatever it stumbles over
            raise UsageError("cannot read the SSH client configuration", why=str(error), origin=file) from error
    values: dict[str, Sequence[str]] = {
        "userknownhostsfile": ("~/.ssh/known_hosts",),
        "globalknownhostsfile": ("/etc/ssh/ssh_known_hosts",),
        "identityfile": [f"~/.ssh/id_{kind}" for kind in ("ed25519", "ecdsa", "rsa")],
    }
    found = config.lookup(asked.host)
    values |= {word: said if isinstance(said, list) else (said,) for word, said in found.items()}
    values |= {word: (said,) for word, said in reversed(spec.ssh_options)}
    over = {"user": asked.user, "port": asked.port}
    return values | {word: (str(said),) for word, said in over.items() if said}
