"""A server that somebody started by hand: adopted by the first deploy, and brought back exactly if that fails."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from lamplighter.node.system import ports
from tests.driver import ask, eventually, token
from tests.lab.conftest import Box

MODEL = "hand-model"
ODD = 'it\'s a "value" $(id) `id` \\ with\nlines = and \u00e9'


def environment(box: Box) -> dict[str, str]:
    """What the person's shell had; SPT_NOENV keeps the workers' share of it readable for the test."""
    return {
        "HOME": str(box.home),
        "PATH": f"{box.directory}/box/bin:/usr/local/bin:/usr/bin:/bin",
        "LAB_SPEED": "25",
        "ODD": ODD,
        "NCCL_PROTO": "Simple",
        "SPT_NOENV": "1",
        "LD_LIBRARY_PATH": "",
        "here": "a name that the launch script uses itself",
        "BASH_FUNC_greet%%": "() {  echo hello\n}",
    }


@contextlib.contextmanager
def by_hand(box: Box, manner: str = "shell", *words: str) -> Iterator[Path]:
    """Start a server as a person does, at a terminal; yields the directory that it was started in."""
    directory = box.home / "it's my directory"
    directory.mkdir(parents=True)
    command = ["lamplighter-demo-server", "--model-path", MODEL, "--port", str(box.port), "--tp", "2", *words]
    line = " ".join(f"'{word}'" for word in command)
    typed = {
        "shell": f"{line} >/dev/null 2>&1 &",  # a job of a shell that still lives
        "orphan": f"nohup {line} >/dev/null 2>&1 & disown; exit",
        "loop": f"while true; do {line} >/dev/null 2>&1; sleep 0.2; done &",
        "watchdog": f"python3 watch.py {line} >/dev/null 2>&1 &",
    }[manner]
    (directory / "watch.py").write_text("import subprocess, sys\nwhile True: subprocess.run(sys.argv[1:])\n")
    person, terminal = pty.openpty()
    with subprocess.Popen(
        ["setsid", "--ctty", "/bin/bash", "--norc", "-i"],
        cwd=directory,
        env=environment(box),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    ) as shell:
        try:
            os.write(person, f"{typed}\n".encode())
            eventually(lambda: ask(box.port, "/health")[0] == 200)  # needs no key
            yield directory
        finally:
            shell.send_signal(signal.SIGKILL)  # the server is ended with its node
            os.close(terminal)
            os.close(person)


def seen(box: Box) -> dict[str, Any]:
    """Ask the server itself: its processes' arguments and environments, and where it works."""
    status, found = ask(box.port, "/lab/environ")
    assert status == 200
    launcher = found["processes"][0]
    ignored = {"_", "SGLANG_RUN_ID"}  # new with every start
    return {
        "argv": launcher["argv"],
        "cwd": os.readlink(f"/proc/{launcher['pid']}/cwd"),
        "environ": {name: value for name, value in launcher["environ"].items() if name not in ignored},
    }


def warnings(done: Any) -> list[str]:
    return [event["message"] for event in done.events if event["event"] == "warning"]


@pytest.mark.parametrize("manner", ["shell", "orphan"])
def test_a_failed_first_deploy_brings_it_back_as_it_was(box: Box, manner: str) -> None:
    with by_hand(box, manner) as directory:
        before = seen(box)
        assert before["cwd"] == str(directory)
        checked = json.loads(box.run("check", "--json").stdout)["check"]["hosts"]["box"]["servers"]["demo"]
        told = next(found for found in checked["findings"] if found["id"] == "adoption")
        assert told["level"] == "ok"
        assert {row["action"] for row in checked["would_stop"]} == {"stop"}

        box.configure(args={"lab-fail": "die:graphs"})
        done = box.deploy()
        assert done.code == Exit.ROLLED_BACK, done
        report = done.server("box", "demo")
        assert report["serving"]["release"].startswith("adopted-")
        assert report["serving"]["model"] == MODEL
        assert report["downtime_seconds"] > 0
        assert token(box.port, MODEL)
        after = seen(box)
        dropped = {"BASH_FUNC_greet%%"}
        assert after == {**before, "environ": {k: v for k, v in before["environ"].items() if k not in dropped}}
        assert any("BASH_FUNC_greet%%" in text for text in warnings(done)) == ("BASH_FUNC_greet%%" in before["environ"])

        status = json.loads(box.run("status", "--json").stdout)["status"]["hosts"]["box"]["servers"]["demo"]
        assert (status["state"], status["model"]) == ("serving", MODEL)
        assert status["release"] == report["serving"]["release"]


def test_it_is_kept_as_a_release_whose_secrets_are_its_owners(box: Box) -> None:
    with by_hand(box, "orphan", "--api-key", "s3cret-of-the-hand"):
        first = box.deploy()
        assert first.code == Exit.OK, first
        assert "s3cret-of-the-hand" not in first.stdout + first.stderr
        (adopted,) = (box.state / "releases").glob("adopted-*")
        for name, mode in (("env", 0o600), ("launch.sh", 0o700), ("plan.json", 0o600)):
            assert stat.S_IMODE((adopted / name).stat().st_mode) == mode
        again = box.deploy()
        assert again.code == Exit.OK, again  # ours now: nothing is adopted twice
        assert len(list((box.state / "releases").glob("adopted-*"))) == 1
        back = box.run("rollback", "--json", "--to", adopted.name)
        assert back.code == Exit.OK, back  # ready by its own model name and its own key
        assert back.server("box", "demo")["serving"] is not None
        assert back.server("box", "demo")["serving"]["model"] == MODEL
        assert "s3cret-of-the-hand" not in back.stdout + back.stderr


@pytest.mark.parametrize("words", [("--api-key=s3cret-of-the-hand",), ("--api-key", "s3cret-of-the-hand")])
def test_brought_back_it_leaves_its_key_in_no_other_file(box: Box, words: tuple[str, ...]) -> None:
    with by_hand(box, "orphan", *words):
        box.configure(args={"tp": 2, "lab-fail": "die:weights"})
        done = box.deploy()
        assert done.code == Exit.ROLLED_BACK, done
        (adopted,) = (box.state / "releases").glob("adopted-*")
        files = [path for path in box.state.rglob("*") if path.is_file()]
        assert len(files) > 10
        assert [path for path in files if b"s3cret-of-the-hand" in path.read_bytes()] == [adopted / "env"]


def test_what_cannot_be_adopted_is_said_before_it_is_stopped(box: Box) -> None:
    """Here a server that does not answer which model it serves, since it is stopped by a signal."""
    with by_hand(box, "orphan"):
        _, found = ask(box.port, "/lab/environ")
        os.kill(found["processes"][0]["pid"], signal.SIGSTOP)
        done = box.deploy()
        assert done.code == Exit.OK, done
        told = [
            event for event in done.events if event["event"] == "warning" and "cannot be adopted" in event["message"]
        ]
        stopping = next(event for event in done.events if event["event"] == "stage_end" and event["stage"] == "stop")
        assert [event["stage"] for event in told] == ["stop"]
        assert told[0]["seq"] < stopping["seq"]
        assert "does not say which model" in told[0]["message"]
        assert "cannot be started again" in told[0]["hint"]
        assert not list((box.state / "releases").glob("adopted-*"))


def test_policies_that_leave_it_refuse_and_adopt_nothing(box: Box) -> None:
    with by_hand(box, "orphan"):
        for policy in ("ours", "report"):
            box.configure(stale={"policy": policy})
            done = box.deploy()
            assert done.code == Exit.REFUSED, done
            assert f"left because stale.policy is {policy}" in done.server("box", "demo")["evidence"]
            assert token(box.port, MODEL)
        assert not (box.state / "current").exists()


def test_a_loop_goes_before_its_server_which_is_adopted_and_comes_back_without_it(box: Box) -> None:
    with by_hand(box, "loop"):
        checked = json.loads(box.run("check", "--json").stdout)["check"]["hosts"]["box"]["servers"]["demo"]["findings"]
        (found,) = [each for each in checked if each["id"] == "restarter"]
        assert found["level"] == "ok"
        assert "will be stopped first" in found["message"]
        box.configure(args={"tp": 2, "lab-fail": "die:graphs"})
        back = box.deploy()
        assert back.code == Exit.ROLLED_BACK, back
        assert back.server("box", "demo")["serving"]["pid"] in ports.owners(box.port)
        box.configure(args={"tp": 2})
        done = box.deploy()
        assert done.code == Exit.OK, done
        assert [done.server("box", "demo")["serving"]["pid"]] == list(ports.owners(box.port))
        stopped = box.run("stop", "--json")
        assert stopped.code == Exit.OK, stopped
        assert stopped.server("box", "demo")["message"].startswith("stopped; nothing is serving")


def test_a_watchdog_above_the_server_refuses_until_it_is_listed(box: Box) -> None:
    with by_hand(box, "watchdog"):
        for verb in ("deploy", "stop"):
            refused = box.run(verb, "--json")
            assert refused.code == Exit.REFUSED, refused
            report = refused.server("box", "demo")
            assert report["cause"] == "restarter"
            assert "list watch.py in stale.kill" in report["hint"]
            assert "which lamplighter does not keep, serves as before" in report["message"]
            assert report["serving"]["pid"] in ports.owners(box.port)
        box.configure(stale={"kill": ["watch.py"]})
        done = box.deploy()
        assert done.code == Exit.OK, done
        assert [done.server("box", "demo")["serving"]["pid"]] == list(ports.owners(box.port))
