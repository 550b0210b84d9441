"""The verbs that change a node, each a list of stages.

Until the first signal is sent nothing that serves is touched: a failure there leaves the old server alone. From then on
the run goes to *ready* or to *rolled back*, whoever is still watching. A run can be cancelled like it can fail: before
``stop`` it ends, after it it rolls back.
"""

from __future__ import annotations

import contextlib
from typing import Callable, Optional

from lamplighter.node import standing
from lamplighter.node.act import launcher, lock
from lamplighter.node.events import Exit
from lamplighter.node.layout import ReleaseDirectory
from lamplighter.node.preflight import what_serves
from lamplighter.node.stages import checks, environment, locks, ready, releases, repair, swap
from lamplighter.node.worker import Run, StageFailure

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
            run.end("failed", failure.exit_code, failure.message, what_serves(run.home))
        else:
            _leave_alone(run, failure)
    else:
        unit = launcher.returns_at_boot(run.home)
        later = f"; the next boot of the node starts it again ({unit} is enabled)" if unit else ""
        run.end("stopped", Exit.OK, f"stopped; nothing is serving{later}", None)


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
    serving = what_serves(run.home)
    message = f"{run.plan.served_name} answers on port {run.plan.port}"
    if run.degraded is None:
        run.end(outcome, Exit.OK, message, serving)
    else:
        run.failure = run.degraded
        run.end(outcome, Exit.DEGRADED, f"{message}; {run.degraded.message}", serving)


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
    serving = what_serves(run.home)
    now = f"release {serving['release']} serves as before" if serving else "nothing is serving"
    # The server's own lock comes first: without it, another run has it or had it a moment ago.
    if not run.locks and (failure.exit_code == Exit.LOCKED or lock.holder_of(run.home.lock) is not None):
        now = "the other run decides what serves"
    outcome = "failed" if failure.exit_code == Exit.NOT_FREED else "refused"
    run.end(outcome, failure.exit_code, f"{failure.message}; nothing was touched: {now}", serving)


def _roll_back(run: Run, failure: StageFailure) -> None:
    """Put the last good release back after ``failure``, or say exactly why nothing serves."""
    failed = run.release
    serving = what_serves(run.home) if failure.stage == "stop" else None
    if serving is not None:
        run.end("failed", failure.exit_code, f"{failure.message}; it is still serving", serving)
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
        run.release = failed
        code = failure.exit_code
        if second.exit_code == Exit.NOT_FREED or failure.exit_code in (Exit.INTERNAL, Exit.DEGRADED):
            code = second.exit_code
        why = f"{second.message} ({second.evidence})" if second.evidence else second.message
        serving = what_serves(run.home)
        now = f"release {serving['release']} is serving" if serving else "nothing is serving"
        run.end("failed", code, f"{failure.message}; rolling back failed too: {why}; {now}", serving)
        return
    run.release = failed
    if run.given_back is not None:
        message = f"{failure.message}; rolled back: {run.given_back['release']}, which served before, is up again"
        run.end("rolled_back", Exit.ROLLED_BACK, message, run.given_back)
    elif target is None:
        message = f"{failure.message}; no earlier release to go back to; nothing is serving"
        run.end("failed", failure.exit_code, message, None)
    else:
        message = f"{failure.message}; rolled back: release {target.name} is serving again"
        run.end("rolled_back", Exit.ROLLED_BACK, message, what_serves(run.home))


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
    try:
        releases.make_current(run, target)
        releases.mark(run, target, "good", None)  # it may be the one that has just failed
    except OSError as error:  # it serves, which is more than a record of it
        run.warn(f"the record of what serves could not be written: {error}", "mend the file system, then deploy again")
    return None


def _tell_damage(run: Run, target: ReleaseDirectory) -> None:
    """Say why another release than the current one is put back."""
    current = run.home.current_release()
    damage = standing.damage(current) if current is not None and current.name != target.name else []
    if current is not None and damage:
        run.warn(
            f"release {current.name} is damaged ({damage[0]}): {target.name}, the newest good one, is started instead",
            f"`{run.invocation('deploy')}` of what made it writes it anew",
        )
