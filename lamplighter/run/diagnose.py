"""``diagnose``: what a server's log says about its start, read offline from any pasted log, or on the node.

Offline nothing is opened but the log itself: a file, a gzip file (by its content, whatever its name), or stdin for
``-``. Raises UsageError (exit 2) for a log that cannot be read, or is none.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn, cast

from invoke.exceptions import Exit as Leave

from lamplighter.errors import UsageError
from lamplighter.node.events import Exit
from lamplighter.node.log.verdict import Diagnosis
from lamplighter.node.log.whole import diagnose_log
from lamplighter.paths import at_home, open_file
from lamplighter.project import PROJECT, Roles
from lamplighter.release.engine import load_engine, load_engines
from lamplighter.release.engine_file import rule_place
from lamplighter.report.wording import clean, seconds
from lamplighter.run import command
from lamplighter.run.command import Settings

#: Stands for the server's name in hints: a pasted log does not tell it.
NAMELESS = "NAME"
_HEAD_BYTES = 64 * 1024
_LONGEST_ENTRY = 1 << 20
#: Where Docker, log stores and journald keep the line in an entry that is JSON.
_LINE_KEYS = ("log", "message", "msg", "line", "MESSAGE", "textPayload")
_GZIP = b"\x1f\x8b"
#: A log may hold some junk; this share of it, in its beginning, is no log.
_MOST_JUNK = 0.3
_JUNK = re.compile(rb"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]")


def diagnose(
    settings: Settings,
    *,
    log: str | None,
    engine: str | None,
    version: str | None,
    host: Sequence[str],
    server: str | None,
    explain: bool = False,
) -> NoReturn:
    """Diagnose a log given by ``log``, or the last run of each chosen server, and leave with the exit code.

    ``explain``: the text says, too, which rule of which role's file decided; the JSON always does.
    """
    roles = settings.project / "roles"
    if log is None:
        if engine is not None or version is not None:
            _refuse(settings, UsageError("--engine and --engine-version go with --log", why="the node knows its own"))
        if not host:
            _refuse(settings, UsageError("nothing to diagnose", next_step="give --log FILE (- is stdin), or --host H"))
        command.read(
            settings,
            host,
            server,
            "diagnose",
            lambda session, servers: {one.name: with_place(session.diagnose(one), roles) for one in servers},
            lambda data: last_runs_text(data, explain),
        )
    with command.guarded(settings):
        if host:
            raise UsageError("--log and --host exclude each other", next_step="give one of them")
        found = with_place(diagnose_file(log, engine, version, roles).to_json(server or NAMELESS), roles)
        command.say_json(found) if settings.as_json else command.say(text(found, explain))
    raise Leave(code=Exit.OK)


def _refuse(settings: Settings, error: UsageError) -> NoReturn:
    with command.guarded(settings):
        raise error
    raise AssertionError


def diagnose_file(
    log: str, engine: str | None = None, version: str | None = None, roles: Roles = PROJECT / "roles"
) -> Diagnosis:
    """Diagnose the log at path ``log`` (``-``: stdin). Raises UsageError, InventoryError for an unknown engine."""
    engines = {engine: load_engine(engine, roles)} if engine is not None else load_engines(roles)
    with opened(log) as stream:
        return diagnose_log(stream, {name: each.compiled for name, each in engines.items()}, engine, version)


def with_place(found: dict[str, Any], roles: Roles) -> dict[str, Any]:
    """A diagnosis (its JSON) whose rule names the file and the line in which it stands."""
    rule = found.get("rule")
    if not rule:
        return found
    engine = found.get("engine") or _wordiest(roles)
    place = rule_place(engine, roles, rule["key"], rule["pattern"])
    where = {"file": place.file, "line": place.line} if place is not None else {"file": None, "line": None}
    return {**found, "rule": {**rule, **where}}


def _wordiest(roles: Roles) -> str:
    """The engine whose wording a log of an unknown one is read with."""
    engines = load_engines(roles)
    return max(engines, key=lambda name: len(engines[name].compiled.get("failures", ())))


@contextlib.contextmanager
def opened(log: str) -> Iterator[BinaryIO]:
    """The bytes of a log, unpacked. Raises UsageError where there are none, or none of a log."""
    name = "stdin" if log == "-" else log
    with contextlib.ExitStack() as stack:
        found = _Begun(_open(log, stack), name)
        if found.head[:2] == _GZIP:
            found = _Begun(gzip.GzipFile(fileobj=cast("Any", found)), name)
        _see_that_it_is_text(found.head, name)
        yield cast("BinaryIO", _Unpacked(found) if _is_json(found.head) else found)


def _open(log: str, stack: contextlib.ExitStack) -> io.BufferedIOBase:
    if log == "-":
        return cast("io.BufferedIOBase", sys.stdin.buffer)
    path = at_home(log)
    try:
        return stack.enter_context(open_file(path))
    except OSError as error:
        raise UsageError(
            f"--log {log}: {error.strerror}",
            next_step="give --log the path of a log file, or - for stdin",
        ) from None
    except ValueError as error:
        raise UsageError(f"{log!r}: {error}", next_step="give --log the path of a log, or - for stdin") from None


class _Begun:
    """A stream whose beginning is known: ``head``, which ``read`` gives first.

    A gzip file cut short, as a copy of one that is being written, is read up to the cut.
    """

    def __init__(self, inner: io.BufferedIOBase, name: str) -> None:
        self._inner = inner
        self._name = name
        self._is_over = False
        self.head = b""
        while len(self.head) < _HEAD_BYTES and (data := self._next(_HEAD_BYTES - len(self.head))):
            self.head += data
        self._unread = self.head

    def read(self, size: int = -1) -> bytes:
        if self._unread:
            end = len(self._unread) if size < 0 else size
            data, self._unread = self._unread[:end], self._unread[end:]
            return data
        return self._next(size)

    def _next(self, size: int) -> bytes:
        if self._is_over:
            return b""
        try:
            return self._inner.read1(size)
        except (EOFError, OSError, zlib.error) as error:
            self._is_over = True
            if not self.head and not isinstance(error, EOFError):
                raise UsageError(f"{self._name} cannot be read: {error}") from None
            command.complain(f"{self._name} is cut short or damaged; what comes before was read")
            return b""


class _Unpacked:
    """The text in a log of JSON entries, such as Docker's: ``{"log": "...", "stream": ...}``."""

    def __init__(self, inner: _Begun) -> None:
        self._inner = inner
        self._partial = b""

    def read(self, size: int) -> bytes:
        while data := self._inner.read(size):
            *lines, self._partial = (self._partial + data).split(b"\n")
            if len(self._partial) > _LONGEST_ENTRY:  # no container's entry is that long
                lines, self._partial = [*lines, self._partial], b""
            if lines:
                return b"".join(map(_text_of, lines))
        last, self._partial = self._partial, b""
        return _text_of(last) if last else b""


def _is_json(head: bytes) -> bool:
    first = head.lstrip().partition(b"\n")[0]
    return first.startswith(b"{") and _text_of(first) != first + b"\n"


def _text_of(line: bytes) -> bytes:
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        entry = json.loads(line)
        for key in _LINE_KEYS:
            if isinstance(entry.get(key), str):
                # Docker alone keeps a line's own end: a long line of its is parted among entries.
                said: str = entry[key] if key == "log" or entry[key].endswith("\n") else entry[key] + "\n"
                return said.encode("utf-8", "surrogatepass")
    return line + b"\n"


def _see_that_it_is_text(head: bytes, name: str) -> None:
    if not head.strip():
        raise UsageError(f"{name} is empty", why="there is no line to diagnose")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UsageError(f"{name} is UTF-16", next_step=f"convert it: iconv -f UTF-16 -t UTF-8 {name}")
    undecodable = head.decode("utf-8", "replace").count("\ufffd")
    if len(_JUNK.findall(head)) + undecodable > _MOST_JUNK * len(head):
        raise UsageError(f"{name} is no log", why="it is binary data", next_step="give a text, or a gzip file of one")


def text(found: Mapping[str, Any], explain: bool = False) -> str:
    """A diagnosis (its JSON) for people: the verdict, the evidence, one next step, and how long each phase took."""
    who = f"{clean(found.get('engine')) or 'unknown engine'} {clean(found.get('version'))}".strip()
    outcome, phase = clean(found.get("outcome")), clean(found.get("phase"))
    lines = [f"{who}: {outcome}" + ("" if outcome == "ready" else f" in phase {phase}")]
    if outcome == "failed":
        above = "not in this excerpt: it stands above" if found.get("cause_above") else "unknown: no signature matches"
        lines.append(f"  cause: {clean(found.get('cause')) or above}")
    if evidence := clean(found.get("evidence")):
        where = [f"line {found['line']}"] if found.get("line") is not None else []
        where += [f"rank {found['rank']}"] if found.get("rank") is not None else []
        lines.append(f"  why: {evidence}" + (f" ({', '.join(where)})" if where else ""))
    if message := clean(found.get("message")):
        lines.append(f"  {message}")
    lines += [f"  node: {clean(note)}" for note in found.get("notes") or ()]
    if hint := clean(found.get("hint")):
        lines.append(f"  next: {hint}")
    spent = [
        f"{clean(each['phase'])} {seconds(each['seconds']) if each.get('seconds') is not None else '?'}"
        for each in found.get("phases") or ()
    ]
    if spent:
        lines.append(f"  phases: {', '.join(spent)}")
    if explain:
        lines.append(f"  rule: {_rule_text(found.get('rule'))}")
    return "\n".join(lines)


def _rule_text(rule: Mapping[str, Any] | None) -> str:
    if not rule:
        return "none: no line of the log decided"
    where = f"{clean(rule['file'])}:{rule['line']}" if rule.get("file") else "a file that has changed since"
    name = f"{clean(rule['key'])} {clean(rule['id'])}".strip()
    return f"{name} in {where}, pattern {clean(rule['pattern'])}"


def last_runs_text(data: Mapping[str, Mapping[str, Mapping[str, Any]]], explain: bool = False) -> str:
    """The diagnoses of the last runs, by host and server."""
    blocks = []
    for host, servers in data.items():
        for name, found in servers.items():
            run = f", run {clean(found['run'])}" if found.get("run") else ""
            blocks.append(f"{clean(host)}/{clean(name)}{run}")
            blocks.append(f"  {clean(found['error'])}" if found.get("error") else text(found, explain))
    return "\n".join(blocks)
