"""Variables that stand in files beside the inventory: group_vars and host_vars, found by Ansible's rule.

Reads a file when a host needs it, and each once. A name has one place in a directory: NAME (a file, or a directory of
files), else NAME.yml, NAME.yaml, NAME.json. Of a directory count, by alphabet and at any depth, the files with these
suffixes or none; names that begin with a dot or end with ``~`` never do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from lamplighter.inventory.values import Origin, Problems, Value, shown_path

#: In the order in which they are looked for.
SUFFIXES = (".yml", ".yaml", ".json")
#: Stands before the suffix of a file that the program sops opens, as Ansible's plugin for it wants it.
SOPS = ".sops"
_KINDS = {"group_vars": "group", "host_vars": "host"}

#: Reads one file of variables; what is wrong is noted.
ReadFile = Callable[[Path, Problems], Value]


@dataclass(frozen=True)
class _Found:
    values: tuple[Value, ...]
    problems: Problems


class VariableFiles:
    """The group_vars and host_vars of some directories, the later ones over the earlier."""

    def __init__(self, directories: Collection[Path], read: ReadFile) -> None:
        self._directories = tuple(directories)
        self._read = read
        self._found: dict[tuple[Path, str], _Found | None] = {}
        self._kinds = [place.name for each in directories for place in _places(each)]

    def of_groups(self, groups: Collection[str], problems: Problems) -> Iterator[Value]:
        """What the files say of these groups, lowest first."""
        yield from self._of("group_vars", [name for name in groups if name == "all"], problems)
        yield from self._of("group_vars", [name for name in groups if name != "all"], problems)

    def of_host(self, name: str, problems: Problems) -> Iterator[Value]:
        """What the files say of this host."""
        yield from self._of("host_vars", [name], problems)

    def read_all(self, groups: Collection[str], hosts: Collection[str], problems: Problems) -> None:
        """Note what is wrong in any file of these groups and hosts."""
        for _ in (*self._of("group_vars", groups, problems), *self._of("host_vars", hosts, problems)):
            pass

    def tell_unread(self, names: Mapping[str, Collection[str]], problems: Problems) -> None:
        """Warn of what lies in the directories and is not read; ``names`` are those of groups and of hosts, by kind.

        Files of absent groups and hosts are no mistake: Ansible ignores them, too.
        """
        for place in (place for each in self._directories for place in _places(each)):
            known = set(names[_KINDS[place.name]])
            unread = [path for path in sorted(place.iterdir()) if _is_told(path) and not self._is_read(path, known)]
            if unread:
                shown = ", ".join(path.name for path in unread)
                problems.warn(
                    Origin(shown_path(place)),
                    f"not read: {shown} (what is read is the first that is there of NAME, "
                    f"{', '.join(f'NAME{each}' for each in SUFFIXES)})",
                    "not-read",
                )

    def _is_read(self, path: Path, known: Collection[str]) -> bool:
        name = path.name.removesuffix(path.suffix).removesuffix(SOPS) if path.suffix in SUFFIXES else path.name
        if path.name in known:
            return True
        if name in known:
            return path in _places_of(path.parent, name)
        return path.suffix in (*SUFFIXES, "") or path.is_dir()

    def _of(self, kind: str, names: Collection[str], problems: Problems) -> Iterator[Value]:
        for directory in self._directories if kind in self._kinds else ():
            for name in names:
                found = self._files_of(directory / kind, name)
                if found is not None:
                    problems.take(found.problems)
                    yield from found.values

    def _files_of(self, place: Path, name: str) -> _Found | None:
        key = (place, name)
        if key not in self._found:
            paths = _places_of(place, name)
            self._found[key] = self._read_files(paths) if paths else None
        return self._found[key]

    def _read_files(self, paths: Collection[Path]) -> _Found:
        problems = Problems()
        files = [each for one in paths for each in (_files_below(one, frozenset()) if one.is_dir() else [one])]
        values = tuple(canonical(self._read(file, problems), problems) for file in files)
        return _Found(values, problems)


def _places(directory: Path) -> list[Path]:
    return [directory / kind for kind in _KINDS if (directory / kind).is_dir()]


def _places_of(place: Path, name: str) -> list[Path]:
    """Where the variables of a name are, in one directory: one place, and above it a file of sops."""
    # A host may be called as a path (a chroot): it has no files, and no name leads out of the directory.
    if name.startswith("/") or ".." in PurePath(name).parts:
        return []
    names = ((name, *(f"{name}{suffix}" for suffix in SUFFIXES)), [f"{name}{SOPS}{suffix}" for suffix in SUFFIXES])
    found = [next((place / each for each in some if (place / each).exists()), None) for some in names]
    return [each for each in found if each is not None]


def _files_below(directory: Path, above: frozenset[Path]) -> Iterator[Path]:
    real = directory.resolve()
    if real in above:  # a link to a directory around itself
        return
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.name.endswith("~"):
            continue
        if path.is_dir():
            if not path.suffix:
                yield from _files_below(path, above | {real})
        elif path.suffix in (*SUFFIXES, ""):
            yield path


def _is_told(path: Path) -> bool:
    """Whether somebody may take the file for variables."""
    return not path.name.startswith(".") and not path.name.lower().startswith("readme")


def canonical(variables: Value, problems: Problems) -> Value:
    """One name a variable: ``ansible_become`` is ``become``, so that one overrides the other across files."""
    entries = variables.entries or {}
    if "ansible_become" not in entries:
        return variables
    entries = dict(entries)
    value = entries.pop("ansible_become")
    if "become" in entries:
        problems.add(value.origin, f"ansible_become: stands beside become ({entries['become'].origin}): keep one")
    entries["become"] = value
    return replace(variables, data=entries)
