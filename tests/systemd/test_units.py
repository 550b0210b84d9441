"""The units of one server: the lasting one, those of launches beside it, and how a launch becomes the lasting one."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.driver import eventually
from tests.nodes.park import Node

UNIT = "lamplighter-x.service"
ROOT = "/var/tmp/pilot"
PILOT = str(Path(__file__).with_name("pilot.py"))


@dataclass(frozen=True)
class Site:
    """A node on which ``user`` calls the launcher step by step."""

    node: Node
    user: str

    @property
    def directory(self) -> str:
        return "/etc/systemd/system" if self.user == "root" else "/home/ops/.config/systemd/user"

    @property
    def runtime(self) -> str:
        return "/run/systemd/system.control" if self.user == "root" else "/run/user/1001/systemd/user.control"

    def exec(self, *words: str, check: bool = True) -> str:
        env = {} if self.user == "root" else {"XDG_RUNTIME_DIR": "/run/user/1001"}
        return self.node.exec(words, user=self.user, env=env, check=check).stdout.strip()

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.exec("systemctl", *(["--user"] if self.user != "root" else []), *words, check=check)

    def show(self, name: str, unit: str = UNIT) -> str:
        return self.systemctl("show", "--value", f"--property={name}", unit)

    def do(self, *words: str) -> Any:
        return json.loads(self.exec(sys.executable, PILOT, ROOT, *words))

    def main(self, unit: str = UNIT) -> int:
        return int(self.show("MainPID", unit))

    def files(self) -> list[str]:
        """All that lies where units are, of this server, but for what makes a boot start it."""
        places = f"{self.directory} {self.directory}.control {self.runtime}"
        found = self.node.sh(f"find {places} -mindepth 1 -path '*lamplighter-x*' 2>/dev/null; true").split()
        return sorted(path for path in found if ".wants/" not in path)

    def environment(self, pid: int) -> str:
        return self.node.sh(f"tr '\\0' '\\n' </proc/{pid}/environ")

    def sleepers(self) -> list[str]:
        return sorted(words for words in self.node.processes().values() if words.startswith("sleep 100"))


def launch_name(number: int) -> str:
    return f"lamplighter-x:20260101T00000{number}Z-abcdef:new.service"


@pytest.fixture(params=["root", "ops"])
def site(request: pytest.FixtureRequest, systemd_node: Node) -> Site:
    site = Site(systemd_node, request.param)
    await_manager(site)
    return site


def await_manager(site: Site) -> None:
    if site.user != "root":
        site.node.exec(["loginctl", "enable-linger", site.user])
        eventually(lambda: site.node.sh("ls /run/user/1001/systemd/private 2>/dev/null; true"))


def test_a_launch_beside_the_old_server_becomes_the_lasting_unit(site: Site) -> None:
    site.exec("mkdir", "-p", f"{site.directory}/{UNIT}.d")
    site.exec("sh", "-c", f"printf '[Service]\\nNice=3\\n' >{site.directory}/{UNIT}.d/night.conf")
    site.do("launch", "1")
    assert site.do("commit", "1") == ""
    # as a version left it that knew no other name
    site.systemctl("restart", UNIT)
    record = f"{ROOT}/servers/x/unit.json"
    kept = {
        name: each for name, each in json.loads(site.exec("cat", record)).items() if name not in ("launches", "next")
    }
    site.exec("sh", "-c", 'printf %s "$1" >"$2"', "sh", json.dumps(kept), record)
    site.systemctl("set-property", UNIT, "CPUWeight=50")
    old, new = site.main(), launch_name(2)

    gate = f"{ROOT}/gate"
    waiting = site.do("launch", "2", gate)
    assert (site.main(), site.main(new)) == (old, waiting)
    assert (site.show("Nice", new), site.show("CPUWeight", new), site.show("Restart", new)) == ("3", "50", "no")
    assert site.node.sh(f"ps -o ni= {waiting}").strip() == "3"
    assert f"LAMPLIGHTER_GATE={gate}" in site.environment(waiting)
    told = site.do("look", "2", "2")
    assert (told["ours"], told["members"], told["committed"]) == ([old], [waiting], "release1")
    assert sorted(site.do("look")["ours"]) == sorted([old, waiting])

    assert site.do("stop", "2")
    assert (site.main(), site.main(new), site.show("ActiveState")) == (0, waiting, "inactive")
    assert site.do("commit", "2") == ""
    assert site.main() == waiting
    assert site.show("Names") == UNIT
    assert (site.show("Restart"), site.show("UnitFileState")) == ("on-failure", "enabled")
    assert sorted(map(Path, site.show("DropInPaths").split())) == sorted(
        Path(f"{site.directory}{place}/{UNIT}.d/{name}")
        for place, name in (("", "night.conf"), (".control", "50-CPUWeight.conf"))
    )
    assert not [path for path in site.files() if path.startswith("/run")]
    assert (site.show("LoadState", new), site.systemctl("list-units", "--failed", "--no-legend")) == ("not-found", "")
    told = site.do("look", "2")
    assert (told["ours"], told["main"], told["members"]) == ([waiting], waiting, [waiting])
    assert (told["committed"], told["units"], told["edited"]) == ("release2", [UNIT], None)

    site.node.exec(["kill", "-9", str(waiting)])
    eventually(lambda: site.main() not in (0, waiting))
    again = site.main()
    assert "LAMPLIGHTER_GATE" not in site.environment(again)
    told = site.do("look", "2")
    assert (told["ours"], told["main"], told["members"]) == ([again], again, [again])
    site.systemctl("restart", UNIT)
    assert site.main() not in (0, again)
    site.systemctl("disable", UNIT)
    assert site.systemctl("is-enabled", UNIT, check=False) == "disabled"
    site.systemctl("enable", UNIT)

    # a reboot between a launch and its commit
    site.do("launch", "3")
    eventually(lambda: site.sleepers() == ["sleep 1002", "sleep 1003"])
    site.node.reboot()
    await_manager(site)
    eventually(lambda: site.sleepers() == ["sleep 1002"])
    site.do("clear")
    told = site.do("look", "2")
    assert (told["ours"], told["committed"], told["units"]) == ([site.main()], "release2", [UNIT])

    site.systemctl("stop", UNIT)
    site.do("forget")
    assert [path for path in site.files() if path.endswith(".service")] == []
    assert f"{site.directory}/{UNIT}.d/night.conf" in site.files()
    assert site.show("LoadState") == "not-found"


@pytest.fixture
def root_site(systemd_node: Node) -> Site:
    return Site(systemd_node, "root")


def test_of_a_launch_that_does_not_come_to_serve_nothing_is_left(root_site: Site) -> None:
    site = root_site
    old = site.do("launch", "1")
    site.do("commit", "1")
    before = site.files()
    site.do("launch", "2")
    assert site.do("withdraw", "2")
    assert (site.files(), site.sleepers(), site.main()) == (before, ["sleep 1001"], old)

    # its run was killed, and what waited has ended by itself
    pid = site.do("launch", "3")
    site.node.exec(["kill", str(pid)])
    eventually(lambda: site.main(launch_name(3)) == 0)
    site.do("clear")
    assert (site.files(), site.sleepers(), site.main()) == (before, ["sleep 1001"], old)
    assert site.do("look")["units"] == [UNIT]

    # somebody starts the old one again, before the new one is committed
    new = site.do("launch", "4")
    site.do("stop", "4")
    site.systemctl("start", UNIT)
    assert "it was started again" in site.do("commit", "4")
    eventually(lambda: site.sleepers() == ["sleep 1001", "sleep 1004"])
    assert (site.main(), site.do("look")["committed"]) != (new, "release4")
    assert site.do("stop")
    assert (site.files(), site.sleepers()) == (before, [])


#: Before which steps of a commit it is killed: where it changes a name in /run, loads that, or has written the file.
STEPS = (7, 12, 14, 17, 99)


def test_a_commit_that_is_killed_leaves_one_of_the_two_and_the_next_run_finds_it(root_site: Site) -> None:
    site = root_site
    site.do("launch", "1")
    site.do("commit", "1")
    killed = ""
    for step in STEPS:
        number = str(2 + STEPS.index(step) % 2)
        pid = site.do("launch", number)
        site.do("stop", number)
        killed = site.do("commit_until", number, str(step))
        told = site.do("look", number)
        assert (told["main"], told["members"], told["ours"]) == (pid, [pid], [pid]), (killed, told)
        assert told["edited"] is None
        text = site.exec("cat", f"{site.directory}/{UNIT}")
        assert f"/{told['committed']}/launch.sh" in text, killed
        site.do("clear")
        told = site.do("look", number)
        assert (told["main"], told["members"], told["ours"]) == (pid, [pid], [pid]), (killed, told)
        left = [Path(path).name for path in site.files() if path.startswith("/run")]
        assert left in ([], [launch_name(int(number))]), killed
        assert site.do("stop")
        assert site.sleepers() == []
        site.systemctl("start", UNIT)
    assert killed == ""
