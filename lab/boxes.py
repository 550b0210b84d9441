"""Nodes in a box in the place of the hosts of an inventory that say ``lab: NAME``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lab import node
from lamplighter.inventory import Host, Server
from lamplighter.run.command import complain


def bring_up(host: Host, servers: Sequence[Server], directory: Path) -> tuple[Host, list[Server]]:
    """Bring up the box that ``host`` stands for, below ``directory``; return the host, pointed to it, and its servers.

    A port that somebody else on this machine has (another box) is replaced, and that is said.
    """
    assert host.lab is not None
    endpoint = node.ensure_up(host.lab, directory)
    connection = dataclasses.replace(
        host.connection,
        host=endpoint.host,
        port=endpoint.port,
        user=endpoint.user,
        key_file=str(endpoint.key_file),
        known_hosts=str(endpoint.known_hosts),
    )
    moved = []
    for server in servers:
        port = node.port_for(host.lab, directory, server.port)
        if port != server.port:
            complain(f"{host.name}: port {server.port} of this machine is taken; {server.name} uses {port}")
        moved.append(server.model_copy(update={"port": port}))
    return dataclasses.replace(host, connection=connection), moved
