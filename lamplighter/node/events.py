"""The vocabulary that the node and the control machine share: stages, outcomes, exit codes, events.

An event is a flat JSON object on one line. The journal numbers it (``seq``) and stamps it (``t`` wall clock seconds,
``mono`` monotonic seconds of the node's boot); ``host``, ``server`` and ``run`` name what it is about.
"""

from __future__ import annotations

import enum
from typing import Any, Dict

Event = Dict[str, Any]

#: Node stages of a deploy, in order.
STAGES = ("lock", "preflight", "stage", "prove", "prestart", "stop", "free", "start", "ready", "confirm", "commit")

#: Phases of an LLM server's start, in their usual order; the current one is that of the last marker and may go back.
PHASES = ("boot", "distributed", "weights", "kv_cache", "compile", "graphs", "http", "warmup", "ready")

#: How a run on one server can end.
OUTCOMES = (
    "deployed",
    "unchanged",
    "rolled_back",
    "failed",
    "refused",
    "unreachable",
    "detached",
    "stopped",
    "started",
    "undeployed",
)

#: Seconds between two heartbeat lines of the relay, and the silence after which the wire counts as cut.
HEARTBEAT_SECONDS = 3.0
SILENCE_SECONDS = 10.0


class Exit(enum.IntEnum):
    """Exit codes, a contract with people and cron: what the operator does next decides the number."""

    OK = 0
    INTERNAL = 1
    USAGE = 2  # usage or inventory; nothing was opened
    REFUSED = 3  # preflight, proof or lint with the node; nothing was touched
    UNREACHABLE = 4
    NOT_FREED = 5  # the old server did not end, or its GPUs were not FREED
    CRASHED = 6  # crashed in start-up, nothing serving
    NOT_READY = 7  # not ready or stalled, nothing serving
    DEGRADED = 8  # serving, but a verification, hook or gate failed
    ROLLED_BACK = 9  # failed and rolled back, the old release is serving
    LOCKED = 10
    MIXED = 11  # several hosts or servers with different outcomes
    CHANGES = 12
    DETACHED = 13  # contact lost or detached; the node goes on
    INTERRUPTED = 130
    TERMINATED = 143


def invocation(verb: str, host: str, server: str, *words: str) -> str:
    """The whole command line that asks for ``verb``, for a person to paste; the inventory's names need no quotes."""
    return " ".join(("./inv", verb, "--host", host, "--server", server, *words))


# Event names. Each constructor below is the one place where that event's fields are named.
RUN = "run"
STAGE_START = "stage_start"
STAGE_END = "stage_end"
PROGRESS = "progress"
WARNING = "warning"
FAILURE = "failure"
END = "end"
BEAT = "beat"  # these three come from the relay alone and are in no journal
BYE = "bye"  # the conversation is over; without it the wire broke
FACTS = "facts"  # what `facts` answers, for checks that follow a deploy: between its end and the bye
LOG = "log"  # a piece of a server's log, from `logs`
RESULT = "result"  # the answer of a reading verb


def run_started(verb: str, by: str, release: str | None) -> Event:
    """A run began: ``verb`` asked for by ``by`` (user@machine), about to serve ``release``."""
    return {"event": RUN, "verb": verb, "by": by, "release": release}


def stage_started(stage: str) -> Event:
    """``stage`` (one of STAGES, or ``rollback``) began."""
    return {"event": STAGE_START, "stage": stage}


def stage_ended(stage: str, ok: bool, seconds: float, skipped: str | None = None, message: str = "") -> Event:
    """``stage`` ended after ``seconds``; ``skipped`` says why it had nothing to do, ``message`` what it found."""
    return {
        "event": STAGE_END,
        "stage": stage,
        "ok": ok,
        "seconds": round(seconds, 3),
        "skipped": skipped,
        "message": message,
    }


def progress(stage: str, message: str, **fields: Any) -> Event:
    """News within a stage. Fields in use: phase, percent (0..100), rank, line, gpus, pids, elapsed (seconds)."""
    return {"event": PROGRESS, "stage": stage, "message": message, **fields}


def warning(stage: str, message: str, hint: str = "") -> Event:
    """Something the operator should know that does not stop the run."""
    return {"event": WARNING, "stage": stage, "message": message, "hint": hint}


def failure(
    stage: str, message: str, *, cause: str | None = None, evidence: str = "", hint: str = "", **fields: Any
) -> Event:
    """``stage`` failed: ``message`` says what, ``evidence`` is the line that proves it, ``hint`` one next step.

    Fields in use: phase, rank, log_tail (list of lines), cause (an id of the engine's failure table, or of ours).
    """
    return {
        "event": FAILURE,
        "stage": stage,
        "message": message,
        "cause": cause,
        "evidence": evidence,
        "hint": hint,
        **fields,
    }


def ended(outcome: str, exit_code: int, message: str, **fields: Any) -> Event:
    """The run is over. Fields are those of the report contract.

    stage, phase, cause, evidence, hint, release, durations {stage: seconds}, ready_seconds, downtime_seconds (last
    answer of the old server to first answer of the new; null when no old one served), and
    serving: null | {"release", "pid", "port", "model", "since" (wall clock seconds)}. With null, ``serving_unknown``
    says why it is not known what serves; empty where nothing does.
    """
    return {"event": END, "outcome": outcome, "exit_code": int(exit_code), "message": message, **fields}
