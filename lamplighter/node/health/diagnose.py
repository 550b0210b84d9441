"""``diagnose`` on the node: what the log of the last run says, and what the run itself found out. Reads only."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Dict, List, Mapping, Optional, Tuple

from lamplighter.node import events, journal
from lamplighter.node.health import serving
from lamplighter.node.keeper.launcher import read_exit
from lamplighter.node.layout import LaunchFiles, RunDirectory, ServerHome, server_home
from lamplighter.node.log import causes
from lamplighter.node.log.verdict import Diagnosis
from lamplighter.node.log.watch import SLICE_BYTES, LogWatch

#: Of a longer log, its beginning and its end are read.
MOST_BYTES = 256 << 20


def diagnose(request: Mapping[str, Any], root: str) -> Dict[str, Any]:
    """Diagnose the last run of a server that started one; {"error"} where there is none.

    The log is read again, with the wording of the request's engine. What the run found out itself (a stall, a model
    that is another, the kernel's word) is not in the log: it stands where the log has no cause, or one it explains.
    """
    home = server_home(root, request["servers"][0])
    found = _last_launch(home)
    if found is None:
        return {"error": f"no run of {home.name} on this node has started a server"}
    run, launch = found
    told = _told(run)
    ended = read_exit(launch) is not None
    watched = _read(launch.log, request["engine"])
    diagnosis = _merged(
        watched.diagnosis(exited=ended and not _was_stopped(told)), told.get(events.FAILURE), request["engine"]
    )
    notes: List[str] = list((told.get(events.FAILURE) or {}).get("notes") or ())
    if not notes and diagnosis.outcome == "failed":
        notes = [f"kernel: {note.text}" for note in (causes.kernel_notes(0.0) or ())[-causes.MOST_NOTES :]]
    notes += [f"warning: {line}" for line in watched.warnings.values()]
    notes += _since(home, run)
    answer = diagnosis.to_json(home.name)
    failure = told.get(events.FAILURE) or {}
    return {**answer, "run": run.run_id, "message": str(failure.get("message") or ""), "notes": notes}


def _since(home: ServerHome, run: RunDirectory) -> List[str]:
    """What a person who reads of that start should know of the time after it."""
    notes = []
    newest = home.all_runs()[-1]
    if newest.run_id != run.run_id:
        end = _told(newest).get(events.END)
        how = f"ended {end.get('outcome')}" if end is not None else "has not ended, or was killed"
        notes.append(f"the newest run, {newest.run_id}, started no server and {how}")
    now = serving.look(home)
    if now.record is None:
        notes.append(str(now) if now.is_unknown else "nothing of it serves now")
    return notes


def _last_launch(home: ServerHome) -> Optional[Tuple[RunDirectory, LaunchFiles]]:
    for run in reversed(home.all_runs()):
        launch = run.launch("new")
        if os.path.exists(launch.log):
            return run, launch
    return None


def _told(run: RunDirectory) -> Dict[str, Dict[str, Any]]:
    """The last event of each kind that the run wrote about the stage ``ready``, and its end."""
    found = {}
    for event in journal.read(run.journal):
        if event.get("stage") == "ready" or event["event"] == events.END:
            found[event["event"]] = event
    return found


def _was_stopped(told: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the server got ready: that it has ended since is no failure of its start."""
    return bool((told.get(events.STAGE_END) or {}).get("ok"))


def _read(path: str, engine: Mapping[str, Any]) -> LogWatch:
    watched = LogWatch(engine, is_whole=True)
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            while True:
                if size > MOST_BYTES and MOST_BYTES // 2 <= file.tell() < size - MOST_BYTES // 2:
                    file.seek(size - MOST_BYTES // 2)
                    watched.forget_partial()
                data = file.read(SLICE_BYTES)
                if not data:
                    break
                watched.feed(data)
    except OSError:
        pass  # a log that has just gone says what was read of it
    watched.finish()
    return watched


def _merged(found: Diagnosis, failure: Optional[Mapping[str, Any]], engine: Mapping[str, Any]) -> Diagnosis:
    known = (failure or {}).get("cause")
    if failure is None or known is None or not (found.cause is None or causes.explains(known, found.cause, engine)):
        return found
    return dataclasses.replace(
        found,
        outcome="failed",
        phase=str(failure.get("phase") or found.phase),
        cause=known,
        evidence=str(failure.get("evidence") or found.evidence),
        rank=found.rank if failure.get("rank") is None else failure["rank"],
        hint=str(failure.get("hint") or found.hint),
        rule=None,
    )
