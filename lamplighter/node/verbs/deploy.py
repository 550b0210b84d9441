"""The verbs that change a node, each a list of stages.

Until the first signal is sent nothing that serves is touched: a failure there leaves the old server alone. From then on
the run goes to *ready* or to *rolled back*, whoever is still watching. A run can be cancelled like it can fail: before
``stop`` it ends, after it it rolls back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Callable, Optional

from lamplighter.node.events import Exit
from lamplighter.node.health import drift, serving
from lamplighter.node.health.serving import Serving
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import ReleaseDirectory
from lamplighter.node.stages import checks, environment, locks, ready, releases, repair, swap
from lamplighter.node.system import lock
from lamplighter.node.worker import Run, StageFailure

#: So long is looked again, where somebody is about who may start a server: a loop or a pod takes some seconds.
RETURN_SECONDS = 10.0

Stages = tuple[tuple[str, Callable[[Run], Optional[str]]], ...]


def _take_over(run: Run) -> Optional[str]:
    """Lock what the run will use, and finish what a killed run left half done."""
    locks.take_locks(run)
    repair.repair(run)
    return None


def _look_before(run: Run) -> Optional[str]:
    """Ask what can be known of the server that is to start, and of the one that a roll back would start again."""
    return checks.examine(run, releases.rollback_target(run, is_to_blame=True))


BEFORE_DEPLOY: Stages = (
    ("lock", _take_over),
    ("preflight", _look_before),
    ("stage", releases.write_release),
    ("prove", environment.prove),
)
BEFORE_ROLLBACK: Stages = (
    ("lock", _take_over),
    ("stage", releases.use_earlier_release),
    ("preflight", _look_before),
    ("prove", environment.prove),
)
BEFORE_START: Stages = (
    ("lock", _take_over),
    ("stage", releases.use_current_release),
    ("preflight", _look_before),
    ("prove", environment.prove),
)
SWAP: Stages = (
    ("stop", swap.stop_old),
    ("free", swap.wait_until_freed),
    ("start", swap.start_new),
    ("ready", ready.wait_until_ready),
    ("confirm", environment.confirm),
    ("commit", releases.commit),
)
STOP: Stages = (
    ("lock", _take_over),
    ("stop", swap.stop_old),
    ("free", swap.wait_until_freed),
)


def deploy(run: Run) -> None:
    """Replace the server by the release of the request, or put the old one back and say why."""
    _put_into_service(run, BEFORE_DEPLOY, "deployed")


def roll_back_to(run: Run) -> None:
    """Replace the server by a release that is on the node already: the one asked for, or the last other good one."""
    _put_into_service(run, BEFORE_ROLLBACK, "deployed")


def start_server(run: Run) -> None:
    """Start the current release where nothing serves."""
    _put_into_service(run, BEFORE_START, "started")


def restart(run: Run) -> None:
    """Replace the server by its own current release."""
    _put_into_service(run, BEFORE_START, "deployed")


def stop_server(run: Run) -> None:
    """Stop the server, and see its GPUs FREED."""
    try:
        _perform(run, STOP)
    except StageFailure as failure:
        run.failure = failure
        if run.touched:
            now = _look_again(run)
            run.end("failed", failure.exit_code, f"{failure.message}; {now}", now.record, now.unknown)
        else:
            _leave_alone(run, failure)
    else:
        _end_stopped(run)


def _end_stopped(run: Run) -> None:
    """Say that it is stopped, or who answers in its place since."""
    now = _look_again(run)
    if now.record is not None and (now.record.get("since") or 0.0) >= run.began:
        message = f"stopped, but started again by somebody else: {now}"
        run.end("failed", Exit.NOT_FREED, message, now.record)
        return
    unit = launcher.returns_at_boot(run.home)
    later = f"; the next boot of the node starts it again ({unit} is enabled)" if unit else ""
    run.end("stopped", Exit.OK, f"stopped; {now}{later}", now.record, now.unknown)


def _put_into_service(run: Run, before: Stages, outcome: str) -> None:
    try:
        _perform(run, before)
        _perform(run, SWAP)
    except StageFailure as failure:
        run.failure = failure
        if run.touched:
            _roll_back(run, failure)
        else:
            _leave_alone(run, failure)
        return
    now = serving.look(run.home, run.plan)
    if now.record is None or not now.is_alive:
        run.failure = _fallen_silent(run, now)
        _roll_back(run, run.failure)
        return
    run.failure = run.degraded
    because = f"; {run.degraded.message}" if run.degraded is not None else ""
    message = f"{run.plan.served_name} answers on port {run.plan.port}{because}"
    run.end(outcome, Exit.OK if run.degraded is None else Exit.DEGRADED, message, now.record)


def _fallen_silent(run: Run, now: Serving) -> StageFailure:
    """What is wrong with a server that has answered one question, and no second one. facts: seen with EAGLE-3."""
    failure = StageFailure(
        Exit.NOT_READY if now.is_alive else Exit.CRASHED,
        f"{run.plan.served_name} answered one question on port {run.plan.port}, and no second one",
        cause="silent",
        evidence=now.trouble,
        hint=f"`{run.invocation('logs', '--run', run.directory.run_id)}` shows its log",
    )
    failure.stage = "commit"
    return failure


def _perform(run: Run, stages: Stages) -> None:
    for name, stage in stages:
        try:
            run.perform(name, stage)
        except StageFailure as failure:
            if not _serves_all_the_same(run, name, failure):
                raise
            run.degraded = failure


def _serves_all_the_same(run: Run, name: str, failure: StageFailure) -> bool:
    """Tell whether the new server stays though a stage after ``ready`` failed.

    A disk that refuses the records of the new one would refuse those of the old one as well, and so would a defect.
    """
    has_died = failure.exit_code in (Exit.CRASHED, Exit.NOT_READY) and failure.cause != "no_writes"
    if has_died:
        return False
    if name == "commit":
        return failure.cause in ("no_writes", "internal")
    return name == "confirm" and failure.cause != "cancelled" and not _goes_back(run)


def _goes_back(run: Run) -> bool:
    """Tell whether a failed confirmation rolls back: where that is wished, and there is something else to go to."""
    target = releases.rollback_target(run, is_to_blame=True)
    is_other = target is not None and run.release is not None and target.name != run.release.name
    return is_other and run.plan.on_confirm_failure == "rollback"


def _leave_alone(run: Run, failure: StageFailure) -> None:
    """End a run that failed before it touched anything."""
    found = serving.look(run.home, run.plan)
    now = found.as_before
    # The server's own lock comes first: without it, another run has it or had it a moment ago.
    if not run.locks and (failure.exit_code == Exit.LOCKED or lock.holder_of(run.home.lock) is not None):
        now = "the other run decides what serves"
    outcome = "failed" if failure.exit_code == Exit.NOT_FREED else "refused"
    run.end(outcome, failure.exit_code, f"{failure.message}; nothing was touched: {now}", found.record, found.unknown)


def _roll_back(run: Run, failure: StageFailure) -> None:
    """Put the last good release back after ``failure``, or say exactly why nothing serves."""
    failed = run.release
    if failure.stage == "stop":
        now = _look_again(run)
        if now.record is not None or now.is_alive:  # beside one that will not go, none can be started
            run.end("failed", failure.exit_code, f"{failure.message}; {now}", now.record, now.unknown)
            return
    innocent = ("cancelled", "internal", "no_writes", "launcher")
    is_to_blame = failure.stage in ("ready", "confirm", "commit") and failure.cause not in innocent
    target = releases.rollback_target(run, is_to_blame=is_to_blame)
    if failed is not None and is_to_blame:
        with contextlib.suppress(OSError):  # a full disk costs us a word in `releases`, not the rollback
            releases.mark(run, failed, "bad", failure)
    try:
        run.perform("rollback", lambda run: _restore(run, target))
    except StageFailure as second:
        launcher.let_go(run.home)
        _end_without_rollback(run, failure, second, target, failed)
        return
    run.release = failed
    if run.given_back is not None:
        message = f"{failure.message}; rolled back: {run.given_back['release']}, which served before, is up again"
        run.end("rolled_back", Exit.ROLLED_BACK, message, run.given_back)
        return
    now = _look_again(run)
    if target is None:
        message = f"{failure.message}; no earlier release to go back to; {now}"
        run.end("failed", failure.exit_code, message, now.record, now.unknown)
    elif now.record is None:
        message = f"{failure.message}; rolled back to release {target.name}, which has answered and does no more; {now}"
        run.end("failed", Exit.NOT_READY, message, None)
    else:
        message = f"{failure.message}; rolled back: release {target.name} is serving again"
        run.end("rolled_back", Exit.ROLLED_BACK, message, now.record)


def _end_without_rollback(
    run: Run,
    failure: StageFailure,
    second: StageFailure,
    target: Optional[ReleaseDirectory],
    failed: Optional[ReleaseDirectory],
) -> None:
    """Say why the rollback failed as well and what serves; a release that was too late, and answers now, is back."""
    why = f"{second.message} ({second.evidence})" if second.evidence else second.message
    now = _look_again(run)
    is_back = target is not None and _keeps_late(run, target, now)
    run.release = failed
    if target is not None and is_back:
        message = f"{failure.message}; rolled back late ({why}): release {target.name} is serving again"
        run.end("rolled_back", Exit.ROLLED_BACK, message, now.record)
        return
    code = failure.exit_code
    if second.exit_code == Exit.NOT_FREED or failure.exit_code in (Exit.INTERNAL, Exit.DEGRADED):
        code = second.exit_code
    run.end("failed", code, f"{failure.message}; rolling back failed too: {why}; {now}", now.record, now.unknown)


def _keeps_late(run: Run, target: ReleaseDirectory, now: Serving) -> bool:
    """Keep the release that was put back and given up, where it is what answers now; tell whether that is so."""
    is_it = now.record is not None and now.is_alive and now.record["release"] == target.name
    if not is_it or run.launched is None or run.record.get("release") != target.name:
        return False
    run.new_answered_at = time.time()
    try:
        _keep(run, target)
    except StageFailure:  # it has ended since, and the next look says so
        return False
    return True


def _look_again(run: Run) -> Serving:
    """Ask what serves; where somebody is about who may start a server, until one answers or time is up."""
    found = serving.look(run.home, run.plan)
    deadline = time.monotonic() + RETURN_SECONDS
    while found.record is None and run.may_return and time.monotonic() < deadline:
        time.sleep(1.0)
        found = serving.look(run.home, run.plan, 2.0)
    if found.record is None and run.may_return:
        trouble = "; ".join(filter(None, (found.trouble, f"{run.may_return[-1]} may serve later")))
        return dataclasses.replace(found, trouble=trouble)
    return found


def _restore(run: Run, target: Optional[ReleaseDirectory]) -> Optional[str]:
    """Stop the failed server, wait for FREED, start the old one and wait for its answer."""
    run.ready_seconds = run.new_answered_at = None  # of the failed one, if it came so far
    swap.stop_old(run)
    if swap.give_back(run):
        return None
    if target is None:
        return "no earlier good release on this node"
    _tell_damage(run, target)
    releases.use(run, target)
    swap.wait_until_freed(run)
    swap.launch_release(run, target, run.directory.launch("old"))
    ready.wait_until_ready(run)
    _keep(run, target)
    return None


def _keep(run: Run, target: ReleaseDirectory) -> None:
    """Make the release that was put back the lasting one again."""
    try:
        releases.make_current(run, target)
        releases.mark(run, target, "good", None)  # it may be the one that has just failed
    except OSError as error:  # it serves, which is more than a record of it
        run.warn(f"the record of what serves could not be written: {error}", "fix the file system, then deploy again")


def _tell_damage(run: Run, target: ReleaseDirectory) -> None:
    """Say why another release than the current one is put back."""
    current = run.home.current_release()
    damage = drift.damage(current) if current is not None and current.name != target.name else []
    if current is not None and damage:
        run.warn(
            f"release {current.name} is damaged ({damage[0]}): {target.name}, the newest good one, is started instead",
            f"`{run.invocation('deploy')}` of what made it writes it again",
        )
