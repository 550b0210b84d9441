"""Inventories of all kinds, at random from a seed: YAML, INI or both, nested groups, ranges, priorities, files."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

GROUPS = ("alpha", "beta", "gamma", "delta", "eps-1", "zeta_2")
USERS = ("ops", "root", "u1", "{{ inventory_hostname_short }}-u", "{{ ansible_user_of_all | default('dflt') }}")
HOSTS = ("10.0.0.1", "node.example.net", "{{ inventory_hostname }}.example.net", "fe80::1")


@dataclass(frozen=True)
class Case:
    """Where an inventory was written, and patterns to ask of it."""

    sources: tuple[str, ...]
    patterns: tuple[str, ...]


def generate(seed: int, directory: Path, patterns: int) -> Case:
    """Write one inventory below ``directory``."""
    choice = random.Random(seed)
    hosts = _hosts(choice)
    tree = _tree(choice, hosts)
    inventory = directory / "inventory"
    inventory.mkdir(parents=True)
    shape = choice.choice(("yaml", "ini", "both", "two sources"))
    if shape == "yaml":
        _write_yaml(inventory / choice.choice(("hosts.yml", "hosts", "inventory.yaml")), tree)
    elif shape == "ini":
        (inventory / choice.choice(("hosts", "hosts.ini", "prod.inventory"))).write_text(_ini(tree), encoding="utf-8")
    else:
        second = directory / "second" if shape == "two sources" else inventory
        second.mkdir(exist_ok=True)
        _write_yaml(inventory / "10.yml", tree)
        (second / "20").write_text(_ini(_tree(choice, hosts)), encoding="utf-8")
    _write_variables(choice, inventory, hosts)
    sources = [str(inventory)]
    if shape == "two sources":
        _write_variables(choice, directory / "second", hosts)
        sources.append(str(directory / "second" / "20"))
    names = [*_expanded(hosts), *GROUPS, "all", "ungrouped"]
    return Case(tuple(sources), tuple(_pattern(choice, names) for _ in range(patterns)))


def _hosts(choice: random.Random) -> list[str]:
    kinds = ("g{}", "n{}.lab", "gpu[{}:{}]", "r[a:c]{}", "h{}:22{}", "0{}-x", "g{}[01:03]")
    return [
        choice.choice(kinds).format(number, number + choice.randint(0, 3) if number else 0)
        for number in range(choice.randint(1, 7))
    ]


def _expanded(hosts: list[str]) -> list[str]:
    return [host.partition("[")[0] + "1" if "[" in host else host.partition(":")[0] for host in hosts]


def _tree(choice: random.Random, hosts: list[str]) -> dict[str, Any]:
    """Groups by name, each with hosts, children (of a later name alone: no circles) and variables."""
    count = choice.randint(1, len(GROUPS))
    names = choice.sample(GROUPS, count)
    tree: dict[str, Any] = {"all": {"hosts": {}, "children": [], "vars": _variables(choice, 0.4)}}
    for name in names:
        members = {host: _variables(choice, 0.4) for host in choice.sample(hosts, choice.randint(0, len(hosts)))}
        below = [each for each in names if GROUPS.index(each) > GROUPS.index(name)]
        children = [each for each in below if choice.random() < 0.35]
        variables = _variables(choice, 0.5)
        if choice.random() < 0.3:
            variables["ansible_group_priority"] = choice.randint(1, 5)
        tree[name] = {"hosts": members, "children": children, "vars": variables}
    grouped = {host for group in tree.values() for host in group["hosts"]}
    loose = [host for host in hosts if host not in grouped or choice.random() < 0.1]
    tree["all"]["hosts"] = {host: _variables(choice, 0.3) for host in loose}
    return tree


def _variables(choice: random.Random, chance: float) -> dict[str, Any]:
    offers: dict[str, tuple[Any, ...]] = {
        "ansible_user": USERS,
        "ansible_ssh_user": USERS[:3],
        "ansible_host": HOSTS,
        "ansible_port": (22, 2222, "2200", "{{ 2000 + 22 }}"),
        "ansible_become": (True, False, "yes", "no"),
        "ansible_private_key_file": ("~/.ssh/a", "/keys/{{ inventory_hostname }}"),
        "ansible_ssh_private_key_file": ("~/.ssh/b",),
        "ntp_servers": (["a", "b"], {"pool": 1}, None, "x y"),
        "ansible_user_of_all": ("everyone",),
    }
    return {name: choice.choice(values) for name, values in offers.items() if choice.random() < chance / 3}


def _write_yaml(path: Path, tree: dict[str, Any]) -> None:
    document = {
        name: {
            "hosts": {host: variables or None for host, variables in group["hosts"].items()},
            "children": dict.fromkeys(group["children"]),
            "vars": group["vars"],
        }
        for name, group in tree.items()
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def _ini(tree: dict[str, Any]) -> str:
    lines = ["# made at random", *_ini_hosts(tree["all"]["hosts"])]
    for name, group in tree.items():
        if name != "all":
            lines += [f"[{name}]", *_ini_hosts(group["hosts"])]
    for name, group in tree.items():
        if group["children"]:
            lines += [f"[{name}:children]", *group["children"]]
        if group["vars"]:
            lines += ["", f"[{name}:vars]", *(f"{key} = {_literal(value)}" for key, value in group["vars"].items())]
    return "\n".join(lines) + "\n"


def _ini_hosts(hosts: dict[str, Any]) -> list[str]:
    return [
        " ".join([host, *(f'{name}="{_literal(value)}"' for name, value in variables.items())])
        for host, variables in hosts.items()
    ]


def _literal(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _write_variables(choice: random.Random, beside: Path, hosts: list[str]) -> None:
    for kind, names in (("group_vars", ("all", *GROUPS, "absent")), ("host_vars", _expanded(hosts))):
        for name in names:
            if choice.random() < 0.25:
                form = choice.choice(
                    ("{}.yml", "{}.yaml", "{}.json", "{}", "{}/a.yml", "{}/deep/b", "{}.bak", "{}.yml~")
                )
                path = beside / kind / form.format(name)
                if not (beside / kind / name).exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(yaml.safe_dump(_variables(choice, 0.9)), encoding="utf-8")


def _pattern(choice: random.Random, names: list[str]) -> str:
    pieces = [_piece(choice, names) for _ in range(choice.randint(1, 4))]
    return choice.choice((",", ":", ",", " , ")).join(pieces)


def _piece(choice: random.Random, names: list[str]) -> str:
    name = choice.choice(names)
    kind = choice.random()
    if kind < 0.12:
        name = choice.choice((name[:1] + "*", "*" + name[-1:], "?" + name[1:], "[ag]*", "g[0-3]*"))
    elif kind < 0.2:
        name = "~" + choice.choice((name[:2], f"({name[:1]}|z)", "g.*", "[a-d]"))
    elif kind < 0.36:
        name += choice.choice(("[0]", "[-1]", "[1]", "[0:1]", "[1:]", "[5]"))
    return choice.choice(("", "", "", "!", "&")) + name
