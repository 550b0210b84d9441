"""Runs check files: ordinary pytest, here, whose testinfra ``host`` asks over our open connection.

A check file gets five fixtures: testinfra's ``host``; ``server``, what the inventory says of it; ``facts``, all that
one question to the node brings back; ``limits``, the thresholds; and ``evidence``, to say what a passing check saw.
Checks lie in ``roles/node/checks``, ``roles/<engine>/checks`` and ``inventory/checks``.

A check is a *blocker* (it fails: exit 8) unless it is marked ``@pytest.mark.warning`` or the inventory says otherwise:
``checks: {NAME: blocker | warning | off}``, with the name of its function without ``test_``. A number there is a
threshold. Its docstring's first line is the question that people read. Where one marked ``@pytest.mark.serving`` fails,
the server does not serve (exit 7).

No check may be lost without a word: a file that cannot be read, a check that hangs or that ends the session, or the
process, is an error of its own, and the others run all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lamplighter.errors import LamplighterError, UsageError
from lamplighter.inventory.schema import LEVELS
from lamplighter.run.outcome import BLOCKS, ERROR, SKIPPED, WARNING, CheckResult

#: The threshold after which a check is ended, and its value where nobody sets it: seconds.
OVERDUE = "check_seconds"
OVERDUE_SECONDS = 300.0

EVIDENCE_LENGTH = 1000

#: What pytest only warns of: a class or a function that it passes over, and checks that can never fail.
LOST = ("PytestCollectionWarning", "PytestAssertRewriteWarning", "PytestReturnNotNoneWarning")

INI = Path(__file__).parent.parent.parent / "roles" / "checks.ini"

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

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.used: set[str] = set()

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


def run_checks(
    host: Any,
    subject: ServerUnderCheck,
    ask_facts: Callable[[], Facts],
    directories: Sequence[Path],
    settings: Mapping[str, Any] | None = None,
    only: str = "",
    thresholds: Collection[str] = (),
    connect: Callable[[], None] = lambda: None,
) -> list[CheckResult]:
    """Run the check files below ``directories`` with these fixtures; return what each found.

    ``settings`` are the inventory's ``checks``; ``thresholds`` name those that roles set; ``connect`` is called when
    all checks are collected: a login may travel until then. pytest runs in this process: not for several threads at
    once. Raises UsageError for an ``only`` that is no expression, KeyboardInterrupt, and what ``connect`` raises.
    """
    settings = {OVERDUE: OVERDUE_SECONDS, **(settings or {})}
    levels = {name: value for name, value in settings.items() if value in LEVELS}
    limits = Limits({name: value for name, value in settings.items() if value not in LEVELS})
    fixtures = _Fixtures(host, subject, ask_facts, limits)
    collector = _Collector(levels, fixtures, directories, connect)
    words = [
        *("-c", str(INI), "--rootdir", "/", "--import-mode=importlib"),  # modules are named by their path from there
        # testinfra's own `host` fixture would win, and test the control machine; other plugins are not ours to run
        *("--disable-plugin-autoload", "-p", "no:pytest11.testinfra", "-p", "no:testinfra.plugin"),
        *("-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:faulthandler"),
        *("--continue-on-collection-errors", *(f"-Werror::pytest.{name}" for name in LOST)),
        *((f"-k={only}",) if only else ()),
        *map(str, directories),
    ]
    plugins = [fixtures, collector, _Alarm(float(limits[OVERDUE]))]
    with _quiet() as said, _forgotten(directories), _no_way_out():
        try:
            status: int = pytest.main(words, plugins=plugins)
        except (Exception, SystemExit, Overdue) as error:  # a conftest.py that leaves, a check that breaks pytest
            status, collector.ending = pytest.ExitCode.INTERNAL_ERROR, _place_of(error, directories)
    if collector.interrupt is not None:
        raise collector.interrupt
    if collector.trouble is not None:
        raise collector.trouble
    if status == pytest.ExitCode.USAGE_ERROR and only and collector.is_collected:
        raise UsageError(f"no expression that pytest -k understands: {only}", next_step='write "gpu and not memory"')
    results = collector.results
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        why = collector.ending or _last_line(said.getvalue()) or f"pytest ended with {status!r}"
        results += [CheckResult("checks", "could every check run", "blocker", ERROR, why, 0.0)]
    elif not results:
        why = f"no check is chosen by {only}" if only else "there is no check"
        results += [CheckResult("checks", "did any check run", "blocker", ERROR, why, 0.0)]
    return results + ([] if only else _unknown_names(levels, limits, collector, frozenset((OVERDUE, *thresholds))))


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


@contextlib.contextmanager
def _no_way_out() -> Iterator[None]:
    """Have a check that ends this process, or becomes another program, leave as `sys.exit` does; its children may."""
    ours = os.getpid()

    def instead_of(name: str, leave: Callable[..., Any]) -> Callable[..., Any]:
        def stay(*args: Any, **named: Any) -> Any:
            if os.getpid() == ours:
                raise SystemExit(f"os.{name} would end lamplighter, and all results be lost")
            return leave(*args, **named)

        return stay

    before = {name: getattr(os, name) for name in ("_exit", "abort", "execv", "execve")}
    for name, leave in before.items():
        setattr(os, name, instead_of(name, leave))
    try:
        yield
    finally:
        for name, leave in before.items():
            setattr(os, name, leave)


@contextlib.contextmanager
def _forgotten(directories: Sequence[Path]) -> Iterator[None]:
    """Import check files again for each server: no module may carry what it saw, or half of itself, to the next one."""
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            path = Path(getattr(sys.modules[name], "__file__", None) or "/")
            if any(path.is_relative_to(directory) for directory in directories):
                del sys.modules[name]


def _place_of(error: BaseException, directories: Sequence[Path]) -> str:
    """Say what ended pytest, and which line of a check file did it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if any(Path(each.filename).is_relative_to(place) for place in directories)]
    place = f"{ours[-1].filename}, line {ours[-1].lineno}: " if ours else ""
    return f"{place}{_last_line(traceback.format_exception_only(error)[-1])}"


def _unknown_names(
    levels: Mapping[str, str], limits: Limits, collector: _Collector, thresholds: frozenset[str]
) -> list[CheckResult]:
    """Names of the inventory that no check bears and no check asked for: a typing mistake would switch nothing off."""
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
    def __init__(
        self, host: Any, server: ServerUnderCheck, ask_facts: Callable[[], Facts], limits: Mapping[str, Any]
    ) -> None:
        self._host = host
        self._server = server
        self._ask_facts = ask_facts
        self._limits = limits

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

    @pytest.fixture
    def evidence(self, record_property: Callable[[str, object], None]) -> Callable[[object], None]:
        return lambda text: record_property("evidence", text)


class _Alarm:
    """Ends a check that does not end by itself. A signal does it: nothing else gets through to a loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @pytest.hookimpl(wrapper=True)
    def _within_time(self) -> Iterator[None]:
        with self._set():
            return (yield)

    pytest_load_initial_conftests = pytest_make_collect_report = _within_time
    pytest_runtest_setup = pytest_runtest_call = _within_time

    @contextlib.contextmanager
    def _set(self) -> Iterator[None]:
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
        self,
        levels: Mapping[str, str],
        fixtures: _Fixtures,
        directories: Sequence[Path],
        connect: Callable[[], None],
    ) -> None:
        self._levels = levels
        self._connect = connect
        self._fixtures = fixtures
        self._directories = directories
        self._known: dict[str, tuple[str, str, str, bool]] = {}  # by node id: name, question, level, is_of_serving
        self.names: set[str] = set()
        self.results: list[CheckResult] = []
        self.is_collected = False
        self.interrupt: BaseException | None = None
        self.trouble: LamplighterError | None = None
        self.ending = ""

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
            level = self._levels.get(name) or ("warning" if item.get_closest_marker("warning") else "blocker")
            said = (getattr(getattr(item, "obj", None), "__doc__", None) or "").strip().splitlines()
            parameters = item.name[len(function) :]
            question = f"{said[0]} {parameters}".strip() if said else f"{name.replace('_', ' ')}{parameters}"
            self._known[item.nodeid] = (name, question, level, item.get_closest_marker("serving") is not None)
            if level == "off":
                off.append(item)
                self.results.append(CheckResult(name, question, level, SKIPPED, "off in the inventory", 0.0))
            elif self._asks_another_host(item):
                off.append(item)
                said_why = "its file or a conftest.py has a `host` fixture of its own: it would test another machine"
                self.results.append(CheckResult(name, question, level, ERROR, said_why, 0.0))
            else:
                chosen.append(item)
        if off:
            items[:] = chosen
            config.hook.pytest_deselected(items=off)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool | None:
        try:
            self._connect()
        except LamplighterError as error:
            self.trouble = error
            return True  # done: no check is run
        return None

    def _asks_another_host(self, item: pytest.Item) -> bool:
        information = getattr(item, "_fixtureinfo", None)
        definitions = information.name2fixturedefs.get("host") if information is not None else None
        if not definitions:
            return False
        return getattr(definitions[-1].func, "__self__", None) is not self._fixtures

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name, question, level, is_of_serving = self._known[report.nodeid]
        outcome = ERROR if report.failed and report.when != "call" else str(report.outcome)
        if level == "warning" and outcome in BLOCKS:
            outcome = WARNING
        seconds = round(report.duration, 3)
        self.results.append(CheckResult(name, question, level, outcome, _evidence(report), seconds, is_of_serving))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        """A file that leaves is one that cannot be read: pytest would leave with it."""
        try:
            return (yield)
        except SystemExit as error:
            said = _place_of(error, self._directories)
            return pytest.CollectReport(collector.nodeid, "failed", said, [])  # type: ignore[return-value]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed:
            return
        path = f"/{report.nodeid}"
        outcome = SKIPPED if report.skipped else ERROR
        question = f"can {path} be read"
        self.results.append(CheckResult(Path(path).name, question, "blocker", outcome, _evidence(report), 0.0))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Tell Ctrl-C from a check that ends the session, which pytest tells as KeyboardInterrupts of its own."""
        if isinstance(excinfo.value, KeyboardInterrupt) and not isinstance(excinfo.value, pytest.Session.Interrupted):
            self.interrupt = excinfo.value
        else:
            self.ending = f"{len(self.results)} results, then the session was ended: {excinfo.value}"


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
