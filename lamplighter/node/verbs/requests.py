"""What a request may ask for: the verbs that run in a worker, and those that only read."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Optional

from lamplighter.node.layout import ReleaseDirectory, ServerHome, server_home
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
    """Answer a request that begins no run; all of it shares one look at the GPUs."""
    reader = reader_of(request["verb"])
    from lamplighter.node.gpu import gpus

    with gpus.one_look():
        return reader(request, root)


def reader_of(verb: str) -> Callable[[dict[str, Any], str], dict[str, Any]]:
    """What answers a verb that begins no run, with one object. Imported is what that needs: all of it takes 0.1 s."""
    if verb == "status":
        from lamplighter.node.verbs import status

        return status.status
    if verb == "releases":
        from lamplighter.node.verbs import releases

        return releases.releases
    if verb == "history":
        from lamplighter.node.verbs import history

        return history.history
    if verb == "hold":  # it leaves a note, and touches nothing else
        from lamplighter.node.verbs import hold

        return hold.set_hold
    if verb == "diagnose":
        from lamplighter.node.health import diagnose

        return diagnose.diagnose
    from lamplighter.node.verbs import check

    return {
        "check": check.check,
        "env": check.env,
        "facts": check.facts,
        "plan": check.preview,
        "released": check.released,
    }[verb]


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
    from lamplighter.node.keeper import launcher
    from lamplighter.node.stages import releases as catalogue

    current, record = home.current_release(), launcher.read_record(home)
    if current is not None:
        yield current
    if record is not None:
        yield home.release(record["release"])
    yield from catalogue.good_releases(home)
