"""Whether a deploy may leave a server alone: `--if-changed`. Reads only."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Iterable, Optional

from lamplighter.node import events
from lamplighter.node.events import Exit
from lamplighter.node.gpu import gpus
from lamplighter.node.health import drift, hold, liveness, serving
from lamplighter.node.health.differences import Difference
from lamplighter.node.layout import ServerHome, server_home
from lamplighter.node.plan import Plan
from lamplighter.node.system import lock
from lamplighter.node.verbs import follow, releases, status


@dataclasses.dataclass(frozen=True)
class Before:
    """What ``deploy --if-changed`` found: the event that ends it here, or the reasons to go on."""

    end: Optional[events.Event]
    reasons: tuple[str, ...] = ()


def look_before(request: dict[str, Any], root: str) -> Before:
    """Decide whether a deploy may leave the server alone: it is well, as wanted, without drift, and not too old.

    A release that is known to be bad is not tried again: exit 9 while another one serves, 7 when nothing does.
    """
    with gpus.one_look():
        return _look_before(request, root)


def _look_before(request: dict[str, Any], root: str) -> Before:
    home = server_home(root, request["server"]["name"])
    if hold.of(home) is not None:
        return Before(None)  # the run itself is refused, and its journal says so
    digest = request["release"]["digest"]
    found = drift.find_drift(home, request["wanted"])
    reasons = _reasons(home, request, drift.since_deploy(home, found))
    now = serving.look(home, Plan.load(request))
    if not reasons:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float((now.record or {}).get("since") or 0)))
        message = f"release {digest} serves since {since}"
        if not found.differences:
            return Before(follow.ended("unchanged", Exit.OK, f"{message}; nothing differs", now.record))
        first = found.differences[0]
        command = events.invocation("env", request["host"], home.name)
        hint = f"{command} shows who overwrote it, and what to do"
        message += f"; what differs did so right after its deploy: {first}"
        return Before(follow.ended("unchanged", Exit.DEGRADED, message, now.record, cause="environment", hint=hint))
    verdict = releases.verdict_on(home, request)
    if verdict.get("verdict") != "bad" or lock.holder_of(home.lock) is not None:
        return Before(None, tuple(reasons))
    end = follow.ended(
        "refused",
        Exit.ROLLED_BACK if now.record else Exit.NOT_READY,
        f"release {digest} failed on {releases.date_of(verdict)} and is not tried again; {now.as_before}",
        now.record,
        cause="bad_release",
        evidence=verdict.get("message") or "",
        hint="fix the cause and change the inventory, or try it again with a deploy without --if-changed",
        release=digest,
    )
    return Before(end, tuple(reasons))


def _reasons(home: ServerHome, request: dict[str, Any], differences: Iterable[Difference]) -> list[str]:
    state = status.status_of(home, request["host"])
    if state["run"] is not None:
        return [f"a run is at work: {state['run'].get('id')}"]
    if state["state"] != "serving":
        return [f"it does not serve ({state['state']}): {state['message']}"]
    reasons = liveness.lost_workers(home)
    trouble = liveness.trouble_of(home) if not reasons else None  # a reason is enough: the other one may take a minute
    reasons += [] if trouble is None else [trouble]
    reasons += [f"{each.kind}: {each}" for each in differences]
    if not reasons and home.release(state["release"]).digest != request["release"]["digest"]:
        reasons.append(f"release {state['release']} serves, {request['release']['digest']} is wanted")
    reasons += [
        f"secret {name} has another value" for name in releases.changed_secrets(home.current_release(), request)
    ]
    age, most = liveness.age_of(home), request.get("max_age")
    if most is not None and age is not None and age >= most:
        reasons.append(f"it has run for {age / 86400:.1f} days, at most {most / 86400:.1f} are wanted")
    return reasons
