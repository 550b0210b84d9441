"""The verbs that change a node, each a list of stages.

Until the first signal is sent nothing that serves is touched: a failure there leaves the old server alone. From then on
the run goes to *ready* or to *rolled back*, whether or not anyone watches. A run can be cancelled like it can fail:
before ``stop`` it ends, after it it rolls back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

from lamplighter.node.events import Exit
from lamplighter.node.health import drift, renamed, serving
from lamplighter.node.health.serving import Serving
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import ReleaseDirectory
from lamplighter.node.plan import Plan
from lamplighter.node.stages import checks, environment, locks, prestart, ready, releases, renaming, repair, swap
from lamplighter.node.stages.values import Allocation, Former, Prestarted, Staged, Started
from lamplighter.node.system import lock
from lamplighter.node.worker import Run, Skipped, StageFailure

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    Handed = ParamSpec("Handed")

#: So long is looked again, where somebody is about who may start a server: a loop or a pod takes some seconds.
RETURN_SECONDS = 10.0


def deploy(run: Run) -> None:
    """Replace the server by the release of the request, or put the old one back and say why."""
    Replacement(run).put_into_service(Replacement.prepare_new, "deployed")


def roll_back_to(run: Run) -> None:
    """Replace the server by a release that is on the node already: the one asked for, or the last other good one.

    Where that one serves, nothing is touched.
    """
    Replacement(run).put_into_service(Replacement.prepare_earlier, "rolled_back")


def start_server(run: Run) -> None:
    """Start the current release where nothing serves."""
    Replacement(run).put_into_service(Replacement.prepare_current, "started")


def restart(run: Run) -> None:
    """Replace the server by its own current release."""
    Replacement(run).put_into_service(Replacement.prepare_current, "deployed")


def stop_server(run: Run) -> None:
    """Stop the server, and see its GPUs FREED."""
    plan, former = Plan.load(run.request), Former()
    try:
        allocation = run.perform("lock", _take_over, plan)
        run.perform("stop", swap.stop_old, allocation, former)
        run.perform("free", swap.wait_until_freed, allocation)
    except StageFailure as failure:
        if run.touched:
            now = _look_again(run, plan, former)
            run.end("failed", failure.exit_code, f"{failure.message}; {now}", now.record, now.unknown, failure=failure)
        else:
            _leave_alone(run, plan, failure)
    else:
        _end_stopped(run, _look_again(run, plan, former))


def _end_stopped(run: Run, now: Serving) -> None:
    """Say that it is stopped, or who answers in its place since."""
    if now.record is not None and (now.record.get("since") or 0.0) >= run.began:
        message = f"stopped, but started again, not by lamplighter: {now}"
        run.end("failed", Exit.NOT_FREED, message, now.record)
        return
    unit = launcher.returns_at_boot(run.home)
    later = f"; the next boot of the node starts it again ({unit} is enabled)" if unit else ""
    run.end("stopped", Exit.OK, f"stopped; {now}{later}", now.record, now.unknown)


def _take_over(run: Run, plan: Plan) -> Allocation:
    """Lock what the run will use, and finish what a killed run left half done."""
    allocation = locks.take_locks(run, plan)
    repair.repair(run)
    return allocation


def _look_before(run: Run, wanted: Allocation, release: Optional[ReleaseDirectory]) -> None:
    """Ask what can be known of the server that is to start, and of the one that a roll back would start again."""
    checks.examine(run, wanted, release, releases.way_back(run.home, release.name if release is not None else None))


class Replacement:
    """A server is being replaced: the stages, and how far they have come, from where the way back begins."""

    def __init__(self, run: Run) -> None:
        self.run = run
        #: What answers on the port is asked as this says.
        self.plan = renamed.plan_of(run.request, run.home)
        self.former = Former()
        #: What is to serve in the end; None until its release lies on the node.
        self.staged: Optional[Staged] = None
        self.failure: Optional[StageFailure] = None
        self.ready_seconds: Optional[float] = None
        self.answered_at: Optional[float] = None

    def put_into_service(self, prepare: Callable[[Replacement], Optional[Staged]], outcome: str) -> None:
        """Have what ``prepare`` chooses serve, or what served before, and end the run: with ``outcome`` if it does.

        Where ``prepare`` chooses nothing it has ended the run.
        """
        run = self.run
        try:
            staged = prepare(self)
            if staged is None:
                return
            self.replace(staged)
        except StageFailure as failure:
            self.failure = failure
            if isinstance(self.staged, Prestarted) and self.staged.waiting is not None:
                self.staged.waiting.dismiss(run.progress)
            if self.staged is not None and run.touched:
                self._roll_back(failure, self.staged)
            else:
                _leave_alone(run, self.plan, failure, self.staged)
            return
        now = serving.look(run.home, self.plan)
        if now.record is None or not now.is_alive:
            self.failure = _fallen_silent(run, self.plan, now)
            self._roll_back(self.failure, staged)
            return
        because = f"; {self.failure.message}" if self.failure is not None else ""
        message = f"{self.plan.served_name} answers on port {self.plan.port}{because}"
        self._end(outcome, Exit.OK if self.failure is None else Exit.DEGRADED, message, now.record)

    def prepare_new(self) -> Staged:
        """Take the release of the request."""
        perform = self.run.perform
        allocation = perform("lock", _take_over, self.plan)
        perform("preflight", _look_before, allocation, None)
        self.staged = staged = perform("stage", releases.write_release, allocation)
        perform("prove", environment.prove, staged)
        return staged

    def prepare_earlier(self) -> Optional[Staged]:
        """Take the release that is asked for, or the last good one that is not current; None where that one serves."""
        staged = self._choose(releases.use_earlier_release)
        now = serving.look(self.run.home, self.plan)
        if now.is_alive and now.record is not None and now.record["release"] == staged.release.name:
            self._end("unchanged", Exit.OK, f"{now}; nothing was touched", now.record)
            return None
        return self._prove(staged)

    def prepare_current(self) -> Staged:
        """Take the release that became ready last."""
        return self._prove(self._choose(releases.use_current_release))

    def _choose(self, choose: Callable[[Run, Allocation], Staged]) -> Staged:
        allocation = self.run.perform("lock", _take_over, self.plan)
        self.staged = staged = self.run.perform("stage", choose, allocation)
        self.plan = staged.plan
        return staged

    def _prove(self, staged: Staged) -> Staged:
        """Ask of a release that is on the node what is asked of a new one."""
        self.run.perform("preflight", _look_before, staged, staged.release)
        self.run.perform("prove", environment.prove, staged)
        return staged

    def replace(self, staged: Staged) -> None:
        """Stop the old server and start the new one in its place."""
        perform, launch = self.run.perform, self.run.directory.launch("new")
        prestarted = perform("prestart", prestart.prepare, staged, launch)
        self.staged = staged = staged if isinstance(prestarted, Skipped) else prestarted
        perform("stop", swap.stop_old, staged, self.former)
        perform("free", swap.wait_until_freed, staged)
        started = perform("start", swap.start, staged, launch, self.former)
        answer = perform("ready", ready.wait_until_ready, started)
        self.ready_seconds, self.answered_at = answer.seconds, answer.answered_at
        self._perform_while_it_serves("confirm", environment.confirm, started)
        self._perform_while_it_serves("commit", releases.commit, started, answer.answered_at)
        renaming.let_go(self.run, self.plan)

    def _perform_while_it_serves(
        self, name: str, stage: Callable[Concatenate[Run, Handed], None], *handed: Handed.args, **options: Handed.kwargs
    ) -> None:
        """Run a stage after ``ready``: where it fails, the new server may stay, and the run ends degraded."""
        try:
            self.run.perform(name, stage, *handed, **options)
        except StageFailure as failure:
            if not self._stays(name, failure):
                raise
            self.failure = failure

    def _stays(self, name: str, failure: StageFailure) -> bool:
        """Tell whether the new server stays though a stage after ``ready`` failed.

        A disk that refuses the records of the new one would refuse those of the old one as well, and so would a defect.
        """
        has_died = failure.exit_code in (Exit.CRASHED, Exit.NOT_READY) and failure.cause != "no_writes"
        if has_died:
            return False
        if name == "commit":
            return failure.cause in ("no_writes", "internal")
        return name == "confirm" and failure.cause != "cancelled" and not self._goes_back()

    def _goes_back(self) -> bool:
        """Tell whether a failed confirmation rolls back: where that is wished, and there is something else to go to."""
        failed = self.staged.release.name if self.staged is not None else None
        target = releases.way_back(self.run.home, failed)
        is_other = target is not None and failed is not None and target.name != failed
        return is_other and self.plan.on_confirm_failure == "rollback"

    def _roll_back(self, failure: StageFailure, failed: Staged) -> None:
        """Put the last good release back after ``failure``, or say exactly why nothing serves."""
        run = self.run
        if failure.stage == "stop":
            now = _look_again(run, self.plan, self.former)
            if now.record is not None or now.is_alive:  # beside one that will not go, none can be started
                self._end("failed", failure.exit_code, f"{failure.message}; {now}", now.record, now.unknown)
                return
        innocent = ("cancelled", "internal", "no_writes", "launcher")
        is_to_blame = failure.stage in ("ready", "confirm", "commit") and failure.cause not in innocent
        target = releases.way_back(run.home, failed.release.name if is_to_blame else None)
        if is_to_blame:
            with contextlib.suppress(OSError):  # a full disk costs us a word in `releases`, not the rollback
                releases.mark(run, failed.release, "bad", failure)
        try:
            back = run.perform("rollback", lambda _: self._restore(failed, target))
        except StageFailure as second:
            launcher.let_go(run.home)
            self._end_without_rollback(failure, second, target)
            return
        if isinstance(back, swap.GivenBack):
            message = f"{failure.message}; rolled back: {back.serving['release']}, which served before, is up again"
            self._end("rolled_back", Exit.ROLLED_BACK, message, back.serving)
            return
        now = _look_again(run, self.plan, self.former)
        if target is None:
            message = f"{failure.message}; no earlier release to go back to; {now}"
            self._end("failed", failure.exit_code, message, now.record, now.unknown)
        elif now.record is None:
            back_to = f"rolled back to release {target.name}, which answered once and no longer does"
            message = f"{failure.message}; {back_to}; {now}"
            self._end("failed", Exit.NOT_READY, message, None)
        else:
            message = f"{failure.message}; rolled back: release {target.name} is serving again"
            self._end("rolled_back", Exit.ROLLED_BACK, message, now.record)

    def _end_without_rollback(
        self, failure: StageFailure, second: StageFailure, target: Optional[ReleaseDirectory]
    ) -> None:
        """Say why the rollback failed as well and what serves; a release that was late, and answers now, is back."""
        why = f"{second.message} ({second.evidence})" if second.evidence else second.message
        now = _look_again(self.run, self.plan, self.former)
        if target is not None and self._keeps_late(target, now):
            message = f"{failure.message}; rolled back late ({why}): release {target.name} is serving again"
            self._end("rolled_back", Exit.ROLLED_BACK, message, now.record)
            return
        code = failure.exit_code
        if second.exit_code == Exit.NOT_FREED or failure.exit_code in (Exit.INTERNAL, Exit.DEGRADED):
            code = second.exit_code
        message = f"{failure.message}; rolling back failed too: {why}; {now}"
        self._end("failed", code, message, now.record, now.unknown)

    def _keeps_late(self, target: ReleaseDirectory, now: Serving) -> bool:
        """Keep the release that was put back and given up, where it is what answers now; tell whether that is so."""
        is_it = now.record is not None and now.is_alive and now.record["release"] == target.name
        started = self.former.successor
        if not is_it or started is None or started.release.name != target.name:
            return False
        self.answered_at = time.time()
        try:
            _keep(self.run, started, self.answered_at)
        except StageFailure:  # it has ended since, and the next look says so
            return False
        return True

    def _restore(self, failed: Staged, target: Optional[ReleaseDirectory]) -> Union[Skipped, swap.GivenBack, None]:
        """Stop the failed server, wait for FREED, start the old one and wait for its answer."""
        run = self.run
        self.ready_seconds = self.answered_at = None  # of the failed one, if it came so far
        swap.stop_old(run, failed, self.former)
        back = swap.give_back(run, failed.plan, self.former)
        if back is not None:
            self.ready_seconds, self.answered_at = back.seconds, back.answered_at
            return back
        if target is None:
            return Skipped("no earlier good release on this node")
        _tell_damage(run, target)
        old = releases.use(run, target, failed.plan)
        self.plan = old.plan
        swap.wait_until_freed(run, old)
        started = swap.start(run, old, run.directory.launch("old"), self.former)
        answer = ready.wait_until_ready(run, started)
        self.ready_seconds, self.answered_at = answer.seconds, answer.answered_at
        _keep(run, started, answer.answered_at)
        return None

    def _end(
        self, outcome: str, exit_code: Exit, message: str, record: Optional[dict[str, Any]], unknown: str = ""
    ) -> None:
        downtime, before = None, self.former.answered_at
        if before is not None and self.answered_at is not None:
            downtime = round(self.answered_at - before, 3)
        self.run.end(
            outcome,
            exit_code,
            message,
            record,
            unknown,
            failure=self.failure,
            release=self.staged.release.name if self.staged is not None else None,
            ready_seconds=self.ready_seconds,
            downtime_seconds=downtime,
        )


def _fallen_silent(run: Run, plan: Plan, now: Serving) -> StageFailure:
    """What is wrong with a server that has answered one question, and no second one. facts: seen with EAGLE-3."""
    failure = StageFailure(
        Exit.NOT_READY if now.is_alive else Exit.CRASHED,
        f"{plan.served_name} answered one question on port {plan.port}, and no second one",
        cause="silent",
        evidence=now.trouble,
        hint=f"`{run.invocation('logs', '--run', run.directory.run_id)}` shows its log",
    )
    failure.stage = "commit"
    return failure


def _leave_alone(run: Run, plan: Plan, failure: StageFailure, staged: Optional[Staged] = None) -> None:
    """End a run that failed before it touched anything."""
    found = serving.look(run.home, plan)
    now = found.as_before
    # The server's own lock comes first: without it, another run has it or had it a moment ago.
    if not run.locks and (failure.exit_code == Exit.LOCKED or lock.holder_of(run.home.lock) is not None):
        now = "the other run decides what serves"
    run.end(
        "failed" if failure.exit_code == Exit.NOT_FREED else "refused",
        failure.exit_code,
        f"{failure.message}; nothing was touched: {now}",
        found.record,
        found.unknown,
        failure=failure,
        release=staged.release.name if staged is not None else None,
    )


def _look_again(run: Run, plan: Plan, former: Former) -> Serving:
    """Ask what serves; where somebody is about who may start a server, until one answers or time is up."""
    found = serving.look(run.home, plan)
    deadline = time.monotonic() + RETURN_SECONDS
    while found.record is None and former.may_return and time.monotonic() < deadline:
        time.sleep(1.0)
        found = serving.look(run.home, plan, 2.0)
    if found.record is None and former.may_return:
        trouble = "; ".join(filter(None, (found.trouble, f"{former.may_return[-1]} may serve later")))
        return dataclasses.replace(found, trouble=trouble)
    return found


def _keep(run: Run, started: Started, answered_at: float) -> None:
    """Make the release that was put back the lasting one again."""
    try:
        releases.make_current(run, started, answered_at)
        releases.mark(run, started.release, "good", None)  # it may be the one that has just failed
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
