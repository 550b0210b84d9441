"""The stage ``ready``: the verdict of the watch over a start, as the run's own."""

from __future__ import annotations

from typing import Optional

from lamplighter.node import readiness
from lamplighter.node.events import Exit
from lamplighter.node.worker import Run, StageFailure


def wait_until_ready(run: Run) -> Optional[str]:
    """Watch the start until the server has answered a question, died, or run out of time."""
    assert run.launch is not None
    assert run.launched is not None
    verdict = readiness.watch(
        run.plan, run.engine, run.launch, run.launched, run.request.get("api_key"), run.progress, run.heed
    )
    if isinstance(verdict, readiness.NotReady):
        diagnosis = verdict.diagnosis
        raise StageFailure(
            Exit.CRASHED if verdict.crashed else Exit.NOT_READY,
            verdict.message,
            cause=diagnosis.cause,
            evidence=diagnosis.evidence or (verdict.log_tail[-1] if verdict.log_tail else ""),
            hint=(diagnosis.hint or "").replace("{server}", run.plan.name) or "read the log: `logs` shows it whole",
            phase=diagnosis.phase,
            rank=diagnosis.rank,
            log_tail=list(verdict.log_tail),
        )
    run.progress("ready: it generated a token", phase="ready", percent=100.0)
    run.new_answered_at = verdict.answered_at
    run.ready_seconds = verdict.seconds
    return None
