"""The groups and hosts of an inventory: who belongs to whom, in which order, and in which order of precedence.

Pure. Every reader of a source tells a ``Tree`` what it found, in the order in which it stands there; ``settle`` works
out the rest once. Orders are Ansible's: a group's hosts are its own, then those of its children, then of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lamplighter.inventory.names import MOST_HOSTS, expand_range, split_port
from lamplighter.inventory.values import EMPTY, Origin, Problems, Value, overlaid

#: Made by nobody: they are always there.
BUILT_IN = ("all", "ungrouped")


@dataclass
class Group:
    """One group, as the sources fill it: what they say of it, its own hosts, its children and where these are named."""

    name: str
    origin: Origin
    variables: Value = EMPTY
    priority: int = 1
    hosts: dict[str, None] = field(default_factory=dict)
    children: dict[str, Origin] = field(default_factory=dict)


class Tree:
    """All groups and hosts of the sources. What is wrong is noted in ``problems``."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.groups = {name: Group(name, Origin("inventory")) for name in BUILT_IN}
        self.groups["all"].children["ungrouped"] = Origin("inventory")
        self.hosts: dict[str, Value] = {}
        """The variables that the sources themselves give to each host."""
        self.origins: dict[str, Origin] = {}
        """Where each host is first named."""
        self._depths: dict[str, int] = {}
        self._parents: dict[str, set[str]] = {}
        self._groups_of: dict[str, tuple[str, ...]] = {}
        self._ordered: dict[frozenset[str], tuple[str, ...]] = {}

    def add_group(self, name: str, origin: Origin) -> None:
        """Know the group, if it is not known yet."""
        if not name.isprintable() or not name.strip():
            self.problems.add(origin, f"{name!r} is no name for a group: it holds invisible characters")
        self.groups.setdefault(name, Group(name, origin))

    def add_host(self, name: str, group: str, origin: Origin, port: int | None = None) -> None:
        """Know the host as a member of a known group; a port counts where the host is named for the first time."""
        self.groups[group].hosts[name] = None
        if name in self.hosts:
            return
        said = {} if port is None else {"ansible_port": Value(port, origin, str(port))}
        self.hosts[name] = Value(said, origin)
        self.origins[name] = origin

    def add_hosts(self, written: str, group: str, origin: Origin) -> list[str]:
        """Know the hosts that a written name stands for (``gpu[1:8]``, ``gpu1:2222``), and return their names."""
        pattern, port = split_port(written)
        try:
            names = expand_range(pattern)
            if len(self.hosts) + len(names) > MOST_HOSTS:
                raise ValueError(f"the inventory would have more than {MOST_HOSTS} hosts")
        except ValueError as error:
            self.problems.add(origin, f"{written}: {error}")
            return []
        if not all(self.is_name(name, origin) for name in names):
            return []
        for name in names:
            self.add_host(name, group, origin, port)
        return names

    def is_name(self, name: str, origin: Origin) -> bool:
        """Whether a host may be called so; what speaks against it is noted."""
        if name in BUILT_IN:
            self.problems.add(origin, f"{name} is the name of a group")
        elif not name.isprintable() or not name.strip():
            self.problems.add(origin, f"{name!r} is no name for a host: it holds invisible characters")
        else:
            return True
        return False

    def add_child(self, parent: str, child: str, origin: Origin) -> None:
        """Put a known group below another."""
        if child == "all" or (child == "ungrouped" and parent != "all"):
            self.problems.add(origin, f"{child} cannot be a child of {parent}")
        else:
            self.groups[parent].children.setdefault(child, origin)

    def set_group(self, name: str, variables: Value) -> None:
        """Lay variables over what is said of a group already."""
        entries = dict(variables.entries or {})
        priority = entries.pop("ansible_group_priority", None)
        if priority is not None:
            self._set_priority(name, priority)
            variables = replace(variables, data=entries)
        group = self.groups[name]
        group.variables = overlaid(group.variables, variables)

    def set_host(self, name: str, variables: Value) -> None:
        """Lay variables over what is said of a host already; of a group, where a known one has the same name."""
        if name in self.groups:
            self.set_group(name, variables)
        else:
            self.hosts[name] = overlaid(self.hosts[name], variables) if variables.entries else self.hosts[name]

    def settle(self) -> None:
        """Work out what depends on all sources: circles, names used twice, depths, ``ungrouped``."""
        for name in self.groups.keys() & self.hosts.keys():
            self.problems.warn(self.origins[name], f"{name} is a group and a host", "same-name")
        if self._has_circle():
            return
        has_parent = {child for group in self.groups.values() for child in group.children}
        for name, group in self.groups.items():
            if name not in has_parent and name != "all":
                self.groups["all"].children[name] = group.origin
        for group in self.groups.values():
            for child in group.children:
                self._parents.setdefault(child, set()).add(group.name)
        direct: dict[str, set[str]] = {host: set() for host in self.hosts}
        for group in self.groups.values():
            for host in group.hosts if group.name not in BUILT_IN else ():
                direct[host].add(group.name)
        loose = self.groups["ungrouped"]
        own = [host for host in loose.hosts if not direct[host]]
        loose.hosts = dict.fromkeys([*own, *(host for host in self.hosts if not direct[host])])
        for host in loose.hosts:
            direct[host].add("ungrouped")
        self._groups_of = {host: self._by_precedence(frozenset(names)) for host, names in direct.items()}

    def groups_of(self, host: str) -> tuple[str, ...]:
        """The host's groups in the order of their precedence, ``all`` first."""
        return self._groups_of[host]

    def members(self) -> dict[str, tuple[str, ...]]:
        """The hosts of every group, those of its children included, in the group's order."""
        found: dict[str, dict[str, None]] = {}
        for name in sorted(self.groups, key=self._depth, reverse=True):
            children = list(self.groups[name].children)
            # Most groups have one child or none, and chains of them may be long.
            below = found[children[0]] if children else {}
            found[name] = self.groups[name].hosts | below if len(children) < 2 else self._members(name)
        return {name: tuple(found[name]) for name in self.groups}

    def _members(self, name: str) -> dict[str, None]:
        found: dict[str, None] = {}
        seen = {name}
        level = [name]
        while level:
            for each in level:
                found |= self.groups[each].hosts
            below = dict.fromkeys(child for each in level for child in self.groups[each].children)
            level = [child for child in below if child not in seen]
            seen.update(level)
        return found

    def _set_priority(self, name: str, value: Value) -> None:
        text = str(value.data) if isinstance(value.data, int | str) and not isinstance(value.data, bool) else ""
        try:
            self.groups[name].priority = int(text)
        except ValueError:
            self.problems.add(value.origin, f"ansible_group_priority: must be a number, not {value.describe()}")

    def _has_circle(self) -> bool:
        """Whether a group is its own descendant; noted once, where the circle closes."""
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
                    names = [each for each, _ in trail]
                    circle = " > ".join([*names[names.index(child) :], child])
                    self.problems.add(self.groups[name].children[child], f"groups in a circle: {circle}")
                    return True
                elif child not in done:
                    trail.append((child, iter(self.groups[child].children)))
                    on_trail.add(child)
        return False

    def _by_precedence(self, names: frozenset[str]) -> tuple[str, ...]:
        if names not in self._ordered:  # most hosts share their groups with others
            every = {"all"}
            waiting = list(names)
            while waiting:
                name = waiting.pop()
                if name not in every:
                    every.add(name)
                    waiting.extend(self._parents.get(name, ()))
            self._ordered[names] = tuple(sorted(every, key=self._precedence))
        return self._ordered[names]

    def _precedence(self, name: str) -> tuple[int, int, str]:
        return self._depth(name), self.groups[name].priority, name

    def _depth(self, name: str) -> int:
        """Steps from ``all`` on the longest way, which is how Ansible counts; without recursion: chains may be long."""
        waiting = [name]
        while waiting:
            parents = self._parents.get(waiting[-1], set())
            unknown = [parent for parent in parents if parent not in self._depths]
            if unknown:
                waiting.extend(unknown)
            else:
                self._depths[waiting.pop()] = max((self._depths[parent] + 1 for parent in parents), default=0)
        return self._depths[name]
