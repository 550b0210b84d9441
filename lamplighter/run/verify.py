"""Verifying a server: the checks of its roles and of the inventory, what they mean for a deploy, and JUnit XML.

The checks themselves are run in a process of their own, which begins first of all: while it imports pytest, the login
travels and a shell begins.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from lamplighter.errors import ContactLost, LamplighterError, Unreachable, UsageError
from lamplighter.inventory import Server
from lamplighter.inventory.inventory import defaults_file
from lamplighter.inventory.schema import LEVELS
from lamplighter.inventory.sources.yaml_file import read_mapping
from lamplighter.inventory.values import Problems, plain
from lamplighter.node import events
from lamplighter.node.events import Event, Exit
from lamplighter.paths import at_home, is_null, open_file, refuse_other_than_file, replace_file
from lamplighter.project import Project, Roles
from lamplighter.report import Fold
from lamplighter.report.report import ServerReport
from lamplighter.report.wording import clean
from lamplighter.run.host_session import HostSession
from lamplighter.run.inspection import Found, Inspectors, inspect
from lamplighter.run.outcome import (
    BLOCKS,
    ERROR,
    FAILED,
    FIRST,
    OVERDUE,
    OVERDUE_SECONDS,
    PASSED,
    SKIPPED,
    WARNING,
    CheckResult,
)

if TYPE_CHECKING:
    from lamplighter.run.shell import Shell

Answers = dict[str, dict[str, Any]]

#: A check waits for so long for a token.
PATIENCE_SECONDS = 60.0

#: How a report in JUnit XML begins, whoever wrote it, and within how many bytes.
JUNIT = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*\?>\s*)?(?:<!--.*?-->\s*)*<testsuites?[\s/>]", re.DOTALL)
JUNIT_HEAD = 64 << 10


def verify(
    session: HostSession,
    server: Server,
    inventory: Path,
    only: str = "",
    inspectors: Inspectors | None = None,
    shell: Shell | None = None,
) -> dict[str, Any]:
    """Run the checks of ``server`` against the node; return {"checks": [...]}. Reads only.

    ``only`` is a pytest ``-k`` expression; ``inspectors`` are the caller's, who closes them; ``shell`` is one on the
    node that stands already. Raises LamplighterError when the node cannot be asked.
    """
    try:
        with contextlib.ExitStack() as stack:
            inspectors = inspectors or stack.enter_context(contextlib.closing(Inspectors()))
            inspectors.begin()
            node = stack.enter_context(contextlib.closing(_Node(session, server, shell)))
            results = inspect(node, _order(session, server, inventory, only), inspectors)
    except ContactLost as lost:  # a question leaves nothing behind that could go on without us
        raise Unreachable(lost.what, why=lost.why, next_step="verify again") from lost
    return {"checks": [dataclasses.asdict(result) for result in results]}


def verify_all(
    session: HostSession, servers: Sequence[Server], inventory: Path, only: str, results: Results
) -> Answers:
    """Run ``verify`` for each of the servers and hand the answers to ``results``, too, or why there are none."""
    answers: Answers = {}
    with contextlib.closing(Inspectors(len(servers))) as inspectors:
        for server in servers:
            try:
                answers[server.name] = verify(session, server, inventory, only, inspectors)
            except LamplighterError as error:
                results.add(session.host.name, server.name, [_unverified(error)])
                raise
            results.add(session.host.name, server.name, answers[server.name]["checks"])
    return answers


def _unverified(error: LamplighterError) -> dict[str, Any]:
    return dataclasses.asdict(CheckResult("verify", "can the node be asked", "blocker", ERROR, str(error), 0.0))


class _Node:
    """The node as checks ask it: a shell for their commands, and the facts, which are asked for once."""

    def __init__(self, session: HostSession, server: Server, shell: Shell | None) -> None:
        self._session = session
        self._server = server
        self._shell = shell or _begun_shell(session)

    def connect(self) -> Mapping[str, Found]:
        self._shell.open()  # where nobody answers, that is one error, and not one of every check
        return self._shell.known

    def run_all(self, commands: Sequence[str], seconds: float | None) -> Sequence[Found]:
        return self._shell.run_all(commands, seconds)

    def facts(self) -> dict[str, Any]:
        return self._session.facts(self._server)

    def close(self) -> None:
        self._shell.close()


def _begun_shell(session: HostSession) -> Shell:
    from lamplighter.run.shell import Shell  # with the SSH library, which those who verify nothing do without

    shell = Shell(session.node)
    shell.begin(FIRST)
    return shell


# --------------------------------------------------------------------------------------------------- what follows


class Verification:
    """The checks after a deploy, whose process and shell begin before they are wanted."""

    def __init__(self, inventory: Path, *, of_release: bool = False) -> None:
        """``of_release``: what serves then may be none of this inventory, and is measured by its own release."""
        self._inventory = inventory
        self._of_release = of_release
        self._inspectors = Inspectors()
        self._session: HostSession | None = None
        self._shell: Shell | None = None

    def on(self, session: HostSession) -> None:
        """Learn where the next deed is done."""
        self._drop_shell()
        self._session = session

    def hear(self, event: Event) -> None:
        """Begin the process of the checks when a server is waited for, and before that their shell on the node."""
        if event["event"] != events.STAGE_START:
            return
        if event.get("stage") == "ready":
            self._inspectors.begin()
        elif event.get("stage") == "stop" and self._shell is None and self._session is not None:
            self._shell = _begun_shell(self._session)

    def __call__(self, session: HostSession, server: Server, fold: Fold, listen: Callable[[Event], None]) -> None:
        if not fold.is_put_into_service(session.host.name, server.name):
            return
        server = session.as_released(server) if self._of_release else server
        if self._shell is not None and not self._shell.stands():
            self._drop_shell()
        afterwards(session, server, self._inventory, fold, listen, self._inspectors, self._shell)
        self._drop_shell()

    def close(self) -> None:
        """End what nothing came to be checked by."""
        self._inspectors.close()
        self._drop_shell()

    def _drop_shell(self) -> None:
        if self._shell is not None:
            self._shell.close()
        self._shell = None


def afterwards(
    session: HostSession,
    server: Server,
    inventory: Path,
    fold: Fold,
    listen: Callable[[Event], None],
    inspectors: Inspectors,
    shell: Shell | None = None,
) -> None:
    """Verify a server that was just put into service, as one more stage; a failed blocker makes it *degraded*."""
    deployed = fold.report().hosts[session.host.name].servers[server.name]
    where = {"host": session.host.name, "server": server.name, "run": deployed.run}
    listen({**events.stage_started("verify"), **where})
    began = time.monotonic()
    checks = _verified_after_all(
        session, server, inventory, lambda event: listen({**event, **where}), inspectors, shell
    )
    failed = [check for check in checks if check["outcome"] in BLOCKS]
    asked = [check for check in checks if check["outcome"] != SKIPPED]
    for check in checks:
        if check["outcome"] == WARNING:
            listen({**events.warning("verify", f"{check['question']} - no: {check['evidence']}"), **where})
    passed = sum(check["outcome"] == PASSED for check in checks)
    message = f"{passed} of {len(asked)} checks passed"
    listen({**events.stage_ended("verify", not failed, time.monotonic() - began, message=message), **where})
    if failed:
        told = f"{len(failed)} of {len(asked)} checks failed: {', '.join(check['name'] for check in failed)}"
        verdict = _judge(session, server, deployed, told, failed)
        verdict.tell(fold, session.host.name, server.name)
        if deployed.verb == "deploy" and verdict.asks_for_the_way_back(server.on_verify_failure):
            _go_back(session, server, deployed, verdict, fold, listen)


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What checks that failed say of a server that was just put into service."""

    code: Exit
    message: str
    cause: str
    evidence: str
    hint: str
    is_found: bool
    """A check has failed; one that could not find out is no reason to replace a server."""
    is_superseded: bool = False
    """Another run has begun since: what serves now is its matter."""

    def tell(self, fold: Fold, host: str, server: str) -> None:
        told = {"cause": self.cause, "evidence": self.evidence, "hint": self.hint}
        if self.code == Exit.DEGRADED:
            fold.add_degraded(host, server, self.message, **told)
        else:
            fold.add_gone(host, server, self.message, self.code, **told)

    def asks_for_the_way_back(self, wish: str) -> bool:
        """Tell whether ``on_verify_failure`` wants the release before back; ``auto``: for what does not serve."""
        if self.is_superseded or wish == "keep":
            return False
        return self.code != Exit.DEGRADED or (wish == "rollback" and self.is_found)


def _judge(
    session: HostSession, server: Server, deployed: ServerReport, told: str, failed: Sequence[Mapping[str, Any]]
) -> _Verdict:
    """Judge checks that failed by what became of the server since its run ended, where the node can be asked.

    The server is asked once more: what it says then is what is so now. Where the node cannot be asked, the checks have
    the last word. The next run begins as soon as the lock is free, and the checks then meet a server that is being
    stopped.
    """
    host, name, evidence = session.host.name, server.name, failed[0]["evidence"]
    said = next((check["evidence"] for check in failed if says_dark(check)), "")
    is_found = any(check["outcome"] == FAILED for check in failed)
    try:
        # one that has answered the checks may be as slow again; one that has not has had its time
        found = session.statuses([name], patience=None if said else PATIENCE_SECONDS)[name]
    except LamplighterError:
        found = {}
    other, state = found.get("run") or {}, found.get("state")
    before, now = deployed.serving.pid if deployed.serving else None, found.get("pid")
    since, hint = "", events.invocation("verify", host, name)
    is_superseded = other.get("id") not in (None, deployed.run)
    if is_superseded:
        since = f"run {other['id']} ({other.get('verb')}, by {other.get('by')}) has begun since"
        hint += " once nothing else is at work there"
    elif state in ("stopped", "starting") or (state == "unknown" and now is None):
        message = f"it was put into service, and serves no more: {found.get('message') or state}; {told}"
        start, releases = (events.invocation(verb, host, name) for verb in ("start", "releases"))
        hint = f"{start} brings it back; {releases} shows what else there is to go back to"
        return _Verdict(Exit.CRASHED, message, "crashed", evidence, hint, is_found)
    elif state == "unknown" or (not found and said):
        message = f"its process is alive, and it does not serve: {found.get('message') or said}; {told}"
        restart, rollback = (events.invocation(verb, host, name) for verb in ("restart", "rollback"))
        hint = f"{restart} starts it again; {rollback} brings the last release back"
        return _Verdict(Exit.NOT_READY, message, "no_answer", said or evidence, hint, is_found)
    elif found and before not in (None, now):
        since = f"its process {before} is gone, and {now or 'none'} is in its place"
    again = "asked once more it answers" if said else "serving"
    message = f"it served when this run ended, but {since}; {told}" if since else f"{again}, but {told}"
    return _Verdict(Exit.DEGRADED, message, "verify", evidence, hint, is_found, is_superseded)


def _go_back(
    session: HostSession,
    server: Server,
    deployed: ServerReport,
    verdict: _Verdict,
    fold: Fold,
    listen: Callable[[Event], None],
) -> None:
    """Have the node put back the release before, in a run of its own that counts as the deploy's last stage.

    The node refuses it where another release than the one that failed is current by now, or none is there to go back
    to. Raises ContactLost: that run goes on without us.
    """
    blamed = {"release": deployed.release, "cause": verdict.cause, "message": verdict.message}
    try:
        session.run("rollback", server, listen, blamed=blamed)
    except ContactLost:
        raise
    except LamplighterError as error:
        fold.add_no_way_back(session.host.name, server.name, error)
    else:
        fold.add_way_back(session.host.name, server.name)


def says_dark(check: Mapping[str, Any]) -> bool:
    """Tell whether a check has found that the server does not serve; that it could not find out says nothing."""
    return check["outcome"] == FAILED and bool(check.get("is_of_serving"))


def _verified_after_all(
    session: HostSession,
    server: Server,
    inventory: Path,
    listen: Callable[[Event], None],
    inspectors: Inspectors,
    shell: Shell | None,
) -> list[dict[str, Any]]:
    """Return the checks of ``verify``; it only reads, so where contact is lost all of it is done once more."""
    try:
        found = verify(session, server, inventory, inspectors=inspectors, shell=shell)
    except Unreachable as lost:
        listen(events.warning("verify", f"contact lost ({lost.what}); verifying again over a new connection"))
        session.reconnect()
        found = verify(session, server, inventory, inspectors=inspectors)
    checks: list[dict[str, Any]] = found["checks"]
    return checks


def judge_checks(answer: Mapping[str, Any]) -> Exit:
    """Return the exit code that the results of ``verify`` mean: 7 where it does not serve, 8 for other blockers."""
    if any(says_dark(check) for check in answer["checks"]):
        return Exit.NOT_READY
    return Exit.DEGRADED if any(check["outcome"] in BLOCKS for check in answer["checks"]) else Exit.OK


class Results:
    """Keeps the results of several servers and writes them as JUnit XML, if ``path`` names a file.

    Begins with a file without results: nobody shall take those of the last time for ours. Raises UsageError where it
    cannot be written, and where something else than a report is there: that is not ours to replace.
    """

    def __init__(self, path: str | None) -> None:
        self._path = place_of_report(path, "--junit", JUNIT, "JUnit") if path is not None else None
        self._suites: list[tuple[str, str, Sequence[Mapping[str, Any]]]] = []
        self._write()

    def add(self, host: str, server: str, checks: Sequence[Mapping[str, Any]]) -> None:
        """Take what was found at one server. Raises UsageError when the file can be written no more."""
        self._suites.append((host, server, checks))
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            replace_file(self._path, junit_text(self._suites).encode())
        except OSError as error:
            raise UsageError(
                f"--junit {self._path}: {error.strerror}", next_step="name a file in a directory that you may write to"
            ) from error


def _head_of_report(place: Path) -> bytes:
    """Return how a file begins, b"" where there is none. Raises OSError for what is no file."""
    try:
        if is_null(refuse_other_than_file(place)):
            raise OSError(errno.EINVAL, "is a device, and no file", str(place))
        with open_file(place) as file:
            return file.read(JUNIT_HEAD) or b""
    except FileNotFoundError:
        return b""


def place_of_report(path: str, flag: str, beginning: re.Pattern[bytes], kind: str) -> Path:
    """Return where ``flag`` may have a report written. Raises UsageError where it would replace what is none."""
    try:
        place = at_home(path).absolute()
        head = _head_of_report(place)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(
            f"{flag} {path}: {why}", next_step="name a file that is a report, or is not there yet"
        ) from error
    if head.strip() and not beginning.match(head):
        raise UsageError(
            f"{flag} {path}: there is a file already, and it is no {kind} report",
            why="it would be replaced",
            next_step="name another file, or remove this one first",
        )
    return place


def junit_text(suites: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]]) -> str:
    """Return JUnit XML, one suite a server. A warning is a skipped case of type ``warning``, with its evidence.

    Results of one name (of its parameters, of its own end) are numbered: readers of JUnit keep the first of a name.
    """
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
        told: Counter[str] = Counter()
        for check in checks:
            told[check["name"]] += 1
            number = told[check["name"]]
            name = check["name"] if number == 1 else f"{check['name']} ({number})"
            case = ET.SubElement(
                suite, "testcase", classname=f"{host}.{server}", name=name, time=f"{check['seconds']:.3f}"
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


def check_names(server: Server, project: Path | Project, inventory: Path) -> list[str]:
    """The names of the checks that follow a deploy of ``server``, but for those that the inventory turns off."""
    names: dict[str, None] = {}
    for directory in _directories(server, project, inventory):
        for path in sorted(directory.glob("**/test_*.py")):
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (OSError, ValueError, SyntaxError):  # `verify` says what is wrong with it
                continue
            found = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            names |= dict.fromkeys(name.removeprefix("test_") for name in found if name.startswith("test_"))
    return [name for name in names if server.checks.get(name) != "off"]


def _directories(server: Server, project: Path | Project, inventory: Path) -> list[Path]:
    beside = inventory if inventory.is_dir() else inventory.parent
    places: list[Roles | Path] = [project / "roles"]
    if isinstance(project, Project):  # a role of theirs that is no engine adds its checks to those of ours
        places.append(project.own)
    wanted = [place / role / "checks" for place in places for role in ("node", server.engine)]
    return [directory for directory in dict.fromkeys((*wanted, beside / "checks")) if directory.is_dir()]


def _thresholds(server: Server, project: Path | Project) -> set[str]:
    """Return the names of the thresholds that the roles set."""
    found: dict[str, Any] = {}
    for role in ("node", server.engine):
        path = defaults_file(role, project / "roles")
        said: Any = {} if path is None else plain(read_mapping(path, Problems()))
        found |= (said.get("server") or said).get("checks") or {}
    return {name for name, value in found.items() if isinstance(value, int | float | tuple) and value is not False}


def _order(session: HostSession, server: Server, inventory: Path, only: str) -> dict[str, Any]:
    """Say which checks are to be run, and what they may know of the server: `lamplighter.run.checks.Order`, as JSON."""
    engine = session.engine_of(server)
    settings = {OVERDUE: OVERDUE_SECONDS, **server.checks}
    return {
        "server": {
            "name": server.name,
            "engine": engine.compiled,
            "model": server.model,
            "served_name": engine.served_name(server),
            "host": server.host,
            "port": server.port,
            "gpus": server.gpus,
            "argv": [str.__str__(word) for word in engine.argv(server)],
            "env": {name: entry.value for name, entry in server.env.items()},
            "tls": server.tls,
        },
        "directories": [str(directory) for directory in _directories(server, session.project, inventory)],
        "levels": {name: value for name, value in settings.items() if value in LEVELS},
        "limits": {name: value for name, value in settings.items() if value not in LEVELS},
        "thresholds": sorted(_thresholds(server, session.project)),
        "only": only,
    }
