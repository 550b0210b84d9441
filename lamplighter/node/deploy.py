"""The verbs that change a node, each a list of stages.

Until ``stop`` nothing that serves is touched: a failure there leaves the old server alone. From ``stop`` on the run
goes to *ready* or to *rolled back*, whoever is still watching.
"""

from __future__ import annotations

from typing import Callable, Optional

from lamplighter.node.events import Exit
from lamplighter.node.layout import ReleaseDirectory
from lamplighter.node.preflight import what_serves
from lamplighter.node.stages import checks, environment, locks, ready, releases, swap
from lamplighter.node.worker import Run, StageFailure

Stages = tuple[tuple[str, Callable[[Run], Optional[str]]], ...]

BEFORE_DEPLOY: Stages = (
    ("lock", locks.take_locks),
    ("preflight", checks.examine),
    ("stage", releases.write_release),
    ("prove", environment.prove),
)
BEFORE_ROLLBACK: Stages = (
    ("lock", locks.take_locks),
    ("stage", releases.use_earlier_release),
    ("preflight", checks.examine),
    ("prove", environment.prove),
)
BEFORE_START: Stages = (
    ("lock", locks.take_locks),
    ("stage", releases.use_current_release),
    ("preflight", checks.examine),
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
    ("lock", locks.take_locks),
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
        run.end("failed", failure.exit_code, failure.message, what_serves(run.home))
    else:
        run.end("stopped", Exit.OK, "stopped; nothing is serving", None)


def _put_into_service(run: Run, before: Stages, outcome: str) -> None:
    try:
        _perform(run, before)
    except StageFailure as failure:
        run.failure = failure
        run.end("refused", failure.exit_code, f"{failure.message}; nothing was touched", what_serves(run.home))
        return
    try:
        _perform(run, SWAP)
    except StageFailure as failure:
        run.failure = failure
        _roll_back(run, failure)
    else:
        message = f"{run.plan.served_name} answers on port {run.plan.port}"
        run.end(outcome, Exit.OK, message, what_serves(run.home))


def _perform(run: Run, stages: Stages) -> None:
    for name, stage in stages:
        run.perform(name, stage)


def _roll_back(run: Run, failure: StageFailure) -> None:
    """Put the last good release back after ``failure``, or say exactly why nothing serves."""
    failed = run.release
    target = releases.rollback_target(run)
    if failed is not None and failure.stage in ("ready", "confirm"):
        releases.mark(run, failed, "bad", failure)
    try:
        run.perform("rollback", lambda run: _restore(run, target))
    except StageFailure as second:
        run.release = failed
        code = second.exit_code if second.exit_code == Exit.NOT_FREED else failure.exit_code
        why = f"{second.message} ({second.evidence})" if second.evidence else second.message
        run.end("failed", code, f"{failure.message}; rolling back failed too: {why}", what_serves(run.home))
        return
    run.release = failed
    if target is None:
        message = f"{failure.message}; no earlier release to go back to; nothing is serving"
        run.end("failed", failure.exit_code, message, None)
    else:
        message = f"{failure.message}; rolled back: release {target.digest} is serving again"
        run.end("rolled_back", Exit.ROLLED_BACK, message, what_serves(run.home))


def _restore(run: Run, target: Optional[ReleaseDirectory]) -> Optional[str]:
    """Stop the failed server, wait for FREED, start the old one and wait for its answer."""
    swap.stop_old(run)
    if target is None:
        return "no earlier good release on this node"
    releases.use(run, target)
    swap.wait_until_freed(run)
    swap.launch_release(run, target, run.directory.launch("old"))
    ready.wait_until_ready(run)
    releases.make_current(run, target)
    return None
