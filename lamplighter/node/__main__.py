"""Entry on the node: ``serve`` talks to the control side; ``worker`` and ``supervise`` are the processes that stay."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, Callable, Optional

from lamplighter.node import confidential, events, journal, relay, worker
from lamplighter.node.layout import RunDirectory, all_servers, server_home
from lamplighter.node.system import files
from lamplighter.node.verbs import requests


def serve(request: dict[str, Any], root: str, home: str) -> None:
    """Answer one request on stdout, each line a JSON event, the last one ``bye``."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        _answer(request, root, home)
    except relay.ReaderGone:
        os._exit(0)
    except Exception as error:
        bye = {"event": events.BYE, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        with contextlib.suppress(relay.ReaderGone):
            relay.send(confidential.of_homes(all_servers(root), request).hide(bye))
    sys.stdout.flush()
    os._exit(0)  # at once: a probe thread or a hung tool must not hold the channel


def _answer(request: dict[str, Any], root: str, home: str) -> None:
    verb = request["verb"]
    unknown = _unknown_here(request, root)
    if unknown is not None:
        relay.send({"event": events.BYE, "unknown_server": unknown})
        return
    if request.get("if_changed"):
        from lamplighter.node.verbs import unchanged  # as each verb, only where it is asked for

        with relay.heartbeat():
            before = unchanged.look_before(request, root)
        if before.end is not None:
            _tell(request, before.end)
            return
        relay.send({"event": events.BEAT})  # who left while we looked wants no run that begins without them
        request = {**request, "because": before.reasons}
    if verb in requests.RUNS and "unplanned" in request:
        planned = requests.plan_from_release(request, root)
        if planned is None:
            relay.send({"event": events.BYE, "unplanned": request["unplanned"]})
            return
        request = planned
    if verb in requests.RUNS:
        run = server_home(root, request["server"]["name"]).run(request["run"])
        try:
            is_ours = _make_place(run)
        except OSError as error:
            relay.send({"event": events.BYE, "refused": f"{error.filename or run.path}: {error.strerror}"})
            return
        # else the one who asked lost contact and has come back before us: the run has ended before it began
        process = relay.start_worker({**request, "resolved_root": root}, home, run) if is_ours else None
        relay.follow(run, worker=process, beside=_facts_beside(request, root))
    elif verb in ("attach", "cancel"):
        from lamplighter.node.verbs import follow

        (follow.attach if verb == "attach" else follow.cancel)(request, root)
    elif verb == "logs":
        from lamplighter.node.verbs import logs

        logs.logs(request, root)
        relay.send({"event": events.BYE})
    else:
        began = time.monotonic()
        with relay.heartbeat():
            answer = requests.answer_to(request, root)
        relay.send({"event": events.RESULT, **confidential.of_homes(all_servers(root), request).hide(answer)})
        relay.send({"event": events.BYE, "took": round(time.monotonic() - began, 3)})


def _facts_beside(request: dict[str, Any], root: str) -> Callable[[events.Event], None]:
    """Tell after a deploy, if it is asked for, the facts that its checks want: they need no conversation of their own.

    What that takes is imported while the server gets ready. Where it fails nothing is told, and who wants them asks.
    """

    def hear(event: events.Event) -> None:
        if event["event"] == events.STAGE_START and event.get("stage") == "ready":
            threading.Thread(target=requests.reader_of, args=("facts",), daemon=True).start()
        if event["event"] == events.END and event.get("outcome") == "deployed":
            with contextlib.suppress(relay.ReaderGone), relay.heartbeat():
                try:
                    facts = requests.answer_to({**request, "verb": "facts"}, root)
                except Exception:
                    return
                relay.send(
                    {"event": events.FACTS, "facts": confidential.of_homes(all_servers(root), request).hide(facts)}
                )

    return hear if request.get("tell_facts") else lambda event: None


def _unknown_here(request: dict[str, Any], root: str) -> Optional[str]:
    """Name the server that was asked for, where the inventory does not know it and we do not, either."""
    if not request.get("unlisted"):
        return None
    names = request.get("servers") or [request["server"]["name"]]
    return next((name for name in names if not os.path.isdir(server_home(root, name).path)), None)


def _tell(request: dict[str, Any], end: events.Event) -> None:
    """Say how a run ended that needed no worker, and so left nothing on the node."""
    about = {"host": request["host"], "server": request["server"]["name"], "run": request["run"], "t": time.time()}
    relay.send({**about, **events.run_started(request["verb"], request["by"], request["release"]["digest"])})
    relay.send({**about, **end})
    relay.send({"event": events.BYE})


def _make_place(run: RunDirectory) -> bool:
    """Make the run's directory, and see that a journal can be written there; False where somebody was faster.

    Raises OSError where none can be kept.
    """
    if not worker.take_place(run):
        return False
    try:
        journal.lay_ballast(run.ballast)
    except OSError:
        with contextlib.suppress(OSError):
            files.remove_tree(run.path)
        raise
    return True


def main() -> None:
    """Be the process that the first argument names; its orders come on stdin."""
    if sys.argv[1] == "supervise":
        from lamplighter.node.keeper import detached

        detached.supervise()
    request = json.load(sys.stdin)
    runner = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    worker.work(request, server_home(request["resolved_root"], request["server"]["name"]), runner, requests.runner_of)


if __name__ == "__main__":
    main()
