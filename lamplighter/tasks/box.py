"""The GPU node in a box: its tasks, and how a host with ``lab: NAME`` gets one."""

from __future__ import annotations

import sys
from typing import Any

from invoke.context import Context
from invoke.tasks import task

from lamplighter.project import PROJECT, lab_directory


@task(auto_shortflags=False, help={"name": "which node in a box (the host variable `lab`)"})
def up(c: Context, name: str = "demo") -> None:
    """Start the GPU node in a box, if it is not up, and say how to log in."""
    _find_lab()
    from lab import node
    from lamplighter.run import command

    with command.guarded(command.settings_from(c, name=name)):
        end = node.ensure_up(name, lab_directory())
        command.say(f"{name} is up: {end.ssh_line}")


@task(auto_shortflags=False, help={"name": "which node in a box (the host variable `lab`)"})
def down(c: Context, name: str = "demo") -> None:
    """Stop the GPU node in a box and every process on it."""
    _find_lab()
    from lab import node
    from lamplighter.run import command

    with command.guarded(command.settings_from(c, name=name)):
        command.say(f"{name} is down" if node.down(name, lab_directory()) else f"{name} was not up")


def bring_up(host: Any, servers: list[Any]) -> tuple[Any, list[Any]]:
    """Bring up the box that a host stands for; return the host, pointed to it, and its servers."""
    _find_lab()
    from lab import boxes

    return boxes.bring_up(host, servers, lab_directory())


def _find_lab() -> None:
    """Let ``lab`` be imported: it lies with what comes with the program, and not among the packages of its Python."""
    if str(PROJECT) not in sys.path:
        sys.path.append(str(PROJECT))
