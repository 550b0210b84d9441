"""One SSH login on the way to a node: reached, checked, authenticated, and every failure in plain words."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import paramiko
from paramiko.ssh_exception import AuthenticationException, ChannelException, IncompatiblePeer, SSHException

from lamplighter.errors import (
    UNTOUCHED,
    ContactLost,
    LamplighterError,
    LoginFailed,
    NodeRefused,
    SessionRefused,
    Unreachable,
)
from lamplighter.ssh.config import Settings
from lamplighter.ssh.host_keys import HostKeys
from lamplighter.ssh.login import Login
from lamplighter.ssh.wire import REFUSED_PAUSE, ProxyProcess, Transport, connect_tcp, family_of, label_of

#: Seconds for one login attempt; a node with a slow directory service or DNS takes its time here.
AUTH_TIMEOUT = 30.0
#: Seconds for opening a channel and for the node's answer to exec; paramiko itself would wait an hour and for ever.
CHANNEL_TIMEOUT = 20.0
#: Seconds for sessions that we have closed to end on the node, and between two tries; their last word is a beat.
TEARDOWN_SECONDS = 10.0
TEARDOWN_PAUSE = 0.02
#: So many of our last sessions are remembered.
MOST_SESSIONS = 8
UNKNOWN_STATE = "not known from here; the node finishes what it started"


class Hop:
    """One SSH login on the way: a Fabric connection, its socket, its host key check."""

    def __init__(
        self,
        name: str,
        connection: Any,
        settings: Settings,
        keys: HostKeys,
        login: Login,
        timeout: float,
        ssh_line: str,
    ) -> None:
        self.name = name
        self.label = label_of(connection)
        self.user: str = connection.user
        self._connection = connection
        self._settings = settings
        self._keys = keys
        self._login = login
        self._timeout = timeout
        self._ssh_line = ssh_line
        self._proxy: ProxyProcess | None = None
        self._began: float | None = None
        self._is_closed = False
        self._sessions: list[paramiko.Channel] = []

    @property
    def transport(self) -> Transport:
        transport: Transport = self._connection.transport
        return transport

    @property
    def last_words(self) -> str:
        """What the other side, or paramiko, last said about a failure."""
        transport = self._connection.client.get_transport()
        words = list(transport.words) if isinstance(transport, Transport) else []
        return words[-1] if words else ""

    @property
    def _preamble(self) -> str:
        transport = self._connection.client.get_transport()
        return transport.preamble if isinstance(transport, Transport) else ""

    @property
    def _handshake_timed_out(self) -> bool:
        # paramiko tells this as the same EOFError that a hang-up gives
        transport = self._connection.client.get_transport()
        return transport is not None and bool(transport.packetizer.handshake_timed_out())

    def connect_socket(self) -> Any:
        """A socket to this host, tuned; through its ProxyCommand where ssh_config has one."""
        command = self._settings.get("proxycommand")
        with self._told():
            if command:
                self._proxy = ProxyProcess(command)
                return self._proxy.socket
            return connect_tcp(
                self._connection.host, int(self._connection.port), family_of(self._settings), self._timeout
            )

    def dial(self, inner: Hop) -> Any:
        """A way through this host to the next one."""
        place = (inner._connection.host, int(inner._connection.port))
        with inner._told(through=self):
            return self.transport.open_channel("direct-tcpip", place, ("", 0), timeout=self._timeout)

    def login(self, sock: Any) -> None:
        """Shake hands over ``sock``, check the host key, log in. Leaves nothing open where `close` came meanwhile."""
        connection, self._began = self._connection, time.monotonic()
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
        finally:
            if self._is_closed:
                self.close()

    def execute(self, command: str, make_room: Callable[[], None]) -> paramiko.Channel:
        """A channel on which the node was asked to run ``command``; `await_agreement` tells what it said to that.

        Where the node takes no further session, ``make_room`` is called to close what is idle, and what was closed is
        given time to end there.
        """
        try:
            channel = self._open_session(make_room)
        except ChannelException as error:
            raise SessionRefused(
                f"{self.name}: {self.label} refuses another session on this connection",
                why=self.last_words or str(error),
                serving=UNTOUCHED,
                next_step="set MaxSessions in the node's sshd_config to 1 or more, and look for a command there that "
                "still holds the session of an earlier task",
            ) from error
        except (SSHException, EOFError, OSError) as error:
            raise Unreachable(
                f"{self.name}: the connection to {self.label} is gone",
                why=self.last_words or str(error) or "it ended without a word",
                serving=UNTOUCHED,
                next_step="try again",
            ) from error
        # paramiko's exec_command would wait a round trip for the node's word; what we write next may travel meanwhile
        channel._wait_for_event = lambda: None  # type: ignore[attr-defined]
        try:
            channel.exec_command(command)
        except (SSHException, EOFError, OSError) as error:
            raise self._unanswered(self.last_words or str(error)) from error
        return channel

    def _open_session(self, make_room: Callable[[], None]) -> paramiko.Channel:
        """Open a session. facts: sshd counts one that we have closed until its command has ended and was waited for."""
        deadline = None
        while True:
            try:
                channel = self.transport.open_session(timeout=CHANNEL_TIMEOUT)
            except ChannelException:
                if deadline is None:
                    make_room()
                    deadline = time.monotonic() + TEARDOWN_SECONDS
                is_ending = any(each.closed for each in self._sessions)
                if not is_ending or time.monotonic() >= deadline:
                    raise
                time.sleep(TEARDOWN_PAUSE)
            else:
                self._sessions = [*self._sessions[-MOST_SESSIONS:], channel]
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
            serving=UNTOUCHED,
            next_step="look for ForceCommand, a restricted key or a no-login shell on the node",
        )

    def _unanswered(self, why: str) -> ContactLost:
        return ContactLost(
            f"{self.name}: {self.label} did not say whether it started the command",
            why=why,
            serving=UNKNOWN_STATE,
            next_step="try again; the same task picks up what the node did",
        )

    def close(self) -> None:
        """End this login, also a half-made one, and one that another thread is just making."""
        self._is_closed = True
        with contextlib.suppress(OSError, EOFError, SSHException):
            self._connection.close()
            self._connection.client.close()
        if self._proxy:
            self._proxy.close()

    def _make_transport(self, sock: Any, **options: Any) -> Transport:
        transport = Transport(sock, **options)
        transport.handshake_timeout = self._timeout
        wanted = self._keys.algorithms()
        offered = list(transport.get_security_options().key_types)
        first = [kind for kind in wanted if kind in offered]
        transport.get_security_options().key_types = first + [kind for kind in offered if kind not in first]
        return transport

    @contextlib.contextmanager
    def _told(self, through: Hop | None = None) -> Iterator[None]:
        """Translate what the libraries raise while this host is being reached."""
        try:
            yield
        except LamplighterError:
            raise
        except (OSError, EOFError, SSHException) as error:
            raise self._translate(error, through) from error

    def _translate(self, error: Exception, through: Hop | None) -> LamplighterError:
        host, port = self._connection.host, self._connection.port
        words = through.last_words if through else self.last_words
        said = str(error) or words or type(error).__name__

        def unreachable(what: str, why: str, next_step: str) -> Unreachable:
            return Unreachable(f"{self.name}: {what}", why=why, serving=UNTOUCHED, next_step=next_step)

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
                f"nothing listens on {host}:{port}",
                f"connection refused, twice, {REFUSED_PAUSE:g} s apart",
                "is sshd running there, and is ansible_port right?",
            )
        if isinstance(error, AuthenticationException):  # ours says more; this is paramiko's own timeout
            return LoginFailed(
                f"{self.name}: the login as {self.label} did not come to an end",
                why=words or said,
                serving=UNTOUCHED,
                next_step=f"try `{self._ssh_line} -v`",
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
                # a banner that drips is waited for twice as long as silence
                waited = self._timeout if self._began is None else time.monotonic() - self._began
                why = f"waited {round(waited, 1):g} s for its part of the handshake"
                advice = "the node may be overloaded or stopped, or something else listens on that port"
            return unreachable(what, why, advice)
        if isinstance(cause, (EOFError, ConnectionResetError)):
            return unreachable(
                f"{host}:{port} hung up during the handshake",
                words or "the connection was closed",
                "look at the sshd log of the node: MaxStartups, fail2ban, a host that is still booting",
            )
        return unreachable(f"no SSH connection to {host}:{port}", said, f"try `{self._ssh_line} -v`")
