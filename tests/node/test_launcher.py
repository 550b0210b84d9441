"""The detached launcher: who the server is, how it ended, and that neither end of the launch takes the other along."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest

from lamplighter.node.health import census
from lamplighter.node.keeper import launcher, stop
from lamplighter.node.keeper.launcher import ExitStatus, Launched, LaunchFailed
from lamplighter.node.layout import LaunchFiles, RunDirectory, ServerHome
from lamplighter.node.system import processes
from tests.node.living import Living, is_running, kill, members, process_of, until


@pytest.fixture
def run(tmp_path: Path) -> LaunchFiles:
    return RunDirectory(str(tmp_path)).launch("new")


def shell(script: str, *arguments: str) -> list[str]:
    return ["/bin/sh", "-c", script, "server", *arguments]


def log_of(run: LaunchFiles) -> str:
    return Path(run.log).read_text()


# ------------------------------------------------------------------------------------------------------ the beginning


def test_who_it_is_lies_on_disk_before_its_first_instruction(
    run: LaunchFiles, living: Living, runner_home: str
) -> None:
    command = shell('cat "$1"; echo $$; exec sleep 60', run.process)
    launched = living.launch(command, run, runner_home)
    assert until(lambda: log_of(run).endswith(f"{launched.main.pid}\n"))
    record = json.loads(log_of(run).rpartition("}")[0] + "}")
    assert record["pid"] == launched.main.pid
    assert record["start"] == launched.main.start
    assert record["command"] == command
    assert launcher.read_launched(run) == launched
    assert processes.is_alive(launched.main)
    assert processes.is_alive(launched.supervisor)
    assert process_of(launched.main.pid).ppid == launched.supervisor.pid


def test_a_server_that_could_not_be_written_down_never_runs(tmp_path: Path, living: Living, runner_home: str) -> None:
    nowhere = RunDirectory(str(tmp_path / "missing")).launch("new")
    with pytest.raises(LaunchFailed, match="No such file or directory"):
        living.launch(shell('touch "$1"', str(tmp_path / "it-ran")), nowhere, runner_home)
    time.sleep(0.2)  # nothing to wait for: it must not happen
    assert not (tmp_path / "it-ran").exists()


def test_a_launcher_that_cannot_start_says_why(run: LaunchFiles, living: Living, tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match="can't open file"):
        living.launch(shell("exit"), run, str(tmp_path / "no-runner"))


def test_a_supervisor_that_hangs_is_given_up_and_cannot_start_anything_later(
    run: LaunchFiles, living: Living, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[launcher.launch_detached.__module__], "BEGIN_SECONDS", 0.3)
    runner = tmp_path / "runner"
    runner.mkdir()
    (runner / "__main__.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'part')!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'part')!r}, {str(tmp_path / 'pid')!r})\ntime.sleep(600)\n"
    )
    with pytest.raises(LaunchFailed, match="wrote nothing within"):
        living.launch(shell("exit"), run, str(runner))
    pid = tmp_path / "pid"
    assert not pid.exists() or not is_running(int(pid.read_text()))


def test_a_server_starts_clean(
    run: LaunchFiles, living: Living, runner_home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the worker ignores, holds open or has in its environment."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    inherited, other = os.pipe()
    os.set_inheritable(inherited, True)
    ignored = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    }
    before = os.umask(0o077)
    try:
        launched = living.launch(["/bin/sleep", "60"], run, runner_home, str(tmp_path))
        second = living.launch(shell("umask; echo err >&2; exec sleep 60"), run_beside(tmp_path), runner_home)
    finally:
        os.umask(before)
        for number, handler in ignored.items():
            signal.signal(number, handler)
        os.close(inherited)
        os.close(other)
    pid = launched.main.pid
    assert until(lambda: process_of(pid).title == "/bin/sleep")
    assert processes.open_files(pid) == {0: "/dev/null", 1: run.log, 2: run.log}
    assert os.readlink(f"/proc/{pid}/cwd") == str(tmp_path)
    assert process_of(pid).sid == process_of(pid).pgid == pid
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert int(status["SigIgn"], 16) == int(status["SigBlk"], 16) == 0
    environment = processes.environ(pid) or {}
    assert environment.keys() <= {"PATH", "HOME", "USER", "LOGNAME", "TZ", "LANG"}
    assert environment["LANG"] == "C.UTF-8"
    assert stat.S_IMODE(os.stat(run.log).st_mode) == stat.S_IMODE(os.stat(run.process).st_mode) == 0o600
    assert until(lambda: log_of(run_beside(tmp_path)) == "0022\nerr\n")
    assert second.supervisor != launched.supervisor


def run_beside(tmp_path: Path) -> LaunchFiles:
    return RunDirectory(str(tmp_path)).launch("old")


# ------------------------------------------------------------------------------------------------------------ the end


@pytest.mark.parametrize(
    ("script", "expected", "words"),
    [
        ("exit 0", ExitStatus(0, None), "exit status 0"),
        ("exit 139", ExitStatus(139, None), "exit status 139"),
        ("kill -SEGV $$", ExitStatus(None, signal.SIGSEGV), "killed by SIGSEGV"),
        ("kill -KILL $$", ExitStatus(None, signal.SIGKILL), "killed by SIGKILL"),
    ],
)
def test_codes_and_signals_are_told_apart(
    run: LaunchFiles, living: Living, runner_home: str, script: str, expected: ExitStatus, words: str
) -> None:
    launched = living.launch(shell(script), run, runner_home)
    status = launcher.read_exit(run, wait=60)
    assert status == expected
    assert str(status) == words
    assert until(lambda: not processes.is_alive(launched.supervisor))
    assert launcher.read_launched(run) == launched


@pytest.mark.parametrize(
    ("command", "directory", "reason"),
    [
        (["/no/such/launch.sh"], "/", "/no/such/launch.sh: No such file or directory"),
        (["/etc/passwd"], "/", "/etc/passwd: Permission denied"),
        (["/bin/sh"], "/no/such/release", "/no/such/release: No such file or directory"),
    ],
)
def test_a_command_that_cannot_be_run_is_127_with_the_reason_in_its_log(
    run: LaunchFiles, living: Living, runner_home: str, command: list[str], directory: str, reason: str
) -> None:
    living.launch(command, run, runner_home, directory)
    assert launcher.read_exit(run, wait=60) == ExitStatus(127, None)
    assert reason in log_of(run)


def test_while_it_runs_there_is_no_exit(run: LaunchFiles, living: Living, runner_home: str) -> None:
    launched = living.launch(["/bin/sleep", "60"], run, runner_home)
    assert launcher.read_exit(run, wait=0.1) is None
    kill(launched.main)
    assert launcher.read_exit(run, wait=60) == ExitStatus(None, signal.SIGKILL)


def test_a_killed_supervisor_takes_nothing_but_the_exit_status_along(
    run: LaunchFiles, living: Living, runner_home: str
) -> None:
    launched = living.launch(shell("sleep 60 & wait"), run, runner_home)
    assert until(lambda: sorted(each.title for each in members(launched)) == ["/bin/sh", "sleep"])
    kill(launched.supervisor)
    assert until(lambda: process_of(launched.main.pid).ppid != launched.supervisor.pid)
    assert processes.is_alive(launched.main)
    assert len(members(launched)) == 2
    kill(launched.main)
    assert [process.title for process in members(launched)] == ["sleep"]  # its leader is gone, its session is not
    assert launcher.read_exit(run, wait=0.1) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_its_group_does_not_end_the_supervisor(
    run: LaunchFiles, living: Living, runner_home: str, number: signal.Signals
) -> None:
    launched = living.launch(["/bin/sleep", "60"], run, runner_home)
    group = process_of(launched.supervisor.pid).pgid
    assert group != os.getpgid(0)
    os.killpg(group, number)
    os.kill(launched.main.pid, signal.SIGTERM)
    assert launcher.read_exit(run, wait=60) == ExitStatus(None, signal.SIGTERM)


# ------------------------------------------------------------------------------------------------ what descends from it

#: Leaves a double-forked daemon in a session of its own, an orphan in the server's session, and a child.
FAMILY = """
import os, sys, time
def fork_twice(own_session):
    if os.fork() == 0:
        if own_session:
            os.setsid()
        if os.fork() == 0:
            open(sys.argv[1], "a").write(f"{os.getpid()} ")
            time.sleep(600)
        os._exit(0)
    os.wait()
fork_twice(True)
fork_twice(False)
if os.fork() == 0:
    open(sys.argv[1], "a").write(f"{os.getpid()} ")
    time.sleep(600)
time.sleep(600)
"""


def launch_family(run: LaunchFiles, living: Living, runner_home: str, tmp_path: Path) -> tuple[Launched, set[int]]:
    pids = tmp_path / "pids"
    words = [sys.executable, "-I", "-S", "-c", FAMILY, str(pids)]
    launched = living.launch(words, run, runner_home)
    assert until(lambda: pids.exists() and len(pids.read_text().split()) == 3)
    family = {int(word) for word in pids.read_text().split()}
    for pid in family:
        living.keep(pid)
    return launched, {*family, launched.main.pid}


def test_descendants_stay_findable_whatever_they_do_and_are_stopped(
    run: LaunchFiles, living: Living, runner_home: str, tmp_path: Path
) -> None:
    launched, family = launch_family(run, living, runner_home, tmp_path)
    assert {process.pid for process in members(launched)} == family
    kill(launched.main)
    assert launcher.read_exit(run, wait=60) == ExitStatus(None, signal.SIGKILL)
    family.remove(launched.main.pid)
    assert until(lambda: {process_of(pid).ppid for pid in family} == {launched.supervisor.pid})
    assert {process.pid for process in members(launched)} == family
    assert processes.is_alive(launched.supervisor)
    told: list[str] = []
    assert stop.stop(lambda: members(launched), stop.Manner(signal.SIGTERM, 60), told.append) == []
    assert [pid for pid in family if is_running(pid)] == []
    assert told == []
    assert until(lambda: not processes.is_alive(launched.supervisor))


def test_a_supervisor_that_cannot_write_the_exit_still_keeps_the_descendants(
    run: LaunchFiles, living: Living, runner_home: str, tmp_path: Path
) -> None:
    """As on a full disk."""
    (tmp_path / "run").mkdir()
    run = RunDirectory(str(tmp_path / "run")).launch("new")
    launched, family = launch_family(run, living, runner_home, tmp_path)
    os.rename(tmp_path / "run", tmp_path / "moved-away")
    kill(launched.main)
    family.remove(launched.main.pid)
    assert until(lambda: not Path(f"/proc/{launched.main.pid}").exists())
    second = family.pop()  # reaped after the main process: so the supervisor has been past the record
    kill(process_of(second).identity)
    assert until(lambda: not Path(f"/proc/{second}").exists())
    assert processes.is_alive(launched.supervisor)
    assert {process_of(pid).ppid for pid in family} == {launched.supervisor.pid}


def test_the_environment_of_every_launch_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/opt/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("TZ", raising=False)
    assert "TZ" not in launcher.bare_environment()
    assert "CUDA_VISIBLE_DEVICES" not in launcher.bare_environment()
    assert launcher.bare_environment()["PATH"] == "/opt/bin"
    monkeypatch.delenv("PATH")
    assert launcher.bare_environment()["PATH"].split(":")[-1] == "/bin"


def test_an_end_that_nobody_saw() -> None:
    assert str(ExitStatus(None, None)) == "exit status unknown"


def test_a_launch_of_which_nothing_is_left_claims_nothing_any_more(tmp_path: Path) -> None:
    home = ServerHome(str(tmp_path / "servers" / "demo"))
    launch = home.run("20260101T000000Z-abcdef").launch("new")
    os.makedirs(launch.directory)
    me = processes.read_process(os.getpid())
    assert me is not None
    record = {"boot_id": me.identity.boot_id, "pid": me.pid, "start": me.start}
    Path(launch.process).write_text(json.dumps({**record, "supervisor_pid": me.pid, "supervisor_start": me.start}))
    assert len(census.recorded_launches(home, {})) == 1
    Path(launch.exit).write_text(json.dumps({"code": 0, "signal": None, "t": 0, "all_gone": True}))
    assert census.recorded_launches(home, {}) == []


def test_a_launch_that_was_a_unit_claims_by_its_cgroup_alone(tmp_path: Path) -> None:
    """Nobody writes down when the last process of a unit is gone: its numbers may be anybody's."""
    home = ServerHome(str(tmp_path / "servers" / "demo"))
    launch = home.run("20260101T000000Z-abcdef").launch("new")
    os.makedirs(launch.directory)
    me = process_of(os.getpid())
    record = {"boot_id": me.identity.boot_id, "pid": me.pid, "start": me.start, "cgroup": me.cgroup}
    for unit, launches in ({}, 1), ({"unit": "lamplighter-demo.service", "manager_uid": None}, 0):
        Path(launch.process).write_text(json.dumps({**record, **unit}))
        assert len(census.recorded_launches(home, {me.pid: me})) == launches
