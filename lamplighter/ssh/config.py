"""Reads OpenSSH's client configuration as `ssh` does: which settings hold for a host, and where they were written.

A reader of our own: paramiko's knows no Include, no trailing comment, half of Match, one CertificateFile, few tokens.
Known deviations: a Match condition that is not in `_Reading._holds` never does; keywords that lamplighter does not use
are not checked. Touches nothing but `Match exec`, which runs its command.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import hashlib
import os
import pwd
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lamplighter.errors import UsageError
from lamplighter.paths import read_file

#: OpenSSH gives up at the same depth.
MAX_DEPTH = 16

#: Keywords with one word, with several, and with the rest of the line as it is written.
_ONE_WORD = frozenset({
    "hostname", "user", "port", "identitiesonly", "identityagent", "hostkeyalias", "hashknownhosts", "addressfamily",
    "connecttimeout", "canonicalizehostname", "canonicalizemaxdots", "canonicalizefallbacklocal", "revokedhostkeys",
})  # fmt: skip
_GROWING = frozenset({"identityfile", "certificatefile"})  # every line counts, not the first one alone
_SEVERAL_WORDS = frozenset({"userknownhostsfile", "globalknownhostsfile", "canonicaldomains"})

#: Tokens by keyword, as in ssh_config(5); those with ${VARIABLE} too are `_NAMES_OF_FILES`.
_MANY_TOKENS = "CdhikLlnpru"
_NAMES_OF_FILES = frozenset({
    "identityfile", "certificatefile", "identityagent", "userknownhostsfile", "revokedhostkeys",
})  # fmt: skip
_TOKENS = {"hostname": "h", "proxycommand": "hnpr", "proxyjump": "hnpr", **dict.fromkeys(_NAMES_OF_FILES, _MANY_TOKENS)}

#: What OpenSSH keeps numbers in: an int of C.
_LARGEST = 2**31 - 1
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True)
class Line:
    """One line of a file: its keyword in lower case and the rest; the files that an Include names are in ``files``."""

    origin: str
    keyword: str
    rest: str
    files: tuple[tuple[Line, ...], ...] = ()

    def words(self) -> list[str]:
        """The arguments without quotes and trailing comment. Raises UsageError for a quote that is not closed."""
        return split_words(self.rest, self.origin)


@dataclass(frozen=True)
class Settings:
    """What holds for one host. Keywords are in lower case; tokens, variables and ``~`` are expanded."""

    values: Mapping[str, tuple[str, ...]]
    origins: Mapping[str, str]

    def get(self, keyword: str, default: str = "") -> str:
        """The value of a keyword that has one, or the first of several."""
        return next(iter(self.values.get(keyword, ())), default)

    def all(self, keyword: str) -> tuple[str, ...] | None:
        """Every value of the keyword; None where no line says anything."""
        return self.values.get(keyword)

    def says_yes(self, keyword: str) -> bool:
        """Whether a switch is on; OpenSSH takes ``true`` for ``yes``."""
        return self.get(keyword).lower() in ("yes", "true")

    def seconds(self, keyword: str) -> float | None:
        """A time such as ``90`` or ``1m30s``; None for ``none`` and where no line says anything."""
        text = self.get(keyword, "none").lower()
        if text == "none":
            return None
        parts = re.findall(r"([0-9]+)([smhdw]?)", text)
        counts = [(_whole(number), _UNITS[unit]) for number, unit in parts]
        seconds = sum(count * unit for count, unit in counts if count is not None)
        if (
            not counts
            or "".join(number + unit for number, unit in parts) != text
            or any(count is None for count, _ in counts)
            or seconds > _LARGEST
        ):
            raise _senseless(f"{text!r} is no time", self.origins.get(keyword))
        return float(seconds)


@dataclass(frozen=True)
class SshConfig:
    """The files of a user and of the system, in this order: the first value that a host meets is the one that counts.

    ``user`` and ``port`` come before all files, as `ssh -l` and `ssh -p` do: also in tokens and in `Match user`.
    """

    files: tuple[tuple[Line, ...], ...]
    user: str | None = None
    port: int | None = None

    def lookup(self, host: str) -> Settings:
        """What holds for ``host``. Raises UsageError (nothing was opened) for a line that makes no sense."""
        reading = _Reading(host, self)
        reading.take_files(host)
        name = reading.name()
        name = name if ":" in name or "%" in name else name.lower()  # an address of IPv6 stays as it was written
        canonical = reading.canonical(name)
        name = canonical or name
        reading.found["hostname"] = [(name.replace("%", "%%"), "")]
        if canonical is not None or reading.wants_final:
            reading.take_files(name, is_canonical=canonical is not None, is_final=True)
        return reading.settings()


def read_lines(path: Path, directory: Path, depth: int = 0) -> tuple[Line, ...]:
    """The lines of ``path`` and of its Includes; relative ones start at ``directory``.

    A missing file has none, nor has a directory that an Include names.

    Raises UsageError (nothing was opened) for an unreadable file or Includes that go round in a circle.
    """
    if depth > MAX_DEPTH:
        raise UsageError("ssh_config files include each other more than 16 deep", origin=path)
    try:
        text = read_file(path).decode("utf-8", "replace")
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        if depth and isinstance(error, IsADirectoryError):  # `Include conf.d/*`
            return ()
        why = error.strerror or str(error)
        raise UsageError("cannot read the SSH client configuration", why=why, origin=path) from error
    lines = []
    for number, written in enumerate(text.split("\n"), 1):
        said = re.match(r"\s*([^\s=#]+)(?:\s*=\s*|\s+|$)(.*?)\s*$", written)
        if said is None:
            continue
        line = Line(f"{path}:{number}", said.group(1).lower(), said.group(2))
        if line.keyword == "include":
            names = [name for pattern in line.words() for name in _matching(directory / _at_home(pattern, line.origin))]
            files = tuple(read_lines(name, directory, depth + 1) for name in names)
            line = Line(line.origin, line.keyword, line.rest, files)
        lines.append(line)
    return tuple(lines)


def split_words(text: str, origin: str) -> list[str]:
    """The words of ``text`` up to a comment, taken out of their quotes as OpenSSH does."""
    words: list[str] = []
    word: str | None = None
    quote = ""
    rest = iter(range(len(text)))
    for at in rest:
        letter, after = text[at], text[at + 1 : at + 2]
        if word is None and letter == "#":
            break
        if letter == "\\" and (after in ("'", '"', "\\") or (after == " " and not quote)) and after:
            word = (word or "") + after
            next(rest)
        elif not quote and letter in " \t":
            words += [] if word is None else [word]
            word = None
        elif letter == quote or (not quote and letter in "'\""):
            quote = "" if quote else letter
            word = word or ""
        else:
            word = (word or "") + letter
    if quote:
        raise _senseless(f"a quote is not closed: {text}", origin)
    return words if word is None else [*words, word]


def local_user() -> str:
    """Who runs this, by the uid as with ssh: `su` leaves USER as it was. Raises UsageError for a uid without a name.

    In a container a uid may have no name at all; USER will do there, which ssh itself does not take.
    """
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        with contextlib.suppress(KeyError, OSError):  # the second since Python 3.13
            return getpass.getuser()
    raise _nobody("USER")


def local_home() -> Path:
    """The home directory of who runs this. Raises UsageError where there is none."""
    try:
        return Path.home()
    except RuntimeError:
        raise _nobody("HOME") from None


def _nobody(variable: str) -> UsageError:
    return UsageError(
        f"no user exists for uid {os.getuid()} on this machine",
        why=f"it has no passwd entry, and {variable} is not set",
        next_step="run lamplighter as a user of this machine, or set USER and HOME",
    )


class _Reading:
    """One host's way through the files: what it has met so far."""

    def __init__(self, host: str, config: SshConfig) -> None:
        self._host = host
        self._config = config
        self._local_user = local_user()
        self._is_canonical = self._is_final = False
        self.wants_final = False
        self.found: dict[str, list[tuple[str, str]]] = {}
        if config.user:
            self.found["user"] = [(config.user, "")]
        if config.port:
            self.found["port"] = [(str(config.port), "")]

    def take_files(self, name: str, *, is_canonical: bool = False, is_final: bool = False) -> None:
        """Take from every file what holds for the host, now known as ``name``."""
        self._name, self._is_canonical, self._is_final = name, is_canonical, is_final
        for lines in self._config.files:
            self._take(lines, True)

    def name(self) -> str:
        """The host's name as far as it is known: HostName, else as it was asked for."""
        said = self.found.get("hostname")
        if said is None:
            return self._name
        return _expand(*said[0], "h", {"h": self._host}.get)

    def canonical(self, name: str) -> str | None:
        """The name with the first of CanonicalDomains in which it is found; None where ssh would not look."""
        wish = self._first("canonicalizehostname").lower()
        is_direct = self._first("proxycommand", "none") == self._first("proxyjump", "none") == "none"
        if wish not in ("yes", "true", "always") or (wish != "always" and not is_direct):
            return None
        if ":" in name or name.count(".") > int(self._first("canonicalizemaxdots", "1")):
            return name
        for domain, _ in self.found.get("canonicaldomains", []):
            with contextlib.suppress(OSError, UnicodeError):
                socket.getaddrinfo(f"{name}.{domain}", None)
                return f"{name}.{domain}"
        if self._first("canonicalizefallbacklocal", "yes").lower() == "no":
            raise _senseless(f"{name} is in none of CanonicalDomains", self.found["canonicalizehostname"][0][1])
        return name

    def settings(self) -> Settings:
        """Everything that was met, expanded."""
        values = {}
        for keyword, said in self.found.items():
            tokens, has_variables = _TOKENS.get(keyword, ""), keyword in _NAMES_OF_FILES
            if keyword == "identityagent" and said[0][0].startswith("$") and not said[0][0].startswith("${"):
                tokens, has_variables = "", False  # the old way to name a variable: Login reads it
            value = [
                _expand(word, origin, tokens, self._token, has_variables=has_variables) if tokens else word
                for word, origin in said
            ]
            values[keyword] = tuple(_at_home(word, said[0][1]) if has_variables else word for word in value)
        if values.get("proxycommand", ("",))[0].lower() == "none":
            del values["proxycommand"]
        return Settings(values, {keyword: said[0][1] for keyword, said in self.found.items()})

    def _first(self, keyword: str, default: str = "") -> str:
        return self.found[keyword][0][0] if keyword in self.found else default

    def _take(self, lines: Sequence[Line], holds: bool, never: bool = False) -> None:
        """``never``: the lines were included from a block that does not hold, so no Host of theirs can."""
        for line in lines:
            if not line.rest:
                raise _senseless(f"{line.keyword} says nothing", line.origin)
            if line.keyword == "host":
                holds = self._is_meant(line.words()) and not never
            elif line.keyword == "match":
                holds = not never and self._matches(line)
            elif line.keyword == "include":
                for included in line.files:
                    self._take(included, holds, never or not holds)
            elif holds:
                self._keep(line)

    def _keep(self, line: Line) -> None:
        keyword = line.keyword
        if keyword == "proxyjump":  # of the two proxies the first that is met counts; `none` of a jump leaves it open
            if "proxycommand" not in self.found:
                self.found.setdefault(keyword, [(line.rest.partition("#")[0].strip(), line.origin)])
            return
        if keyword == "proxycommand" and self._first("proxyjump", "none").lower() != "none":
            return
        if keyword not in _ONE_WORD | _GROWING | _SEVERAL_WORDS:
            self.found.setdefault(keyword, [(line.rest, line.origin)])
            return
        words = line.words()
        if not words or (len(words) > 1 and keyword not in _SEVERAL_WORDS):
            raise _senseless(f"{keyword} takes one word: {line.rest}", line.origin)
        if keyword == "port":
            words = [_port(words[0], line.origin)]
        elif keyword == "canonicalizemaxdots" and _whole(words[0]) is None:
            raise _senseless(f"{words[0]!r} is no number of dots", line.origin)
        told = [(word, line.origin) for word in words]
        if keyword not in _GROWING:
            self.found.setdefault(keyword, told)
        elif words[0] not in [word for word, _ in self.found.get(keyword, [])]:
            self.found.setdefault(keyword, []).extend(told)

    def _is_meant(self, patterns: Sequence[str]) -> bool:
        """Whether a Host line speaks of this host: a negated pattern wins."""
        if any(_fits(pattern[1:], self._name) for pattern in patterns if pattern.startswith("!")):
            return False
        return any(_fits(pattern, self._name) for pattern in patterns)

    def _matches(self, line: Line) -> bool:
        words = line.words()
        holds = bool(words)
        while words:
            word = words.pop(0)
            condition, equals, value = word.partition("=")
            condition, is_negated = condition.lower().removeprefix("!"), condition.startswith("!")
            if condition not in ("all", "canonical", "final"):
                if not equals and words and words[0].startswith("="):
                    equals, value = "=", words.pop(0)[1:]
                if not value:
                    if not words:
                        return False
                    value = words.pop(0)
            if not holds and condition == "exec":
                continue  # its command is run only where all before it holds
            answer = self._holds(condition, value, line.origin)
            if answer is None:
                return False
            holds = holds and answer != is_negated
        return holds

    def _holds(self, condition: str, value: str, origin: str) -> bool | None:
        """Whether a condition of a Match line holds; None for one that is not known here."""
        if condition == "all":
            return True
        if condition == "canonical":
            return self._is_canonical
        if condition == "final":
            self.wants_final = True
            return self._is_final
        if condition == "exec":
            return _succeeds(_expand(value, origin, _MANY_TOKENS, self._token))
        asked = {
            "host": self.name().lower(),
            "originalhost": self._host.lower(),
            "user": self._first("user", self._local_user),
            "localuser": self._local_user,
        }.get(condition)
        return None if asked is None else _fits_list(value if "user" in condition else value.lower(), asked)

    def _token(self, letter: str) -> str | None:
        here = socket.gethostname()
        name, port, user = self.name(), self._first("port", "22"), self._first("user", self._local_user)
        values: dict[str, Callable[[], str]] = {
            "C": lambda: hashlib.sha1(f"{here}{name}{port}{user}".encode(), usedforsecurity=False).hexdigest(),
            "d": lambda: str(local_home()),
            "h": lambda: name,
            "i": lambda: str(os.getuid()),
            "k": lambda: self._first("hostkeyalias").lower() or self._host,
            "L": lambda: here.partition(".")[0],
            "l": lambda: here,
            "n": lambda: self._host,
            "p": lambda: port,
            "r": lambda: user,
            "u": lambda: self._local_user,
        }
        return values[letter]() if letter in values else None


def _expand(
    text: str, origin: str, tokens: str, token: Callable[[str], str | None], *, has_variables: bool = False
) -> str:
    """``text`` with its %-tokens and ${VARIABLES} replaced, each once. Raises UsageError for one that is not known."""

    def replaced(found: re.Match[str]) -> str:
        if found.group("variable"):
            value = os.environ.get(found.group("variable")) if has_variables else found.group()
        elif found.group("token") == "%":
            value = "%"
        else:
            value = token(found.group("token")) if found.group("token") in tokens else None
        if value is None:
            raise _senseless(f"{found.group()} means nothing here: {text}", origin)
        return value

    return re.sub(r"%(?P<token>.?)|\$\{(?P<variable>\w+)\}", replaced, text)


def _fits(pattern: str, name: str) -> bool:
    # Not fnmatch: brackets are no character class here.
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name) is not None


def _fits_list(patterns: str, name: str) -> bool:
    words = patterns.split(",")
    if any(_fits(word[1:], name) for word in words if word.startswith("!")):
        return False
    return any(_fits(word, name) for word in words)


def _matching(pattern: Path) -> list[Path]:
    return [Path(name) for name in sorted(glob.glob(str(pattern)))]  # noqa: PTH207 - the pattern may be absolute


def _at_home(name: str, origin: str) -> str:
    try:
        return str(Path(name).expanduser())
    except RuntimeError as error:
        raise _senseless(f"{name}: {error}", origin) from error


def _port(text: str, origin: str) -> str:
    number = _whole(text)
    with contextlib.suppress(OSError, ValueError):
        number = socket.getservbyname(text, "tcp") if number is None else number
    if number is None or not 0 < number < 65536:
        raise _senseless(f"{text!r} is no port", origin)
    return str(number)


def _whole(text: str) -> int | None:
    """The whole number that ``text`` is; None for anything else, and for one that is too large for OpenSSH."""
    found = re.fullmatch(r"\+?0*([0-9]{1,10})", text)
    return int(found[1]) if found and int(found[1]) <= _LARGEST else None


def _succeeds(command: str) -> bool:
    words = [os.environ.get("SHELL") or "/bin/sh", "-c", command]
    try:
        return subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False).returncode == 0
    except OSError:
        return False


def _senseless(why: str, origin: object) -> UsageError:
    return UsageError(
        "the SSH client configuration does not make sense",
        why=why,
        origin=origin or None,
        next_step="`ssh -G HOST` shows how OpenSSH reads it",
    )
