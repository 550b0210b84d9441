"""The groups and hosts of a YAML or JSON inventory: ``hosts``, ``children`` and ``vars`` below each group."""

from __future__ import annotations

from lamplighter.inventory.groups import Tree
from lamplighter.inventory.values import EMPTY, Problems, Value, did_you_mean
from lamplighter.inventory.variables import canonical

_SECTIONS = ("hosts", "children", "vars")
#: What a program says beside its groups; in a file it is a group like any other, as in Ansible.
_OF_PROGRAMS = "_meta"


class YamlGroups:
    """Tells a tree what one file says."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.problems: Problems = tree.problems

    def read(self, top: Value) -> None:
        """Read the whole file."""
        for name, value in (top.entries or {}).items():
            if name in ("hosts", "children") and not (value.entries or {}).keys() & set(_SECTIONS):
                self.problems.add(value.origin, f"`{name}` must stand below a group: write `all:` above it")
            elif value.data is not None and value.entries is None:
                self._skip(value, name, "a group is a mapping of hosts, children and vars")
            else:
                self._read_group(name, value)

    def _read_group(self, name: str, value: Value, parent: str | None = None) -> None:
        self.tree.add_group(name, value.origin)
        if value.data is not None and value.entries is None:
            self._skip(value, name, "a group is a mapping of hosts, children and vars")
        entries = value.entries or {}
        looks_like_host = parent is not None and not entries.keys() & set(_SECTIONS)
        for key, each in entries.items():
            if key in _SECTIONS:
                self._read_section(name, key, _as_mapping(each))
            elif looks_like_host and key.startswith("ansible_"):
                self._complain_of_host(name, key, each, str(parent))
            else:
                self._complain_of_key(name, key, each)

    def _read_section(self, group: str, key: str, value: Value) -> None:
        if value.data is None:
            return
        if value.entries is None:
            self.problems.add(value.origin, f"{group}.{key}: must be a mapping, not {value.describe()}")
        elif key == "vars":
            self.tree.set_group(group, canonical(value, self.problems))
        elif key == "hosts":
            self._read_hosts(group, value)
        else:
            for name, each in value.entries.items():
                self._read_group(name, each, group)
                self.tree.add_child(group, name, each.origin)

    def _read_hosts(self, group: str, value: Value) -> None:
        for written, variables in (value.entries or {}).items():
            if variables.data and variables.entries is None:
                self.problems.add(variables.origin, f"{written}: must be a mapping, not {variables.describe()}")
                continue
            own = canonical(variables if variables.entries else EMPTY, self.problems)
            for name in self.tree.add_hosts(written, group, variables.origin):
                self.tree.set_host(name, own)

    def _complain_of_host(self, group: str, key: str, value: Value, parent: str) -> None:
        self.problems.add(
            value.origin,
            f"{group}.{key}: {group} stands under `children` of {parent} and so is a group: put a host under "
            "`hosts`, and variables of a group under `vars`",
        )

    def _complain_of_key(self, group: str, key: str, value: Value) -> None:
        near = did_you_mean(key, _SECTIONS) if group != _OF_PROGRAMS else ""
        if near:
            self.problems.add(value.origin, f"{group}.{key}: a group has hosts, children and vars alone{near}")
        else:
            self._skip(value, f"{group}.{key}", "a group has hosts, children and vars alone")

    def _skip(self, value: Value, path: str, why: str) -> None:
        self.problems.warn(value.origin, f"not read: {why}", "not-read", path)


def _as_mapping(value: Value) -> Value:
    """One name alone may stand in place of a mapping."""
    if isinstance(value.data, str):
        return Value({value.data: Value(None, value.origin)}, value.origin)
    return value
