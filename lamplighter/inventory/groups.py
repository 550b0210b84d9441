"""The groups and hosts of an inventory: who belongs to whom, in which order of precedence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lamplighter.inventory.values import EMPTY, Origin, Problems, Value, did_you_mean, merge
from lamplighter.inventory.variables import canonical

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_RANGE = re.compile(r"\[([^\[\]]*)\]")
_MOST_HOSTS = 100_000


@dataclass
class Group:
    name: str
    origin: Origin
    variables: Value = EMPTY
    priority: int = 1
    hosts: dict[str, None] = field(default_factory=dict)
    children: dict[str, Origin] = field(default_factory=dict)


class Tree:
    """The groups and hosts of hosts.yml."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.groups = {name: Group(name, Origin("inventory")) for name in ("all", "ungrouped")}
        self.hosts: dict[str, Value] = {}
        self._depths: dict[str, int] = {}
        self._parents: dict[str, set[str]] = {}
        self._groups_of: dict[str, tuple[str, ...]] = {}

    def read(self, top: Value) -> None:
        for name, value in (top.entries or {}).items():
            if name in ("hosts", "children", "vars"):
                self.problems.add(value.origin, f"`{name}` must stand below a group: write `all:` above it")
            else:
                self._read_group(name, value)

    def settle(self) -> None:
        """Work out what depends on the whole file: cycles, names used twice, depth, ``ungrouped``."""
        for name in self.groups.keys() & self.hosts.keys():
            self.problems.add(self.groups[name].origin, f"{name} is a group and a host: rename one")
        if self._has_cycle():
            return
        for group in self.groups.values():
            for child in group.children:
                self._parents.setdefault(child, set()).add(group.name)
        grouped = {host for group in self.groups.values() if group.name != "all" for host in group.hosts}
        loose = self.groups["ungrouped"]
        loose.hosts = {host: None for host in self.hosts if host not in grouped or host in loose.hosts}
        direct: dict[str, set[str]] = {host: set() for host in self.hosts}
        for group in self.groups.values():
            for host in group.hosts:
                direct[host].add(group.name)
        self._groups_of = {host: self._ordered(names) for host, names in direct.items()}

    def groups_of(self, host: str) -> tuple[str, ...]:
        """The host's groups in the order of their precedence, ``all`` first."""
        return self._groups_of[host]

    def members(self) -> dict[str, tuple[str, ...]]:
        """The hosts of every group, those of its children included."""
        found: dict[str, list[str]] = {name: [] for name in self.groups}
        for host in self.hosts:
            for group in self._groups_of[host]:
                found[group].append(host)
        return {name: tuple(hosts) for name, hosts in found.items()}

    def _read_group(self, name: str, value: Value) -> None:
        if not _NAME.fullmatch(name):
            self.problems.add(value.origin, f"{name!r} is no name for a group: use letters, digits, _ . -")
            return
        group = self.groups.setdefault(name, Group(name, value.origin))
        if value.data is None:
            return
        if value.entries is None:
            self.problems.add(value.origin, f"{name}: a group must be a mapping, not {value.describe()}")
            return
        for key, each in value.entries.items():
            if key not in ("hosts", "children", "vars"):
                hint = did_you_mean(key, ("hosts", "children", "vars"))
                self.problems.add(each.origin, f"{name}.{key}: a group has hosts, children and vars alone{hint}")
            elif each.data is not None and each.entries is None:
                self.problems.add(each.origin, f"{name}.{key}: must be a mapping, not {each.describe()}")
            elif key == "vars":
                self._read_vars(group, each)
            elif key == "hosts":
                self._read_hosts(group, each)
            else:
                self._read_children(group, each)

    def _read_vars(self, group: Group, value: Value) -> None:
        entries = dict(value.entries or {})
        priority = entries.pop("ansible_group_priority", None)
        if priority is not None and isinstance(priority.data, int) and not isinstance(priority.data, bool):
            group.priority = priority.data
        elif priority is not None:
            self.problems.add(priority.origin, f"ansible_group_priority: must be a number, not {priority.describe()}")
        variables = canonical(Value(entries, value.origin), self.problems)
        group.variables = merge(group.variables, variables)

    def _read_hosts(self, group: Group, value: Value) -> None:
        for written, variables in (value.entries or {}).items():
            if variables.data is not None and variables.entries is None:
                self.problems.add(variables.origin, f"{written}: must be a mapping, not {variables.describe()}")
                continue
            for name in self._expand(written, variables.origin):
                group.hosts[name] = None
                own = canonical(variables, self.problems)
                self.hosts[name] = merge(self.hosts.get(name, EMPTY), own)

    def _read_children(self, group: Group, value: Value) -> None:
        for name, each in (value.entries or {}).items():
            if name in ("all", "ungrouped"):
                self.problems.add(each.origin, f"{name} cannot be a child of {group.name}")
                continue
            group.children.setdefault(name, each.origin)
            self._read_group(name, each)

    def _expand(self, written: str, origin: Origin) -> list[str]:
        try:
            names = expand_range(written)
        except ValueError as error:
            self.problems.add(origin, f"{written}: {error}")
            return []
        for name in names:
            if not _NAME.fullmatch(name):
                self.problems.add(
                    origin,
                    f"{name!r} is no name for a host: use letters, digits, _ . -, and ansible_host for an address",
                )
                return []
            if name in ("all", "ungrouped"):
                self.problems.add(origin, f"{name} is the name of a group")
                return []
        return names

    def _has_cycle(self) -> bool:
        """Whether a group is its own descendant; noted once, where the circle closes. Depths come out beside it."""
        done: set[str] = set()
        for start in self.groups:
            trail: list[tuple[str, Iterator[str]]] = [(start, iter(self.groups[start].children))]
            on_trail = {start}
            while trail and start not in done:
                name, children = trail[-1]
                child = next(children, None)
                if child is None:
                    done.add(name)
                    on_trail.discard(name)
                    trail.pop()
                elif child in on_trail:
                    circle = " > ".join([*(each for each, _ in trail), child])
                    self.problems.add(self.groups[name].children[child], f"groups in a circle: {circle}")
                    return True
                elif child not in done and child in self.groups:
                    trail.append((child, iter(self.groups[child].children)))
                    on_trail.add(child)
        return False

    def _ordered(self, names: set[str]) -> tuple[str, ...]:
        every = {"all"}
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in every:
                every.add(name)
                waiting.extend(self._parents.get(name, ()))
        return tuple(sorted(every, key=lambda name: (self._depth(name), self.groups[name].priority, name)))

    def _depth(self, name: str) -> int:
        """Steps from ``all`` on the longest way, which is how Ansible counts."""
        if name == "all":
            return 0
        if name not in self._depths:
            self._depths[name] = 1 + max((self._depth(parent) for parent in self._parents.get(name, ())), default=0)
        return self._depths[name]


def expand_range(written: str) -> list[str]:
    """The names that ``gpu[1:8]``, ``gpu[01:16:5]`` or ``rack[a:c]`` stand for; both ends count. Raises ValueError."""
    match = _RANGE.search(written)
    if match is None:
        return [written]
    parts = match[1].split(":")
    if len(parts) not in (2, 3):
        raise ValueError("a range is [first:last] or [first:last:step]")
    first, last, step = parts[0], parts[1], parts[2] if len(parts) == 3 else "1"
    if not (step.isascii() and step.isdigit() and int(step) > 0):
        raise ValueError("the step of a range is a number above 0")
    if first.isascii() and first.isdigit() and last.isascii() and last.isdigit():
        padded = first.startswith("0") and len(first) > 1
        if padded and len(first) != len(last):
            raise ValueError("with a leading zero both ends of a range have the same number of digits")
        numbers = range(int(first), int(last) + 1, int(step))
        # A range far too long must not be written out before it is refused.
        items = [str(each).zfill(len(first) if padded else 0) for each in numbers[: _MOST_HOSTS + 1]]
    elif re.fullmatch("[a-z]{2}|[A-Z]{2}", first + last):
        items = [chr(each) for each in range(ord(first), ord(last) + 1, int(step))]
    else:
        raise ValueError("the ends of a range are two numbers or two letters")
    if not items:
        raise ValueError("the range is empty: its end comes before its beginning")
    rest = expand_range(written[match.end() :])
    if len(items) * len(rest) > _MOST_HOSTS:
        raise ValueError(f"the range stands for more than {_MOST_HOSTS} hosts")
    return [f"{written[: match.start()]}{item}{tail}" for item in items for tail in rest]
