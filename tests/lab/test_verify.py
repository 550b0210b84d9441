"""verify against a node in a box: states of its GPUs and files are found, told with evidence, and judged."""

from __future__ import annotations

import json
import os
import signal
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab import control
from lamplighter.errors import ContactLost, Unreachable
from lamplighter.inventory import load_inventory
from lamplighter.node.events import Exit
from lamplighter.run import shell as shells
from lamplighter.run.host_session import HostSession, open_session
from lamplighter.run.shell import Shell, TooMuchOutput
from lamplighter.run.verify import verify
from lamplighter.ssh.connection import CommandTimedOut
from tests.driver import PROJECT, eventually
from tests.lab.conftest import Box


@contextmanager
def session(box: Box) -> Iterator[HostSession]:
    with open_session(load_inventory(box.driver.inventory, PROJECT / "roles").host("box"), PROJECT) as opened:
        yield opened


def outcomes(opened: HostSession, box: Box, only: str = "") -> dict[str, dict[str, Any]]:
    found = verify(opened, opened.host.servers["demo"], box.driver.inventory, only)["checks"]
    return {check["name"]: check for check in found}


def bad(found: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, check in found.items() if check["outcome"] in ("failed", "error")}


def test_states_of_the_node_are_found_by_the_check_they_belong_to(box: Box) -> None:
    assert box.deploy().code == Exit.OK
    node = box.directory / "box"
    with session(box) as opened:
        assert bad(outcomes(opened, box)) == set()

        states: list[tuple[dict[str, object], str, str]] = [
            ({"fields": {"1": {"gpu_recovery_action": "Reboot"}}}, "gpus_need_no_recovery", "GPU 1 wants Reboot"),
            ({"fields": {"0": {"remapped_rows.pending": "Yes"}}}, "no_remapped_rows", "GPU 0"),
            ({"fields": {"0": {"ecc.errors.uncorrected.volatile.total": "2"}}}, "no_uncorrected_memory_errors", "2"),
            ({"fields": {"*": {"fabric.state": "In Progress"}}}, "fabric_is_ready", "In Progress"),
            ({"missing": ["1"]}, "gpus_are_all_there", "is gone"),
            (
                {"extra": ["Unable to determine the device handle: Unknown Error"]},
                "gpus_are_all_there",
                "Unknown Error",
            ),
            ({"rc": 18, "stdout": "Driver/library version mismatch\n"}, "driver_is_whole", "mismatch"),
        ]
        for state, check, words in states:
            control.inject(node, **state)
            found = outcomes(opened, box, "gpu or driver or remapped or errors or fabric")
            assert check in bad(found), (state, found)
            assert words in found[check]["evidence"]
            control.clear(node)
        control.inject(node, fields={"1": {"clocks_event_reasons.active": "0x8", "persistence_mode": "Disabled"}})
        found = outcomes(opened, box, "clocks or persistence")
        assert {check["outcome"] for check in found.values()} == {"warning"}
        control.clear(node)
        with control.stranger(node, 2000) as stranger:
            found = outcomes(opened, box, "foreign")
            assert f"pid {stranger.pid} (" in found["no_foreign_holder"]["evidence"]
        assert bad(outcomes(opened, box)) == set()


@pytest.mark.parametrize("teardown", ["no-data", "empty"])
def test_memory_that_outlives_its_process_for_a_moment_is_nobodys_fault(box: Box, teardown: str) -> None:
    assert box.deploy().code == Exit.OK
    node = box.directory / "box"
    with session(box) as opened:
        control.inject(node, teardown=teardown, release=1.5)
        with control.stranger(node, 2000, gpu=1):
            pass
        found = outcomes(opened, box, "accounted or foreign")
        assert set(found) == {"gpu_memory_is_accounted_for", "no_foreign_holder"}
        assert bad(found) == set()

    control.inject(node, teardown="no-data", release=3600)
    with control.stranger(node, 2000, gpu=1):
        pass
    with session(box) as opened:
        found = outcomes(opened, box, "accounted or foreign")
    assert bad(found) == {"gpu_memory_is_accounted_for"}
    assert "is listed but does not exist" in found["gpu_memory_is_accounted_for"]["evidence"]


def test_files_and_processes_of_the_server_are_checked(box: Box) -> None:
    assert box.deploy().code == Exit.OK
    (box.state / "current" / "env").chmod(0o644)
    (box.home / ".nccl.conf").write_text("NCCL_PROTO=Simple\n")
    records = next((box.state / "runs").glob("*/envproof"))
    next(records.glob("*.json"))
    for record in records.glob("*.json"):
        record.unlink()
    done = box.run("verify", "--json")
    assert done.code == Exit.DEGRADED, done
    checks = json.loads(done.stdout)["verify"]["hosts"]["box"]["servers"]["demo"]["checks"]
    found = {check["name"]: check for check in checks}
    assert bad(found) == {"environment_file_is_private", "sitecustomize_is_in_force"}
    assert "none has run" in found["sitecustomize_is_in_force"]["evidence"]
    assert found["nccl_takes_nothing_from_files"]["outcome"] == "warning"

    box.run("stop")
    with session(box) as opened:
        found = outcomes(opened, box)
    assert {"process_is_alive", "port_is_held_by_the_server", "model_answers"} <= bad(found)


def test_own_checks_levels_junit_and_expressions(box: Box, tmp_path: Path) -> None:
    checks = box.driver.inventory / "checks"
    checks.mkdir()
    (checks / "test_own.py").write_text(
        "def test_name(host, server, facts, evidence):\n"
        "    '''Is it the node?'''\n"
        "    evidence(f\"{host.run('echo $PPID').stdout.strip()} {server.port} {facts['host']['kernel']}\")\n"
        "def test_other_thing(limits):\n    assert limits['own_number'] == 8, limits['own_number']\n"
    )
    box.configure(checks={"other_thing": "warning", "own_number": 7})
    done = box.deploy()
    assert done.code == Exit.OK, done  # a warning is shown and blocks nothing
    assert any(event["event"] == "warning" and "other thing" in event["message"] for event in done.events)

    report = tmp_path / "report.xml"
    done = box.run("verify", "-k", "name or other_thing", "--junit", str(report))
    assert done.code == Exit.OK, done
    rows = [line.split("  ") for line in done.stdout.splitlines()]
    assert any("Is it the node?" in row and f" {box.port} {os.uname().release}" in row[-1] for row in rows), done
    assert "no (warning)" in done.stdout
    suite = ET.parse(report).getroot()[0]
    assert (suite.get("name"), suite.get("tests"), suite.get("skipped")) == ("box/demo", "2", "1")

    box.configure(checks={"other_thing": "blocker", "own_number": 7})
    assert box.run("verify", "--only", "other_thing").code == Exit.DEGRADED
    assert box.run("verify", "-k", "and and").code == Exit.USAGE


def test_the_shell_carries_any_bytes_and_outlives_a_hung_command(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    with session(box) as opened:
        shell = Shell(opened.node)
        done = shell.run("head -c 100000 /dev/zero; printf '\\377\\n\\n'; printf 'e\\000r' >&2; exit 7")
        assert (done.exit_status, done.stdout, done.stderr) == (7, b"\0" * 100000 + b"\xff\n\n", b"e\0r")
        quoted = 'it\'s "x" $HOME `id` \\ \u00e9\n!'
        assert (
            shell.run(f"printf %s {chr(39)}{quoted.replace(chr(39), chr(39) + chr(92) + chr(39) * 2)}{chr(39)}").stdout
            == quoted.encode()
        )
        assert shell.run("cat").stdout == b""  # no input, and none of ours
        first, hung, last = shell.run_all(["echo 1; echo one >&2", "exec sleep 600", "echo 3"], 5)
        assert isinstance(hung, CommandTimedOut)
        assert [(each.stdout, each.stderr) for each in (first, last)] == [(b"1\n", b"one\n"), (b"3\n", b"")]
        first = shell.run("echo $PPID").stdout
        monkeypatch.setattr(shells, "OUTPUT_LIMIT", 200_000)
        assert len(shell.run("head -c 150000 /dev/zero").stdout) == 150_000
        with pytest.raises(TooMuchOutput):
            shell.run("exec yes")
        assert shell.run("echo $PPID").stdout != first
        first = shell.run("echo $PPID").stdout
        assert shell.run("echo $PPID").stdout == first
        began = time.monotonic()
        with pytest.raises(CommandTimedOut, match="sleep"):  # after a time in which it has surely begun
            shell.run("echo $$ >$HOME/hung; sleep 600 & wait", timeout=5)
        assert time.monotonic() - began < 120
        hung = int((box.home / "hung").read_text())
        assert shell.run("echo $PPID").stdout != first
        deadline = time.monotonic() + 60
        while Path(f"/proc/{hung}").exists():
            assert time.monotonic() < deadline, "the hung command was not killed"
            time.sleep(0.02)
        shell.close()


def test_ctrl_c_ends_verify_and_not_the_check_that_waits(box: Box) -> None:
    checks = box.driver.inventory / "checks"
    checks.mkdir()
    (checks / "test_own.py").write_text(
        "def test_first(host):\n    host.run('>$HOME/begun; exec sleep 250')\n"
        "def test_second(host):\n    host.run('>$HOME/second')\n"
    )
    with box.driver.started("verify", "--host", "box", "-k", "first or second") as verifying:
        eventually((box.home / "begun").exists)
        verifying.send_signal(signal.SIGINT)
        assert verifying.wait(120) == Exit.INTERRUPTED
    assert not (box.home / "second").exists()


def test_ctrl_c_in_the_verification_of_a_deploy_is_no_success(box: Box, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    checks = box.driver.inventory / "checks"
    checks.mkdir()
    waits = f"def test_waits():\n    open({str(begun)!r}, 'w').close()\n    time.sleep(600)\n"
    (checks / "test_waits.py").write_text(f"import time\n{waits}")
    with box.driver.started("deploy", "--json", "--host", "box") as deploying:
        eventually(lambda: begun.exists() or deploying.poll() is not None)
        deploying.send_signal(signal.SIGINT)
        told, _ = deploying.communicate(timeout=120)
    assert deploying.returncode == Exit.DEGRADED, told
    report = json.loads(told.splitlines()[-1])["report"]["hosts"]["box"]["servers"]["demo"]
    assert (report["outcome"], report["cause"]) == ("deployed", "interrupted")
    assert report["hint"] == "./inv verify --host box --server demo"
    assert box.serves()


def test_a_server_that_wants_an_api_key_is_asked_with_it_and_nobody_sees_it(box: Box, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hush-hush-key")
    box.configure(args={"api-key": "hush-hush-key"})
    deployed = box.deploy()
    assert deployed.code == Exit.OK, deployed
    report = tmp_path / "report.xml"
    done = box.run("verify", "--json", "--junit", str(report))
    assert done.code == Exit.OK, done
    checks = json.loads(done.stdout)["verify"]["hosts"]["box"]["servers"]["demo"]["checks"]
    found = {check["name"]: check for check in checks}
    assert found["model_answers"]["outcome"] == found["served_model_is_the_one_wanted"]["outcome"] == "passed"
    box.configure(args={"api-key": "another-key-by-now"}, served_name="other")  # not deployed: the old key still holds
    again = box.run("verify", "--json")
    checks = json.loads(again.stdout)["verify"]["hosts"]["box"]["servers"]["demo"]["checks"]
    found = {check["name"]: check for check in checks}
    assert found["served_model_is_the_one_wanted"]["evidence"] == "serves demo-model, not other"
    assert "drift" not in found["model_answers"]["evidence"]
    said = [deployed.stdout, deployed.stderr, done.stdout, done.stderr, again.stdout, report.read_text()]
    assert not [text for text in said if "hush-hush" in text or "another-key" in text]


def test_a_lost_connection_is_no_failed_check(box: Box) -> None:
    assert box.deploy().code == Exit.OK
    checks = box.driver.inventory / "checks"
    checks.mkdir()
    (checks / "test_own.py").write_text("def test_first(host):\n    host.run('kill -9 $PPID; exec sleep 60')\n")
    with session(box) as opened, pytest.raises(Unreachable):
        outcomes(opened, box, "test_first")


@pytest.mark.parametrize("lost", [ContactLost("the wire was cut"), RuntimeError("a defect")], ids=["wire", "defect"])
def test_what_keeps_the_shell_from_beginning_is_raised_where_it_is_waited_for(
    box: Box, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, lost: Exception
) -> None:
    with session(box) as opened:
        monkeypatch.setattr(Shell, "_open", lambda _: (_ for _ in ()).throw(lost))
        expected = Unreachable if isinstance(lost, ContactLost) else RuntimeError
        with pytest.raises(expected, match=str(lost)):
            verify(opened, opened.host.servers["demo"], box.driver.inventory)
    assert not [each for each in recwarn if each.category is pytest.PytestUnhandledThreadExceptionWarning]
