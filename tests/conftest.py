"""What every test shares: kinds by directory, `require`, the leak check, and the counts at the very end.

A kind says what a test needs. It is the directory's, unless the test carries another kind as its own mark.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import pytest

from tests.leaks import Watch
from tests.needs import REQUIRE_VARIABLE, is_required

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # every command would compile all of the project again
# Absolute times say nothing on a machine that many tests share.
hypothesis.settings.register_profile("unhurried", hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("unhurried")

pytest_plugins = ["tests.nodes.fixtures", "tests.engines.fixtures"]

TESTS = Path(__file__).parent
KINDS = {
    "unit": "pure functions, no process and no network",
    "node": "the node side, on real processes of this machine",
    "lab": "against the lab's node: an SSH server in this process's user account",
    "ssh": "against a real sshd",
    "systemd": "needs a node whose PID 1 is systemd",
    "engine": "a real LLM server, on the CPU",
    "faults": "what the wire, the disk and the kernel can do to a run",
    "gpu": "needs a GPU",
    "perf": "measures",
}
DIRECTORIES = {"engines": "engine"}  # where a directory's name is not its kind's

Require = Callable[[str, "str | None"], None]
watch_key = pytest.StashKey[Watch]()
counts_key = pytest.StashKey["Counts"]()


# -- kinds


def kind_of(item: pytest.Item) -> str:
    own = [mark.name for mark in item.iter_markers() if mark.name in KINDS]
    if own:
        return own[0]
    folder = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
    return DIRECTORIES.get(folder, folder if folder in KINDS else "unit")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        kind = kind_of(item)
        item.add_marker(kind)
        config.stash[counts_key].kinds[item.nodeid] = kind


# -- what a test needs


def require_or_skip(kind: str, reason: str | None) -> None:
    """Skip the test because of ``reason``; fail instead where LAMPLIGHTER_REQUIRE lists ``kind``. No reason: go on."""
    if reason is None:
        return
    if is_required(kind):
        pytest.fail(f"{REQUIRE_VARIABLE} asks for {kind}, but {reason}", pytrace=False)
    pytest.skip(f"{kind}: {reason}")


@pytest.fixture(scope="session")
def require() -> Require:
    """``require("netns", reason)`` skips, or fails where the run demands that kind (sshd, netns, engine, systemd)."""
    return require_or_skip


@pytest.fixture(scope="session")
def watch(pytestconfig: pytest.Config) -> Watch:
    """The session's leak watch; whoever makes namespaces adds them to ``watch.namespaces``."""
    return pytestconfig.stash[watch_key]


# -- the session


def pytest_configure(config: pytest.Config) -> None:
    for kind, meaning in KINDS.items():
        config.addinivalue_line("markers", f"{kind}: {meaning}")
    watch = Watch(TESTS.parent, temporary=lambda: temporary_of(config))
    watch.begin()
    config.stash[watch_key] = watch
    config.stash[counts_key] = counts = Counts()
    config.pluginmanager.register(CollectionCounts(counts))
    end_on_term(os.getpid())


def pytest_unconfigure(config: pytest.Config) -> None:
    if watch_key in config.stash:  # not when another plugin failed to configure
        config.stash[watch_key].end()


def temporary_of(config: pytest.Config) -> Path:
    """The session's temporary directory. pytest makes its factory after this file is configured, hence so late."""
    return config._tmp_path_factory.getbasetemp()


def end_on_term(main: int) -> None:
    """TERM ends the session as Ctrl-C does, with all fixtures torn down."""

    def interrupt(signum: int, _frame: object) -> None:
        if os.getpid() != main:  # a child that a test forked without exec: it dies, as it would have
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Outermost, so that fixtures are torn down and pytest has said its last word before the counts are printed."""
    try:
        return (yield)
    finally:
        if not session.config.option.collectonly:
            close(session)


def close(session: pytest.Session) -> None:
    config = session.config
    watch, counts = config.stash[watch_key], config.stash[counts_key]
    patient = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        leaks = watch.leaks()
        watch.clean(leaks)
    finally:
        signal.signal(signal.SIGINT, patient)
    if leaks:
        counts.add_failure("leaks")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        for leak in leaks:
            reporter.write_line(f"LEAKED {leak}", red=True)
        reporter.ensure_newline()
        for line in counts.lines():
            reporter.write_line(line)


# -- the counts


class Counts:
    """One outcome for each test: a failure in any phase wins, an expected failure counts as skipped."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.outcomes: dict[str, str] = {}

    def add(self, nodeid: str, outcome: str) -> None:
        if self.outcomes.get(nodeid) != "failed":
            self.outcomes[nodeid] = outcome

    def add_failure(self, kind: str) -> None:
        self.kinds[kind] = kind
        self.add(kind, "failed")

    def lines(self) -> list[str]:
        table: dict[str, Counter[str]] = {}
        for nodeid, outcome in self.outcomes.items():
            table.setdefault(self.kinds.get(nodeid, "collection"), Counter())[outcome] += 1
        rows = [kind for kind in [*KINDS, "collection", "leaks"] if kind in table]
        return [*(f"{kind:10} {sentence(table[kind])}" for kind in rows), sentence(Counter(self.outcomes.values()))]


def sentence(count: Counter[str]) -> str:
    return f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        item.config.stash[counts_key].add(item.nodeid, report.outcome)
    return report


class CollectionCounts:
    """A file that does not import is a failure too, and one that skips itself is skipped."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.counts.add(report.nodeid, report.outcome)
