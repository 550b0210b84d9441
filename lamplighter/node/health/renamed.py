"""A server that has another name now: until a release of the new name is ready, the old name's server is its own.

It is stopped as one that was started by hand: written down as a release, or, where it is a unit, started again by that
if the deploy fails. Its directory stays. Looks only.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Iterator, Mapping, Optional

from lamplighter.node import events
from lamplighter.node.finding import Finding
from lamplighter.node.keeper import launcher, systemd
from lamplighter.node.layout import ServerHome, server_home
from lamplighter.node.plan import Plan
from lamplighter.node.system.processes import Unit


@dataclasses.dataclass(frozen=True)
class Renamed(Plan):
    """The plan of a server that was called ``former``, as long as that is of any effect."""

    former: str = ""


def plan_of(request: Mapping[str, Any], home: ServerHome) -> Plan:
    """Return the plan of the request: a `Renamed` one until a release of the new name is ready."""
    plan, was = Plan.load(request), request.get("was")
    if not was or home.current_release() is not None or not launcher.read_record(server_home(_root_of(home), was)):
        return plan
    return Renamed(**{each.name: getattr(plan, each.name) for each in dataclasses.fields(plan)}, former=was)


def former_home(plan: Plan, home: ServerHome) -> Optional[ServerHome]:
    """Return the home of the server that this one was; None where it had no other name."""
    return server_home(_root_of(home), plan.former) if isinstance(plan, Renamed) else None


def unit_of(plan: Plan, home: ServerHome) -> Optional[Unit]:
    """Return the unit of the server that this one was, where it is one."""
    former = former_home(plan, home)
    return None if former is None else systemd.recorded(former)


def findings(plan: Plan, home: ServerHome, host: str) -> Iterator[Finding]:
    """Say what becomes of the former server, and refuse where it could not be taken over whole."""
    former = former_home(plan, home)
    record = launcher.read_record(former) if former is not None else None
    now = launcher.present(record) if record is not None else launcher.Present(None)
    if former is None or record is None or (now.main is None and not now.is_restarting):
        return
    release = former.release(record["release"]).read_plan()
    command = events.invocation("undeploy", host, former.name, "--stop")
    hint = f"`{command}` ends it, then deploy again; there is no way back to it then"
    if record["port"] != plan.port:
        message = f"server {former.name} listens on port {record['port']}, and not on port {plan.port}"
        yield Finding("was", "error", message, "a server that gets another name keeps its port until then", hint)
    elif release is not None and release.sitecustomize.scope not in ("server", "none"):
        message = f"server {former.name} has start-up files outside lamplighter's directory"
        yield Finding("was", "error", message, f"sitecustomize.scope is {release.sitecustomize.scope}", hint)
    else:
        yield Finding("was", "ok", f"server {former.name} is the former one, and will be stopped", "")


def _root_of(home: ServerHome) -> str:
    return os.path.dirname(os.path.dirname(home.path))
