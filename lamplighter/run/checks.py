"""Runs check files: ordinary pytest, here, whose testinfra ``host`` asks over a connection that is open already.

In a process of its own (`main`, begun by `lamplighter.run.inspection`): what a check does to the process that it runs
in, it does to that one alone.

A check file gets five fixtures: testinfra's ``host``; ``server``, what the inventory says of it; ``facts``, all that
one question to the node's program brings back; ``limits``, the thresholds; and ``evidence``, to say what a passing
check saw. A function under ``@asked`` is a fixture that asks ``host``: those of all checks travel together.
Checks lie in ``roles/node/checks``, ``roles/<engine>/checks`` and ``inventory/checks``.

A check is a *blocker* (it fails: exit 8) unless it is marked ``@pytest.mark.warning`` or the inventory says otherwise:
``checks: {NAME: blocker | warning | off}``, with the name of its function without ``test_``. A number there is a
threshold. Its docstring's first line is the question that people read. Where one marked ``@pytest.mark.serving`` fails,
the server does not serve (exit 7).

No check may be lost without a word: a file that cannot be read or a check that hangs is an error of its own, and the
others run all the same; where one ends the session, the error names those that were not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import io
import json
import os
import re
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import pytest

from lamplighter.errors import UsageError
from lamplighter.project import PROJECT
from lamplighter.run.backend import NoAnswer, Said, Way, ask_together, host_on, together
from lamplighter.run.outcome import (
    ERROR,
    HOST,
    NODE,
    OVERDUE,
    SKIPPED,
    CheckResult,
    Collected,
    unfinished,
    unreadable,
)

EVIDENCE_LENGTH = 1000

__all__ = ["ask_tool", "asked", "mode_of", "text_of", "together"]  # for check files

#: What pytest only warns of: a class or a function that it passes over, and checks that can never fail.
LOST = ("PytestCollectionWarning", "PytestAssertRewriteWarning", "PytestReturnNotNoneWarning")

INI = PROJECT / "roles" / "checks.ini"

Facts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ServerUnderCheck:
    """What a check may ask about the server: the inventory's words, and where the node keeps it.

    ``engine`` is its role's engine.yml, ``argv`` its command line. ``directory`` (``<root>/servers/<name>`` on the
    node), ``release`` and ``pid`` (0: none) come from the facts.
    """

    name: str
    engine: Mapping[str, Any]
    model: str
    served_name: str
    host: str
    port: int
    gpus: str | tuple[int | str, ...]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ask_facts: Callable[[], Facts]
    tls: str = "none"

    @property
    def directory(self) -> str:
        return str(self.ask_facts()["directory"])

    @property
    def release(self) -> str:
        return str(self.ask_facts()["server"].get("release") or "")

    @property
    def pid(self) -> int:
        return int(self.ask_facts()["server"].get("pid") or 0)

    @property
    def is_running(self) -> bool:
        return self.pid > 0

    @property
    def gpu_count(self) -> int:
        """How many GPUs it uses."""
        return len(self.ask_facts()["wanted"]["uuids"])


class Limits(Mapping[str, Any]):
    """The thresholds of a server's checks; a check that asks for one that nobody has set is an error of its role."""

    def __init__(self, values: Mapping[str, Any], used: Iterable[str] = ()) -> None:
        self._values = values
        self.used: set[str] = set(used)

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        if name not in self._values:
            raise KeyError(f"checks.{name} is not set")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Overdue(BaseException):
    """A check took too long; not an Exception, which a check in a loop might catch."""


def ask_tool(host: Any, command: str, *args: str) -> str:
    """Return what a tool of the node prints; skip the check, with the reason, where it is missing or cannot tell.

    For check files. One round trip.
    """
    done = host.run(command, *args)
    name = command.split(maxsplit=1)[0]
    if done.rc == 127:
        pytest.skip(f"{name} is not on the node")
    if done.rc != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        pytest.skip(f"{name} cannot tell (exit status {done.rc}): {said[-1] if said else 'no word'}")
    return str(done.stdout)


def text_of(file: Any) -> str | None:
    """Return what a file of the node holds; None where it is not there, or may not be read. For check files."""
    try:
        return str(file.content_string)
    except (RuntimeError, AssertionError):
        return None


def mode_of(file: Any) -> str | None:
    """Return the mode of a file of the node, in four digits; None where it is not there. For check files."""
    try:
        return f"{file.mode:04o}"
    except AssertionError:
        return None


def asked(question: Callable[..., Any]) -> Any:
    """Make a fixture of ``question``, which asks ``host`` and returns what a check wants to know.

    Its arguments are of ``host``, ``server``, ``facts`` and ``limits``. It may be begun several times, so it only asks:
    the questions of all chosen checks are asked together, in a few round trips, and each once. An assertion that fails
    in there, or a skip, is that of the check which has the fixture.
    """

    def answer(_answers: _Answers) -> Any:
        return _answers.to(question)

    answer.__name__, answer.__doc__, answer.__module__ = question.__name__, question.__doc__, question.__module__
    answer.question = question  # type: ignore[attr-defined]
    return pytest.fixture(scope="session")(answer)


@dataclasses.dataclass(frozen=True)
class Order:
    """What is to be run: the check files below ``directories``, for one server.

    ``levels`` and ``limits`` are the inventory's ``checks``; ``thresholds`` name those that roles set. ``only`` is a
    pytest ``-k`` expression. ``done`` are checks (by node id), ``unread`` files that are to be passed over, since an
    earlier process has told of them; ``used`` are thresholds that were asked for there.
    """

    server: Mapping[str, Any]
    directories: tuple[str, ...]
    levels: Mapping[str, str]
    limits: Mapping[str, Any]
    thresholds: tuple[str, ...] = ()
    only: str = ""
    done: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    used: tuple[str, ...] = ()


class NodeSide(Way, Protocol):
    """What checks reach of the node."""

    def connect(self) -> Mapping[str, Said | NoAnswer]:
        """Wait until the node can be asked; return what came of commands that were run ahead."""

    def facts(self) -> Facts:
        """Ask the node's program all that it knows."""

    def tell(self, what: str, *said: Any) -> None:
        """Take down how far the checks are."""


def run_checks(node: NodeSide, order: Order) -> list[CheckResult]:
    """Run the check files of ``order`` with these fixtures; return what each found.

    ``node.connect`` is called when all checks are collected: a login may travel until then. Raises UsageError for an
    ``only`` that is no expression.
    """
    directories = [Path(directory) for directory in order.directories]
    limits = Limits(order.limits, order.used)
    fixtures = _Fixtures(node, order, limits)
    alarm = _Alarm(float(limits[OVERDUE]))
    collector = _Collector(order, node, fixtures, directories, alarm)
    words = [
        *("-c", str(INI), "--rootdir", "/", "--import-mode=importlib"),  # modules are named by their path from there
        # testinfra's own `host` fixture would win, and test the control machine; other plugins are not ours to run
        *("--disable-plugin-autoload", "-p", "no:pytest11.testinfra", "-p", "no:testinfra.plugin"),
        *("-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:faulthandler"),
        *("--continue-on-collection-errors", *(f"-Werror::pytest.{name}" for name in LOST)),
        *((f"-k={order.only}",) if order.only else ()),
        *(f"--ignore={path}" for path in order.unread),
        *map(str, directories),
    ]
    with _quiet() as said:
        try:
            status: int = pytest.main(words, plugins=[fixtures, collector, alarm])
        except (Exception, SystemExit, Overdue) as error:  # a conftest.py that leaves, a check that breaks pytest
            status, collector.ending = pytest.ExitCode.INTERNAL_ERROR, _place_of(error, directories)
    if status == pytest.ExitCode.USAGE_ERROR and order.only and collector.is_collected:
        raise UsageError(
            f"no expression that pytest -k understands: {order.only}", next_step='write "gpu and not memory"'
        )
    results = collector.results
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        why = collector.ending or _last_line(said.getvalue()) or f"pytest ended with {status!r}"
        results += [unfinished(why, collector.not_run())]
    elif not results and not order.done and not order.unread:
        why = f"no check is chosen by {order.only}" if order.only else "there is no check"
        results += [CheckResult("checks", "did any check run", "blocker", ERROR, why, 0.0)]
    return results + ([] if order.only else _unknown_names(order.levels, limits, collector, order.thresholds))


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    """Let nothing of pytest's reach our output, nor the options of a pytest around us reach it; yield what it says."""
    kept = {name: os.environ.pop(name) for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS") if name in os.environ}
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield said
    finally:
        os.environ.update(kept)


def _place_of(error: BaseException, directories: Sequence[Path]) -> str:
    """Say what ended pytest, and which line of a check file did it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if any(Path(each.filename).is_relative_to(place) for place in directories)]
    place = f"{ours[-1].filename}, line {ours[-1].lineno}: " if ours else ""
    return f"{place}{_last_line(traceback.format_exception_only(error)[-1])}"


def _unknown_names(
    levels: Mapping[str, str], limits: Limits, collector: _Collector, roles: Iterable[str]
) -> list[CheckResult]:
    """Names of the inventory that no check bears and no check asked for: a typing mistake would switch nothing off."""
    thresholds = {OVERDUE, *roles}
    known = collector.names | thresholds | limits.used
    wrong = sorted(({*levels} - collector.names) | ({*limits} - thresholds - limits.used))
    found = []
    for name in wrong:
        near = difflib.get_close_matches(name, known, n=1)
        said = f"checks.{name}: no check of this name" + (f"; did you mean {near[0]}?" if near else "")
        if name in known:
            said = f"checks.{name}: is " + (
                f"a check: blocker, warning or off; found {limits[name]}" if name in limits else "a threshold: a number"
            )
        found.append(CheckResult(name, "is every name under checks known", "blocker", ERROR, said, 0.0))
    return found


class _Fixtures:
    """The fixtures of a check file, and the answers to the questions of all."""

    def __init__(self, node: NodeSide, order: Order, limits: Limits) -> None:
        self._node = node
        self._host = host_on(node)
        self._facts: Facts | None = None
        said: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in order.server.items()
        }
        self._server = ServerUnderCheck(**said, ask_facts=self._ask_facts)
        self._limits = limits
        self._answered = _Answers({})

    def _ask_facts(self) -> Facts:
        if self._facts is None:
            self._facts = self._node.facts()
        return self._facts

    def ask_together(self, questions: Iterable[Callable[..., Any]], known: Mapping[str, Said | NoAnswer]) -> None:
        """Ask all ``questions`` before the first check runs; what is ``known`` is not asked."""
        whole = {functools.partial(self._ask, question): question for question in dict.fromkeys(questions)}
        found = ask_together(whole, self._node, known)
        self._answered = _Answers({whole[asked]: answer for asked, answer in found.items()})  # type: ignore[index]

    def _ask(self, question: Callable[..., Any], host: Any) -> Any:
        known: dict[str, Callable[[], Any]] = {
            "host": lambda: host,
            "server": lambda: self._server,
            "facts": self._ask_facts,
            "limits": lambda: self._limits,
        }
        return question(**{name: known[name]() for name in inspect.signature(question).parameters})

    @pytest.fixture(scope="session")
    def host(self) -> Any:
        return self._host

    @pytest.fixture(scope="session")
    def server(self) -> ServerUnderCheck:
        return self._server

    @pytest.fixture(scope="session")
    def facts(self) -> Facts:
        return self._ask_facts()

    @pytest.fixture(scope="session")
    def limits(self) -> Mapping[str, Any]:
        return self._limits

    @property
    def used(self) -> set[str]:
        """The thresholds that were asked for."""
        return self._limits.used

    @pytest.fixture(scope="session")
    def _answers(self) -> _Answers:
        return self._answered

    @pytest.fixture
    def evidence(self, record_property: Callable[[str, object], None]) -> Callable[[object], None]:
        return lambda text: record_property("evidence", text)


@dataclasses.dataclass(frozen=True)
class _Answers:
    """What came of each question."""

    found: Mapping[Callable[..., Any], Callable[[], Any]]

    def to(self, question: Callable[..., Any]) -> Any:
        return self.found[question]()


class _Alarm:
    """Ends a check that does not end by itself. A signal does it: nothing else gets through to a loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @pytest.hookimpl(wrapper=True)
    def _within_time(self) -> Iterator[None]:
        with self.set():
            return (yield)

    pytest_load_initial_conftests = pytest_make_collect_report = _within_time
    pytest_runtest_setup = pytest_runtest_call = _within_time

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        """Raise Overdue here after the time for one check."""
        if threading.current_thread() is not threading.main_thread():  # no signal would come here
            yield
            return
        before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        raise Overdue(f"it did not end within {self._seconds:g} s (checks.{OVERDUE})")


class _Collector:
    """Takes down every check's result, at the level that the inventory gives it."""

    def __init__(
        self, order: Order, node: NodeSide, fixtures: _Fixtures, directories: Sequence[Path], alarm: _Alarm
    ) -> None:
        self._order = order
        self._node = node
        self._fixtures = fixtures
        self._directories = directories
        self._alarm = alarm
        self._known: dict[str, Collected] = {}  # by node id
        self._told: set[str] = set()
        self.names: set[str] = set()
        self.results: list[CheckResult] = []
        self.is_collected = False
        self.ending = ""

    def not_run(self) -> list[str]:
        """The names of the checks of which nothing was told."""
        return [known.name for node_id, known in self._known.items() if node_id not in self._told]

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> None:
        """Keep out the conftest.py of a repository that the inventory lies in: it is about that one's own tests."""

        def is_ours(path: Path) -> bool:
            return any(path.is_relative_to(directory) for directory in self._directories)

        early_config.pluginmanager._is_in_confcutdir = is_ours  # type: ignore[method-assign]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.is_collected = True
        chosen, off = [], []
        for item in items:
            function = getattr(item, "originalname", None) or item.name
            name = function.removeprefix("test_")
            self.names.add(name)
            level = self._order.levels.get(name) or ("warning" if item.get_closest_marker("warning") else "blocker")
            said = (getattr(getattr(item, "obj", None), "__doc__", None) or "").strip().splitlines()
            parameters = item.name[len(function) :]
            question = f"{said[0]} {parameters}".strip() if said else f"{name.replace('_', ' ')}{parameters}"
            is_of_serving = item.get_closest_marker("serving") is not None
            known = Collected(name, question, level, is_of_serving, _witness(item))
            if item.nodeid in self._order.done:
                off.append(item)
                continue
            self._known[item.nodeid] = known
            if level == "off":
                off.append(item)
                self._take(item.nodeid, known.result(SKIPPED, "off in the inventory"))
            elif self._asks_another_host(item):
                off.append(item)
                said_why = "its file or a conftest.py has a `host` fixture of its own: it would test another machine"
                self._take(item.nodeid, known.result(ERROR, said_why))
            else:
                chosen.append(item)
        if off:
            items[:] = chosen
            config.hook.pytest_deselected(items=off)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Forget what -k has left out: it is not missing."""
        chosen = {item.nodeid for item in session.items} | self._told
        self._known = {node_id: known for node_id, known in self._known.items() if node_id in chosen}
        self._node.tell("known", {node_id: dataclasses.astuple(known) for node_id, known in self._known.items()})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        known = self._node.connect()
        with self._alarm.set():
            self._fixtures.ask_together((question for item in session.items for question in _questions(item)), known)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._node.tell("running", nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._node.tell("running", "")

    def _take(self, node_id: str, result: CheckResult) -> None:
        self.results.append(result)
        self._told.add(node_id)
        self._node.tell("result", node_id, dataclasses.asdict(result), sorted(self._fixtures.used))

    def _asks_another_host(self, item: pytest.Item) -> bool:
        information = getattr(item, "_fixtureinfo", None)
        definitions = information.name2fixturedefs.get("host") if information is not None else None
        if not definitions:
            return False
        return getattr(definitions[-1].func, "__self__", None) is not self._fixtures

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        outcome = ERROR if report.failed and report.when != "call" else str(report.outcome)
        seconds = round(report.duration, 3)
        self._take(report.nodeid, self._known[report.nodeid].result(outcome, _evidence(report), seconds))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        """A file that leaves is one that cannot be read: pytest would leave with it."""
        if isinstance(collector, pytest.File):
            self._node.tell("reading", str(collector.path))
        try:
            return (yield)
        except SystemExit as error:
            said = _place_of(error, self._directories)
            return pytest.CollectReport(collector.nodeid, "failed", said, [])  # type: ignore[return-value]
        finally:
            self._node.tell("reading", "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed:
            return
        path = f"/{report.nodeid}"
        if path in self._order.done:
            return
        self._take(path, unreadable(path, SKIPPED if report.skipped else ERROR, _evidence(report)))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """A check that ends the session; Ctrl-C does not come here."""
        self.ending = f"the session was ended: {excinfo.value}".removesuffix(": ")


def _questions(item: pytest.Item) -> Iterator[Callable[..., Any]]:
    """The questions, made fixtures by `asked`, that a check asks by itself or by its fixtures."""
    information = getattr(item, "_fixtureinfo", None)
    for definitions in information.name2fixturedefs.values() if information is not None else ():
        question = getattr(definitions[-1].func, "question", None)
        if question is not None:
            yield question


def _witness(item: pytest.Item) -> str:
    asks = "host" in getattr(item, "fixturenames", ()) or any(_questions(item))
    return HOST if asks else NODE


def _evidence(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = " ".join(_words_of(report).split())[:EVIDENCE_LENGTH]
    return text.encode("utf-8", "backslashreplace").decode()  # a node's bytes that are no text came as surrogates


def _words_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.outcome == "passed":
        told = [str(value) for name, value in getattr(report, "user_properties", ()) if name == "evidence"]
        return "; ".join(told)
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail).removeprefix("reason: ")
    trouble: Any = report.longrepr
    crash = getattr(trouble, "reprcrash", None)
    if crash is not None:
        message = str(crash.message)
        if not message.startswith("assert "):  # the class may be one of the file's own, named by the file's path
            message = re.sub(r"^[^:\n]*\.(\w+:\s)", r"\1", message)
        message = re.sub(r"^(AssertionError|Failed|Overdue):\s", "", message)
        # what pytest says of a bare `assert` goes on below: where the value came from
        return message if message.startswith("assert ") else _first_words(message)
    if hasattr(trouble, "errorstring"):  # a fixture that is not there
        return str(trouble.errorstring).splitlines()[0]
    text = trouble[2] if isinstance(trouble, tuple) else str(trouble or "")
    place = re.findall(r'^E +File ".*", (line \d+)$', text, re.MULTILINE)  # of a syntax error
    return ": ".join([*place[-1:], _last_line(text).removeprefix("Skipped: ")])


def _first_words(text: str) -> str:
    """Return the first line, and with a class alone there the next that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return " ".join(lines[:2] if re.fullmatch(r"\w+:", lines[0]) else lines[:1])


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].removeprefix("INTERNALERROR> ").removeprefix("E   ").strip()


# -------------------------------------------------------------------------------------------- the process of the checks


class _Parent(NodeSide):
    """The process that began this one: it has the connection, and takes down how far we are. One JSON text a line."""

    def __init__(self, number: int) -> None:
        self._file = socket.socket(fileno=number).makefile("rwb")
        self._asked = 0

    def read(self) -> Any:
        line = self._file.readline()
        if not line:
            os._exit(0)  # it is gone, and nobody is left to tell
        return json.loads(line)

    def tell(self, what: str, *said: Any) -> None:
        self._file.write(json.dumps([what, *said]).encode() + b"\n")
        self._file.flush()

    def connect(self) -> Mapping[str, Said | NoAnswer]:
        return {command: _answer(each) for command, each in self._ask("connect").items()}

    def facts(self) -> Facts:
        facts: Facts = self._ask("facts")
        return facts

    def run_all(self, commands: Sequence[str]) -> list[Said | NoAnswer]:
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        found = self._ask("run", list(commands), left + 1 if left else None)  # what is overdue is told so here, first
        return [_answer(each) for each in found]

    def _ask(self, what: str, *said: Any) -> Any:
        """Ask and wait; an answer that a check was too slow for to hear is passed over."""
        self._asked += 1
        number = self._asked
        self.tell(what, number, *said)
        while True:
            told, answer = self.read()
            if told == number:
                return answer


@dataclasses.dataclass(frozen=True)
class _Done:
    exit_status: int
    stdout: bytes
    stderr: bytes


def _answer(told: Any) -> Said | NoAnswer:
    """What became of a command, of its JSON: bytes come as the characters of their numbers."""
    if isinstance(told, str):
        return NoAnswer(told)
    return _Done(told[0], told[1].encode("latin-1"), told[2].encode("latin-1"))


def main(number: int) -> None:
    """Run the checks that the process at the other end of the socket ``number`` orders, and tell it what came of them.

    What takes time is imported before the order is there.
    """
    parent = _Parent(number)
    order = parent.read()
    try:
        results = run_checks(parent, Order(**order))
    except UsageError as error:
        parent.tell("refused", error.what, error.next_step)
    else:
        parent.tell("finished", [dataclasses.asdict(result) for result in results])
    os._exit(0)  # a thread that a check has left would keep us
