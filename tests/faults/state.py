"""What a node may not show after a run: temporary files, reserves, held locks, journals without an end.

Runs on a node too (``python3 state.py ROOT SERVER RUNNER``): standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time


def trouble_on_disk(root, server, runs=None):
    """Every flaw in what lies below ``root``, as a sentence; none after a run that has ended. ``runs``: only these."""
    root = str(root)
    home = os.path.join(root, "servers", server)
    found = []
    for base, folders, names in os.walk(root):
        left = [name for name in [*folders, *names] if name.startswith((".tmp-", "reserve.")) or name == "ballast"]
        found += ["left behind: " + os.path.relpath(os.path.join(base, name), root) for name in left]
    directory = os.path.join(home, "runs")
    if runs is None:
        runs = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    for run in runs:
        found += flaws_of_journal(run, os.path.join(directory, run, "events.jsonl"))
    if is_locked(os.path.join(home, "lock")):
        found.append("the server's lock is held")
    for name in os.listdir(os.path.join(home, "releases")) if os.path.isdir(os.path.join(home, "releases")) else []:
        if not os.path.exists(os.path.join(home, "releases", name, "plan.json")):
            found.append("half a release: " + name)
    current = os.path.join(home, "current")
    if os.path.islink(current) and not os.path.exists(current):
        found.append("`current` points to nothing")
    return found


def flaws_of_journal(run, path):
    """A journal has every number once, and an end."""
    events = []
    try:
        with open(path, "rb") as file:
            for line in file.read().split(b"\n"):
                try:
                    events.append(json.loads(line))
                except ValueError:
                    continue  # a torn line, passed over by every reader
    except OSError:
        return ["run " + run + " has no journal"]
    numbers = [event.get("seq") for event in events]
    found = []
    if numbers != list(range(1, len(numbers) + 1)):
        found.append("run " + run + ": numbers " + str(numbers))
    if not events or events[-1]["event"] != "end":
        found.append("run " + run + " has no end")
    return found


def is_locked(path):
    deadline = time.monotonic() + 60  # the worker may be about to exit, its end event written
    while time.monotonic() < deadline:
        try:
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except FileNotFoundError:
            return False
        except OSError:
            time.sleep(0.02)
    return True


if __name__ == "__main__":
    print(json.dumps(trouble_on_disk(sys.argv[1], sys.argv[2])))
