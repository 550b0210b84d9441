"""Whether a server that was ready still works: it gives a token, and no worker is lost. Asks and looks only."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import time
from typing import Any, List, Mapping, Optional

from lamplighter.node.health import counters
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import ServerHome, read_json
from lamplighter.node.plan import Plan
from lamplighter.node.start import probe
from lamplighter.node.system import processes
from lamplighter.node.system.processes import Process

#: A process that is stopped, or waits in the kernel, for so long does not do so by the way.
STUCK_SECONDS = 2.0


STUCK = {
    "T": "is stopped by a signal (kill -CONT lets it go on)",
    "t": "is held by a debugger",
    "D": "hangs in the kernel (state D)",
}


#: Of the newest lines of a log, bytes.
MOST_LOG_BYTES = 1 << 20


#: A server under load may take long for its first token; one that hangs never gives it.
PATIENT_SECONDS = 60.0


def trouble_of(home: ServerHome, seconds: float = PATIENT_SECONDS) -> Optional[str]:
    """Say why the server is not healthy: not ours on its port, another model, no token in time. None: it is well.

    A server that is too busy for a token within ``seconds`` is well where its counters of tokens grow, or its log gains
    lines of such work. No health endpoint is asked: with a stopped engine vLLM's /health and /v1/models go on saying
    200, and so does SGLang's /health_generate while anything else comes out of it.
    """
    record = launcher.read_record(home)
    if record is None or not record.get("ready"):
        return "nothing that became ready runs here"
    release = home.release(record["release"])
    plan = release.read_plan()
    if plan is None:
        return probe.DAMAGED.format(release=release.name)
    members = launcher.present_members(record)
    port = probe.who_answers(plan, lambda: [member.pid for member in members])
    if not port.ours:
        return f"port {plan.port} is not held by its processes" + (f": {port}" if port.others else "")
    key = probe.find_api_key(plan, release)
    work = _Work(plan, key, record["log"])
    answer = probe.ask(plan, key, seconds)
    if answer.ok:
        return None
    if not answer.is_wrong_model and work.goes_on():
        return None
    stopped = [
        f"{each.title} (pid {each.pid})" for each in launcher.present_members(record) if each.state in ("T", "t")
    ]
    because = f"; stopped by a signal or a debugger: {', '.join(stopped)}" if stopped else ""
    return f"it does not answer a question: {answer.trouble}{because}"


class _Work:
    """What shows that tokens come out for others, from now on."""

    def __init__(self, plan: Plan, key: Optional[str], log: str) -> None:
        self._plan, self._key, self._log = plan, key, log
        self._tokens = counters.tokens_so_far(plan, key)
        self._size = self._size_of_log()

    def goes_on(self) -> bool:
        tokens = counters.tokens_so_far(self._plan, self._key)
        return (self._tokens is not None and tokens is not None and tokens > self._tokens) or self._is_written()

    def _is_written(self) -> bool:
        line = (self._plan.engine.get("counters") or {}).get("lines")
        if not line or self._size is None:
            return False
        with contextlib.suppress(OSError), open(self._log, "rb") as file:
            file.seek(max(self._size, (self._size_of_log() or 0) - MOST_LOG_BYTES))
            return re.search(line, file.read(MOST_LOG_BYTES).decode("utf-8", "replace")) is not None
        return False

    def _size_of_log(self) -> Optional[int]:
        try:
            return os.stat(self._log).st_size
        except OSError:
            return None


def lost_workers(home: ServerHome) -> List[str]:
    """Name each process that the server needs and has no more: gone, dead, stopped, or stuck in the kernel.

    They are those that were there when it became ready, or others of the same titles (after a restart by systemd).
    Takes ``STUCK_SECONDS`` where one may be stuck.
    """
    record, deployed = launcher.read_record(home), read_json(home.deployed, crew=list)
    if record is None or deployed is None:
        return []
    if any(deployed.get(name) != record.get(name) for name in ("run", "attempt", "release")):
        return []
    crew = [each for each in deployed["crew"] if isinstance(each, dict)]
    known = {(each.get("pid"), each.get("start")) for each in crew}
    members = launcher.present_members(record)
    if not members:
        return []  # there is no server, which is told otherwise
    substitutes = collections.Counter(
        each.title for each in members if not each.is_dead and (each.pid, each.start) not in known
    )
    found = []
    for each in crew:
        process = processes.read_process(int(each["pid"]))
        is_there = process is not None and process.start == each["start"]
        trouble = _trouble_with(process) if process is not None and is_there else "is gone"
        if trouble and substitutes[each["title"]] > 0:
            substitutes[each["title"]] -= 1
        elif trouble:
            found.append(f"{each['title']} (pid {each['pid']}{_rank(each['title'], home, record)}) {trouble}")
    return found


def _rank(title: str, home: ServerHome, record: Mapping[str, Any]) -> str:
    plan = home.release(record["release"]).read_plan()
    pattern = (plan.engine.get("processes") or {}).get("rank") if plan is not None else None
    match = re.search(pattern, title) if pattern else None
    return f", rank {match['rank']}" if match is not None else ""


def _trouble_with(process: Process) -> str:
    """Say why a process of the server does nothing; "" where it may. One look proves no stop: debuggers pause, too."""
    until = time.monotonic() + STUCK_SECONDS
    now: Optional[Process] = process
    while True:
        if now is None or now.identity != process.identity or now.is_dead:
            return "is dead, and its parent has not noticed" if now is not None and now.is_dead else "is gone"
        if now.state not in STUCK:
            return ""
        if time.monotonic() >= until:
            return STUCK[now.state]
        time.sleep(0.1)
        now = processes.read_process(process.pid)


def age_of(home: ServerHome) -> Optional[float]:
    """Return for how many seconds the server's main process has run; None when there is none."""
    record = launcher.read_record(home)
    main = launcher.present(record).main if record is not None else None
    process = processes.read_process(main.pid) if main is not None else None
    return processes.age_seconds(process) if process is not None else None
