"""The process on the SSH channel: starts the detached worker and relays its journal to stdout.

Losing the relay loses nothing: the worker goes on, and another relay (``attach``) shows the same events by number.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Iterator, Optional

from lamplighter.node import events, journal
from lamplighter.node.layout import IDENTITY, RunDirectory, read_json
from lamplighter.node.system import processes
from lamplighter.node.worker import is_at_work

POLL_SECONDS = 0.05

_writing = threading.Lock()  # a heartbeat must not end up inside another line


class ReaderGone(Exception):
    """Nobody reads our stdout any more."""


def send(event: events.Event) -> None:
    """Write one event line to the control side. Raises ReaderGone."""
    line = json.dumps(event, separators=(",", ":")) + "\n"
    try:
        with _writing:
            sys.stdout.write(line)
            sys.stdout.flush()
    except OSError as error:
        raise ReaderGone from error


@contextlib.contextmanager
def heartbeat() -> Iterator[None]:
    """Send beats while the block works out its answer: the control side takes long silence for a cut wire."""
    done = threading.Event()

    def beat() -> None:
        with contextlib.suppress(ReaderGone):  # the answer will notice
            while not done.wait(events.HEARTBEAT_SECONDS):
                send({"event": events.BEAT})

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def start_worker(request: dict[str, Any], home: str, run: RunDirectory) -> subprocess.Popen[bytes]:
    """Start the worker of ``run`` outside this session and, under systemd, outside its cgroup. It reads the request.

    Where PID 1 is systemd and we are root, or linger, the worker gets a scope of its own: otherwise logind may end it
    together with the SSH session, and a restart of sshd with another KillMode would too. Measured cost: 50 ms.
    """
    from lamplighter.node.keeper import systemd  # which who reads only does without

    command = [sys.executable, "-I", "-S", home, "worker"]
    scope = systemd.scope(f"lamplighter-run-{run.run_id}")
    worker = _spawn([*scope, *command], request, run)
    if scope and _failed_to_begin(worker, run):
        worker = _spawn(command, request, run)
    return worker


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


def follow(
    run: RunDirectory,
    after: int = 0,
    worker: Optional[subprocess.Popen[bytes]] = None,
    beside: Callable[[events.Event], None] = lambda event: None,
) -> None:
    """Relay the events of ``run`` numbered above ``after`` until its end event, or until its worker is gone.

    ``beside`` gets each event when it is sent.

    Ends with a ``bye`` line: the control side takes only that as the end of the conversation, since an SSH channel
    also ends when sshd or the wire dies.
    """
    with contextlib.closing(journal.Reader(run.journal)) as reader:
        _follow(run, reader, after, worker, beside)


def _follow(
    run: RunDirectory,
    reader: journal.Reader,
    after: int,
    worker: Optional[subprocess.Popen[bytes]],
    beside: Callable[[events.Event], None],
) -> None:
    handle: Optional[processes.Handle] = None
    waiting = select.poll()
    waiting.register(sys.stdout.fileno(), select.POLLERR)
    last_sent = time.monotonic()
    while True:
        # asked before reading: what it wrote before it went is then surely read
        is_beginning = handle is None and worker is None and is_at_work(run)
        if handle is None:
            handle = _worker_of(run, worker)
            if handle is not None:
                waiting.register(handle.fileno(), select.POLLIN)
        is_alive = is_beginning if handle is None else not handle.exited()
        for event in reader.new():
            if event.get("seq", 0) > after:
                send(event)
                last_sent = time.monotonic()
            beside(event)
            if event["event"] == events.END:
                send({"event": events.BYE})
                return
        if not is_alive:
            send({"event": events.BYE, "worker_gone": True, "errors": _last_errors(run)})
            return
        if time.monotonic() - last_sent > events.HEARTBEAT_SECONDS:
            send({"event": events.BEAT})
            last_sent = time.monotonic()
        if any(mask & select.POLLERR for _, mask in waiting.poll(int(POLL_SECONDS * 1000))):
            raise ReaderGone


def _worker_of(run: RunDirectory, worker: Optional[subprocess.Popen[bytes]]) -> Optional[processes.Handle]:
    """Return a handle that tells at once when the worker ends; None when it is gone already."""
    if worker is not None:
        process = processes.read_process(worker.pid)
        return processes.Handle.open(process.identity) if process else None
    record = read_json(run.worker, **IDENTITY)
    if record is None:
        return None
    return processes.Handle.open(processes.Identity.of(record))


def _last_errors(run: RunDirectory) -> str:
    """Return what the worker said at its death, or why there is no last word of it."""
    told = ""
    with contextlib.suppress(OSError), open(run.worker_errors, encoding="utf-8", errors="replace") as file:
        told = file.read()[-2000:].strip()
    if told or os.path.exists(run.journal):
        return told
    return f"its journal is not there: {run.journal} was removed, or never begun; how the run ended is not known"
