"""Everything that can be known about the node before anything is touched. Reads only.

``examine`` serves both the ``preflight`` stage and ``check``: a finding of level error refuses a deploy.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Collection, Iterable, Mapping, Optional

from lamplighter.node.finding import Finding
from lamplighter.node.gpu import choice, gpus
from lamplighter.node.health import census, renamed
from lamplighter.node.keeper import adopt, launcher, ownership, parents, restarters, systemd
from lamplighter.node.layout import ReleaseDirectory, ServerHome
from lamplighter.node.plan import Plan
from lamplighter.node.start import ground, software
from lamplighter.node.system import disks, ports, processes

#: A release, its journal and the first minutes of a log; engines' caches and weights are their own affair.
ROOT_FREE_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Examination:
    """The findings, and the processes that a deploy would stop or leave."""

    findings: tuple[Finding, ...]
    claims: tuple[ownership.Claim, ...]


def examine(
    plan: Plan,
    home: ServerHome,
    resolved: gpus.Resolved,
    host: str,
    *,
    release: Optional[ReleaseDirectory] = None,
    request: Optional[Mapping[str, Any]] = None,
) -> Examination:
    """Ask every question of the preflight. Touches nothing; takes some nvidia-smi calls and one start of Python.

    ``host`` is how the inventory calls this node, for commands that a person can paste. ``release`` is what will be
    started where that is on the node already; ``request`` has the secrets of one that is not, ``checks``, and ``lint``.
    """
    request = request or {}
    port = _look_at_port(plan)
    verdict = choice.settled_verdict(plan, home, resolved.uuids) if resolved.uuids else None
    # Whose they are is asked last: a server of ours that is still starting goes on taking its port and its GPUs.
    claims = tuple(census.find_claims(plan, home, resolved.uuids, host))
    stopping = {claim.process.pid for claim in claims if claim.may_be_stopped}
    kept = census.find_restarters(plan, home, claims)
    findings = [
        *_start(plan, resolved, release, request, stopping),
        *_port(plan, home, port, claims),
        *_space(home),
        *ground.room_for_verify(
            disks.places(home.path, plan.model), request.get("checks") or {}, f"servers.{plan.name}.checks"
        ),
        *_gpus(plan, home, resolved, verdict, claims),
        *renamed.findings(plan, home, host),
        *_launcher(plan, home),
        *_restarters(kept, renamed.unit_of(plan, home)),
        *_adoption(plan, claims, kept),
    ]
    return Examination(tuple(findings), claims)


# ---------------------------------------------------------------------------------------------------------- questions


def _start(
    plan: Plan,
    resolved: gpus.Resolved,
    release: Optional[ReleaseDirectory],
    request: Mapping[str, Any],
    stopping: Collection[int],
) -> Iterable[Finding]:
    """Whether what is wanted can start here, and what this node's software makes of it."""
    count = None if resolved.error is not None else len(resolved.uuids)
    try:
        start = ground.start_of(plan, release, gpu_count=count, secrets=request.get("secrets"))
    except ground.NoAnswer:
        return  # the proof that follows says what is wrong with the script, and what to do
    yield from ground.examine(start, stopping)
    if "lint" in request:
        yield from software.examine(start, request["lint"])


@dataclasses.dataclass(frozen=True)
class _PortLook:
    """Whether the port can be bound, and the pids that listened there a moment later."""

    check: ports.PortCheck
    owners: frozenset[int]


def _look_at_port(plan: Plan) -> _PortLook:
    check = ports.can_bind(plan.host, plan.port)
    return _PortLook(check, frozenset(ports.owners(plan.port)))


def _port(plan: Plan, home: ServerHome, look: _PortLook, claims: Iterable[ownership.Claim]) -> Iterable[Finding]:
    strangers = [claim for claim in claims if claim.process.pid in look.owners and not claim.may_be_stopped]
    starting = [] if look.owners or not look.check.silent else _may_have_bound(plan, home, claims)
    hint = f"end it, choose another servers.{plan.name}.port, or list its name in stale.kill"
    if strangers:
        message = f"port {plan.port} is taken by a process that is not ours"
        yield Finding("port_in_use", "error", message, "; ".join(map(str, strangers)), hint)
    elif look.owners:
        yield Finding("port", "ok", f"port {plan.port} is held by what will be stopped", _pids(look.owners))
    elif starting:
        message = f"port {plan.port} is bound, most likely by what is still starting, which will be stopped"
        yield Finding("port", "ok", message, f"{look.check.reason}; {_pids(starting)}")
    elif look.check.taken:
        message = f"port {plan.port} on {plan.host} cannot be bound"
        yield Finding("port_in_use", "error", message, look.check.reason, hint)
    elif look.check.free:  # where it never can be had, the address says so
        yield Finding("port", "ok", f"port {plan.port} is free", look.check.reason)


def _may_have_bound(plan: Plan, home: ServerHome, claims: Iterable[ownership.Claim]) -> list[int]:
    """Return the pids, of what will be stopped, that may have bound the port without listening yet.

    facts: whose such a socket is, nothing in /proc tells; vLLM has one from its first seconds to the end of its load.
    """
    record = launcher.read_record(home) or {}  # none: the run was killed before it wrote one
    is_elsewhere = record.get("port", plan.port) != plan.port
    kinds = (ownership.STALE,) if is_elsewhere else (ownership.OURS, ownership.STALE)
    return [claim.process.pid for claim in claims if claim.kind in kinds]


def _pids(pids: Iterable[int]) -> str:
    return f"pid {', '.join(map(str, sorted(pids)))}"


def _space(home: ServerHome) -> Iterable[Finding]:
    place = home.path
    while not os.path.exists(place):
        place = os.path.dirname(place)
    free = _free_bytes(place)
    if free < ROOT_FREE_BYTES:
        message = f"only {free >> 20} MiB free below {place}"
        yield Finding("disk_full", "error", message, hint="make room: releases, journals and logs live there")
    else:
        yield Finding("disk", "ok", f"{free >> 20} MiB free below {place}")


def _free_bytes(path: str) -> int:
    try:
        state = os.statvfs(path)
    except OSError:
        return 0
    return state.f_bavail * state.f_frsize


def _gpus(
    plan: Plan,
    home: ServerHome,
    resolved: gpus.Resolved,
    verdict: Optional[gpus.Verdict],
    claims: Iterable[ownership.Claim],
) -> Iterable[Finding]:
    if resolved.error is not None:
        hint = choice.how_to_name_gpus(plan, resolved.error)
        yield Finding("gpu_unknown", "error", "it is not known which GPUs this server uses", resolved.error, hint)
        return
    if verdict is None:
        yield Finding("gpus", "ok", "the server uses no GPU (gpus: [])")
        return
    uuids = resolved.uuids
    claims = tuple(claims)
    stoppable = {claim.process.pid for claim in claims if claim.may_be_stopped}
    named = {claim.process.pid: claim for claim in claims if claim.holds_gpu and not claim.may_be_stopped}
    foreign = [pid for pid in verdict.holders if pid not in stoppable | named.keys() and processes.is_pid_alive(pid)]
    yield from choice.unfit_gpus(plan, uuids, verdict)
    if verdict.word == gpus.UNKNOWN:
        return
    if foreign or named:
        hint = _how_to_part(plan, verdict, {*foreign, *named})
        who = "; ".join([*map(str, named.values()), *([processes.describe_pids(foreign)] if foreign else [])])
        yield Finding("gpu_held", "error", "foreign processes hold our GPUs", who, hint)
    elif verdict.word == "HELD" and not verdict.holders and not stoppable:
        hint = (
            "look for holders outside this PID namespace (containers), or reset the GPU; if it uses that when idle "
            f"(a desktop, MIG), remove {os.path.normpath(home.baseline)} on the node: it is learned again"
        )
        yield Finding("gpu_held", "error", "GPU memory is held, and no process is seen", verdict.reason, hint)
    elif verdict.word == "NO_HOLDERS" and plan.gpus_unified != "accept":
        hint = f"servers.{plan.name}.gpus_unified: accept says that no visible holder is enough here"
        yield Finding("gpu_unified", "error", "the memory of these GPUs cannot be read", verdict.reason, hint)
    else:
        state = "held by what will be stopped" if verdict.word == gpus.HELD else verdict.word
        count = f"{len(uuids)} GPU" + ("" if len(uuids) == 1 else "s")
        yield Finding("gpus", "ok", f"{count}: {state}", verdict.reason)


def _how_to_part(plan: Plan, verdict: gpus.Verdict, pids: Collection[int]) -> str:
    """Say what to do about foreign holders: monitors, MPS and desktops may stay, by the names that count there."""
    programs = parents.Programs.of(plan.engine)
    shown = {app.pid: app.name for app in verdict.apps if app.pid in pids}
    seen = {pid: shown.get(pid) or _name_among_devices(pid, programs) for pid in pids}
    allowed = sorted({name for name in seen.values() if programs.is_monitor(name)})
    stay = f"{', '.join(allowed)} may stay: list {'it' if len(allowed) == 1 else 'them'} in servers.{plan.name}.allow"
    if allowed and all(programs.is_monitor(name) for name in seen.values()):
        return stay
    end = f"end them, or list their names in servers.{plan.name}.stale.kill"
    return f"{stay}; the others: {end}" if allowed else end


def _name_among_devices(pid: int, programs: parents.Programs) -> str:
    """Name a holder that nvidia-smi does not list. Its comm is cut after 15 characters, which is no monitor's name."""
    process = processes.read_process(pid)
    names = sorted(parents.names_of(process)) if process is not None else [""]
    return next((name for name in names if programs.is_monitor(name)), names[0])


def _launcher(plan: Plan, home: ServerHome) -> Iterable[Finding]:
    choice = launcher.choose(plan.launcher)
    if choice.obstacle is not None:
        message = f"servers.{plan.name}.launcher: systemd is not possible here"
        yield Finding("launcher", "error", message, choice.obstacle.reason, choice.obstacle.hint)
        return
    yield Finding("launcher", "ok", f"launcher {choice.kind}: {choice.why}")
    if choice.kind == launcher.SYSTEMD and systemd.is_masked(home):
        name = systemd.unit_for(home.name).name
        message = f"unit {name} is masked: an administrator does not want it to be started"
        yield Finding("unit_masked", "error", message, hint=f"ask them, then `systemctl unmask {name}`")
    edited = systemd.edited_by_hand(home)
    if edited is not None:
        hint = "it will be replaced once the new server is ready; keep changes in a drop-in (`systemctl edit`)"
        yield Finding("unit_edited", "warning", "the unit file is not as lamplighter wrote it", edited, hint)
    yield from _unasked_ends(choice.kind, home)


def _unasked_ends(kind: str, home: ServerHome) -> Iterable[Finding]:
    """What would end the server although it is not stopped: what is known to kill it refuses."""
    is_unit = kind == launcher.SYSTEMD
    for danger in (*systemd.dangers(is_unit=is_unit), *(systemd.dangers_of_drop_ins(home) if is_unit else ())):
        level = "error" if danger.is_sure else "warning"
        yield Finding(danger.id, level, danger.message, f"{danger.evidence}, launcher {kind}", danger.hint)


def _restarters(found: Iterable[restarters.Restarter], former: Optional[processes.Unit]) -> Iterable[Finding]:
    """``former``: the unit of a server that has another name now, which goes when that is ready."""
    for restarter in found:
        if restarter.obstacle:
            message = f"what would be stopped may be started again, by {restarter.name}"
            yield Finding("restarter", "error", message, str(restarter), restarter.hint)
        elif restarter.left:
            message = f"what would be stopped may be started again, by {restarter.name}, which is left running"
            yield Finding("restarter", "warning", message, str(restarter), restarter.hint)
        elif restarter.is_enabled and restarter.place != former:
            hint = f"`{restarters.how_to_disable(restarter.place)}` on the node, once the new server is there to stay"
            message = f"{restarter.name} will be stopped first, and comes back with the next boot"
            yield Finding("restarter", "warning", message, str(restarter), hint)
        else:
            yield Finding("restarter", "ok", f"{restarter.name} will be stopped first", str(restarter))


def _adoption(plan: Plan, claims: Iterable[ownership.Claim], kept: Iterable[restarters.Restarter]) -> Iterable[Finding]:
    found = adopt.find(claims, plan.port)
    if found is None or census.is_kept(found.process.pid, kept):
        return
    who = f"pid {found.process.pid} ({found.process.title})"
    if isinstance(found, adopt.Impossible):
        hint = "if a deploy fails, it cannot be started again: note how it was started"
        message = f"{who} was not started by lamplighter, and cannot be adopted"
        yield Finding("adoption", "warning", message, found.reason, hint)
    else:
        message = f"{who} was not started by lamplighter: before it is stopped, it is written down as a release"
        yield Finding("adoption", "ok", message, f"{len(found.argv)} arguments, {len(found.environment)} variables")
