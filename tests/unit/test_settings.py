"""Every setting of a server is declared once, in the schema, and reaches the node as its declaration says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from lamplighter.inventory import Server, load_inventory
from lamplighter.inventory.schema import TREATMENT, ControlOnly
from lamplighter.node import plan as node
from lamplighter.release.engine import load_engine
from lamplighter.release.release import build_release

PROJECT = Path(__file__).parents[2]
NEEDED: dict[str, Any] = {"engine": "demo", "model": "/m", "port": 8000}
#: What a setting may be like; the first that its declaration takes is tried.
VALUES = ("another", "0.5.16", "127.0.0.2", True, 7, 7.5, [0], ["some words of it"], {"A_NAME": "its value"})


def settings(
    model: type[BaseModel] = Server, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every setting that the node is told, by its path."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and not why_not(field):
            yield from settings(kind, (*above, name))
        elif name != "name" and not why_not(field):
            yield (*above, name), field


def why_not(field: FieldInfo) -> str:
    return next((each.why for each in field.metadata if isinstance(each, ControlOnly)), "")


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {path[0]: nested(path[1:], value) if path[1:] else value}


def at(path: tuple[str, ...], tree: Any) -> Any:
    return at(path[1:], tree[path[0]]) if path else tree


def another(path: tuple[str, ...], field: FieldInfo) -> Any:
    """A value that the setting takes and that is not its default."""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else VALUES
    usual = Server(name="s", **NEEDED)
    for value in choices:
        try:
            given = Server(name="s", **{**NEEDED, **nested(path, value)})
        except ValidationError:
            continue
        if at(path, given.to_json()) != at(path, usual.to_json()):
            return value
    pytest.fail(f"{'.'.join(path)} takes none of VALUES: add one that it does")


def told(directory: Path, given: dict[str, Any]) -> tuple[Server, dict[str, Any], str]:
    """The server that an inventory describes, what the node makes of the request for it, and its release's digest."""
    directory.mkdir()
    variables = {"servers": {"s": {**NEEDED, **given}}}
    (directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"h": variables}}}))
    host = load_inventory(directory, PROJECT / "roles").host("h")
    engine = load_engine("demo", PROJECT / "roles")
    release = build_release(host, host.servers["s"], engine, PROJECT)
    request = json.loads(json.dumps({"server": release.manifest["server"], "engine": engine.compiled}))
    plan = json.loads(json.dumps(dataclasses.asdict(node.Plan.load(request))))
    return host.servers["s"], plan, release.digest


SETTINGS = dict(settings())


@pytest.mark.parametrize("path", [path for path in SETTINGS if path != ("engine",)], ids=".".join)
def test_a_setting_reaches_the_node_and_restarts_what_it_should(tmp_path: Path, path: tuple[str, ...]) -> None:
    _, usual, digest = told(tmp_path / "usual", {})
    server, plan, changed = told(tmp_path / "changed", nested(path, another(path, SETTINGS[path])))
    assert at(path, plan) == at(path, server.to_json())
    assert at(path, plan) != at(path, usual)
    assert (changed != digest) == (path[0] not in TREATMENT)


def test_of_the_engine_the_node_gets_what_its_role_says(tmp_path: Path) -> None:
    server, plan, _ = told(tmp_path / "usual", {})
    assert plan["engine"]["name"] == server.engine


def test_what_the_node_is_not_told_has_a_reason() -> None:
    apart = {name: why for name, field in Server.model_fields.items() if (why := why_not(field))}
    assert set(apart) & {each.name for each in dataclasses.fields(node.Plan)} == set()
    assert all(len(why.split()) > 2 for why in apart.values()), apart


def test_a_release_of_an_earlier_version_is_read_with_the_defaults_of_the_inventory() -> None:
    usual = Server(name="s", **NEEDED)
    late = [each for each in dataclasses.fields(node.Plan) if each.default is not dataclasses.MISSING]
    assert late
    for each in late:
        default: Any = each.default
        said = json.loads(json.dumps(dataclasses.asdict(default))) if dataclasses.is_dataclass(default) else default
        assert said == usual.to_json()[each.name], each.name
