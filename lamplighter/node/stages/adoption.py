"""Part of the stage ``stop``: a server that somebody started by hand becomes a release before it is stopped."""

from __future__ import annotations

from lamplighter.node.gpu import holders
from lamplighter.node.health import census
from lamplighter.node.keeper import adopt, ownership
from lamplighter.node.plan import Plan
from lamplighter.node.worker import Run

#: What it means that a server cannot be adopted.
MEANING = "if the deploy fails, it cannot be started again: note how it was started, or be ready to do it by hand"


def adopt_old(run: Run, plan: Plan, claims: list[ownership.Claim]) -> None:
    """Write down the hand-started server on our port, if there is one that will be stopped; say so if that fails.

    One that a unit or container keeps is left to these: they start it again if the deploy fails.
    """
    found = adopt.find(claims, plan.port)
    if found is None:
        return
    kept = census.find_restarters(plan, run.home, claims)
    if census.is_kept(found.process.pid, kept):
        return
    who = f"pid {found.process.pid} ({found.process.title})"
    if isinstance(found, adopt.Impossible):
        run.warn(f"{who} cannot be adopted: {found.reason}", MEANING)
        return
    model, trouble = adopt.reported_model(plan.engine, found, plan.port, plan.tls)
    if model is None:
        run.warn(f"{who} cannot be adopted: it does not say which model it serves ({trouble})", MEANING)
        return
    pids = {claim.process.pid for claim in claims if claim.may_be_stopped}
    uuids = holders.gpus_of(pids)
    try:
        release = adopt.write(found, run.home, run.request["server"], plan.engine, model, uuids, run.directory.run_id)
    except OSError as error:
        run.warn(f"{who} cannot be adopted: {error.filename or run.home.path}: {error.strerror}", MEANING)
        return
    run.learn_secrets()  # those of the one found, which may be started again and say them
    if found.left_out:
        names = ", ".join(found.left_out)
        run.warn(f"variables of {who} that a shell cannot export are not part of the release: {names}")
    run.progress(f"adopted {who}, which serves {model}, as release {release.name}", pids=[found.process.pid])
