"""Which host key is accepted, and what the operator is told about one that is not."""

from __future__ import annotations

import base64
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from lamplighter.errors import UNTOUCHED, Unreachable, UsageError
from lamplighter.paths import read_file
from lamplighter.ssh.config import Settings
from lamplighter.ssh.known_hosts import KnownHosts, KnownKey, fingerprint, host_names, known_line, remember
from lamplighter.ssh.wire import label_of

#: How a key revocation list begins, in binary.
_KRL_MAGIC = b"SSHKRL\n\0"


class HostKeyUnknown(Unreachable):
    """No known_hosts file vouches for the key that the host showed; ``fingerprint`` is that key's."""

    fingerprint = ""


class HostKeyChanged(Unreachable):
    """The host showed another key than the known one, or a revoked one; ``fingerprint`` is what it showed."""

    fingerprint = ""


class HostKeys(paramiko.MissingHostKeyPolicy):
    """Decides about a shown host key. paramiko is given no keys of its own, so it asks here every time."""

    def __init__(
        self,
        name: str,
        connection: Any,
        settings: Settings,
        files: Sequence[Path],
        checking: str,
        through_jump: bool,
    ) -> None:
        self._name = name
        self._label = label_of(connection)
        self._host, self._port = connection.host, int(connection.port)
        self._alias = settings.get("hostkeyalias") or None
        self._names = host_names(self._host, self._port, self._alias)
        self._file = next((file for file in files if file != Path(os.devnull)), None)
        self._known = KnownHosts.read(files)
        self._revoked = _revoked_keys(name, settings)
        self._hashes = settings.says_yes("hashknownhosts")
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
        revoked = [line for line in self._revoked if line.blob == blob]
        if revoked:  # whatever the checking: ssh_config names these keys for no other reason
            raise self._changed("revoked", revoked, kind, blob)
        if self._checking == "off":
            return
        verdict = self._known.judge(self._names, kind, blob)
        if verdict.word == "known":
            return
        if verdict.word == "unknown":
            if self._checking != "accept-new":
                raise self._unknown(kind, blob)
            if self._file is None:  # ssh would accept it again each time
                return
            try:
                remember(self._file, self._names[0], kind, blob, hashed=self._hashes)
            except OSError as error:
                raise Unreachable(
                    f"{self._name}: cannot write down the new host key",
                    why=f"{error.filename or self._file}: {error.strerror or error}",
                    serving=UNTOUCHED,
                    next_step=f"make {self._file} a file that this user may write, or set the host variable "
                    "known_hosts to one",
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
            serving=UNTOUCHED,
            next_step=f"compare the fingerprint with the node's own (on its console: {_own_fingerprint(kind)}), "
            + self._then_add(kind, blob),
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
            place = self._file
            forget = " && ".join(
                dict.fromkeys(shlex.join(["ssh-keygen", "-R", self._names[0], "-f", str(line.file)]) for line in lines)
            )
            advice = (
                f"either the node was installed again or somebody is listening in: compare with its console "
                f"({_own_fingerprint(kind)}); if it is right: {forget}"
                + (f" && {self._add_command(kind, blob, place)}" if place and not _keeps_nothing(place) else "")
            )
        error = HostKeyChanged(
            f"{self._name}: the host key of {self._host}:{self._port} {what}",
            why=why,
            serving=UNTOUCHED,
            next_step=advice,
        )
        error.fingerprint = shown
        return error

    def _then_add(self, kind: str, blob: bytes) -> str:
        if self._file and not _keeps_nothing(self._file):
            return f"then run: {self._add_command(kind, blob, self._file)}"
        # a file that keeps nothing, or none: ssh itself has no place for the key either
        return (
            "then set the host variable known_hosts to a file (none that keeps anything is named) and run: "
            + self._add_command(kind, blob, Path("THAT_FILE"))
        )

    def _add_command(self, kind: str, blob: bytes, place: Path) -> str:
        file = shlex.quote(str(place))
        ready = ""
        if os.path.isdir(place):  # noqa: PTH112 - Path.is_dir raises where it may not look
            ready = f"mv {file} {file}.aside && "
        elif not os.path.isdir(place.parent):  # noqa: PTH112
            ready = f"mkdir -p -m 700 {shlex.quote(str(place.parent))} && "
        if self._alias or self._through_jump:  # ssh-keyscan knows neither aliases nor jump hosts
            return f"{ready}echo {shlex.quote(known_line(self._names[0], kind, blob))} >> {file}"
        port = "" if self._port == 22 else f"-p {self._port} "
        return f"{ready}ssh-keyscan {port}{shlex.quote(self._host)} >> {file}"


def _keeps_nothing(file: Path) -> bool:
    """Tell whether ``file`` is there and is one into which nobody should write a line: a device, a FIFO, a socket."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _revoked_keys(name: str, settings: Settings) -> tuple[KnownKey, ...]:
    """The keys in the file that RevokedHostKeys names. Raises UsageError for one that cannot be read to its end.

    facts: ssh accepts no key at all then, whatever StrictHostKeyChecking says.
    """
    said = settings.get("revokedhostkeys", "none")
    if said.lower() == "none":
        return ()
    file = Path(said)
    try:
        content = read_file(file)
        if content.startswith(_KRL_MAGIC):
            raise ValueError("it is a key revocation list, and KRL files cannot be read here")
        return tuple(_revoked_lines(content.decode(errors="replace"), file))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{name}: the revoked host keys in {file} cannot be read, so no host key can be accepted",
            why=(error.strerror if isinstance(error, OSError) else None) or str(error),
            origin=settings.origins.get("revokedhostkeys"),
            next_step="RevokedHostKeys takes a text file with one public key a line",
        ) from error


def _revoked_lines(text: str, file: Path) -> Iterator[KnownKey]:
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            identity = serialization.load_ssh_public_identity(" ".join(words).encode())
        except (ValueError, UnsupportedAlgorithm):
            raise ValueError(f"line {number} is no public key") from None
        key = identity.public_key() if isinstance(identity, serialization.SSHCertificate) else identity
        known = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        kind, blob = known.split()[:2]
        yield KnownKey(file, number, "@revoked", "*", kind.decode(), base64.b64decode(blob))


def _own_fingerprint(kind: str) -> str:
    short = "rsa" if "rsa" in kind else "ecdsa" if kind.startswith("ecdsa") else "ed25519"
    return f"ssh-keygen -lf /etc/ssh/ssh_host_{short}_key.pub"
