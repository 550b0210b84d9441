"""Where that lies which comes with the program and is no Python of the package, and what a user lays over it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, overload

_PACKAGE = Path(__file__).resolve().parent
#: A wheel brings them inside the package, in one directory that looks like a checkout's top.
_SHARE = _PACKAGE / "share"

IS_CHECKOUT = not _SHARE.is_dir()
#: Holds roles/, templates/ and lab/.
PROJECT = _PACKAGE.parent if IS_CHECKOUT else _SHARE


class Roles(Protocol):
    """Directories of roles: a Path, or several of them as one."""

    def __truediv__(self, role: str, /) -> Path:
        """The directory of ``role``, whether it is there or not."""

    def glob(self, pattern: str, /) -> Iterable[Path]:
        """What there is of a pattern ``*/FILE``."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class LayeredRoles:
    """Roles of the user's own before the built-in ones: who has an engine.yml there replaces the whole role."""

    own: Path
    built_in: Path

    def __truediv__(self, role: str) -> Path:
        own = self.own / role
        return own if (own / "engine.yml").is_file() else self.built_in / role

    def glob(self, pattern: str) -> list[Path]:
        roles = {path.relative_to(place).parts[0] for place in (self.own, self.built_in) for path in place.glob("*/")}
        return sorted(path for role in roles for path in (self / role).glob(pattern.partition("/")[2]))


@dataclass(frozen=True)
class OwnEngine:
    """An engine that a user describes; ``replaces``: a built-in one of the same name is not used."""

    place: str
    replaces: bool


@dataclass(frozen=True)
class Project:
    """What comes with the program, in ``built_in``, under the roles that a user keeps in ``own``."""

    own: Path
    built_in: Path = PROJECT

    @overload
    def __truediv__(self, part: Literal["roles"]) -> LayeredRoles: ...  # type: ignore[overload-overlap]
    @overload
    def __truediv__(self, part: str) -> Path: ...
    def __truediv__(self, part: str) -> Path | LayeredRoles:
        return LayeredRoles(self.own, self.built_in / "roles") if part == "roles" else self.built_in / part

    def own_engine(self, name: str) -> OwnEngine | None:
        """Where the user describes the engine ``name``; None where it is ours."""
        if not (self.own / name / "engine.yml").is_file():
            return None
        return OwnEngine(str(self.own / name), (self.built_in / "roles" / name / "engine.yml").is_file())


def project_beside(inventory: Path) -> Path | Project:
    """The project with the roles that lie beside an inventory, a directory or a file, or beside that file's directory.

    A directory of Ansible's roles may have that name; what is none of ours has no ``engine.yml`` and no ``checks``.
    """
    if not inventory.exists():  # a list of names
        return PROJECT
    directory = inventory.resolve()  # that of another directory's link lies there
    places = [directory.parent] if directory.is_dir() else [directory.parent, directory.parent.parent]
    for own in (place / "roles" for place in places):
        if own.is_dir() and own.resolve() != (PROJECT / "roles").resolve():
            return Project(own)
    return PROJECT


def called() -> str:
    """What people type before a task: the package's program, or the `./inv` of a checkout."""
    return "./inv" if IS_CHECKOUT and Path(sys.argv[0]).name != "lamplighter" else "lamplighter"


def lab_directory() -> Path:
    """Where the nodes in a box live: in the checkout, else with the state of the user's other programs (XDG)."""
    if IS_CHECKOUT:
        return PROJECT / ".lab"
    state = os.environ.get("XDG_STATE_HOME", "")
    ground = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"  # others are to be ignored
    return ground / "lamplighter" / "lab"
