"""Inventories that a program prints: an executable with ``--list``, or ``ansible-inventory`` for all that it can read.

Starts that program on this machine, with the rights of this process, and waits for it. Its output is JSON: groups with
``hosts``, ``children`` and ``vars``, and the variables of hosts under ``_meta.hostvars``. No line is known of what it
says: the origin names the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamplighter.inventory.groups import Tree
from lamplighter.inventory.values import Origin, Problems, Value, plain, shown_path, value_of
from lamplighter.inventory.variables import canonical

#: Seconds: a program that asks a cloud may be slow; one that hangs must not hang a nightly run.
PATIENCE = 120
#: Bytes on each of stdout and stderr.
_MOST = 64 << 20
_ANSIBLE = "ansible-inventory"


def is_program(path: Path) -> bool:
    """Whether the file is one to be started: executable, and a script or a binary by its first bytes."""
    if not os.access(path, os.X_OK):
        return False
    with path.open("rb") as file:
        return file.read(4).startswith((b"#!", b"\x7fELF"))


def read_program(path: Path, tree: Tree) -> None:
    """Tell the tree what the executable prints for ``--list``, and for ``--host`` where that has no ``_meta``."""
    origin = Origin(f"{shown_path(path)} --list")
    said = _json_of([str(path.absolute()), "--list"], origin, tree.problems)
    if said is None:
        return
    listing = _Listing(tree, origin)
    listing.read(said)
    if "hostvars" not in _mapping(said.get("_meta")):
        for host in listing.hosts:
            at = Origin(f"{shown_path(path)} --host {host}")
            own = _json_of([str(path.absolute()), "--host", host], at, tree.problems, may_be_empty=True)
            if own is None:  # nor would the next five hundred be answered, and each may take its two minutes
                return
            tree.set_host(host, canonical(value_of(own, at), tree.problems))


def has_ansible() -> bool:
    """Whether ``ansible-inventory`` is installed."""
    return shutil.which(_ANSIBLE) is not None


def read_by_ansible(before: Sequence[str], path: Path, tree: Tree, problems: Problems) -> None:
    """Tell the tree what ``ansible-inventory`` makes of a source that only Ansible can read.

    It is given the sources ``before`` as well, because a plugin may speak of their hosts; what these said stays as it
    is. group_vars and host_vars are left to us.
    """
    origin = Origin(f"{_ANSIBLE} --list of {shown_path(path)}")
    words = [word for each in (*before, str(path)) for word in ("-i", each)]
    environ = {"ANSIBLE_VARS_ENABLED": "", "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true", "ANSIBLE_NOCOLOR": "1"}
    said = _json_of([_ANSIBLE, *words, "--list", "--export"], origin, problems, environ)
    if said is not None:
        _Listing(tree, origin, is_addition=True).read(said)


class _Listing:
    """Tells a tree what one ``--list`` says; an addition says nothing again that is known already."""

    def __init__(self, tree: Tree, origin: Origin, *, is_addition: bool = False) -> None:
        self.tree = tree
        self.origin = origin
        self.is_addition = is_addition
        self.hosts: dict[str, None] = {}

    def read(self, said: Mapping[str, Any]) -> None:
        for name, data in said.items():
            if name != "_meta":
                self._read_group(name, data)
        for host, data in _mapping(_mapping(said.get("_meta")).get("hostvars")).items():
            if host in self.tree.hosts:
                self.tree.set_host(host, self._news(self.tree.hosts[host], data, f"_meta.hostvars.{host}"))

    def _read_group(self, name: str, data: Any) -> None:
        self.tree.add_group(name, self.origin)
        if not isinstance(data, Mapping):
            data = {"hosts": data}
        elif not data.keys() & {"hosts", "children", "vars"}:
            data = {"hosts": [name], "vars": data} if data else {}
        for host in self._names(name, data, "hosts"):
            self.hosts[host] = None
            self.tree.add_host(host, name, self.origin)
        for child in self._names(name, data, "children"):
            self.tree.add_group(child, self.origin)
            self.tree.add_child(name, child, self.origin)
        if data.get("vars"):
            self.tree.set_group(name, self._news(self.tree.groups[name].variables, data["vars"], f"{name}.vars"))

    def _names(self, group: str, data: Mapping[str, Any], key: str) -> list[str]:
        names = data.get(key) or []
        if isinstance(names, list) and all(isinstance(each, str) for each in names):
            return [each for each in names if self.tree.is_name(each, self.origin)]
        self.tree.problems.add(self.origin, f"{group}.{key}: must be a list of names")
        return []

    def _news(self, known: Value, data: Any, path: str) -> Value:
        if not isinstance(data, Mapping):
            self.tree.problems.add(self.origin, f"{path}: must be a mapping of variables")
            data = {}
        said = canonical(value_of(data, self.origin), self.tree.problems)
        if not self.is_addition:
            return said
        old = {name: plain(each) for name, each in (known.entries or {}).items()}
        news = {
            name: each
            for name, each in (said.entries or {}).items()
            if name not in old or value_of(old[name], self.origin) != value_of(plain(each), self.origin)
        }
        return Value(news, self.origin)


def _json_of(
    words: Sequence[str],
    origin: Origin,
    problems: Problems,
    environ: Mapping[str, str] | None = None,
    *,
    may_be_empty: bool = False,
) -> Mapping[str, Any] | None:
    """What a program prints as one JSON object; None after a problem."""
    try:
        status, stdout, stderr = _run(words, {**os.environ, **(environ or {})})
    except OSError as error:
        problems.add(origin, f"cannot be started: {error.strerror}{_first_line(words[0])}")
        return None
    except _TooMuchError:
        problems.add(origin, f"printed more than {_MOST >> 20} MiB, and was ended")
        return None
    except subprocess.TimeoutExpired:
        problems.add(origin, f"printed no inventory within {PATIENCE} s, and was ended")
        return None
    if status != 0:
        problems.add(origin, f"ended with {status}{_last_words(stderr)}")
        return None
    if may_be_empty and not stdout.strip():
        return {}
    try:
        said = json.loads(stdout)
    except (ValueError, RecursionError) as error:
        problems.add(origin, f"did not print JSON: {error}{_last_words(stderr)}")
        return None
    if not isinstance(said, dict):
        problems.add(origin, "must print a mapping of groups by name")
        return None
    return said


def _run(words: Sequence[str], environ: Mapping[str, str]) -> tuple[int, bytes, bytes]:
    """Exit status, stdout and stderr; whatever the program has started itself ends with it when it is too slow."""
    with subprocess.Popen(
        words,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as program:
        try:
            stdout, stderr = _printed(program)
            program.wait(PATIENCE)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            raise
    return program.returncode, stdout, stderr


class _TooMuchError(Exception):
    """A program printed more than any inventory holds."""


def _printed(program: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """All that a program prints on stdout and stderr, until both are closed."""
    ends = time.monotonic() + PATIENCE
    printed = {stream: bytearray() for stream in (program.stdout, program.stderr) if stream is not None}
    with selectors.DefaultSelector() as open_ones:
        for stream in printed:
            open_ones.register(stream, selectors.EVENT_READ)
        while open_ones.get_map():
            ready = open_ones.select(ends - time.monotonic())
            if time.monotonic() >= ends:
                raise subprocess.TimeoutExpired(program.args, PATIENCE)
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    open_ones.unregister(key.fileobj)
                printed[key.fileobj] += piece  # type: ignore[index]
                if len(printed[key.fileobj]) > _MOST:  # type: ignore[index]
                    raise _TooMuchError
    stdout, stderr = printed.values()
    return bytes(stdout), bytes(stderr)


def _first_line(program: str) -> str:
    """What the system means where it says that a script is not there: the program that its first line names."""
    try:
        with Path(program).open("rb") as file:
            first = file.readline(200).decode(errors="replace").strip()
    except OSError:
        return ""
    return f" (its first line is {first!r})" if first.startswith("#!") else ""


def _last_words(stderr: bytes) -> str:
    lines = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return "".join(f": {line.strip()[:300]}" for line in lines[-1:])


def _mapping(data: Any) -> Mapping[str, Any]:
    return data if isinstance(data, Mapping) else {}
