"""Tries ways in, from where it is run: ``python -m tests.ssh.ways CONFIG...`` prints, as JSON, who got in by which.

Each CONFIG is an ssh_config that knows the host ``target``. ``ssh`` is the exit status of ssh itself; the others are
lamplighter's transports: an exit code and what was said, 0 and nothing for a login.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Literal

from lamplighter.errors import LamplighterError
from lamplighter.inventory.schema import ConnectionSpec
from lamplighter.ssh.connection import Node

TRANSPORTS: tuple[Literal["auto", "fabric", "openssh"], ...] = ("auto", "fabric", "openssh")


def main(configs: list[str]) -> None:
    found = {}
    for config in configs:
        words = ["ssh", "-F", config, "-o", "BatchMode=yes", "target", "exit 7"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        found[config] = {"ssh": (0 if done.returncode == 7 else done.returncode, "", "")}
        for transport in TRANSPORTS:
            if transport == "openssh" and found[config]["auto"][2] != "FabricWay":
                found[config][transport] = found[config]["auto"]
                continue
            try:
                with Node("target", ConnectionSpec("target", ssh_config=config, transport=transport)) as node:
                    assert node.run("exit 7", timeout=60).exit_status == 7
                    found[config][transport] = (0, "", type(node._way).__name__)
            except LamplighterError as error:
                found[config][transport] = (int(error.exit_code), str(error), "")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
