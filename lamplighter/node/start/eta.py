"""How long a start still takes, to judge by the earlier ones of this server on this node, and what they measured.

What a good start took and measured stands in its journal, in the event with which the stage ``ready`` ends; nothing
else is kept. Reads only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from lamplighter.node import events
from lamplighter.node.events import PHASES, Exit
from lamplighter.node.layout import ServerHome
from lamplighter.node.plan import Plan

#: Earlier good starts that are looked at, and how many journals for them.
MOST_STARTS = 10
MOST_JOURNALS = 30
#: A range is only said of so many starts; of fewer, their mean.
RANGE_STARTS = 3
#: Below this share of what it usually is, a measure has shrunk.
SHRUNK = 0.9


@dataclasses.dataclass(frozen=True)
class Start:
    """One earlier good start: seconds by phase, what the server measured, and for which command line."""

    phases: Mapping[str, float]
    measures: Mapping[str, float]
    command: str


def command_digest(plan: Plan) -> str:
    """Name everything on the command line that a server's memory depends on."""
    text = json.dumps([plan.python, list(plan.argv), plan.gpus if isinstance(plan.gpus, str) else list(plan.gpus)])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def earlier_starts(home: ServerHome) -> Tuple[Start, ...]:
    """The latest good starts of this server on this node, newest first."""
    found = []
    for run in list(reversed(home.all_runs()))[:MOST_JOURNALS]:
        start = _read(run.journal)
        if start is not None:
            found.append(start)
        if len(found) == MOST_STARTS:
            break
    return tuple(found)


def _read(journal: str) -> Optional[Start]:
    told, is_good = None, False
    try:
        with open(journal, "rb") as file:
            for line in file:
                if b'"phase_seconds"' in line or b'"outcome"' in line:  # few lines of many are worth parsing
                    event = json.loads(line)
                    is_good = is_good or _is_good(event)
                    told = event if event.get("event") == events.PROGRESS else told
    except (OSError, ValueError, AttributeError):
        return None
    if told is None or not is_good:
        return None
    phases = {name: float(each) for name, each in (told.get("phase_seconds") or {}).items() if _is_number(each)}
    measures = {name: float(each) for name, each in (told.get("measures") or {}).items() if _is_number(each)}
    return Start(phases, measures, str(told.get("command") or ""))


def _is_good(event: Mapping[str, Any]) -> bool:
    """Tell whether a run ended with the server ready that it was to start; also one that was to go back."""
    is_asked_for = event.get("outcome") == "rolled_back" and event.get("exit_code") in (Exit.OK, Exit.DEGRADED)
    return is_asked_for or event.get("outcome") in ("deployed", "started")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def remaining(starts: Sequence[Start], phase: str, spent: float) -> Optional[Tuple[float, float]]:
    """Seconds until ready, least and most; both the same while there are few starts, None without any.

    ``spent`` seconds in ``phase`` so far. A phase may come back, or be in no earlier start: an estimate, no more.
    """
    left = [_left(start.phases, phase, spent) for start in starts if start.phases]
    if not left:
        return None
    if len(left) < RANGE_STARTS:
        mean = round(statistics.fmean(left), 1)
        return mean, mean
    return round(min(left), 1), round(max(left), 1)


def phase_remaining(starts: Sequence[Start], phase: str, spent: float) -> Optional[Tuple[float, float]]:
    """The same until the end of ``phase`` alone."""
    return remaining(
        [Start({phase: start.phases[phase]}, {}, "") for start in starts if phase in start.phases], phase, spent
    )


def _left(phases: Mapping[str, float], phase: str, spent: float) -> float:
    later = PHASES[PHASES.index(phase) + 1 :] if phase in PHASES else ()
    return max(0.0, phases.get(phase, 0.0) - spent) + sum(phases.get(each, 0.0) for each in later)


def shrunk(starts: Sequence[Start], command: str, measures: Mapping[str, float]) -> Dict[str, Tuple[float, float]]:
    """Measures that are far smaller than the same command line has given before: name -> (now, usually)."""
    found = {}
    for name, value in measures.items():
        before = [start.measures[name] for start in starts if start.command == command and name in start.measures]
        if before and value < SHRUNK * statistics.median(before):
            found[name] = (value, statistics.median(before))
    return found
