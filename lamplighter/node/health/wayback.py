"""Could what serves now be started again, if the server that is to replace it fails? Asked before it is stopped.

A running server needs nothing of what its start needed: its model may be gone, its engine upgraded, its address moved.
Who stops it then finds out too late. Reads only.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Collection, Iterator, Mapping, Optional, Union

from lamplighter.node import arguments, events
from lamplighter.node.finding import Finding
from lamplighter.node.gpu import choice
from lamplighter.node.health import census, serving
from lamplighter.node.keeper import adopt, launcher, ownership
from lamplighter.node.layout import ReleaseDirectory, ServerHome
from lamplighter.node.plan import Plan
from lamplighter.node.start import ground
from lamplighter.node.start.ground import Start
from lamplighter.node.system import http


def examine(
    home: ServerHome,
    plan: Plan,
    digest: str,
    target: Optional[ReleaseDirectory],
    claims: Collection[ownership.Claim],
    host: str,
) -> Iterator[Finding]:
    """Ask of the release that a roll back would start, ``target``, whether it can start now.

    ``plan`` is what is to be put into service; ``digest`` that of its release, which need not be here yet.
    An error where a server would be lost by that: one that answers. A warning where nothing serves, where the way back
    is known to be bad, and where what serves is what is to start, of which all has been asked already.
    """
    by_hand = adopt.find(claims, plan.port)
    stopping = {claim.process.pid for claim in claims if claim.may_be_stopped}
    kept = census.find_restarters(plan, home, claims)
    way: Union[adopt.Found, ReleaseDirectory]
    if isinstance(by_hand, adopt.Found) and not census.is_kept(by_hand.process.pid, kept):
        way, who = by_hand, f"pid {by_hand.process.pid} ({by_hand.process.title})"
        trouble = _first_error(_by_hand(by_hand, plan), stopping)
    elif by_hand is None and target is not None and (stored := target.read_plan()) is not None:
        way, who = target, f"release {target.name}"
        try:
            trouble = _first_error(_of_release(target, stored, plan), stopping)
        except ground.NoAnswer as error:
            hint = f"`{events.invocation('deploy', host, home.name)}` of what made it writes it again"
            trouble = Finding("launch_script", "error", "its launch script does not run", str(error), hint)
    else:
        return  # there is none; where a person's server cannot be brought back, that has been said
    if trouble is None:
        yield Finding("way_back", "ok", f"{who} could be started again")
    elif _is_lost_without(home, plan, digest, way):
        message = f"{who} serves, and could not be started again if this fails: {trouble.message}"
        give_up = f"give it up knowingly: `{events.invocation('stop', host, home.name)}`, then the same again"
        hint = f"{trouble.hint}; or {give_up}" if trouble.hint else f"fix that, or {give_up}"
        yield Finding("way_back", "error", message, trouble.evidence, hint)
    else:
        message = f"there is no way back: {who} could not be started again: {trouble.message}"
        yield Finding("way_back", "warning", message, trouble.evidence, trouble.hint)


def _first_error(start: Start, stopping: Collection[int]) -> Optional[Finding]:
    return next((found for found in ground.examine(start, stopping) if found.level == "error"), None)


def _is_lost_without(home: ServerHome, plan: Plan, digest: str, way_back: Union[adopt.Found, ReleaseDirectory]) -> bool:
    """Tell whether a server that answers hangs on this way back, if the new one fails."""
    if isinstance(way_back, adopt.Found):
        return http.is_answering(way_back.host, plan.port)
    now = serving.look(home)
    if not now.may_serve or not now.is_alive or (way_back.read_verdict() or {}).get("verdict") == "bad":
        return False
    # What a release holds that is damaged, its name alone does not tell.
    return now.record is None or home.release(now.record["release"]).digest != digest


def _of_release(target: ReleaseDirectory, stored: Plan, plan: Plan) -> Start:
    count = len(stored.gpus) if stored.gpus != "all" else len(choice.resolve_gpus(stored).uuids) or None
    known = dataclasses.replace(stored, engine=_engine_of(stored.engine, plan.engine))
    start = ground.start_of(known, target, gpu_count=count)
    return dataclasses.replace(start, engine_version=None)  # one that was upgraded in its place may well start it


def _engine_of(stored: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a release's engine; one that an earlier version of ours wrote did not know what engines need."""
    is_same = stored.get("name") == now.get("name")
    return {**stored, "needs": now.get("needs")} if is_same and "needs" not in stored else stored


def _by_hand(found: adopt.Found, plan: Plan) -> Start:
    return Start(
        name=plan.name,
        argv=found.argv,
        environment={**launcher.bare_environment(), **found.environment},
        python=found.argv[0],
        model=arguments.model_of(plan.engine, found.argv) or "",
        host=found.host,
        port=plan.port,
        gpus=None,
        engine=plan.engine,
        directory=found.directory,
    )
