"""One host's conversations as a script: what was sent before contact was lost, and what is said of the run then."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from lamplighter.errors import ContactLost, LamplighterError, NodeRefused, Unreachable
from lamplighter.node import events
from lamplighter.node.events import Event, Exit
from lamplighter.report import Fold
from lamplighter.run import deploy, session, verify
from lamplighter.run.command import Interrupted
from lamplighter.run.deploy import Follower, HostSession, NoSuchRun
from lamplighter.run.ssh import CommandTimedOut

KIMI: Any = SimpleNamespace(name="kimi")
BYE = {"event": events.BYE}
UNKNOWN = {"event": events.RESULT, "error": "no run of server kimi is at work on this node"}
Step = BaseException | list[Event]


# -- one conversation


class Channel:
    """Gives the node's output, and keeps what was written."""

    def __init__(self, *lines: bytes) -> None:
        self.lines = list(lines)
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def read(self, timeout: float) -> bytes:
        return self.lines.pop(0) if self.lines else b""

    def lost(self) -> ContactLost:
        return ContactLost("the connection broke")

    def close(self) -> None:
        self.is_closed = True


class Node:
    name = "gpu1"
    spec = SimpleNamespace(become=True)
    is_alive = True

    def __init__(self, channel: Channel | Exception, sudo: Exception | None = None) -> None:
        self.channel = channel
        self.sudo = sudo

    def refuse_sudo_that_logs_input(self) -> None:
        if self.sudo is not None:
            raise self.sudo

    def stream(self, command: str) -> Channel:
        if isinstance(self.channel, Exception):
            raise self.channel
        return self.channel


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(session.secrets, "token_hex", lambda _: "abcd")
    return b"@@lamplighter abcd have \n"


def test_lines_of_a_background_job_are_skipped_whatever_json_they_are(marker: bytes) -> None:
    noise = [b"42\n", b"null\n", b'"bye"\n', b'["event"]\n', b"{}\n", b'{"event": 7}\n', b"[" * 99999 + b"\n", b"x\n"]
    channel = Channel(b"welcome\n", marker, *noise, b'{"event": "run", "seq": 1}\n', *noise, b'{"event": "bye"}\n')
    heard: list[Event] = []
    node: Any = Node(channel)
    assert session.converse(node, "python3", {}, heard.append) == BYE
    assert heard == [{"event": "run", "seq": 1}]


@pytest.mark.parametrize(
    ("channel", "sudo"),
    [(Channel(), CommandTimedOut("sudo -n -l did not end")), (ContactLost("no word"), None)],
)
def test_contact_lost_before_anything_was_sent_is_a_node_that_cannot_be_reached(
    channel: Channel | Exception, sudo: Exception | None
) -> None:
    sent: list[bool] = []
    node: Any = Node(channel, sudo)
    with pytest.raises(Unreachable) as caught:
        session.converse(node, "python3", {}, lambda event: None, lambda: sent.append(True))
    assert not sent
    assert "nothing was touched" in caught.value.serving


def test_the_request_is_announced_before_its_first_byte_leaves(marker: bytes) -> None:
    channel = Channel(marker, b'{"event": "bye"}\n')
    written: list[int] = []
    node: Any = Node(channel)
    session.converse(node, "python3", {}, lambda event: None, lambda: written.append(len(channel.written)))
    assert written == [0]
    assert json.loads(channel.written[0].splitlines()[-1])["runner"]


# -- one run, over as many conversations as it takes


class Line:
    """The connection of a session, as far as it is opened and closed."""

    def __init__(self) -> None:
        self.is_alive = True
        self.logins = 0

    def close(self) -> None:
        self.is_alive = False

    def open(self) -> None:
        self.is_alive = True
        self.logins += 1


class Script:
    """Conversations with a node, one after another: each says its events, or ends as the exception does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[bool, Step]] = []
        self.requests: list[Mapping[str, Any]] = []
        self.heard: list[Event] = []
        self.line = Line()
        host: Any = SimpleNamespace(name="gpu1", root=None, connection=SimpleNamespace(python="python3"))
        node: Any = self.line
        self.session = HostSession(host, node, verify.Path("."))
        monkeypatch.setattr(deploy, "converse", self._converse)
        monkeypatch.setattr(deploy, "RECONNECT_PAUSES", (0.0, 0.0))
        monkeypatch.setattr(HostSession, "prepare", lambda *_: {"verb": "deploy", "run": "R1"})

    def then(self, *said: Event | BaseException, is_sent: bool = True) -> None:
        """Add a conversation; ``is_sent`` says whether its request leaves before it comes to an end."""
        (first, *_) = said
        step: Step = (
            first if isinstance(first, BaseException) else [e for e in said if not isinstance(e, BaseException)]
        )
        self.steps.append((is_sent, step))

    def run(self) -> None:
        self.session.run("deploy", KIMI, self.heard.append)

    def _converse(
        self,
        node: Any,
        python: str,
        request: Mapping[str, Any],
        on_event: Callable[[Event], None],
        on_sending: Callable[[], None],
    ) -> Event:
        assert node.is_alive
        self.requests.append(request)
        is_sent, step = self.steps.pop(0)
        if is_sent:
            on_sending()
        if isinstance(step, BaseException):
            raise step
        for event in step:
            on_event(event)
        return BYE


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


def begun(number: int = 1) -> Event:
    return {**events.run_started("deploy", "ann@desk", None), "run": "R1", "seq": number}


def end(number: int = 2) -> Event:
    return {**events.ended("deployed", Exit.OK, "ready"), "run": "R1", "seq": number}


def test_a_run_is_under_way_from_the_request_to_its_end(script: Script) -> None:
    script.then(Interrupted(Exit.TERMINATED), is_sent=False)
    with pytest.raises(Interrupted):
        script.run()
    assert script.session.under_way is None
    script.then(Interrupted(Exit.TERMINATED))
    with pytest.raises(Interrupted):
        script.run()
    assert script.session.under_way is not None
    assert not script.session.under_way.is_begun
    script.then(begun(), end())
    script.run()
    assert script.session.under_way is None


@pytest.mark.parametrize("refusal", [NodeRefused("no python"), Unreachable("gone")])
def test_a_run_that_was_refused_is_not_under_way(script: Script, refusal: LamplighterError) -> None:
    script.then(refusal)
    with pytest.raises(type(refusal)):
        script.run()
    assert script.session.under_way is None
    assert script.line.logins == 0


def test_a_run_that_was_asked_for_and_never_heard_of_may_have_begun(script: Script) -> None:
    script.then(ContactLost("cut"))
    script.then(Unreachable("no route"))
    script.then(Unreachable("no route"))
    with pytest.raises(ContactLost) as caught:
        script.run()
    assert "may have begun" in caught.value.serving
    assert caught.value.next_step == "./inv attach --host gpu1 --server kimi --run R1"


def test_a_run_that_the_node_never_heard_of_did_not_begin(script: Script) -> None:
    script.then(ContactLost("cut"))
    script.then(UNKNOWN)
    script.then(UNKNOWN)
    with pytest.raises(Unreachable, match="before the run began"):
        script.run()


def test_a_connection_that_broke_in_between_is_opened_anew(script: Script) -> None:
    script.line.is_alive = False
    script.then(begun(), end())
    script.run()
    assert script.line.logins == 1
    script.then(begun(), end())
    script.run()
    assert script.line.logins == 1


def test_foreign_events_do_not_confuse_the_follower() -> None:
    follower = Follower("gpu1", "kimi", "R1", lambda event: None)
    for event in ({"event": "x", "seq": "many", "run": ["R2"]}, {"event": "y", "seq": 1e400}):
        follower(event)
    assert (follower.run, follower.is_begun) == ("R1", False)


def test_a_run_that_ended_before_it_could_be_cancelled_is_shown_to_its_end(script: Script) -> None:
    run = Follower("gpu1", "kimi", "R1", script.heard.append)
    run(begun())
    script.then(UNKNOWN)
    script.then(end())
    script.session.cancel_or_see_its_end(run)
    cancel, attach = script.requests
    assert (cancel["verb"], cancel["to"], cancel["after"]) == ("cancel", "R1", 1)
    assert (attach["verb"], attach["to"], attach["after"]) == ("attach", "R1", 1)
    assert Fold.report(folded(script.heard)).exit_code == Exit.OK
    assert "nothing was cancelled" in script.heard[-1]["message"]


def folded(heard: list[Event]) -> Fold:
    fold = Fold()
    for event in heard:
        fold.add(event)
    return fold


def test_a_run_that_is_cancelled_is_followed_from_where_we_were(script: Script) -> None:
    run = Follower("gpu1", "kimi", "R1", script.heard.append)
    run(begun(7))
    script.then(end(8))
    script.session.cancel_or_see_its_end(run)
    assert [request["after"] for request in script.requests] == [7]


def test_a_run_that_the_node_does_not_know_is_neither_cancelled_nor_shown(script: Script) -> None:
    script.then(UNKNOWN)
    script.then(UNKNOWN)
    with pytest.raises(NoSuchRun):
        script.session.cancel_or_see_its_end(Follower("gpu1", "kimi", "R1", script.heard.append))


def test_a_run_that_could_not_be_told_is_not_taken_for_one_that_has_ended(script: Script) -> None:
    script.then({**UNKNOWN, "error": "the node takes no writes", "hint": "make room there"})
    with pytest.raises(NodeRefused) as refused:
        script.session.cancel_or_see_its_end(Follower("gpu1", "kimi", "R1", script.heard.append))
    assert not isinstance(refused.value, NoSuchRun)
    assert (refused.value.serving, refused.value.next_step) == ("the run on server kimi goes on", "make room there")
    assert [request["verb"] for request in script.requests] == ["cancel"]


# -- the checks after a deploy


@pytest.fixture
def verifications(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What each verification gives: its checks, or the error that it raises."""
    steps: list[Any] = []

    def once(*_: Any) -> dict[str, Any]:
        step = steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return {"checks": step}

    monkeypatch.setattr(verify, "verify", once)
    yield steps
    assert not steps


PASSED = {"outcome": "passed", "question": "is it well", "name": "well", "evidence": ""}


def verified(script: Script) -> Fold:
    fold = folded([{**event, "host": "gpu1", "server": "kimi"} for event in (begun(), end())])
    with contextlib.suppress(Unreachable):
        verify.afterwards(script.session, KIMI, verify.Path("."), fold, script.heard.append)
    return fold


def test_checks_that_lost_contact_are_made_once_more(script: Script, verifications: list[Any]) -> None:
    verifications += [Unreachable("the wire was cut"), [PASSED]]
    assert verified(script).report().exit_code == Exit.OK
    assert script.line.logins == 1
    told = [event["message"] for event in script.heard if event["event"] == events.WARNING]
    assert told == ["contact lost (the wire was cut); verifying again over a new connection"]
    assert script.heard[-1]["message"] == "1 of 1 checks passed"


def test_checks_that_lose_contact_twice_are_given_up(script: Script, verifications: list[Any]) -> None:
    verifications += [Unreachable("the wire was cut"), Unreachable("the wire was cut")]
    verified(script)
    assert script.line.logins == 1
