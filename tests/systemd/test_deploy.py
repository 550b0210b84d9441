"""Deploys on a node whose PID 1 is systemd: the server is a unit that outlives crashes and reboots."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from tests.driver import Done, Driver, eventually
from tests.nodes.fixtures import MakeNode
from tests.nodes.park import Node, NodePark

PORT = 8000
UNIT = "lamplighter-demo.service"
FILE = f"/etc/systemd/system/{UNIT}"
NASTY = "a b'\"%h$HOME$$ é\\x"


@dataclass(frozen=True)
class Site:
    """A systemd node, the inventory that calls it ``gpu1``, and how its user speaks to systemd."""

    driver: Driver
    node: Node
    user: str = "root"

    def configure(self, *, host: dict[str, Any] | None = None, **server: Any) -> None:
        known = {"engine": "demo", "model": "demo-model", "port": PORT, "gpus": "all", "launcher": "auto"}
        server["env"] = {"LAB_SPEED": "30", **server.get("env", {})}
        variables = {**self.node.connection(self.user), "servers": {"demo": {**known, **server}}, **(host or {})}
        self.driver.write("gpu1", variables)

    def run(self, *words: str) -> Done:
        return self.driver.run(*words, "--json", "--host", "gpu1", timeout=240)

    def deploy(self) -> Done:
        done = self.run("deploy")
        assert done.code == Exit.OK, str(done)[-3000:]
        return done

    def status(self) -> dict[str, Any]:
        found = json.loads(self.run("status").stdout)["status"]["hosts"]["gpu1"]["servers"]["demo"]
        assert isinstance(found, dict)
        return found

    def serves(self) -> bool:
        body = json.dumps({"model": "demo-model", "prompt": "Hello", "max_tokens": 1})
        words = ["curl", "-sf", "-m", "30", "-H", "Content-Type: application/json", "-d", body]
        return self.node.exec([*words, f"http://127.0.0.1:{PORT}/v1/completions"], check=False).returncode == 0

    def systemctl(self, *words: str, check: bool = True) -> str:
        if self.user == "root":
            return self.node.exec(["systemctl", *words], check=check).stdout.strip()
        env = {"XDG_RUNTIME_DIR": "/run/user/1001"}
        return self.node.exec(["systemctl", "--user", *words], check=check, user=self.user, env=env).stdout.strip()

    def show(self, name: str, unit: str = UNIT) -> str:
        return self.systemctl("show", "--value", f"--property={name}", unit)

    def unit(self) -> dict[str, str]:
        """All that makes the committed unit: its files by path, and whether it is enabled."""
        script = (
            f'cd /etc/systemd/system && find . -path \'*{UNIT}*\' | while read f; do echo "== $f"; cat "$f" 2>&1; done'
        )
        return {
            "files": self.node.sh(script),
            "enabled": self.systemctl("is-enabled", UNIT, check=False),
            "fragment": self.show("FragmentPath"),
            "drop-ins": self.show("DropInPaths"),
            "restart": self.show("Restart"),
        }


def site_of(park: NodePark, node: Node, directory: Path, user: str = "root") -> Site:
    site = Site(Driver(directory / "inventory", prefix=tuple(park.hub_words([])), home=park.home), node, user)
    site.configure()
    return site


@pytest.fixture
def site(park: NodePark, systemd_node: Node, tmp_path: Path) -> Site:
    return site_of(park, systemd_node, tmp_path)


def restart_quickly(node: Node) -> None:
    node.write(f"{FILE}.d/quick.conf", "[Service]\nRestartSec=1\n")


def test_a_server_outlives_a_kill_and_a_reboot_and_is_found_by_the_next_deploy(site: Site) -> None:
    restart_quickly(site.node)
    first = site.deploy().server("gpu1", "demo")["serving"]
    assert str(first["pid"]) == site.show("MainPID")
    assert site.show("Restart") == "on-failure"
    assert site.show("KillMode") == "control-group"
    assert site.systemctl("is-enabled", UNIT) == "enabled"
    assert site.status()["state"] == "serving"
    environment = site.node.sh(f"tr '\\0' '\\n' </proc/{first['pid']}/environ")
    assert "INVOCATION_ID" not in environment
    records = next(line.partition("=")[2] for line in environment.splitlines() if "LAMPLIGHTER_RECORDS" in line)
    assert f"{first['pid']}.json" in site.node.sh(f"ls '{records}'").split()

    site.node.exec(["kill", "-9", str(first["pid"])])
    eventually(lambda: site.show("MainPID") not in ("0", str(first["pid"])))
    eventually(site.serves)
    now = site.status()
    assert now["state"] == "serving"
    assert str(now["pid"]) == site.show("MainPID")
    assert now["restarts"] >= 1
    assert f"systemd restarted {UNIT}" in now["message"]
    assert now["since"] > first["since"] + 1  # of this process

    second = site.deploy().server("gpu1", "demo")
    assert second["downtime_seconds"] > 0
    assert second["serving"]["pid"] != now["pid"]
    assert str(now["pid"]) not in map(str, site.node.processes())
    assert site.status()["message"] == ""

    site.node.reboot()
    eventually(site.serves)
    now = site.status()
    assert now["state"] == "serving"
    assert now["pid"] == int(site.show("MainPID"))
    assert "when the node booted" in now["message"]
    assert site.deploy().server("gpu1", "demo")["downtime_seconds"] > 0


def test_a_unit_whose_record_is_removed_is_told_and_undeploy_leaves_it(site: Site) -> None:
    """Also after systemd has restarted it, and though the record of its launch is gone as well."""
    restart_quickly(site.node)
    first = site.deploy().server("gpu1", "demo")
    site.node.exec(["kill", "-9", str(first["serving"]["pid"])])
    eventually(lambda: site.show("MainPID") not in ("0", str(first["serving"]["pid"])))
    eventually(site.serves)
    home = "/var/lib/lamplighter/servers/demo"
    site.node.sh(f"rm {home}/server.json")
    now = site.status()
    assert (now["state"], now["release"], str(now["pid"])) == ("serving", first["release"], site.show("MainPID"))
    assert "server.json is missing" in now["message"]
    assert site.run("undeploy").code == Exit.REFUSED
    site.node.sh(f"rm {home}/runs/*/process.json")
    now = site.status()
    assert (now["state"], f"pid {site.show('MainPID')}" in now["message"]) == ("unknown", True)
    assert site.run("undeploy").code == Exit.REFUSED
    assert site.serves()
    site.deploy()
    assert site.status()["message"] == ""
    assert site.run("undeploy", "--stop").code == Exit.OK
    now = site.status()
    assert now["state"] == "stopped"
    assert re.fullmatch(rf"run \S+ \(undeploy, \S+\) stopped it at [^;]*; {UNIT} is inactive", now["message"]), (
        now
    )  # no crash


def test_a_unit_whose_server_gets_another_name_is_the_way_back_until_that_is_ready(site: Site) -> None:
    old = site.deploy().server("gpu1", "demo")
    new = {"engine": "demo", "model": "demo-model", "port": PORT, "launcher": "auto", "was": "demo"}
    before = site.unit()
    site.configure(host={"servers": {"fresh": {**new, "args": {"lab-fail": "die:weights"}}}})
    failed = site.run("deploy")
    report = failed.server("gpu1", "fresh")
    assert (failed.code, report["serving"]["release"]) == (Exit.ROLLED_BACK, f"unit {UNIT}"), str(failed)[-3000:]
    assert site.unit() == before
    again = json.loads(site.run("status", "--server", "demo").stdout)["status"]["hosts"]["gpu1"]["servers"]["demo"]
    assert (again["state"], again["release"], again["unlisted"]) == ("serving", old["release"], True)

    site.configure(host={"servers": {"fresh": new}})
    done = site.deploy().server("gpu1", "fresh")
    assert site.show("MainPID", "lamplighter-fresh.service") == str(done["serving"]["pid"])
    assert site.systemctl("is-enabled", "lamplighter-fresh.service") == "enabled"
    assert site.node.sh("ls /etc/systemd/system | grep lamplighter") == "lamplighter-fresh.service\n"
    gone = json.loads(site.run("status", "--server", "demo").stdout)["status"]["hosts"]["gpu1"]["servers"]["demo"]
    assert (gone["state"], f"run {done['run']} (deploy, " in gone["message"]) == ("stopped", True), gone


def test_a_bad_release_leaves_the_old_unit_exactly_as_it_was(site: Site) -> None:
    site.deploy()
    site.node.write(f"{FILE}.d/memory.conf", "[Service]\nMemoryLow=1M\n")
    site.node.sh(f"echo '# a hand was here' >>{FILE}; systemctl daemon-reload")
    before = site.unit()
    good = site.status()["release"]

    site.configure(args={"lab-fail": "die:graphs"})
    failed = site.run("deploy")
    assert failed.code == Exit.ROLLED_BACK, failed
    assert failed.server("gpu1", "demo")["serving"]["release"] == good
    warnings = " ".join(event["message"] for event in failed.events if event["event"] == "warning")
    assert "the unit file is not as lamplighter wrote it" in warnings
    assert "a hand was here" in warnings
    assert site.unit() == before
    assert site.serves()
    assert site.status()["state"] == "serving"

    # and so does a reboot in the middle of a deploy: what was not committed is forgotten
    site.configure(args={"lab-fail": "hang:weights"})
    with site.driver.started("deploy", "--json", "--host", "gpu1") as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event.get("event") == "stage_start" and event["stage"] == "ready":
                break
        assert site.unit() == before
        (launch,) = site.systemctl("list-units", "--plain", "--no-legend", "lamplighter-demo:*").split()[:1]
        assert "system.control" in site.show("FragmentPath", launch)
        assert site.show("Restart", launch) == "no"
        assert f"{FILE}.d/memory.conf" in site.node.sh(f"readlink -f {site.show('DropInPaths', launch)}")
        site.node.reboot()
    eventually(site.serves)
    assert site.unit() == before
    now = site.status()
    assert (now["state"], now["release"]) == ("serving", good)
    assert "when the node booted" in now["message"]


def test_stop_start_and_the_change_to_another_launcher(site: Site) -> None:
    site.deploy()
    stopped = site.run("stop")
    assert stopped.code == Exit.OK, stopped
    assert site.show("ActiveState") in ("inactive", "failed")
    assert site.run("stop").code == Exit.OK
    started = site.run("start")
    assert started.code == Exit.OK, started
    assert site.show("ActiveState") == "active"
    assert site.serves()

    site.configure(launcher="detached")
    changed = site.deploy().server("gpu1", "demo")
    assert site.serves()
    assert site.systemctl("is-enabled", UNIT, check=False) in ("", "not-found")
    assert f"{changed['serving']['pid']}" != site.show("MainPID")
    cgroup = site.node.read(f"/proc/{changed['serving']['pid']}/cgroup")
    assert "lamplighter-demo-" in cgroup
    assert ".scope" in cgroup
    site.configure()
    site.deploy()
    assert site.show("ActiveState") == "active"


def test_a_first_release_that_fails_leaves_no_unit(site: Site) -> None:
    site.configure(args={"lab-fail": "die:graphs"})
    done = site.run("deploy")
    assert done.code == Exit.CRASHED, done
    report = done.server("gpu1", "demo")
    assert report["phase"] == "graphs"
    assert "rank 1 failed first, in phase graphs" in report["message"]
    assert site.show("LoadState") == "not-found"
    assert site.status()["state"] == "stopped"


def test_paths_that_systemd_reads_otherwise(site: Site) -> None:
    for root in (f"/srv/{NASTY}", f"/srv/{NASTY}\nx"):
        site.configure(host={"root": root})
        done = site.deploy()
        pid = done.server("gpu1", "demo")["serving"]["pid"]
        run = f"{root}/servers/demo/runs/{done.report['hosts']['gpu1']['servers']['demo']['run']}"
        assert "fired up" in site.node.read(f"{run}/server.log")
        assert f"{pid}.json" in site.node.exec(["ls", f"{run}/envproof"]).stdout
        assert site.show("MainPID") == str(pid)
        site.systemctl("stop", UNIT)
        assert json.loads(site.node.read(f"{run}/exit.json"))["result"]


def test_an_ordinary_user_with_lingering(park: NodePark, make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node(systemd=True)
    site = site_of(park, node, tmp_path, user="ops")
    site.configure(launcher="systemd")
    refused = site.run("deploy")
    assert refused.code == Exit.REFUSED, refused
    assert "enable-linger" in refused.server("gpu1", "demo")["hint"]
    site.configure()
    checked = json.loads(site.run("check").stdout)["check"]["hosts"]["gpu1"]["servers"]["demo"]["findings"]
    assert {"remove_ipc"} <= {finding["id"] for finding in checked if finding["level"] == "warning"}

    node.exec(["loginctl", "enable-linger", "ops"])
    eventually(lambda: node.sh("ls /run/user/1001/systemd/private 2>/dev/null; true"))
    first = site.deploy().server("gpu1", "demo")["serving"]
    assert site.show("MainPID") == str(first["pid"])
    assert "user@1001.service" in node.read(f"/proc/{first['pid']}/cgroup")
    assert node.sh(f"stat -c %U /proc/{first['pid']}").strip() == "ops"
    second = site.deploy().server("gpu1", "demo")
    assert second["downtime_seconds"] > 0
    node.reboot()
    eventually(site.serves)
    assert site.status()["state"] == "serving"


FOREIGN = """[Service]
ExecStart=/usr/local/bin/lamplighter-demo-server --model-path demo-model --port {port} --tp 2 --lab-speed 30
Restart=always
RestartSec=0.2
[Install]
WantedBy=multi-user.target
"""


def test_a_foreign_unit_is_stopped_before_its_process(site: Site) -> None:
    site.node.write("/etc/systemd/system/llm.service", FOREIGN.format(port=PORT))
    site.systemctl("enable", "--now", "llm.service")
    eventually(site.serves)
    checked = json.loads(site.run("check").stdout)["check"]["hosts"]["gpu1"]["servers"]["demo"]["findings"]
    finding = next(finding for finding in checked if finding["id"] == "restarter")
    assert "llm.service" in finding["message"]
    assert "next boot" in finding["message"]

    site.configure(args={"lab-fail": "die:graphs"})
    failed = site.run("deploy")
    assert failed.code == Exit.ROLLED_BACK, str(failed)[-3000:]
    assert failed.server("gpu1", "demo")["serving"]["release"] == "unit llm.service"
    assert site.serves()
    assert site.show("ActiveState", "llm.service") == "active"
    assert site.show("LoadState") == "not-found"

    site.configure()
    site.deploy()
    assert site.show("ActiveState", "llm.service") in ("inactive", "failed")
    assert site.show("ActiveState") == "active"


def test_a_unit_whose_daemon_may_start_the_server_again_is_refused_until_it_is_listed(site: Site) -> None:
    """Of a program that nobody knows it cannot be told: it is named, and nothing is touched."""
    script = "import subprocess, time; subprocess.Popen({words}); time.sleep(10000)"
    words = ["lamplighter-demo-server", "--model-path", "demo-model", "--port", str(PORT), "--lab-speed", "30"]
    site.node.write("/usr/local/bin/daemon.py", script.format(words=words))
    site.node.write(
        "/etc/systemd/system/notebook.service",
        "[Service]\nEnvironment=PATH=/usr/local/bin:/usr/bin\nExecStart=/usr/bin/python3 /usr/local/bin/daemon.py\n",
    )
    site.systemctl("start", "notebook.service")
    eventually(site.serves)
    daemon = site.show("MainPID", "notebook.service")
    for verb in ("deploy", "stop"):
        refused = site.run(verb)
        assert refused.code == Exit.REFUSED, refused
        report = refused.server("gpu1", "demo")
        assert report["cause"] == "restarter"
        assert "unit notebook.service" in report["evidence"]
        assert "none of ours to stop" in report["evidence"]
        assert "list notebook in stale.kill" in report["hint"]
        assert "which lamplighter does not keep, serves as before" in report["message"]
        assert report["serving"]["port"] == PORT
        assert site.serves()
    assert site.show("MainPID", "notebook.service") == daemon
    site.configure(stale={"kill": ["notebook"]})
    site.deploy()
    assert site.show("ActiveState", "notebook.service") in ("inactive", "failed")
    assert site.status()["state"] == "serving"


def test_a_logout_that_would_kill_the_server_is_refused_and_with_lingering_survived(
    park: NodePark, make_node: MakeNode, tmp_path: Path
) -> None:
    node = make_node(systemd=True)
    site = site_of(park, node, tmp_path, user="ops")
    node.write("/etc/systemd/logind.conf.d/kill.conf", "[Login]\nKillUserProcesses=yes\n")
    node.exec(["systemctl", "restart", "systemd-logind"])
    for kind in ("auto", "detached"):
        site.configure(launcher=kind)
        refused = site.run("deploy")
        assert refused.code == Exit.REFUSED, refused
        report = refused.server("gpu1", "demo")
        assert report["cause"] == "logout_kills", report
        assert "KillUserProcesses=yes" in report["evidence"]
        assert "loginctl enable-linger" in report["hint"]
        assert not site.serves()

    node.exec(["loginctl", "enable-linger", "ops"])
    eventually(lambda: node.sh("ls /run/user/1001/systemd/private 2>/dev/null; true"))
    site.deploy()  # detached still: in a scope of its own
    eventually(lambda: "ops" not in node.exec(["loginctl", "list-sessions", "--no-legend"]).stdout)
    assert site.serves()
