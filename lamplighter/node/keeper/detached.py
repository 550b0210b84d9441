"""Starting a server so that it lives on by itself, and knowing how it ended, without systemd.

The detached launcher puts a small supervisor between us and the server: in its own session, sub-reaper of everything
below, it writes down who the server is *before* the server's first instruction runs, and how it ended 1 ms after. If
the supervisor is killed, the server lives on and only its exit status is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, NoReturn, Optional

from lamplighter.node.keeper import systemd
from lamplighter.node.keeper.launched import Launched, LaunchFailed, Order, bare_environment, read_launched
from lamplighter.node.layout import LaunchFiles
from lamplighter.node.system import files, processes

PR_SET_CHILD_SUBREAPER = 36
BEGIN_SECONDS = 20.0


def launch(order: Order) -> Launched:
    """Start the release of ``order``; see ``launch_detached``."""
    release, environment = order.release, bare_environment(order.records, order.gate)
    return launch_detached([release.launch_script], release.path, order.launch, order.runner, order.scope, environment)


def launch_detached(
    command: list[str],
    directory: str,
    launch: LaunchFiles,
    runner: str,
    unit: str,
    environment: Optional[dict[str, str]] = None,
) -> Launched:
    """Start ``command`` in ``directory``, output to ``launch.log``; return once its identity is on disk.

    Touches: a new session (and a systemd scope ``unit`` where that is possible), ``launch.process``, ``launch.log``.
    """
    order = {
        "command": command,
        "directory": directory,
        "log": launch.log,
        "process": launch.process,
        "exit": launch.exit,
        "parent": os.getpid(),
    }
    supervisor = subprocess.Popen(
        [*systemd.scope(unit), sys.executable, "-I", "-S", runner, "supervise"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        env=bare_environment() if environment is None else environment,
        start_new_session=True,
    )
    with contextlib.suppress(OSError):  # it died at once: its last words are read below
        if supervisor.stdin:
            supervisor.stdin.write(json.dumps(order).encode())
            supervisor.stdin.close()
    try:
        return _await_record(supervisor, launch)
    finally:
        if supervisor.stderr:
            supervisor.stderr.close()


def _await_record(supervisor: subprocess.Popen[bytes], launch: LaunchFiles) -> Launched:
    deadline = time.monotonic() + BEGIN_SECONDS
    while True:
        launched = read_launched(launch)
        if launched is not None:
            return launched
        if supervisor.poll() is not None:
            words = supervisor.stderr.read(4000).decode("utf-8", "replace").strip() if supervisor.stderr else ""
            raise LaunchFailed(words or f"the supervisor ended with status {supervisor.returncode}")
        if time.monotonic() > deadline:
            supervisor.kill()  # else it might start the server after we have said that it did not
            supervisor.wait()
            raise LaunchFailed(f"the supervisor wrote nothing within {BEGIN_SECONDS:.0f} s")
        time.sleep(0.01)


def supervise() -> NoReturn:
    """Run one order from stdin: start, record, wait, record, reap until no descendant is left."""
    order = json.load(sys.stdin)
    _detach()
    gate, opener = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_server(order, gate, opener)
    os.close(gate)
    _record(order, pid)
    # A worker killed by now may have been followed by a run that saw no record, and reckons with no server of ours.
    if os.getppid() == order["parent"]:
        with contextlib.suppress(BrokenPipeError):  # it has failed already, before it came to the gate
            os.write(opener, b"go")
    os.close(opener)
    ending: dict[str, Any] = {}
    while True:
        try:
            gone, status = os.wait()
        except ChildProcessError:
            break
        if gone == pid:
            ending = _ending(status)
            with contextlib.suppress(OSError):  # a full disk: the descendants need their reaper all the same
                files.write_json(order["exit"], ending)
    with contextlib.suppress(OSError):
        files.write_json(order["exit"], {**ending, "all_gone": True})
    os._exit(0)


def _detach() -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    # Orphans of the server come to us instead of to PID 1: so they stay findable as its descendants, and get reaped.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _become_server(order: dict[str, Any], gate: int, opener: int) -> NoReturn:
    try:
        os.close(opener)
        os.setsid()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)  # an ignored signal would stay ignored in the server
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.umask(0o022)
        os.chdir(order["directory"])
        if os.read(gate, 2) == b"go":  # else the supervisor died before it had written down who we are
            os.execv(  # noqa: S606 - the point is that no shell is between
                order["command"][0], order["command"]
            )
    except OSError as error:
        what = error.filename or order["command"][0]
        os.write(2, f"{what}: {error.strerror}\n".encode("utf-8", "surrogateescape"))
    os._exit(127)


def _record(order: dict[str, Any], pid: int) -> None:
    main, supervisor = processes.read_process(pid), processes.read_process(os.getpid())
    if main is None or supervisor is None:
        raise SystemExit("cannot read /proc")
    files.write_json(
        order["process"],
        {
            **main.identity.to_json(),
            "cgroup": main.cgroup,
            "supervisor_pid": supervisor.pid,
            "supervisor_start": supervisor.start,
            "command": order["command"],
            "t": time.time(),
        },
    )


def _ending(status: int) -> dict[str, Any]:
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return {"code": code, "signal": number, "t": time.time()}
