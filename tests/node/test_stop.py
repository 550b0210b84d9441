"""Stopping by proven identity: stubborn processes, newcomers, and servers that end their own workers."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lamplighter.node.keeper import stop
from lamplighter.node.system import processes
from lamplighter.node.system.processes import Process
from tests.node.living import IS_ROOT, NOBODY, Living, group_members, is_running, process_of, until

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up")
time.sleep(600)
"""

#: Writes down in a file what it gets; its child does too. TERM to the parent: it asks the child to go, then goes.
ORDERLY = """
import os, signal, time
path = sys.argv[1]
def note(who):
    with open(path, "a") as file:
        file.write(who + "\\n")
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, lambda *_: note("child got TERM"))
    leaving = []
    signal.signal(signal.SIGUSR1, lambda *_: leaving.append(1))
    note("child is up")
    while not leaving:
        time.sleep(0.01)
    os._exit(0)
def end(*_):
    note("parent got TERM")
    while "child got TERM" not in open(path).read():
        time.sleep(0.01)
    os.kill(child, signal.SIGUSR1)
    os.waitpid(child, 0)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print("up")
while True:
    time.sleep(1)
"""


def tell_nothing(text: str) -> None:
    raise AssertionError(text)


def group(pid: int) -> Callable[[], tuple[Process, ...]]:
    return lambda: group_members(pid)


def test_what_ends_at_once_is_not_waited_for(living: Living) -> None:
    process = living.titled("server", start_new_session=True)
    began = time.monotonic()
    assert stop.stop(group(process.pid), stop.Manner(signal.SIGTERM, 600), tell_nothing) == []
    assert time.monotonic() - began < 60
    assert not is_running(process.pid)


def test_nothing_to_stop() -> None:
    assert stop.stop(list, stop.Manner(signal.SIGTERM, 60), tell_nothing) == []


def test_what_ignores_the_signal_is_killed_after_the_grace(living: Living) -> None:
    stubborn = living.python(STUBBORN, start_new_session=True)
    told: list[str] = []
    began = time.monotonic()
    assert stop.stop(group(stubborn.pid), stop.Manner(signal.SIGTERM, 0.5), told.append) == []
    assert time.monotonic() - began >= 0.5
    assert not is_running(stubborn.pid)
    title = stubborn.child.args[0]
    assert told == [f"alive 0 s after SIGTERM: {stubborn.pid} ({title}); sending KILL"]


def test_without_grace_it_is_killed(living: Living) -> None:
    process = living.titled("server", start_new_session=True)
    assert stop.stop(group(process.pid), stop.Manner(signal.SIGTERM, 0), lambda _: None) == []
    assert living.exit_code(process.pid) == -signal.SIGKILL


def test_children_that_appear_while_it_is_stopped_are_stopped_too(
    living: Living, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import os, signal, time
def leave_children(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            time.sleep(600)
        open(sys.argv[1], "a").write(f"{child}\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, leave_children)
print("up")
while True:
    time.sleep(1)
"""
    parent = living.python(code, str(tmp_path / "pids"), start_new_session=True)
    told: list[str] = []
    looks: list[tuple[Process, ...]] = []
    monkeypatch.setattr(stop, "LOOK_SECONDS", 0.0)

    def look() -> tuple[Process, ...]:
        if looks:  # the first one found whom to signal
            assert until(lambda: not is_running(parent.pid))
        looks.append(group_members(parent.pid))
        return looks[-1]

    assert stop.stop(look, stop.Manner(signal.SIGTERM, 1.0), told.append) == []
    children = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(children) == 3
    assert [pid for pid in [parent.pid, *children] if is_running(pid)] == []
    assert len(told) == 1


def test_a_child_that_the_last_look_just_missed_is_stopped_too(living: Living, tmp_path: Path) -> None:
    """A look takes time: while it is taken, a process that it has seen already may leave a child and end."""
    code = """
import os, signal, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("up")
while not told or not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
child = os.fork()
if child == 0:
    time.sleep(600)
with open(sys.argv[2], "w") as file:
    file.write(str(child))
"""
    parent = living.python(code, str(tmp_path / "go"), str(tmp_path / "pid"), start_new_session=True)
    looks = 0

    def slow_look() -> tuple[Process, ...]:
        nonlocal looks
        looks += 1
        found = group_members(parent.pid)
        if looks == 2:  # the first one found whom to signal
            (tmp_path / "go").touch()
            assert until(lambda: not is_running(parent.pid))
            living.keep(int((tmp_path / "pid").read_text()))
        return found

    assert stop.stop(slow_look, stop.Manner(signal.SIGTERM, 120), tell_nothing) == []
    assert looks > 2
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_the_signal_goes_to_all_and_once_to_each(living: Living, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    parent = living.python(ORDERLY, str(notes), start_new_session=True)
    assert until(lambda: notes.exists() and "child is up" in notes.read_text())
    assert stop.stop(group(parent.pid), stop.Manner(signal.SIGTERM, 60), tell_nothing) == []
    lines = notes.read_text().splitlines()
    assert lines.count("parent got TERM") == 1
    assert lines.count("child got TERM") == 1


def test_workers_whose_root_died_get_the_signal_as_well(living: Living) -> None:
    code = "import os, time\nif os.fork(): print('up')\ntime.sleep(600)"
    parent = living.python(code, start_new_session=True)
    assert until(lambda: len(group_members(parent.pid)) == 2)
    assert stop.stop(group(parent.pid), stop.Manner(signal.SIGTERM, 60), tell_nothing) == []
    assert group_members(parent.pid) == ()


def test_whom_it_has_claimed_it_ends_whatever_that_process_lets_go_of(living: Living) -> None:
    stubborn = living.python(STUBBORN)
    found = [[process_of(stubborn.pid)]]
    told: list[str] = []
    assert stop.stop(lambda: found.pop() if found else [], stop.Manner(signal.SIGTERM, 0.2), told.append) == []
    assert not is_running(stubborn.pid)


def test_a_recycled_pid_is_neither_signalled_nor_waited_for(living: Living) -> None:
    innocent = living.titled("innocent")
    earlier = dataclasses.replace(innocent.identity, start=innocent.start - 1)
    other_boot = dataclasses.replace(innocent.identity, boot_id="before the reboot")
    for identity in (earlier, other_boot):
        found = dataclasses.replace(innocent, identity=identity)
        assert stop.stop(lambda found=found: [found], stop.Manner(signal.SIGKILL, 30), tell_nothing) == []
        stop.send(identity, signal.SIGKILL)
    assert processes.is_alive(innocent.identity)


def test_a_zombie_is_not_waited_for(living: Living) -> None:
    child = living.start(["/bin/true"])
    assert until(lambda: process_of(child.pid).state == "Z")
    assert stop.stop(lambda: [process_of(child.pid)], stop.Manner(signal.SIGTERM, 30), tell_nothing) == []


def test_it_never_ends_itself() -> None:
    stop.send(process_of(os.getpid()).identity, signal.SIGKILL)


def test_it_never_ends_whom_it_descends_from(living: Living) -> None:
    """As with a shell over SSH whose command line carries the engine's name: the signal comes from below it."""
    code = """
import os, signal, subprocess, time
from lamplighter.node.keeper import stop
from lamplighter.node.system import processes
above = processes.read_process(os.getpid())
if os.fork() == 0:
    if os.fork() == 0:
        stop.KILL_SECONDS = 0.2
        left = stop.stop(lambda: [above], stop.Manner(signal.SIGTERM, 0.1), lambda text: None)
        print([process.pid for process in left] == [above.pid], flush=True)
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
time.sleep(60)
"""
    shell = living.python(code)
    assert shell.first_line == "True"
    assert is_running(shell.pid)


@pytest.mark.skipif(not IS_ROOT, reason="only root can be two users")
def test_what_may_not_be_signalled_survives_and_is_named(living: Living, runner_home: str) -> None:
    other = living.titled("someone's server")
    code = f"""
import signal
sys.path.insert(0, {runner_home!r})
from lamplighter.node.keeper import stop
from lamplighter.node.system import processes
stop.KILL_SECONDS = 0.3
found = [processes.read_process({other.pid})]
print(stop.describe_survivors(stop.stop(lambda: found, stop.Manner(signal.SIGTERM, 0.1), lambda text: None), ()))
"""
    said = living.plain(code, user=NOBODY, group=NOBODY, cwd="/")
    assert said == f"pid {other.pid} (someone's server)"
    assert processes.is_alive(other.identity)
