"""The environment's whole way, over real OpenSSH, on Debian's Python: refused, fixed, proven, taken back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lamplighter.node.events import Exit
from tests.driver import Done
from tests.nodes.park import PROJECT, Node, NodePark
from tests.ssh.test_deploy import driver_for, text_of_one_token

SYSTEM = "/etc/python3.11/sitecustomize.py"
#: The lab's server as a console script of a venv whose first line switches PYTHONPATH off.
SCRIPT = f"""#!/opt/venv/bin/python -I
import sys
sys.path[:0] = {[str(PROJECT), *(path for path in sys.path if path.endswith("site-packages"))]!r}
if __name__ == "__main__":
    from lab.server import main
    sys.exit(main(["--lab-gpus", "/run/gpu", *sys.argv[1:]]))
"""
ENV = {"LAB_SPEED": "25", "NCCL_PROTO": "LL", "CUDA_DEVICE_MAX_CONNECTIONS": {"value": "32", "mode": "force"}}


def test_the_incidents_server_gets_its_variables_and_the_node_its_file_back(
    park: NodePark, node: Node, tmp_path: Path
) -> None:
    node.exec(["/usr/bin/python3", "-m", "venv", "--without-pip", "/opt/venv"])
    node.write("/opt/venv/bin/lamplighter-demo-server", SCRIPT, "755")
    system = node.sh(f"stat -c '%a %U %G' {SYSTEM}; cat {SYSTEM}; ls -A /etc/python3.11")
    driver = driver_for(park, node, tmp_path)

    def run(verb: str, *words: str, scope: str = "interpreter", **more: Any) -> Done:
        server = {
            "engine": "demo", "model": "demo-model", "port": 8000, "gpus": [0, 1], "python": "/opt/venv/bin/python",
            "args": {"tp": 2}, "env": ENV, "sitecustomize": {"scope": scope}, **more,
        }  # fmt: skip
        driver.write("gpu1", {**node.connection("root"), "servers": {"demo": server}})
        return driver.run(verb, "--json", "--host", "gpu1", *words)

    refused = run("deploy", scope="server")
    assert refused.code == Exit.REFUSED, refused
    assert refused.server("gpu1", "demo")["stage"] == "prove"
    assert "with -I: PYTHONPATH is ignored" in refused.server("gpu1", "demo")["message"]
    (finding,) = findings(run("check", scope="server"))
    assert finding["level"] == "error"
    assert finding["hint"].startswith(
        "set servers.demo.sitecustomize.scope: pth; servers.demo.sitecustomize.scope is set in /"
    )
    assert SYSTEM in finding["evidence"]
    assert findings(run("check"))[0]["level"] == "ok"

    deployed = run("deploy", nccl_proof=True)
    assert deployed.code == Exit.OK, str(deployed)
    assert text_of_one_token(node)
    told = [event["message"] for event in deployed.events if event.get("stage") == "confirm" and "message" in event]
    assert "2/2 workers carry 6/6 variables" in told, told
    assert any("NCCL itself names NCCL_PROTO in 2 workers" in message for message in told)
    asked = run("env")
    assert asked.code == Exit.OK, asked
    assert json.loads(asked.stdout)["env"]["hosts"]["gpu1"]["servers"]["demo"]["state"] == "carries"

    assert run("undeploy").code == Exit.REFUSED
    assert node.read(SYSTEM) != system
    gone = run("undeploy", "--stop")
    assert gone.code == Exit.OK, gone
    assert node.sh(f"stat -c '%a %U %G' {SYSTEM}; cat {SYSTEM}; ls -A /etc/python3.11") == system
    assert text_of_one_token(node) is None
    assert run("env").code == Exit.DEGRADED


def test_the_systems_file_follows_what_serves(park: NodePark, node: Node, tmp_path: Path) -> None:
    """A move to another venv that fails, at whatever stage, leaves the old one what it starts with."""
    for venv in ("venv", "new", "sterile"):
        node.exec(["/usr/bin/python3", "-m", "venv", "--without-pip", f"/opt/{venv}"])
        script = SCRIPT.replace("/opt/venv/bin/python -I", f"/opt/{venv}/bin/python")
        node.write(f"/opt/{venv}/bin/lamplighter-demo-server", script, "755")
    no_child = "import os; b'spawn_main' in open('/proc/self/cmdline', 'rb').read() and os._exit(3)\n"
    node.write("/opt/sterile/lib/python3.11/site-packages/sterile.pth", no_child)
    before = node.read(SYSTEM)
    driver = driver_for(park, node, tmp_path)

    def deploy(scope: str, venv: str = "venv", **args: str) -> Done:
        server = {
            "engine": "demo", "model": "demo-model", "port": 8000, "gpus": [0, 1], "python": f"/opt/{venv}/bin/python",
            "args": {"tp": 2, **args}, "env": ENV, "sitecustomize": {"scope": scope},
        }  # fmt: skip
        driver.write("gpu1", {**node.connection("root"), "servers": {"demo": server}})
        return driver.run("deploy", "--json", "--host", "gpu1")

    done = deploy("interpreter")
    assert done.code == Exit.OK, str(done)
    with_block = node.read(SYSTEM)
    assert with_block != before

    done = deploy("interpreter", "sterile")
    assert (done.code, done.server("gpu1", "demo")["stage"]) == (Exit.REFUSED, "prove"), str(done)
    assert "its spawn child did not (exit status 3)" in done.server("gpu1", "demo")["message"]
    assert node.read(SYSTEM) == with_block

    done = deploy("interpreter", "new", **{"lab-fail": "die:boot"})
    assert done.code == Exit.ROLLED_BACK, str(done)
    assert node.read(SYSTEM) == with_block
    proof = json.loads(driver.run("env", "--json", "--host", "gpu1").stdout)["env"]["hosts"]["gpu1"]["servers"]["demo"]
    assert proof["state"] == "carries", proof

    done = deploy("server", "new")
    assert done.code == Exit.OK, str(done)
    assert node.read(SYSTEM) == before


def findings(done: Done) -> list[dict[str, Any]]:
    found = json.loads(done.stdout)["check"]["hosts"]["gpu1"]["servers"]["demo"]["findings"]
    return [each for each in found if each["id"] == "sitecustomize"]
