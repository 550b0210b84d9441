"""Asking a starting server on its own node: is the port ours, is it the model wanted, does it generate, is it well.

Each question is asked in a thread of its own: a first answer may take many seconds, and a death must be noticed
meanwhile. The engine's health endpoint is asked beside, never in series, and can only veto. The API key goes into a
header and nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import os
import queue
import re
import threading
import time
from typing import Any, Callable, Collection, Mapping, Optional, Tuple

from lamplighter.node import arguments
from lamplighter.node.layout import ReleaseDirectory
from lamplighter.node.plan import Plan
from lamplighter.node.system import http, ports, processes
from lamplighter.node.system.ports import Listener

#: Between two questions, at first and when many were in vain: what the verdict may come too late by.
PROBE_PAUSE_SECONDS = (0.05, 0.15)
PROBE_SECONDS = 120.0
HEALTH_PAUSE_SECONDS = (1.0, 1.0)
LONGER = 1.02
#: Statuses that mean "not now", where the engine.yml names no others.
TRANSIENT = (408, 425, 429, 502, 503, 504)
#: What is said of a server whose plan is gone.
DAMAGED = "release {release} is damaged, or not on the node any more: how to ask it is not known"
#: Of an answer: what is another one each time, though it says the same.
_DIFFERING = re.compile(r"[0-9a-fA-F]*\d[0-9a-fA-F-]*")


def find_api_key(plan: Plan, release: Optional[ReleaseDirectory]) -> Optional[str]:
    """The key that the server will ask for: after the engine's flag, else in the engine's variable, a secret or not."""
    flag = plan.engine.get("api_key_flag")
    secrets = {} if release is None else release.read_environment()
    argv = list(plan.argv)
    for variable, place in plan.argv_secrets.items():
        argv[place] = secrets.get(variable, "")
    said = arguments.value_of((flag,), argv) if flag else None
    if said is not None:
        return said or None
    name = plan.engine.get("api_key_env")
    if not name:
        return None
    return secrets.get(name) or plan.exports.get(name) or None


@dataclasses.dataclass(frozen=True)
class Port:
    """Who answers on the server's port: ``ours`` is proven; ``others`` are listeners that are not."""

    ours: bool
    others: Tuple[Listener, ...]

    def __str__(self) -> str:
        names = []
        for listener in self.others:
            found = [process for pid in listener.pids if (process := processes.read_process(pid)) is not None]
            names += [f"pid {each.pid} ({processes.user_name(each.uid)}, {each.title})" for each in found]
            if not found:
                names.append(f"a process of {processes.user_name(listener.uid)}")
        return ", ".join(dict.fromkeys(names))


def who_answers(plan: Plan, members: Callable[[], Collection[int]], known: Collection[int] = ()) -> Port:
    """Look who would answer a connection to the server's port.

    ``known`` are pids of the server that are at hand; ``members`` finds all of them, and is called only when those do
    not suffice: it and the search for strangers cost a look at every process.
    """
    quick = _judge(plan, ports.listeners(plan.port, known), known)
    return quick if quick.ours else _judge(plan, ports.listeners(plan.port), members())


def _judge(plan: Plan, found: Tuple[Listener, ...], ours: Collection[int]) -> Port:
    """The kernel hands a connection to the listener with the very address, else to one that listens on all of them."""
    if not found:
        return Port(False, ())
    host = ports.probe_host(plan.host)
    with contextlib.suppress(ValueError):
        wanted = ipaddress.ip_address(host)
        exact = [each for each in found if _is(each.address, wanted)]
        found = tuple(exact or [each for each in found if each.is_wildcard])
    others = tuple(each for each in found if set(ours).isdisjoint(each.pids))
    return Port(bool(found) and not others, others)


def _is(address: str, wanted: object) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return found == wanted or (mapped is not None and mapped == wanted)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one round of questions gave: ``ok``, or ``trouble``.

    ``refusal``: what a complete answer said instead, without what differs in each one (times, ids); "" where none came,
    or one that the engine gives while it begins. ``is_well``: the health endpoint said so.

    Waiting is no use after ``is_wrong_model``, ``is_refused`` (it does not take our API key) and ``is_other_tls`` (it
    does not talk as the inventory says). ``model_proven``: the model is the right one, whatever else it answered. The
    times are monotonic seconds.
    """

    ok: bool
    trouble: str = ""
    is_wrong_model: bool = False
    is_refused: bool = False
    is_other_tls: bool = False
    model_proven: bool = False
    refusal: str = ""
    is_well: bool = False
    asked_at: float = 0.0
    at: float = 0.0


def ask(plan: Plan, api_key: Optional[str], timeout: float, *, knows_model: bool = False, tokens: int = 1) -> Answer:
    """Ask the server on the port for its model (unless that is known) and for tokens; the rule is the engine's."""
    engine, host = plan.engine, ports.probe_host(plan.host)
    server = {"served_name": plan.served_name, "model": plan.model}
    by_reply = (engine.get("identity") or {}).get("source") == "reply"
    try:
        if not by_reply and not knows_model:
            reply = http.models(engine, host, plan.port, timeout, api_key=api_key, tls=plan.tls)
            match = http.identity_matches(engine, server, reply)
            if not match:
                is_other = bool(match.found) and reply.status == 200
                refusal = _refusal(engine, reply)
                is_refused = reply.status == 401
                return Answer(False, match.message, is_wrong_model=is_other, is_refused=is_refused, refusal=refusal)
            knows_model = True
        generation = http.generate(
            engine, host, plan.port, plan.served_name, timeout, api_key=api_key, tls=plan.tls, tokens=tokens
        )
    except http.HttpFailed as failed:
        if plan.tls == "none" and failed.kind in (http.CUT, http.NOT_HTTP) and http.talks_tls(host, plan.port, 2.0):
            return Answer(False, f"{failed.reason}: it talks HTTPS", is_other_tls=True)
        is_other_tls = failed.kind in (http.NOT_TRUSTED, http.NOT_TLS)
        refusal = failed.reason if failed.kind in (http.NOT_HTTP, http.TOO_LARGE) else ""
        return Answer(False, failed.reason, is_other_tls=is_other_tls, model_proven=knows_model, refusal=refusal)
    if not generation.ok:
        refusal, is_refused = _refusal(engine, generation.reply), generation.status == 401
        return Answer(False, generation.error, is_refused=is_refused, model_proven=knows_model, refusal=refusal)
    if by_reply:
        match = http.identity_matches(engine, server, generation.reply)
        return Answer(match.ok, "" if match.ok else match.message, is_wrong_model=not match.ok)
    return Answer(True, model_proven=True)


def _refusal(engine: Mapping[str, Any], reply: http.Reply) -> str:
    if reply.status in (engine.get("refusals") or {}).get("transient", TRANSIENT):
        return ""
    return f"{reply.status} {_DIFFERING.sub('#', reply.text[:2000])}"


def ask_health(plan: Plan, api_key: Optional[str]) -> Answer:
    """Ask the engine's own health endpoint; only its words for "unwell" are trouble, no answer is none."""
    rule = plan.engine["health"]
    host, timeout = ports.probe_host(plan.host), float(rule.get("timeout") or 10)
    try:
        reply = http.request("GET", host, plan.port, rule["path"], timeout=timeout, api_key=api_key, tls=plan.tls)
    except http.HttpFailed:
        return Answer(True)
    if reply.status in rule.get("veto_status", ()):
        said = f"{rule['path']} answers {reply.status}"
        return Answer(False, f"{said}: {reply.text[:200]}" if reply.text.strip() else said)
    return Answer(True, is_well=reply.status == 200)


class Asker:
    """Repeats one question in a thread, a round at a time; ``last`` is its answer.

    Between two rounds are ``pause`` seconds, a little more after each, ``longest`` at most.
    """

    def __init__(self, question: Callable[[], Answer], pause: float, longest: float) -> None:
        self._question = question
        self._pause, self._longest = pause, longest
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._asked_at: Optional[float] = None
        self._next_at = 0.0
        self._signal, self._tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.last = Answer(False)

    @property
    def due_in(self) -> float:
        """Seconds until the next round may start; while one is under way its answer comes first."""
        return float("inf") if self._asked_at is not None else max(0.0, self._next_at - time.monotonic())

    def ask(self) -> None:
        """Start a round unless one is under way."""
        if self._asked_at is None and time.monotonic() >= self._next_at:
            self._asked_at = time.monotonic()
            threading.Thread(target=self._round, args=(self._asked_at, self._tell), name="probe", daemon=True).start()

    def poll(self) -> bool:
        """Take over a new answer; False without one."""
        try:
            self.last = self._answers.get_nowait()
        except queue.Empty:
            return False
        with contextlib.suppress(OSError):
            os.read(self._signal, 64)
        self._asked_at = None
        self._next_at = time.monotonic() + self._pause
        self._pause = min(self._longest, self._pause * LONGER)
        return True

    def fileno(self) -> int:
        """Readable when an answer is there."""
        return self._signal

    def close(self) -> None:
        os.close(self._signal)
        tell, self._tell = self._tell, -1
        if self._asked_at is None:  # else the thread may still write to it: a descriptor is not worth a race
            os.close(tell)

    def _round(self, asked_at: float, tell: int) -> None:
        try:
            answer = self._question()
        except Exception as error:
            answer = Answer(False, f"the probe failed: {type(error).__name__}: {error}")
        self._answers.put(dataclasses.replace(answer, asked_at=asked_at, at=time.monotonic()))
        with contextlib.suppress(OSError):
            os.write(tell, b".")
