"""Who would bring a killed process back: a unit or a container (by the cgroup), a loop or a watchdog (as a parent).

A restarter is stopped, and before its processes, only where that stops nothing but what may be stopped anyway: its
main process is such a process, or a plain wrapper around one. A server that somebody started from cron or a notebook
lives in that daemon's unit too, and the daemon is never stopped for it. ``stale.kill`` may list a unit, a container or
a parent by name. What may start the server again and may not be stopped is an ``obstacle``: nothing is touched then.

facts: a raw kill makes systemd restart the unit, and Docker the container with ``--restart=always``; ``docker stop``
keeps it down until its daemon restarts. Containers of Kubernetes come back whatever a node's tools do, those that it
runs through docker too. A rootless container is known to its own user's podman or docker alone.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from typing import Callable, Collection, Iterable, Mapping, Optional, Union

from lamplighter.node.keeper import ownership, parents, systemd
from lamplighter.node.keeper import stop as ending
from lamplighter.node.keeper.ownership import Claim
from lamplighter.node.keeper.parents import Parent, Programs
from lamplighter.node.system import processes
from lamplighter.node.system.processes import Container, Process, Unit

#: The command that speaks for a runtime, where there is one that can stop a container for good.
TOOLS = {"docker": "docker", "podman": "podman"}

#: A loop has nothing to clean up; KILL comes after so many seconds.
PARENT_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Restarter:
    """A unit, a container or a parent (``place``) of processes that will be stopped; ``name`` is what people call it.

    ``obstacle``: why it may start them again and cannot be stopped first, which forbids to stop them. ``left``: why it
    is left running although that may be so; with neither it is stopped first.
    """

    place: Union[Unit, Container, Process]
    name: str
    pids: tuple[int, ...]
    obstacle: str = ""
    hint: str = ""
    is_enabled: bool = False
    left: str = ""

    @property
    def may_be_stopped(self) -> bool:
        return not self.obstacle and not self.left

    @property
    def may_be_started(self) -> bool:
        """Tell whether it can be started again by its name, and so is the way back to what it kept."""
        return self.may_be_stopped and not isinstance(self.place, Process)

    def __str__(self) -> str:
        pids = ", ".join(map(str, self.pids))
        why = self.obstacle or self.left
        return f"{self.name} (keeps pid {pids})" + (f": {why}" if why else "")


def place_of(process: Process) -> Union[Unit, Container, None]:
    """Return the unit or container that keeps a process; a scope keeps nothing and is none."""
    unit, container = processes.unit_of(process), processes.container_of(process)
    is_pod = container is not None and container.is_pod
    if unit is not None and unit.name.endswith(".service") and not _is_runtime(unit) and not is_pod:
        return systemd.known_as(unit)  # also around a container: the unit starts it again
    return container


def _is_runtime(unit: Unit) -> bool:
    """Tell whether a unit is the daemon of a container runtime, below which containers may lie (cgroupfs driver)."""
    return unit.name in ("docker.service", "containerd.service", "podman.service", "crio.service", "kubelet.service")


def find(
    claims: Iterable[Claim],
    table: Mapping[int, Process],
    ours: Collection[Unit],
    listed: Iterable[str],
    programs: Programs,
    supervisors: frozenset[int] = frozenset(),
) -> list[Restarter]:
    """Return who would bring back the processes that may be stopped. Our own units, ``ours``, and supervisors do not.

    Reads only, but asks systemd and the container runtime.
    """
    claims = tuple(claims)
    stoppable = {claim.process.pid: claim.process for claim in claims if claim.may_be_stopped}
    places: dict[Union[Unit, Container], list[int]] = {}
    for pid, process in stoppable.items():
        place = place_of(process)
        if place is not None and place not in ours:
            places.setdefault(place, []).append(pid)
    listed = frozenset(listed)
    kept = [_judge(place, tuple(sorted(pids)), stoppable, table, listed, programs) for place, pids in places.items()]
    # What we launched has none above it but our own supervisor; a unit or container takes all in it along.
    ours_alone = {claim.process.pid for claim in claims if claim.kind == ownership.OURS}
    gone_along = {pid for each in kept if not each.left for pid in each.pids}
    others = {pid: each for pid, each in stoppable.items() if pid not in ours_alone | gone_along}
    for parent in parents.find(others, table, programs, spared=_line() | supervisors):
        judged = _judge_parent(parent, stoppable, table, listed, programs)
        if judged is not None:
            kept.append(judged)
    return kept


def _judge_parent(
    parent: Parent,
    stoppable: Mapping[int, Process],
    table: Mapping[int, Process],
    listed: frozenset[str],
    programs: Programs,
) -> Optional[Restarter]:
    """Decide what becomes of a parent; None: a script with other work, which cannot start the server again."""
    process = parent.process
    is_listed = bool(parents.names_of(process) & listed)
    stands = parent.kind == parents.SCRIPT and _stands_for(process.pid, table, stoppable, programs)
    found = Restarter(process, str(parent), parent.pids)
    if parent.kind == parents.PROMPT:
        return dataclasses.replace(found, left=parent.why, hint=parent.hint)
    is_harmless = parent.kind == parents.SCRIPT and not parent.may_repeat and not is_listed
    if is_harmless and (not stands or process.uid != os.geteuid()):
        return None
    if not (is_listed or stands):
        why = parent.why
        hint = (f"{parent.hint}, or " if parent.hint else "") + f"end it, or list {parent.name} in stale.kill"
    elif os.geteuid() not in (0, process.uid):
        why, hint = (
            f"{parent.why}, and is another user's",
            f"ask {processes.user_name(process.uid)}, or use become: true",
        )
    else:
        return found
    return dataclasses.replace(found, obstacle=why, hint=hint)


def _judge(
    place: Union[Unit, Container],
    pids: tuple[int, ...],
    stoppable: Mapping[int, Process],
    table: Mapping[int, Process],
    listed: frozenset[str],
    programs: Programs,
) -> Restarter:
    inside = {pid: process for pid, process in table.items() if place_of(process) == place and not process.is_dead}
    if isinstance(place, Unit):
        manager = systemd.Manager(place.manager_uid)
        shown = manager.show(place.name, "MainPID", "UnitFileState")
        name = f"unit {place.name}"
        names = {place.name, place.name[: -len(".service")]}
        main = int(shown.get("MainPID") or 0)
        is_enabled = shown.get("UnitFileState", "") in ("enabled", "enabled-runtime")
        obstacle = "" if manager.may_be_asked() else "only root may stop it"
        hint = f"stop it (`systemctl stop {place.name}`), or use become: true"
    else:
        known = _inspect(place)
        name = f"{place.runtime} container {known.name or place.id[:12]}".strip()
        names = {place.id, place.id[:12], *([known.name] if known.name else [])}
        main = known.main if known.main in inside else _first(inside)
        is_enabled = known.policy == "always"
        tool = _tool(place)
        obstacle = ""
        hint = f"stop {name} by the means of its runtime"
        if place.is_pod:
            obstacle, hint = "Kubernetes runs it, and starts it again", "scale its workload down, or drain the node"
        elif tool is None:
            obstacle = "its runtime is not one that we can ask to stop it"
        elif place.uid not in (None, os.geteuid()):
            obstacle = f"it is rootless, and known to {processes.user_name(place.uid)}'s {tool} alone"
        elif shutil.which(tool) is None:
            obstacle = f"there is no {tool} command here"
        elif known.trouble:
            obstacle = f"{tool} may not be asked about it: {known.trouble}"
            hint = f"let {processes.user_name(os.geteuid())} use {tool}, or use become: true"
    left = ""
    if not obstacle and _line() & set(inside):
        obstacle, hint = "this very run lives in it", "start the run from elsewhere"
    elif not obstacle and not names & listed and not _stands_for(main, inside, stoppable, programs):
        process = table.get(main)
        what = f"{process.title!r} (pid {main})" if process else "not among them"
        why = f"its main process is {what}, and that is none of ours to stop"
        hint = f"if it starts them again, list {min(names, key=len)} in stale.kill"
        # Who lets jobs in starts none again; of any other main process that cannot be told.
        left, obstacle = (why, "") if process is None or programs.is_session(process) else ("", why)
    return Restarter(place, name, pids, obstacle, hint, is_enabled, left)


def _stands_for(main: int, inside: Mapping[int, Process], stoppable: Mapping[int, Process], programs: Programs) -> bool:
    """Tell whether a main process is to be stopped, or lives only for what is to be stopped."""
    if main in stoppable:
        return True
    process = inside.get(main)
    if process is None or not _is_wrapper(process, inside, stoppable, programs):
        return False
    below = processes.descendants([main], inside)
    working = {
        child.pid for child in below if child.pid in stoppable or not _is_wrapper(child, inside, stoppable, programs)
    }
    return bool(working) and working <= set(stoppable)


def _is_wrapper(
    process: Process, inside: Mapping[int, Process], stoppable: Mapping[int, Process], programs: Programs
) -> bool:
    """Tell whether it is one by its name; or, named after its script, a shell above something to be stopped.

    A loop sleeps between two starts: a `sleep` does nothing of its own.
    """
    if process.comm in programs.wrappers | programs.shells or os.path.basename(process.title) == "sleep":
        return True
    if not programs.is_shell(process):
        return False
    return any(child.pid in stoppable for child in processes.descendants([process.pid], inside))


def _first(inside: Mapping[int, Process]) -> int:
    """Return the oldest process that was started from outside, 0 where there is none."""
    roots = [process for process in inside.values() if process.ppid not in inside]
    return min(roots, key=lambda process: process.start).pid if roots else 0


def _line() -> set[int]:
    """Return this process and its ancestors."""
    line: set[int] = set()
    pid = os.getpid()
    while pid > 1 and pid not in line:
        line.add(pid)
        process = processes.read_process(pid)
        pid = process.ppid if process is not None else 0
    return line


@dataclasses.dataclass(frozen=True)
class _Known:
    """What docker or podman says of a container: its main process, restart policy, and how people call it."""

    main: int = 0
    policy: str = ""
    name: str = ""
    #: Why it said nothing.
    trouble: str = ""


def _inspect(container: Container) -> _Known:
    if _tool(container) is None or container.uid not in (None, os.geteuid()):
        return _Known()
    answer = _ask(container, "inspect", "--format", "{{.State.Pid}} {{.HostConfig.RestartPolicy.Name}} {{.Name}}")
    main, _, rest = answer.stdout.strip().partition(" ")
    policy, _, name = rest.partition(" ")
    if answer.ok and main.isdigit():
        return _Known(int(main), policy, name.lstrip("/"))
    return _Known(trouble=answer.stderr.strip()[-300:] or f"it said {answer.stdout.strip()[:100]!r}")


def _tool(container: Container) -> Optional[str]:
    return None if container.is_pod else TOOLS.get(container.runtime)


def _ask(container: Container, *words: str, seconds: float = systemd.CALL_SECONDS) -> systemd.Answer:
    """Run docker or podman on a container, for a rootless one as its user's login would."""
    environment = {}
    if container.uid is not None:
        environment["XDG_RUNTIME_DIR"] = f"/run/user/{container.uid}"
        socket = f"/run/user/{container.uid}/docker.sock"
        if os.path.exists(socket):
            environment["DOCKER_HOST"] = f"unix://{socket}"
    return systemd.run([TOOLS[container.runtime], *words, container.id], seconds, environment)


def stop(restarter: Restarter, seconds: float, tell: Callable[[str], None]) -> str:
    """Stop a unit or container through its own supervisor; return what went wrong, empty if it is down."""
    assert not isinstance(restarter.place, Process)
    if isinstance(restarter.place, Unit):
        is_down = systemd.stop(restarter.place, seconds, tell)
        return "" if is_down else f"{restarter.name} was not down within {seconds:.0f} s"
    tell(f"stopping {restarter.name}")
    answer = _ask(restarter.place, "stop", "-t", f"{seconds:.0f}", seconds=seconds + 30)
    return "" if answer.ok else f"{restarter.name} could not be stopped: {answer.stderr.strip()[-300:]}"


def stop_parents(found: Iterable[Restarter], seconds: float, tell: Callable[[str], None]) -> list[Process]:
    """End the parents among ``found``, all at once lest one starts another again; return those that did not end."""
    above = [restarter.place for restarter in found if isinstance(restarter.place, Process)]
    if not above:
        return []
    tell(f"stopping first what would start it again: {', '.join(f'{each.comm} (pid {each.pid})' for each in above)}")
    manner = ending.Manner(signal.SIGTERM, min(seconds, PARENT_SECONDS))
    return ending.stop(lambda: above, manner, tell)


def start(restarter: Restarter) -> str:
    """Start again what ``stop`` stopped; return what went wrong, empty if nothing did."""
    assert not isinstance(restarter.place, Process)
    if isinstance(restarter.place, Unit):
        answer = systemd.Manager(restarter.place.manager_uid).call("start", restarter.place.name)
    else:
        answer = _ask(restarter.place, "start")
    return "" if answer.ok else answer.stderr.strip()[-300:] or "it did not start"


def how_to_disable(place: Union[Unit, Container, Process]) -> str:
    """Return the command after which a boot of the node does not start the unit or container any more."""
    assert not isinstance(place, Process)
    if isinstance(place, Unit):
        return f"systemctl {'' if place.manager_uid is None else '--user '}disable {place.name}"
    return f"{TOOLS.get(place.runtime, place.runtime)} update --restart=no {place.id[:12]}"


def list_by_place(claims: Iterable[Claim], listed: Iterable[str]) -> list[Claim]:
    """Turn foreign claims into listed ones where ``stale.kill`` names their unit or container.

    What this very run descends from stays foreign.
    """
    names = frozenset(listed)
    spared = _line() if names else set()
    result = []
    for claim in claims:
        place = place_of(claim.process) if claim.kind == ownership.FOREIGN and names else None
        if place is not None and claim.process.pid not in spared and _names_of(place) & names:
            word = place.name if isinstance(place, Unit) else f"container {place.id[:12]}"
            why = f"{claim.why}, and {word} is listed in stale.kill"
            result.append(dataclasses.replace(claim, kind=ownership.LISTED, why=why))
        else:
            result.append(claim)
    return result


def _names_of(place: Union[Unit, Container]) -> set[str]:
    if isinstance(place, Unit):
        return {place.name, place.name[: -len(".service")]}
    name = _inspect(place).name
    return {place.id, place.id[:12], *([name] if name else [])}


def newcomers(before: Iterable[Claim], after: Iterable[Claim]) -> list[Claim]:
    """Return living holders of the GPUs or the port that were not there before the stop."""
    known = {claim.process.identity for claim in before}
    return [
        claim for claim in after if claim.process.identity not in known and processes.is_alive(claim.process.identity)
    ]


def describe_newcomer(claim: Claim, stopped: Iterable[Claim], since: float) -> str:
    """Say what a new holder most likely is: started again by somebody, or a process that was charged with the memory.

    facts: CUDA IPC importers are charged with a dead owner's memory, so an old process may become a holder.
    """
    old = processes.age_seconds(claim.process) > since
    if old:
        return f"{claim}; it was there before and holds a GPU only now, as importers of CUDA IPC memory do"
    place = place_of(claim.process)
    keeper = ""
    if isinstance(place, Unit):
        keeper = f" by unit {place.name}"
    elif place is not None:
        keeper = f" by container {place.id[:12]}"
    is_again = any(claim.process.title == other.process.title for other in stopped)
    return f"{claim}; {'started again' if is_again else 'started'}{keeper} after the stop"
