"""Answers from OpenSSH's known_hosts files: is this host key known, new, changed or revoked, and where does it say so.

Pure reading, with one exception: `remember` appends a line. Reads what paramiko's own reader stumbles over:
`@cert-authority` and `@revoked` lines, wildcards and negations, several keys of one type, junk lines.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lamplighter.paths import read_file

DEFAULT_PORT = 22


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file; ``str()`` is ``file:line``."""

    file: Path
    line: int
    marker: str
    patterns: str
    kind: str
    blob: bytes

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def fingerprint(self) -> str:
        """The key's fingerprint as OpenSSH prints it."""
        return fingerprint(self.blob)

    def is_for(self, name: str) -> bool:
        """Whether this line speaks of the host ``name``, as OpenSSH matches it: a negated pattern wins."""
        matched = False
        for pattern in self.patterns.split(","):
            if pattern.startswith("!"):
                if _matches(pattern[1:], name):
                    return False
            elif _matches(pattern, name):
                matched = True
        return matched


@dataclass(frozen=True)
class Verdict:
    """What the known_hosts files say of a presented key; ``lines`` are those that decided it."""

    word: Literal["known", "unknown", "changed", "revoked"]
    lines: tuple[KnownKey, ...] = ()


@dataclass(frozen=True)
class KnownHosts:
    """The lines of several known_hosts files, in order; ``problems`` names files that could not be read."""

    lines: tuple[KnownKey, ...] = ()
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, files: Iterable[Path]) -> KnownHosts:
        """Every usable line of ``files``; a missing file has no lines, an unreadable one is named in ``problems``."""
        lines: list[KnownKey] = []
        problems: list[str] = []
        for file in files:
            try:
                text = read_file(file).decode("utf-8", "replace")
            except FileNotFoundError:
                continue
            except OSError as error:
                problems.append(f"{file}: {error.strerror or error}")
                continue
            lines += parse_known_hosts(text, file)
        return cls(tuple(lines), tuple(problems))

    def judge(self, names: Sequence[str], kind: str, blob: bytes) -> Verdict:
        """Judge a key that was presented by the host known by ``names`` (see `host_names`).

        A line for the plain host vouches for a key on another port, but a different key there means nothing: that may
        be another server. A host of which only other types are known counts as changed: its known key was not shown.
        """
        revoked = tuple(k for k in self.lines if k.marker == "@revoked" and k.blob == blob and _any_name(k, names))
        if revoked:
            return Verdict("revoked", revoked)
        for name in names:
            same = tuple(key for key in self._keys(name) if key.kind == kind and key.blob == blob)
            if same:
                return Verdict("known", same)
        others = self._keys(names[0])
        return Verdict("changed", others) if others else Verdict("unknown")

    def kinds(self, names: Sequence[str]) -> list[str]:
        """Key types known for a host, best known first: those that the negotiation must ask for."""
        return list(dict.fromkeys(key.kind for name in names for key in self._keys(name)))

    def authorities(self, names: Sequence[str]) -> tuple[KnownKey, ...]:
        """``@cert-authority`` lines for a host: they vouch for host certificates only."""
        return tuple(k for k in self.lines if k.marker == "@cert-authority" and _any_name(k, names))

    def _keys(self, name: str) -> tuple[KnownKey, ...]:
        return tuple(key for key in self.lines if not key.marker and key.is_for(name))


def parse_known_hosts(text: str, file: Path) -> list[KnownKey]:
    """The lines of a known_hosts file that OpenSSH would understand; others are skipped, as it does."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        marker = words.pop(0) if words[0].startswith("@") else ""
        if len(words) < 3 or marker not in ("", "@cert-authority", "@revoked"):
            continue
        try:
            blob = base64.b64decode(words[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        found.append(KnownKey(file, number, marker, words[0], words[1], blob))
    return found


def host_names(host: str, port: int, alias: str | None = None) -> tuple[str, ...]:
    """The names under which OpenSSH looks a host up; the first is the one under which it writes."""
    if alias:
        return (alias.lower(),)
    host = host.lower()
    return (host,) if port == DEFAULT_PORT else (f"[{host}]:{port}", host)


def fingerprint(blob: bytes) -> str:
    """``SHA256:...`` without padding, as ``ssh-keygen -l`` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def known_line(name: str, kind: str, blob: bytes) -> str:
    """The known_hosts line that makes this key known."""
    return f"{name} {kind} {base64.b64encode(blob).decode()}"


def hashed_name(name: str) -> str:
    """The name as ``HashKnownHosts yes`` writes it: a reader of the file learns no host from it."""
    salt = os.urandom(20)  # as long as the digest
    words = (salt, hmac.new(salt, name.encode(), hashlib.sha1).digest())
    return "|1|" + "|".join(base64.b64encode(word).decode() for word in words)


def remember(file: Path, name: str, kind: str, blob: bytes, *, hashed: bool = False) -> None:
    """Append the key to ``file``, which is made (0600, its directory 0700) when it is missing.

    Raises OSError, also for what is no file of known hosts: a line of ours would spoil it.
    """
    with contextlib.suppress(FileNotFoundError):
        _refuse_another_file(file)
    name = hashed_name(name) if hashed else name
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        # One write: several hosts of a fleet may be remembered at the same time.
        os.write(descriptor, (("\n" if torn else "") + known_line(name, kind, blob) + "\n").encode())
    finally:
        os.close(descriptor)


def _refuse_another_file(file: Path) -> None:
    text = read_file(file).decode("utf-8", "replace")
    written = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if written and not parse_known_hosts(text, file):
        raise OSError(errno.EINVAL, "has lines, and none of them is one of known_hosts", str(file))


def _any_name(key: KnownKey, names: Sequence[str]) -> bool:
    return any(key.is_for(name) for name in names)


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("|1|"):
        return _matches_hashed(pattern, name)
    # Not fnmatch: the brackets of "[host]:port" are no character class here.
    wild = re.escape(pattern.lower()).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(wild, name) is not None


def _matches_hashed(pattern: str, name: str) -> bool:
    try:
        _, _, salt, wanted = pattern.split("|")
        digest = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(digest, base64.b64decode(wanted))
    except ValueError:
        return False
