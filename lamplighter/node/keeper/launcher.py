"""One small interface to what keeps a server running: ``detached`` or ``systemd``.

``auto`` means systemd where PID 1 is systemd and we may use it. What a launch left on disk tells later which of the two
it was, so that a node may change from one to the other: the old server is stopped by its own launcher.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any, Callable, Mapping, Optional

from lamplighter.node.keeper import detached, ownership, systemd
from lamplighter.node.keeper.detached import launch_detached
from lamplighter.node.keeper.launched import (
    ExitStatus,
    Launched,
    LaunchFailed,
    Order,
    bare_environment,
    planned_environment,
    read_exit,
    read_launched,
    supervisor_in,
    unit_in,
)
from lamplighter.node.keeper.ownership import Recorded
from lamplighter.node.layout import IDENTITY, LaunchFiles, ServerHome, read_json
from lamplighter.node.system import files, processes
from lamplighter.node.system.processes import Process, Unit

__all__ = [
    "DETACHED",
    "SYSTEMD",
    "Choice",
    "ExitStatus",
    "LaunchFailed",
    "Launched",
    "Order",
    "Present",
    "bare_environment",
    "choose",
    "clear",
    "commit",
    "is_record_lost",
    "launch",
    "launch_detached",
    "let_go",
    "members",
    "members_of",
    "note_ready",
    "note_stopped",
    "planned_environment",
    "present",
    "read_exit",
    "read_launched",
    "read_record",
    "recorded_in_unit",
    "returns_at_boot",
    "serving_since",
    "stop_unit",
    "stopped_by",
    "withdraw",
]

SYSTEMD, DETACHED = "systemd", "detached"

#: Seconds by which the word on how a server ended may follow the end itself.
EXIT_LAG = 10.0

#: Fields that every ``server.json`` has.
RECORD: dict[str, type] = {**IDENTITY, "host": str, "port": int, "release": str, "run": str, "attempt": str, "log": str}


@dataclasses.dataclass(frozen=True)
class Choice:
    """The launcher for this node and user, and why; ``obstacle``: what was asked for is impossible here."""

    kind: str
    why: str
    obstacle: Optional[systemd.Obstacle] = None


def choose(wanted: str) -> Choice:
    """Choose by what the inventory says (auto, systemd or detached) and what this node lets this user do."""
    if wanted == DETACHED:
        return Choice(DETACHED, "the inventory says so")
    obstacle = systemd.why_not()
    if obstacle is None:
        return Choice(SYSTEMD, "the inventory says so" if wanted == SYSTEMD else "PID 1 is systemd, and we may use it")
    if wanted == SYSTEMD:
        return Choice(SYSTEMD, "the inventory says so", obstacle)
    return Choice(DETACHED, obstacle.reason)


def launch(wanted: str, order: Order, home: ServerHome) -> Launched:
    """Start the release of ``order`` so that it lives on by itself; nothing restarts it yet.

    Returns once its identity is on disk. Raises LaunchFailed, OSError.
    """
    choice = choose(wanted)
    if choice.obstacle is not None:
        raise LaunchFailed(choice.obstacle.reason)
    return systemd.launch(order, home) if choice.kind == SYSTEMD else detached.launch(order)


def commit(order: Order, home: ServerHome, launched: Launched) -> None:
    """Make the launch the lasting one: restarted after a crash and a reboot, where its launcher can do that.

    Raises LaunchFailed, OSError: what was committed before then still is.
    """
    if launched.unit is not None:
        systemd.commit(order, home, launched)
    else:
        systemd.forget(home)


def stop_unit(
    home: ServerHome,
    seconds: float,
    tell: Callable[[str], None],
    sparing: Optional[Unit] = None,
    *,
    at_once: bool = False,
) -> bool:
    """Stop the server's units, if it has any, and drop uncommitted ones; tell whether all were down in time.

    ``sparing`` is the unit of a launch that waits for its turn: it goes on. ``at_once``: by KILL.
    """
    deadline = time.monotonic() + seconds
    stopped = [
        systemd.stop(unit, deadline - time.monotonic(), tell, at_once=at_once) for unit in systemd.units(home, sparing)
    ]
    systemd.clear(home, sparing)
    return all(stopped)


def withdraw(home: ServerHome, unit: Unit, seconds: float, tell: Callable[[str], None]) -> bool:
    """End the unit of a launch that shall not serve, and leave nothing of it; tell whether it was down in time."""
    is_down = systemd.stop(unit, seconds, tell)
    systemd.clear(home)
    return is_down


def let_go(home: ServerHome) -> None:
    """Leave an old server that was started again, and did not get ready, to its own launcher."""
    systemd.let_go(home)


def returns_at_boot(home: ServerHome) -> Optional[str]:
    """Name who will start the stopped server when the node boots, None if nothing will."""
    return systemd.returns_at_boot(home)


def clear(home: ServerHome, sparing: Optional[Unit] = None) -> None:
    """Drop uncommitted units that do not run, but for ``sparing``; the committed one, if any, is as before."""
    systemd.clear(home, sparing)


def members(launched: Launched, table: Mapping[int, Process]) -> list[Process]:
    """Return the processes of a launched server: all in its unit's cgroup, or by descent and session."""
    found = {process.pid: process for process in ownership.members(Recorded(launched.main, launched.supervisor), table)}
    if launched.unit is not None:
        found.update((process.pid, process) for process in systemd.members(launched.unit, table))
    return list(found.values())


def recorded_in_unit(home: ServerHome, table: Mapping[int, Process], sparing: Optional[Unit] = None) -> list[Recorded]:
    """Return what is in the cgroups of the server's units, but for ``sparing``, each process as a recorded launch.

    The units are what was written down; systemd may have restarted one since, or brought it back after a reboot.
    """
    names = systemd.names(home, sparing)
    return [Recorded(each.identity, None) for each in table.values() if names and processes.unit_of(each) in names]


def read_record(home: ServerHome) -> Optional[dict[str, Any]]:
    """Return ``server.json`` as it is true now, None where nothing was ever started.

    It speaks of the launch last made. If the node went down before that one was committed, it is gone, and systemd has
    brought back the release that was committed before. Where the file is missing or damaged, the launches' own records
    tell as much as they know.
    """
    record = read_json(home.record, **RECORD)
    if record is None:
        return _recall(home)
    if record.get("ready") or record["boot_id"] == processes.boot_id():
        return record
    committed = systemd.committed(home)
    plan = home.release(committed["release"]).read_plan() if committed is not None else None
    if committed is None or plan is None:
        return record
    left = home.run(committed["run"]).launch(committed["attempt"])
    return {
        **record,
        "unit": committed["unit"],
        "manager_uid": committed["manager_uid"],
        "release": committed["release"],
        "run": committed["run"],
        "attempt": committed["attempt"],
        "log": left.log,
        "records": os.path.join(left.directory, "envproof"),
        "host": plan.host,
        "port": plan.port,
        "model": plan.served_name,
        "ready": True,
    }


def is_record_lost(home: ServerHome) -> bool:
    """Tell whether ``server.json`` is missing or damaged: ``read_record`` then tells what it can without it."""
    return read_json(home.record, **RECORD) is None


def _recall(home: ServerHome) -> Optional[dict[str, Any]]:
    """Say what ``server.json`` would: of the launch that lives, else of the committed unit's, else of the last one."""
    committed = systemd.committed(home) or {}
    last = lasting = None
    for launch in home.launches():
        is_lasting = launch == home.run(committed.get("run") or "").launch(committed.get("attempt") or "")
        record = _as_record(home, launch, is_lasting)
        if record is None:
            continue
        if processes.is_alive(processes.Identity.of(record)):
            return record
        last, lasting = last or record, record if is_lasting else lasting
    return lasting or last


def _as_record(home: ServerHome, launch: LaunchFiles, is_lasting: bool) -> Optional[dict[str, Any]]:
    """Return what a launch left, as ``server.json`` has it; None where its record or its release is damaged."""
    known = read_json(launch.process, **IDENTITY, command=list)
    if known is None:
        return None
    script = str(next(iter(known["command"]), ""))
    release = home.release(os.path.basename(os.path.dirname(script)))
    plan = release.read_plan()
    if plan is None:
        return None
    run_id, verdict = os.path.basename(launch.directory), release.read_verdict() or {}
    is_good = verdict.get("verdict") == "good" and verdict.get("run") == run_id
    kept = ("boot_id", "pid", "start", "supervisor_pid", "supervisor_start", "unit", "manager_uid")
    return {
        **{name: known[name] for name in kept if name in known},
        "port": plan.port,
        "host": plan.host,
        "model": plan.served_name,
        "release": release.name,
        "run": run_id,
        "attempt": launch.attempt,
        "log": launch.log,
        "records": os.path.join(launch.directory, "envproof"),
        "ready": is_good or is_lasting,
        "since": verdict["t"] if is_good else known.get("t"),
    }


def note_ready(home: ServerHome, record: Mapping[str, Any], since: Optional[float]) -> None:
    """Write ``server.json``: the server that was launched last, as ``record`` has it, has answered. Raises OSError."""
    files.write_json(home.record, {**record, "ready": True, "since": since})


def note_stopped(home: ServerHome, by: Mapping[str, Any]) -> None:
    """Write into ``server.json`` that a run has ended what it speaks of: ``by`` is {run, verb, by}. Raises OSError."""
    record = read_json(home.record, **RECORD)
    if record is not None:
        files.write_json(home.record, {**record, "stopped": {**by, "t": time.time()}})


def stopped_by(record: Mapping[str, Any], launch: LaunchFiles) -> Optional[Mapping[str, Any]]:
    """Return the run that ended the server, as `note_stopped` has it; None where it went another way, or ran again."""
    found = record.get("stopped")
    if not isinstance(found, dict) or not isinstance(found.get("t"), (int, float)):
        return None
    try:
        ended = os.stat(launch.exit).st_mtime
    except OSError:
        return found
    return found if ended < found["t"] + EXIT_LAG else None


@dataclasses.dataclass(frozen=True)
class Present:
    """The process that a server's record stands for now; ``main`` None: there is none.

    ``note`` says what systemd did with it meanwhile, in words for people.
    """

    main: Optional[processes.Identity]
    restarts: int = 0
    note: str = ""
    is_restarting: bool = False
    is_other: bool = False


def present(record: Mapping[str, Any]) -> Present:
    """Ask which process ``server.json`` stands for now: the launched one, or the one that systemd started since."""
    launched = processes.Identity.of(record)
    unit = unit_in(dict(record))
    state = systemd.look(unit) if unit is not None else None
    if unit is None or state is None:
        return Present(launched if processes.is_alive(launched) else None)
    unit = systemd.known_as(unit)
    if state.main == launched:
        return Present(launched)
    if state.main is None:
        is_restarting = not state.is_down
        note = f"systemd restarts {unit.name}" if is_restarting else f"{unit.name} is {state.active}"
        return Present(None, state.restarts, note, is_restarting)
    if state.restarts:
        note = f"systemd restarted {unit.name} {_times(state.restarts)}"
    elif launched.boot_id != processes.boot_id():
        note = f"systemd started {unit.name} when the node booted"
    else:
        note = f"{unit.name} was started by hand"
    return Present(state.main, state.restarts, note, is_other=True)


def serving_since(record: Mapping[str, Any], now: Present) -> Optional[float]:
    """Return since when the server that ``now`` speaks of serves, or runs where systemd started it since.

    None where it has not been ready, and where there is none.
    """
    if now.main is None or not record.get("ready"):
        return None
    process = processes.read_process(now.main.pid) if now.is_other else None
    if process is not None:
        return round(time.time() - processes.age_seconds(process), 3)
    since = record.get("since")
    return float(since) if isinstance(since, (int, float)) else None


def members_of(record: Mapping[str, Any], main: processes.Identity) -> list[Process]:
    """Return the processes of the server that ``server.json`` stands for; ``main`` as ``present`` has it."""
    launched = Launched(main, supervisor_in(dict(record)), unit_in(dict(record)))
    return members(launched, processes.processes())


def present_members(record: Mapping[str, Any]) -> list[Process]:
    """Return the processes of the server that ``server.json`` stands for now; none where it is gone."""
    main = present(record).main
    return [] if main is None else members_of(record, main)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
