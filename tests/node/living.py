"""Real processes for a test: started, watched by conditions, and each ended by its own identity."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lamplighter.node.keeper import ownership
from lamplighter.node.keeper.launcher import Launched, launch_detached
from lamplighter.node.layout import LaunchFiles
from lamplighter.node.system import processes
from lamplighter.node.system.processes import Handle, Identity, Process

PROJECT = Path(__file__).resolve().parents[2]
NOBODY = 65534
IS_ROOT = os.geteuid() == 0
SLEEP = shutil.which("sleep") or "/bin/sleep"

#: Starts the words of its arguments so that they outlive it, under another parent; prints their pid.
_ABANDON = """
import json, subprocess, sys
argv, options = json.loads(sys.argv[1])
null = subprocess.DEVNULL
print(subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, **options).pid)
"""


def group_members(pgid: int) -> tuple[Process, ...]:
    """List the living members of a process group, by pid: also workers whose parent is 1 by now."""
    return _living_with(lambda process: process.pgid == pgid)


def session_members(sid: int) -> tuple[Process, ...]:
    """List the living members of a session, by pid."""
    return _living_with(lambda process: process.sid == sid)


def _living_with(is_one: Callable[[Process], bool]) -> tuple[Process, ...]:
    table = processes.processes()
    return tuple(table[pid] for pid in sorted(table) if is_one(table[pid]) and processes.is_alive(table[pid].identity))


def until(question: Callable[[], object], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if question():
            return True
        time.sleep(0.005)
    return False


def process_of(pid: int) -> Process:
    process = processes.read_process(pid)
    assert process is not None
    return process


def is_running(pid: int) -> bool:
    """Tell whether ``pid`` runs; a zombie does not."""
    process = processes.read_process(pid)
    return process is not None and not process.is_dead


def members(launched: Launched) -> list[Process]:
    """Look now: the living processes of a launched server."""
    record = ownership.Recorded(launched.main, launched.supervisor)
    return [process for process in ownership.members(record, processes.processes()) if not process.is_dead]


class Living:
    """The processes of one test; ``end`` ends them, also those that a launched server left behind."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[Any]] = []
        self._others: list[Identity] = []
        self._launched: list[Launched] = []
        self._ports: list[socket.socket] = []

    def start(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        child = subprocess.Popen(argv, **options)
        self.children.append(child)
        return child

    def titled(self, title: str, **options: Any) -> Process:
        """Start a process that shows ``title`` as its command line, and sleeps."""
        child = self.start([title, "600"], executable=SLEEP, **options)
        assert until(lambda: process_of(child.pid).title == title)
        return process_of(child.pid)

    def python(self, code: str, *arguments: str, **options: Any) -> Speaking:
        """Start Python on ``code``, with the project importable, and wait for its first line."""
        child = self.start(self.words(code, *arguments), stdout=subprocess.PIPE, text=True, **options)
        return Speaking(child, child.stdout.readline().strip())

    def words(self, code: str, *arguments: str) -> list[str]:
        """Return the command that runs ``code`` with the project importable, as the node side runs: ``-I -S``."""
        head = f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n"
        return [sys.executable, "-I", "-S", "-u", "-c", head + code, *arguments]

    def plain(self, code: str, **options: Any) -> str:
        """Run the system's own Python, which every user may, on ``code``; return what it said."""
        words = ["/usr/bin/python3", "-I", "-S", "-c", "import sys\n" + code]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def output(self, argv: list[str], **options: Any) -> str:
        """Run ``argv``; return the line that it said, though children of it may hold its stdout open."""
        child = self.start(argv, stdout=subprocess.PIPE, text=True, **options)
        line = child.stdout.readline().strip()
        child.wait(timeout=120)
        return str(line)

    def exit_code(self, pid: int) -> int:
        """Wait for a child that was started here."""
        return next(child for child in self.children if child.pid == pid).wait(timeout=60)

    def orphan(self, argv: list[str], **options: Any) -> Process:
        """Start ``argv``; whoever started it has ended."""
        words = [sys.executable, "-I", "-S", "-c", _ABANDON, json.dumps([argv, options])]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        process = self.keep(int(done.stdout))
        assert until(lambda: process_of(process.pid).title == argv[0])
        return process_of(process.pid)

    def keep(self, pid: int) -> Process:
        """Take over a process that is not our child."""
        process = process_of(pid)
        self._others.append(process.identity)
        return process

    def launch(self, command: list[str], launch: LaunchFiles, runner: str, directory: str = "/") -> Launched:
        """Launch a server under its supervisor, as a worker does."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # the supervisor is meant to outlive its Popen
            launched = launch_detached(command, directory, launch, runner, f"lamplighter-test-{uuid.uuid4().hex}")
        self._launched.append(launched)
        return launched

    def port(self) -> int:
        """Return a port that nobody is given by chance until the end; a server with SO_REUSEADDR may listen on it."""
        held = socket.socket()
        self._ports.append(held)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])

    def end(self) -> None:
        for held in self._ports:
            held.close()
        for launched in self._launched:
            while found := members(launched):
                for process in found:
                    kill(process.identity)
            kill(launched.supervisor)
        for identity in self._others:
            kill(identity)
        for child in self.children:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream:
                    stream.close()


class Speaking:
    """A Python child and the first line that it said."""

    def __init__(self, child: subprocess.Popen[Any], first_line: str) -> None:
        self.child = child
        self.pid = child.pid
        self.first_line = first_line

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()


def kill(identity: Identity) -> Identity:
    handle = Handle.open(identity)
    if handle is not None:
        with handle, contextlib.suppress(OSError):
            handle.signal(signal.SIGKILL)
            handle.wait(60)
    return identity
