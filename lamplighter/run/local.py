"""What can be shown of the inventory without a connection: how two hosts differ, its schema, and releases as files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamplighter.errors import UsageError
from lamplighter.inventory import Host, Server, secret_words
from lamplighter.inventory.editors import json_schema
from lamplighter.project import Project
from lamplighter.release.engine import load_engine
from lamplighter.release.release import ReleaseFile, build_release
from lamplighter.report import difference_text
from lamplighter.run.command import Settings, guarded, say

#: What `render` wrote into a directory: digests by name.
_RECORD = ".rendered.json"


def print_schema(settings: Settings) -> None:
    """Print the JSON Schema of the inventory's own variables."""
    with guarded(settings):
        say(json.dumps(json_schema(), indent=2))


def print_difference(settings: Settings, patterns: Sequence[str]) -> None:
    """Print in what two hosts differ, with the place of each value."""
    with guarded(settings):
        inventory = settings.load()
        names = list(dict.fromkeys(inventory.select(patterns))) if patterns else []
        if len(names) != 2:
            raise UsageError(
                f"two hosts are compared, and {len(names)} named", next_step="./inv config --host A --diff B"
            )
        one, other = (host.to_json() for host in inventory.resolve(names))
        found = differences(one, other)
        if settings.as_json:
            say(json.dumps({"hosts": names, "differences": [dataclasses.asdict(each) for each in found]}))
        else:
            say(difference_text(names, [dataclasses.asdict(each) for each in found]))


@dataclasses.dataclass(frozen=True)
class Different:
    """A variable that two hosts have otherwise: both values, and where each is set; None where there is none."""

    variable: str
    values: tuple[Any, Any]
    origins: tuple[str, str]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Different]:
    """Compare what ``Host.to_json`` says of two hosts."""
    leaves = [_leaves({key: each[key] for key in ("connection", "root", "servers")}) for each in (one, other)]
    return [
        Different(
            name,
            (leaves[0].get(name), leaves[1].get(name)),
            (_origin(one, name) if name in leaves[0] else "", _origin(other, name) if name in leaves[1] else ""),
        )
        for name in dict.fromkeys([*leaves[0], *leaves[1]])
        if leaves[0].get(name) != leaves[1].get(name)
    ]


def _leaves(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, each in value.items():
        if isinstance(each, Mapping):
            found |= _leaves(each, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = each
    return found


def _origin(host: Mapping[str, Any], path: str) -> str:
    while path and path not in host["origins"]:
        path = path.rpartition(".")[0]
    return str(host["origins"].get(path, ""))


def render(settings: Settings, patterns: Sequence[str], server: str | None, out: str | None) -> None:
    """Write the release of each chosen server below ``out``/HOST/SERVER: all but its secrets, which stay references.

    What is there already is replaced where an earlier ``render`` wrote it and it has not been changed since; anything
    else is a refusal, before the first file is written.
    """
    with guarded(settings):
        if not patterns or out is None:
            raise UsageError("render needs hosts and a directory", next_step="./inv render --host H --out DIR")
        inventory = settings.load()
        wanted: dict[Path, dict[str, ReleaseFile]] = {}
        for host in inventory.resolve(inventory.select(patterns)):
            for one in host.servers.values():
                if server in (None, one.name):
                    wanted[Path(out) / host.name / one.name] = _files(host, one, settings.project)
        if not wanted:
            raise UsageError(f"no host of {', '.join(patterns)} has such a server", next_step="./inv config --host H")
        try:
            for place, files in wanted.items():
                _refuse_foreign(place, files)
            for place, files in wanted.items():
                _write(place, files)
                say(f"{place}: {', '.join(files)}")
        except OSError as error:
            raise UsageError(f"{error.filename or out} cannot be written: {error.strerror}") from error


def _files(host: Host, server: Server, project: Path | Project) -> dict[str, ReleaseFile]:
    release = build_release(host, server, load_engine(server.engine, project / "roles"), project)
    named = [(name, str(secret)) for name, secret in server.secrets.items()]
    named += [(word.variable, str(word.secret)) for word in secret_words(server)]
    lines = [f"# export {name}=...   from {shown}\n" for name, shown in sorted(named)]
    head = "# What only the node knows is written there at the deploy, readable by its owner alone.\n"
    return {**release.files, "env.example": ReleaseFile(head + "".join(lines), 0o644)}


def _refuse_foreign(place: Path, files: Mapping[str, ReleaseFile]) -> None:
    for directory in (place, *(place / name for name in files if "/" in name)):
        for above in (directory, *directory.parents):
            if above.is_symlink() and above.is_relative_to(place.parent.parent):
                raise UsageError(f"{above} is a symbolic link: nothing is written through it")
    known = _written(place)
    if (place / _RECORD).is_symlink():
        raise UsageError(f"{place / _RECORD} is a symbolic link: nothing is written through it")
    for name in files:
        path = place / name
        if not os.path.lexists(path):
            continue
        if not stat.S_ISREG(path.lstat().st_mode) or _digest(path.read_bytes()) != known.get(name):
            raise UsageError(
                f"{path} is there and was not written by `render`, or was changed since",
                next_step="remove it, or name another directory with --out",
            )


def _written(place: Path) -> dict[str, str]:
    try:
        said = json.loads((place / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _write(place: Path, files: Mapping[str, ReleaseFile]) -> None:
    for name, digest in _written(place).items():  # of an earlier release that had more
        path = place / name
        if name not in files and path.is_file() and _digest(path.read_bytes()) == digest:
            path.unlink()
    for name, file in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text, encoding="utf-8")
        path.chmod(file.mode)
    known = {name: _digest(file.text.encode()) for name, file in files.items()}
    (place / _RECORD).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
