"""What a request may ask for: the verbs that run in a worker, and those that only read."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Optional

from lamplighter.node.health import (
    diagnose,
)
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import ReleaseDirectory, ServerHome, server_home
from lamplighter.node.stages import releases as catalogue
from lamplighter.node.verbs import check, deploy, history, hold, releases, status, undeploy
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
    for release in _known_releases(home):
        known = release.read_request()
        if known is not None:
            server = {**known["server"], **request["server"]}
            because = f"the inventory gives no plan ({request['unplanned']}); that of release {release.name} is used"
            told = () if request.get("unlisted") else (because,)
            return {**request, "server": server, "engine": known["engine"], "because": told}
    return None


def _known_releases(home: ServerHome) -> Iterator[ReleaseDirectory]:
    """Yield the current release, that of the last launch, which may be another one, and the good ones, newest first."""
    current, record = home.current_release(), launcher.read_record(home)
    if current is not None:
        yield current
    if record is not None:
        yield home.release(record["release"])
    yield from catalogue.good_releases(home)


#: Verbs that leave a note and touch nothing else, and answer with one object.
NOTING: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {"hold": hold.set_hold}

#: Verbs that read, and answer with one object.
READING: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "status": status.status,
    "check": check.check,
    "diagnose": diagnose.diagnose,
    "env": check.env,
    "facts": check.facts,
    "history": history.history,
    "plan": check.preview,
    "released": check.released,
    "releases": releases.releases,
}
