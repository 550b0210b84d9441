"""Checks and drift of a real unit, with a real logind: a unit that is disabled or edited, a user without lingering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from tests.driver import Done, Driver
from tests.nodes.park import Node, NodePark

PORT = 8000
UNIT = "lamplighter-demo.service"
FILE = f"/etc/systemd/system/{UNIT}"


def driver_for(park: NodePark, node: Node, directory: Path, user: str = "root", **server: Any) -> Driver:
    driver = Driver(directory / "inventory", prefix=tuple(park.hub_words([])), home=park.home)
    known = {"engine": "demo", "model": "demo-model", "port": PORT, "launcher": "auto", "env": {"LAB_SPEED": "30"}}
    driver.write("gpu1", {**node.connection(user), "servers": {"demo": {**known, **server}}})
    return driver


def checks(done: Done) -> dict[str, dict[str, Any]]:
    found = json.loads(done.stdout)["verify"]["hosts"]["gpu1"]["servers"]["demo"]["checks"]
    return {check["name"]: check for check in found}


def drift(driver: Driver) -> dict[tuple[str, str], tuple[str | None, str | None]]:
    done = driver.run("status", "--json", "--host", "gpu1")
    found = json.loads(done.stdout)["status"]["hosts"]["gpu1"]["servers"]["demo"]["drift"]
    return {(each["kind"], each["name"]): (each["wanted"], each["found"]) for each in found["differences"]}


def test_a_unit_that_is_disabled_or_edited(park: NodePark, systemd_node: Node, tmp_path: Path) -> None:
    driver = driver_for(park, systemd_node, tmp_path)
    done = driver.run("deploy", "--json", "--host", "gpu1", timeout=240)
    assert done.code == Exit.OK, str(done)[-3000:]
    verified = driver.run("verify", "--json", "--host", "gpu1")
    assert verified.code == Exit.OK, verified
    assert checks(verified)["unit_is_enabled"]["outcome"] == "passed"
    assert checks(verified)["unit_is_as_written"]["outcome"] == "passed"
    assert drift(driver) == {}

    systemd_node.exec(["systemctl", "disable", UNIT])
    verified = driver.run("verify", "--json", "--host", "gpu1")
    assert verified.code == Exit.DEGRADED, verified
    assert "disabled" in checks(verified)["unit_is_enabled"]["evidence"]
    systemd_node.exec(["systemctl", "enable", UNIT])

    systemd_node.sh(f"sed -i 's/^Restart=.*/Restart=no/' {FILE}")
    found = checks(driver.run("verify", "--json", "--host", "gpu1", "-k", "unit"))
    assert found["unit_is_as_written"]["outcome"] == "warning"
    assert "Restart=no" in found["unit_is_as_written"]["evidence"]
    assert drift(driver) == {("unit", f"{UNIT} Restart"): ("on-failure", "no")}

    systemd_node.sh(f"sed -i 's/^Restart=.*/Restart=on-failure/' {FILE}")
    assert drift(driver) == {}

    # what `systemctl edit` writes
    systemd_node.write(f"{FILE}.d/override.conf", "[Service]\n# for the night\nEnvironment=NCCL_PROTO=Simple\n")
    assert drift(driver) == {("unit", f"{UNIT}.d/override.conf Environment"): (None, "NCCL_PROTO=Simple")}
    systemd_node.exec(["rm", "-r", f"{FILE}.d"])
    assert drift(driver) == {}
    again = driver.run("deploy", "--json", "--host", "gpu1", "--if-changed", timeout=240)
    assert again.server("gpu1", "demo")["outcome"] == "unchanged", again


@pytest.mark.parametrize("lingers", [False, True])
def test_a_user_whose_logout_would_take_the_shared_memory(
    park: NodePark, systemd_node: Node, tmp_path: Path, lingers: bool
) -> None:
    if lingers:
        systemd_node.exec(["loginctl", "enable-linger", "ops"])
    driver = driver_for(park, systemd_node, tmp_path, "ops")
    found = checks(driver.run("verify", "--json", "--host", "gpu1"))["logout_takes_nothing_away"]
    if lingers:
        assert found["outcome"] == "passed", found
    else:
        assert found["outcome"] == "warning", found
        assert "RemoveIPC is on and ops does not linger" in found["evidence"]
