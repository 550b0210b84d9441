"""What is wanted on which host: Ansible's inventories, their precedence and host patterns.

Pure but for programs that print an inventory: reads files, opens no connection. Errors are InventoryError with the
``file:line`` of every mistake that one load found, or UsageError for a pattern that fits nothing.

Precedence, lowest first: roles/node/defaults.yml (its ``server`` lies below every server), roles/<engine>/defaults.yml
below each server of that engine, variables of groups in the sources, group_vars/all, other group_vars, the host's own
lines in the sources, host_vars. Among groups: the outer ones first, then ansible_group_priority, then the alphabet.
``servers`` merges key by key, lists are replaced, null drops what lies below; every other variable is replaced whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lamplighter.errors import InventoryError, UsageError
from lamplighter.inventory.connection import has_servers, translate
from lamplighter.inventory.groups import BUILT_IN, Tree
from lamplighter.inventory.names import PLACE
from lamplighter.inventory.patterns import Patterns
from lamplighter.inventory.schema import (
    CONNECTION,
    OURS,
    ConnectionSpec,
    Server,
    check_host,
    check_server,
    check_thresholds,
)
from lamplighter.inventory.scope import UNDEFINED
from lamplighter.inventory.scopes import Fleet, Scopes
from lamplighter.inventory.sources.places import Source, read_sources
from lamplighter.inventory.sources.yaml_file import read_mapping
from lamplighter.inventory.values import (
    EMPTY,
    Lint,
    Origin,
    Problems,
    Value,
    did_you_mean,
    merge,
    shown_path,
    strip,
    walk,
)
from lamplighter.inventory.variables import VariableFiles, canonical
from lamplighter.inventory.vault import Vault, opened
from lamplighter.paths import at_home
from lamplighter.project import Roles


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
    sealed: Mapping[str, str] = field(default_factory=dict)
    """Paths of the values that came out of a vault, with the reference that is shown in their place."""
    warnings: tuple[Lint, ...] = ()
    """What looks wrong in what is said of this host."""
    is_strict: bool = False
    """Whether what looks wrong is an error (``lint: strict``)."""

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
            "connection": {
                name: self.sealed.get(CONNECTION[name], value) for name, value in asdict(self.connection).items()
            },
            "root": self.sealed.get("root", self.root),
            "lab": self.lab,
            "servers": {name: server.to_json() for name, server in self.servers.items()},
            "origins": {path: str(origin) for path, origin in self._all_origins().items()},
            "lint": [each.to_json() for each in self.warnings],
        }

    def _all_origins(self) -> dict[str, Origin]:
        rows = {f"connection.{name}": self.origins.get(variable) for name, variable in CONNECTION.items()}
        return {**self.origins, **{path: origin for path, origin in rows.items() if origin is not None}}


#: How a message ends about what is said nowhere.
_ABSENT = ("is missing", "say ansible_host")


def load_inventory(sources: Path | Sequence[str], roles: Roles, vault: Vault | None = None) -> Inventory:
    """The inventory of one path, or of several ``sources`` as given on a command line, over the defaults in ``roles``.

    Raises InventoryError that lists every mistake in the sources themselves; values are checked by ``Inventory.host``.
    """
    given = [str(sources)] if isinstance(sources, Path) else list(sources)
    try:
        return _load([Source(each, at_home(each)) for each in given], roles, vault or Vault())
    except OSError as error:
        raise InventoryError(f"cannot be read: {error.strerror}", origin=error.filename or ", ".join(given)) from error


def _load(sources: Sequence[Source], roles: Roles, vault: Vault) -> Inventory:
    problems = Problems()
    tree = Tree(problems)
    read_sources(sources, tree)
    tree.settle()
    files = VariableFiles(
        list(dict.fromkeys(source.directory for source in sources if source.directory is not None)),
        lambda path, found: opened(read_mapping(path, found), vault, found),
    )
    if len(problems):  # who repairs one file wants to hear of the others, too
        files.read_all(tree.groups, tree.hosts, problems)
    defaults = {
        file.parent.name: canonical(read_mapping(file, problems, is_ours=True), problems)
        for file in sorted(roles.glob("*/defaults.yml"))
    }
    problems.raise_if_any()
    files.tell_unread({"group": tree.groups, "host": tree.hosts}, problems)
    return Inventory(tree, files, roles, defaults, sources[0].path, vault)


def defaults_file(engine: str, roles: Roles) -> Path | None:
    """Where the defaults of ``engine`` stand: in its own role, else in that of the nearest engine that it extends."""
    seen: list[str] = []
    while engine not in seen:
        seen.append(engine)
        if (file := roles / engine / "defaults.yml").is_file():
            return file
        path = roles / engine / "engine.yml"
        parent = (read_mapping(path, Problems()).entries or {}).get("extends") if path.is_file() else None
        if parent is None or not isinstance(parent.data, str):
            return None
        engine = parent.data
    return None


class Inventory:
    """The hosts and groups of one inventory; ``host`` gives one with everything that is said about it."""

    def __init__(
        self,
        tree: Tree,
        files: VariableFiles,
        roles: Roles,
        defaults: Mapping[str, Value],
        path: Path,
        vault: Vault,
    ) -> None:
        self._tree = tree
        self._files = files
        self._defaults = dict(defaults)
        self._engines = sorted(file.parent.name for file in roles.glob("*/engine.yml"))
        self._roles = roles
        self.hosts: tuple[str, ...] = tuple(tree.hosts)
        """All hosts, in the order in which the sources name them."""
        self.groups: Mapping[str, tuple[str, ...]] = MappingProxyType(tree.members())
        """The hosts of every group, ``all`` and ``ungrouped`` included, in the group's order."""
        self.warnings: tuple[Lint, ...] = tree.problems.warnings
        """What looks wrong in the sources, or was not read."""
        fleet = Fleet(self.hosts, self.groups, tree.groups_of, lambda host: Path(tree.origins[host].file).absolute())
        self._scopes = Scopes(fleet, self._layers, path, vault)

    def select(self, patterns: Sequence[str]) -> list[str]:
        """The hosts that patterns name, as Ansible reads them and in its order.

        ``all``, groups, globs, ``a,b``, ``a:b``, ``!x``, ``&x``, ``~regex``; ``group[0]``, ``group[0:2]`` by index;
        ``@FILE`` has one a line. Raises UsageError when a name in them is unknown or when nothing is left.
        """
        places = {name: group.origin for name, group in self._tree.groups.items() if name not in BUILT_IN}
        return Patterns(self.hosts, self.groups, places).select(patterns)

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
        found, unfilled = Problems(), Problems()
        filled = self._scopes.filled(name, OURS, found, unfilled)
        if has_servers(self._scopes.variables(name)):
            found.take(unfilled, but_for=(UNDEFINED,) if len(found) else ())  # it may stand in what cannot be read
        else:  # nobody logs in there
            found.take_as_warnings(unfilled, "template")
        is_broken = len(found) > 0
        told = Problems() if is_broken else found
        host = None if len(unfilled) and is_broken else self._checked(name, self._under_servers(filled), told)
        if is_broken:  # who repairs a file wants to hear of the others, but not of what that file may well say
            found.take(told, but_for=_ABSENT)
        problems.take(found)
        return None if host is None or is_broken else replace(host, warnings=found.warnings)

    def _checked(self, name: str, merged: Value, problems: Problems) -> Host | None:
        """The host of these variables, or None after a problem that leaves none."""
        variables = merged.entries or {}
        self._check_thresholds(merged, problems)
        said = translate(variables, self._defaults.get("node", EMPTY).entries or {}, problems)
        is_idle = not has_servers(variables)
        reached = check_host(name, replace(merged, data=said.variables), problems, is_idle=is_idle)
        servers = strip(variables["servers"]) if "servers" in variables else EMPTY
        wanted = self._servers(servers, problems)
        if wanted and "ansible_host" not in said.variables and not PLACE.fullmatch(name):
            problems.add(self._tree.origins[name], f"{name} is no address that can be reached: {_ABSENT[1]}")
        _refuse_warnings(said.variables, problems)
        if reached is None or wanted is None:
            return None
        connection, root, lab = reached
        shown = Value({**said.variables, **({"servers": servers} if servers is not EMPTY else {})}, merged.origin)
        return Host(
            name,
            self._tree.groups_of(name),
            replace(connection, ssh_options=said.ssh_options, ssh_config=said.ssh_config),
            root,
            lab,
            wanted,
            self._origins(name, shown),
            MappingProxyType({path: value.sealed for path, value in walk(shown) if value.sealed}),
            is_strict=said.variables.get("lint", EMPTY).data == "strict",
        )

    def _origins(self, name: str, variables: Value) -> Mapping[str, Origin]:
        its_own_name = {"connection.host": self._tree.origins[name]}  # is its address, unless it says another
        return MappingProxyType(its_own_name | {path: value.origin for path, value in walk(variables)})

    def _layers(self, name: str, problems: Problems) -> Iterator[Value]:
        groups = self._tree.groups_of(name)
        node = self._defaults.get("node", EMPTY)
        yield replace(node, data={key: each for key, each in (node.entries or {}).items() if key != "server"})
        yield from (self._tree.groups[group].variables for group in groups)
        yield from self._files.of_groups(groups, problems)
        yield self._tree.hosts[name]
        yield from self._files.of_host(name, problems)

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
        common = (self._defaults.get("node", EMPTY).entries or {}).get("server", EMPTY)
        engine = (server.entries or {}).get("engine")
        of_engine = EMPTY
        if engine is not None and isinstance(engine.data, str) and engine.data != "node":
            of_engine = self._defaults_of(engine.data)
        return merge(common, of_engine)

    def _defaults_of(self, engine: str) -> Value:
        if engine not in self._defaults and engine in self._engines:
            file, problems = defaults_file(engine, self._roles), Problems()
            self._defaults[engine] = EMPTY if file is None else canonical(read_mapping(file, problems), problems)
            problems.raise_if_any()
        return self._defaults.get(engine, EMPTY)

    def _check_thresholds(self, merged: Value, problems: Problems) -> None:
        servers = (merged.entries or {}).get("servers", EMPTY)
        for name, server in (servers.entries or {}).items():
            if server.entries is None:  # the host does not want it; what else is no mapping is told by its own check
                continue
            defaults = (self._below(server).entries or {}).get("checks", EMPTY)
            checks = (server.entries or {}).get("checks", EMPTY)
            check_thresholds(f"servers.{name}.checks", defaults, checks, problems)

    def _servers(self, found: Value, problems: Problems) -> dict[str, Server] | None:
        if found.data is None:
            return {}
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
        for name, server in servers.items():
            if server.was in found.entries:
                where = _entry(found.entries[name], "was").origin
                what = (
                    "its own name" if server.was == name else f"the name of servers.{server.was}, which is there still"
                )
                problems.add(where, f"servers.{name}.was: {server.was} is {what}")
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


def _refuse_warnings(variables: Mapping[str, Value], problems: Problems) -> None:
    """What only looks wrong is an error where the host says ``lint: strict``."""
    if variables.get("lint", EMPTY).data == "strict":
        for lint in problems.warnings:
            problems.add(lint.origin, f"{lint.variable}: {lint.message} (lint: strict)")


def _entry(value: Value, key: str) -> Value:
    return (value.entries or {}).get(key, value)
