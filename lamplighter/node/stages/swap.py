"""The stages ``stop``, ``free`` and ``start``: the old server goes, its GPUs become free, the new one begins."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any, Optional

from lamplighter.node.events import Exit
from lamplighter.node.gpu import choice, freeing, gpus, holders
from lamplighter.node.health import census, counters
from lamplighter.node.keeper import launcher, leftovers, ownership, restarters, stop, systemd
from lamplighter.node.keeper.early import Waiting
from lamplighter.node.layout import LaunchFiles
from lamplighter.node.plan import Plan
from lamplighter.node.stages import adoption, checks, renaming
from lamplighter.node.stages.values import Allocation, Former, Prestarted, Staged, Started
from lamplighter.node.start.probe import find_api_key
from lamplighter.node.system import files, http, ports, processes
from lamplighter.node.worker import Run, Skipped, StageFailure

#: What a large server needs, soft limits: bytes of pinned memory, open files. Less is a warning.
LIMITS = {"locked memory": float("inf"), "open files": 65536.0}
DRAIN_POLL_SECONDS = 0.25


def stop_old(run: Run, allocation: Allocation, former: Former) -> Optional[Skipped]:
    """Stop what we recorded and, by policy, stale processes of the engine; leave all others.

    What would bring one of them back (our unit, another unit, a container) is stopped first.
    """
    began, plan = time.time(), allocation.plan
    claimed = _claims(run, allocation)
    stopping = [claim for claim in claimed if claim.may_be_stopped]
    if not stopping and not systemd.is_up(run.home, allocation.spared_unit):
        launcher.clear(run.home, allocation.spared_unit)
        _clear_leftovers(run, leftovers.Holdings(), began)  # of a server that was killed, or died by itself
        return Skipped("nothing of ours is running")
    for claim in stopping:
        run.progress(f"stopping {claim}", pids=[claim.process.pid])
    run.heed()
    if run.request["verb"] != "stop" and former.successor is None:
        # Seen now, it costs nothing; seen after the stop, the server.
        _refuse_intruders([claim for claim in claimed if not claim.may_be_stopped], Exit.REFUSED)
        _refuse_unfit_gpus(run, allocation)
        files.try_to_write(run.directory.path)  # a disk that has become read-only would leave the node dark
    kept = census.find_restarters(plan, run.home, claimed)
    _refuse_restarters(run, kept)
    adoption.adopt_old(run, plan, claimed)
    if former.successor is None and http.is_answering(plan.host, plan.port):
        former.answered_at = time.time()
    was_up = _is_recorded_up(run)
    is_idle = any(claim.kind == ownership.OURS for claim in claimed) and _is_drained(run, plan)
    had = leftovers.observe({claim.process.pid for claim in stopping})
    run.touch()
    if former.successor is None:
        former.was_ours = any(claim.kind == ownership.OURS for claim in stopping)
    grace = _stop_supervisors(run, allocation, kept, former, at_once=is_idle)
    first = (plan.engine.get("stop") or {}).get("signal", "TERM")
    manner = stop.Manner(signal.SIGKILL, 0.0) if is_idle else stop.Manner(getattr(signal, f"SIG{first}"), grace)
    survivors = stop.stop(
        lambda: [claim.process for claim in _claims(run, allocation) if claim.may_be_stopped], manner, run.progress
    )
    again = [each for each in survivors if each.identity not in {claim.process.identity for claim in claimed}]
    if again and len(again) == len(survivors):
        former.may_return += [f"pid {each.pid} ({each.title})" for each in again]
        left = [restarter for restarter in kept if restarter.left]
        _fail_to_stop(
            "the old server is started again as soon as it is stopped",
            "; ".join([*(f"pid {each.pid} ({each.title}), started since" for each in again), *map(str, left)]),
            left[0].hint if left else "find who starts it (`ps -o ppid=,args=`), and end that first",
        )
    if survivors:
        raise StageFailure(
            Exit.NOT_FREED,
            "the old server did not end",
            cause="unkillable",
            evidence=stop.describe_survivors(survivors, plan.faults.get("stuck", ())),
            hint="a process that KILL does not end is held by the kernel: look at dmesg, then reboot the node",
        )
    gone_at = time.time()
    if was_up:
        _note_stopped(run)
    renaming.note_stopped(run, plan)
    # It is down by now, and an uncommitted one is to go.
    launcher.stop_unit(run.home, 1.0, run.progress, allocation.spared_unit)
    _tell_newcomers(run, allocation, claimed, began, former)
    _clear_leftovers(run, had, gone_at)
    return None


def _is_drained(run: Run, wanted: Plan) -> bool:
    """Wait until the server that runs counts no request; tell whether that is so. Nothing is stopped here.

    Only with ``stop.drain``, and while an engine has counters: else it is left to end by itself.
    """
    seconds = wanted.stop.drain
    record = launcher.read_record(run.home) or {}
    release = run.home.release(record["release"]) if record.get("ready") else None
    serving = release.read_plan() if release is not None else None
    if seconds is None or serving is None:
        return False
    key, began, told = find_api_key(serving, release), time.monotonic(), ""
    while True:
        count = counters.requests_at_work(serving, key)
        if count == 0:
            run.progress("no request runs or waits: the old server is ended at once")
            return True
        spent = time.monotonic() - began
        if count is None or spent >= seconds:
            why = "its engine does not count them" if count is None else f"{count:.0f} left after {spent:.0f} s"
            run.progress(f"the old server ends by itself: requests may still run ({why})")
            return False
        if told != f"{count:.0f}":
            told = f"{count:.0f}"
            run.progress(f"waiting for {told} requests to end, {seconds:.0f} s at most")
        run.heed()
        time.sleep(DRAIN_POLL_SECONDS)


def _is_recorded_up(run: Run) -> bool:
    """Tell whether what ``server.json`` speaks of runs, or is about to be started again."""
    record = launcher.read_record(run.home)
    now = launcher.present(record) if record is not None else launcher.Present(None)
    return now.main is not None or now.is_restarting


def _note_stopped(run: Run) -> None:
    """Leave word for `status` that it was us: what ended by our signal looks like one that was killed."""
    by = {"run": run.directory.run_id, "verb": run.request["verb"], "by": run.request["by"]}
    try:
        launcher.note_stopped(run.home, by)
    except OSError as error:  # it is stopped, which is more than a record of it
        run.warn(f"`status` will not know who stopped the server: {error}", "fix the file system")


def _clear_leftovers(run: Run, had: leftovers.Holdings, gone_at: float) -> None:
    """Remove what the stopped processes left, and wait for the ports that they had."""
    gone = leftovers.remove(had, gone_at)
    if gone:
        run.progress(f"removed what the old server left: {', '.join(gone)}")
    for trouble in leftovers.await_ports(had.ports, run.heed):
        run.warn(f"{trouble}, as it was by the old server", "a server that needs it fails or hangs: end that process")


def _refuse_intruders(intruders: list[ownership.Claim], exit_code: Exit) -> None:
    if intruders:
        raise StageFailure(
            exit_code,
            "another process took a GPU or the port between the check and the start",
            cause="foreign",
            evidence="; ".join(map(str, intruders)),
            hint="end it, or ask its owner to, then deploy again",
        )


def _refuse_unfit_gpus(run: Run, allocation: Allocation) -> None:
    plan, uuids = allocation.plan, allocation.uuids
    if plan.uses_gpus:
        verdict = choice.settled_verdict(plan, run.home, uuids)
        for finding in choice.unfit_gpus(plan, uuids, verdict):
            raise checks.refusal(finding)


def _refuse_restarters(run: Run, kept: list[restarters.Restarter]) -> None:
    """Refuse to stop what somebody may start again, who cannot be stopped first."""
    for restarter in kept:
        if restarter.obstacle:
            raise StageFailure(
                Exit.NOT_FREED if run.touched else Exit.REFUSED,
                f"what would be stopped may be started again, by {restarter.name}",
                cause="restarter",
                evidence=str(restarter),
                hint=restarter.hint,
            )


def _stop_supervisors(
    run: Run, allocation: Allocation, kept: list[restarters.Restarter], former: Former, *, at_once: bool
) -> float:
    """Stop who would restart what is stopped; return the seconds that are left until KILL.

    Raises StageFailure where one goes on: what it keeps would only come back.
    """
    began = time.monotonic()
    seconds = allocation.plan.timeouts.stop
    is_down = launcher.stop_unit(run.home, seconds, run.progress, allocation.spared_unit, at_once=at_once)
    for restarter in kept:
        if restarter.left:
            former.may_return.append(restarter.name)
            run.warn(f"{restarter} is left running, and may start again what is stopped now", restarter.hint)
    survivors = restarters.stop_parents([each for each in kept if each.may_be_stopped], seconds, run.progress)
    if survivors:
        named = stop.describe_survivors(survivors, allocation.plan.faults.get("stuck", ()))
        _fail_to_stop("what would start the server again did not end", named)
    for restarter in (each for each in kept if each.may_be_started):
        trouble = restarters.stop(restarter, seconds, run.progress)
        former.restarters.append(restarter)
        if trouble and isinstance(restarter.place, processes.Container):
            _fail_to_stop(f"{restarter.name} would not stop", trouble, restarter.hint)
        if trouble:
            run.warn(trouble, restarter.hint)
            is_down = False
    spent = time.monotonic() - began
    return seconds if is_down else max(0.0, seconds - spent)


def _fail_to_stop(message: str, evidence: str, hint: str = "end it by hand, then deploy again") -> None:
    raise StageFailure(Exit.NOT_FREED, message, cause="restarter", evidence=evidence, hint=hint)


def _tell_newcomers(
    run: Run, allocation: Allocation, before: list[ownership.Claim], began: float, former: Former
) -> None:
    """List the holders again: one that was started again, or was charged with the memory, is not passed over."""
    stopped = [claim for claim in before if claim.may_be_stopped]
    for claim in restarters.newcomers(before, _claims(run, allocation)):
        what = restarters.describe_newcomer(claim, stopped, time.time() - began)
        former.may_return.append(f"pid {claim.process.pid} ({claim.process.title})")
        run.warn(f"a new holder after the stop: {what}", "find out who started it, and end that first")


@dataclasses.dataclass(frozen=True)
class GivenBack:
    """What serves again though it is no release of ours: ``serving`` is that of events, ``seconds`` its start took."""

    serving: dict[str, Any]
    answered_at: float
    seconds: float


def give_back(run: Run, plan: Plan, former: Former) -> Optional[GivenBack]:
    """Start again the units and containers that this run stopped, where they, and nothing of ours, served before.

    Returns what answers on the port then, within the time that a start may take; None where nothing does.
    """
    if former.was_ours or not former.restarters:
        return None
    began = time.time()
    started = []
    for restarter in former.restarters:
        run.progress(f"starting {restarter.name} again")
        trouble = restarters.start(restarter)
        if trouble:
            run.warn(f"{restarter.name} could not be started again: {trouble}", restarter.hint)
        else:
            started.append(restarter)
    former.restarters.clear()
    deadline = time.monotonic() + plan.timeouts.ready
    while started and time.monotonic() < deadline:
        if http.is_answering(plan.host, plan.port):
            now = time.time()
            pids = [pid for listener in ports.listeners(plan.port) for pid in listener.pids]
            serving = {
                "release": ", ".join(restarter.name for restarter in started),
                "pid": pids[0] if pids else None,
                "port": plan.port,
                "model": plan.served_name,
                "since": now,
            }
            return GivenBack(serving, now, round(now - began, 3))
        time.sleep(0.2)
    return None


def _claims(run: Run, allocation: Allocation, sample: Optional[gpus.Sample] = None) -> list[ownership.Claim]:
    return census.find_claims(
        allocation.plan, run.home, allocation.uuids, run.request["host"], sample, allocation.spared
    )


def wait_until_freed(run: Run, allocation: Allocation) -> Optional[Skipped]:
    """Wait for FREED on every GPU of the server: only that may start one."""
    plan = allocation.plan
    if not plan.uses_gpus:
        return Skipped("gpus: [] - the server uses no GPU")
    found = freeing.await_freed(
        plan,
        run.home,
        allocation.uuids,
        lambda sample: _stoppable_pids(run, allocation, sample),
        run.progress,
        lambda: allocation.spared,
    )
    if isinstance(found, freeing.NotFreed):
        holders = processes.describe_pids(found.holders)
        raise StageFailure(
            Exit.NOT_FREED,
            f"the GPUs are not free: {found.word}",
            cause="gpu_unknown" if found.word == "UNKNOWN" else "gpu_held",
            evidence=f"{found.reason}; {holders}" if holders else found.reason,
            hint=_how_to_free(plan, found),
        )
    return None


def _how_to_free(plan: Plan, found: freeing.NotFreed) -> str:
    if any(processes.is_pid_alive(pid) for pid in found.holders):
        return f"end the holder, or list its name in servers.{plan.name}.stale.kill; then deploy again"
    if found.word == gpus.UNKNOWN:
        how = gpus.how_to_see(found.reason, plan.name)
        return f"fix what keeps nvidia-smi from telling: {how}; then deploy again"
    return "there is no process to end: reset the GPU (nvidia-smi --gpu-reset) or reboot the node, then deploy again"


def _stoppable_pids(run: Run, allocation: Allocation, sample: gpus.Sample) -> set[int]:
    run.heed()
    if isinstance(allocation, Prestarted) and allocation.waiting is not None:
        why = gpu_touched_by(allocation.waiting, sample)
        if why:
            give_up(run, allocation.waiting, why)
    return {claim.process.pid for claim in _claims(run, allocation, sample) if claim.may_be_stopped}


def gpu_touched_by(waiting: Waiting, sample: gpus.Sample) -> str:
    """Say that what waits holds memory of a GPU, by what nvidia-smi lists; "" where it does not.

    facts: a launcher that has imported CUDA libraries may have the devices open, and holds no memory.
    """
    held = sorted(holders.holders_by_gpu(sample).keys() & waiting.pids())
    return f"pid {held[0]} of it holds GPU memory" if held else ""


def give_up(run: Run, waiting: Waiting, why: str) -> None:
    """End what waits, and say that a plain start follows."""
    waiting.dismiss(run.progress)
    run.progress(f"the launcher that waited is given up, and a plain start follows: {why}")


def start(run: Run, staged: Staged, launch: LaunchFiles, former: Former) -> Started:
    """Start the release under its launcher, after a last look at the port and the GPUs."""
    claims = _claims(run, staged)
    _refuse_intruders([claim for claim in claims if processes.is_alive(claim.process.identity)], Exit.NOT_FREED)
    run.touch()
    order = order_of(run, staged, launch)
    try:
        launched = _let_go(run, staged) or launcher.launch(staged.plan.launcher, order, run.home)
    except (launcher.LaunchFailed, OSError) as error:
        raise StageFailure(Exit.CRASHED, f"the launcher failed: {error}", cause="launcher") from error
    record = _record_of(run, staged, launched, launched.launch or launch)
    former.successor = started = Started(staged.plan, staged.uuids, staged.release, order, launched, record)
    files.write_json(run.home.record, record)
    main = launched.main
    under = f" under {launched.unit.name}" if launched.unit else ""
    run.progress(f"started as pid {main.pid}{under}", pids=[main.pid])
    if launched.unit is not None:
        _tell_low_limits(run, main.pid)
    return started


def order_of(run: Run, staged: Staged, launch: LaunchFiles) -> launcher.Order:
    """Return what the launcher is told of one launch, for which its directory of records is made."""
    files.make_directory(run.directory.records)
    return launcher.Order(
        server=staged.plan.name,
        release=staged.release,
        launch=launch,
        records=run.directory.records,
        runner=run.runner,
        run_id=run.directory.run_id,
        stop_signal=(staged.plan.engine.get("stop") or {}).get("signal", "TERM"),
        stop_seconds=staged.plan.timeouts.stop,
    )


def _let_go(run: Run, staged: Staged) -> Optional[launcher.Launched]:
    """Let the launcher begin that waits, if one does; None where a plain start is to follow."""
    waiting = staged.waiting if isinstance(staged, Prestarted) else None
    if waiting is None or waiting.is_over:
        return None
    trouble = waiting.trouble()
    if trouble:
        give_up(run, waiting, trouble)
        return None
    try:
        return waiting.open()
    except OSError as error:
        give_up(run, waiting, str(error))
        return None


def _record_of(run: Run, staged: Staged, launched: launcher.Launched, launch: LaunchFiles) -> dict[str, Any]:
    """Return what ``server.json`` says of a server that was launched just now."""
    plan = staged.plan
    return {
        **launched.main.to_json(),
        **_keeper(launched),
        "port": plan.port,
        "host": plan.host,
        "model": plan.served_name,
        "gpus": list(staged.uuids),
        "release": staged.release.name,
        "run": run.directory.run_id,
        "log": launch.log,
        "attempt": launch.attempt,
        "records": os.path.join(launch.directory, "envproof"),
        "ready": False,
        "since": time.time(),
    }


def _keeper(launched: launcher.Launched) -> dict[str, Any]:
    unit, supervisor = launched.unit, launched.supervisor
    if unit is not None:
        return {"unit": unit.name, "manager_uid": unit.manager_uid}
    return {"supervisor_pid": supervisor.pid, "supervisor_start": supervisor.start} if supervisor is not None else {}


def _tell_low_limits(run: Run, pid: int) -> None:
    limits = processes.limits(pid)
    for name, wanted in LIMITS.items():
        soft = limits.get(name)
        if soft is not None and soft < wanted:
            run.warn(
                f"the node limits the server's {name} to {soft:.0f}",
                "raise the hard limit of the node (limits.conf, or the unit of the user's manager)",
            )


def settle(run: Run, started: Started) -> None:
    """Make the server that has just answered the lasting one: its unit is restarted after a crash and a reboot."""
    try:
        launcher.commit(started.order, run.home, started.launched)
    except (launcher.LaunchFailed, OSError) as error:
        raise StageFailure(
            Exit.CRASHED,
            "the server answers, but its unit cannot be made lasting",
            cause="launcher",
            evidence=str(error),
        ) from error
