"""What is known of a launch, whichever launcher made it: who the server is, how it ended, what it was started with.

The records are files of the run: ``process.json`` is written by us, ``exit.json`` by the one who saw the end (the
supervisor of a detached server, or systemd's ExecStopPost, each in its own words).
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any, Mapping, Optional

from lamplighter.node.layout import IDENTITY, LaunchFiles, ReleaseDirectory, read_json
from lamplighter.node.plan import Plan
from lamplighter.node.system import processes
from lamplighter.node.system.processes import Unit

#: What every launch script has on its PATH, behind the directory of the server's Python.
STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclasses.dataclass(frozen=True)
class Order:
    """One server to be started: its release, where its log and records go, and how it wants to be stopped.

    ``stop_seconds`` from the first signal to KILL. ``runner`` is our own program as it lies on the node. ``gate`` is
    the file at which it is to wait until its GPUs are free, see keeper/gate.py.
    """

    server: str
    release: ReleaseDirectory
    launch: LaunchFiles
    records: str
    runner: str
    run_id: str
    stop_signal: str
    stop_seconds: float
    gate: Optional[str] = None

    @property
    def scope(self) -> str:
        """Name the systemd scope of a detached server."""
        return f"lamplighter-{self.server}-{self.run_id}-{self.launch.attempt}"


@dataclasses.dataclass(frozen=True)
class Launched:
    """A started server: its main process, and its supervisor or its unit.

    ``launch`` is where its log and its end are found: an old unit that is started again keeps its own files, and its
    log is then of interest from byte ``log_from`` on.
    """

    main: processes.Identity
    supervisor: Optional[processes.Identity] = None
    unit: Optional[Unit] = None
    launch: Optional[LaunchFiles] = None
    log_from: int = 0


@dataclasses.dataclass(frozen=True)
class ExitStatus:
    """How a server's main process ended: ``code``, or ``signal`` when one killed it; both None if it was not seen."""

    code: Optional[int]
    signal: Optional[int]

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by {signal.Signals(self.signal).name}"
        return "exit status unknown" if self.code is None else f"exit status {self.code}"


class LaunchFailed(Exception):
    """The launcher itself could not start anything; the text says why."""


def bare_environment(records: Optional[str] = None, gate: Optional[str] = None) -> dict[str, str]:
    """Return the environment that every launch starts from: little, and always the same.

    PATH is that of a command over SSH; the launch script puts the server's own directories in front, or behind it.
    ``records`` is the directory in which each Python of the server leaves proof of its variables; ``gate`` the file at
    which the first one waits, see keeper/gate.py.
    """
    keep = {name: os.environ[name] for name in ("HOME", "USER", "LOGNAME", "TZ", "PATH") if name in os.environ}
    bare = {"PATH": STANDARD_PATH, **keep, "LANG": "C.UTF-8"}
    ours = {"LAMPLIGHTER_RECORDS": records, "LAMPLIGHTER_GATE": gate}
    return {**bare, **{name: value for name, value in ours.items() if value is not None}}


def planned_environment(plan: Plan, secrets: Mapping[str, str]) -> dict[str, str]:
    """Return what the launch script will give to a server whose release is not written yet; see launch.sh.j2.

    But for its own directory on PYTHONPATH, which holds nothing that a server imports, and for the GPUs.
    """
    bare = bare_environment()
    program = plan.python or plan.argv[0]
    first = os.path.dirname(program) if os.path.isabs(program) else bare["PATH"]
    return {**bare, "PATH": f"{first}:{STANDARD_PATH}", **plan.exports, **secrets}


def read_launched(launch: LaunchFiles) -> Optional[Launched]:
    """Return who was launched, from ``launch.process``; None when nothing (complete) is written there."""
    record = read_json(launch.process, **IDENTITY)
    if record is None:
        return None
    return Launched(
        processes.Identity.of(record),
        supervisor_in(record),
        unit_in(record),
        launch,
    )


def supervisor_in(record: dict[str, Any]) -> Optional[processes.Identity]:
    """Return the supervisor that a record (process.json, server.json) speaks of, None for a unit."""
    if not all(isinstance(record.get(name), int) for name in ("supervisor_pid", "supervisor_start")):
        return None
    return processes.Identity(record["boot_id"], record["supervisor_pid"], record["supervisor_start"])


def unit_in(record: dict[str, Any]) -> Optional[Unit]:
    """Return the unit that a record (process.json, server.json, unit.json) speaks of, None for a detached server."""
    name, uid = record.get("unit"), record.get("manager_uid")
    is_named = isinstance(name, str) and name and isinstance(uid, (int, type(None)))
    return Unit(str(name), uid) if is_named else None


def read_exit(launch: LaunchFiles, wait: float = 0.0) -> Optional[ExitStatus]:
    """Return how the main process ended; None while it has not, or it is not written within ``wait`` seconds."""
    deadline = time.monotonic() + wait
    while True:
        record = read_json(launch.exit)
        if record is not None:
            return _ending(record)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


def _ending(record: dict[str, Any]) -> ExitStatus:
    if "result" not in record:
        code, number = record.get("code"), record.get("signal")
        is_signal = isinstance(number, int) and number in signal.valid_signals()
        return ExitStatus(code if isinstance(code, int) else None, number if is_signal else None)
    # systemd's words: code is exited, killed or dumped; status a number, or the signal's name without SIG.
    code, status = record.get("code"), str(record.get("status"))
    if code == "exited" and status.isdigit():
        return ExitStatus(int(status), None)
    number = getattr(signal, f"SIG{status}", None)
    if code in ("killed", "dumped") and number is not None:
        return ExitStatus(None, int(number))
    return ExitStatus(None, None)
