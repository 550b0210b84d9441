"""Fixtures around the park of nodes: `park` for the session, `make_node`, `node` and `systemd_node` for one test.

A node costs 0.2 s, with systemd 1 s, so a test gets fresh ones and may ruin them.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.place import cache_directory
from tests.leaks import Watch
from tests.nodes.park import PROJECT, Furniture, Node, NodePark, why_no_nodes, why_no_systemd

GPUS = 8
GPU_DIRECTORY = "/run/gpu"  # board.json, control.json (odd states on order) and the ledger of the nvidia-smi stand-in
SMI = "import sys; sys.path.insert(0, sys.argv[1]); from lab.nvidia_smi import main; sys.exit(main(sys.argv[2], sys.argv[3:]))"  # noqa: E501

Require = Callable[[str, "str | None"], None]
MakeNode = Callable[..., Node]


def gpu_furniture(name: str) -> Furniture:
    """Eight GPUs that remember who allocated what, and the demo engine's server."""
    from lab.node import board

    project, python = shlex.quote(str(PROJECT)), shlex.quote(sys.executable)
    launch = shlex.quote(str(PROJECT / "lab/launch_server.py"))
    smi = f'exec /usr/bin/python3 -I -S -c "{SMI}" {project} {GPU_DIRECTORY} "$@"'
    demo = f'exec {python} {launch} --lab-gpus {GPU_DIRECTORY} "$@"'
    return Furniture(
        files={
            "/usr/local/bin/nvidia-smi": f"#!/bin/sh\n{smi}\n",
            "/usr/local/bin/lamplighter-demo-server": f"#!/bin/sh\n{demo}\n",
            f"{GPU_DIRECTORY}/board.json": json.dumps(board(Path("/", name), GPUS)),
        },
        shared=(GPU_DIRECTORY, f"{GPU_DIRECTORY}/ledger"),
    )


@pytest.fixture(scope="session")
def park(tmp_path_factory: pytest.TempPathFactory, require: Require, watch: Watch) -> Iterator[NodePark]:
    """The session's park; nodes boot when asked for."""
    require("netns", why_no_nodes())
    engines = cache_directory()
    engines.mkdir(parents=True, exist_ok=True)
    directory = tmp_path_factory.mktemp("park")
    with NodePark(directory, visible=[engines], furniture=gpu_furniture, namespaces=watch.namespaces) as park:
        yield park


@pytest.fixture
def make_node(park: NodePark, require: Require) -> Iterator[MakeNode]:
    """``make_node("gpu1", systemd=False, disk_mib=256)`` boots a node that lives as long as the test."""
    made: list[str] = []

    def make(name: str = "gpu1", *, systemd: bool = False, disk_mib: int = 256) -> Node:
        if systemd:
            require("systemd", why_no_systemd())
        made.append(name)
        return park.node(name, systemd=systemd, disk_mib=disk_mib)

    yield make
    for name in made:
        if name in park.nodes:
            park.forget(name)


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    """A fresh node, gpu1, whose PID 1 only reaps."""
    return make_node()


@pytest.fixture
def systemd_node(make_node: MakeNode) -> Node:
    """A fresh node, gpu1, whose PID 1 is systemd, with logind."""
    return make_node(systemd=True)
