"""Runs as such: cancelled, interrupted, listed, pruned, repaired after a kill; against a node in a box."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.events import Exit
from lamplighter.node.system import ports
from tests.driver import eventually, wait_for_stage
from tests.faults import puppet
from tests.lab.conftest import Box

#: For a server that hangs until somebody ends it, however long that takes here.
PATIENT = {"stall": 600, "ready": 600}


def test_cancel_rolls_back_a_run_of_another_command(box: Box) -> None:
    box.deploy()
    old = box.deploy().server("box", "demo")["serving"]["release"]
    box.configure(args={"lab-fail": "hang:weights"}, timeouts=PATIENT)
    with box.driver.started("deploy", "--json", "--host", "box") as process:
        run = wait_for_stage(process, "ready")["run"]
        cancelled = box.run("cancel", "--json")
        assert cancelled.code == process.wait(120) == Exit.ROLLED_BACK
    report = cancelled.server("box", "demo")
    assert (report["run"], report["cause"], report["serving"]["release"]) == (run, "cancelled", old)
    assert "cancelled by" in report["message"]
    assert box.serves()
    verdicts = {row["release"]: row["verdict"] for row in releases_of(box)}
    assert verdicts == {old: "good", report["release"]: "unproven"}  # it did nothing wrong
    again = box.run("cancel", "--json")
    assert again.code == Exit.REFUSED
    assert "no run of server demo is at work" in again.stderr
    for name, told in (
        (run, "is not at work: it ended rolled_back"),
        ("20260101T000000Z-abcdef", "there is no run 20260101T000000Z-abcdef of"),
    ):
        late = box.run("cancel", "--run", name)
        assert late.code == Exit.REFUSED
        assert told in late.stdout


def releases_of(box: Box) -> list[dict[str, Any]]:
    answer = json.loads(box.run("releases", "--json").stdout)
    rows: list[dict[str, Any]] = answer["releases"]["hosts"]["box"]["servers"]["demo"]["releases"]
    return rows


def test_releases_say_what_each_is_worth(box: Box) -> None:
    first = box.deploy().server("box", "demo")["release"]
    box.configure(env={"NUMBER": "2"})
    second = box.deploy().server("box", "demo")["release"]
    box.configure(args={"lab-fail": "die:weights"})
    third = box.deploy().server("box", "demo")["release"]
    rows = {row["release"]: row for row in releases_of(box)}
    assert {digest: row["verdict"] for digest, row in rows.items()} == {first: "good", second: "good", third: "bad"}
    assert [digest for digest, row in rows.items() if row["is_current"]] == [second]
    assert [digest for digest, row in rows.items() if row["is_rollback_target"]] == [first]
    assert rows[third]["message"]
    assert all(row["bytes"] > 1000 for row in rows.values())
    unknown = box.run("rollback", "--to", "zzzz", "--json").server("box", "demo")
    assert "no release of demo begins with 'zzzz'" in unknown["message"]
    assert unknown["hint"] == "./inv releases --host box --server demo lists them"
    text = box.run("releases").stdout
    assert "next for rollback" in text
    assert "current" in text


@pytest.mark.parametrize(("answers", "code"), [(["c"], Exit.ROLLED_BACK), (["d"], Exit.DETACHED), ([], Exit.DETACHED)])
def test_ctrl_c_at_a_terminal_asks(box: Box, answers: list[str], code: Exit) -> None:
    """No answer but a second Ctrl-C detaches."""
    box.deploy()
    box.configure(env={"LAB_SPEED": "1"})  # long enough for a question and its answer
    ours, theirs = pty.openpty()
    words = box.driver.command("deploy", "--host", "box")
    with subprocess.Popen(
        words, env=box.driver.environment(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        try:
            said = read_until(ours, "ready: begins")
            process.send_signal(signal.SIGINT)
            said = read_until(ours, "[c]ancel?")
            if answers:
                os.write(ours, f"{answers[0]}\n".encode())
            else:
                process.send_signal(signal.SIGINT)
            said += read_until(ours, None)
            assert process.wait(120) == code, said
        finally:
            process.kill()
            os.close(ours)
    if code == Exit.DETACHED:
        assert "attach --host box --server demo" in said
        assert box.run("attach", "--json").code == Exit.OK
    assert box.serves()


@pytest.mark.parametrize("words", [["--json"], []])
def test_a_terminal_that_is_closed_detaches(box: Box, tmp_path: Path, words: list[str]) -> None:
    box.deploy()
    box.configure(env={"LAB_SPEED": "1"})
    ours, theirs = pty.openpty()
    command = ["setsid", "--ctty", *box.driver.command("restart", *words, "--host", "box")]
    with (
        open(tmp_path / "said", "w+", encoding="utf-8") as said,
        subprocess.Popen(
            command, env=box.driver.environment(), stdin=theirs, stdout=said if words else theirs, stderr=theirs
        ) as process,
    ):
        os.close(theirs)
        try:
            read_until(ours, "ready: begins")
            os.close(ours)
            assert process.wait(120) == Exit.DETACHED
        finally:
            process.kill()
        said.seek(0)
        lines = said.read().splitlines()
    if words:
        part = json.loads(lines[-1])["report"]["hosts"]["box"]["servers"]["demo"]
        assert part["hint"] == f"./inv attach --host box --server demo --run {part['run']}"
    assert box.run("attach", "--json").code == Exit.OK
    assert box.serves()


def read_until(terminal: int, word: str | None) -> str:
    said = ""
    deadline = time.monotonic() + 120
    while word is None or word not in said:
        assert time.monotonic() < deadline, said
        if select.select([terminal], [], [], 1)[0]:
            try:
                said += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # EIO: the other side has closed
                break
    return said


def test_interrupted_before_a_run_began_is_130(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.settimeout(60)
        box.configure(host={"ansible_port": mute.getsockname()[1], "connect_timeout": 60})
        with box.driver.started("deploy", "--json", "--host", "box") as process:
            connection, _ = mute.accept()
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == Exit.INTERRUPTED
            assert process.stdout is not None
            report = json.loads(process.stdout.read().splitlines()[-1])["report"]
            part = report["hosts"]["box"]["servers"]["demo"]
            assert (report["exit_code"], part["message"]) == (130, "interrupted; nothing was touched")
            connection.close()


def test_a_killed_run_is_shown_and_repaired(box: Box) -> None:
    box.deploy()
    box.configure(args={"lab-fail": "hang:weights"}, timeouts=PATIENT)
    event = kill_at_ready(box)
    status = status_of(box)
    assert status["run"] is None
    assert (status["last_run"]["id"], status["last_run"]["state"]) == (event["run"], "killed")
    assert "killed without a last word" in box.run("status").stdout
    stopped = box.run("stop", "--json")  # any verb repairs
    assert stopped.code == Exit.OK, stopped
    shown = box.run("attach", "--json", "--run", event["run"])
    assert shown.server("box", "demo")["cause"] == "abandoned"
    assert not box.serves()
    assert box.run("start", "--json").code == Exit.OK


def kill_at_ready(box: Box) -> dict[str, Any]:
    """Deploy, and kill the worker while the new server loads; the event that began the stage."""
    with box.driver.started("deploy", "--json", "--host", "box") as process:
        event = wait_for_stage(process, "ready")
        status = status_of(box)
        assert (status["run"]["id"], status["run"]["stage"]) == (event["run"], "ready")
        worker = json.loads((box.state / "runs" / event["run"] / "worker.json").read_text())
        os.kill(worker["pid"], signal.SIGKILL)
        assert process.wait(120) == Exit.INTERNAL
    return event


def test_a_server_of_a_killed_run_that_has_bound_its_port_and_loads_is_replaced(box: Box) -> None:
    box.configure(args={"lab-fail": "bind-early,hang:weights"}, timeouts=PATIENT)
    kill_at_ready(box)
    eventually(lambda: not ports.is_free("127.0.0.1", box.port))
    assert not ports.listeners(box.port)
    assert not ports.is_free("127.0.0.1", box.port)
    checked = box.run("check", "--json")
    assert checked.code == Exit.OK, checked
    box.configure(args={"lab-fail": "bind-early"})
    deployed = box.deploy()
    assert deployed.server("box", "demo")["outcome"] == "deployed"


def test_a_stranger_who_has_bound_the_port_is_in_the_way(box: Box) -> None:
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", box.port))
        refused = box.run("deploy", "--json")
    assert refused.code == Exit.REFUSED
    error = refused.server("box", "demo")
    assert error["cause"] == "port_in_use"
    assert "without listening" in error["evidence"]


def status_of(box: Box) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(box.run("status", "--json").stdout)["status"]["hosts"]["box"]["servers"]["demo"]
    return status


def test_current_that_points_to_nothing_is_repaired(box: Box) -> None:
    first = box.deploy().server("box", "demo")["release"]
    box.configure(env={"NUMBER": "2"})
    second = box.deploy().server("box", "demo")["release"]
    subprocess.run(["rm", "-rf", str(box.state / "releases" / second)], check=True)
    (box.state / "releases" / "0123456789ab").mkdir()  # half a release
    restarted = box.run("restart", "--json")
    assert restarted.code == Exit.OK, restarted
    assert restarted.server("box", "demo")["serving"]["release"] == first
    assert os.readlink(box.state / "current") == f"releases/{first}"
    assert not (box.state / "releases" / "0123456789ab").exists()


def test_old_runs_and_runners_are_pruned_but_for_those_in_use(box: Box) -> None:
    box.deploy()
    shelf = box.state.parents[1] / "bin"
    (supervisors,) = {path.name for path in shelf.iterdir() if path.is_dir()}
    for name in ("a" * 64, "b" * 64, "c" * 64, "notes"):
        (shelf / name).mkdir()
        (shelf / name / "x.py").touch()
    for name in ("a" * 64, "c" * 64, "notes", supervisors):
        os.utime(shelf / name, (0, 0))
    kept = json.loads((box.state / "server.json").read_text())["run"]
    for number in range(25):
        old = box.state / "runs" / f"20200101T0000{number:02d}Z-abcdef"
        old.mkdir()
        (old / "events.jsonl").write_text('{"event":"run","seq":1}\n{"event":"end","seq":2,"outcome":"failed"}\n')
        (old / "worker.json").write_text('{"boot_id": "x", "pid": 1, "start": 1}')
    with subprocess.Popen(["/bin/sh", "-c", "read x", "supervise", shelf / ("c" * 64)], stdin=subprocess.PIPE):
        box.deploy()
    left = sorted(path.name for path in (box.state / "runs").iterdir())
    assert len(left) == 20
    assert kept in left
    assert {path.name for path in shelf.iterdir() if path.is_dir()} == {
        supervisors,
        "b" * 64,
        "c" * 64,
        "notes",
    }
    assert (shelf / supervisors).stat().st_mtime > 0  # each session dates what it uses


@pytest.mark.parametrize(("wish", "code"), [("keep", Exit.DEGRADED), ("rollback", Exit.ROLLED_BACK)])
def test_a_failed_confirmation_keeps_or_rolls_back(box: Box, wish: str, code: Exit) -> None:
    """The demo server writes over this variable before it starts its workers, as SGLang does."""
    old = box.deploy().server("box", "demo")["release"]
    box.configure(env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, on_confirm_failure=wish)
    done = box.deploy()
    assert done.code == code, done
    report = done.server("box", "demo")
    assert report["stage"] == "confirm"
    assert (report["serving"]["release"] == old) == (wish == "rollback")
    assert box.serves()


def test_the_log_of_a_failed_run_is_named_and_shown(box: Box) -> None:
    box.deploy()
    box.configure(args={"lab-fail": "die:graphs"})
    failed = box.run("deploy")
    assert failed.code == Exit.ROLLED_BACK, failed
    run = sorted(path.name for path in (box.state / "runs").iterdir())[-1]
    assert f"more: ./inv logs --host box --server demo --run {run}" in failed.stdout
    assert "kill_process_tree called" in box.run("logs", "--lines", "5000", "--run", run).stdout
    assert "kill_process_tree called" not in box.run("logs", "--lines", "5000").stdout  # what serves
    for unknown in ("20200101T000000Z-000000", "../../current"):
        missing = box.run("logs", "--run", unknown)
        assert missing.code == Exit.REFUSED
        assert f"the node has no run {unknown} of it" in missing.stderr


def test_verbs_that_bring_no_release_work_while_the_inventory_is_wrong(box: Box) -> None:
    first = box.deploy().server("box", "demo")["release"]
    box.configure(env={"NUMBER": "2"})
    second = box.deploy().server("box", "demo")["release"]
    box.configure(args={"served-model-name": "twice"})
    refused = box.deploy()
    assert refused.code == Exit.USAGE
    assert "hosts.yml:" in refused.stderr
    assert "servers.demo.args.served-model-name: has a setting of its own" in refused.stderr
    stopped = box.run("stop", "--json")
    assert stopped.code == Exit.OK, stopped
    assert any(
        "has a setting of its own" in event["message"] for event in stopped.events if event["event"] == "warning"
    )
    assert not box.serves()
    assert box.run("start", "--json").server("box", "demo")["release"] == second
    assert box.run("restart", "--json").server("box", "demo")["release"] == second
    assert box.run("rollback", "--json").server("box", "demo")["release"] == first
    for verb in ("attach", "logs", "status", "releases"):
        assert box.run(verb).code == Exit.OK, verb


def test_without_any_plan_the_mistake_of_the_inventory_is_told(box: Box) -> None:
    box.configure(args={"served-model-name": "twice"})
    stopped = box.run("stop", "--json")
    assert stopped.code == Exit.USAGE, stopped
    assert "has a setting of its own" in stopped.server("box", "demo")["message"]


@pytest.mark.parametrize(
    "words",
    [("deploy", "--wait", "abc"), ("stop", "--wait", "ten"), ("logs", "--lines", "abc"), ("deploy", "--max-age", "-")],
)
def test_a_value_that_is_none_is_a_mistake_of_usage(box: Box, words: tuple[str, ...]) -> None:
    done = box.run(*words)
    assert done.code == Exit.USAGE
    assert "Traceback" not in done.stderr
    assert f"{words[2]!r} is no" in done.stderr


def test_who_serves_is_left_to_the_run_that_has_the_lock(box: Box) -> None:
    box.deploy()
    box.configure(args={"lab-fail": "hang:weights"}, timeouts=PATIENT)
    with box.driver.started("deploy", "--json", "--host", "box") as process:
        run = wait_for_stage(process, "ready")["run"]
        locked = box.run("stop", "--json")
        assert locked.code == Exit.LOCKED
        part = locked.server("box", "demo")
        assert f"run {run}" in part["message"]
        assert part["message"].endswith("the other run decides what serves")
        assert "./inv attach --host box --server demo shows it live" in part["hint"]
        with box.driver.started("stop", "--wait", "600", "--json", "--host", "box") as waiter:
            waiting = wait_for_stage(waiter, "lock")["run"]
            assert waiter.stdout is not None
            said = next(line for line in waiter.stdout if "waiting for server demo" in line)
            assert f"run {run} of" in said
            assert "at stage ready has it" in said
            (box.state / "runs" / waiting / "cancel.json").write_text('{"by": "the test"}')
            report = json.loads(waiter.stdout.read().splitlines()[-1])["report"]
            assert waiter.wait(120) == Exit.INTERRUPTED
        part = report["hosts"]["box"]["servers"]["demo"]
        assert part["message"].endswith("nothing was touched: the other run decides what serves")
        box.run("cancel")
        process.wait(120)


def test_the_clock_of_the_control_machine_orders_nothing(
    box: Box, monkeypatch: pytest.MonkeyPatch, require: Any
) -> None:
    """It goes ten minutes fast for the first run, and for the one that holds the lock."""
    library = puppet.faketime()
    if library is None:
        require("netns", "libfaketime is not installed")

    # Python sleeps to a moment, which libfaketime may make one that the kernel refuses: EINVAL.
    patches = box.directory / "patches"
    patches.mkdir()
    (patches / "sitecustomize.py").write_text(
        "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds)\n"
    )

    @contextlib.contextmanager
    def fast() -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name, value in {
                "PYTHONPATH": str(patches),
                "LD_PRELOAD": library,
                "FAKETIME": "+600s",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }.items():
                patch.setenv(name, value)
            yield

    with fast():
        first = box.deploy().server("box", "demo")["run"]
    second = box.deploy().server("box", "demo")["run"]
    assert second < first
    assert status_of(box)["last_run"]["id"] == second
    assert box.run("attach", "--json").server("box", "demo")["run"] == second
    assert (
        json.loads(box.run("diagnose", "--json").stdout)["diagnose"]["hosts"]["box"]["servers"]["demo"]["run"] == second
    )
    box.configure(args={"lab-fail": "hang:weights"}, timeouts=PATIENT)
    with fast(), box.driver.started("deploy", "--json", "--host", "box") as process:
        wait_for_stage(process, "ready")
        with monkeypatch.context() as patch:
            patch.delenv("LD_PRELOAD")
            locked = box.deploy()
            assert locked.code == Exit.LOCKED
            age = re.search(r"begun (-?\d+) s ago", locked.server("box", "demo")["message"])
            assert age is not None
            assert 0 <= int(age.group(1)) < 300
            box.run("cancel")
        process.wait(120)


class Wire:
    """A way to the node through this process. Cut, no word passes any more and the node notices nothing of that."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._let_in, daemon=True).start()

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._pairs.append((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def cut(self) -> None:
        for near, _ in self._pairs:
            near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in (self._door, *(end for pair in self._pairs for end in pair)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def test_what_is_told_as_untouched_stays_so_though_the_node_was_just_looking(box: Box) -> None:
    box.deploy()
    serving = status_of(box)
    wire = Wire(box.endpoint.port)
    known = box.directory / "known_hosts"
    known.write_text(box.endpoint.known_hosts.read_text().replace(f":{box.endpoint.port} ", f":{wire.port} "))
    box.configure(env={"NUMBER": "2"}, host={"ansible_port": wire.port, "known_hosts": str(known)})
    children = Path(f"/proc/{serving['pid']}/task/{serving['pid']}/children").read_text().split()
    for worker in children:  # no token comes, so the look lasts as long as we like
        os.kill(int(worker), signal.SIGSTOP)
    try:
        with box.driver.started("deploy", "--if-changed", "--json", "--host", "box") as process:
            looking = eventually(lambda: who_asks(box.port))
            wire.cut()
            assert process.stdout is not None
            report = json.loads(process.stdout.read().splitlines()[-1])["report"]
            assert process.wait(120) == Exit.UNREACHABLE
    finally:
        for worker in children:
            os.kill(int(worker), signal.SIGCONT)
        wire.close()
    part = report["hosts"]["box"]["servers"]["demo"]
    eventually(lambda: not os.path.exists(f"/proc/{looking}"))
    box.configure()
    now = status_of(box)
    assert (now["run"], now["pid"], now["last_run"]["outcome"]) == (None, serving["pid"], "unreachable")
    assert part["message"] == "contact was lost before the run began; nothing was touched"
    assert (part["outcome"], part["serving"]) == ("unreachable", None)  # its workers were stopped: it answered nobody
    assert box.deploy("--if-changed").server("box", "demo")["outcome"] == "unchanged"


def who_asks(port: int) -> int | None:
    """The relay that waits for an answer of the server on ``port``: a token, since all else is answered at once."""
    first = _askers(port)
    time.sleep(1.0)
    return next(iter(first & _askers(port)), None)


def _askers(port: int) -> set[int]:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[2].endswith(f":{port:04X}") and row[3] == "01"}
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if sockets & {os.readlink(fd) for fd in (entry / "fd").iterdir()}:
                found.add(int(entry.name))
    return found
