"""``become``: root through ``sudo -n``, or a refusal that says which line of sudoers is in the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from lamplighter.ssh.become import SUDOERS_FILE
from tests.driver import Driver
from tests.nodes.park import Node, NodePark

pytestmark = pytest.mark.skipif(shutil.which("sudo") is None, reason="needs sudo")

REFUSALS = {
    "no rule": (None, "NOPASSWD"),
    "password": ("ALL=(ALL) ALL", "NOPASSWD"),
    "terminal": ("ALL=(ALL) NOPASSWD: ALL\nDefaults:ops requiretty", "!requiretty"),
    "input is logged": ("ALL=(ALL) NOPASSWD: ALL\nDefaults:ops log_input", "!log_input"),
    "input is logged but for one command": (
        "ALL=(ALL) NOPASSWD: ALL\nDefaults:ops log_input\nops ALL=(ALL) NOPASSWD: NOLOG_INPUT: /bin/ls",
        "!log_input",
    ),
    "settings are not listed": (
        "ALL=(ALL) NOPASSWD: ALL\nDefaults:ops log_input, listpw=always",
        "Defaults:ops listpw=never",
    ),
    "input is logged by the rule": ("ALL=(ALL) NOPASSWD: LOG_INPUT: ALL", "take LOG_INPUT:"),
}

#: Standard input that sudo stored.
LOGGED_INPUT = "find /var/log/sudo-io -name stdin -exec zcat {} + 2>/dev/null; true"


def status(park: NodePark, node: Node, directory: Path) -> Any:
    driver = Driver(directory / "inventory", prefix=tuple(park.hub_words([])))
    server = {"engine": "demo", "model": "demo-model", "port": 8000}
    reach = {**node.connection("ops"), "known_hosts": str(park.known_hosts), "become": True}
    driver.write("gpu1", {**reach, "servers": {"demo": server}})
    return driver.run("status", "--json", "--host", "gpu1")


def test_sudo_that_cannot_or_must_not_be_used_is_refused(park: NodePark, node: Node, tmp_path: Path) -> None:
    for name, (rule, advice) in REFUSALS.items():
        node.forbid_sudo()
        if rule is not None:
            node.allow_sudo(rule)
        done = status(park, node, tmp_path)
        assert done.code == Exit.REFUSED, f"{name}: {done}"
        assert done.stderr.startswith("gpu1: "), f"{name}: {done}"
        assert advice in done.stderr, f"{name}: {done}"
        assert SUDOERS_FILE in done.stderr or "take LOG_INPUT:" in done.stderr, f"{name}: {done}"
        assert not node.sh(LOGGED_INPUT).strip(), name
    node.allow_sudo(REFUSALS["input is logged"][0])
    node.write(SUDOERS_FILE, "Defaults:ops !log_input\n", mode="440")  # what the refusal advises
    done = status(park, node, tmp_path)
    node.exec(["rm", SUDOERS_FILE])
    assert done.code == Exit.OK, done
    assert not node.sh(LOGGED_INPUT).strip()
    assert json.loads(done.stdout)["status"]["hosts"]["gpu1"]["servers"]["demo"]["state"] == "stopped"
    assert node.sh("stat -c %U /var/lib/lamplighter").strip() == "root"
