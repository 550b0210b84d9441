"""A GPU node in a box for each test that asks for one, and an inventory that points to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lab import node as lab_node
from tests.driver import Driver, free_port, token


@dataclass(frozen=True)
class Box:
    """The node, the inventory that names it ``box``, and the port of its one server ``demo``."""

    driver: Driver
    directory: Path
    endpoint: lab_node.Endpoint
    port: int

    def configure(self, *, host: dict[str, Any] | None = None, **server: Any) -> None:
        """Write the inventory: the server as given, quick unless it says otherwise."""
        server.setdefault("env", {})
        server["env"] = {"LAB_SPEED": "25", **server["env"]}
        variables: dict[str, Any] = {
            "ansible_host": self.endpoint.host,
            "ansible_port": self.endpoint.port,
            "ansible_user": self.endpoint.user,
            "ansible_ssh_private_key_file": str(self.endpoint.key_file),
            "known_hosts": str(self.endpoint.known_hosts),
            "root": "~/lamplighter",
            "servers": {"demo": {"engine": "demo", "model": "demo-model", "port": self.port, "gpus": "all", **server}},
        }
        self.driver.write("box", {**variables, **(host or {})})

    def run(self, *words: str, timeout: float = 240) -> Any:
        return self.driver.run(*words, "--host", "box", timeout=timeout)

    def deploy(self, *words: str) -> Any:
        return self.run("deploy", "--json", *words)

    def serves(self) -> bool:
        return token(self.port) is not None

    @property
    def home(self) -> Path:
        return self.directory / "box" / "home"

    @property
    def state(self) -> Path:
        """``<root>/servers/demo`` of the node."""
        return self.home / "lamplighter" / "servers" / "demo"


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    directory = tmp_path / "with a space"
    directory.mkdir()
    endpoint = lab_node.ensure_up("box", directory)
    made = Box(Driver(tmp_path / "inventory"), directory, replace(endpoint), free_port())
    made.configure()
    try:
        yield made
    finally:
        lab_node.down("box", directory)
