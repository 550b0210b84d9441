"""What a request may ask for: the verbs that run in a worker, and those that only read."""

from __future__ import annotations

from typing import Any, Callable, Optional

from lamplighter.node.health import (
    diagnose,
)
from lamplighter.node.layout import server_home
from lamplighter.node.stages import releases as catalogue
from lamplighter.node.verbs import check, deploy, releases, status, undeploy
from lamplighter.node.worker import Run


def _deploy(run: Run) -> None:
    """Deploy; with ``--if-changed``, the journal says first why the server was not left alone."""
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


#: Verbs that change the node: each runs in a detached worker, under locks, with a journal.
RUNS: dict[str, Callable[[Run], None]] = {
    "deploy": _deploy,
    "rollback": _warned(deploy.roll_back_to),
    "start": _warned(deploy.start_server),
    "restart": _warned(deploy.restart),
    "stop": _warned(deploy.stop_server),
    "undeploy": _warned(undeploy.undeploy),
}


def plan_from_release(request: dict[str, Any], root: str) -> Optional[dict[str, Any]]:
    """Complete a request that the inventory could give no plan: by the current release's, or the newest good one's.

    None where there is no such release.
    """
    home = server_home(root, request["server"]["name"])
    current = home.current_release()
    for release in (*((current,) if current else ()), *catalogue.good_releases(home)):
        known = release.read_request()
        if known is not None:
            server = {**known["server"], **request["server"]}
            because = f"the inventory gives no plan ({request['unplanned']}); that of release {release.name} is used"
            return {**request, "server": server, "engine": known["engine"], "because": (because,)}
    return None


#: Verbs that read, and answer with one object.
READING: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "status": status.status,
    "check": check.check,
    "diagnose": diagnose.diagnose,
    "env": check.env,
    "facts": check.facts,
    "plan": check.preview,
    "releases": releases.releases,
}
