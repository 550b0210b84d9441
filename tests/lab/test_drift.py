"""Drift of a live server, told by name with both values; and what `deploy --if-changed` makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from lab import ledger
from lamplighter.inventory import load_inventory
from lamplighter.node.events import Exit
from lamplighter.run.deploy import HostSession, open_session
from tests.driver import PROJECT, ask, eventually
from tests.lab.conftest import Box


def standing_of(opened: HostSession, box: Box) -> dict[str, Any]:
    servers = load_inventory(box.driver.inventory, PROJECT / "roles").host("box").servers
    return opened.standings(list(servers.values()))["demo"]


def drift_of(opened: HostSession, box: Box) -> dict[tuple[str, str], tuple[str | None, str | None]]:
    found = standing_of(opened, box)["drift"]
    assert found["unknown"] == []
    return {(each["kind"], each["name"]): (each["wanted"], each["found"]) for each in found["differences"]}


def opened(box: Box) -> Any:
    return open_session(load_inventory(box.driver.inventory, PROJECT / "roles").host("box"), PROJECT)


def test_a_node_just_deployed_has_no_drift_and_every_change_is_told_with_both_values(box: Box) -> None:
    box.configure(env={"NCCL_PROTO": "LL"})
    for _ in range(3):
        assert box.deploy().code == Exit.OK
        with opened(box) as session:
            for _ in range(7):
                assert drift_of(session, box) == {}
    with opened(box) as session:
        # the inventory is edited
        box.configure(env={"NCCL_PROTO": "Simple", "NEW": "1"}, args={"context-length": 4096})
        assert drift_of(session, box) == {
            ("inventory", "args --context-length"): ("4096", None),
            ("inventory", "env.NCCL_PROTO"): ("Simple", "LL"),
            ("inventory", "env.NEW"): ("1", None),
        }
        box.configure(env={"NCCL_PROTO": "LL"}, timeouts={"ready": 99})  # how it is treated is no drift
        assert drift_of(session, box) == {}

        # the launch script is edited, and the file of variables
        script = box.state / "current" / "launch.sh"
        text = script.read_text()
        script.write_text(text + "# a hand was here\n")
        (found,) = drift_of(session, box).items()
        assert found[0] == ("release", "launch.sh")
        assert None not in found[1]
        assert found[1][0] != found[1][1]
        script.write_text(text)
        script.chmod(0o700)
        assert drift_of(session, box) == {("release", "launch.sh mode"): ("0755", "0700")}
        script.chmod(0o755)
        (box.state / "current" / "env").chmod(0o644)
        assert drift_of(session, box) == {("release", "env mode"): ("0600", "0644")}
        (box.state / "current" / "env").chmod(0o600)
        sitecustomize = box.state / "current" / "pysite" / "sitecustomize.py"
        kept = sitecustomize.read_text()
        sitecustomize.unlink()
        assert drift_of(session, box)["release", "pysite/sitecustomize.py"][1] is None
        sitecustomize.write_text(kept)
        sitecustomize.chmod(0o644)

        # another driver than the one recorded at the deploy
        board = str(box.directory / "box" / "gpu" / "board.json")
        recorded = ledger.read_json(board)
        ledger.write_json(board, {**recorded, "driver": "590.44.01"})
        assert drift_of(session, box) == {("driver", "driver (nvidia-smi)"): (recorded["driver"], "590.44.01")}
        ledger.write_json(board, recorded)
        assert drift_of(session, box) == {}

    status = box.run("status")
    assert status.code == Exit.OK
    assert "drift" not in status.stdout


def test_a_variable_that_the_server_overwrites_is_drift_and_no_reason_to_deploy_again(box: Box) -> None:
    box.configure(env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})  # the server sets it to 8, as SGLang does
    assert box.deploy().code == Exit.DEGRADED
    with opened(box) as session:
        assert drift_of(session, box) == {("environment", "CUDA_DEVICE_MAX_CONNECTIONS"): ("1", "8")}
        found = standing_of(session, box)["drift"]["differences"]
    assert any("sglang::scheduler_TP0, pid " in each["by"] for each in found)
    text = box.run("status").stdout
    assert "drift, environment: CUDA_DEVICE_MAX_CONNECTIONS: wanted 1, found 8 (sglang::" in text
    again = box.deploy("--if-changed")
    assert again.code == Exit.DEGRADED, again
    assert again.server("box", "demo")["outcome"] == "unchanged"


def test_a_server_that_was_started_by_hand_with_other_arguments_is_drift(box: Box) -> None:
    done = box.deploy()
    assert done.code == Exit.OK
    pid = done.server("box", "demo")["serving"]["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: ask(box.port, "/v1/models")[0] == 0)
    plan = json.loads((box.state / "current" / "plan.json").read_text())["server"]
    words = [str(box.state / "current" / "launch.sh"), *plan["argv"], "--context-length", "4096"]
    path = f"{box.directory / 'box' / 'bin'}:{os.environ['PATH']}"
    by_hand = subprocess.Popen(
        words, env={"HOME": str(box.home), "PATH": path}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        eventually(box.serves, 60)
        with opened(box) as session:
            assert drift_of(session, box) == {
                ("process", f"process on port {box.port}"): (f"pid {pid}", f"pid {by_hand.pid} ({sys.executable})"),
                ("argv", "argv --context-length"): (None, "4096"),
            }
    finally:
        os.killpg(by_hand.pid, signal.SIGKILL)
        by_hand.wait()


def test_deploy_if_changed(box: Box) -> None:
    box.configure(env={"NCCL_PROTO": "LL"})
    first = box.deploy("--if-changed")
    assert first.code == Exit.OK, first
    assert first.server("box", "demo")["outcome"] == "deployed"
    pid = first.server("box", "demo")["serving"]["pid"]
    runs = sorted(os.listdir(box.state / "runs"))

    again = box.deploy("--if-changed")
    assert again.code == Exit.OK, again
    report = again.server("box", "demo")
    assert report["outcome"] == "unchanged"
    assert report["serving"]["pid"] == pid
    assert sorted(os.listdir(box.state / "runs")) == runs  # no worker, no journal
    with opened(box) as session:
        begun = []
        stream = session.node.stream
        session.node.stream = lambda command: begun.append(command) or stream(command)
        heard: list[dict[str, Any]] = []
        session.run("deploy", session.host.servers["demo"], heard.append, if_changed=True)
        assert heard[-1]["outcome"] == "unchanged"
        assert len(begun) == 1  # one exec on the one login
    assert box.deploy("--max-age", "7d").server("box", "demo")["outcome"] == "unchanged"

    old = box.deploy("--max-age", "1s")
    assert old.server("box", "demo")["outcome"] == "deployed", old
    assert old.server("box", "demo")["serving"]["pid"] != pid
    assert "it has run for" in old.stdout

    box.configure(env={"NCCL_PROTO": "Simple"})
    edited = box.deploy("--if-changed")
    assert edited.server("box", "demo")["outcome"] == "deployed", edited
    assert any("inventory: env.NCCL_PROTO: 'Simple' -> 'LL'" in event.get("message", "") for event in edited.events)

    # a server that does not answer is not left alone
    serving = edited.server("box", "demo")["serving"]["pid"]
    os.kill(serving, signal.SIGKILL)
    eventually(lambda: ask(box.port, "/v1/models")[0] == 0)
    healed = box.deploy("--if-changed")
    assert healed.server("box", "demo")["outcome"] == "deployed", healed
    assert box.serves()

    # secrets that others may read
    (box.state / "current" / "env").chmod(0o644)
    mended = box.deploy("--if-changed")
    assert mended.server("box", "demo")["outcome"] == "deployed", mended
    assert (box.state / "current" / "env").stat().st_mode & 0o7777 == 0o600

    assert box.deploy("--max-age", "soon").code == Exit.USAGE


def test_a_bad_release_is_not_tried_again(box: Box) -> None:
    assert box.deploy().code == Exit.OK
    good = json.loads((box.state / "server.json").read_text())["release"]
    box.configure(args={"lab-fail": "die:graphs"})
    failed = box.deploy("--if-changed")
    assert failed.code == Exit.ROLLED_BACK, failed
    bad = failed.server("box", "demo")["release"]
    pid = failed.server("box", "demo")["serving"]["pid"]

    refused = box.deploy("--if-changed")
    assert refused.code == Exit.ROLLED_BACK, refused
    report = refused.server("box", "demo")
    assert report["outcome"] == "refused"
    assert report["cause"] == "bad_release"
    assert report["release"] == bad
    assert report["serving"]["release"] == good
    assert report["serving"]["pid"] == pid  # left alone
    assert bad in report["message"]
    assert report["evidence"]

    box.run("stop")
    assert box.deploy("--if-changed").code == Exit.NOT_READY  # nothing serves: somebody has to look


def test_status_is_watched_over_one_connection(box: Box) -> None:
    assert box.deploy().code == Exit.OK
    with box.driver.started("status", "--host", "box", "--json", "--watch", "0.2") as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())["status"]["hosts"]["box"]["servers"]["demo"]
        assert first["drift"] == {"differences": [], "unknown": []}
        box.configure(port=box.port, env={"A": "1"})
        json.loads(watching.stdout.readline())
        (box.state / "current" / "launch.sh").chmod(0o700)

        def sees_it() -> bool:
            found = json.loads(watching.stdout.readline())["status"]["hosts"]["box"]["servers"]["demo"]  # type: ignore[union-attr]
            return any(each["name"] == "launch.sh mode" for each in found["drift"]["differences"])

        eventually(sees_it)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == Exit.OK
