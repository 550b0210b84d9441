"""Who would bring a killed process back: a systemd unit or a container that is not ours, found through the cgroup.

A restarter is stopped, and before its processes, only where that stops nothing but what may be stopped anyway: its
main process is such a process, or a plain wrapper around one. A server that somebody started from cron or a notebook
lives in that daemon's unit too, and the daemon is never stopped for it. ``stale.kill`` may list a unit or a container
by name.

facts: a raw kill makes systemd restart the unit, and Docker the container with ``--restart=always``; ``docker stop``
keeps it down until its daemon restarts. Containers of Kubernetes come back whatever a node's tools do, those that it
runs through docker too. A rootless container is known to its own user's podman or docker alone.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from typing import Callable, Iterable, Mapping, Optional, Union

from lamplighter.node.act import systemd
from lamplighter.node.observe import ownership, processes
from lamplighter.node.observe.ownership import Claim
from lamplighter.node.observe.processes import Container, Process, Unit

#: Programs that live only for the server they start, or for its output.
WRAPPERS = frozenset({"sh", "bash", "dash", "zsh", "env", "uv", "tini", "docker-init", "dumb-init", "catatonit", "tee"})

#: The command that speaks for a runtime, where there is one that can stop a container for good.
TOOLS = {"docker": "docker", "podman": "podman"}


@dataclasses.dataclass(frozen=True)
class Restarter:
    """A unit or container with processes that will be stopped.

    ``obstacle``: why it is left alone, empty if it will be stopped first. ``name`` is what people call it.
    """

    place: Union[Unit, Container]
    name: str
    pids: tuple[int, ...]
    obstacle: str = ""
    hint: str = ""
    is_enabled: bool = False

    @property
    def may_be_stopped(self) -> bool:
        return not self.obstacle

    def __str__(self) -> str:
        pids = ", ".join(map(str, self.pids))
        return f"{self.name} (pid {pids})" + (f": {self.obstacle}" if self.obstacle else "")


def place_of(process: Process) -> Union[Unit, Container, None]:
    """Return the unit or container that keeps a process; a scope keeps nothing and is none."""
    unit, container = processes.unit_of(process), processes.container_of(process)
    is_pod = container is not None and container.is_pod
    if unit is not None and unit.name.endswith(".service") and not _is_runtime(unit) and not is_pod:
        return unit  # also around a container: the unit starts it again
    return container


def _is_runtime(unit: Unit) -> bool:
    """Tell whether a unit is the daemon of a container runtime, below which containers may lie (cgroupfs driver)."""
    return unit.name in ("docker.service", "containerd.service", "podman.service", "crio.service", "kubelet.service")


def find(
    claims: Iterable[Claim], table: Mapping[int, Process], ours: Optional[Unit], listed: Iterable[str]
) -> list[Restarter]:
    """Return who would bring back the processes that may be stopped. ``ours`` is our own unit, which is no restarter.

    Reads only, but asks systemd and the container runtime.
    """
    stoppable = {claim.process.pid: claim.process for claim in claims if claim.may_be_stopped}
    places: dict[Union[Unit, Container], list[int]] = {}
    for pid, process in stoppable.items():
        place = place_of(process)
        if place is not None and place != ours:
            places.setdefault(place, []).append(pid)
    listed = frozenset(listed)
    return [_judge(place, tuple(sorted(pids)), stoppable, table, listed) for place, pids in places.items()]


def _judge(
    place: Union[Unit, Container],
    pids: tuple[int, ...],
    stoppable: Mapping[int, Process],
    table: Mapping[int, Process],
    listed: frozenset[str],
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
    if not obstacle and _line() & set(inside):
        obstacle, hint = "this very run lives in it", "start the run from elsewhere"
    elif not obstacle and not names & listed and not _stands_for(main, inside, stoppable):
        process = table.get(main)
        what = f"{process.title!r} (pid {main})" if process else "not among them"
        obstacle = f"its main process is {what}, and that is none of ours to stop"
        hint = f"if it starts them again, list {min(names, key=len)} in stale.kill"
    return Restarter(place, name, pids, obstacle, hint, is_enabled)


def _stands_for(main: int, inside: Mapping[int, Process], stoppable: Mapping[int, Process]) -> bool:
    """Tell whether a main process is to be stopped, or lives only for what is to be stopped."""
    if main in stoppable:
        return True
    process = inside.get(main)
    if process is None or not _is_wrapper(process, inside, stoppable):
        return False
    below = processes.descendants([main], inside)
    working = {child.pid for child in below if not _is_wrapper(child, inside, stoppable)}
    return bool(working) and working <= set(stoppable)


def _is_wrapper(process: Process, inside: Mapping[int, Process], stoppable: Mapping[int, Process]) -> bool:
    """Tell whether it is one by its name; or, named after its script, a shell above something to be stopped."""
    if process.comm in WRAPPERS:
        return True
    if os.path.basename(process.exe or "") not in WRAPPERS:
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


def _inspect(container: Container) -> _Known:
    if _tool(container) is None or container.uid not in (None, os.geteuid()):
        return _Known()
    answer = _ask(container, "inspect", "--format", "{{.State.Pid}} {{.HostConfig.RestartPolicy.Name}} {{.Name}}")
    main, _, rest = answer.stdout.strip().partition(" ")
    policy, _, name = rest.partition(" ")
    return _Known(int(main), policy, name.lstrip("/")) if answer.ok and main.isdigit() else _Known()


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
    if isinstance(restarter.place, Unit):
        is_down = systemd.stop(restarter.place, seconds, tell)
        return "" if is_down else f"{restarter.name} was not down within {seconds:.0f} s"
    tell(f"stopping {restarter.name}")
    answer = _ask(restarter.place, "stop", "-t", f"{seconds:.0f}", seconds=seconds + 30)
    return "" if answer.ok else f"{restarter.name} could not be stopped: {answer.stderr.strip()[-300:]}"


def start(restarter: Restarter) -> str:
    """Start again what ``stop`` stopped; return what went wrong, empty if nothing did."""
    if isinstance(restarter.place, Unit):
        answer = systemd.Manager(restarter.place.manager_uid).call("start", restarter.place.name)
    else:
        answer = _ask(restarter.place, "start")
    return "" if answer.ok else answer.stderr.strip()[-300:] or "it did not start"


def how_to_disable(place: Union[Unit, Container]) -> str:
    """Return the command after which a boot of the node does not start the unit or container any more."""
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
