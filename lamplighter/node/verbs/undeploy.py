"""The verb ``undeploy``: take away what lamplighter has put outside its root, and nothing else.

That is the start-up files of scopes ``pth`` and ``interpreter`` (given back byte for byte), and the server's systemd
unit. Releases, logs and measurements stay. A server that runs is left alone, and the verb refuses, unless the request
says ``stop``: then it is stopped first, and its GPUs are seen FREED.
"""

from __future__ import annotations

from typing import Optional

from lamplighter.node.events import Exit
from lamplighter.node.health import serving
from lamplighter.node.health.census import living_members
from lamplighter.node.keeper import launcher, systemd
from lamplighter.node.plan import Plan
from lamplighter.node.stages import locks, swap
from lamplighter.node.stages.values import Former
from lamplighter.node.system import lock
from lamplighter.node.variables import interpreter
from lamplighter.node.worker import Run, Skipped, StageFailure


def undeploy(run: Run) -> None:
    """Take away what lies outside the root; stop the server before that only if the request says so."""
    plan = Plan.load(run.request)
    try:
        allocation = run.perform("lock", locks.take_locks, plan)
        if run.request.get("stop"):
            run.perform("stop", swap.stop_old, allocation, Former())
            run.perform("free", swap.wait_until_freed, allocation)
        run.perform("remove", take_away)
    except StageFailure as failure:
        outcome = "failed" if run.touched else "refused"
        now = serving.look(run.home, plan)
        run.end(outcome, failure.exit_code, f"{failure.message}; {now}", now.record, now.unknown, failure=failure)
    else:
        now = serving.look(run.home, plan)
        message = f"nothing of it is left outside lamplighter's own directory; {now}"
        run.end("undeployed", Exit.OK, message, now.record, now.unknown)


def take_away(run: Run) -> Optional[Skipped]:
    """Remove the unit and give back the start-up files; refuse while the server runs, or is about to be restarted."""
    record = launcher.read_record(run.home)
    now = launcher.present(record) if record is not None else launcher.Present(None)
    main = now.main
    if record is None:  # its file and more is lost: whatever lives of what was launched
        main = next((process.identity for process in living_members(run.home)), None)
    if main is not None or now.is_restarting:
        who = f"its process {main.pid} runs" if main is not None else now.note
        raise StageFailure(
            Exit.REFUSED,
            f"{run.server} is still there: {who}",
            cause="serving",
            hint=f"give --stop to stop it first, or run {run.invocation('stop')}",
        )
    unit = systemd.recorded(run.home)
    try:
        given_back = interpreter.remove(run.home)
        if unit is not None:
            systemd.forget(run.home)
    except (interpreter.Refused, launcher.LaunchFailed, lock.Locked, OSError) as error:
        evidence = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise StageFailure(
            Exit.REFUSED,
            "something of ours stays outside lamplighter's directory",
            cause="files",
            evidence=evidence,
            hint="fix what the evidence names, or let lamplighter write there (become: true), then undeploy again",
        ) from error
    for path in given_back:
        run.progress(f"{path} is as it was before {run.server}")
    if unit is not None:
        run.progress(f"{unit.name} is removed")
    return None if given_back or unit is not None else Skipped("there was nothing of ours outside")
