"""Part of the stages of a first deploy under a new name: what is done in the home of the former one."""

from __future__ import annotations

from lamplighter.node.health import renamed
from lamplighter.node.keeper import launcher, systemd
from lamplighter.node.plan import Plan
from lamplighter.node.worker import Run


def note_stopped(run: Run, plan: Plan) -> None:
    """Leave word there, for `status`, that it was us who ended it."""
    former = renamed.former_home(plan, run.home)
    if former is None:
        return
    try:
        launcher.note_stopped(former, {"run": run.directory.run_id, "verb": "deploy", "by": run.request["by"]})
    except OSError as error:
        run.warn(f"`status` will not know who stopped server {former.name}: {error}", "fix the file system")


def let_go(run: Run, plan: Plan) -> None:
    """Take away the former unit, so that nothing starts it again: the new name's release is there to stay."""
    former = renamed.former_home(plan, run.home)
    if former is None:
        return
    try:
        systemd.forget(former)
    except (launcher.LaunchFailed, OSError) as error:
        command = run.invocation("undeploy").replace(f"--server {run.server}", f"--server {former.name}")
        run.warn(f"the unit of server {former.name} could not be removed: {error}", f"`{command}` removes it")
        return
    run.progress(f"server {former.name} is {run.server} now; {former.path} stays, with its releases and logs")
