"""What ansible-core reads from an inventory, we read: generated ones, and the shapes of public ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lamplighter.errors import LamplighterError, UsageError
from lamplighter.inventory import Inventory, load_inventory
from lamplighter.inventory.values import Problems, plain
from tests.engines.place import ANSIBLE, NotBuildable, made
from tests.needs import is_required
from tests.oracle.generate import generate

SOAK = bool(os.environ.get("LAMPLIGHTER_SOAK"))
INVENTORIES, PATTERNS = (300, 7) if SOAK else (30, 7)
SEED = int(os.environ.get("LAMPLIGHTER_SEED", "20240"))
ORACLE = Path(__file__).parents[1] / "oracle"
SHAPES = sorted(path for path in (Path(__file__).parents[1] / "cases" / "inventory").iterdir() if path.is_dir())

Ask = Callable[..., Mapping[str, Any]]


@pytest.fixture(scope="module")
def ask(require: Callable[[str, str | None], None]) -> Iterator[Ask]:
    """What ansible-core says of an inventory and of patterns."""
    if not ANSIBLE.is_made and not is_required("ansible"):
        require("ansible", "ansible-core is not there: python -m tests.engines.place ansible")
    try:
        python = made(ANSIBLE) / "bin/python"
    except NotBuildable as reason:
        require("ansible", str(reason))
        raise
    environ = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ORACLE / "ansible.cfg"),
        "HOME": "/root",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with subprocess.Popen(
        [str(python), str(ORACLE / "reads.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ,
    ) as oracle:  # fmt: skip

        def ask(sources: Sequence[str], patterns: Sequence[str], values: Sequence[str] = ()) -> Mapping[str, Any]:
            request = {"sources": list(sources), "patterns": list(patterns), "values": list(values)}
            print(json.dumps(request), file=oracle.stdin, flush=True)
            found: Mapping[str, Any] = json.loads(oracle.stdout.readline())  # type: ignore[union-attr]
            return found

        yield ask
        oracle.stdin.close()  # type: ignore[union-attr]


def differences(inventory: Inventory, expected: Mapping[str, Any]) -> list[str]:
    """Where we read something else than Ansible."""
    found = []
    if list(inventory.hosts) != expected["hosts"]:
        found.append(f"hosts: {inventory.hosts} {expected['hosts']}")
    for name in expected["groups"].keys() | inventory.groups.keys():
        ours, theirs = list(inventory.groups.get(name, ())), expected["groups"].get(name)
        # Three levels down Ansible's order is that of addresses in memory.
        if ours != theirs and (not is_deep(inventory, name) or sorted(ours) != sorted(theirs or [])):
            found.append(f"group {name}: {ours} {theirs}")
    for name, theirs in expected["connections"].items():
        ours = inventory.host(name).connection
        said = {part: getattr(ours, part) for part in theirs}
        want = {part: typed(part, value) for part, value in theirs.items()}
        if said != want:
            found.append(f"{name}: {said} {want}")
    return found


def is_deep(inventory: Inventory, name: str) -> bool:
    groups = inventory._tree.groups
    return any(
        groups[grandchild].children for child in groups[name].children for grandchild in groups[child].children
    ) or any(groups[child].children for child in groups[name].children)


def typed(part: str, value: object) -> object:
    """The value as the connection would take it."""
    if part == "port":
        return int(str(value))
    if part == "become":
        return str(value).lower() in ("true", "yes", "1", "on")
    return str(value)


@pytest.mark.parametrize("number", range(INVENTORIES))
def test_generated_inventories_and_patterns(ask: Ask, tmp_path: Path, number: int) -> None:
    case = generate(SEED + number, tmp_path, PATTERNS)
    inventory = load_inventory(case.sources, tmp_path / "roles")
    expected = ask(case.sources, case.patterns)
    assert differences(inventory, expected) == []
    for pattern in case.patterns:
        theirs = expected["patterns"][pattern]
        ours, refusal = chosen(inventory, pattern)
        if refusal:  # where Ansible goes on: a name that nobody bears, and nothing left at all
            assert not theirs or re.match(r"no host or group|.*a bracket has", refusal), pattern
        else:
            assert sorted(ours) == sorted(theirs or []), pattern
            assert ours == theirs or any(is_deep(inventory, name) for name in inventory.groups), pattern


def chosen(inventory: Inventory, pattern: str) -> tuple[list[str], str]:
    try:
        return inventory.select([pattern]), ""
    except UsageError as error:
        return [], str(error)


def test_templates(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = dict(enumerate(yaml.safe_load((ORACLE / "templates.yml").read_text())))
    beside = {
        "number": 5,
        "nothing": None,
        "paths": {"base": "/opt", "bin": "{{ paths.base }}/bin"},
        "needs_nope": "{{ nope }}",
    }
    names = {f"t{number}": template for number, template in templates.items()}
    hosts = {"all": {"hosts": {"h1": {**beside, **names}, "h2": {}}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(hosts, sort_keys=False))
    monkeypatch.setenv("HOME", "/root")  # as the oracle's
    expected = ask([str(tmp_path / "hosts.yml")], [], list(names))["values"]
    found = filled(load_inventory(tmp_path / "hosts.yml", tmp_path / "roles"), "h1", list(names))
    differing = {
        names[name]: (found[name], expected[name])
        for name in names
        if found[name] != expected[name] and not ("error" in found[name] and "error" in expected[name])
    }
    assert differing == {}


def filled(inventory: Inventory, host: str, names: Sequence[str]) -> dict[str, Any]:
    """What variables of a host come to, ours and others'."""
    found: dict[str, Any] = {}
    for name in names:
        problems = Problems()
        value = inventory._scopes.filled(host, [name], problems, problems).entries[name]  # type: ignore[index]
        error = {"error": str(problems.messages)}
        found[name] = error if len(problems) else {"is": json.loads(json.dumps(plain(value)))}
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda path: path.name)
def test_shapes_of_public_inventories(ask: Ask, shape: Path, tmp_path: Path) -> None:
    inventory = load_inventory(shape, tmp_path)
    expected = ask([str(shape)], [])
    assert expected["hosts"], "Ansible reads nothing from it"
    assert differences(inventory, expected) == []
    try:
        inventory.resolve(inventory.hosts)
    except LamplighterError as error:
        pytest.fail(str(error))
