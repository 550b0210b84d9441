"""What ``hold`` asks of a node: why, and for how long. Pure."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

from lamplighter.errors import UsageError
from lamplighter.run.command import seconds_in

_TIME = re.compile(r"(?:(\d{4}-\d{2}-\d{2})(?:[ T]|$))?(?:(\d{1,2}:\d{2})(?::\d{2})?)?(Z| UTC)?")
_LATER = "write 18:00, 2026-12-04 (to its end), '2026-12-04 18:00' (UTC with a Z behind it), or 90m, 12h, 3d"


def order(message: str | None, until: str | None, end: bool, now: dt.datetime) -> dict[str, Any]:
    """Return what the node is told; {} where nobody asked for a change. ``now`` has a time zone.

    Raises UsageError for what says only half.
    """
    if end:
        if message is not None or until is not None:
            raise UsageError("--end beside -m or --until", next_step="end the hold first, then say what holds instead")
        return {"end": True}
    if message is None and until is None:
        return {}
    if message is None:
        raise UsageError("a hold needs its reason", next_step='give it with -m: -m "debugging until Friday"')
    if until is None:
        raise UsageError("a hold needs its end, lest it is forgotten", next_step=f"--until: {_LATER}")
    return {"message": message, "seconds": seconds_until(until, now)}


def seconds_until(text: str, now: dt.datetime) -> float:
    """Return how long it is until a time of day, a date (its end) or both, or a duration. Raises UsageError.

    Times are of this machine's time zone unless they say UTC. A time of day is the next one.
    """
    said = text.strip()
    found = _TIME.fullmatch(said)
    if found is None or not (found[1] or found[2]):
        try:
            return seconds_in(said, "--until")
        except UsageError:
            raise UsageError(f"--until: {text!r} is no time", next_step=_LATER) from None
    zone = dt.timezone.utc if found[3] else now.tzinfo
    here = now.astimezone(zone)
    try:
        day = dt.date.fromisoformat(found[1]) if found[1] else here.date()
        time = dt.time.fromisoformat(found[2].zfill(5)) if found[2] else dt.time(0)
    except ValueError as error:
        raise UsageError(f"--until: {text!r} is no time", why=str(error), next_step=_LATER) from error
    moment = dt.datetime.combine(day, time, zone)
    if found[2] is None or (not found[1] and moment <= here):
        moment += dt.timedelta(days=1)
    left = (moment - now).total_seconds()
    if left <= 0:
        raise UsageError(f"--until: {text!r} is over", next_step=_LATER)
    return left
