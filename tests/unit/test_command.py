"""From what happens at each host to report and exit code: interruptions, defects, lost contact; no node is asked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from invoke.exceptions import Exit as Leave

from lamplighter.errors import ContactLost, Unreachable, UsageError
from lamplighter.inventory.values import Origin, SecretRef
from lamplighter.node import events
from lamplighter.node.events import Event, Exit
from lamplighter.run import command, watching
from lamplighter.run.command import Interrupted, Settings
from lamplighter.run.host_session import Follower, NodeDefect, detached
from tests.driver import signals_as_before

QUIET = Settings(Path("inventory"), as_json=True)


class Session:
    """An open connection, as far as a command sees it."""

    def __init__(self, host: Any) -> None:
        self.host = host
        self.under_way: Follower | None = None
        self.seconds_on_node = 0.0

    def begin(self, server: Any, is_heard_of: bool = True) -> None:
        """Have a run under way that has no end."""
        self.under_way = Follower(self.host.name, server.name, "R1", lambda event: None, int(is_heard_of))


Deed = Callable[[Session, Any, Callable[[Event], None]], None]


class Hosts:
    """The hosts that a command chooses, and which of them hang until Ctrl-C or TERM comes."""

    def __init__(self) -> None:
        self.chosen: list[tuple[Any, list[Any]]] = []
        self.silent: set[str] = set()

    def add(self, name: str, *servers: str) -> None:
        self.chosen.append((SimpleNamespace(name=name), [SimpleNamespace(name=server) for server in servers]))

    def choose(self, settings: Any, patterns: Any, server: Any, before: Any = None) -> list[tuple[Any, list[Any]]]:
        if not self.chosen:
            raise Interrupted(Exit.INTERRUPTED)
        if before is not None:
            before(self.chosen)
        return self.chosen

    @contextlib.contextmanager
    def open(self, host: Any, *_: Any) -> Iterator[Session]:
        if host.name in self.silent:
            os.kill(os.getpid(), signal.SIGTERM)
        yield Session(host)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    made = Hosts()
    monkeypatch.setattr(command, "choose", made.choose)
    monkeypatch.setattr(command, "reach", made.choose)
    monkeypatch.setattr(command, "_lint", lambda settings, chosen: None)  # these servers have nothing but a name
    monkeypatch.setattr(command, "open_session", made.open)
    monkeypatch.setattr(command, "begin_session", made.open)
    with signals_as_before():
        yield made


@pytest.fixture
def act(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Do a deed to all hosts: the report, whose code is the command's."""

    def do(deed: Any, afterwards: Any = None, settings: Settings = QUIET) -> Any:
        with pytest.raises(Leave) as left:
            command.act(settings, ["all"], None, deed, afterwards)
        told = json.loads(capsys.readouterr().out.splitlines()[-1])["report"]
        assert told["exit_code"] == left.value.code
        return told

    return do


def stopped(session: Session, server: Any, listen: Callable[[Event], None]) -> None:
    end = events.ended("stopped", Exit.OK, "stopped")
    listen({**end, "host": session.host.name, "server": server.name, "run": "R0", "seq": 1})


def codes(report: Any) -> dict[str, int]:
    return {
        f"{host}/{name}": server["exit_code"]
        for host, each in report["hosts"].items()
        for name, server in each["servers"].items()
    }


def test_who_was_not_reached_before_term_is_in_the_report(hosts: Hosts, act: Callable[..., Any]) -> None:
    hosts.add("gpu1", "kimi")
    hosts.add("silent", "kimi", "other")
    hosts.add("gpu3", "kimi")
    hosts.silent.add("silent")
    report = act(stopped)
    assert codes(report) == {"gpu1/kimi": 0, "silent/kimi": 143, "silent/other": 143, "gpu3/kimi": 143}
    assert report["exit_code"] == Exit.MIXED
    assert report["hosts"]["gpu3"]["servers"]["kimi"]["message"] == "interrupted; nothing was touched"


def test_interrupted_before_anything_was_touched_is_130_or_143(hosts: Hosts, act: Callable[..., Any]) -> None:
    told = act(stopped)
    assert (told["exit_code"], told["error"]["message"]) == (130, "interrupted; nothing was touched")
    hosts.add("silent", "kimi")
    hosts.silent.add("silent")
    assert codes(act(stopped)) == {"silent/kimi": 143}


def test_a_host_that_has_an_error_of_its_own_keeps_it(hosts: Hosts, act: Callable[..., Any]) -> None:
    hosts.add("down", "kimi")
    hosts.add("silent", "kimi")
    hosts.silent.add("silent")
    usual = hosts.open

    @contextlib.contextmanager
    def open_session(host: Any, *rest: Any) -> Iterator[Session]:
        if host.name == "down":
            raise Unreachable("no route")
        with usual(host, *rest) as session:
            yield session

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command, "open_session", open_session)
        report = act(stopped)
    assert codes(report) == {"silent/kimi": 143}
    assert report["hosts"]["down"]["error"]["exit_code"] == Exit.UNREACHABLE


@pytest.mark.parametrize("is_heard_of", [True, False])
def test_a_run_that_goes_on_is_13_and_the_rest_was_not_touched(
    hosts: Hosts, act: Callable[..., Any], is_heard_of: bool
) -> None:
    hosts.add("gpu1", "kimi", "other")
    hosts.add("gpu2", "kimi")

    def deed(session: Session, server: Any, listen: Any) -> None:
        session.begin(server, is_heard_of)
        raise Interrupted(Exit.TERMINATED)

    report = act(deed)
    assert codes(report) == {"gpu1/kimi": 13, "gpu1/other": 143, "gpu2/kimi": 143}
    hint = report["hosts"]["gpu1"]["servers"]["kimi"]["hint"]
    assert hint == "./inv attach --host gpu1 --server kimi --run R1"


def test_a_run_of_which_nothing_was_heard_is_not_said_to_go_on() -> None:
    unheard = Follower("gpu1", "kimi", "R1", lambda event: None)
    assert "run R1 of server kimi may have begun" in detached(unheard).serving
    unheard({"event": "run", "run": "R1", "seq": 1})
    assert detached(unheard).serving == "run R1 of server kimi goes on by itself on the node"


def test_after_lost_contact_the_other_servers_of_the_host_are_told_as_not_attempted(
    hosts: Hosts, act: Callable[..., Any]
) -> None:
    hosts.add("gpu1", "kimi", "other", "third")
    hosts.add("gpu2", "kimi")

    def deed(session: Session, server: Any, listen: Any) -> None:
        if session.host.name == "gpu1":
            assert server.name == "kimi"
            raise ContactLost("the wire was cut")
        stopped(session, server, listen)

    report = act(deed)
    assert codes(report) == {"gpu1/kimi": 13, "gpu1/other": 4, "gpu1/third": 4, "gpu2/kimi": 0}
    assert report["hosts"]["gpu1"]["servers"]["other"]["message"] == "gpu1: not attempted"


def test_a_defect_of_ours_does_not_end_the_run_on_the_node(hosts: Hosts, act: Callable[..., Any]) -> None:
    hosts.add("gpu1", "kimi", "other")

    def deed(session: Session, server: Any, listen: Any) -> None:
        session.begin(server)
        raise TypeError("odd")

    report = act(deed)
    assert codes(report) == {"gpu1/kimi": 13, "gpu1/other": 4}
    part = report["hosts"]["gpu1"]["servers"]["kimi"]
    assert part["message"] == "unforeseen TypeError: odd"
    assert part["hint"] == "./inv attach --host gpu1 --server kimi --run R1"


def test_a_defect_before_the_run_is_told_of_its_server_and_the_rest_goes_on(
    hosts: Hosts, act: Callable[..., Any]
) -> None:
    hosts.add("gpu1", "kimi", "other")

    def deed(session: Session, server: Any, listen: Any) -> None:
        if server.name == "kimi":
            raise TypeError("odd")
        stopped(session, server, listen)

    assert codes(act(deed)) == {"gpu1/kimi": 1, "gpu1/other": 0}


# -- a person at a terminal


@pytest.fixture
def cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_is_a_person_there", lambda: True)
    monkeypatch.setattr(command, "_wants_to_cancel", lambda run: True)


@pytest.mark.usefixtures("cancels")
@pytest.mark.parametrize("trouble", [Unreachable("cut"), ContactLost("cut"), KeyError("odd")])
def test_whoever_could_not_be_asked_to_cancel_goes_on(
    hosts: Hosts, act: Callable[..., Any], trouble: Exception
) -> None:
    hosts.add("gpu1", "kimi")
    hosts.add("gpu2", "kimi")

    def deed(session: Any, server: Any, listen: Any) -> None:
        def cancel(run: Follower) -> None:
            raise trouble

        session.begin(server, is_heard_of=False)
        session.cancel_or_see_its_end = cancel
        raise Interrupted(Exit.INTERRUPTED)

    assert codes(act(deed)) == {"gpu1/kimi": 13, "gpu2/kimi": 130}


@pytest.mark.usefixtures("cancels")
@pytest.mark.parametrize("is_heard", [True, False])
def test_a_run_that_is_left_while_it_is_cancelled_is_not_said_to_go_on(
    hosts: Hosts, act: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, is_heard: bool
) -> None:
    told: list[str] = []
    tell = command._tell
    monkeypatch.setattr(command, "_tell", lambda *words: told.append(str(words[2])) or tell(*words))
    hosts.add("gpu1", "kimi")

    def deed(session: Any, server: Any, listen: Any) -> None:
        def cancel(run: Follower) -> None:
            if is_heard:
                run({"event": events.BEAT})
            os.kill(os.getpid(), signal.SIGINT)

        session.begin(server)
        session.cancel_or_see_its_end = cancel
        raise Interrupted(Exit.INTERRUPTED)

    report = act(deed)
    assert codes(report) == {"gpu1/kimi": Exit.DETACHED}
    part = report["hosts"]["gpu1"]["servers"]["kimi"]
    verb = "attach" if is_heard else "cancel"
    assert part["hint"] == f"./inv {verb} --host gpu1 --server kimi --run R1"
    fate = (
        "run R1 of server kimi was told to end, and does so" if is_heard else "is not known; if it was not, it goes on"
    )
    assert fate in told[0]


# -- signals


class Listening:
    """A reporter that keeps how Ctrl-C and TERM would be taken while it speaks."""

    def __init__(self) -> None:
        self.found: list[set[Any]] = []
        self.before: list[set[Any]] = []

    def event(self, event: Any) -> None:
        pass

    def error(self, *_: Any) -> None:
        self.found.append({signal.getsignal(number) for number in command.SIGNALS})

    def close(self, report: Any) -> None:
        self.error()
        if report is None:
            self.before.append(self.found.pop())


@pytest.mark.parametrize("number", command.SIGNALS)
def test_once_a_run_is_left_alone_no_other_signal_changes_the_exit_code(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    reporter = Listening()
    monkeypatch.setattr(command, "reporter_for", lambda *_: reporter)
    hosts.add("gpu1", "kimi")

    def deed(session: Any, server: Any, listen: Any) -> None:
        session.begin(server)
        os.kill(os.getpid(), number)

    with pytest.raises(Leave) as left:
        command.act(QUIET, ["all"], None, deed)  # type: ignore[arg-type]
    assert left.value.code == Exit.DETACHED
    assert reporter.before == [{signal.SIG_IGN}]  # timeout(1) sends two at once
    assert reporter.found == [{signal.SIG_IGN}] * 2  # of the run, and of the report
    os.kill(os.getpid(), number)


def test_the_report_of_a_run_that_ended_is_written_whatever_signal_comes(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Listening()
    monkeypatch.setattr(command, "reporter_for", lambda *_: reporter)
    hosts.add("gpu1", "kimi")
    with pytest.raises(Leave) as left:
        command.act(QUIET, ["all"], None, stopped)  # type: ignore[arg-type]
    assert left.value.code == Exit.OK
    assert reporter.found == [{signal.SIG_IGN}]


def test_a_reading_task_leaves_the_signals_as_they_were(hosts: Hosts) -> None:
    before = [signal.getsignal(number) for number in command.SIGNALS]
    with pytest.raises(Leave), command.guarded(QUIET):
        raise UsageError("no")
    assert [signal.getsignal(number) for number in command.SIGNALS] == before


# -- tasks that read


def read(question: Any, text: Any = str, settings: Settings = QUIET) -> Any:
    with pytest.raises(Leave) as left:
        command.read(settings, ["all"], None, "status", question, text)
    return left.value.code


def answer(_: Any, servers: Sequence[Any]) -> dict[str, Any]:
    return {server.name: {} for server in servers}


def test_a_defect_while_one_host_is_read_is_told_of_that_host(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    hosts.add("gpu1", "kimi")
    hosts.add("gpu2", "kimi")

    def question(session: Session, servers: Sequence[Any]) -> dict[str, Any]:
        if session.host.name == "gpu1":
            raise KeyError("odd")
        return answer(session, servers)

    assert read(question) == Exit.MIXED
    said = capsys.readouterr()
    told = json.loads(said.out)["status"]["hosts"]
    assert told["gpu2"] == {"servers": {"kimi": {}}}
    assert told["gpu1"]["exit_code"] == 1
    assert "unforeseen KeyError: 'odd'" in told["gpu1"]["error"]
    assert "this is a defect of lamplighter" in said.err
    assert "Traceback" not in said.err


def test_a_defect_in_telling_what_was_read_has_no_traceback_unless_asked_for(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts.add("gpu1", "kimi")

    def text(_: Any) -> str:
        raise KeyError("odd")

    for debug in (False, True):
        assert read(answer, text, Settings(Path("inventory"), debug=debug)) == Exit.INTERNAL
        said = capsys.readouterr()
        assert "this is a defect of lamplighter" in said.err
        assert ("Traceback" in said.err) == debug


@pytest.mark.parametrize(("error", "code"), [(UsageError("no such word"), 2), (KeyError("odd"), 1)])
def test_what_keeps_a_task_from_its_work_is_a_report_in_json(
    hosts: Hosts, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    with pytest.raises(Leave) as left, command.guarded(QUIET):
        raise error
    assert left.value.code == code
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["exit_code"] == told["report"]["exit_code"] == told["report"]["error"]["exit_code"] == code
    assert told["report"]["hosts"] == {}


def test_a_value_of_wait_that_is_none_ends_with_the_report(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Leave):
        command.run(QUIET, ["all"], None, "deploy", "foo")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["report"]
    assert (told["exit_code"], told["error"]["message"]) == (2, "--wait: 'foo' is no duration")


def test_a_deploy_without_a_secret_of_one_server_reaches_no_host(
    hosts: Hosts, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    monkeypatch.setattr(command, "open_session", lambda *_: pytest.fail("a host was reached"))
    for name, secrets in {"a": {}, "b": {"T": "env:NO_SUCH"}, "c": {"T": "file:/no/such"}}.items():
        found = {key: SecretRef(*said.split(":"), Origin(f"{name}.yml", 3)) for key, said in secrets.items()}
        server = SimpleNamespace(name="s", secrets=found, args={}, extra_args=())
        hosts.chosen.append((SimpleNamespace(name=name), [server]))
    with pytest.raises(Leave):
        command.run(QUIET, ["all"], None, "deploy", "0")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["report"]
    assert told["exit_code"] == 2
    first, second = told["error"]["message"].splitlines()
    assert first.startswith("b.yml:3: servers.s.secrets.T: !secret env:NO_SUCH")
    assert second.startswith("c.yml:3: servers.s.secrets.T: !secret file:/no/such")


# -- a terminal that is closed


@pytest.fixture
def hung_up(hosts: Hosts) -> Iterator[Callable[..., None]]:
    """A deed during whose run the terminal is closed."""

    def deed(session: Session, server: Any, listen: Callable[[Event], None]) -> None:
        session.begin(server)
        os.kill(os.getpid(), signal.SIGHUP)
        stopped(session, server, listen)

    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield deed
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_closed_detaches(
    hosts: Hosts, act: Callable[..., Any], hung_up: Callable[..., None]
) -> None:
    hosts.add("gpu1", "kimi")
    hosts.add("gpu2", "kimi")
    report = act(hung_up)
    assert codes(report) == {"gpu1/kimi": Exit.DETACHED, "gpu2/kimi": Exit.TERMINATED}
    assert report["hosts"]["gpu1"]["servers"]["kimi"]["hint"] == "./inv attach --host gpu1 --server kimi --run R1"


def test_under_nohup_nothing_is_heard_of_a_terminal(
    hosts: Hosts, act: Callable[..., Any], hung_up: Callable[..., None]
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hosts.add("gpu1", "kimi")
    assert codes(act(hung_up)) == {"gpu1/kimi": Exit.OK}


def test_a_stderr_that_takes_nothing_is_no_reason_to_end_otherwise(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)
        with pytest.raises(Leave) as left:
            command.read(QUIET, [], None, "status", lambda *_: {}, str)
        assert left.value.code == Exit.INTERRUPTED
        with contextlib.suppress(OSError):
            full.close()


# -- a defect of the node side


def fail_on_the_node(*_: Any) -> Any:
    raise NodeDefect("gpu1: our program on the node failed", why="ValueError: x", next_step="", trace="File verbs.py")


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize(
    "task",
    [
        lambda settings: command.act(settings, ["all"], None, fail_on_the_node),
        lambda settings: command.read(settings, ["all"], None, "status", fail_on_the_node, str),
    ],
)
def test_the_trace_of_a_defect_on_the_node_is_for_those_who_want_it(
    hosts: Hosts, capsys: pytest.CaptureFixture[str], debug: bool, task: Any
) -> None:
    hosts.add("gpu1", "kimi")
    settings = Settings(Path("inventory"), debug=debug, as_json=True)
    with pytest.raises(Leave) as left:
        task(settings)
    assert left.value.code == Exit.INTERNAL
    said = capsys.readouterr()
    assert ("File verbs.py" in said.err) == debug
    assert "File verbs.py" not in said.out


# -- a stdout that takes nothing


@pytest.mark.parametrize("as_json", [True, False])
def test_a_watch_ends_quietly_where_there_is_no_stdout(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setattr(command, "reach", lambda *_, **__: [])
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(Leave) as left:
        watching.watch(Settings(Path("inventory"), as_json=as_json), ["all"], None, "1h")
    assert (left.value.code, left.value.message) == (Exit.OK, None)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_a_watch_on_a_full_disk_says_so(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    monkeypatch.setattr(command, "reach", lambda *_, **__: [])
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(Leave) as left:
            watching.watch(Settings(Path("inventory"), as_json=as_json), ["all"], None, "1h")
    assert (left.value.code, left.value.message) == (
        Exit.INTERNAL,
        "stdout cannot be written: No space left on device",
    )
