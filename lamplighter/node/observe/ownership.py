"""Whose is a process: ours, stale, or foreign. Only the first two may ever be signalled.

*Ours*: what we recorded at launch (main process, its session, the supervisor's descendants). *Stale*: the engine's
title or entry point **and** our uid **and** on our GPUs or port. All else that holds a GPU or the port is *foreign*:
named, and left alone unless the inventory lists it. The functions here are pure: they judge a process table that was
read before.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any, Iterable, Iterator, Mapping, Optional

from lamplighter.node.observe import processes
from lamplighter.node.observe.processes import Identity, Process

OURS, STALE, LISTED, FOREIGN = "ours", "stale", "listed", "foreign"

#: How Python names the children of multiprocessing before they take a title, and its resource tracker.
MULTIPROCESSING = re.compile(r"from multiprocessing\.(spawn|forkserver|resource_tracker) import|--multiprocessing-fork")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A launch as it was written down: its main process and its supervisor."""

    main: Identity
    supervisor: Optional[Identity]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A process that matters to this deploy, whose it is, and why we think so."""

    process: Process
    kind: str
    why: str

    @property
    def may_be_stopped(self) -> bool:
        return self.kind != FOREIGN

    def __str__(self) -> str:
        user = processes.user_name(self.process.uid)
        return f"pid {self.process.pid} ({user}, {self.process.title}): {self.kind}, {self.why}"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What was observed on the node: who is where. Pids of GPU holders (of our GPUs) and of the port's listeners."""

    table: Mapping[int, Process]
    gpu_holders: frozenset[int]
    listeners: frozenset[int]


def claims(
    evidence: Evidence,
    recorded: Iterable[Recorded],
    engine: Mapping[str, Any],
    *,
    policy: str,
    listed: Iterable[str],
    uid: int,
) -> list[Claim]:
    """Judge every process that is recorded as ours, holds one of our GPUs, or listens on our port.

    Policy ``engine`` makes stale processes of the engine ours to stop; any other leaves them, and ``report`` the listed
    ones too.
    """
    found: dict[int, Claim] = {}
    for record in recorded:
        for process in members(record, evidence.table):
            found.setdefault(process.pid, Claim(process, OURS, "launched by lamplighter"))
    if policy == "engine":
        for claim in _stale(evidence, engine, uid):
            found.setdefault(claim.process.pid, claim)
    listed = () if policy == "report" else tuple(listed)
    for pid in sorted(evidence.gpu_holders | evidence.listeners):
        if pid in found or pid not in evidence.table:
            continue
        process = evidence.table[pid]
        place = "listens on our port" if pid in evidence.listeners else "holds one of our GPUs"
        if _is_listed(process, listed):
            found[pid] = Claim(process, LISTED, f"{place} and is listed in stale.kill")
        else:
            found[pid] = Claim(process, FOREIGN, place)
    return sorted(found.values(), key=lambda claim: claim.process.pid)


def members(record: Recorded, table: Mapping[int, Process]) -> list[Process]:
    """Return the living processes of a recorded launch: by descent from its supervisor, by descent, by session.

    The session id of a dead leader is not given out again while the session has members, so a member whose leader is
    gone is still ours; one whose leader is alive and somebody else is not.
    """
    if record.main.boot_id != processes.boot_id():
        return []
    roots = {
        identity.pid
        for identity in (record.main, record.supervisor)
        if identity is not None and _is_at(identity, table)
    }
    found = {pid: table[pid] for pid in roots}
    found.update((process.pid, process) for process in processes.descendants(roots, table))
    leader = table.get(record.main.pid)
    if leader is None or leader.start == record.main.start:
        for process in table.values():
            if process.sid == record.main.pid and process.start >= record.main.start:
                found[process.pid] = process
    if record.supervisor is not None:
        found.pop(record.supervisor.pid, None)  # it ends by itself when its last child is gone
    return [process for process in found.values() if not process.is_dead]


def _is_at(identity: Identity, table: Mapping[int, Process]) -> bool:
    process = table.get(identity.pid)
    return process is not None and process.start == identity.start


def _stale(evidence: Evidence, engine: Mapping[str, Any], uid: int) -> Iterable[Claim]:
    """Yield stale processes of the engine: those on our GPUs or port, and their family.

    The family: in their process group those above them that look like the engine, and workers that have lost their
    parent or share theirs; and whatever all of these started. Not the whole group: one start script may have put
    servers for other GPUs, or its author's own programs, into the same.
    """
    mine = {
        pid: process
        for pid, process in evidence.table.items()
        if process.uid == uid and pid != os.getpid() and not process.is_dead
    }
    looks = _EngineLooks(engine)
    family: dict[int, str] = {}
    for pid in (evidence.gpu_holders | evidence.listeners) & mine.keys():
        why = looks.of(mine[pid])
        if why is None and _is_of_multiprocessing(mine[pid]) and looks.has_relative(mine[pid], mine):
            why = "a multiprocessing child of the engine"
        if why is not None:
            place = "listens on our port" if pid in evidence.listeners else "holds one of our GPUs"
            family[pid] = f"{why}, {place}"
    groups = {mine[pid].pgid for pid in family}
    above = {process.pid for pid in family for process in _ancestors_in_group(mine[pid], mine)}
    for pid, process in mine.items():
        if pid in family or process.pgid not in groups:
            continue
        if pid in above and looks.of(process):
            family[pid] = f"{looks.of(process)}, above one of them"
        elif process.ppid in {1, *above} and (looks.has_title(process) or _is_of_multiprocessing(process)):
            family[pid] = "a worker of the engine, in the same process group"
    for process in processes.descendants(set(family), evidence.table):
        if process.pid in mine:
            family.setdefault(process.pid, "started by one of them")
    for pid, why in family.items():
        yield Claim(mine[pid], STALE, why)


def _ancestors_in_group(process: Process, table: Mapping[int, Process]) -> Iterator[Process]:
    parent = table.get(process.ppid)
    while parent is not None and parent.pgid == process.pgid and parent.start <= process.start:
        yield parent
        process, parent = parent, table.get(parent.ppid)


def _is_of_multiprocessing(process: Process) -> bool:
    return MULTIPROCESSING.search(" ".join(process.argv)) is not None


class _EngineLooks:
    """Recognises an engine by its process titles and entry points, never by a word somewhere in an argument."""

    def __init__(self, engine: Mapping[str, Any]) -> None:
        look = engine.get("processes") or {}
        self._titles = [re.compile(pattern) for pattern in look.get("titles", ())]
        self._entries = [re.compile(pattern) for pattern in look.get("entry_points", ())]

    def of(self, process: Process) -> Optional[str]:
        """Say by what the process looks like one of the engine's; None if it does not."""
        if self.has_title(process):
            return f"has the engine's title {process.title!r}"
        # A word with a blank in it is data, like the script of `sh -c`, which may well name the engine.
        command = " ".join([*process.argv[:1], *(word for word in process.argv[1:] if " " not in word)])
        if any(pattern.search(command) for pattern in self._entries):
            return "has the engine's entry point"
        return None

    def has_title(self, process: Process) -> bool:
        names = (process.argv[0], process.comm) if process.argv else ()
        return any(pattern.search(name) for pattern in self._titles for name in names)

    def has_relative(self, process: Process, mine: Mapping[int, Process]) -> bool:
        """Tell whether a nameless multiprocessing child is an orphan, or has a parent or sibling of the engine."""
        if process.ppid == 1:
            return True
        siblings = [other for other in mine.values() if other.ppid == process.ppid and other.pid != process.pid]
        parent = mine.get(process.ppid)
        return any(self.of(other) for other in [*siblings, *([parent] if parent else [])])


def _is_listed(process: Process, listed: tuple[str, ...]) -> bool:
    names = {process.comm, process.title, *(process.argv[:1])}
    return any(name in names or os.path.basename(name) in names for name in listed)
