"""Who is stopped and who is left, GPUs that are not free, and two servers on one node."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import control
from lamplighter.node.events import Exit
from lamplighter.node.system import lock
from tests.driver import ask, free_port, token
from tests.lab.conftest import Box


def node_of(box: Box) -> Path:
    return box.directory / "box"


def check(box: Box) -> dict[str, Any]:
    done = box.run("check", "--json")
    return dict(json.loads(done.stdout)["check"]["hosts"]["box"]["servers"]["demo"])


def pids_of(port: int) -> list[int]:
    status, found = ask(port, "/lab/environ")
    assert status == 200
    return [process["pid"] for process in found["processes"]]


# ------------------------------------------------------------------------------------------------ foreign processes


def test_a_foreign_holder_is_named_and_left_and_can_be_listed(box: Box) -> None:
    node = node_of(box)
    with control.stranger(node, 40_000, 1, "/usr/bin/trainer") as trainer:
        rows = {row["pid"]: row for row in check(box)["would_stop"]}
        assert rows[trainer.pid]["action"] == "leave"
        assert rows[trainer.pid]["title"] == "/usr/bin/trainer 3600"
        assert "holds 40000 MiB of GPU 1" in rows[trainer.pid]["why"]
        shown = rf"would leave +{trainer.pid} .*/usr/bin/trainer 3600.*40000 MiB of GPU 1"
        assert re.search(shown, box.run("check").stdout)
        done = box.deploy()
        assert done.code == Exit.REFUSED, done
        assert done.server("box", "demo")["cause"] == "gpu_held"
        assert f"pid {trainer.pid} " in done.server("box", "demo")["evidence"]
        assert trainer.poll() is None

        box.configure(stale={"kill": ["trainer"], "policy": "report"})
        assert box.deploy().code == Exit.REFUSED
        assert trainer.poll() is None

        box.configure(stale={"kill": ["trainer"]})
        assert {row["action"] for row in check(box)["would_stop"]} == {"stop"}
        done = box.deploy()
        assert done.code == Exit.OK, done
        assert trainer.wait(60) == -signal.SIGTERM


def test_a_neighbour_on_another_gpu_is_nobodys_business(box: Box) -> None:
    box.configure(gpus=[0], args={"tp": 1})
    with control.stranger(node_of(box), 120_000, 1, "sglang::scheduler_TP0") as neighbour:
        assert check(box)["would_stop"] == []
        done = box.deploy()
        assert done.code == Exit.OK, done
        assert box.deploy().code == Exit.OK
        assert neighbour.poll() is None


@pytest.fixture
def segment() -> Iterator[Path]:
    """Shared memory that a dead worker has left."""
    path = Path(tempfile.mktemp(prefix="psm_", dir="/dev/shm"))
    yield path
    path.unlink(missing_ok=True)


def test_what_a_dead_server_left_is_removed(box: Box, segment: Path) -> None:
    """Also where it died by itself; what a living process uses stays."""
    leave(segment)
    done = box.deploy()
    assert done.code == Exit.OK, done
    assert not segment.exists()
    leave(segment)
    with segment.open("rb"):
        assert box.run("stop", "--json").code == Exit.OK
        assert segment.exists()
    assert box.run("stop", "--json").code == Exit.OK
    assert not segment.exists()


def leave(segment: Path) -> None:
    segment.touch(mode=0o600)


# ------------------------------------------------------------------------------------------------------- not free


UNWELL: tuple[tuple[dict[str, Any], str], ...] = (
    ({"used": {"0": 30_000}}, "gpu_held"),
    ({"fields": {"0": {"memory.used": "[GPU requires reset]"}}}, "gpu_unknown"),
    ({"missing": ["1"]}, "gpu_unknown"),
    ({"rc": 255, "stderr": "Unable to determine the device handle"}, "gpu_unknown"),
    ({"fields": {"1": {"gpu_recovery_action": "Reset"}}}, "gpu_recovery"),
)


def test_a_node_that_is_not_well_is_refused(box: Box) -> None:
    box.configure(gpus=[0, 1])
    for state, cause in UNWELL:
        control.clear(node_of(box))
        control.inject(node_of(box), **state)
        done = box.deploy()
        assert done.code == Exit.REFUSED, (state, done)
        assert done.server("box", "demo")["cause"] == cause, (state, done)


def test_memory_that_does_not_fall_ends_the_wait_and_says_so(box: Box) -> None:
    node = node_of(box)
    box.configure(args={"lab-fail": "ignore-term"})
    assert box.deploy().code == Exit.OK
    box.configure(timeouts={"stop": 8, "free": 2})  # the stop takes all of its time, so that it is seen to begin
    (uuid, *_) = control.uuids(node)
    with box.driver.started("deploy", "--json", "--host", "box") as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event.get("event") == "stage_start" and event["stage"] == "stop":
                control.inject(node, used={uuid: 50_000})
                break
        last = json.loads(process.stdout.readlines()[-1])["report"]
    report = last["hosts"]["box"]["servers"]["demo"]
    assert report["exit_code"] == Exit.NOT_FREED
    assert "timeouts.free" in report["evidence"]
    assert "50000 MiB" in report["evidence"]
    assert not box.serves()


# ------------------------------------------------------------------------------------------------ two servers, one node


def two_servers(box: Box, ports: dict[str, int], **more: Any) -> None:
    """Servers ``a`` on GPU 0 and ``b`` on GPU 1, ``c`` on both."""
    common = {"engine": "demo", "model": "demo-model", "env": {"LAB_SPEED": "1"}, **more}
    box.configure(
        host={
            "servers": {
                "a": {**common, "gpus": [0], "args": {"tp": 1}, "port": ports["a"]},
                "b": {**common, "gpus": [1], "args": {"tp": 1}, "port": ports["b"]},
                "c": {**common, "gpus": [0, 1], "args": {"tp": 2}, "port": ports["c"]},
            }
        }
    )


def read_until(process: Any, stage: str) -> None:
    """Read events until ``stage`` begins."""
    for line in process.stdout:
        event = json.loads(line)
        if event.get("event") == "stage_start" and event["stage"] == stage:
            return
    raise AssertionError(f"it never came to stage {stage}")


def test_two_servers_share_a_node_and_its_locks(box: Box) -> None:
    ports = {name: free_port() for name in "abc"}
    two_servers(box, ports)
    directory = Path(os.path.dirname(lock.shared_path("x")))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o1777
    held = [directory / f"gpu-{uuid}" for uuid in control.uuids(node_of(box))]
    command = ("deploy", "--json", "--host", "box", "--server")
    with box.driver.started(*command, "a") as first, box.driver.started(*command, "b") as second:
        for process in (first, second):  # disjoint GPUs: both come to their starts at the same time
            read_until(process, "start")
        assert [stat.S_IMODE(path.stat().st_mode) for path in held] == [0o666, 0o666]
        notes = [lock.holder_of(str(path)) or {} for path in held]
        assert [note.get("server") for note in notes] == ["a", "b"]
        for process in (first, second):
            assert process.stdout is not None
            assert process.stdout.readlines()
            assert process.wait(120) == Exit.OK
    assert token(ports["a"])
    assert token(ports["b"])
    assert [lock.holder_of(str(path)) for path in held] == [None, None]  # the servers hold none
    for name, uuid in zip("ab", control.uuids(node_of(box)), strict=True):  # by UUID: a boot may change the indexes
        told = ask(ports[name], "/lab/environ")[1]["processes"]
        assert {process["environ"].get("CUDA_VISIBLE_DEVICES") for process in told} == {uuid}
    for pid in [*pids_of(ports["a"]), *pids_of(ports["b"])]:
        targets = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
        assert [target for target in targets if target.startswith(str(directory)) or target.endswith("/lock")] == []

    # A server that was deployed and serves is not stale to another one, whatever it looks like.
    done = box.deploy("--server", "c")
    assert done.code == Exit.REFUSED, done
    said = "it is server a of lamplighter: `./inv stop --host box --server a` ends it"
    assert said in done.server("box", "c")["evidence"]
    assert token(ports["a"])
    assert token(ports["b"])


def test_on_a_locked_gpu_a_deploy_leaves_or_waits(box: Box) -> None:
    """Another user's run has one of its GPUs, as the file that all users share says."""
    uuid = control.uuids(node_of(box))[1]
    taken = lock.acquire(f"GPU {uuid}", lock.shared_path(f"gpu-{uuid}"))
    with contextlib.ExitStack() as stack:
        stack.callback(taken.release)
        taken.note({"run": "r1", "by": "ada@desk", "server": "other", "since": time.time(), "stage": "ready"})
        refused = box.deploy()
        assert refused.code == Exit.LOCKED, refused
        message = refused.server("box", "demo")["message"]
        assert re.search(rf"GPU {uuid} is locked by run r1 of ada@desk, begun \d+ s ago, at stage ready", message)
        assert "ask who began it" in refused.server("box", "demo")["hint"]
        assert "attach" not in refused.server("box", "demo")["hint"]  # which would look below our own root
        with box.driver.started("deploy", "--json", "--host", "box", "--wait", "90") as waiting:
            read_until(waiting, "lock")
            time.sleep(0.5)
            stack.close()
            last = json.loads(waiting.stdout.readlines()[-1])["report"]  # type: ignore[union-attr]
    report = last["hosts"]["box"]["servers"]["demo"]
    assert (report["exit_code"], report["outcome"]) == (Exit.OK, "deployed")
    assert report["durations"]["lock"] >= 0.4
