"""Where an inventory comes from: files, directories of several, lists of names, and which reader each of them needs.

Ansible's rules: of a directory everything counts, by alphabet and at any depth, except group_vars, host_vars and what
bears a suffix of leftovers and notes. What is not read is said.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lamplighter.inventory.groups import BUILT_IN, Tree
from lamplighter.inventory.names import split_port
from lamplighter.inventory.sources.ini import IniGroups, begins_as_ini, is_ini
from lamplighter.inventory.sources.script import has_ansible, is_program, read_by_ansible, read_program
from lamplighter.inventory.sources.yaml_file import VAULT, read_any, read_file
from lamplighter.inventory.sources.yaml_groups import YamlGroups
from lamplighter.inventory.values import Origin, Problems, Value, shown_path

_YAML = (".yml", ".yaml", ".json")
#: Never an inventory, by their suffix.
_IGNORED = (".pyc", ".pyo", ".swp", ".bak", "~", ".rpm", ".md", ".txt", ".rst", ".orig", ".cfg", ".retry")
#: What the name of an inventory may end with. In a directory of several, a file of another name that cannot be read is
#: somebody else's: `main.tf`, `admin.conf`, a Makefile.
_USUAL = (*_YAML, "", ".ini", ".cfg", ".inventory", ".inv", ".hosts")
_ELSE = ("Makefile", "Vagrantfile", "Dockerfile", "Jenkinsfile", "LICENSE", "Justfile", "justfile", "Pipfile")
#: Parts of an inventory that hold no hosts: ours are `checks`.
_BESIDE = ("group_vars", "host_vars", "vars_plugins", "checks")


@dataclass(frozen=True)
class Source:
    """One source as it was given: a path, or names with commas between them (``gpu1,gpu2:2222``)."""

    given: str
    path: Path

    @property
    def is_list(self) -> bool:
        """Whether this is a list of names: there is no such file, and there is a comma."""
        return "," in self.given and not self.path.exists()

    @property
    def directory(self) -> Path | None:
        """Where its group_vars and host_vars stand; a list of names has none."""
        if self.is_list:
            return None
        return self.path if self.path.is_dir() else self.path.parent


def read_sources(sources: Sequence[Source], tree: Tree) -> None:
    """Tell the tree what all sources say, in their order; what is wrong or not read is noted in its problems."""
    reading = _Reading(tree)
    for source in sources:
        if source.is_list:
            reading.read_list(source.given)
        elif source.path.is_dir():
            reading.read_directory(source.path)
        elif source.path.exists():
            reading.read_file(source.path, is_alone=True)
        else:
            tree.problems.add(
                Origin(shown_path(source.path)),
                "there is no inventory here: name one with --inventory or LAMPLIGHTER_INVENTORY",
            )
    if not tree.hosts and not len(tree.problems):
        reading.complain_of_no_host()


class _Reading:
    """Tells a tree what each source says; ``before`` are those that have been read."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.problems: Problems = tree.problems
        self.before: list[str] = []
        self.empty: list[Path] = []

    def complain_of_no_host(self) -> None:
        """Say where hosts might have been meant."""
        for lint in (each for each in self.problems.warnings if each.id == "not-read"):
            self.problems.add(lint.origin, f"{lint.variable}: {lint.message}" if lint.variable else lint.message)
        for name, group in self.tree.groups.items():
            if name not in BUILT_IN and not group.children:
                self.problems.add(group.origin, f"{name} is a group without hosts: a host stands under `hosts`")
        for path in self.empty:
            self.problems.add(Origin(shown_path(path), 1), "the inventory is empty: it has no hosts")
        if not len(self.problems):
            self.problems.add(Origin(", ".join(self.before)), "the inventory has no hosts")

    def read_list(self, names: str) -> None:
        self.before.append(names)
        for written in (each.strip() for each in names.split(",")):
            host, port = split_port(written)
            origin = Origin(f"--inventory {names}")
            if written and self.tree.is_name(host, origin):
                self.tree.add_host(host, "ungrouped", origin, port)

    def read_directory(self, directory: Path) -> None:
        files = list(self._files_below(directory, frozenset()))
        if not files and not any(each.id == "not-read" for each in self.problems.warnings):
            self.problems.add(Origin(shown_path(directory)), "there is no inventory in this directory: write hosts.yml")
        for path in files:
            self.read_file(path, is_alone=len(files) == 1)

    def _files_below(self, directory: Path, above: frozenset[Path]) -> Iterator[Path]:
        real = directory.resolve()
        if real in above:  # a link to a directory around itself
            return
        left = []
        for path in sorted(directory.iterdir()):
            if path.name.endswith(_IGNORED) and not path.name.startswith("."):
                left.append(path.name)
            elif path.name in _BESIDE or path.name.startswith("."):
                continue
            elif path.is_dir():
                yield from self._files_below(path, above | {real})
            else:
                yield path
        left = [name for name in left if not name.lower().startswith("readme")]
        if left:
            message = f"not read: {', '.join(left)} (in a directory, names that end so are passed over)"
            self.problems.warn(Origin(shown_path(directory)), message, "not-read")

    def read_file(self, path: Path, *, is_alone: bool) -> None:
        """Read one file; in a directory of several, one that only Ansible could read is passed over with a warning."""
        if self._is_openable(path):
            if is_program(path):
                read_program(path, self.tree)
            else:
                self._read_text(path, is_alone)
        self.before.append(str(path))

    def _is_openable(self, path: Path) -> bool:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            self.problems.add(Origin(shown_path(path)), f"cannot be read: {error.strerror}")
            return False
        if not stat.S_ISREG(mode):
            self.problems.add(Origin(shown_path(path)), "is no regular file, so it is not opened")
        return stat.S_ISREG(mode)

    def _read_text(self, path: Path, is_alone: bool) -> None:
        file = shown_path(path)
        if path.suffix == ".toml":
            self._read_by_ansible(path, "a TOML inventory", is_alone)
            return
        text = read_file(path, file, self.problems)
        if text is None:
            return
        if not text.strip():
            self.empty.append(path)
            return
        if text.startswith(VAULT):
            self.problems.add(
                Origin(file, 1),
                "is a vault: which hosts there are must be readable without a password; keep what is secret in "
                "group_vars or host_vars",
            )
            return
        is_somebody_elses = path.suffix not in _USUAL or path.name in _ELSE
        if is_somebody_elses and not is_alone and not is_ini(text, file):
            message = "not read as an inventory: neither its name nor its text is that of one"
            self.problems.warn(Origin(file), message, "not-read")
        elif path.suffix not in (*_YAML, ""):
            IniGroups(self.tree, file).read(text)
        else:
            self._read_yaml(path, file, text, is_alone)

    def _read_yaml(self, path: Path, file: str, text: str, is_alone: bool) -> None:
        """Read what is YAML by its name, or INI all the same, which is what Ansible tries next."""
        found = Problems()
        top = read_any(text, path, found)
        is_broken = len(found) > 0 or (top.entries is None and top.data is not None)
        is_meant = path.suffix == "" and not _looks_like_yaml(text)
        if is_broken and (is_meant or begins_as_ini(text) or is_ini(text, file)):
            IniGroups(self.tree, file).read(text)
            return
        self.problems.take(found)
        if top.entries is not None and "plugin" in top.entries:
            self._read_by_ansible(path, "the configuration of a plugin", is_alone)
        elif top.entries is not None:
            YamlGroups(self.tree).read(top)
        elif top.data is None:
            self.empty.append(path)
        else:
            self._complain_of_shape(path, top, is_alone)

    def _complain_of_shape(self, path: Path, top: Value, is_alone: bool) -> None:
        message = f"the file must hold a mapping of groups, not {top.describe()}"
        if is_alone:
            self.problems.add(top.origin, message)
        else:
            self.problems.warn(top.origin, f"not read as an inventory: {message}", "not-read")

    def _read_by_ansible(self, path: Path, what: str, is_alone: bool) -> None:
        found = Problems()
        origin = Origin(shown_path(path), 1)
        if has_ansible():
            read_by_ansible(self.before, path, self.tree, found)
        else:
            found.add(origin, f"this is {what}, which only ansible-inventory can read, and that is not installed here")
        if is_alone or not len(found):
            self.problems.take(found)
        else:
            for message in found.messages:
                self.problems.warn(origin, f"not read: {message}", "not-read")


def _looks_like_yaml(text: str) -> bool:
    """Whether a file without a suffix is meant as YAML, by its first line that says something."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and line[0] not in "#;"), "")
    return first.endswith(":") or first.startswith(("---", "%YAML", "{")) or (": " in first and "=" not in first)
