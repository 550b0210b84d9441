"""INI inventories, as Ansible reads them: ``[group]``, ``[group:vars]``, ``[group:children]``.

Values beside a host and below ``:vars`` are Python literals where they can be, and else the text as it stands.
"""

from __future__ import annotations

import ast
import re
import shlex
import warnings
from dataclasses import dataclass, field

from lamplighter.inventory.groups import Tree
from lamplighter.inventory.values import Origin, Problems, Value, value_of
from lamplighter.inventory.variables import canonical

_SECTION = re.compile(r"\[([^:\]\s]+)(?::(\w+))?\]\s*(?:#.*)?")
_NAME = re.compile(r"([^:\]\s]+)\s*(?:#.*)?")


def begins_as_ini(text: str) -> bool:
    """Whether the first line that says something is ``[group]``."""
    lines = (line.strip() for line in text.splitlines())
    return bool(_SECTION.fullmatch(next((line for line in lines if line and line[0] not in "#;"), "")))


def is_ini(text: str, file: str) -> bool:
    """Whether a text can be read as INI from end to end."""
    problems = Problems()
    IniGroups(Tree(problems), file).read(text)
    return not len(problems)


@dataclass
class IniGroups:
    """Tells a tree what one file says; what is wrong in it is noted with its line."""

    tree: Tree
    file: str
    _group: str = "ungrouped"
    _kind: str = "hosts"
    _line: Origin = field(default=Origin("inventory"))
    #: Groups that are spoken of before they are declared: whose children they are, and where.
    _awaited: dict[str, list[tuple[str, Origin]]] = field(default_factory=dict)
    #: Groups of which only variables were given so far, and where.
    _undeclared: dict[str, Origin] = field(default_factory=dict)

    def read(self, text: str) -> None:
        """Read the whole file."""
        for number, written in enumerate(text.splitlines(), 1):
            line = written.strip()
            if line and line[0] not in ";#":
                self._line = Origin(self.file, number)
                self._read_line(line)
        for group, origin in self._undeclared.items():
            self.tree.problems.add(origin, f"[{group}:vars]: there is no group {group}")
        for child, parents in self._awaited.items():
            for parent, origin in parents:
                self.tree.problems.add(
                    origin, f"[{parent}:children]: there is no group {child}; declare it with [{child}]"
                )

    def _read_line(self, line: str) -> None:
        section = _SECTION.fullmatch(line)
        if section:
            self._begin(section[1], section[2] or "hosts")
        elif line.startswith("[") and line.endswith("]"):
            self._complain(f"{line} is no section: write [group], [group:vars] or [group:children], without spaces")
        elif self._kind == "hosts":
            self._read_host(line)
        elif self._kind == "vars":
            self._read_variable(line)
        elif self._kind == "children":
            self._read_child(line)

    def _begin(self, group: str, kind: str) -> None:
        self._group, self._kind = group, kind
        if kind not in ("hosts", "vars", "children"):
            self._complain(f"[{group}:{kind}]: a section is [group], [group:vars] or [group:children]")
            return
        if kind == "vars" and group not in self.tree.groups:
            self._undeclared[group] = self._line
        self.tree.add_group(group, self._line)
        if kind != "vars":
            self._undeclared.pop(group, None)
            for parent, origin in self._awaited.pop(group, ()):
                self.tree.add_child(parent, group, origin)

    def _read_host(self, line: str) -> None:
        try:
            written, *words = shlex.split(line, comments=True)
        except ValueError as error:
            self._complain(f"{line}: {str(error).lower()}")
            return
        if written.endswith(":") or written == "---":
            self._complain(f"{written} is no host (a YAML inventory has a name that ends with .yml)")
            return
        entries = {}
        for word in words:
            name, is_given, value = word.partition("=")
            if not is_given:
                self._complain(f"{written}: {word!r} must be NAME=VALUE")
                return
            entries[name] = self._value(value)
        own = canonical(Value(entries, self._line), self.tree.problems)
        for host in self.tree.add_hosts(written, self._group, self._line):
            self.tree.set_host(host, own)

    def _read_variable(self, line: str) -> None:
        name, is_given, value = line.partition("=")
        if not is_given:
            self._complain(f"{line!r} must be NAME=VALUE below [{self._group}:vars]")
            return
        entry = {name.strip(): self._value(value.strip())}
        self.tree.set_group(self._group, canonical(Value(entry, self._line), self.tree.problems))

    def _read_child(self, line: str) -> None:
        found = _NAME.fullmatch(line)
        if not found:
            self._complain(f"{line!r} is no name of a group")
        elif found[1] in self.tree.groups:
            self.tree.add_child(self._group, found[1], self._line)
        else:
            self._awaited.setdefault(found[1], []).append((self._group, self._line))

    def _value(self, text: str) -> Value:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                found = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            found = text
        return value_of(text if found is ... else found, self._line, text)

    def _complain(self, message: str) -> None:
        self.tree.problems.add(self._line, message)
