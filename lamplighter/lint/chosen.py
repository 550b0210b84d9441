"""The lint of all servers that a command is about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lamplighter.inventory import Host, Server
from lamplighter.inventory.values import Lint, Origin, Problems
from lamplighter.lint import lint_servers
from lamplighter.project import Project


def refuse(chosen: Iterable[tuple[Host, Sequence[Server]]], project: Path | Project) -> list[Lint]:
    """The warnings of these servers, each once. Raises InventoryError with all errors, where there are some."""
    found = lint_chosen(chosen, project)
    problems = Problems()
    for lint in found:
        if lint.level == "error" and lint.id != "inventory":  # told of that server alone, others go on
            problems.add(lint.origin, lint.what)
    problems.raise_if_any("docs/lint.md explains each rule, and how one is ignored with a reason")
    return [lint for lint in found if lint.level == "warning"]


def lint_chosen(chosen: Iterable[tuple[Host, Sequence[Server]]], project: Path | Project) -> list[Lint]:
    """What lint has to say of these servers, each finding once, by place."""
    found = [lint for host, servers in chosen for lint in lint_servers(host, servers, project / "roles")]
    return sorted(dict.fromkeys(found), key=place_of)


def place_of(lint: Lint) -> Origin:
    """Where a finding is shown: by file and line, those without one first."""
    return lint.origin or Origin("")
