"""Could what serves now be started again, if the server that is to replace it fails? Asked before it is stopped.

A running server needs nothing of what its start needed: its model may be gone, its engine upgraded, its address moved.
Whoever stops it then finds out in the dark. Reads only.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Collection, Iterator, Mapping, Optional

from lamplighter.node import events, preflight
from lamplighter.node.act import adopt, launcher
from lamplighter.node.layout import ReleaseDirectory, ServerHome
from lamplighter.node.observe import arguments, ground, ownership
from lamplighter.node.observe.ground import Finding, Start
from lamplighter.node.plan import Plan


@dataclasses.dataclass(frozen=True)
class Change:
    """What is to be put into service; ``digest`` is that of its release, which need not be here yet."""

    plan: Plan
    engine: Mapping[str, Any]
    digest: str


def examine(
    home: ServerHome,
    change: Change,
    target: Optional[ReleaseDirectory],
    claims: Collection[ownership.Claim],
    host: str,
) -> Iterator[Finding]:
    """Ask of the release that a roll back would start, ``target``, whether it can start now.

    An error where a server would be lost by that: one that answers. A warning where nothing serves, where the way back
    is known to be bad, and where what serves is what is to start, of which all has been asked already.
    """
    by_hand = adopt.find(claims, change.plan.port)
    if isinstance(by_hand, adopt.Found) and not preflight.is_kept(by_hand.process, change.plan, home, claims):
        who, is_needed = f"pid {by_hand.process.pid} ({by_hand.process.title})", True
    elif by_hand is not None or target is None:
        return  # it is said of the former that there is no way back to it
    else:
        who, is_needed = f"release {target.name}", _is_needed(home, target, change)
    stopping = {claim.process.pid for claim in claims if claim.may_be_stopped}
    try:
        start = _by_hand(by_hand, change) if isinstance(by_hand, adopt.Found) else _of_release(target, change)
        troubles = [] if start is None else [each for each in ground.examine(start, stopping) if each.level == "error"]
    except ground.NoAnswer as error:
        again = events.invocation("deploy", host, home.name)
        hint = f"`{again}` of what made it writes it again"
        troubles = [Finding("launch_script", "error", "its launch script does not run", str(error), hint)]
    if not troubles:
        yield Finding("way_back", "ok", f"{who} could be started again")
        return
    is_serving = preflight.is_answering(change.plan.host, change.plan.port)
    first = troubles[0]
    if is_needed and is_serving:
        stop, deploy = (events.invocation(verb, host, home.name) for verb in ("stop", "deploy"))
        message = f"{who} serves, and could not be started again if this fails: {first.message}"
        give_up = f"or give it up knowingly: `{stop}`, then `{deploy}`"
        hint = f"{first.hint}; {give_up}" if first.hint else f"fix that, {give_up}"
        yield Finding("way_back", "error", message, first.evidence, hint)
    else:
        message = f"there is no way back: {who} could not be started again: {first.message}"
        yield Finding("way_back", "warning", message, first.evidence, first.hint)


def _is_needed(home: ServerHome, target: ReleaseDirectory, change: Change) -> bool:
    """Tell whether a server that serves hangs on this release, if the new one fails."""
    serving = preflight.what_serves(home)
    if serving is None or (target.read_verdict() or {}).get("verdict") == "bad":
        return False
    return home.release(serving["release"]).digest != change.digest


def _of_release(target: Optional[ReleaseDirectory], change: Change) -> Optional[Start]:
    stored = target.read_plan() if target is not None else None
    if target is None or stored is None:
        return None
    plan, engine = Plan.load(stored["server"]), _engine_of(stored["engine"], change)
    if plan.gpus != "all":
        count: Optional[int] = len(plan.gpus)
    else:
        count = len(preflight.resolve_gpus(plan).uuids) or None
    start = preflight.start_of(plan, engine, target, gpu_count=count)
    return dataclasses.replace(start, engine_version=None)  # one that was upgraded in its place may well start it


def _engine_of(stored: Mapping[str, Any], change: Change) -> Mapping[str, Any]:
    """Return a release's engine; one that an earlier version of ours wrote did not know what engines need."""
    is_same = stored.get("name") == change.engine.get("name")
    return {**stored, "needs": change.engine.get("needs")} if is_same and "needs" not in stored else stored


def _by_hand(found: adopt.Found, change: Change) -> Start:
    return Start(
        name=change.plan.name,
        argv=found.argv,
        environment={**launcher.bare_environment(), **found.environment},
        python=found.argv[0],
        model=arguments.model_of(change.engine, found.argv) or "",
        host=found.host,
        port=change.plan.port,
        gpus=None,
        engine=change.engine,
        directory=found.directory,
    )
