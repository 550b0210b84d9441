"""The stage ``ready``: the verdict of the watch over a start, as the run's own."""

from __future__ import annotations

import time
from typing import Callable, Sequence

from lamplighter.node.events import Exit
from lamplighter.node.health import counters
from lamplighter.node.log import causes
from lamplighter.node.stages.values import Started
from lamplighter.node.start import eta, ground, readiness
from lamplighter.node.start.probe import Asker, ask, find_api_key
from lamplighter.node.start.readiness import NotReady, Ready
from lamplighter.node.system import ports, processes
from lamplighter.node.worker import Run, StageFailure

#: The second question: so many tokens, within so many seconds.
AGAIN_TOKENS = 16
AGAIN_SECONDS = 60.0
AGAIN_POLL_SECONDS = 0.02


def wait_until_ready(run: Run, started: Started) -> Ready:
    """Watch the start until the server has answered a question, died, stalled, or run out of time."""
    starts = eta.earlier_starts(run.home)
    verdict = _watch(run, started, run.progress, run.warn, starts)
    if isinstance(verdict, NotReady):
        raise _failure(run, started, verdict)
    command = eta.command_digest(started.plan)
    run.progress(
        "ready: it generated a token",
        phase="ready",
        percent=100.0,
        phase_seconds=dict(verdict.phases),
        measures=dict(verdict.measures),
        command=command,
    )
    _warn(run, verdict, eta.shrunk(starts, command, verdict.measures))
    return verdict


def answer_again(run: Run, started: Started) -> None:
    """Ask for some more tokens than the first one that made it ready. Raises StageFailure where they do not come.

    A server that is only too busy for us is well as long as its counters of tokens grow. facts: with a draft model that
    did not fit, SGLang gave the first token and then none any more.
    """
    plan, key = started.plan, find_api_key(started.plan, started.release)
    before = counters.tokens_so_far(plan, key)
    asker = Asker(lambda: ask(plan, key, AGAIN_SECONDS, knows_model=True, tokens=AGAIN_TOKENS), 0.5, 1.0)
    deadline = time.monotonic() + AGAIN_SECONDS
    try:
        while time.monotonic() < deadline and processes.is_alive(started.launched.main):
            asker.ask()
            run.heed()
            if asker.poll() and asker.last.ok:
                return
            time.sleep(AGAIN_POLL_SECONDS)
    finally:
        asker.close()
    see_it_live(run, started)
    now = counters.tokens_so_far(plan, key)
    if before is not None and now is not None and now > before:
        run.warn(f"it is too busy to answer a second question within {AGAIN_SECONDS:.0f} s", "see who asks it")
        return
    raise StageFailure(
        Exit.NOT_READY,
        f"{plan.served_name} answered one question on port {plan.port}, and no second one",
        cause="silent",
        evidence=asker.last.trouble or f"no answer to {AGAIN_TOKENS} tokens within {AGAIN_SECONDS:.0f} s",
        hint=f"`{run.invocation('logs', '--run', run.directory.run_id)}` shows its log",
    )


def see_it_live(run: Run, started: Started) -> None:
    """Fail as ``wait_until_ready`` does where the server has died, or let its port go, since it answered."""
    if processes.is_alive(started.launched.main) and ports.listeners(started.plan.port):
        return
    verdict = _watch(run, started, lambda *_, **__: None, lambda *_: None, ())
    if isinstance(verdict, NotReady):
        raise _failure(run, started, verdict)


def _watch(
    run: Run,
    started: Started,
    progress: Callable[..., None],
    warn: Callable[[str, str], None],
    starts: Sequence[eta.Start],
) -> Ready | NotReady:
    key = find_api_key(started.plan, started.release)
    return readiness.watch(
        started.plan,
        started.launch,
        started.launched,
        key,
        progress,
        run.heed,
        warn=warn,
        uuids=started.uuids,
        starts=starts,
    )


def _failure(run: Run, started: Started, verdict: NotReady) -> StageFailure:
    """What the log says, with what the node itself knows of it."""
    plan = started.plan
    failed = causes.Failed(
        port=plan.port,
        since=verdict.since,
        signal=verdict.status.signal if verdict.status else None,
        has_ended=verdict.crashed,
        pids=verdict.own_pids,
        uuids=started.uuids,
        environment={**plan.exports, **dict.fromkeys(started.release.read_environment(), "(secret)")},
        directory=run.home.path,
        derived={each.port: each.use for each in ground.derived_ports(ground.start_of(plan))},
    )
    kernel = causes.kernel_notes(verdict.since)
    explained = causes.explain(verdict.diagnosis, failed, plan.engine, kernel, verdict.message)
    diagnosis = explained.diagnosis
    whole_log = run.invocation("logs", "--run", run.directory.run_id)
    return StageFailure(
        Exit.CRASHED if verdict.crashed else Exit.NOT_READY,
        explained.message,
        cause=diagnosis.cause,
        evidence=diagnosis.evidence or (verdict.log_tail[-1] if verdict.log_tail else ""),
        hint=diagnosis.hint_for(plan.name) or f"read its whole log: {whole_log}",
        phase=diagnosis.phase,
        rank=diagnosis.rank,
        notes=list(explained.notes),
        log_tail=list(verdict.log_tail),
    )


def _warn(run: Run, ready: Ready, shrunk: dict[str, tuple[float, float]]) -> None:
    for line, hint in ready.warnings:
        run.warn(line, hint.replace("{server}", run.server))
    for name, (now, usual) in shrunk.items():
        run.warn(
            f"{name} is {now:.0f}, and has been {usual:.0f} with this command line on this node",
            "something else holds GPU memory: look at nvidia-smi, then deploy again",
        )
