"""The stage ``ready``: the verdict of the watch over a start, as the run's own."""

from __future__ import annotations

from typing import Callable, Optional, Sequence

from lamplighter.node.events import Exit
from lamplighter.node.log import causes
from lamplighter.node.start import eta, ground, readiness
from lamplighter.node.start.probe import find_api_key
from lamplighter.node.start.readiness import NotReady, Ready
from lamplighter.node.system import ports, processes
from lamplighter.node.worker import Run, StageFailure


def wait_until_ready(run: Run) -> Optional[str]:
    """Watch the start until the server has answered a question, died, stalled, or run out of time."""
    starts = eta.earlier_starts(run.home)
    verdict = _watch(run, run.progress, run.warn, starts)
    if isinstance(verdict, NotReady):
        raise _failure(run, verdict)
    command = eta.command_digest(run.plan)
    run.progress(
        "ready: it generated a token",
        phase="ready",
        percent=100.0,
        phase_seconds=dict(verdict.phases),
        measures=dict(verdict.measures),
        command=command,
    )
    _warn(run, verdict, eta.shrunk(starts, command, verdict.measures))
    run.new_answered_at = verdict.answered_at
    run.ready_seconds = verdict.seconds
    return None


def see_it_live(run: Run) -> None:
    """Fail as ``wait_until_ready`` does where the server has died, or let its port go, since it answered."""
    assert run.launched is not None
    if processes.is_alive(run.launched.main) and ports.listeners(run.plan.port):
        return
    verdict = _watch(run, lambda *_, **__: None, lambda *_: None, ())
    if isinstance(verdict, NotReady):
        raise _failure(run, verdict)


def _watch(
    run: Run, progress: Callable[..., None], warn: Callable[[str, str], None], starts: Sequence[eta.Start]
) -> Ready | NotReady:
    assert run.launch is not None
    assert run.launched is not None
    key = find_api_key(run.plan, run.release)
    return readiness.watch(
        run.plan,
        run.launch,
        run.launched,
        key,
        progress,
        run.heed,
        warn=warn,
        uuids=run.uuids,
        starts=starts,
    )


def _failure(run: Run, verdict: NotReady) -> StageFailure:
    """What the log says, with what the node itself knows of it."""
    assert run.release is not None
    given = {name: entry["value"] for name, entry in run.plan.env.items()}
    failed = causes.Failed(
        port=run.plan.port,
        since=verdict.since,
        signal=verdict.status.signal if verdict.status else None,
        has_ended=verdict.crashed,
        pids=verdict.own_pids,
        uuids=run.uuids,
        environment={**given, **dict.fromkeys(run.release.read_environment(), "(secret)")},
        directory=run.home.path,
        derived={each.port: each.use for each in ground.derived_ports(ground.start_of(run.plan))},
    )
    kernel = causes.kernel_notes(verdict.since)
    explained = causes.explain(verdict.diagnosis, failed, run.plan.engine, kernel, verdict.message)
    diagnosis = explained.diagnosis
    whole_log = run.invocation("logs", "--run", run.directory.run_id)
    return StageFailure(
        Exit.CRASHED if verdict.crashed else Exit.NOT_READY,
        explained.message,
        cause=diagnosis.cause,
        evidence=diagnosis.evidence or (verdict.log_tail[-1] if verdict.log_tail else ""),
        hint=diagnosis.hint_for(run.plan.name) or f"read its whole log: {whole_log}",
        phase=diagnosis.phase,
        rank=diagnosis.rank,
        notes=list(explained.notes),
        log_tail=list(verdict.log_tail),
    )


def _warn(run: Run, ready: Ready, shrunk: dict[str, tuple[float, float]]) -> None:
    for line, hint in ready.warnings:
        run.warn(line, hint.replace("{server}", run.plan.name))
    for name, (now, usual) in shrunk.items():
        run.warn(
            f"{name} is {now:.0f}, and has been {usual:.0f} with this command line on this node",
            "something else holds GPU memory: look at nvidia-smi, then deploy again",
        )
