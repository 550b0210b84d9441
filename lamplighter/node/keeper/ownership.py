"""Whose is a process: ours, stale, or foreign. Only the first two may ever be signalled.

*Ours*: what we recorded at launch (main process, its session, the supervisor's descendants). *Stale*: the engine's
title or entry point **and** our uid **and** on our GPUs or port. All else that holds a GPU or the port is *foreign*:
named, and left alone unless the inventory lists it. What we descend from (sshd, the shell that carries our command)
is foreign whatever it looks like. The functions here are pure: they judge a process table that was read before.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any, Iterable, Iterator, Mapping, Optional

from lamplighter.node import arguments
from lamplighter.node.keeper import systemd
from lamplighter.node.system import processes
from lamplighter.node.system.processes import Identity, Process

OURS, STALE, LISTED, FOREIGN = "ours", "stale", "listed", "foreign"

#: How Python names the children of multiprocessing before they take a title, and its resource tracker.
MULTIPROCESSING = re.compile(r"from multiprocessing\.(spawn|forkserver|resource_tracker) import|--multiprocessing-fork")

#: What runs a program that is named by its arguments; in any other command line an entry point is only a word.
INTERPRETER = re.compile(r"(?:python|pypy|uv)[0-9.]*")

#: Characters of a command line that a person needs to recognise it.
COMMAND_LENGTH = 160


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A launch as it was written down: its main process, its supervisor, and its cgroup as /proc shows it."""

    main: Identity
    supervisor: Optional[Identity]
    cgroup: Optional[str] = None


@dataclasses.dataclass(frozen=True)
class Claim:
    """A process that matters to this deploy, whose it is, and why we think so."""

    process: Process
    kind: str
    why: str
    holds_gpu: bool = False

    @property
    def may_be_stopped(self) -> bool:
        return self.kind != FOREIGN

    @property
    def home(self) -> str:
        """Name the container or the unit that it lives in; "" where it is in none."""
        container, unit = processes.container_of(self.process), processes.unit_of(self.process)
        if container is not None:
            return f"{container.runtime} container {container.id[:12]}".strip()
        if unit is not None:
            whose = "" if unit.manager_uid is None else " of the user's systemd"
            return f"unit {systemd.known_as(unit).name}{whose}"
        return ""

    def __str__(self) -> str:
        user = processes.user_name(self.process.uid)
        what = shown_command(self.process) if self.kind == FOREIGN else self.process.title
        home = f", in {self.home}" if self.kind == FOREIGN and self.home else ""
        return f"pid {self.process.pid} ({user}, {what}{home}): {self.kind}, {self.why}"


def shown_command(process: Process) -> str:
    """Return the command line for people: shortened, and without what looks like a secret of somebody else's.

    Arguments are taken apart at blanks: a process that has given itself a title keeps all of it in one.
    """
    words = arguments.without_secrets(" ".join(process.argv).split(), "***")
    text = " ".join(words) or f"[{process.comm}]"
    return text if len(text) <= COMMAND_LENGTH else text[: COMMAND_LENGTH - 1] + "\u2026"


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What was observed on the node: who is where.

    Pids of the holders of our GPUs, of the port's listeners, of those at work on other GPUs alone (``neighbours``), and
    of holders that may be at work elsewhere (``unsure``). ``places`` says in words how much of which GPU a holder has.
    """

    table: Mapping[int, Process]
    gpu_holders: frozenset[int]
    listeners: frozenset[int]
    neighbours: frozenset[int] = frozenset()
    unsure: frozenset[int] = frozenset()
    places: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def place(self, pid: int) -> str:
        """Say where a process stands in our way."""
        listens = ["listens on our port"] if pid in self.listeners else []
        holds = [self.places.get(pid, "holds one of our GPUs")] if pid in self.gpu_holders else []
        return ", ".join(listens + holds)


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
    ones too. What lamplighter itself started is ours under every policy: replacing it is what a deploy is for.
    """
    spared = _line_of(os.getpid(), evidence.table)
    return [
        _spare(claim) if claim.process.pid in spared else claim
        for claim in _judge(evidence, recorded, engine, policy, listed, uid)
    ]


def _judge(
    evidence: Evidence,
    recorded: Iterable[Recorded],
    engine: Mapping[str, Any],
    policy: str,
    listed: Iterable[str],
    uid: int,
) -> list[Claim]:
    found: dict[int, Claim] = {}
    for record in recorded:
        for process in members(record, evidence.table):
            found.setdefault(process.pid, Claim(process, OURS, "launched by lamplighter"))
    stale = {claim.process.pid: claim for claim in _stale(evidence, engine, uid)}
    if policy == "engine":
        found = {**stale, **found}
    listed = () if policy == "report" else tuple(listed)
    for pid in sorted(evidence.gpu_holders | evidence.listeners):
        if pid in found or pid not in evidence.table:
            continue
        process = evidence.table[pid]
        place = evidence.place(pid)
        if _is_listed(process, listed):
            kind, why = LISTED, f"{place} and is listed in stale.kill"
        elif pid in stale:
            kind, why = FOREIGN, f"{stale[pid].why}; left because stale.policy is {policy}"
        else:
            kind, why = FOREIGN, place
        found[pid] = Claim(process, kind, why, holds_gpu=pid in evidence.gpu_holders)
    return sorted(found.values(), key=lambda claim: claim.process.pid)


def _line_of(pid: int, table: Mapping[int, Process]) -> set[int]:
    """Return ``pid``, all its ancestors, and the init process."""
    line = {1}
    while pid > 0 and pid not in line:
        line.add(pid)
        process = table.get(pid)
        pid = process.ppid if process is not None else 0
    return line


def _spare(claim: Claim) -> Claim:
    if claim.kind == FOREIGN:
        return claim
    why = f"{claim.why}; left because this very run descends from it"
    return dataclasses.replace(claim, kind=FOREIGN, why=why)


def members(record: Recorded, table: Mapping[int, Process]) -> list[Process]:
    """Return the living processes of a recorded launch: by descent from its supervisor, by descent, by session.

    While the supervisor lives, all that is left descends from it. Without it, the session of a dead main process counts
    where its members have our user and our place among the cgroups: once the session was empty its number may have been
    given out again, to a login whose shell has ended since.
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
    is_led = _is_at(record.main, table)
    if is_led or (record.main.pid not in table and not roots):
        for process in table.values():
            is_member = process.sid == record.main.pid and process.start >= record.main.start
            if is_member and (is_led or _is_at_home(process, record)):
                found[process.pid] = process
    if record.supervisor is not None:
        found.pop(record.supervisor.pid, None)  # it ends by itself when its last child is gone
    return [process for process in found.values() if not process.is_dead]


def _is_at_home(process: Process, record: Recorded) -> bool:
    if process.uid != os.geteuid():
        return False
    if record.cgroup is None:
        return True
    unit, container = processes.unit_in(record.cgroup), processes.container_in(record.cgroup)
    return (processes.unit_of(process), processes.container_of(process)) == (unit, container)


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
    for pid in ((evidence.gpu_holders - evidence.unsure) | evidence.listeners) & mine.keys():
        why = looks.of(mine[pid])
        if why is None and _is_of_multiprocessing(mine[pid]) and looks.has_relative(mine[pid], evidence.table):
            why = "a multiprocessing child of the engine"
        if why is not None:
            family[pid] = f"{why}, {evidence.place(pid)}"
    groups = {mine[pid].pgid for pid in family}
    above = {process.pid for pid in family for process in _ancestors_in_group(mine[pid], mine)}
    for pid, process in mine.items():
        if pid in family or process.pgid not in groups or pid in evidence.neighbours:
            continue
        if pid in above and looks.of(process):
            family[pid] = f"{looks.of(process)}, above one of them"
        elif (process.ppid in above or _is_orphan(process, evidence.table)) and (
            looks.has_title(process) or _is_of_multiprocessing(process)
        ):
            family[pid] = "a worker of the engine, in the same process group"
    for process in processes.descendants(set(family), evidence.table):
        if process.pid in mine:
            family.setdefault(process.pid, "started by one of them")
    for pid, why in family.items():
        yield Claim(mine[pid], STALE, why, holds_gpu=pid in evidence.gpu_holders)


def _ancestors_in_group(process: Process, table: Mapping[int, Process]) -> Iterator[Process]:
    parent = table.get(process.ppid)
    while parent is not None and parent.pgid == process.pgid and parent.start <= process.start:
        yield parent
        process, parent = parent, table.get(parent.ppid)


def _is_orphan(process: Process, table: Mapping[int, Process]) -> bool:
    """Tell whether its parent is gone: it went to PID 1, or to a sub-reaper, which is of another session."""
    parent = table.get(process.ppid)
    if parent is None or process.ppid == 1:
        return True
    return process.sid not in (process.pid, parent.sid)


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
        first = process.argv[0] if process.argv else ""
        # Only an interpreter runs what its arguments name: an editor or a pager of the same file does not.
        reach = len(command) if INTERPRETER.fullmatch(os.path.basename(first)) else len(first)
        matches = (pattern.search(command) for pattern in self._entries)
        return "has the engine's entry point" if any(found and found.start() < reach for found in matches) else None

    def has_title(self, process: Process) -> bool:
        names = (process.argv[0], process.comm) if process.argv else ()
        return any(pattern.search(name) for pattern in self._titles for name in names)

    def has_relative(self, process: Process, table: Mapping[int, Process]) -> bool:
        """Tell whether a nameless multiprocessing child is an orphan, or has a parent or sibling of the engine."""
        if _is_orphan(process, table):
            return True
        siblings = [other for other in table.values() if other.ppid == process.ppid and other.pid != process.pid]
        parent = table.get(process.ppid)
        return any(self.of(other) for other in [*siblings, *([parent] if parent else [])])


def _is_listed(process: Process, listed: tuple[str, ...]) -> bool:
    """A path names that very file; a plain name is what the process calls itself, wherever its file lies."""
    paths = {process.title, *process.argv[:1], process.exe}
    names = {process.comm, process.title, os.path.basename(process.title)}
    return any(name in (paths if "/" in name else names) for name in listed)
