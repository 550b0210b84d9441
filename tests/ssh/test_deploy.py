"""The main job over real OpenSSH: nodes of their own network, processes and files, with the lab's server and GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from tests.driver import Driver, eventually
from tests.nodes.park import Node, NodePark

PORT = 8000


def driver_for(park: NodePark, node: Node, directory: Path, *, user: str = "root", **host: Any) -> Driver:
    """Return an inventory with this node as ``gpu1`` and one quick lab server on all its GPUs."""
    driver = Driver(directory / "inventory", prefix=tuple(park.hub_words([])), home=park.home)
    server = {"engine": "demo", "model": "demo-model", "port": PORT, "gpus": "all", "env": {"LAB_SPEED": "25"}}
    driver.write("gpu1", {**node.connection(user), "servers": {"demo": server}, **host})
    return driver


def text_of_one_token(node: Node) -> str | None:
    """Ask the node's server, on the node."""
    body = json.dumps({"model": "demo-model", "prompt": "Hello", "max_tokens": 1})
    done = node.exec(
        ["curl", "-sf", "-H", "Content-Type: application/json", "-d", body, f"http://127.0.0.1:{PORT}/v1/completions"],
        check=False,
    )
    return json.loads(done.stdout)["choices"][0]["text"] if done.returncode == 0 else None


def test_deploy_redeploy_crash_and_stop_as_root(park: NodePark, node: Node, tmp_path: Path) -> None:
    driver = driver_for(park, node, tmp_path)
    first = driver.run("deploy", "--json", "--host", "gpu1")
    assert first.code == Exit.OK, first
    assert text_of_one_token(node)
    assert node.sh("stat -c %a /var/lib/lamplighter").strip() == "700"

    second = driver.run("deploy", "--json", "--host", "gpu1")
    assert second.code == Exit.OK, second
    assert second.server("gpu1", "demo")["downtime_seconds"] > 0

    crash = {"engine": "demo", "model": "demo-model", "port": PORT, "args": {"lab-fail": "die:graphs"}}
    driver.write("gpu1", {**node.connection("root"), "servers": {"demo": {**crash, "env": {"LAB_SPEED": "25"}}}})
    crashed = driver.run("deploy", "--json", "--host", "gpu1")
    assert crashed.code == Exit.ROLLED_BACK, crashed
    assert text_of_one_token(node)

    stopped = driver.run("stop", "--json", "--host", "gpu1")
    assert stopped.code == Exit.OK, stopped
    assert text_of_one_token(node) is None
    eventually(lambda: not any("lamplighter" in command for command in node.processes().values()))


@pytest.mark.parametrize("become", [False, True])
def test_deploy_as_an_ordinary_user(park: NodePark, node: Node, tmp_path: Path, become: bool) -> None:
    if become:
        node.allow_sudo()
    driver = driver_for(park, node, tmp_path, user="ops", become=become)
    done = driver.run("deploy", "--json", "--host", "gpu1")
    assert done.code == Exit.OK, done
    assert text_of_one_token(node)
    pid = done.server("gpu1", "demo")["serving"]["pid"]
    owner = node.sh(f"stat -c %U /proc/{pid}").strip()
    assert owner == ("root" if become else "ops")
    state = "/var/lib/lamplighter" if become else "/home/ops/.local/state/lamplighter"
    assert node.sh(f"ls {state}").strip()


def test_noise_of_login_shells_is_kept_aside(park: NodePark, node: Node, tmp_path: Path) -> None:
    node.write("/root/.bashrc", 'echo welcome to gpu1; echo \'{"event": "end"}\'; echo oops >&2\n')
    driver = driver_for(park, node, tmp_path)
    done = driver.run("status", "--json", "--host", "gpu1")
    assert done.code == Exit.OK, done
    assert json.loads(done.stdout)["status"]["hosts"]["gpu1"]["servers"]["demo"]["state"] == "stopped"


def test_node_without_python_is_refused_with_a_next_step(park: NodePark, node: Node, tmp_path: Path) -> None:
    driver = driver_for(park, node, tmp_path, ansible_python_interpreter="/opt/none/python3")
    done = driver.run("deploy", "--json", "--host", "gpu1")
    assert done.code == Exit.REFUSED, done
    assert "/opt/none/python3" in done.stdout + done.stderr
    assert "ansible_python_interpreter" in done.stderr


def test_unknown_host_key_is_refused(park: NodePark, node: Node, tmp_path: Path) -> None:
    driver = driver_for(park, node, tmp_path, known_hosts=str(tmp_path / "none"))
    done = driver.run("deploy", "--json", "--host", "gpu1")
    assert done.code == Exit.UNREACHABLE, done
    assert "SHA256:" in done.stderr
