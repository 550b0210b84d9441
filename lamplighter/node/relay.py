"""The process on the SSH channel: starts the detached worker and relays its journal to stdout.

Losing the relay loses nothing: the worker goes on, and another relay (``attach``) shows the same events by number.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from typing import Any, Callable, Optional

from lamplighter.node import events, journal
from lamplighter.node.layout import RunDirectory, read_json
from lamplighter.node.observe import processes

POLL_SECONDS = 0.05


class ReaderGone(Exception):
    """Nobody reads our stdout any more."""


def send(event: events.Event) -> None:
    """Write one event line to the control side. Raises ReaderGone."""
    try:
        sys.stdout.write(json.dumps(event, separators=(",", ":")) + "\n")
        sys.stdout.flush()
    except OSError as error:
        raise ReaderGone from error


def start_worker(request: dict[str, Any], home: str, run: RunDirectory) -> subprocess.Popen[bytes]:
    """Start the worker of ``run`` outside this session and, under systemd, outside its cgroup. It reads the request.

    Where PID 1 is systemd and we are root the worker gets a scope of its own: otherwise logind may end it together
    with the SSH session, and a restart of sshd with another KillMode would too. Measured cost: 50 ms.
    """
    command = [sys.executable, "-I", "-S", home, "worker"]
    unit = f"lamplighter-run-{run.run_id}"
    worker = _spawn([*scope(unit), *command], request, run)
    if scope(unit) and _failed_to_begin(worker, run):
        worker = _spawn(command, request, run)
    return worker


def scope(unit: str) -> list[str]:
    """Return the words that put a command into its own systemd scope; none where that is not possible."""
    if os.geteuid() == 0 and os.path.isdir("/run/systemd/system") and shutil.which("systemd-run"):
        return ["systemd-run", "--scope", "--collect", "--quiet", f"--unit={unit}"]
    return []


def _spawn(command: list[str], request: dict[str, Any], run: RunDirectory) -> subprocess.Popen[bytes]:
    with open(run.worker_errors, "ab") as errors:
        worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, cwd="/", start_new_session=True
        )
    with contextlib.suppress(OSError):  # it died at once: follow() says so
        if worker.stdin:
            worker.stdin.write(json.dumps(request).encode())
            worker.stdin.close()
    return worker


def _failed_to_begin(worker: subprocess.Popen[bytes], run: RunDirectory) -> bool:
    while not os.path.exists(run.worker):
        if worker.poll() is not None:
            return True
        time.sleep(0.01)
    return False


def follow(run: RunDirectory, after: int = 0, worker: Optional[subprocess.Popen[bytes]] = None) -> None:
    """Relay the events of ``run`` numbered above ``after`` until its end event, or until its worker is gone.

    Ends with a ``bye`` line: the control side takes only that as the end of the conversation, since an SSH channel
    also ends when sshd or the wire dies.
    """
    reader = journal.Reader(run.journal)
    alive = _liveness(run, worker)
    reading = select.poll()
    reading.register(sys.stdout.fileno(), select.POLLERR)
    last_sent = time.monotonic()
    while True:
        is_alive = alive()  # asked before reading: what it wrote before it went is then surely read
        for event in reader.new():
            if event.get("seq", 0) > after:
                send(event)
                last_sent = time.monotonic()
            if event["event"] == events.END:
                send({"event": events.BYE})
                return
        if not is_alive:
            send({"event": events.BYE, "worker_gone": True, "errors": _last_errors(run)})
            return
        if time.monotonic() - last_sent > events.HEARTBEAT_SECONDS:
            send({"event": events.BEAT})
            last_sent = time.monotonic()
        if reading.poll(int(POLL_SECONDS * 1000)):
            raise ReaderGone


def _liveness(run: RunDirectory, worker: Optional[subprocess.Popen[bytes]]) -> Callable[[], bool]:
    if worker is not None:
        return lambda: worker.poll() is None
    record = read_json(run.worker)
    if record is None:
        return lambda: False
    identity = processes.Identity(record["boot_id"], record["pid"], record["start"])
    return lambda: processes.is_alive(identity)


def _last_errors(run: RunDirectory) -> str:
    try:
        with open(run.worker_errors, encoding="utf-8", errors="replace") as file:
            return file.read()[-2000:].strip()
    except OSError:
        return ""
