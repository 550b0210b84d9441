"""What a command says serves, word by word, and what an independent client says to that.

A report says it several times: in the exit code, in ``serving``, in the sentence of its message, in the error event of
the control side, and in the closing words for people. Each is a claim of its own, and each must be true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lamplighter.node.events import Exit
from tests.driver import Done

#: Codes that say by themselves whether something serves (docs/json.md).
SERVES = {Exit.OK: True, Exit.CRASHED: False, Exit.NOT_READY: False, Exit.DEGRADED: True, Exit.ROLLED_BACK: True}
#: Of what they end with, nothing is promised for later: another run decides, or this one goes on.
OTHERS_DECIDE = (Exit.LOCKED, Exit.DETACHED, Exit.UNREACHABLE)
NOTHING = re.compile(r"nothing is serving|^nothing\b(?! \(starting\)| answers at)", re.IGNORECASE)
RELEASE = re.compile(r"release ([0-9a-z-]+)\b(?:,| is serving| serves)")
SOMETHING = re.compile(r"still serving|serves as before|is serving|serving again|is up again|answers on port|, pid \d")
PID = re.compile(r", pid (\d+)")
PORT = re.compile(r"on port (\d+)")


@dataclass(frozen=True)
class Found:
    """What answers on the server's port, as the process that answers says it of itself."""

    age: str = "none"
    pid: int | None = None
    port: int | None = None
    model: str | None = None

    @property
    def answers(self) -> bool:
        return self.age != "none"

    def __str__(self) -> str:
        return f"age {self.age}, pid {self.pid}, {self.model} on port {self.port}" if self.answers else "no answer"


@dataclass(frozen=True)
class Claim:
    """One thing that was said: whether something serves, and as far as it was said, what."""

    words: str
    serves: bool
    release: str | None = None
    pid: int | None = None
    port: int | None = None
    model: str | None = None

    def denied_by(self, found: Found, ages: Mapping[str, str]) -> bool:
        """Whether ``found`` is something else; ``ages`` are those of the releases that are known."""
        if self.serves != found.answers:
            return True
        said = {"age": ages.get(self.release or ""), "pid": self.pid, "port": self.port, "model": self.model}
        return any(value not in (None, getattr(found, name)) for name, value in said.items())


def claims_of(done: Done, host: str = "gpu", server: str = "demo") -> list[Claim]:
    """All that ``done`` says of what serves; none where it speaks of no server, or says that it does not know."""
    part = done.report["hosts"].get(host, {"servers": {}})["servers"].get(server)
    if part is None or part["exit_code"] in OTHERS_DECIDE:
        return []
    return [*_of_report(part, has_ended=_has_ended(done)), *_of_words(done, part)]


def denials(claims: list[Claim], found: Found, ages: Mapping[str, str], when: str) -> list[str]:
    """One line a claim that ``found`` shows to be untrue: what was said, and what was found."""
    return [
        f'it says "{claim.words}", and {when} an independent client finds: {found}'
        for claim in claims
        if claim.denied_by(found, ages)
    ]


def _has_ended(done: Done) -> bool:
    """Whether the node itself had the last word: then null says nothing serves, else it is only not known."""
    return any(event["event"] == "end" for event in done.events)


def _of_report(part: Mapping[str, Any], *, has_ended: bool) -> Iterator[Claim]:
    code, serving = part["exit_code"], part["serving"]
    if code in SERVES and part["outcome"] not in ("stopped", "undeployed"):
        yield Claim(f"exit code {code}", SERVES[code])
    if serving is not None:
        told = {name: serving[name] for name in ("release", "pid", "port", "model")}
        yield Claim(f"serving: {told}", True, **told)
    elif has_ended:
        yield Claim("serving: null", False)


def _of_words(done: Done, part: Mapping[str, Any]) -> Iterator[Claim]:
    errors = [event for event in done.events if event["event"] == "error"]
    closing = re.findall(r"^ *serving now +(.*)$", done.stderr, re.MULTILINE)
    shouted = ["NOTHING IS SERVING"] if "NOTHING IS SERVING" in done.stderr else []
    for words in (part["message"], *(event["serving"] for event in errors[-1:]), *closing[-1:], *shouted):
        if NOTHING.search(words):
            yield Claim(words, False)
        elif SOMETHING.search(words):
            release, pid, port = (pattern.search(words) for pattern in (RELEASE, PID, PORT))
            yield Claim(
                words,
                True,
                release=release and release[1],
                pid=int(pid[1]) if pid else None,
                port=int(port[1]) if port else None,
            )
