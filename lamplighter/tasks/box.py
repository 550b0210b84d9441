"""The GPU node in a box: its tasks, and how a host with ``lab: NAME`` gets one."""

from __future__ import annotations

from typing import Any

from invoke.context import Context
from invoke.tasks import task

from lamplighter.project import PROJECT


@task(auto_shortflags=False, help={"name": "which node in a box (the host variable `lab`)"})
def up(c: Context, name: str = "demo") -> None:
    """Start the GPU node in a box, if it is not up, and say how to log in."""
    from lab import node
    from lamplighter.run import command

    with command.guarded(command.settings_from(c, name=name)):
        end = node.ensure_up(name, PROJECT / ".lab")
        command.say(f"{name} is up: {end.ssh_line}")


@task(auto_shortflags=False, help={"name": "which node in a box (the host variable `lab`)"})
def down(c: Context, name: str = "demo") -> None:
    """Stop the GPU node in a box and every process on it."""
    from lab import node
    from lamplighter.run import command

    with command.guarded(command.settings_from(c, name=name)):
        command.say(f"{name} is down" if node.down(name, PROJECT / ".lab") else f"{name} was not up")


def bring_up(host: Any, servers: list[Any]) -> tuple[Any, list[Any]]:
    from lab import boxes

    return boxes.bring_up(host, servers, PROJECT / ".lab")
