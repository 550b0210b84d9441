"""Finds whatever a test session started and did not end: processes, mounts, namespaces; and ends it.

A process is the session's when it carries the session's token in its environment, when it is still its child, when it
lives in a namespace that the session made, or, where its title was rewritten over the environment, when it was started
during the session and works in the session's temporary directory. Ending PID 1 of a PID namespace ends all in it.

facts: setproctitle writes over the memory that /proc/PID/environ shows, so the token alone is not enough.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

TOKEN_VARIABLE = "LAMPLIGHTER_TEST_SESSION"
NAMESPACES = ("pid", "net", "mnt")
ENDS_WITH_PYTHON = "multiprocessing.resource_tracker"  # started by the first semaphore, ends when this process does


@dataclass(frozen=True)
class Leak:
    """One thing left behind; ``pid`` is 0 for a mount."""

    what: str
    pid: int = 0
    mount_point: str = ""

    def __str__(self) -> str:
        return self.what


@dataclass
class Watch:
    """What belongs to one test session, from its start to its end.

    ``namespaces`` is filled by those who make namespaces, with the names that the links in /proc/PID/ns show.
    """

    project: Path
    temporary: Callable[[], Path]
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    namespaces: set[str] = field(default_factory=set)
    started: float = 0.0
    outer: str | None = None

    def begin(self) -> None:
        """Mark this process, so that all its children carry the token; a session inside a session carries both."""
        self.outer = os.environ.get(TOKEN_VARIABLE)
        os.environ[TOKEN_VARIABLE] = f"{self.outer}:{self.token}" if self.outer else self.token
        self.started = start_of(os.getpid()) or 0.0

    def end(self) -> None:
        """Take the mark away again."""
        if self.outer is None:
            os.environ.pop(TOKEN_VARIABLE, None)
        else:
            os.environ[TOKEN_VARIABLE] = self.outer

    def leaks(self, grace: float = 20.0) -> list[Leak]:
        """All that is left; waits ``grace`` seconds at most for what is just ending."""
        deadline = time.monotonic() + grace
        while (found := [*self._processes(), *self._mounts()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def clean(self, leaks: list[Leak]) -> None:
        """End the leaks. A process is looked at again before it gets its signal."""
        for leak in leaks:
            if leak.pid and self._is_ours(leak.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(leak.pid, signal.SIGKILL)
        for leak in reversed(leaks):
            if leak.mount_point:
                subprocess.run(["umount", "-l", leak.mount_point], check=False, capture_output=True)
        self.leaks()

    def _processes(self) -> Iterator[Leak]:
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            if pid != os.getpid() and self._is_ours(pid):
                yield Leak(f"process {pid}: {command_line(pid)}", pid=pid)

    def _is_ours(self, pid: int) -> bool:
        start = start_of(pid)
        if start is None or start < self.started:
            return False
        if ENDS_WITH_PYTHON in command_line(pid):
            return False
        if self.token.encode() in environment(pid) or parent_of(pid) == os.getpid():
            return True
        if self.namespaces & {link(f"/proc/{pid}/ns/{kind}") for kind in NAMESPACES}:
            return True
        directory = f"{self.temporary()}/"
        return any(f"{path}/".startswith(directory) for path in open_paths(pid))

    def _mounts(self) -> Iterator[Leak]:
        places = (f"{self.temporary()}/", f"{self.project}/")
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            root, mount_point = line.split()[3:5]
            source = line.split(" - ", 1)[1].split()[1]
            if source.startswith("lamplighter-") or root in self.namespaces or mount_point.startswith(places):
                yield Leak(f"mount of {source} on {mount_point}", mount_point=mount_point)


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, the state first; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def start_of(pid: int) -> float | None:
    """Start time in clock ticks since boot; None for a process that is gone or only waits to be reaped."""
    fields = stat(pid)
    return float(fields[19]) if fields and fields[0] not in "ZX" else None


def parent_of(pid: int) -> int:
    fields = stat(pid)
    return int(fields[1]) if fields else 0


def environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return b""


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "?"


def open_paths(pid: int) -> Iterator[str]:
    yield link(f"/proc/{pid}/cwd")
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            yield link(f"/proc/{pid}/fd/{name}")


def link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
