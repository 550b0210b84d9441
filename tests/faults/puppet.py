"""Runs the node side's worker, unchanged, on strings: holds it at a stage, or kills it at its n-th checkpoint.

``puppet.py ORDER RUNNER worker`` stands in for ``python3 -I -S RUNNER worker``. ORDER is a JSON file:

    {"hold": STAGE, "held": FILE}   stop at the beginning of STAGE, make FILE, go on when ORDER is gone
    ... "jump": SECONDS             from then on the worker's wall clock is off by that much (libfaketime)
    {"kill": N}                     SIGKILL oneself right before the N-th checkpoint
    {"count": FILE}                 write the checkpoints of a whole run into FILE, one a line

A checkpoint is the beginning of a stage, and every call that changes the file system, starts a process or signals one.
Between two of them a kill leaves nothing new behind. Standard library only: it runs on a node.
"""

from __future__ import annotations

import glob
import json
import os
import select
import signal
import subprocess
import sys
import time

#: Read by libfaketime at each look at the clock: what it is off by.
CLOCK = "FAKETIME_TIMESTAMP_FILE"
FILE_OPERATIONS = ("rename", "replace", "fsync", "fdatasync", "symlink", "mkdir", "rmdir", "unlink", "ftruncate")


def main() -> None:
    order_file, runner = sys.argv[1:3]
    sys.argv[1:] = sys.argv[3:]
    sys.path.insert(0, runner)
    from lamplighter.node import __main__ as node
    from lamplighter.node import worker

    try:
        with open(order_file) as file:
            order = json.load(file)
    except OSError:
        order = {}
    if "jump" in order:
        live_under_faketime(order["held"] + ".clock")
    if "hold" in order:
        hold(worker, order, order_file)
    elif order:
        strings = Strings(order.get("kill"))
        strings.attach(worker)
        node.main()
        if "count" in order:
            with open(order["count"], "w") as file:
                file.write("\n".join(strings.passed) + "\n")
        return
    node.main()


def faketime():
    """Return the library's path, None where it is not installed."""
    return next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), None)


def live_under_faketime(clock) -> None:
    """Have a wall clock that follows the file ``clock``; the monotonic one goes on as it is."""
    if CLOCK not in os.environ:
        set_clock(clock, 0)
        asked = {CLOCK: clock, "FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **asked, "LD_PRELOAD": faketime()})
    # libfaketime 0.9.10 refuses the sleeps of Python 3.11 that are over at once: so ours is another, and children,
    # the stand-in for nvidia-smi among them, have the machine's clock.
    time.sleep = lambda seconds: select.select([], [], [], seconds)
    del os.environ["LD_PRELOAD"]


def set_clock(clock, seconds) -> None:
    with open(clock + ".new", "w") as file:
        file.write(f"{seconds:+d}")
    os.replace(clock + ".new", clock)


def jump(seconds) -> None:
    before = time.time(), time.monotonic()
    set_clock(os.environ[CLOCK], seconds)
    moved = time.time() - before[0], time.monotonic() - before[1]
    if abs(moved[0] - seconds) > 600 or not 0 <= moved[1] < 600:
        raise RuntimeError(f"the clocks moved by {moved} s, not the wall clock alone by {seconds} s")


def hold(worker, order, order_file) -> None:
    perform = worker.Run.perform

    def held(run, name, action, *handed):
        def stopped(run, *handed):
            if name == order["hold"]:
                with open(order["held"], "w") as file:
                    file.write(str(os.getpid()))
                while os.path.exists(order_file):
                    time.sleep(0.01)
                if "jump" in order:
                    jump(order["jump"])
            return action(run, *handed)

        return perform(run, name, stopped, *handed)

    worker.Run.perform = held


class Strings:
    """Counts checkpoints, and kills at one."""

    def __init__(self, kill_at) -> None:
        self.kill_at = kill_at
        self.passed = []
        self.pid = os.getpid()

    def attach(self, worker) -> None:
        from lamplighter.node.system.processes import Handle

        for name in FILE_OPERATIONS:
            setattr(os, name, self.tied(name, getattr(os, name)))
        subprocess.Popen.__init__ = self.tied("start", subprocess.Popen.__init__)
        Handle.signal = self.tied("signal", Handle.signal)
        perform = worker.Run.perform

        def tied_perform(run, name, action, *handed):
            self.checkpoint(f"stage {name}")
            return perform(run, name, action, *handed)

        worker.Run.perform = tied_perform

    def tied(self, name, function):
        def call(*args, **options):
            self.checkpoint(name)
            return function(*args, **options)

        return call

    def checkpoint(self, name) -> None:
        if os.getpid() != self.pid:
            return  # a child between fork and exec
        self.passed.append(name)
        if len(self.passed) == self.kill_at:
            os.kill(self.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
