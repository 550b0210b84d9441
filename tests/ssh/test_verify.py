"""verify over real OpenSSH: as root, through sudo, through a jump host; a hung command; noise of login shells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from tests.driver import Driver, eventually
from tests.nodes.fixtures import MakeNode
from tests.nodes.park import Node, NodePark

OWN = """
def test_who(host, evidence):
    done = host.run("id -un; printf 'a\\\\0b' ; echo oops >&2")
    evidence(f"{done.stdout_bytes!r} {done.stderr_bytes!r} {host.run('hostname').stdout.strip()}")

def test_file(host):
    assert host.file("/etc/hostname").content_string.strip() == host.run("hostname").stdout.strip()
"""


def driver_for(park: NodePark, node: Node, directory: Path, user: str = "root", **host: Any) -> Driver:
    driver = Driver(directory / "inventory", prefix=tuple(park.hub_words([])), home=park.home)
    server = {"engine": "demo", "model": "demo-model", "port": 8000, "gpus": "all"}
    driver.write("gpu1", {**node.connection(user), "servers": {"demo": server}, **host})
    (driver.inventory / "checks").mkdir()
    (driver.inventory / "checks" / "test_own.py").write_text(OWN)
    return driver


def own(driver: Driver) -> dict[str, dict[str, Any]]:
    done = driver.run("verify", "--json", "--host", "gpu1", "-k", "test_own.py")
    assert done.code == Exit.OK, done
    found = json.loads(done.stdout)["verify"]["hosts"]["gpu1"]["servers"]["demo"]["checks"]
    return {check["name"]: check for check in found}


@pytest.mark.parametrize(
    ("user", "become", "who"), [("root", False, "root"), ("ops", False, "ops"), ("ops", True, "root")]
)
def test_one_shell_for_all_questions(
    park: NodePark, node: Node, tmp_path: Path, user: str, become: bool, who: str
) -> None:
    if become:
        node.allow_sudo()
    node.write("/root/.bashrc", "echo welcome; echo noise >&2\n")
    found = own(driver_for(park, node, tmp_path, user, become=become))
    assert found["who"]["evidence"] == f"{who.encode() + b'%sa%sb' % (bytes([10]), bytes([0]))!r} b'oops\\n' gpu1"
    assert found["file"]["outcome"] == "passed"


def test_through_a_jump_host(park: NodePark, make_node: MakeNode, tmp_path: Path) -> None:
    bastion, node = make_node("bastion"), make_node("gpu1")
    driver = driver_for(park, node, tmp_path, ansible_ssh_common_args=f"-F {park.ssh_config}")
    kept = park.ssh_config.read_text()
    park.ssh_config.write_text(f"Host {node.address}\n  ProxyJump {bastion.name}\n{kept}")
    try:
        assert own(driver)["who"]["evidence"].endswith("gpu1")
        assert "bastion" in kept
        bastion.stop_sshd()
        done = driver.run("verify", "--json", "--host", "gpu1")
        assert done.code == Exit.UNREACHABLE, done  # it really went that way
    finally:
        park.ssh_config.write_text(kept)


def test_sudo_that_refuses_is_no_failed_check(park: NodePark, node: Node, tmp_path: Path) -> None:
    done = driver_for(park, node, tmp_path, "ops", become=True).run("verify", "--host", "gpu1", "-k", "who")
    assert done.code == Exit.REFUSED, done
    assert "gpu1: sudo" in done.stderr


WAITS = """
from pathlib import Path

def test_waits(host):
    if not Path({mark!r}).exists():
        Path({mark!r}).touch()
        host.run("sleep 200")
"""


def test_checks_after_a_deploy_and_the_next_server_outlive_a_broken_connection(
    park: NodePark, node: Node, tmp_path: Path
) -> None:
    driver = Driver(tmp_path / "inventory", prefix=tuple(park.hub_words([])), home=park.home)
    demo = {"engine": "demo", "model": "demo-model", "env": {"LAB_SPEED": "25"}}
    servers = {"one": {**demo, "port": 8000, "gpus": [0, 1]}, "two": {**demo, "port": 8001, "gpus": [2, 3]}}
    driver.write("gpu1", {**node.connection("root"), "servers": servers})
    mark = tmp_path / "waits"
    (driver.inventory / "checks").mkdir()
    (driver.inventory / "checks" / "test_own.py").write_text(WAITS.format(mark=str(mark)))
    with driver.started("deploy", "--json", "--host", "gpu1") as deploying:
        eventually(lambda: mark.exists() or deploying.poll() is not None)
        node.kill_sessions()
        told, _ = deploying.communicate(timeout=200)
    lines = [json.loads(line) for line in told.splitlines()]
    parts = lines[-1]["report"]["hosts"]["gpu1"]["servers"]
    assert {name: part["exit_code"] for name, part in parts.items()} == {"one": Exit.OK, "two": Exit.OK}, told
    (warned,) = [line["message"] for line in lines if line.get("stage") == "verify" and line["event"] == "warning"]
    assert "verifying again over a new connection" in warned


def test_one_session_and_one_login_at_a_time_do_for_every_verb(park: NodePark, node: Node, tmp_path: Path) -> None:
    config = node.read("/etc/node/sshd_config").replace("MaxSessions 50", "MaxSessions 1\nPermitTTY no")
    node.write("/etc/node/sshd_config", config.replace("MaxStartups 100", "MaxStartups 1"), "600")
    node.stop_sshd()
    node.start_sshd()
    node.allow_sudo()
    server: dict[str, Any] = {"engine": "demo", "model": "demo-model", "port": 8000, "env": {"LAB_SPEED": "25"}}
    host = {"become": True, "root": "/var/lib/lamplighter", "servers": {"demo": server}}
    driver = driver_for(park, node, tmp_path, "ops", **host)
    for verb in ("deploy", "check", "verify", "status", "env"):
        done = driver.run(verb, "--json", "--host", "gpu1")
        assert done.code == Exit.OK, done
    (driver.inventory / "checks" / "test_own.py").write_text("def test_hangs(host):\n    host.run('sleep 600')\n")
    driver.write("gpu1", {**node.connection("ops"), **host, "servers": {"demo": {**server, "checks": QUICK}}})
    done = driver.run("verify", "--json", "--host", "gpu1")
    found = json.loads(done.stdout)["verify"]["hosts"]["gpu1"]["servers"]["demo"]["checks"]
    assert {check["name"] for check in found if check["outcome"] in ("failed", "error")} == {"hangs"}, done


QUICK = {"check_seconds": 5}
