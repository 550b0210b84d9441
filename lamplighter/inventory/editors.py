"""The inventory's own variables as a JSON Schema, for editors that complete and check YAML. Pure."""

from __future__ import annotations

from typing import Any

from lamplighter.inventory.schema import HostVariables, Server

_TEMPLATE = {"type": "string", "pattern": r"\{[{%#]"}
_SCALAR = {"type": ["string", "number"]}


def json_schema() -> dict[str, Any]:
    """The schema of a file of variables: group_vars, host_vars, ``vars`` of a group.

    Nothing is required, since other files may say it; null drops what lies below; a template may stand for anything.
    Names beside ours are other people's.
    """
    server, host = Server.model_json_schema(), HostVariables.model_json_schema()
    parts = {**server.pop("$defs", {}), **host.pop("$defs", {})}
    del server["properties"]["name"]
    server["properties"]["env"]["additionalProperties"] = {"anyOf": [{"$ref": "#/$defs/EnvValue"}, _SCALAR]}
    host["properties"]["servers"] = {"type": "object", "additionalProperties": {"$ref": "#/$defs/Server"}}
    parts["Server"] = server
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "lamplighter: variables of a host or a group",
        "type": "object",
        "properties": {name: _opened(each) for name, each in host["properties"].items()},
        "$defs": {name: _loose(each) for name, each in parts.items()},
    }


def _loose(model: dict[str, Any]) -> dict[str, Any]:
    known = {key: each for key, each in model.items() if key != "required"}
    return {**known, "properties": {name: _opened(each) for name, each in model["properties"].items()}}


def _opened(setting: dict[str, Any]) -> dict[str, Any]:
    """The setting, or a template, or null; and so is each value of a mapping of free names."""
    values = setting.get("additionalProperties")
    if isinstance(values, dict):
        setting = {**setting, "additionalProperties": {"anyOf": [values, _TEMPLATE, {"type": "null"}]}}
    about: dict[str, Any] = {key: setting[key] for key in ("title", "default") if key in setting}
    rest = {key: each for key, each in setting.items() if key not in about}
    return {**about, "anyOf": [rest, _TEMPLATE, {"type": "null"}]}
