"""What the rules find at the servers of a host, with its places, but for what the inventory ignores. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lamplighter.errors import InventoryError
from lamplighter.inventory import Host, Ignored, Server
from lamplighter.inventory.values import Lint, did_you_mean
from lamplighter.lint.knowledge import About, load_knowledge
from lamplighter.lint.rules import inspect
from lamplighter.lint.view import Entry, Finding, View, error, warning
from lamplighter.project import Roles
from lamplighter.release.engine import Engine, load_engine


def lint_servers(host: Host, servers: Iterable[Server], roles: Roles) -> list[Lint]:
    """What is wrong with these servers of ``host``, by place; the id of what gives no command line is ``inventory``."""
    found = [lint for server in servers for lint in _lint(host, server, load_engine(server.engine, roles), roles)]
    return [replace(lint, level="error") for lint in found] if host.is_strict else found


def _lint(host: Host, server: Server, engine: Engine, roles: Roles) -> Iterator[Lint]:
    try:
        engine.argv(server)  # what gives no command line is refused by each deploy
        view = view_of(server, engine, roles)
    except InventoryError as error:
        path, _, said = error.what.partition(": ")
        advice = f": {error.next_step}" if error.next_step else ""
        yield Lint("inventory", path, said + advice, host.origin(path), "error")
        return
    found, rules = inspect(view), view.known.common.rules
    for finding in (*_heeded(server, found), *_idle(server, found, rules)):
        setting = _setting(server, finding.name)
        path = f"servers.{server.name}.{setting}"
        message = f"{finding.name} {finding.message}" if setting == "extra_args" else finding.message
        source = rules[finding.id].source
        yield Lint(finding.id, path, message, host.origin(path), finding.level, finding.instead, source)


def lint_of_node(server: Server, roles: Roles) -> dict[str, Any]:
    """What the node needs to look on: the names of NCCL's library to look for, and what is ignored. JSON-safe."""
    view = view_of(server, load_engine(server.engine, roles), roles)
    nccl = view.known.common.nccl
    names = [name for name in view.env if name.startswith("NCCL_") and name not in (*nccl.torch, *nccl.gone)]
    return {"nccl": names, "ignore": [[each.id, each.variable] for each in server.lint.ignore]}


def view_of(server: Server, engine: Engine, roles: Roles) -> View:
    """The server as the rules see it. Raises InventoryError where it has no command line."""
    settings, argv = engine.settings(server), tuple(map(str.__str__, engine.arguments(server)))
    if server.served_name is not None:  # that is what it answers to, whatever its model is called
        del settings["model"]
    return View(
        engine.compiled,
        load_knowledge(roles, (engine.name, *engine.compiled["ancestors"])),
        argv,
        {name: Entry(None) for name in server.secrets}
        | {name: Entry(each.value, each.mode == "force") for name, each in server.env.items()},
        server.engine_version,
        argv[len(argv) - len(server.extra_args) :],
        {flag: (name, settings[name]) for name, flag in engine.launch["flags"].items() if flag and name in settings},
        None if server.gpus == "all" else len(server.gpus),
        server.nccl_proof,
    )


def _heeded(server: Server, found: Sequence[Finding]) -> list[Finding]:
    return [each for each in found if not any(_is_meant(ignored, each) for ignored in server.lint.ignore)]


def _is_meant(ignored: Ignored, finding: Finding) -> bool:
    return ignored.id == finding.id and ignored.variable in (None, finding.name)


def _idle(server: Server, found: Sequence[Finding], rules: Mapping[str, About]) -> Iterator[Finding]:
    """L37: an ``ignore`` of a rule that is not there, or that has found nothing."""
    for ignored in server.lint.ignore:
        if ignored.id not in rules:
            yield error("L37", "lint.ignore", f"there is no rule {ignored.id}{did_you_mean(ignored.id, rules)}")
        elif not rules[ignored.id].node and not any(_is_meant(ignored, each) for each in found):
            about = f" about {ignored.variable}" if ignored.variable else ""
            yield warning("L37", "lint.ignore", f"{ignored.id} finds nothing{about} any more", "remove it")


def _setting(server: Server, name: str) -> str:
    """Where a variable or a flag of a finding is said."""
    if name in server.env:
        return f"env.{name}"
    if name in server.secrets:
        return f"secrets.{name}"
    if not name.startswith("-"):
        return name
    given = next((each for each in server.args if f"--{each.replace('_', '-')}" == name.replace("_", "-")), None)
    return f"args.{given}" if given is not None and name not in server.extra_args else "extra_args"
