"""The unit as text, and what is read from systemd: what needs no systemd. The rest is tested on real nodes."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from lamplighter.node.keeper import launched, launcher, systemd
from lamplighter.node.keeper.launched import ExitStatus, LaunchFailed, Order
from lamplighter.node.keeper.systemd import Manager
from lamplighter.node.layout import ServerHome
from lamplighter.node.system import processes
from tests.node.living import PROJECT

TEMPLATE = (PROJECT / "tests" / "unit" / "golden" / "kimi-server.service").read_text()


def order_in(home: ServerHome, template: str = TEMPLATE) -> Order:
    run = home.run("20260101T000000Z-abcdef")
    release = home.release("0123456789ab")
    os.makedirs(release.path, exist_ok=True)
    os.makedirs(run.path, exist_ok=True)
    Path(release.unit).write_text(template)
    return Order("kimi", release, run.launch("new"), run.records, "/runner", run.run_id, "TERM", 30.0)


def setting(text: str, name: str) -> str:
    """The one line that sets ``name``."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name}=")]
    return line.partition("=")[2]


@pytest.fixture
def home(tmp_path: Path) -> ServerHome:
    return ServerHome(str(tmp_path / "root" / "servers" / "kimi"))


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    """Our own manager, its directories below tmp_path, its systemctl never called."""
    monkeypatch.setattr(Manager, "directory", str(tmp_path / "etc"))
    monkeypatch.setattr(Manager, "runtime_directory", str(tmp_path / "run"))
    (tmp_path / "etc").mkdir()
    return systemd.our_manager()


# ---------------------------------------------------------------------------------------------------------- its text


def test_every_place_is_filled_in_and_comments_stay(home: ServerHome) -> None:
    order = order_in(home)
    text = systemd.unit_text(order, home, Manager(None), "no")
    assert "@" not in "".join(line for line in text.splitlines() if not line.startswith("#"))
    assert "Words between @ are filled in" in text
    assert setting(text, "Restart") == "no"
    assert setting(text, "WantedBy") == "multi-user.target"
    assert setting(systemd.unit_text(order, home, Manager(1001), "no"), "WantedBy") == "default.target"
    assert setting(text, "KillSignal") == "SIGTERM"
    assert setting(text, "KillMode") == "control-group"
    assert float(setting(text, "TimeoutStopSec")) > 30
    assert setting(text, "StandardOutput") == f"append:{order.launch.log}"
    assert setting(text, "WorkingDirectory") == order.release.path
    words = shlex.split(setting(text, "ExecStart"))
    assert words[:2] == ["/usr/bin/env", "-i"]
    assert f"LAMPLIGHTER_RECORDS={order.records}" in words
    assert words[-2:] == ["/bin/sh", order.release.launch_script]


def test_a_place_that_nobody_knows_is_an_error(home: ServerHome) -> None:
    with pytest.raises(LaunchFailed, match="nothing is known of @MODEL@"):
        systemd.unit_text(order_in(home, "[Service]\nExecStart=@MODEL@\n"), home, Manager(None), "no")


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("/a b", '"/a b"'),
        ("100%", '"100%%"'),
        ("$HOME ${x}", '"$$HOME $${x}"'),
        ("a\"b'c\\d", '"a\\"b\'c\\\\d"'),
        ("a\nb", '"a\\x0ab"'),
        ("é", '"\\xc3\\xa9"'),
        ("\udcff", '"\\xff"'),
        (";", '";"'),
    ],
)
def test_words_of_exec_lines(word: str, quoted: str) -> None:
    assert systemd.quote(word) == quoted


def test_a_percent_in_a_path_is_no_specifier(tmp_path: Path) -> None:
    home = ServerHome(str(tmp_path / "50%h" / "servers" / "kimi"))
    text = systemd.unit_text(order_in(home), home, Manager(None), "no")
    assert "/50%%h/" in setting(text, "StandardOutput")
    assert "/50%%h/" in setting(text, "WorkingDirectory")


def test_a_path_that_no_unit_can_hold_goes_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = ServerHome(str(tmp_path / "a\nb" / "servers" / "kimi"))
    links = tmp_path / "links"
    monkeypatch.setattr(systemd, "links_directory", lambda: str(links))
    text = systemd.unit_text(order_in(home), home, Manager(None), "no")
    log = setting(text, "StandardOutput").partition(":")[2]
    assert log.startswith(f"{links}/")
    assert os.path.realpath(os.path.dirname(log)) == os.path.realpath(home.run("20260101T000000Z-abcdef").path)
    assert len(os.listdir(links)) == 1
    systemd.unit_text(order_in(home), home, Manager(None), "no")
    assert len(os.listdir(links)) == 1


# ----------------------------------------------------------------------------------------------------------- its names


def test_a_launch_has_its_own_name_until_its_file_is_gone(manager: Manager) -> None:
    lasting = systemd.unit_for("a.b-c")
    launch = systemd.unit_of_launch(lasting, "20260101T000000Z-abcdef", "new")
    assert launch.name == "lamplighter-a.b-c:20260101T000000Z-abcdef:new.service"
    assert systemd.known_as(launch) == lasting
    Path(manager.runtime_directory).mkdir()
    file = Path(manager.runtime_directory) / launch.name
    for make in (lambda: file.write_text(""), lambda: file.symlink_to("/nonexistent")):
        make()
        assert systemd.known_as(launch) == launch
        file.unlink()
    for other in ("lamplighter-x.service", "other:1.service", "a.scope"):
        assert systemd.known_as(processes.Unit(other, None)) == processes.Unit(other, None)


def test_a_launch_has_the_settings_of_the_lasting_unit_and_of_no_other(
    home: ServerHome, manager: Manager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of one name the place counts that would for the lasting unit; what holds for all of ours, holds anyway."""
    strong, weak = tmp_path / "strong", tmp_path / "weak"
    monkeypatch.setattr(Manager, "drop_in_bases", (str(strong), str(weak)))
    monkeypatch.setattr(Manager, "call", lambda *_: systemd.Answer(False, "", "no"))
    monkeypatch.setattr(Manager, "do", lambda *_: None)
    for place, names in {
        strong / "lamplighter-kimi.service.d": ["a.conf", systemd.HOLD, "readme.txt"],
        weak / "lamplighter-kimi.service.d": ["a.conf", "b.conf", "c.conf"],
        strong / "lamplighter-.service.d": ["b.conf"],
        weak / "lamplighter-other.service.d": ["d.conf"],
    }.items():
        place.mkdir(parents=True)
        for name in names:
            (place / name).write_text("")
    order = dataclasses.replace(order_in(home), gate="/gate")
    with pytest.raises(LaunchFailed, match="did not start"):
        systemd.launch(order, home)
    (_, launch) = systemd.units(home)
    file = Path(manager.runtime_directory) / launch.name
    assert "LAMPLIGHTER_GATE=/gate" in setting(file.read_text(), "ExecStart")
    links = {each.name: os.readlink(each) for each in Path(f"{file}.d").iterdir()}
    kimi = "lamplighter-kimi.service.d"
    assert links == {"a.conf": str(strong / kimi / "a.conf"), "c.conf": str(weak / kimi / "c.conf")}
    assert systemd.units(home, launch) == [systemd.unit_for("kimi")]
    assert systemd.names(home, launch) == {systemd.unit_for("kimi")}


# ------------------------------------------------------------------------------------------------------ by other hands


def test_an_edit_by_hand_is_noticed(home: ServerHome, manager: Manager) -> None:
    os.makedirs(home.path)
    assert systemd.edited_by_hand(home) is None
    unit = systemd.unit_for("kimi")
    path = Path(manager.directory) / unit.name
    path.write_text("[Service]\nNice=1\n")
    assert "nothing is known here of who made it" in (systemd.edited_by_hand(home) or "")
    known = {"unit": unit.name, "manager_uid": unit.manager_uid, "text": "[Service]\nNice=1\n"}
    Path(home.unit).write_text(json.dumps(known))
    assert systemd.edited_by_hand(home) is None
    path.write_text("[Service]\nNice=2\n")
    assert systemd.edited_by_hand(home) == f"{unit.name}: -Nice=1; +Nice=2"

    # a commit that was killed, before and after it had written the file
    coming = {"text": "[Service]\nNice=3\n", "release": "new", "run": "r", "attempt": "new"}
    Path(home.unit).write_text(json.dumps({**known, "release": "old", "run": "q", "attempt": "new", "next": coming}))
    path.write_text("[Service]\nNice=1\n")
    assert (systemd.committed(home) or {})["release"] == "old"
    path.write_text(coming["text"])
    assert (systemd.committed(home) or {})["release"] == "new"
    assert systemd.edited_by_hand(home) is None


# ----------------------------------------------------------------------------------------------------------- its end


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"result": "success", "code": "exited", "status": "0"}, ExitStatus(0, None)),
        ({"result": "exit-code", "code": "exited", "status": "139"}, ExitStatus(139, None)),
        ({"result": "signal", "code": "killed", "status": "KILL"}, ExitStatus(None, signal.SIGKILL)),
        ({"result": "core-dump", "code": "dumped", "status": "SEGV"}, ExitStatus(None, signal.SIGSEGV)),
        ({"result": "resources", "code": "", "status": ""}, ExitStatus(None, None)),
        ({"code": 3, "signal": None, "t": 1.0}, ExitStatus(3, None)),
        ({"code": None, "signal": 9, "t": 1.0}, ExitStatus(None, 9)),
    ],
)
def test_both_kinds_of_exit_records(home: ServerHome, record: dict[str, object], expected: ExitStatus) -> None:
    files = order_in(home).launch
    Path(files.exit).write_text(json.dumps(record))
    assert launched.read_exit(files) == expected


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "why_not", lambda: None)
    assert [launcher.choose(word).kind for word in ("auto", "systemd", "detached")] == [
        "systemd",
        "systemd",
        "detached",
    ]
    obstacle = systemd.Obstacle("PID 1 is something else", "do not")
    monkeypatch.setattr(systemd, "why_not", lambda: obstacle)
    assert launcher.choose("auto") == launcher.Choice("detached", "PID 1 is something else")
    assert launcher.choose("systemd").obstacle == obstacle
    assert launcher.choose("detached").obstacle is None


# ------------------------------------------------------------------------------------- what would end a server unasked

SESSION = "0::/user.slice/user-1001.slice/session-3.scope\n"
NIGHT = "0::/user.slice/user-1001.slice/user@1001.service/app.slice/night.service\n"
NO = {"KillUserProcesses": "b false"}
YES = {"KillUserProcesses": "b true", "KillExcludeUsers": 'as 1 "root"', "KillOnlyUsers": "as 0"}


@pytest.mark.parametrize(
    ("cgroup", "said", "mode", "expected"),
    [
        (SESSION, YES, "", ["logout_kills"]),
        (SESSION, {**YES, "KillUserProcesses": "yes"}, "", ["logout_kills"]),  # as the file has it
        (SESSION, {**YES, "KillUserProcesses": "b false"}, "", []),
        (SESSION, {**YES, "KillExcludeUsers": 'as 2 "root" "1001"'}, "", []),
        (SESSION, {**YES, "KillOnlyUsers": 'as 1 "guest"'}, "", []),
        (SESSION, {**YES, "KillOnlyUsers": 'as 1 "1001"'}, "", ["logout_kills"]),
        (SESSION.replace("1001", "0"), YES, "", []),
        (SESSION.replace("1001", "0"), {**YES, "KillExcludeUsers": "as 0"}, "", ["logout_kills"]),
        (SESSION, {}, "", ["logout_unknown"]),
        ("0::/system.slice/lamplighter-run-x.scope\n", YES, "", []),
        ("0::/system.slice/ssh.service\n", YES, "process", []),
        ("0::/system.slice/system-ssh.slice/ssh@3.service\n", YES, "control-group", ["unit_kills"]),
        (NIGHT, YES, "mixed", ["manager_ends", "unit_kills"]),
        (NIGHT.replace("night.service", "tmux-spawn-7.scope"), NO, "", ["manager_ends"]),
        (SESSION, {**NO, "RuntimeMaxUSec": "1h"}, "", ["login_expires"]),
        (SESSION, {**NO, "RuntimeMaxUSec": "infinity"}, "", []),
    ],
)
def test_what_ends_a_server_that_stays_where_we_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cgroup: str, said: dict[str, str], mode: str, expected: list[str]
) -> None:
    me = processes.read_process(os.getpid())
    assert me is not None
    monkeypatch.setattr(systemd, "RUNNING", str(tmp_path))
    monkeypatch.setattr(systemd, "logind", said.get)
    monkeypatch.setattr(systemd, "scope", lambda unit: [])
    shown = {"KillMode": mode, "RuntimeMaxUSec": said.get("RuntimeMaxUSec", "")}
    monkeypatch.setattr(Manager, "show", lambda *_: shown)
    monkeypatch.setattr(systemd, "LINGER", str(tmp_path))
    monkeypatch.setattr(processes, "user_name", lambda uid: {0: "root"}.get(uid, str(uid)))
    monkeypatch.setattr(processes, "read_process", lambda pid: dataclasses.replace(me, cgroup=cgroup))
    found = systemd.dangers(is_unit=False)
    assert [danger.id for danger in found] == expected
    assert all(danger.hint for danger in found)
    unsure = {"logout_unknown", "manager_ends"}
    assert [danger.id for danger in found if danger.is_sure] == [each for each in expected if each not in unsure]
    assert systemd.dangers(is_unit=True) == []
    monkeypatch.setattr(systemd, "scope", lambda unit: ["systemd-run"])
    assert systemd.dangers(is_unit=False) == []


@pytest.mark.parametrize(
    ("directory", "text", "expected"),
    [
        ("{unit}.d", "[Service]\nRuntimeMaxSec=8h\n", [("unit_dies", True)]),
        ("service.d", "[Service]\n  RuntimeMaxSec = 3600\n", [("unit_dies", True)]),
        ("lamplighter-.service.d", "[Unit]\nStopWhenUnneeded=yes\n", [("unit_dies", True)]),
        ("{unit}.d", "[Unit]\nRefuseManualStart=true\n", [("unit_dies", True)]),
        ("{unit}.d", "[Unit]\nBindsTo=vpn.service\n", [("unit_tied", False)]),
        ("{unit}.d", "[Unit]\nPartOf=nvidia-dcgm.service\n", [("unit_tied", False)]),
        ("{unit}.d", "[Unit]\nRequisite=data.mount\n", [("unit_tied", False)]),
        ("{unit}.d", "[Service]\nRuntimeMaxSec=infinity\n[Unit]\nStopWhenUnneeded=no\nPartOf=\n", []),
        ("{unit}.d", "#RuntimeMaxSec=5\n[Service]\nRuntimeMaxSec=5\nRuntimeMaxSec=\n", []),
        ("{unit}.d", "[Service]\nCPUWeight=50\n", []),
        ("other.service.d", "[Service]\nRuntimeMaxSec=5\n", []),
    ],
)
def test_settings_beside_the_unit_that_end_the_server_are_told(
    home: ServerHome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: str, text: str,
    expected: list[tuple[str, bool]],
) -> None:  # fmt: skip
    weak, strong = tmp_path / "lib", tmp_path / "etc"
    monkeypatch.setattr(Manager, "drop_in_bases", (str(strong), str(weak)))
    place = weak / directory.format(unit=systemd.unit_for(home.name).name)
    place.mkdir(parents=True)
    (place / "50-limits.conf").write_text(text)
    found = systemd.dangers_of_drop_ins(home)
    assert [(danger.id, danger.is_sure) for danger in found] == expected
    assert all(str(place / "50-limits.conf") in danger.evidence + danger.hint for danger in found)
    over = strong / place.name  # of one name, the first place counts
    over.mkdir(parents=True)
    (over / "50-limits.conf").symlink_to(os.devnull)
    assert systemd.dangers_of_drop_ins(home) == []
