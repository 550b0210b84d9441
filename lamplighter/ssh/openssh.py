"""The other way to a node: the system's ssh, for all that paramiko cannot do.

One ssh logs in and stays as ControlMaster, on a socket in a private directory of ours; each command is a session that
is asked of it by its own protocol (OpenSSH's PROTOCOL.mux), which costs no process and tells the exit status from the
death of the wire. Where ssh_config names a ControlMaster that is up already, its connection is used, and left alone.
ssh never asks anything, and ends when we end, however that comes about.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lamplighter.errors import LamplighterError, UsageError
from lamplighter.paths import at_home
from lamplighter.ssh.config import Settings, is_encrypted, is_up, ssh_options
from lamplighter.ssh.host_keys import host_key_changed, host_key_revoked, host_key_unknown, host_key_unwritten
from lamplighter.ssh.trouble import (
    AUTH_SECONDS,
    CHANNEL_SECONDS,
    REFUSED_PAUSE,
    connection_gone,
    given_up,
    login_failed,
    runs_no_commands,
    session_refused,
    unreachable,
)

#: Runs ssh until it ends, or until our end of stdin is closed: then its directory ($1) goes too.
KEEPER = """d=$1; shift; exec 3<&0
"$@" 3<&- </dev/null & ssh=$!
{ read -r _ <&3; rm -rf -- "$d"; kill $ssh; } & watch=$!
exec 3<&-; wait $ssh; status=$?; kill $watch; exit $status"""

#: Seconds for ssh to end when it is told to.
END_SECONDS = 5.0

#: What holds whatever ssh_config says: nothing is asked, nothing but our commands is done, and a cut wire is noticed.
_OURS = (
    "BatchMode=yes", "RemoteCommand=none", "PermitLocalCommand=no", "ClearAllForwardings=yes", "ForwardAgent=no",
    "ForwardX11=no", "RequestTTY=no", "UpdateHostKeys=no", "VisualHostKey=no", "ServerAliveInterval=5",
    "ServerAliveCountMax=2", "Tunnel=no",
)  # fmt: skip

#: What ssh says when the wire, or the other side, is not as it should be: the kind of the trouble, and why.
_KINDS = (
    ("unresolved", r"Could not resolve hostname \S+: (.+)", "{0}"),
    ("refused", r"(Connection refused)", f"connection refused, twice, {REFUSED_PAUSE:g} s apart"),
    ("no ssh", r"banner line 0: (.+)", "it says {0!r}"),
    (
        "slow",
        r"(timed out during banner exchange|Connection to \S+ port \d+ timed out)",
        "waited {seconds:g} s for its part of the handshake",
    ),
    ("silent", r"connect to (?:host|address) .*(timed out)", "no TCP connection within {seconds:g} s"),
    ("no method", r"(Unable to negotiate .+)", "{0}"),
    ("hung up", r"kex_exchange_identification: (.+)", "{0}"),
    ("hung up", r"(Connection (?:reset|closed) by .+)", "{0}"),
)
_TALK = (
    "debug1: ", "OpenSSH_", "Transferred: ", "Bytes ", "kex_exchange_identification: ", "Connection closed by UNKNOWN",
)  # fmt: skip

# PROTOCOL.mux
_HELLO, _NEW_SESSION, _EXIT_MESSAGE, _SESSION_OPENED = 0x1, 0x10000002, 0x80000004, 0x80000006
_NO_ESCAPE = 0xFFFFFFFF


class OpenSSHWay:
    """A login by ssh through every jump host. `close` may come from another thread at any moment of it."""

    broken = (OSError,)

    def __init__(self, name: str, route: Sequence[Settings], timeout: float) -> None:
        self._name = name
        self._route = route
        self._timeout = timeout
        self._directory = ""
        self._socket = ""
        self._keeper: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def open(self) -> None:
        """Log in. Raises Unreachable or one of its kinds, and leaves nothing open then."""
        if is_up(theirs := self._route[-1].get("controlpath")):
            self._socket = theirs
            return
        try:
            if not self._start():
                time.sleep(REFUSED_PAUSE)
                if not self._start():
                    raise self._failed()
            if unwritten := re.search(r"Failed to add the host to the list of known hosts \((.+)\)", self._log()):
                raise host_key_unwritten(self._name, unwritten[1])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the login, also a half-made one; a ControlMaster that was up before stays."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        keeper, self._keeper, self._socket = self._keeper, None, ""
        if keeper and keeper.stdin:
            keeper.stdin.close()
            try:
                keeper.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(keeper.pid, signal.SIGKILL)
                keeper.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def is_alive(self) -> bool:
        return is_up(self._socket)

    @property
    def last_words(self) -> str:
        """What ssh last said, apart from its own talk."""
        *_, last = ["", *(line for line in self._log().splitlines() if line and not line.startswith(_TALK))]
        return last

    def execute(self, command: str) -> Session:
        """A session in which the node was asked to run ``command``."""
        stop = self._route[-1]
        session = Session()
        try:
            said = session.ask(self._socket, command)
        except (OSError, struct.error) as error:
            session.close()
            why = "Timeout opening channel" if isinstance(error, TimeoutError) else self.last_words
            raise connection_gone(self._name, stop, why) from error
        if said:
            session.close()
            raise session_refused(self._name, stop, said)
        return session

    def agree(self, session: Session) -> None:
        """Nothing: what came of the request for the command is told by `status`."""

    def status(self, session: Session, timeout: float | None) -> int | None:
        """The exit status, None where there is none. Raises TimeoutError, and NodeRefused for an exec refused."""
        status = session.wait(timeout)
        if status is None and "exec request failed" in self._log():
            raise runs_no_commands(self._name, self._route[-1])
        return status

    # -- the login

    def _start(self) -> bool:
        """Start ssh and wait until it is logged in; False where nobody listens. Raises Unreachable."""
        self._end()
        # short: a socket's name holds some 100 bytes, and ssh adds 17 of its own
        short = "/tmp" if os.access("/tmp", os.W_OK) else None  # noqa: S108 - mkdtemp makes it ours alone
        self._directory = tempfile.mkdtemp(prefix="lamplighter-", dir=short)
        control = f"{self._directory}/s"
        words = [*self._words(control), "--", self._route[-1].asked.host]
        deadline = time.monotonic() + 2 * self._timeout + AUTH_SECONDS
        with Path(self._directory, "log").open("wb") as log:
            self._keeper = keeper = subprocess.Popen(
                ["/bin/sh", "-c", KEEPER, "sh", self._directory, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"},
                start_new_session=True,  # Ctrl-C is for us alone: the connection still has to carry what we say next
            )
        while not is_up(control):
            if self._is_closed:
                raise given_up(self._name)
            if keeper.poll() is not None:
                if re.search("connect to .*Connection refused", self._log()):
                    return False
                raise self._failed()
            if time.monotonic() > deadline:
                raise self._failed()
            time.sleep(0.002)
        self._socket = control
        return True

    def _words(self, control: str) -> list[str]:
        target = self._route[-1]
        proxy: list[str] = []
        for stop in self._route[:-1]:
            words = ["ssh", "-v", "-o", "ControlMaster=no", *self._options(stop), *proxy, *ssh_options(stop.spec)]
            words = [word.replace("%", "%%") for word in words]  # the ssh that is given this line expands it
            proxy = ["-o", "ProxyCommand=" + shlex.join([*words, "-W", "[%h]:%p", "--", stop.asked.host])]
        own = ("ControlMaster=yes", f"ControlPath={control}", "ControlPersist=no")
        master = [word for option in own for word in ("-o", option)]
        return ["ssh", "-v", "-M", "-N", "-T", *master, *self._options(target), *proxy, *ssh_options(target.spec)]

    def _options(self, stop: Settings) -> list[str]:
        """What the inventory says of host keys and times, and what holds for every login of ours."""
        checking = {"strict": "yes", "accept-new": "accept-new", "off": "no"}[stop.spec.host_key_checking]
        options = [*_OURS, f"StrictHostKeyChecking={checking}", f"ConnectTimeout={math.ceil(self._timeout)}"]
        if stop.get("forkafterauthentication") == "yes":  # older ones do not know the word
            options.append("ForkAfterAuthentication=no")
        if checking == "no":
            options += ["UserKnownHostsFile=/dev/null", "GlobalKnownHostsFile=/dev/null"]
        elif stop.spec.known_hosts:
            files = [str(at_home(stop.spec.known_hosts).absolute()), *stop.user_known_hosts]
            options.append("UserKnownHostsFile=" + " ".join(f'"{file}"' for file in files).replace("%", "%%"))
        return [word for option in options for word in ("-o", option)]

    # -- what ssh said

    def _log(self) -> str:
        try:
            return Path(self._directory, "log").read_text(errors="replace").replace("\r", "")
        except OSError:
            return ""

    def _failed(self) -> LamplighterError:
        """The error behind a login that did not come about."""
        log, stop = self._log(), self._route[0]
        behind = re.findall(r"open failed: (.+)", log)
        if behind and len(self._route) > 1:
            return unreachable(self._name, self._route[-1], "behind", behind[-1])
        *_, began = [None, *re.finditer(r"^debug1: Authenticating to (.+):(\d+) as ", log, re.MULTILINE)]
        if began:  # of the hosts on the way the last one that is spoken to
            stop = next((each for each in self._route if (each.host, f"{each.port}") == began.groups()), stop)
            log = log[began.start() :]
        if "Host key verification failed" in log and (
            keys := re.findall(r"Server host (?:key|certificate): (\S+ [\w:+/=]+)", log)
        ):
            return self._host_key_error(stop, keys[-1], log)
        if re.search(r"Permission denied \(|Too many authentication failures", log):
            return self._login_error(stop, log)
        lines = [line for line in log.splitlines() if line and not line.startswith(_TALK)]
        if not began and stop.get("proxycommand") != "none":
            return unreachable(self._name, stop, "proxy", lines[0] if lines else "it said nothing")
        for kind, pattern, why in _KINDS:
            if found := re.search(pattern, log):
                return unreachable(self._name, stop, kind, why.format(found[found.re.groups], seconds=self._timeout))
        is_late = self._keeper is not None and self._keeper.poll() is None
        kind = "other" if not is_late else "slow login" if began else "slow" if "established" in log else "silent"
        return unreachable(self._name, stop, kind, lines[-1] if lines else "ssh said nothing in time")

    def _host_key_error(self, stop: Settings, shown: str, said: str) -> LamplighterError:
        if unreadable := re.search(r"in revoked keys file (.+): (.+)", said):
            return UsageError(
                f"{self._name}: the revoked host keys cannot be read, so no host key can be accepted",
                why=f"{unreadable[1]}: {unreadable[2]}",
                next_step="RevokedHostKeys takes a text file with one public key a line, or a KRL of ssh-keygen",
            )
        if revoked := re.search(r".*(?:revoked by|was revoked|marked as revoked).*", said):
            return host_key_revoked(self._name, stop, shown, revoked[0])
        if offending := re.search(r"Offending (?:\S+ )?key in (.+:\d+)", said):
            return host_key_changed(self._name, stop, shown, offending[1])
        return host_key_unknown(self._name, stop, shown, is_behind=stop is not self._route[0])

    def _login_error(self, stop: Settings, said: str) -> LamplighterError:
        tried = [words.removesuffix(" explicit") for words in re.findall(r"Offering public key: (.+)", said)]
        accepted = re.findall(r"Server accepts key: (\S+)", said) if "with partial success" in said else []
        allowed = re.findall(r"(?:can continue: |Permission denied \()([\w,-]+)", said)[-1:]
        wants_keys = allowed and "publickey" in allowed[0]
        locked = [
            file
            for file in stop.identities
            if is_encrypted(file) and not re.search(f"{re.escape(str(file))} .* agent", said)
        ]
        why = [f"tried {'; '.join(tried)}" if tried else "there was no key to try"]
        is_cut_off = "Too many authentication failures" in said
        if accepted:
            none_left = "" if is_cut_off else ", and there is none left to try"
            wish = f"one key more{none_left}" if wants_keys else f"{' and '.join(allowed)} as well"
            why.append(f"{accepted[-1]} was accepted, but the node wants {wish}")
        unusable = re.findall(r'Load key "(.+)": (.+)', said)
        why += [f"{file} is not a usable private key ({flaw})" for file, flaw in unusable]
        why += [f"{file} is encrypted and no ssh-agent holds it" for file in locked]
        if stop.spec.key_file and not (file := at_home(stop.spec.key_file)).exists():
            why.append(f"{file} does not exist")
        if not (os.environ.get("SSH_AUTH_SOCK") or stop.get("identityagent", "")):
            why.append("no ssh-agent")
        why += [f"the node allows {allowed[0]}"] if allowed else []
        there, key, setting = "the node", "ansible_ssh_private_key_file", "ansible_user"
        if stop.is_jump:  # the inventory speaks of the node alone
            there, key, setting = "the jump host", "its IdentityFile in ssh_config", "its User in ssh_config"
        keys = f"~{stop.user}/.ssh/authorized_keys on {there}"
        if is_cut_off:
            why.append("it said: Too many authentication failures")
            advice = f"{there} listens to a few keys only (MaxAuthTries): name the right one with IdentityFile and "
            advice += "IdentitiesOnly yes in ssh_config"
        elif accepted and not wants_keys:
            advice = f"lamplighter logs in with keys alone: let AuthenticationMethods in the sshd_config of {there} be "
            advice += f"content with publickey for {stop.user}"
        elif locked:
            advice = f"load the key: ssh-add {shlex.quote(str(locked[0]))}"
        elif accepted:
            advice = f"{there} wants several keys (AuthenticationMethods in its sshd_config): each must be in {keys}, "
            advice += "and be named by IdentityFile in ssh_config or held by the ssh-agent here"
        elif tried:
            advice = f"put one of these keys into {keys}, or set {setting}"
        else:
            advice = f"set {key}, or load a key with ssh-add"
        return login_failed(self._name, stop, "; ".join(why), advice)


class Session:
    """One command on a ControlMaster: its three streams, and its exit status. Read and written as a socket."""

    def __init__(self) -> None:
        self._control = socket.socket(socket.AF_UNIX)
        self._pairs = [socket.socketpair() for _ in range(3)]
        self._input, self._output, self._errors = (ours for ours, _ in self._pairs)
        self._answer: list[int | None] = []
        self.recv, self.send, self.recv_stderr = self._output.recv, self._input.send, self._errors.recv

    def ask(self, path: str, command: str) -> str:
        """Have the ControlMaster at ``path`` run ``command``; return its reason not to. Raises OSError."""
        self._control.settimeout(CHANNEL_SECONDS)
        self._control.connect(path)
        self._put(struct.pack(">II", _HELLO, 4))
        words = [_NEW_SESSION, 0, 0, 0, 0, 0, 0, _NO_ESCAPE, 0]
        self._put(struct.pack(">9I", *words) + _string(os.fsencode(command)))
        for _, theirs in self._pairs:
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            theirs.close()
        self._get()  # its hello
        said = self._get()
        if struct.unpack(">I", said[:4]) == (_SESSION_OPENED,):
            return ""
        return said[12:].decode(errors="replace") or "no word why"

    def settimeout(self, seconds: float | None) -> None:
        self._input.settimeout(seconds)
        self._output.settimeout(seconds)

    def recv_ready(self) -> bool:
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        return bool(poll.poll(0))

    def shutdown_write(self) -> None:
        self._input.shutdown(socket.SHUT_WR)

    def wait(self, timeout: float | None) -> int | None:
        """The exit status; None where the command ended without one. Raises TimeoutError."""
        self._control.settimeout(timeout)
        while not self._answer:
            try:
                said = self._get()
            except ConnectionError:
                self._answer.append(None)
            else:
                kind, _, status = struct.unpack(">3I", said[:12])
                self._answer += [status] if kind == _EXIT_MESSAGE else []
        return self._answer[0]

    def close(self) -> None:
        for each in (self._control, *(end for pair in self._pairs for end in pair)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # whoever reads it in another thread is told
            each.close()

    def _put(self, message: bytes) -> None:
        self._control.sendall(_string(message))

    def _get(self) -> bytes:
        return self._exactly(int.from_bytes(self._exactly(4), "big"))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._control.recv(size - len(data))
            if not piece:
                raise ConnectionResetError("the ControlMaster hung up")
            data += piece
        return data


def _string(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data
