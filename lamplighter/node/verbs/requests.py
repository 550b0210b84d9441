"""What a request may ask for: the verbs that run in a worker, and those that only read."""

from __future__ import annotations

from typing import Any, Callable, Optional

from lamplighter.node.layout import server_home
from lamplighter.node.worker import Run

#: Verbs that change the node: each runs in a detached worker, under locks, with a journal.
RUNS = ("deploy", "rollback", "start", "restart", "stop", "undeploy")


def runner_of(verb: str) -> Callable[[Run], None]:
    """What a worker does for one of RUNS."""
    from lamplighter.node.verbs import deploy, undeploy

    if verb == "deploy":
        return _deploy
    runners = {
        "rollback": deploy.roll_back_to,
        "start": deploy.start_server,
        "restart": deploy.restart,
        "stop": deploy.stop_server,
        "undeploy": undeploy.undeploy,
    }
    return _warned(runners[verb])


def answer_to(request: dict[str, Any], root: str) -> dict[str, Any]:
    """Answer a request that reads; all of it shares one look at the GPUs."""
    reader = reader_of(request["verb"])
    from lamplighter.node.gpu import gpus

    with gpus.one_look():
        return reader(request, root)


def reader_of(verb: str) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """What answers a verb that reads, with one object. Imported is what that one needs: all of it takes 0.1 s."""
    if verb == "status":
        from lamplighter.node.verbs import status

        return status.status
    if verb == "releases":
        from lamplighter.node.verbs import releases

        return releases.releases
    if verb == "diagnose":
        from lamplighter.node.health import diagnose

        return diagnose.diagnose
    from lamplighter.node.verbs import check

    return {"check": check.check, "env": check.env, "facts": check.facts, "plan": check.preview}[verb]


def _deploy(run: Run) -> None:
    """Deploy; with ``--if-changed``, the journal says first why the server was not left alone."""
    from lamplighter.node.verbs import deploy

    for reason in run.request.get("because") or ():
        run.progress(reason)
    deploy.deploy(run)


def _warned(verb: Callable[[Run], None]) -> Callable[[Run], None]:
    """Warn first of what the request could not say."""

    def warn_and_do(run: Run) -> None:
        for reason in run.request.get("because") or ():
            run.warn(reason, "fix it before the next deploy")
        verb(run)

    return warn_and_do


def plan_from_release(request: dict[str, Any], root: str) -> Optional[dict[str, Any]]:
    """Complete a request that the inventory could give no plan: by the current release's, or the newest good one's.

    None where there is no such release.
    """
    from lamplighter.node.stages import releases as catalogue

    home = server_home(root, request["server"]["name"])
    current = home.current_release()
    for release in (*((current,) if current else ()), *catalogue.good_releases(home)):
        known = release.read_request()
        if known is not None:
            server = {**known["server"], **request["server"]}
            because = f"the inventory gives no plan ({request['unplanned']}); that of release {release.name} is used"
            return {**request, "server": server, "engine": known["engine"], "because": (because,)}
    return None
