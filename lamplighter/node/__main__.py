"""Entry on the node: ``serve`` talks to the control side; ``worker`` and ``supervise`` are the processes that stay."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from typing import Any

from lamplighter.node import events, relay, verbs, worker
from lamplighter.node.act import files, launcher
from lamplighter.node.layout import server_home


def serve(request: dict[str, Any], root: str, home: str) -> None:
    """Answer one request on stdout, each line a JSON event, the last one ``bye``."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        _answer(request, root, home)
    except relay.ReaderGone:
        os._exit(0)
    except Exception as error:
        with contextlib.suppress(relay.ReaderGone):
            relay.send(
                {"event": events.BYE, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            )
    sys.stdout.flush()
    os._exit(0)  # at once: a probe thread or a hung tool must not hold the channel


def _answer(request: dict[str, Any], root: str, home: str) -> None:
    verb = request["verb"]
    if verb in verbs.RUNS:
        server = server_home(root, request["server"]["name"])
        run = server.run(request["run"])
        files.make_directory(run.path)
        process = relay.start_worker({**request, "resolved_root": root}, home, run)
        relay.follow(run, worker=process)
    elif verb == "attach":
        verbs.attach(request, root)
    elif verb == "logs":
        verbs.logs(request, root)
        relay.send({"event": events.BYE})
    else:
        answer = {"status": verbs.status, "check": verbs.check}[verb](request, root)
        relay.send({"event": events.RESULT, **answer})
        relay.send({"event": events.BYE})


def main() -> None:
    """Be the process that the first argument names; its orders come on stdin."""
    if sys.argv[1] == "supervise":
        launcher.supervise()
    request = json.load(sys.stdin)
    runner = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    worker.work(request, server_home(request["resolved_root"], request["server"]["name"]), runner, verbs.RUNS)


if __name__ == "__main__":
    main()
