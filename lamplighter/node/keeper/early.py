"""A launch that waits for its turn: started while the old server serves, at the gate until the GPUs are free."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from typing import Callable, Optional, Sequence

from lamplighter.node.keeper import launcher, stop
from lamplighter.node.keeper.gate import Gate
from lamplighter.node.keeper.launched import Launched, Order, read_exit
from lamplighter.node.layout import ServerHome
from lamplighter.node.system import processes
from lamplighter.node.system.processes import Process, Unit

#: So long may a launcher, and who keeps it, take to end by itself once its gate was given up.
END_SECONDS = 5.0


class Waiting:
    """A launcher at its gate, which is no server yet. It begins with ``open``, ends with ``dismiss``, or dies."""

    def __init__(self, wanted: str, order: Order, home: ServerHome, modules: Sequence[str]) -> None:
        """Start it, by the launcher ``wanted``; it imports ``modules`` first. Raises LaunchFailed, OSError."""
        self._home = home
        self._order = order
        self._gate = Gate(order.launch.gate, modules)
        #: It begins, or was dismissed.
        self.is_over = False
        try:
            self._launched = launcher.launch(wanted, dataclasses.replace(order, gate=self._gate.path), home)
        except BaseException:
            self._gate.close()
            raise

    @property
    def pid(self) -> int:
        return self._launched.main.pid

    @property
    def unit(self) -> Optional[Unit]:
        """Return its unit, while it waits."""
        return None if self.is_over else self._launched.unit

    def trouble(self) -> str:
        """Say why it would not begin; "" where it would."""
        process = processes.read_process(self.pid)
        if process is None or process.identity != self._launched.main or process.is_dead:
            return f"it died ({read_exit(self._order.launch, 1.0) or 'exit status unknown'})"
        return "it is stopped by a signal" if process.state in ("T", "t") else ""

    def reached(self) -> Optional[list[str]]:
        """Return None until it has imported all; then what could not be imported."""
        return self._gate.reached()

    def pids(self) -> frozenset[int]:
        """Return who belongs to it, while it waits."""
        return frozenset() if self.is_over else frozenset(each.pid for each in self._members())

    def _members(self) -> list[Process]:
        return launcher.members(self._launched, processes.processes())

    def open(self) -> Launched:
        """Let it begin: from here on it is a server like any other. Raises OSError, and then it waits still."""
        self._gate.open()
        self.is_over = True
        return self._launched

    def dismiss(self, tell: Callable[[str], None]) -> None:
        """End it, with all that it has left for a launch to find. Doing it twice changes nothing.

        Where the disk takes no writes its files stay: the next run clears what does not run.
        """
        if self.is_over:
            return
        self._gate.close()
        _await(lambda: not self._members())
        stop.stop(self._members, stop.Manner(signal.SIGKILL, 0.0), tell)
        supervisor = self._launched.supervisor
        if supervisor is not None:  # it writes how the launcher ended, which is nothing that the next one should find
            _await(lambda: not processes.is_alive(supervisor))
        self.is_over = True
        if self._launched.unit is not None:
            with contextlib.suppress(OSError):
                launcher.withdraw(self._home, self._launched.unit, END_SECONDS, tell)
        for path in (self._order.launch.process, self._order.launch.exit):
            with contextlib.suppress(OSError):
                os.unlink(path)


def _await(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.02)
