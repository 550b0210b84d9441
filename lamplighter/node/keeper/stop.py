"""Ending processes by proven identity: TERM, a grace period, KILL, and a plain word about what did not end.

Nothing is ever signalled by name, by bare pid or through a shell. Each signal goes through a pidfd after start time and
uid were read again, and none goes to whom we descend from: sshd, the shell that carries our command, the init process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from typing import Callable, Iterable

from lamplighter.node.system import processes
from lamplighter.node.system.processes import Handle, Identity, Process

#: After KILL a process may need time to give back pinned host memory; measured up to tens of seconds.
KILL_SECONDS = 30.0
POLL_SECONDS = 0.02
#: A look for newcomers walks through /proc and may ask nvidia-smi: while those known live, one so often is enough.
LOOK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Manner:
    """How a server is to be ended: the first signal, to all of its processes, and seconds until KILL; 0: KILL alone."""

    signal: int
    grace: float


class Ending:
    """The processes to be ended. Once claimed, a process stays claimed until it is dead, whatever it lets go of."""

    def __init__(self, find: Callable[[], Iterable[Process]]) -> None:
        self._find = find
        self._claimed: dict[Identity, Process] = {}
        self._look_again = float("-inf")

    def living(self) -> list[Process]:
        """Return those claimed that are alive; newcomers are looked for now and then, and when none is left.

        "None" takes two looks: a process that the first one had already seen may have left a child and ended before
        that look was over.
        """
        if time.monotonic() < self._look_again and (alive := self._alive()):
            return alive
        return self._look() or self._look()

    def _look(self) -> list[Process]:
        for process in self._find():
            self._claimed.setdefault(process.identity, process)
        self._look_again = time.monotonic() + LOOK_SECONDS
        return self._alive()

    def _alive(self) -> list[Process]:
        return [process for process in self._claimed.values() if processes.is_alive(process.identity)]


def stop(find: Callable[[], Iterable[Process]], manner: Manner, tell: Callable[[str], None]) -> list[Process]:
    """End every process that ``find`` returns, also those that appear meanwhile; return those that did not end."""
    ending = Ending(find)
    signalled: set[Identity] = set()
    deadline = time.monotonic() + manner.grace
    while time.monotonic() < deadline:
        living = ending.living()
        if not living:
            return []
        for process in living:
            if process.identity not in signalled:
                signalled.add(process.identity)
                send(process.identity, manner.signal)
        time.sleep(POLL_SECONDS)
    living = ending.living()
    if living and manner.grace:
        names = ", ".join(f"{process.pid} ({process.title})" for process in living)
        tell(f"alive {manner.grace:.0f} s after {signal.Signals(manner.signal).name}: {names}; sending KILL")
    return _kill(ending)


def _kill(ending: Ending) -> list[Process]:
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        living = ending.living()
        if not living or time.monotonic() >= deadline:
            return living
        for process in living:
            send(process.identity, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def send(identity: Identity, number: int) -> None:
    """Send a signal to a process that is proven to be the one meant; one that is gone or above us is passed over."""
    if identity.pid in _our_line():
        return
    with contextlib.suppress(OSError):  # EPERM too: the next look tells that it is still alive
        handle = Handle.open(identity)
        if handle is not None:
            with handle:
                handle.signal(number)


def _our_line() -> set[int]:
    """Return ourselves, every ancestor of ours, and the init process."""
    line, pid = {1}, os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        process = processes.read_process(pid)
        pid = process.ppid if process is not None else 0
    return line


def describe_survivors(survivors: Iterable[Process], advice: processes.Advice) -> str:
    """Say which processes did not end, and why the kernel keeps them."""
    parts = []
    for process in survivors:
        reason = processes.why_unkillable(process, advice)
        parts.append(f"pid {process.pid} ({process.title})" + (f": {reason}" if reason else ""))
    return "; ".join(parts)
