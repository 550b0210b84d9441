"""A testinfra backend on a connection that is open already: no second login, jump hosts and become included."""

from __future__ import annotations

from typing import Any

import testinfra.backend.base

from lamplighter.run.shell import Shell
from lamplighter.ssh.connection import Node


class NodeBackend(testinfra.backend.base.BaseBackend):  # type: ignore[misc]  # testinfra ships no types
    """testinfra's questions, asked through a Shell."""

    NAME = "lamplighter"

    def __init__(self, node: Node) -> None:
        super().__init__(node.name)
        self.shell = Shell(node)
        self._encoding = "utf-8"  # asking the node for its encoding would cost a command

    def decode(self, data: bytes) -> str:
        """Any bytes are text: those that are no UTF-8 come back as the same bytes where they go into a command."""
        return data.decode("utf-8", "surrogateescape")

    def run(self, command: str, *args: str, **kwargs: Any) -> testinfra.backend.base.CommandResult:
        line = self.get_command(command, *args)
        done = self.shell.run(line)
        return self.result(done.exit_status, self.encode(line), done.stdout, done.stderr)
