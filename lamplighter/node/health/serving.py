"""What serves now, asked rather than assumed: the last word of every run, and of every verb, comes from here.

A process that lives and listens may answer nothing (D state, a dead engine), one whose start was given up may answer a
moment later, and after a stop another server may have been started by hand. So what listens is asked for a
token, as a client would ask. Looks and asks only.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Mapping, Optional

from lamplighter.node.health import liveness
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import ServerHome
from lamplighter.node.plan import Plan
from lamplighter.node.start import probe
from lamplighter.node.system import http, ports, processes

#: So long may a token take where somebody waits for the answer; a busy server is told by its counters.
TOKEN_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Serving:
    """What a client finds. ``record`` is the ``serving`` of events, None: nobody answers. ``who`` names who does.

    ``trouble``: why nobody answers, where somebody is there all the same. ``is_alive``: our own server is.
    ``is_unknown``: it answers HTTP, and nothing tells any more how to ask it for a token.
    """

    record: Optional[dict[str, Any]] = None
    who: str = ""
    trouble: str = ""
    is_alive: bool = False
    is_unknown: bool = False

    @property
    def unknown(self) -> str:
        """Say why it is not known what serves; "" where that is known."""
        return f"not known: {self.trouble}" if self.is_unknown else ""

    @property
    def may_serve(self) -> bool:
        return self.record is not None or self.is_unknown

    def __str__(self) -> str:
        if self.is_unknown:
            return f"what serves is {self.unknown}"
        if self.record is not None:
            return f"{self.who} is serving" + (f" ({self.trouble})" if self.trouble else "")
        return "nothing is serving" + (f": {self.trouble}" if self.trouble else "")

    @property
    def as_before(self) -> str:
        """Say it of a node on which nothing was touched."""
        if self.record is None:
            return str(self)
        return f"{self.who} serves as before" + (f" ({self.trouble})" if self.trouble else "")


def look(
    home: ServerHome,
    plan: Optional[Plan] = None,
    seconds: float = TOKEN_SECONDS,
) -> Serving:
    """Ask who serves in the place of the server of ``home``: ours first, else what listens on its port.

    ``plan`` says how to ask a stranger; without it that is named only. ``seconds``: for one token.
    """
    ours = _ours(home, seconds, plan)
    if ours.record is not None:
        return ours
    stranger = _stranger(home, plan, seconds)
    if stranger is None or ours.is_unknown or (ours.is_alive and stranger.record is None):
        return ours
    return dataclasses.replace(stranger, is_alive=ours.is_alive)


def _ours(home: ServerHome, seconds: float, plan: Optional[Plan]) -> Serving:
    record = launcher.read_record(home)
    now = launcher.present(record) if record is not None else launcher.Present(None)
    main = now.main
    if record is None or main is None:
        return Serving()
    who = f"release {record['release']}"
    since = launcher.serving_since(record, now) if now.is_other else record.get("since")
    told = {**{name: record.get(name) for name in ("release", "port", "model")}, "since": since, "pid": main.pid}
    stored = home.release(record["release"]).read_plan()
    if stored is None:
        return _damaged(record, told, who)
    if record.get("ready"):
        trouble, note = liveness.trouble_of(home, seconds), ""
    else:
        trouble, note = first_answer(home, record, seconds), "its start was given up before it had answered"
    if trouble is None:
        return Serving(told, who, note, is_alive=True)
    advice = (plan or stored).faults.get("stuck", ())
    stuck = [why for each in launcher.present_members(record) if (why := processes.why_unkillable(each, advice))]
    because = f"; {stuck[0]}" if stuck else ""
    return Serving(None, who, f"{who} (pid {main.pid}) is alive, but {trouble}{because}", is_alive=True)


def _damaged(record: Mapping[str, Any], told: Mapping[str, Any], who: str) -> Serving:
    """Judge a server of whose release nobody knows any more how to ask it: an answer of any kind proves no token."""
    is_heard = bool(ports.owners(record["port"])) and http.is_answering(record["host"], record["port"])
    how = "answers HTTP" if is_heard else "is alive, but it answers nothing"
    trouble = f"{who} (pid {told['pid']}) {how}; {probe.DAMAGED.format(release=record['release'])}"
    return Serving(None, who, trouble, is_alive=True, is_unknown=is_heard)


def first_answer(home: ServerHome, record: Mapping[str, Any], seconds: float) -> Optional[str]:
    """Ask a server that has never been ready for a token; return why it gave none, None if it did."""
    release = home.release(record["release"])
    plan = release.read_plan()
    if plan is None:
        return probe.DAMAGED.format(release=release.name)
    port = probe.who_answers(plan, lambda: [member.pid for member in launcher.present_members(record)])
    if not port.ours:
        return f"it does not listen on port {plan.port}" + (f", which {port} has" if port.others else "")
    answer = probe.ask(plan, probe.find_api_key(plan, release), seconds)
    return None if answer.ok else f"it does not answer a question: {answer.trouble}"


def _stranger(home: ServerHome, plan: Optional[Plan], seconds: float) -> Optional[Serving]:
    """Name who else listens on the port, and ask for a token; None where nobody listens."""
    record = launcher.read_record(home)
    number = plan.port if plan is not None else (record or {}).get("port")
    if number is None:
        return None
    found = [process for pid in ports.owners(number) if (process := processes.read_process(pid)) is not None]
    if not found:
        return None
    first = min(found, key=lambda process: process.start)
    who = f"pid {first.pid} ({processes.user_name(first.uid)}, {first.title}), which lamplighter does not keep,"
    if plan is None:
        return Serving(None, who, f"{who} listens on port {number}")
    answer = probe.ask(plan, probe.find_api_key(plan, None), seconds)
    # Another model, or one behind a key, is a server too.
    if not (answer.ok or answer.is_wrong_model or answer.is_refused):
        return Serving(None, who, f"{who} listens on port {number} and gives no token: {answer.trouble}")
    since = time.time() - processes.age_seconds(first)
    told = {"release": f"pid {first.pid} ({first.title})", "pid": first.pid, "port": number, "since": since}
    return Serving({**told, "model": plan.served_name if answer.ok else None}, who, answer.trouble)
