"""Checks of the node's state: ordinary pytest files, run here, whose testinfra ``host`` asks over our open connection.

A check file gets five fixtures: testinfra's ``host``; ``server``, what the inventory says of it; ``facts``, all that
one question to the node brings back; ``limits``, the thresholds; and ``evidence``, to say what a passing check saw.
Checks lie in ``roles/node/checks``, ``roles/<engine>/checks`` and ``inventory/checks``.

A check is a *blocker* (it fails: exit 8) unless it is marked ``@pytest.mark.warning`` or the inventory says otherwise:
``checks: {NAME: blocker | warning | off}``, with the name of its function without ``test_``. A number there is a
threshold. Its docstring's first line is the question that people read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import testinfra.host
import yaml

from lamplighter.errors import ContactLost, LamplighterError, Unreachable, UsageError
from lamplighter.inventory import Server
from lamplighter.node import events
from lamplighter.node.events import Event, Exit
from lamplighter.release.engine import load_engine
from lamplighter.report import Fold
from lamplighter.report.wording import clean
from lamplighter.run.backend import NodeBackend
from lamplighter.run.deploy import HostSession

LEVELS = ("blocker", "warning", "off")

#: Kinds of result, those that exit 8 first.
FAILED, ERROR, WARNING, SKIPPED, PASSED = "failed", "error", "warning", "skipped", "passed"
BLOCKS = (FAILED, ERROR)

Facts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ServerUnderCheck:
    """What a check may ask about the server: the inventory's words, and where the node keeps it.

    ``engine`` is its role's engine.yml, ``argv`` its command line. ``directory`` (``<root>/servers/<name>`` on the
    node), ``release`` and ``pid`` (0: none) come from the facts. ``python`` is the interpreter of our side of the work
    on the node, not the server's.
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
    python: str
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


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One check. ``outcome``: passed, warning (failed, and that blocks nothing), failed, error, skipped.

    ``evidence`` is the line that says why, or what was seen; ``question`` the words for people.
    """

    name: str
    question: str
    level: str
    outcome: str
    evidence: str
    seconds: float


class Limits(Mapping[str, Any]):
    """The thresholds of a server's checks; a check that asks for one that nobody has set is an error of its role."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.used.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


# ---------------------------------------------------------------------------------------------------- what is run


def verify(session: HostSession, server: Server, inventory: Path, only: str = "") -> dict[str, Any]:
    """Run the checks of ``server`` against the node; return {"checks": [...]}. Reads only.

    ``only`` is a pytest ``-k`` expression. Raises LamplighterError when the node cannot be asked.
    """
    asked = _Asked(session, server)
    backend = NodeBackend(session.node)
    try:
        results = run_checks(
            testinfra.host.Host(backend),
            _subject(session, server, asked),
            asked,
            _directories(server, session.project, inventory),
            server.checks,
            only,
            _defaults(server, session.project),
        )
    finally:
        backend.shell.close()
    trouble = asked.trouble or backend.shell.broken
    if isinstance(trouble, ContactLost):  # a question leaves nothing behind that could go on without us
        raise Unreachable(trouble.what, why=trouble.why, next_step="verify again") from trouble
    if trouble is not None:
        raise trouble
    return {"checks": [dataclasses.asdict(result) for result in results]}


class _Asked:
    """The facts, asked for when a check first wants them; an error is kept for the one who can tell it."""

    def __init__(self, session: HostSession, server: Server) -> None:
        self._session = session
        self._server = server
        self._facts: Facts | None = None
        self.trouble: LamplighterError | None = None

    def __call__(self) -> Facts:
        if self.trouble is not None:
            raise self.trouble
        if self._facts is None:
            try:
                self._facts = self._session.facts(self._server)
            except LamplighterError as error:
                self.trouble = error
                raise
        return self._facts


def run_checks(
    host: Any,
    subject: ServerUnderCheck,
    ask_facts: Callable[[], Facts],
    directories: Sequence[Path],
    settings: Mapping[str, Any] | None = None,
    only: str = "",
    thresholds: frozenset[str] = frozenset(),
) -> list[CheckResult]:
    """Run the check files below ``directories`` with these fixtures; return what each found.

    ``settings`` are the inventory's ``checks``; ``thresholds`` the names that roles know. pytest runs in this process:
    not for several threads at once. Raises UsageError for an ``only`` that is no expression.
    """
    settings = settings or {}
    limits = Limits({name: value for name, value in settings.items() if value not in LEVELS})
    levels = {name: value for name, value in settings.items() if value in LEVELS}
    fixtures = _Fixtures(host, subject, ask_facts, limits)
    collector = _Collector(levels, fixtures)
    words = [
        *("-p", "no:pytest11.testinfra"),  # its own `host` fixture would win, and test the control machine
        *("-p", "no:testinfra", "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:timeout"),
        *("-c", str(Path(__file__).parent.parent.parent / "roles" / "checks.ini")),
        *("--rootdir", "/", "--import-mode=importlib"),  # modules are named by their path from there: no two alike
        *(("-k", only) if only else ()),
        *map(str, directories),
    ]
    with _quiet():
        status = pytest.main(words, plugins=[fixtures, collector])
    if status == pytest.ExitCode.USAGE_ERROR and only and not collector.results:
        raise UsageError(f"no expression that pytest -k understands: {only}", next_step='write "gpu and not memory"')
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not collector.results:
        said = "no check has such a name" if only else f"pytest ended with {status!r}; no check ran"
        return [CheckResult("checks", "did any check run", "blocker", ERROR, said, 0.0)]
    return collector.results + ([] if only else _unknown_names(levels, limits, collector, thresholds))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let nothing of pytest's reach our output, nor the options of a pytest around us reach it."""
    kept = {name: os.environ.pop(name) for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS") if name in os.environ}
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.environ.update(kept)


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


class _Collector:
    """Takes down every check's result, at the level that the inventory gives it."""

    def __init__(self, levels: Mapping[str, str], fixtures: _Fixtures) -> None:
        self._levels = levels
        self._fixtures = fixtures
        self._known: dict[str, tuple[str, str, str]] = {}  # by node id: name, question, level
        self.names: set[str] = set()
        self.results: list[CheckResult] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen, off = [], []
        for item in items:
            function = getattr(item, "originalname", None) or item.name
            name = function.removeprefix("test_")
            self.names.add(name)
            level = self._levels.get(name) or ("warning" if item.get_closest_marker("warning") else "blocker")
            said = (getattr(getattr(item, "obj", None), "__doc__", None) or "").strip().splitlines()
            parameters = item.name[len(function) :]
            question = f"{said[0]} {parameters}".strip() if said else f"{name.replace('_', ' ')}{parameters}"
            self._known[item.nodeid] = (name, question, level)
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

    def _asks_another_host(self, item: pytest.Item) -> bool:
        information = getattr(item, "_fixtureinfo", None)
        definitions = information.name2fixturedefs.get("host") if information is not None else None
        if not definitions:
            return False
        return getattr(definitions[-1].func, "__self__", None) is not self._fixtures

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        name, question, level = self._known[report.nodeid]
        outcome = ERROR if report.failed and report.when != "call" else str(report.outcome)
        if level == "warning" and outcome in BLOCKS:
            outcome = WARNING
        seconds = round(report.duration, 3)
        self.results.append(CheckResult(name, question, level, outcome, _evidence(report), seconds))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            name = report.nodeid or "checks"
            self.results.append(CheckResult(name, "can its file be read", "blocker", ERROR, _evidence(report), 0.0))


def _evidence(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.outcome == "passed":
        told = [str(value) for name, value in getattr(report, "user_properties", ()) if name == "evidence"]
        return "; ".join(told)
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        first = (str(crash.message).splitlines() or [""])[0]
        return first.removeprefix("AssertionError: ").removeprefix("Failed: ")
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    return (text.strip().splitlines() or [""])[-1].removeprefix("Skipped: ").removeprefix("E   ").strip()


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


# --------------------------------------------------------------------------------------------------- what follows


def afterwards(
    session: HostSession, server: Server, inventory: Path, fold: Fold, listen: Callable[[Event], None]
) -> None:
    """Verify a server that was just put into service, as one more stage; a failed blocker makes it *degraded*."""
    if fold.outcome(session.host.name, server.name) != "deployed":
        return
    run = fold.report().hosts[session.host.name].servers[server.name].run
    where = {"host": session.host.name, "server": server.name, "run": run}
    listen({**events.stage_started("verify"), **where})
    began = time.monotonic()
    checks = verify(session, server, inventory)["checks"]
    failed = [check for check in checks if check["outcome"] in BLOCKS]
    asked = [check for check in checks if check["outcome"] != SKIPPED]
    for check in checks:
        if check["outcome"] == WARNING:
            listen({**events.warning("verify", f"{check['question']} - no: {check['evidence']}"), **where})
    passed = sum(check["outcome"] == PASSED for check in checks)
    message = f"{passed} of {len(asked)} checks passed"
    listen({**events.stage_ended("verify", not failed, time.monotonic() - began, message=message), **where})
    if failed:
        names = ", ".join(check["name"] for check in failed)
        fold.add_degraded(
            session.host.name,
            server.name,
            f"serving, but {len(failed)} of {len(asked)} checks failed: {names}",
            cause="verify",
            evidence=failed[0]["evidence"],
            hint=f"./inv verify --host {session.host.name} --server {server.name}",
        )


def judge_checks(answer: Mapping[str, Any]) -> Exit:
    """Return the exit code that the results of ``verify`` mean: 8 for a blocker that failed."""
    return Exit.DEGRADED if any(check["outcome"] in BLOCKS for check in answer["checks"]) else Exit.OK


class Results:
    """Keeps the results of several servers and writes them as JUnit XML, if ``path`` names a file."""

    def __init__(self, path: str | None) -> None:
        self._path = Path(path).expanduser() if path else None
        self._suites: list[tuple[str, str, Sequence[Mapping[str, Any]]]] = []

    def add(self, session: HostSession, server: Server, found: dict[str, Any]) -> dict[str, Any]:
        """Take the answer of ``verify`` and hand it back. Raises UsageError when the file cannot be written."""
        if self._path is not None:
            self._suites.append((session.host.name, server.name, found["checks"]))
            try:
                self._path.write_text(junit_text(self._suites), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"--junit {self._path}: {error.strerror}") from error
        return found


def junit_text(suites: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]]) -> str:
    """Return JUnit XML, one suite a server. A warning is a skipped case of type ``warning``, with its evidence."""
    root = ET.Element("testsuites", name="lamplighter verify")
    for host, server, checks in suites:
        count = {
            "tests": len(checks),
            "failures": sum(check["outcome"] == FAILED for check in checks),
            "errors": sum(check["outcome"] == ERROR for check in checks),
            "skipped": sum(check["outcome"] in (SKIPPED, WARNING) for check in checks),
        }
        took = f"{sum(check['seconds'] for check in checks):.3f}"
        figures = {"name": f"{host}/{server}", "time": took, **{name: str(value) for name, value in count.items()}}
        suite = ET.SubElement(root, "testsuite", figures)
        for check in checks:
            case = ET.SubElement(
                suite, "testcase", classname=f"{host}.{server}", name=check["name"], time=f"{check['seconds']:.3f}"
            )
            evidence = clean(check["evidence"])
            if check["outcome"] == PASSED:
                ET.SubElement(case, "system-out").text = clean(f"{check['question']}: {evidence}")
            else:
                tag = {FAILED: "failure", ERROR: "error"}.get(check["outcome"], "skipped")
                ET.SubElement(case, tag, type=check["outcome"], message=evidence).text = clean(check["question"])
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


# -------------------------------------------------------------------------------------------------- what it is about


def _directories(server: Server, project: Path, inventory: Path) -> list[Path]:
    beside = inventory if inventory.is_dir() else inventory.parent
    wanted = (project / "roles" / "node" / "checks", project / "roles" / server.engine / "checks", beside / "checks")
    return [directory for directory in wanted if directory.is_dir()]


def _defaults(server: Server, project: Path) -> frozenset[str]:
    """Return the names of the thresholds that the roles know."""
    names: set[str] = set()
    for role in ("node", server.engine):
        path = project / "roles" / role / "defaults.yml"
        said = (yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None) or {}
        names |= set((said.get("server") or said).get("checks") or {})
    return frozenset(names)


def _subject(session: HostSession, server: Server, ask_facts: Callable[[], Facts]) -> ServerUnderCheck:
    engine = load_engine(server.engine, session.project / "roles")
    return ServerUnderCheck(
        name=server.name,
        engine=engine.compiled,
        model=server.model,
        served_name=server.served_name or server.model,
        host=server.host,
        port=server.port,
        gpus=server.gpus,
        argv=tuple(engine.argv(server)),
        env={name: entry.value for name, entry in server.env.items()},
        python=session.host.connection.python,
        ask_facts=ask_facts,
        tls=server.tls,
    )
