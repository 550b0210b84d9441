"""What holds for a login, as `ssh -G` says it, and what of that is beyond paramiko.

Where no `ssh` is installed, Fabric's reader of ssh_config answers in its place. Touches nothing; `Match exec` runs its
command, as with ssh.
"""

from __future__ import annotations

import base64
import errno
import getpass
import hashlib
import hmac
import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lamplighter.errors import UsageError
from lamplighter.paths import FILE_LIMIT, at_home, read_file, refuse_other_than_file

if TYPE_CHECKING:
    from lamplighter.inventory.schema import ConnectionSpec

#: Seconds for `ssh -G`: a command of `Match exec`, and DNS, may take their time.
READ_SECONDS = 30.0
#: More jump hosts than anybody has: they go round in a circle.
MAX_JUMPS = 16
#: Bytes of a key or a certificate; one has some thousands.
KEY_LIMIT = 1 << 20

#: Settings of which paramiko knows nothing, where they say anything else than this.
_SSHS_OWN = {
    "proxycommand": "none", "knownhostscommand": "none", "revokedhostkeys": "none", "pkcs11provider": "none",
    "bindaddress": "none", "bindinterface": "none", "certificatefile": "none", "addressfamily": "any",
    "identityagent": "SSH_AUTH_SOCK",
    "hostbasedauthentication": "no", "verifyhostkeydns": "false", "nohostauthenticationforlocalhost": "no",
    "pubkeyauthentication": "true",
}  # fmt: skip


#: Settings by their keyword in lower case, as `ssh -G` prints them.
Values = Mapping[str, Sequence[str]]


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
class Known:
    """A key that a line of known_hosts has for a host."""

    kind: str
    blob: bytes
    origin: str


@dataclass(frozen=True)
class Settings:
    """What holds for one host on the way. Keywords are in lower case, values as `ssh -G` prints them."""

    spec: ConnectionSpec
    values: Values
    is_jump: bool = False

    def get(self, keyword: str, default: str = "none") -> str:
        """The value of a keyword that has one, or the first of several."""
        return next(iter(self.values.get(keyword, ())), default)

    @property
    def asked(self) -> Place:
        return asked_for(self.spec)

    @property
    def host(self) -> str:
        return self.get("hostname", self.asked.host)

    @property
    def port(self) -> int:
        return int(self.get("port", "22"))

    @property
    def user(self) -> str:
        return self.get("user", "") or local_user()

    @property
    def label(self) -> str:
        return f"{self.user}@{self.host}" + ("" if self.port == 22 else f":{self.port}")

    @property
    def identities(self) -> list[Path]:
        """The private keys to try, the inventory's first."""
        said = [_expanded(file) for file in self.values.get("identityfile", ()) if file.lower() != "none"]
        return list(dict.fromkeys([*([at_home(self.spec.key_file)] if self.spec.key_file else []), *said]))

    @property
    def known_hosts(self) -> list[Path]:
        """Files that may vouch for the host; a new key belongs into the first."""
        words = [*self.user_known_hosts, *_files_in(self.get("globalknownhostsfile"))]
        files = [at_home(self.spec.known_hosts)] if self.spec.known_hosts else []
        return files + [_expanded(word) for word in words if word.lower() != "none"]

    @property
    def user_known_hosts(self) -> list[str]:
        """The user's files, as ssh_config says them."""
        return _files_in(self.get("userknownhostsfile"))

    @property
    def host_names(self) -> tuple[str, ...]:
        """The names under which ssh looks for the host's key; the first is the one under which it writes."""
        if (alias := self.get("hostkeyalias", "")) != "":
            return (alias.lower(),)
        host = self.host.lower()
        return (host,) if self.port == 22 else (f"[{host}]:{self.port}", host)

    @cached_property
    def known_keys(self) -> list[Known] | None:
        """The keys that plain and hashed lines have for the host; None where patterns or markers may have a say."""
        found: dict[str, list[Known]] = {name: [] for name in self.host_names}
        for origin, words in known_lines(self.known_hosts):
            if words[0].startswith("@") or set(words[0]) & set("*?!"):
                return None
            for name, keys in found.items():
                if _speaks_of(words[0], name):
                    keys.append(Known(words[1], decoded(words[2]), origin))
        return next((keys for keys in found.values() if keys), [])

    @property
    def beyond_paramiko(self) -> str:
        """What of these settings ssh alone can do; empty where there is nothing."""
        for keyword, usual in _SSHS_OWN.items():
            if self.get(keyword, usual).replace("yes", "true") != usual:
                return keyword
        if is_up(self.get("controlpath")):
            return "a ControlMaster that is up"
        if self.get("gssapiauthentication") == "yes" and (
            "KRB5CCNAME" in os.environ or Path(f"/tmp/krb5cc_{os.getuid()}").exists()  # noqa: S108 - where it is
        ):
            return "gssapiauthentication with a ticket"
        for file in self.identities:
            if "%" in str(file) or "${" in str(file):
                return f"the tokens in {file}"
            if Path(f"{file}-cert.pub").exists():
                return f"the certificate of {file}"
            if b"\0sk-" in b"\0" + _start_of(Path(f"{file}.pub")) or b"\0sk-" in _start_of(file):
                return f"the security key of {file}"
        if self.spec.host_key_checking != "off" and not self.known_keys:
            return "a host key that no plain line of known_hosts has"
        return ""

    def refuse_odd_files(self) -> None:
        """Raise OSError for a key or known_hosts that is no file of sane size: whoever reads it might never end."""
        keys = [Path(f"{file}{half}") for file in self.identities for half in ("", ".pub", "-cert.pub")]
        for file in (*keys, *self.known_hosts):
            try:
                found = refuse_other_than_file(file)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue  # whoever reads it finds the words
            except IsADirectoryError:
                if file in keys:
                    raise
                continue
            if found.st_size > (KEY_LIMIT if file in keys else FILE_LIMIT):
                raise OSError(errno.EFBIG, f"has {found.st_size >> 20} MiB, and is not what it is taken for", str(file))


def known_lines(files: Sequence[Path]) -> Iterator[tuple[str, list[str]]]:
    """The lines of known_hosts that have a key, as words, each with its ``file:line``; what cannot be read has none."""
    for file in files:
        try:
            lines = read_file(file).decode("utf-8", "replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            words = line.split()
            if len(words) > 2 and not words[0].startswith("#"):
                yield f"{file}:{number}", words


def has_ssh() -> bool:
    return shutil.which("ssh") is not None


def asked_for(spec: ConnectionSpec) -> Place:
    """Where the inventory wants to go; what it leaves open is ssh_config's."""
    place = parse_place(spec.host)
    return Place(place.host, spec.user or place.user, spec.port or place.port)


def ssh_options(spec: ConnectionSpec) -> list[str]:
    """The words by which ssh hears all that the inventory says of a login, the host aside."""
    asked = asked_for(spec)
    words = ["-F", str(at_home(spec.ssh_config))] if spec.ssh_config else []
    words += [word for name, value in spec.ssh_options for word in ("-o", f"{name}={value}")]
    words += [*(["-p", str(asked.port)] if asked.port else []), *(["-l", asked.user] if asked.user else [])]
    return words + (["-i", str(at_home(spec.key_file).absolute()).replace("%", "%%")] if spec.key_file else [])


def ssh_line(spec: ConnectionSpec, *more: str) -> str:
    """The same login by hand, in the inventory's words: ssh adds what ssh_config says of them, jump hosts included."""
    asked, key = asked_for(spec), spec.key_file
    words = [*(["-F", spec.ssh_config] if spec.ssh_config else []), *(["-p", str(asked.port)] if asked.port else [])]
    words += [*(["-i", key] if key else []), *more]
    words += [word for name, value in spec.ssh_options for word in ("-o", f"{name}={value}")]
    return shlex.join(["ssh", *words, f"{asked.user}@{asked.host}" if asked.user else asked.host])


class Reading:
    """`ssh -G`, begun at once and waited for by `route`; where there is no ssh, ``otherwise`` is asked instead."""

    def __init__(self, spec: ConnectionSpec, otherwise: Callable[[ConnectionSpec], Values]) -> None:
        self._spec = spec
        self._otherwise = otherwise
        self._process = _begin(spec)

    def route(self) -> list[Settings]:
        """The hosts of the login: the outermost jump host first, the node itself last.

        Raises UsageError (nothing was opened) for what ssh refuses, with its file and line.
        """
        target = Settings(self._spec, self._values(self._spec, self._process))
        return [*self._jumps(target, MAX_JUMPS), target]

    def _jumps(self, stop: Settings, left: int) -> Iterator[Settings]:
        """The jump hosts before ``stop``. Of a chain only the first may have a ProxyJump of its own, as with ssh."""
        value = stop.get("proxyjump")
        if value.lower() == "none":
            return
        if not left:
            raise _senseless(f"the jump hosts before {self._spec.host} go round in a circle")
        jumps = [self._jump(parse_place(word)) for word in value.split(",")]
        yield from self._jumps(jumps[0], left - 1)
        yield from jumps

    def _jump(self, place: Place) -> Settings:
        # what the inventory says of keys and options is meant for the node alone
        host = f"[{place.host}]"
        spec = replace(self._spec, host=host, user=place.user, port=place.port, key_file=None, ssh_options=())
        return Settings(spec, self._values(spec, _begin(spec)), is_jump=True)

    def _values(self, spec: ConnectionSpec, process: subprocess.Popen[bytes] | None) -> Values:
        return self._otherwise(spec) if process is None else _answer(process)


def _begin(spec: ConnectionSpec) -> subprocess.Popen[bytes] | None:
    if not has_ssh():
        return None
    usual = (_expanded("~/.ssh/config"), Path("/etc/ssh/ssh_config"))
    files = (at_home(spec.ssh_config),) if spec.ssh_config else usual
    for file in filter(Path.exists, files):
        try:
            refuse_other_than_file(file)
        except OSError as error:
            why = error.strerror or str(error)
            raise UsageError("cannot read the SSH client configuration", why=why, origin=file) from error
    words = ["ssh", "-G", *ssh_options(spec), "--", asked_for(spec).host]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)


def _answer(process: subprocess.Popen[bytes]) -> Values:
    try:
        out, err = process.communicate(timeout=READ_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the command of Match exec too
        process.communicate()
        raise _senseless(f"`ssh -G` did not end within {READ_SECONDS:g} s: a command of Match exec, or DNS") from None
    if process.returncode:
        said = err.decode(errors="replace").replace("\r", "")
        if placed := re.search(r"^(.+?):? line (\d+): (.+)$", said, re.MULTILINE):
            raise _senseless(placed[3], f"{placed[1]}:{placed[2]}")
        lines = [line for line in said.splitlines() if not line.startswith(("Pseudo-terminal", "Warning: "))]
        raise _senseless("; ".join(lines))
    values: dict[str, list[str]] = {}
    for line in out.decode(errors="surrogateescape").splitlines():
        keyword, _, value = line.partition(" ")
        values.setdefault(keyword.lower(), []).append(value)
    return values


def _senseless(why: str, origin: str | None = None) -> UsageError:
    return UsageError(
        "the SSH client configuration does not make sense",
        why=why,
        origin=origin,
        next_step="`ssh -G HOST` shows how OpenSSH reads it",
    )


def is_up(path: str) -> bool:
    """Whether a ControlMaster listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def local_user() -> str:
    """Who runs this, by the uid as with ssh: `su` leaves USER as it was. Raises UsageError for a uid without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        pass
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise UsageError(
            f"no user exists for uid {os.getuid()} on this machine",
            why="it has no passwd entry, and USER is not set",
            next_step="run lamplighter as a user of this machine, or set USER",
        ) from None


def is_encrypted(file: Path) -> bool:
    """Whether a private key wants a passphrase."""
    start = _start_of(file)
    return b"\0\0\0\4none" not in start[:40] if start.startswith(b"openssh-key-v1\0") else b"ENCRYPTED" in start


def _start_of(file: Path) -> bytes:
    """The beginning of a key; empty where there is none to read."""
    try:
        text = read_file(file, KEY_LIMIT)
    except OSError:
        return b""
    if not text.startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----"):
        return text[:200]
    body = b"".join(text.split()[4:8]).decode(errors="replace")
    return decoded(body[: len(body) // 4 * 4])


def fingerprint(blob: bytes) -> str:
    """``SHA256:...`` without padding, as ``ssh-keygen -l`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def decoded(text: str) -> bytes:
    """The bytes of base64; empty for what is none."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


def _files_in(said: str) -> list[str]:
    """The paths of a setting as `ssh -G` prints it: parted by blanks, which may be in a name as well."""
    return re.split(r"\s+(?=[/~])", said.strip()) if said.startswith(("/", "~")) else said.split()


def _speaks_of(names: str, host: str) -> bool:
    """Whether a line of known_hosts that begins with ``names``, none of them a pattern, is for ``host``."""
    if not names.startswith("|1|"):
        return host in names.lower().split(",")
    salt, _, digest = names[3:].partition("|")
    return hmac.compare_digest(hmac.new(decoded(salt), host.encode(), hashlib.sha1).digest(), decoded(digest))


def _expanded(file: str) -> Path:
    """``~`` as ssh reads it: the home directory of the uid, whatever HOME says."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir + file[1:] if file.startswith("~/") else file)
    except KeyError:
        return at_home(file)
