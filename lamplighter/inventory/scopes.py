"""What is said about each host, merged, and filled in where it is ours: the ground that templates stand on.

Of several layers the higher one wins, as in Ansible. Only ``servers`` merges key by key, unless ``merge: replace`` is
said for the host; every other variable is replaced whole, so that other people's variables mean what they mean there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lamplighter.inventory.scope import Scope, has_open
from lamplighter.inventory.secrets import settled, unwrapped
from lamplighter.inventory.values import EMPTY, Origin, Problems, Value, merge
from lamplighter.inventory.vault import Vault

if TYPE_CHECKING:
    from lamplighter.inventory.templates import Templates

#: Merges key by key.
_DEEP = "servers"


@dataclass(frozen=True)
class Fleet:
    """Who is in the inventory: all hosts, the hosts of every group, the groups of a host, and who names it first."""

    hosts: Sequence[str]
    groups: Mapping[str, Sequence[str]]
    groups_of: Callable[[str], Sequence[str]]
    file_of: Callable[[str], Path]


class Scopes:
    """The variables of every host of a fleet.

    ``layers_of`` gives what is said about a host, lowest first, and notes what is wrong in it.
    """

    def __init__(
        self, fleet: Fleet, layers_of: Callable[[str, Problems], Iterable[Value]], path: Path, vault: Vault
    ) -> None:
        self._fleet = fleet
        self._layers_of = layers_of
        self._known: dict[str, tuple[Scope, Problems]] = {}
        self._groups = {name: list(hosts) for name, hosts in fleet.groups.items()}
        self._path = path
        self._vault = vault

    def filled(self, host: str, names: Collection[str], problems: Problems, unfilled: Problems) -> Value:
        """The variables of these names, with every template in them filled in and every secret in its place.

        What cannot be filled in is noted in ``unfilled``, what is wrong with the variables themselves in ``problems``.

        Other variables come as they are written, so that a template of somebody else's that cannot be filled in stops
        nobody.
        """
        scope, found = self._scope(host)
        problems.take(found)
        entries = dict(scope.variables)
        for name in entries.keys() & set(names):
            value = entries[name]
            if has_open(value):
                value = self._templates.fill(scope, (name,), value, unfilled)
            entries[name] = _settled_servers(value, problems) if name == _DEEP else _opened(value, name, unfilled)
        return Value(entries, Origin("inventory"))

    def variables(self, host: str) -> Mapping[str, Value]:
        """The variables of a host as they are written."""
        return self._scope(host)[0].variables

    @cached_property
    def _templates(self) -> Templates:
        from lamplighter.inventory.templates import Templates

        path = self._path.absolute()
        beside = path if path.is_dir() else path.parent
        places = [beside / "files", beside, beside.parent / "files", beside.parent]
        return Templates(lambda host: self._scope(host)[0], self._fleet.hosts, self._vault.open, places)

    def _scope(self, host: str) -> tuple[Scope, Problems]:
        if host not in self._known:
            problems = Problems()
            variables = merged(self._layers_of(host, problems))
            self._known[host] = (Scope(host, variables.entries or {}, self._magic(host)), problems)
        return self._known[host]

    def _magic(self, host: str) -> dict[str, object]:
        return {
            "inventory_hostname": host,
            "ansible_playbook_python": sys.executable,
            "inventory_hostname_short": host.partition(".")[0],
            "groups": self._groups,
            "group_names": sorted(name for name in self._fleet.groups_of(host) if name != "all"),
            "inventory_dir": str(self._fleet.file_of(host).parent),
            "inventory_file": str(self._fleet.file_of(host)),
        }


def merged(layers: Iterable[Value]) -> Value:
    """The layers, lowest first, as one mapping of variables."""
    result: dict[str, Value] = {}
    below: list[Value] = []
    for layer in layers:
        entries = dict(layer.entries or {})
        if _DEEP in entries:
            below.append(entries.pop(_DEEP))
        result |= entries
    if below:
        result[_DEEP] = below[0]
        is_deep = result.get("merge", EMPTY).data != "replace"
        for each in below[1:]:
            result[_DEEP] = merge(result[_DEEP], each) if is_deep else each
    return Value(result, Origin("inventory"))


def _settled_servers(servers: Value, problems: Problems) -> Value:
    if servers.entries is None:
        return servers
    settled_ones = {name: settled(each, f"servers.{name}", problems) for name, each in servers.entries.items()}
    return replace(servers, data=settled_ones)


def _opened(value: Value, name: str, problems: Problems) -> Value:
    return unwrapped(value, name, problems, may_be_sealed=True)
