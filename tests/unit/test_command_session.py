"""One host's conversations as a script: what was sent before contact was lost, and what is said of the run then."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lamplighter.errors import ContactLost, LamplighterError, NodeRefused, Unreachable
from lamplighter.node import events
from lamplighter.node.events import Event, Exit
from lamplighter.report import Fold
from lamplighter.report.summary import summary
from lamplighter.run import conversation, host_session, verify
from lamplighter.run.command import Interrupted
from lamplighter.run.conversation import NoAnswer
from lamplighter.run.host_session import Follower, HostSession, NodeDefect, NoSuchRun, whoever_asks
from lamplighter.ssh.connection import CommandTimedOut, SilenceTimeout

KIMI: Any = SimpleNamespace(name="kimi", on_verify_failure="keep", args={}, extra_args=())
BYE = {"event": events.BYE}
UNKNOWN = {"event": events.RESULT, "error": "no run of server kimi is at work on this node"}


# -- one conversation


class Channel:
    """Gives the node's output, and keeps what was written."""

    exit_status: int | None = None

    def __init__(self, *lines: bytes | Exception) -> None:
        self.lines = list(lines)
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def read(self, timeout: float) -> bytes:
        line = self.lines.pop(0) if self.lines else b""
        if isinstance(line, Exception):
            raise line
        return line

    def read_stderr(self) -> bytes:
        return b""

    def lost(self) -> ContactLost:
        return ContactLost("the connection broke")

    def close(self) -> None:
        self.is_closed = True


class Node:
    name = "gpu1"
    ssh_line = "ssh gpu1"
    user = "ann"
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
    monkeypatch.setattr(conversation.secrets, "token_hex", lambda _: "abcd")
    return b"@@lamplighter abcd have \n"


def test_lines_of_a_background_job_are_skipped_whatever_json_they_are(marker: bytes) -> None:
    noise = [b"42\n", b"null\n", b'"bye"\n', b'["event"]\n', b"{}\n", b'{"event": 7}\n', b"[" * 99999 + b"\n", b"x\n"]
    channel = Channel(b"welcome\n", marker, *noise, b'{"event": "run", "seq": 1}\n', *noise, b'{"event": "bye"}\n')
    heard: list[Event] = []
    node: Any = Node(channel)
    assert conversation.converse(node, "python3", {}, heard.append) == BYE
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
        conversation.converse(node, "python3", {}, lambda event: None, lambda: sent.append(True))
    assert not sent
    assert "nothing was touched" in caught.value.serving


class DyingNode(Node):
    """Its connection is found dead at the second look: the channels end before it does."""

    looks = 0

    @property
    def is_alive(self) -> bool:  # type: ignore[override]
        self.looks += 1
        return self.looks < 2


@pytest.mark.parametrize("end_of_stream", [b"", NodeRefused("lets us in but runs no commands")])
@pytest.mark.parametrize("exit_status", [None, 3])
def test_a_wire_that_dies_after_the_request_is_no_refusal(
    exit_status: int | None, end_of_stream: bytes | Exception
) -> None:
    channel = Channel(end_of_stream)
    channel.exit_status = exit_status
    node: Any = DyingNode(channel)
    with pytest.raises(ContactLost):
        conversation.converse(node, "python3", {}, lambda event: None)


def test_a_stream_that_ends_without_an_exit_status_is_no_refusal() -> None:
    node: Any = Node(Channel())
    with pytest.raises(ContactLost):
        conversation.converse(node, "python3", {}, lambda event: None)


@pytest.mark.parametrize("end_of_stream", [b"", NodeRefused("lets us in but runs no commands")])
def test_a_login_that_ends_by_itself_is_a_refusal(end_of_stream: bytes | Exception) -> None:
    channel = Channel(end_of_stream)
    channel.exit_status = 3
    node: Any = Node(channel)
    with pytest.raises(NodeRefused):
        conversation.converse(node, "python3", {}, lambda event: None)


def test_silence_of_a_connection_that_stands_is_no_answer() -> None:
    node: Any = Node(Channel(b"Welcome\n", SilenceTimeout("silent")))
    with pytest.raises(NoAnswer) as caught:
        conversation.converse(node, "python3", {}, lambda event: None)
    assert caught.value.why == "the login shell printed: Welcome"


class Flood(Channel):
    """Says the same as long as it is listened to."""

    def __init__(self, piece: bytes) -> None:
        super().__init__()
        self.piece = piece

    def read(self, timeout: float) -> bytes:
        return self.piece


@pytest.mark.parametrize("piece", [b"garbage\n" * 4096, b"garbage\n", b"garbage " * 4096])
def test_a_shell_that_never_stops_printing_is_no_answer(monkeypatch: pytest.MonkeyPatch, piece: bytes) -> None:
    monkeypatch.setattr(conversation, "MARKER_SECONDS", 0.3)
    monkeypatch.setattr(conversation, "LINE_LIMIT", 100_000)
    kept: list[int] = []
    usual = conversation._quote_noise
    monkeypatch.setattr(conversation, "_quote_noise", lambda noise, sent: kept.append(len(noise)) or usual(noise, sent))
    node: Any = Node(Flood(piece))
    with pytest.raises(NoAnswer) as caught:
        conversation.converse(node, "python3", {}, lambda event: None)
    assert caught.value.what == "gpu1 did not start our program within 0 s"
    assert caught.value.why.startswith("the login shell printed: ")
    assert "garbage" in caught.value.why
    assert kept[0] <= 2 * conversation.NOISE_LIMIT


def test_a_line_without_an_end_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "LINE_LIMIT", 100)
    channel: Any = Channel(*[b"x" * 60] * 9, b"\n", b"y\n", b"z")
    lines = conversation._Lines(channel)
    assert [lines.next(1), lines.next(1), lines.next(1)] == [b"x" * 100, b"y", None]


def test_the_request_is_announced_before_its_first_byte_leaves(marker: bytes) -> None:
    channel = Channel(marker, b'{"event": "bye"}\n')
    written: list[int] = []
    node: Any = Node(channel)
    conversation.converse(node, "python3", {}, lambda event: None, lambda: written.append(len(channel.written)))
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
    """Conversations with a node, one after another: each says its events, and may end as an exception does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[bool, tuple[Event | BaseException, ...]]] = []
        self.requests: list[Mapping[str, Any]] = []
        self.heard: list[Event] = []
        self.line = Line()
        host: Any = SimpleNamespace(name="gpu1", root=None, connection=SimpleNamespace(python="python3"))
        node: Any = self.line
        self.session = HostSession(host, node, verify.Path("."))
        monkeypatch.setattr(host_session, "converse", self._converse)
        monkeypatch.setattr(host_session, "RECONNECT_PAUSES", (0.0, 0.0))
        monkeypatch.setattr(HostSession, "prepare", lambda *_: {"verb": "deploy", "run": "R1"})

    def then(self, *said: Event | BaseException, is_sent: bool = True) -> None:
        """Add a conversation; ``is_sent`` says whether its request leaves before it comes to an end."""
        self.steps.append((is_sent, said))

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
        is_sent, said = self.steps.pop(0)
        if is_sent:
            on_sending()
        for each in said:
            if isinstance(each, BaseException):
                raise each
            on_event(each)
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


def test_that_the_node_does_not_know_a_run_proves_nothing(script: Script) -> None:
    script.then(ContactLost("cut"))
    script.then(UNKNOWN)
    script.then(UNKNOWN)
    with pytest.raises(ContactLost) as caught:
        script.run()
    assert "may have begun" in caught.value.serving


def test_a_run_is_forbidden_where_it_was_not_heard_of_and_only_there(script: Script) -> None:
    script.then(ContactLost("cut"))
    script.then(begun(), ContactLost("cut"))
    script.then(end())
    script.run()
    _, first, second = script.requests
    assert (first["verb"], first["to"], first["forbid"]) == ("attach", "R1", {"verb": "deploy", "by": whoever_asks()})
    assert (second["verb"], second["to"], second["after"]) == ("attach", "R1", 1)
    assert "forbid" not in second


def test_silence_after_the_request_is_no_refusal(script: Script) -> None:
    script.then(NoAnswer("did not start"))
    script.then(begun(), end())
    script.run()
    script.then(NoAnswer("did not start", why="the login shell printed: hm"))
    script.then(NoAnswer("did not start", why="the login shell printed: hm"))
    with pytest.raises(ContactLost) as caught:  # each try costs the whole time that the node is given
        script.run()
    assert "may have begun" in caught.value.serving
    assert caught.value.why == "the login shell printed: hm"
    assert not script.steps


def test_silence_after_a_question_is_a_refusal_with_advice(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    def silent(*_: Any) -> Event:
        raise NoAnswer("did not start", next_step="look at what `ssh gpu1 true` does")

    monkeypatch.setattr(host_session, "converse", silent)
    with pytest.raises(NodeRefused) as refused:
        script.session.status(["kimi"])
    assert refused.value.next_step == "look at what `ssh gpu1 true` does"


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


def test_a_cancel_whose_fate_is_not_known_is_sent_again(script: Script) -> None:
    script.then(ContactLost("cut"))
    script.then(begun(7), ContactLost("cut"))
    script.then(end(8))
    script.session.cancel(KIMI, script.heard.append)
    assert [request["verb"] for request in script.requests] == ["cancel"] * 3
    assert len({request["order"] for request in script.requests}) == 1
    assert [(request["to"], request["after"]) for request in script.requests] == [(None, 0), (None, 0), ("R1", 7)]
    assert "forbid" not in script.requests[0]


def test_each_cancel_is_an_order_of_its_own(script: Script) -> None:
    for number in (1, 2):
        script.then(end(number))
        script.session.cancel(KIMI, script.heard.append)
    assert len({request["order"] for request in script.requests}) == 2


def test_a_cancel_that_came_too_late_after_all_says_so(script: Script) -> None:
    script.then(ContactLost("cut"))
    script.then(UNKNOWN)
    with pytest.raises(NoSuchRun):
        script.session.cancel(KIMI, script.heard.append, "R1")


@pytest.mark.parametrize("run", [None, "R1"])
def test_a_cancel_that_may_not_have_arrived_is_not_told_as_one_that_did(script: Script, run: str | None) -> None:
    for _ in range(3):
        script.then(ContactLost("cut"))
    with pytest.raises(ContactLost) as caught:
        script.session.cancel(KIMI, script.heard.append, run)
    assert "is not known" in caught.value.serving
    assert caught.value.next_step == "./inv cancel --host gpu1 --server kimi" + (f" --run {run}" if run else "")


def test_a_cancel_that_arrived_is_followed_like_any_run(script: Script) -> None:
    script.then({"event": events.BEAT}, ContactLost("cut"))
    for _ in range(2):
        script.then(ContactLost("cut"))
    with pytest.raises(ContactLost) as caught:
        script.session.cancel(KIMI, script.heard.append, "R1")
    assert caught.value.serving == "run R1 of server kimi was told to end, and does so by itself on the node"
    assert caught.value.next_step == "./inv attach --host gpu1 --server kimi --run R1"


def test_a_cancel_at_the_terminal_forbids_a_run_that_was_not_heard_of(script: Script) -> None:
    script.then(Interrupted(Exit.INTERRUPTED))
    with pytest.raises(Interrupted):
        script.run()
    assert script.session.under_way is not None
    script.then(end())
    script.session.cancel_or_see_its_end(script.session.under_way)
    assert script.requests[1]["forbid"] == {"verb": "deploy", "by": whoever_asks()}


def test_a_run_that_could_not_be_told_is_not_taken_for_one_that_has_ended(script: Script) -> None:
    script.then({**UNKNOWN, "error": "the node takes no writes", "hint": "make room there"})
    with pytest.raises(NodeRefused) as refused:
        script.session.cancel_or_see_its_end(Follower("gpu1", "kimi", "R1", script.heard.append))
    assert not isinstance(refused.value, NoSuchRun)
    assert (refused.value.serving, refused.value.next_step) == ("the run on server kimi goes on", "make room there")
    assert [request["verb"] for request in script.requests] == ["cancel"]


def test_a_defect_on_the_node_keeps_its_trace(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    bye = {**BYE, "error": "ValueError: x", "trace": "File verbs.py"}
    monkeypatch.setattr(host_session, "converse", lambda *_: bye)
    for ask in (lambda: script.session.status(["kimi"]), lambda: script.session.attach(KIMI, script.heard.append)):
        with pytest.raises(NodeDefect) as caught:
            ask()
        assert caught.value.trace == "File verbs.py"
        assert "File verbs.py" not in str(caught.value)


# -- the checks after a deploy


@pytest.fixture
def verifications(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What each verification gives: its checks, or the error that it raises."""
    steps: list[Any] = []

    def once(*_: Any, **__: Any) -> dict[str, Any]:
        step = steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return {"checks": step}

    monkeypatch.setattr(verify, "verify", once)
    yield steps
    assert not steps


PASSED = {"outcome": "passed", "question": "is it well", "name": "well", "evidence": ""}


def verified(script: Script) -> Fold:
    served = {**end(), "serving": {"release": "d", "pid": 7, "port": 8000, "model": "m", "since": 1.0}}
    fold = folded([{**event, "host": "gpu1", "server": "kimi"} for event in (begun(), served)])
    with contextlib.suppress(Unreachable):
        verify.Verification(verify.Path())(script.session, KIMI, fold, script.heard.append)
    return fold


def test_checks_that_lost_contact_are_made_once_more(script: Script, verifications: list[Any]) -> None:
    verifications += [Unreachable("the wire was cut"), [PASSED]]
    assert verified(script).report().exit_code == Exit.OK
    assert script.line.logins == 1
    told = [event["message"] for event in script.heard if event["event"] == events.WARNING]
    assert told == ["contact lost (the wire was cut); verifying again over a new connection"]
    assert script.heard[-1]["message"] == "1 of 1 checks passed"


@pytest.mark.parametrize(
    ("found", "since"),
    [
        ({"run": None, "pid": 7}, ""),
        ({"run": {"id": "R1"}, "pid": 7}, ""),
        (Unreachable("cut"), ""),
        (
            {"run": {"id": "R2", "verb": "stop", "by": "bob@desk"}, "pid": 7},
            "run R2 (stop, by bob@desk) has begun since",
        ),
        ({"run": None, "pid": 8, "state": "serving"}, "its process 7 is gone, and 8 is in its place"),
    ],
)
def test_checks_that_fail_because_of_another_run_say_so(
    script: Script,
    verifications: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, Any] | LamplighterError,
    since: str,
) -> None:
    def statuses(_: HostSession, servers: Sequence[str], patience: float | None) -> dict[str, Any]:
        if isinstance(found, LamplighterError):
            raise found
        return dict.fromkeys(servers, found)

    monkeypatch.setattr(HostSession, "statuses", statuses)
    verifications.append([PASSED, {**PASSED, "outcome": "failed", "name": "token", "evidence": "no answer"}])
    part = verified(script).report().hosts["gpu1"].servers["kimi"]
    told = f"it served when this run ended, but {since}; " if since else "serving, but "
    assert part.message == f"{told}1 of 2 checks failed: token"
    assert (part.exit_code, part.evidence) == (Exit.DEGRADED, "no answer")
    assert part.hint.startswith("./inv verify --host gpu1 --server kimi")
    assert ("once nothing else is at work" in part.hint) == ("has begun since" in since)


@pytest.mark.parametrize("state", ["stopped", "starting", "unknown"])
def test_a_server_that_died_while_it_was_checked_is_no_degraded_one(
    script: Script, verifications: list[Any], monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    found = {"run": None, "pid": None, "state": state, "message": "its process ended: killed by SIGKILL"}
    monkeypatch.setattr(HostSession, "statuses", lambda _, servers, patience: dict.fromkeys(servers, found))
    verifications.append([{**PASSED, "outcome": "failed", "name": "token", "evidence": "no answer"}])
    part = verified(script).report().hosts["gpu1"].servers["kimi"]
    assert (part.outcome, part.exit_code, part.serving) == ("failed", Exit.CRASHED, None)
    assert "serves no more: its process ended: killed by SIGKILL; 1 of 1 checks failed: token" in part.message
    assert part.hint.startswith("./inv start --host gpu1 --server kimi brings it back; ./inv releases ")


SILENT = {
    **PASSED,
    "outcome": "failed",
    "name": "model_answers",
    "evidence": "no answer within 60 s",
    "is_of_serving": True,
}


@pytest.mark.parametrize(
    ("found", "code", "says"),
    [
        ({"run": None, "pid": 7, "state": "unknown", "message": "it does not answer a question"}, Exit.NOT_READY,
         "its process is alive, and it does not serve: it does not answer a question; 1 of 2 checks failed"),
        (Unreachable("cut"), Exit.NOT_READY, "and it does not serve: no answer within 60 s; 1 of 2 checks failed"),
        ({"run": None, "pid": None, "state": "stopped"}, Exit.CRASHED, "serves no more"),
        ({"run": None, "pid": 7, "state": "serving"}, Exit.DEGRADED, "asked once more it answers, but 1 of 2"),
    ],
)  # fmt: skip
def test_a_server_that_does_not_answer_is_never_told_as_serving(
    script: Script,
    verifications: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    found: dict[str, Any] | LamplighterError,
    code: Exit,
    says: str,
) -> None:
    asked = []

    def statuses(_: HostSession, servers: Sequence[str], patience: float | None) -> dict[str, Any]:
        asked.append(patience)
        if isinstance(found, LamplighterError):
            raise found
        return dict.fromkeys(servers, found)

    monkeypatch.setattr(HostSession, "statuses", statuses)
    verifications.append([PASSED, SILENT])
    report = verified(script).report()
    part = report.hosts["gpu1"].servers["kimi"]
    assert (part.exit_code, asked) == (code, [None])
    assert says in part.message
    if code != Exit.DEGRADED:
        assert (part.outcome, part.serving) == ("failed", None)
        assert "NOTHING IS SERVING" in summary(report)[0]


def test_an_error_within_a_check_is_no_word_about_serving() -> None:
    checks = [
        SILENT,
        {**SILENT, "outcome": "error"},
        {**SILENT, "outcome": "warning"},
        {**SILENT, "is_of_serving": False},
    ]
    codes = [verify.judge_checks({"checks": [each]}) for each in checks]
    assert codes == [Exit.NOT_READY, Exit.DEGRADED, Exit.OK, Exit.DEGRADED]


def test_checks_that_lose_contact_twice_are_given_up(script: Script, verifications: list[Any]) -> None:
    verifications += [Unreachable("the wire was cut"), Unreachable("the wire was cut")]
    verified(script)
    assert script.line.logins == 1
