"""What is wanted on which host: Ansible's YAML inventory layout, its precedence and its host patterns.

Pure: reads files below the inventory and ``roles/*/defaults.yml``, opens no connection. Errors are InventoryError with
the ``file:line`` of every mistake that one load found, or UsageError for a pattern that fits nothing.

Precedence, lowest first: roles/node/defaults.yml (its ``server`` lies below every server), roles/<engine>/defaults.yml
below each server of that engine, ``vars`` of groups in hosts.yml, group_vars/all, other group_vars, the host's own
lines in hosts.yml, host_vars. Among groups: the outer ones first, then ansible_group_priority, then the alphabet.
Mappings merge key by key, lists are replaced, null drops what lies below. Values are not templates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lamplighter.errors import InventoryError, UsageError
from lamplighter.inventory.schema import ConnectionSpec, Server, check_host, check_server, check_thresholds
from lamplighter.inventory.sources import (
    Origin,
    Problems,
    Value,
    did_you_mean,
    merge,
    merge_all,
    read_mapping,
    shown_path,
    strip,
    walk,
)

_YAML = (".yml", ".yaml", ".json")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_RANGE = re.compile(r"\[([^\[\]]*)\]")
_SUBSCRIPT = re.compile(r"(.+)\[(?:(-?\d+)|(\d+)[:-](\d*))\]", re.DOTALL)
_TEMPLATE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_MOST_HOSTS = 100_000
_EMPTY = Value({}, Origin("inventory"))


@dataclass(frozen=True)
class Host:
    """One host, resolved and validated. ``origins`` maps a dotted path (``servers.kimi.env.NCCL_PROTO``) to its place.

    What no file says (a default of the schema) has no origin.
    """

    name: str
    groups: tuple[str, ...]
    connection: ConnectionSpec
    root: str | None
    lab: str | None
    servers: Mapping[str, Server]
    origins: Mapping[str, Origin]
    templates: tuple[str, ...] = ()
    """Paths of the values that look like Jinja templates, which nothing here fills in."""

    def origin(self, path: str) -> Origin | None:
        """Where this is written, or else the closest thing around it."""
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origins.get(path)

    def to_json(self) -> dict[str, Any]:
        """JSON-safe: the resolved variables with their origins; a secret appears as its reference."""
        return {
            "host": self.name,
            "groups": list(self.groups),
            "connection": asdict(self.connection),
            "root": self.root,
            "lab": self.lab,
            "servers": {name: server.to_json() for name, server in self.servers.items()},
            "origins": {path: str(origin) for path, origin in self.origins.items()},
            "lint": [
                {
                    "id": "template",
                    "level": "warning",
                    "variable": path,
                    "message": "values are not templates: this text is taken as it is",
                    "origin": str(self.origins[path]),
                }
                for path in self.templates
            ],
        }


def load_inventory(path: Path, roles: Path) -> Inventory:
    """The inventory at ``path`` (a directory with hosts.yml, or one file) over the defaults in ``roles``.

    Raises InventoryError that lists every mistake in the files themselves; values are checked by ``Inventory.host``.
    """
    try:
        return _load(path, roles)
    except OSError as error:
        raise InventoryError(f"cannot be read: {error.strerror}", origin=error.filename or shown_path(path)) from error


def _load(path: Path, roles: Path) -> Inventory:
    hosts_file = _find_hosts_file(path)
    problems = Problems()
    tree = _Tree(problems)
    tree.read(read_mapping(hosts_file, problems))
    tree.settle()
    beside = hosts_file.parent
    group_files = _read_variables(beside / "group_vars", tree.groups, "group", problems)
    host_files = _read_variables(beside / "host_vars", tree.hosts, "host", problems)
    defaults = {
        file.parent.name: _canonical(read_mapping(file, problems), problems)
        for file in sorted(roles.glob("*/defaults.yml"))
    }
    problems.raise_if_any()
    return Inventory(tree, group_files, host_files, roles, defaults)


class Inventory:
    """The hosts and groups of one inventory; ``host`` gives one with everything that is said about it."""

    def __init__(
        self,
        tree: _Tree,
        group_files: Mapping[str, Value],
        host_files: Mapping[str, Value],
        roles: Path,
        defaults: Mapping[str, Value],
    ) -> None:
        self._tree = tree
        self._group_files = group_files
        self._host_files = host_files
        self._defaults = defaults
        self._engines = sorted(file.parent.name for file in roles.glob("*/engine.yml"))
        self._roles = roles
        self.hosts: tuple[str, ...] = tuple(tree.hosts)
        """All hosts, in the order of hosts.yml."""
        self.groups: Mapping[str, tuple[str, ...]] = MappingProxyType(tree.members())
        """The hosts of every group, ``all`` and ``ungrouped`` included, in the order of hosts.yml."""

    def select(self, patterns: Sequence[str]) -> list[str]:
        """The hosts that patterns name, as Ansible reads them.

        ``all``, groups, globs, ``a:b``, ``a,b``, ``!x``, ``&x``, ``~regex``; ``group[0]``, ``group[0:2]`` by index.
        Several patterns count as one joined by commas. Raises UsageError when a name in them is unknown (Ansible skips
        it, and ``all:!gpu1`` with a typing error would deploy to gpu1) or when nothing is left.
        """
        return _Patterns(self.hosts, self.groups).select(patterns)

    def host(self, name: str) -> Host:
        """The host with its variables merged and checked. Raises InventoryError with all that is wrong with it."""
        return self.resolve([name])[0]

    def resolve(self, names: Iterable[str]) -> list[Host]:
        """Several hosts at once, so that one InventoryError lists what is wrong with any of them."""
        problems = Problems()
        hosts = [self._resolve(name, problems) for name in names]
        problems.raise_if_any()
        return [host for host in hosts if host is not None]

    def _resolve(self, name: str, problems: Problems) -> Host | None:
        if name not in self._tree.hosts:
            raise UsageError(f"no host {name!r} in the inventory{did_you_mean(name, self.hosts)}")
        merged = self._under_servers(merge_all(self._layers(name)))
        self._check_thresholds(merged, problems)
        variables = strip(merged)
        checked = check_host(name, variables, problems)
        servers = self._servers(variables, problems)
        if checked is None or servers is None:
            return None
        connection, root, lab = checked
        origins = {path: value.origin for path, value in walk(variables)}
        leaves = [(path, value) for path, value in walk(variables) if value.entries is None]
        templates = tuple(path for path, value in leaves if _TEMPLATE.search(str(value.data)))
        groups = self._tree.groups_of(name)
        return Host(name, groups, connection, root, lab, servers, MappingProxyType(origins), templates)

    def _layers(self, name: str) -> Iterator[Value]:
        groups = self._tree.groups_of(name)
        node = self._defaults.get("node", _EMPTY)
        yield replace(node, data={key: each for key, each in (node.entries or {}).items() if key != "server"})
        yield from (self._tree.groups[group].variables for group in groups)
        # `all` is the outermost group and so comes first here as well.
        yield from (self._group_files[group] for group in groups if group in self._group_files)
        yield self._tree.hosts[name]
        yield self._host_files.get(name, _EMPTY)

    def _under_servers(self, merged: Value) -> Value:
        """The variables with the defaults of its engine laid below each server."""
        servers = (merged.entries or {}).get("servers")
        if servers is None or servers.entries is None:
            return merged
        laid = {
            name: server if server.entries is None else merge(self._below(server), server)
            for name, server in servers.entries.items()
        }
        return replace(merged, data={**(merged.entries or {}), "servers": replace(servers, data=laid)})

    def _below(self, server: Value) -> Value:
        """The defaults of the roles for this server."""
        common = (self._defaults.get("node", _EMPTY).entries or {}).get("server", _EMPTY)
        engine = (server.entries or {}).get("engine")
        of_engine = _EMPTY
        if engine is not None and isinstance(engine.data, str) and engine.data != "node":
            of_engine = self._defaults.get(engine.data, _EMPTY)
        return merge(common, of_engine)

    def _check_thresholds(self, merged: Value, problems: Problems) -> None:
        servers = (merged.entries or {}).get("servers", _EMPTY)
        for name, server in (servers.entries or {}).items():
            defaults = (self._below(server).entries or {}).get("checks", _EMPTY)
            checks = (server.entries or {}).get("checks", _EMPTY)
            check_thresholds(f"servers.{name}.checks", defaults, checks, problems)

    def _servers(self, variables: Value, problems: Problems) -> dict[str, Server] | None:
        found = (variables.entries or {}).get("servers", _EMPTY)
        if found.entries is None:
            problems.add(found.origin, f"servers: must be a mapping of servers by name, not {found.describe()}")
            return None
        servers: dict[str, Server] = {}
        ports: dict[int, str] = {}
        for name, value in found.entries.items():
            self._check_engine(name, value, problems)
            server = check_server(name, value, problems)
            if server is None:
                continue
            servers[name] = server
            port = _entry(value, "port").origin
            if server.port in ports:
                other = ports[server.port]
                taken = _entry(found.entries[other], "port").origin
                problems.add(port, f"servers.{name}.port: {server.port} is the port of servers.{other} too ({taken})")
            ports.setdefault(server.port, name)
        return servers if len(servers) == len(found.entries) else None

    def _check_engine(self, name: str, server: Value, problems: Problems) -> None:
        engine = (server.entries or {}).get("engine")
        if engine is None or not isinstance(engine.data, str) or engine.data in self._engines:
            return
        known = f"; known are {', '.join(self._engines)}" if self._engines else ""
        hint = did_you_mean(engine.data, self._engines) or known
        problems.add(
            engine.origin,
            f"servers.{name}.engine: there is no {shown_path(self._roles / engine.data / 'engine.yml')}{hint}",
        )


def _entry(value: Value, key: str) -> Value:
    return (value.entries or {}).get(key, value)


def _find_hosts_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise InventoryError(
            "there is no inventory here",
            origin=shown_path(path),
            next_step="create hosts.yml in this directory, or set LAMPLIGHTER_INVENTORY",
        )
    found = [file for file in (path / "hosts.yml", path / "hosts.yaml") if file.is_file()]
    if len(found) == 1:
        return found[0]
    if found:
        raise InventoryError("hosts.yml and hosts.yaml both exist: keep one", origin=shown_path(path))
    also = "; the INI format of `hosts` is not read" if (path / "hosts").is_file() else ""
    raise InventoryError(f"there is no hosts.yml in this directory{also}", origin=shown_path(path))


def _read_variables(directory: Path, known: Iterable[str], kind: str, problems: Problems) -> dict[str, Value]:
    """Variables by group or host: NAME.yml, .yaml, .json, NAME, or all such files of the directory NAME, by alphabet.

    A file for a name that hosts.yml does not have would be ignored without a word, so it is a problem.
    """
    names = set(known)
    found: dict[str, Value] = {}
    places: dict[str, Path] = {}
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        name = path.name if path.name in names or path.is_dir() else path.stem
        if _is_ignored(path) or (name not in names and not path.is_dir() and path.suffix not in _YAML):
            continue
        if name not in names:
            hint = did_you_mean(name, names)
            problems.add(Origin(shown_path(path)), f"there is no {kind} {name} in the inventory{hint}")
        elif name in places:
            problems.add(Origin(shown_path(path)), f"{kind} {name} has {shown_path(places[name])} too: keep one")
        else:
            places[name] = path
            files = _variable_files(path) if path.is_dir() else [path]
            found[name] = merge_all(_canonical(read_mapping(file, problems), problems) for file in files)
    return found


def _variable_files(directory: Path) -> list[Path]:
    return [
        file
        for file in sorted(directory.rglob("*"))
        if file.is_file()
        and file.suffix in (*_YAML, "")
        and not any(_is_ignored(directory / part) for part in file.relative_to(directory).parts)
    ]


def _is_ignored(path: Path) -> bool:
    """Hidden files and what editors leave behind."""
    return path.name.startswith(".") or path.name.endswith("~")


def _canonical(variables: Value, problems: Problems) -> Value:
    """One name a variable: ``ansible_become`` is ``become``, so that one overrides the other across files."""
    entries = dict(variables.entries or {})
    if "ansible_become" in entries:
        value = entries.pop("ansible_become")
        if "become" in entries:
            problems.add(value.origin, f"ansible_become: stands beside become ({entries['become'].origin}): keep one")
        entries["become"] = value
    return replace(variables, data=entries)


@dataclass
class _Group:
    name: str
    origin: Origin
    variables: Value = _EMPTY
    priority: int = 1
    hosts: dict[str, None] = field(default_factory=dict)
    children: dict[str, Origin] = field(default_factory=dict)


class _Tree:
    """The groups and hosts of hosts.yml."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.groups = {name: _Group(name, Origin("inventory")) for name in ("all", "ungrouped")}
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
        group = self.groups.setdefault(name, _Group(name, value.origin))
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

    def _read_vars(self, group: _Group, value: Value) -> None:
        entries = dict(value.entries or {})
        priority = entries.pop("ansible_group_priority", None)
        if priority is not None and isinstance(priority.data, int) and not isinstance(priority.data, bool):
            group.priority = priority.data
        elif priority is not None:
            self.problems.add(priority.origin, f"ansible_group_priority: must be a number, not {priority.describe()}")
        variables = _canonical(Value(entries, value.origin), self.problems)
        group.variables = merge(group.variables, variables)

    def _read_hosts(self, group: _Group, value: Value) -> None:
        for written, variables in (value.entries or {}).items():
            if variables.data is not None and variables.entries is None:
                self.problems.add(variables.origin, f"{written}: must be a mapping, not {variables.describe()}")
                continue
            for name in self._expand(written, variables.origin):
                group.hosts[name] = None
                own = _canonical(variables, self.problems)
                self.hosts[name] = merge(self.hosts.get(name, _EMPTY), own)

    def _read_children(self, group: _Group, value: Value) -> None:
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


class _Patterns:
    """Ansible's host patterns over known hosts and groups."""

    def __init__(self, hosts: Sequence[str], groups: Mapping[str, Sequence[str]]) -> None:
        self.hosts = hosts
        self.groups = groups

    def select(self, patterns: Sequence[str]) -> list[str]:
        pieces = [piece for pattern in patterns for piece in split_pattern(pattern)]
        if not pieces:
            raise UsageError("no host was named", next_step="name hosts, groups or patterns with --host; `all` for all")
        wanted = [piece for piece in pieces if piece[0] not in "!&"]
        chosen = list(dict.fromkeys(host for piece in wanted or ["all"] for host in self._matches(piece)))
        for piece in pieces:
            if piece[0] == "&":
                also = set(self._matches(piece[1:]))
                chosen = [host for host in chosen if host in also]
        for piece in pieces:
            if piece[0] == "!":
                never = set(self._matches(piece[1:]))
                chosen = [host for host in chosen if host not in never]
        if not chosen:
            raise UsageError(
                f"no host fits {','.join(patterns)!r}", next_step=f"the inventory has {_listed(self.hosts, 'no hosts')}"
            )
        return chosen

    def _matches(self, pattern: str) -> Sequence[str]:
        if pattern.startswith("~"):
            return self._by_expression(pattern[1:])
        subscript = _SUBSCRIPT.fullmatch(pattern)
        # gpu[12]* is a glob, gpu[12] counts: as Ansible has it.
        if subscript:
            found = self._matches(subscript[1])
            if subscript[2] is not None:
                index = int(subscript[2])
                return [found[index]] if -len(found) <= index < len(found) else []
            last = int(subscript[4]) + 1 if subscript[4] else len(found)
            return found[int(subscript[3]) : last]
        if any(each in pattern for each in "*?["):
            groups = [name for name in self.groups if fnmatchcase(name, pattern)]
            return self._all_of(groups, [host for host in self.hosts if fnmatchcase(host, pattern)])
        if pattern in self.groups:
            return self.groups[pattern]
        if pattern in self.hosts:
            return [pattern]
        hint = did_you_mean(pattern, [*self.hosts, *self.groups], cutoff=0.7)  # `nope` is not `ungrouped`
        raise UsageError(
            f"no host or group {pattern!r} in the inventory{hint}",
            next_step=f"the inventory has {_listed(self.hosts, 'no hosts')}",
        )

    def _by_expression(self, text: str) -> Sequence[str]:
        try:
            expression = re.compile(text)
        except re.error as error:
            raise UsageError(f"~{text} is no regular expression: {error}") from error
        groups = [name for name in self.groups if expression.match(name)]
        return self._all_of(groups, [host for host in self.hosts if expression.match(host)])

    def _all_of(self, groups: Sequence[str], hosts: Sequence[str]) -> Sequence[str]:
        members = {host for group in groups for host in self.groups[group]}.union(hosts)
        return [host for host in self.hosts if host in members]


def split_pattern(pattern: str) -> list[str]:
    """The pieces between ``,`` and ``:`` of a pattern, except inside brackets of any kind and after a backslash."""
    pieces, piece, depth, escaped = [], "", 0, False
    for each in pattern:
        if escaped:
            piece, escaped = piece + each, False
            continue
        escaped = each == "\\"
        depth = max(0, depth + (each in "[({") - (each in "])}"))
        if each in ",:" and depth == 0:
            pieces.append(piece)
            piece = ""
        else:
            piece += each
    pieces.append(piece)
    return [stripped for stripped in (piece.strip() for piece in pieces) if stripped.strip("!&")]


def _listed(names: Sequence[str], nothing: str) -> str:
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return shown or nothing
