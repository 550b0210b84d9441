"""Who stands above a server and may start it again: loops, scripts, prompts, watchdogs, as real processes."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.keeper import restarters
from lamplighter.node.keeper.ownership import STALE, Claim
from lamplighter.node.keeper.restarters import Restarter
from lamplighter.node.system import processes
from lamplighter.node.system.processes import Process
from tests.node.living import SLEEP, Living, kill, process_of, until
from tests.node.test_restarters import PROGRAMS, no_word

#: What the "server" is called: no other process of this machine is.
TITLE = "lamplighter-test-server"
SERVER = f"(exec -a {TITLE} {shlex.quote(SLEEP)} 600)"


def servers(above: int) -> list[Process]:
    return [each for each in processes.descendants([above]) if each.title == TITLE]


def server_below(pid: int) -> Process:
    assert until(lambda: servers(pid))
    return servers(pid)[0]


def find(server: Process, *listed: str) -> list[Restarter]:
    claim = Claim(server, STALE, "holds one of our GPUs")
    return restarters.find([claim], processes.processes(), None, listed, PROGRAMS)


@pytest.fixture
def living() -> Iterator[Living]:
    started = Living()
    yield started
    sessions = {child.pid for child in started.children}
    started.end()
    while orphans := [each for each in processes.processes().values() if each.sid in sessions and not each.is_dead]:
        for each in orphans:  # of a parent that was ended
            kill(each.identity)


def above(living: Living, *words: str, **options: Any) -> tuple[subprocess.Popen[bytes], Process]:
    """Start a parent of a server. The test itself stands above it, and is spared as an ancestor of this very run."""
    child = living.start(list(words), start_new_session=True, **options)
    return child, server_below(child.pid)


LOOP = f"while true; do {SERVER}; sleep 0.1; done"
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
OTHER = f"exec -a /usr/bin/trainer {shlex.quote(SLEEP)} 600"


@pytest.mark.parametrize("kind", ["text", "file", "stdin", "background part", "nohup", "timeout"])
def test_a_loop_is_stopped_before_its_server_and_nothing_comes_back(living: Living, tmp_path: Path, kind: str) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(f"#!/bin/bash\n{LOOP}\n")
    script.chmod(0o755)
    words = {
        "text": ("bash", "-c", LOOP),
        "file": (str(script),),
        "stdin": ("bash", "-s"),
        "background part": ("bash", "-c", f"({LOOP}) & wait"),
        "nohup": ("nohup", "sh", "-c", f"while :; do bash -c {shlex.quote(SERVER + '; true')}; done"),
        "timeout": ("timeout", "600", "bash", "-c", LOOP),
    }[kind]
    with script.open() if kind == "stdin" else open(os.devnull) as stdin:
        _, server = above(living, *words, stdin=stdin, **QUIET)
    loops = find(server)
    assert loops
    assert all(isinstance(each.place, Process) and each.may_be_stopped and not each.may_be_started for each in loops)
    top = loops[0].place
    assert isinstance(top, Process)
    assert restarters.stop_parents(loops, 30, no_word) == []
    assert processes.is_alive(server.identity)
    assert not any(processes.is_alive(each.place.identity) for each in loops if isinstance(each.place, Process))
    os.kill(server.pid, signal.SIGKILL)
    assert until(lambda: not [each for each in processes.processes().values() if each.title == TITLE])


def test_a_loop_with_other_work_is_an_obstacle_and_a_script_without_a_loop_is_none(living: Living) -> None:
    shell, server = above(living, "bash", "-c", f"({OTHER}) & {LOOP}", **QUIET)
    (found,) = find(server)
    assert found.place == process_of(shell.pid)
    assert "may start it again (while)" in found.obstacle
    assert "stale.kill" in found.hint
    _, server = above(living, "bash", "-c", f"({OTHER}) & {SERVER}; true", **QUIET)
    assert find(server) == []


def test_a_script_that_only_waits_for_its_server_goes_with_it(living: Living, tmp_path: Path) -> None:
    script = tmp_path / "start.sh"
    script.write_text(f"{SERVER}\ntrue\n")
    shell, server = above(living, "bash", str(script), **QUIET)
    (found,) = find(server)
    assert found.may_be_stopped
    assert found.place == process_of(shell.pid)


@pytest.mark.parametrize("typed", ["command &", "command", "loop &", "exec"])
def test_a_prompt_starts_nothing_again_but_a_loop_that_was_typed_there(living: Living, typed: str) -> None:
    """In the background a loop is a copy of the shell; in the foreground it looks like a command, and is told."""
    person, terminal = pty.openpty()
    words = {
        "command &": f"{SERVER} &",
        "command": SERVER,
        "loop &": f"while true; do {SERVER}; done &",
        "exec": "exec bash --norc -i",
    }
    shell = living.start(["setsid", "--ctty", "bash", "--norc", "-i"], stdin=terminal, stdout=terminal, stderr=terminal)
    try:
        os.write(person, f"{words[typed]}\n".encode())
        if typed == "exec":
            os.write(person, f"{SERVER} &\n".encode())
        found = find(server_below(shell.pid))
    finally:
        os.close(terminal)
        os.close(person)
    if typed in ("command &", "exec"):
        assert found == []
    elif typed == "command":
        assert "foreground of its prompt" in found[0].left
        assert not found[0].obstacle
    else:
        assert found[0].may_be_stopped
        assert isinstance(found[0].place, Process)
        assert found[0].place.pid != shell.pid


WATCHDOG = "import subprocess\nwhile True: subprocess.run({words!r}, executable={sleep!r})\n"


@pytest.mark.parametrize("name", ["watch.py", "supervisord"])
def test_what_may_start_it_again_is_refused_until_it_is_listed(living: Living, tmp_path: Path, name: str) -> None:
    script = tmp_path / name
    script.write_text(WATCHDOG.format(words=[TITLE, "600"], sleep=SLEEP))
    watchdog, server = above(living, sys.executable, "-I", "-S", str(script), **QUIET)
    (found,) = find(server)
    assert ("starts again what ends" if name == "supervisord" else "may start it again") in found.obstacle
    assert f"list {name} in stale.kill" in found.hint
    assert ("supervisorctl stop" in found.hint) == (name == "supervisord")
    (found,) = find(server, name)
    assert found.may_be_stopped
    assert restarters.stop_parents([found], 30, no_word) == []
    watchdog.wait(timeout=60)
    assert not find(server)
