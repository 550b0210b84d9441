"""What an SSH connection runs on: a tuned socket or a ProxyCommand, and paramiko's transport that keeps its reasons."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import tempfile
import time
from collections import deque
from typing import Any

import paramiko

#: Seconds between two attempts when nobody listens: long enough for an sshd that is being restarted.
REFUSED_PAUSE = 0.5


class Transport(paramiko.Transport):
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


class ProxyProcess:
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
        return last_line(os.pread(self._errors.fileno(), 4096, 0))

    def close(self) -> None:
        """Hang up, and end the command if that does not end it."""
        self.socket.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


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


def connect_tcp(host: str, port: int, family: int, timeout: float) -> socket.socket:
    """A tuned TCP connection to the first address that answers; a refused one is tried once more."""
    try:
        return _try_addresses(host, port, family, timeout)
    except ConnectionRefusedError:
        time.sleep(REFUSED_PAUSE)
        return _try_addresses(host, port, family, timeout)


def _try_addresses(host: str, port: int, family: int, timeout: float) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except ValueError as error:  # an empty part between dots, one of more than 63 letters: nobody is asked then
        raise socket.gaierror(socket.EAI_NONAME, f"it can be no name: {error.__cause__ or error}") from error
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


def family_of(config: Any) -> int:
    names = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
    return names.get(str(config.get("addressfamily", "any")).lower(), socket.AF_UNSPEC)


def last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def label_of(connection: Any) -> str:
    port = "" if int(connection.port) == 22 else f":{connection.port}"
    return f"{connection.user}@{connection.host}{port}"
