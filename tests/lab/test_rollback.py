"""The way back leads to what served: the same release, with the secrets and the treatment that it had."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from tests.driver import eventually, wait_for_stage
from tests.lab.conftest import Box

SPEED = "LAMPLIGHTER_TEST_SPEED"
SECRET_SPEED = f"servers: {{demo: {{env: {{LAB_SPEED: null}}, secrets: {{LAB_SPEED: !secret env:{SPEED}}}}}}}\n"


@pytest.fixture
def secretive(box: Box, monkeypatch: pytest.MonkeyPatch) -> Box:
    """The demo server reads its speed from a secret, and cannot start with one that is no number."""
    variables = box.driver.inventory / "host_vars" / "box.yml"
    variables.parent.mkdir()
    variables.write_text(SECRET_SPEED)
    monkeypatch.setenv(SPEED, "60")
    return box


@contextlib.contextmanager
def held_at(box: Box, stage: str, *words: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A command, up to the beginning of a stage: its process, and the event of that."""
    with box.driver.started(*words, "--json", "--host", "box") as process:
        yield process, wait_for_stage(process, stage)


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def current_environment(box: Box) -> str:
    return (box.state / "current" / "env").read_text()


def rows_of(box: Box) -> dict[str, dict[str, Any]]:
    answer = json.loads(box.run("releases", "--json").stdout)
    return {row["release"]: row for row in answer["releases"]["hosts"]["box"]["servers"]["demo"]["releases"]}


def test_a_wrong_secret_rolls_back_to_the_one_that_served(secretive: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    first = secretive.deploy()
    assert first.code == Exit.OK, first
    old = first.server("box", "demo")["serving"]["release"]

    monkeypatch.setenv(SPEED, "abc")
    wrong = secretive.deploy()
    assert wrong.code == Exit.ROLLED_BACK, wrong
    report = wrong.server("box", "demo")
    assert report["serving"]["release"] == old
    assert b"LAB_SPEED=60\0" in environment_of(report["serving"]["pid"])
    assert "LAB_SPEED=60\n" in current_environment(secretive)
    rows = rows_of(secretive)
    assert {name: row["verdict"] for name, row in rows.items()} == {old: "good", f"{old}.2": "bad"}

    # the same wrong one is not tried again, another one is
    refused = secretive.deploy("--if-changed")
    assert refused.server("box", "demo")["cause"] == "bad_release", refused
    monkeypatch.setenv(SPEED, "50")
    fixed = secretive.deploy("--if-changed")
    assert fixed.code == Exit.OK, fixed
    assert fixed.server("box", "demo")["serving"]["release"] == f"{old}.3"
    assert "LAB_SPEED=50\n" in current_environment(secretive)
    assert secretive.deploy("--if-changed").server("box", "demo")["outcome"] == "unchanged"
    assert secretive.run("verify", "--json").code == Exit.OK

    back = secretive.run("rollback", "--json", "--to", old)  # which is also how the others begin
    assert back.code == Exit.OK, back
    assert back.server("box", "demo")["serving"]["release"] == old
    monkeypatch.setenv(SPEED, "60")
    assert secretive.deploy("--if-changed").server("box", "demo")["outcome"] == "unchanged"


@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_a_deploy_that_ended_before_the_stop_leaves_the_secrets_as_they_were(
    secretive: Box, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    first = secretive.deploy()
    assert first.code == Exit.OK, first
    old = first.server("box", "demo")["serving"]["release"]

    monkeypatch.setenv(SPEED, "abc")
    with held_at(secretive, "prove", "deploy") as (process, event):
        run = secretive.state / "runs" / event["run"]
        if how == "killed":
            os.kill(json.loads((run / "worker.json").read_text())["pid"], signal.SIGKILL)
        else:
            (run / "cancel.json").write_text('{"by": "the test"}')
        assert process.wait(120) == (Exit.INTERNAL if how == "killed" else Exit.INTERRUPTED)
    assert "LAB_SPEED=60\n" in current_environment(secretive)

    again = secretive.run("restart", "--json")
    assert again.code == Exit.OK, again
    serving = again.server("box", "demo")["serving"]
    assert serving["release"] == old
    assert b"LAB_SPEED=60\0" in environment_of(serving["pid"])


def test_the_way_back_is_judged_as_what_served_was(box: Box) -> None:
    first = box.deploy()
    assert first.code == Exit.OK, first
    old = first.server("box", "demo")["serving"]["release"]
    box.configure(timeouts={"ready": 0.2})
    late = box.deploy()
    assert late.code == Exit.ROLLED_BACK, late
    assert late.server("box", "demo")["serving"]["release"] == old


def test_who_cancels_a_restart_gets_back_what_served(box: Box) -> None:
    assert box.deploy().code == Exit.OK
    box.configure(env={"NCCL_PROTO": "Simple"})
    second = box.deploy()
    assert second.code == Exit.OK, second
    now = second.server("box", "demo")["serving"]["release"]

    with held_at(box, "ready", "restart") as (process, event):
        (box.state / "runs" / event["run"] / "cancel.json").write_text('{"by": "the test"}')
        assert process.wait(120) == Exit.ROLLED_BACK
    eventually(box.serves)
    status = json.loads(box.run("status", "--json").stdout)["status"]["hosts"]["box"]["servers"]["demo"]
    assert (status["state"], status["release"]) == ("serving", now)
    assert os.path.basename(os.readlink(box.state / "current")) == now


def test_a_server_that_dies_right_after_its_first_answer_is_no_good_release(box: Box) -> None:
    box.configure(args={"lab-fail": "die:ready"})
    alone = box.deploy()
    assert alone.code == Exit.CRASHED, alone
    assert alone.server("box", "demo")["serving"] is None

    box.configure()
    assert box.deploy().code == Exit.OK
    box.configure(args={"lab-fail": "die:ready"})
    done = box.deploy()
    assert done.code == Exit.ROLLED_BACK, done
    assert "in phase ready" in done.server("box", "demo")["message"]
    assert box.serves()
    assert sorted(row["verdict"] for row in rows_of(box).values()) == ["bad", "good"]


@pytest.mark.parametrize("how", ["torn", "without pysite", "without env"])
def test_the_way_back_passes_over_a_damaged_release(box: Box, how: str) -> None:
    names = []
    for number in ("1", "2"):
        box.configure(env={"NUMBER": number})
        names.append(box.deploy().server("box", "demo")["release"])
    current = box.state / "releases" / names[1]
    if how == "torn":
        os.truncate(current / "launch.sh", 5)
    elif how == "without env":
        (current / "env").unlink()
    else:
        shutil.rmtree(current / "pysite")

    box.configure(args={"lab-fail": "die:weights"})
    done = box.deploy()
    assert done.code == Exit.ROLLED_BACK, done
    assert done.server("box", "demo")["serving"]["release"] == names[0]
    assert any(f"release {names[1]} is damaged" in event.get("message", "") for event in done.events)
    assert box.serves()

    refused = box.run("rollback", "--json", "--to", names[1])
    if how != "without env":  # which holds no variable of this server's
        assert refused.code == Exit.REFUSED, refused
        assert f"release {names[1]} is damaged (" in refused.server("box", "demo")["hint"]
    assert box.serves()


WRONG = """
import pytest

def test_right_age(host, server):
    assert server.env["AGE"] not in ("2", "4"), "that age is wrong"

@pytest.mark.serving
def test_lives(host, server):
    if server.env["AGE"] == "3":
        assert host.run("kill -9 %s", str(server.pid)).rc == 0
        raise AssertionError("it is dead")
"""


@pytest.mark.timeout(600)  # five deploys
def test_a_server_whose_checks_fail_is_replaced_as_the_inventory_wants(box: Box) -> None:
    (box.driver.inventory / "checks").mkdir()
    (box.driver.inventory / "checks" / "test_own.py").write_text(WRONG)

    box.configure(env={"AGE": "3"})
    nowhere = box.deploy()
    assert nowhere.code == Exit.CRASHED, nowhere.server("box", "demo")
    part = nowhere.server("box", "demo")
    assert "not rolled back: there is no earlier good release of demo" in part["message"]

    for wish, age, code, told in (
        ("auto", "2", Exit.DEGRADED, "serving, but 1 of"),
        ("keep", "3", Exit.CRASHED, "serves no more"),
        ("auto", "3", Exit.ROLLED_BACK, "serves no more"),
        ("rollback", "4", Exit.ROLLED_BACK, "serving, but 1 of"),
    ):
        box.configure(env={"AGE": age}, on_verify_failure=wish)
        done = box.deploy()
        part = done.server("box", "demo")
        assert (done.code, told in part["message"]) == (code, True), part["message"]
        if code == Exit.DEGRADED:
            kept = part["release"]
        if code == Exit.ROLLED_BACK:
            assert part["outcome"] == "rolled_back"
            assert part["release"] != kept == part["serving"]["release"]
            assert rows_of(box)[part["release"]]["verdict"] == "bad"
            assert box.serves()
    again = box.deploy("--if-changed")
    assert (again.code, again.server("box", "demo")["cause"]) == (Exit.ROLLED_BACK, "bad_release")
