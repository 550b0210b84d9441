"""Every process that matters to a server, judged: its own, stale, listed or foreign. Looks only."""

from __future__ import annotations

import dataclasses
import os
from typing import Collection, Iterable, Mapping, Optional

from lamplighter.node import events
from lamplighter.node.gpu import gpus, holders
from lamplighter.node.health import renamed
from lamplighter.node.keeper import launcher, ownership, parents, restarters, systemd
from lamplighter.node.keeper.launched import supervisor_in
from lamplighter.node.layout import IDENTITY, ServerHome, all_servers, read_json
from lamplighter.node.plan import Plan
from lamplighter.node.system import processes


def find_claims(
    plan: Plan,
    home: ServerHome,
    uuids: tuple[str, ...],
    host: str,
    sample: Optional[gpus.Sample] = None,
    spared: Collection[int] = (),
) -> list[ownership.Claim]:
    """Return every process that matters to this server, but for ``spared``, judged: ours, stale, listed or foreign.

    A look costs two calls of nvidia-smi, unless there is a fresh ``sample``, and a walk through /proc.
    """
    table = processes.processes()
    recorded = recorded_launches(home, table)
    ours = {process.pid for record in recorded for process in ownership.members(record, table)}
    watchers = parents.Programs.of(plan.engine).watchers
    evidence = holders.look(uuids, plan.port, plan.allow, watchers, ours, table, sample)
    found = ownership.claims(
        evidence,
        recorded,
        plan.engine,
        policy=plan.stale.policy,
        listed=plan.stale.kill,
        uid=os.geteuid(),
    )
    former = renamed.former_home(plan, home)
    if former is not None or any(claim.kind == ownership.STALE for claim in found):
        siblings = _siblings(home, table)
        was = former.name if former is not None else None
        found = [_judge_sibling(claim, siblings, host, was) for claim in found]
    found = [claim for claim in found if claim.process.pid not in spared]
    return restarters.list_by_place(found, () if plan.stale.policy == "report" else plan.stale.kill)


def _siblings(home: ServerHome, table: Mapping[int, processes.Process]) -> dict[int, str]:
    """Return the processes of the other servers that lamplighter keeps here: whose each pid is.

    Those that have been ready once; also while systemd has them restarted and they load again, which takes minutes.
    """
    found: dict[int, str] = {}
    for other in all_servers(os.path.dirname(os.path.dirname(home.path))):
        launched = launcher.read_record(other) if other.name != home.name else None
        main = launcher.present(launched).main if launched is not None and launched.get("ready") else None
        if main is not None:
            pids = {main.pid}
            for record in recorded_launches(other, table):
                pids.update(process.pid for process in ownership.members(record, table))
            pids.update(process.pid for process in processes.descendants(pids, table))
            found.update(dict.fromkeys(pids, other.name))
    return found


def _judge_sibling(
    claim: ownership.Claim, siblings: Mapping[int, str], host: str, was: Optional[str]
) -> ownership.Claim:
    """A server that was deployed is not stale, however much it is in the way; the one that this ``was`` is to go."""
    name = siblings.get(claim.process.pid)
    if name is not None and name == was and claim.kind in (ownership.STALE, ownership.FOREIGN):
        return dataclasses.replace(claim, kind=ownership.STALE, why=f"it is server {name}, which has another name now")
    if claim.kind != ownership.STALE or name is None:
        return claim
    command = events.invocation("stop", host, name)
    why = f"{claim.why}; it is server {name} of lamplighter: `{command}` ends it"
    return dataclasses.replace(claim, kind=ownership.FOREIGN, why=why)


def find_restarters(plan: Plan, home: ServerHome, claims: Iterable[ownership.Claim]) -> list[restarters.Restarter]:
    """Return the units, containers and parents, not ours, that may start again what would be stopped."""
    listed = () if plan.stale.policy == "report" else plan.stale.kill
    table, programs = processes.processes(), parents.Programs.of(plan.engine)
    former = renamed.former_home(plan, home)
    supervisors = _supervisors(former, table) if former is not None else frozenset[int]()
    return restarters.find(claims, table, systemd.units(home), listed, programs, supervisors)


def _supervisors(home: ServerHome, table: Mapping[int, processes.Process]) -> frozenset[int]:
    """Return the pids of our own supervisors of a server: none starts anything again."""
    recorded = recorded_launches(home, table)
    return frozenset(each.supervisor.pid for each in recorded if each.supervisor is not None)


def is_kept(pid: int, found: Iterable[restarters.Restarter]) -> bool:
    """Tell whether a unit or container keeps the process, and will be stopped and can be started again with it."""
    return any(restarter.may_be_started and pid in restarter.pids for restarter in found)


def recorded_launches(home: ServerHome, table: Mapping[int, processes.Process]) -> list[ownership.Recorded]:
    """Return the launches of this boot of which something may still live, and what our unit runs now.

    A launch claims nothing whose supervisor has seen its last descendant go, and none that was a unit: what is left of
    that is in the unit's cgroup, and the numbers of its processes may be others' by now. ``server.json`` knows the last
    one too, where the launch's own record is damaged.
    """
    found = launcher.recorded_in_unit(home, table)
    for launch in home.launches():
        record = read_json(launch.process, **IDENTITY)
        if record is None or record["boot_id"] != processes.boot_id():
            continue
        if (read_json(launch.exit) or {}).get("all_gone"):
            continue
        launched = launcher.read_launched(launch)
        if launched is not None and launched.unit is None:
            found.append(ownership.Recorded(launched.main, launched.supervisor, record.get("cgroup")))
    last = _last_launch(home)
    return found if last is None or any(last.main == each.main for each in found) else [*found, last]


def living_members(home: ServerHome) -> list[processes.Process]:
    """Return what lives of all that was launched for this server, as the node has recorded it. Walks through /proc."""
    table = processes.processes()
    found = {each.pid: each for record in recorded_launches(home, table) for each in ownership.members(record, table)}
    return [found[pid] for pid in sorted(found)]


def _last_launch(home: ServerHome) -> Optional[ownership.Recorded]:
    """Return the launch of which ``server.json`` tells, while its main process or its supervisor lives.

    None for a server that was adopted, which lamplighter did not launch, and for a unit.
    """
    record = launcher.read_record(home)
    if record is None or record["attempt"] == "adopted" or record.get("unit"):
        return None
    main = processes.Identity.of(record)
    supervisor = supervisor_in(record)
    is_there = any(each is not None and processes.is_alive(each) for each in (main, supervisor))
    return ownership.Recorded(main, supervisor) if is_there else None
