"""Watching a server's start until it is ready, dead, or out of time.

Ready means that it answered a question: our process is alive, our group owns the port, the model is the right one by
the engine's own rule, and one token was generated. Log lines only tell the phase: a ready line can lie (another server
on the port answers the warm-up), and ``/v1/models`` answers long before the model can.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import select
import threading
import time
from typing import Any, Callable, Mapping, Optional

from lamplighter.node.act import launcher
from lamplighter.node.act.launcher import ExitStatus, Launched, read_exit
from lamplighter.node.layout import LaunchFiles
from lamplighter.node.observe import http, ports, processes
from lamplighter.node.observe.logwatch import Diagnosis, LogWatch
from lamplighter.node.plan import Plan

POLL_SECONDS = 0.05
PROBE_PAUSE_SECONDS = 0.1
PROBE_SECONDS = 120.0
#: After the main process died its ranks may still be writing; the first cause may be among their last lines.
SETTLE_SECONDS = 0.5
READ_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Ready:
    """It answered: wall clock seconds of the first generated token's arrival, and seconds since the launch."""

    answered_at: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class NotReady:
    """It did not become ready. ``crashed`` tells death from time-out."""

    crashed: bool
    message: str
    diagnosis: Diagnosis
    log_tail: tuple[str, ...]


class LogFile:
    """Reads what a growing file gains."""

    def __init__(self, path: str, offset: int = 0) -> None:
        self._path = path
        self._offset = offset

    def new(self) -> bytes:
        """Return at most READ_BYTES not yet seen. A file that shrank is read from its start."""
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except OSError:
            return b""
        self._offset += len(data)
        return data


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one round of questions gave: ``ok``, or ``trouble``; ``is_wrong_model`` says that waiting is no use."""

    ok: bool
    trouble: str = ""
    is_wrong_model: bool = False


def ask(plan: Plan, engine: Mapping[str, Any], api_key: Optional[str], timeout: float) -> Answer:
    """Ask the server on the port for its model and for one token; the identity rule is the engine's."""
    host = ports.probe_host(plan.host)
    server = {"served_name": plan.served_name, "model": plan.model}
    by_reply = (engine.get("identity") or {}).get("source") == "reply"
    try:
        if not by_reply:
            match = http.identity_matches(
                engine, server, http.models(engine, host, plan.port, timeout, api_key=api_key)
            )
            if not match:
                return Answer(False, match.message, is_wrong_model=bool(match.found))
        generation = http.generate(engine, host, plan.port, plan.served_name, timeout, api_key=api_key)
    except http.HttpFailed as failed:
        return Answer(False, failed.reason)
    if not generation.ok:
        return Answer(False, generation.error)
    if by_reply:
        match = http.identity_matches(engine, server, generation.reply)
        return Answer(match.ok, "" if match.ok else match.message, is_wrong_model=not match.ok)
    return Answer(True)


class Probe:
    """Asks in a thread of its own: a first answer may take many seconds, and a death must be noticed meanwhile."""

    def __init__(self, plan: Plan, engine: Mapping[str, Any], api_key: Optional[str]) -> None:
        self._plan = plan
        self._engine = engine
        self._api_key = api_key
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._is_asking = False
        self._next_at = 0.0
        self.last = Answer(False)

    def ask(self) -> None:
        """Start a round of questions unless one is under way."""
        if not self._is_asking and time.monotonic() >= self._next_at:
            self._is_asking = True
            threading.Thread(target=self._question, daemon=True).start()

    def poll(self) -> Answer:
        """Return the newest answer; without one yet, one that is not ok."""
        with contextlib.suppress(queue.Empty):
            self.last = self._answers.get_nowait()
            self._is_asking = False
            self._next_at = time.monotonic() + PROBE_PAUSE_SECONDS
        return self.last

    def _question(self) -> None:
        try:
            self._answers.put(ask(self._plan, self._engine, self._api_key, PROBE_SECONDS))
        except Exception as error:
            self._answers.put(Answer(False, f"the probe failed: {type(error).__name__}: {error}"))


def watch(
    plan: Plan,
    engine: Mapping[str, Any],
    launch: LaunchFiles,
    launched: Launched,
    api_key: Optional[str],
    progress: Callable[..., None],
    heed: Callable[[], None] = lambda: None,
) -> Ready | NotReady:
    """Wait until the launched server is ready, has died, or ``plan.timeouts.ready`` seconds are over. Reads only.

    ``heed`` is called in every round; what it raises ends the watch.
    """
    log = LogFile(launch.log, launched.log_from)
    watched = LogWatch(engine, plan.engine_version)
    probe = Probe(plan, engine, api_key)
    began = time.monotonic()
    handle = processes.Handle.open(launched.main)
    told = _Teller(progress, began)
    try:
        while True:
            heed()
            told.tell(watched, watched.feed(log.new()))
            if handle is None or handle.exited():
                return _dead(log, watched, launch)
            if time.monotonic() - began > plan.timeouts.ready:
                return _late(plan, watched, probe)
            if _owns_port(plan, launched):
                answer = probe.poll()
                if answer.ok:
                    return Ready(time.time(), round(time.monotonic() - began, 3))
                if answer.is_wrong_model:
                    return _not_ready(watched, f"the server answers, but {answer.trouble}")
                probe.ask()
            select.select([handle.fileno()], [], [], POLL_SECONDS)
    finally:
        if handle is not None:
            handle.close()


def _owns_port(plan: Plan, launched: Launched) -> bool:
    listening = ports.listeners(plan.port)
    if not listening:
        return False
    ours = {process.pid for process in launcher.members(launched, processes.processes())}
    return any(ours & set(listener.pids) for listener in listening)


def _dead(log: LogFile, watched: LogWatch, launch: LaunchFiles) -> NotReady:
    status = read_exit(launch, wait=1.0)
    _drain(log, watched)
    diagnosis = watched.diagnosis(exited=True)
    return NotReady(True, _death_sentence(status, diagnosis), diagnosis, tuple(watched.tail(15)))


def _drain(log: LogFile, watched: LogWatch) -> None:
    quiet_until = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < quiet_until:
        data = log.new()
        if data:
            watched.feed(data)
        else:
            time.sleep(0.02)
    watched.finish()


def _death_sentence(status: Optional[ExitStatus], diagnosis: Diagnosis) -> str:
    how = str(status) if status is not None else "exit status unknown"
    return f"the server died in phase {diagnosis.phase or 'boot'} ({how})"


def _not_ready(watched: LogWatch, message: str) -> NotReady:
    watched.finish()
    return NotReady(False, message, watched.diagnosis(exited=False), tuple(watched.tail(15)))


def _late(plan: Plan, watched: LogWatch, probe: Probe) -> NotReady:
    last = f"; last line: {watched.last_line}" if watched.last_line else "; it has written nothing"
    trouble = f"; the last probe: {probe.last.trouble}" if probe.last.trouble else ""
    phase = watched.phase or "boot"
    return _not_ready(watched, f"not ready after {plan.timeouts.ready:.0f} s, in phase {phase}{trouble}{last}")


class _Teller:
    """Turns log events into progress: each change of phase, each new percent, and the last line now and then."""

    def __init__(self, progress: Callable[..., None], began: float) -> None:
        self._progress = progress
        self._began = began
        self._last: tuple[Any, ...] = ()
        self._last_at = 0.0

    def tell(self, watched: LogWatch, news: list[Any]) -> None:
        if not news:
            return
        now = time.monotonic()
        state = (watched.phase, None if watched.percent is None else int(watched.percent))
        if state == self._last and now - self._last_at < 1.0:
            return
        self._last, self._last_at = state, now
        self._progress(
            watched.phase or "boot",
            phase=watched.phase or "boot",
            percent=watched.percent,
            line=watched.last_line,
            elapsed=round(now - self._began, 1),
        )
