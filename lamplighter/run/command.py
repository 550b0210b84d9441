"""From flags to exit code: what every task has in common.

A task chooses hosts and servers, does one thing to each, and ends with a report and an exit code. Hosts come one after
another. Errors are told at the place where they belong (host, server or the command itself), and the rest goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from invoke.context import Context
from invoke.exceptions import Exit as Leave

from lamplighter.errors import ContactLost, LamplighterError, UsageError
from lamplighter.inventory import Host, Inventory, Server, load_inventory
from lamplighter.node import events
from lamplighter.node.events import Event, Exit
from lamplighter.report import Fold, Reporter, config_text, reporter_for
from lamplighter.run.deploy import HostSession, begin_session, detached, open_session

PROJECT = Path(__file__).resolve().parent.parent.parent

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or TERM arrived; ``exit_code`` is what it means while nothing has been touched.

    A KeyboardInterrupt, because that is what libraries let through: pytest takes others for the failure of a check.
    """

    def __init__(self, exit_code: Exit) -> None:
        super().__init__(exit_code.name.lower())
        self.exit_code = exit_code


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is true for the whole command: where the inventory is, whether a traceback is wanted, how to speak."""

    inventory: Path
    debug: bool = False
    as_json: bool = False


def settings_from(context: Context, *, as_json: bool = False) -> Settings:
    """Read the tool's own settings: Invoke's configuration, then LAMPLIGHTER_INVENTORY. Refuses Invoke's ``--dry``."""
    if context.config.run.dry:
        refusal = UsageError("--dry is refused", why="it would fake every command", next_step="./inv check --host H")
        _exit_with(refusal, False)
    ours = context.config.lamplighter
    path = os.environ.get("LAMPLIGHTER_INVENTORY") or ours.inventory
    return Settings(
        PROJECT / Path(path).expanduser() if path == "inventory" else Path(path).expanduser(),
        bool(ours.debug or os.environ.get("LAMPLIGHTER_DEBUG")),
        as_json,
    )


def seconds_in(text: str) -> float:
    """Read a duration such as ``7d``, ``12h``, ``30m``, ``90s`` or ``90``. Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw]?)", text.strip())
    if found is None:
        raise UsageError(f"{text!r} is no duration", next_step="write 7d, 12h, 30m, 90s or seconds")
    return float(found.group(1)) * _UNITS[found.group(2)]


def whole_number(text: str, flag: str) -> int:
    """Read the value of ``flag``. Raises UsageError."""
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise UsageError(f"{flag}: {text!r} is no whole number", next_step=f"write {flag} 500, for example")
    return int(text)


Listen = Callable[[Event], None]
#: What a task does to one server, telling its events to the listener.
Deed = Callable[[HostSession, Server, Listen], None]
#: What follows for a server that the deed put into service; it may only make the result *degraded*.
Afterwards = Callable[[HostSession, Server, Fold, Listen], None]


def choose(settings: Settings, patterns: Sequence[str], server: str | None) -> list[tuple[Host, list[Server]]]:
    """Resolve ``--host`` patterns and ``--server`` to hosts and their servers. Raises UsageError or InventoryError."""
    if not patterns:
        raise UsageError("no host given", next_step="name hosts or groups with --host (it may be repeated)")
    inventory: Inventory = load_inventory(settings.inventory, PROJECT / "roles")
    chosen = []
    for host in inventory.resolve(inventory.select(patterns)):
        servers = [one for one in host.servers.values() if server in (None, one.name)]
        if servers:
            chosen.append(_through_lab(host, servers))
    if not chosen:
        wanted = f"server {server!r}" if server else "a server"
        raise UsageError(
            f"no host of {', '.join(patterns)} has {wanted}", next_step="`./inv config --host H` shows them"
        )
    return chosen


def _through_lab(host: Host, servers: list[Server]) -> tuple[Host, list[Server]]:
    """Bring up the GPU node in a box that a host with ``lab: NAME`` stands for, and point the host to it.

    A port that somebody else on this machine has (another box) is replaced, and that is said.
    """
    if host.lab is None:
        return host, servers
    from lab import node

    endpoint = node.ensure_up(host.lab, PROJECT / ".lab")
    connection = dataclasses.replace(
        host.connection,
        host=endpoint.host,
        port=endpoint.port,
        user=endpoint.user,
        key_file=str(endpoint.key_file),
        known_hosts=str(endpoint.known_hosts),
    )
    moved = []
    for server in servers:
        port = node.port_for(host.lab, PROJECT / ".lab", server.port)
        if port != server.port:
            print(
                f"{host.name}: port {server.port} of this machine is taken; {server.name} uses {port}", file=sys.stderr
            )
        moved.append(server.model_copy(update={"port": port}))
    return dataclasses.replace(host, connection=connection), moved


def run(
    settings: Settings,
    patterns: Sequence[str],
    server: str | None,
    verb: str,
    wait: str,
    afterwards: Afterwards | None = None,
    **options: Any,
) -> NoReturn:
    """Have the node do ``verb`` to every chosen server, each in a run of its own, and leave with the report's code.

    ``wait`` is the time to spend on a lock that somebody else holds (``90s``, ``10m``).
    """
    with guarded(settings):
        patience = seconds_in(wait)
    act(
        settings,
        patterns,
        server,
        lambda session, one, listen: session.run(verb, one, listen, wait=patience, **options),
        afterwards,
    )


def act(
    settings: Settings,
    patterns: Sequence[str],
    server: str | None,
    deed: Deed,
    afterwards: Afterwards | None = None,
) -> NoReturn:
    """Do ``deed`` to every chosen server and leave with the exit code of the report.

    ``afterwards`` is the verification.
    """
    fold = Fold()
    reporter = reporter_for(settings.as_json, sys.stdout, sys.stderr)

    def listen(event: Event) -> None:
        fold.add(event)
        reporter.event(event)

    try:
        with _signals():
            for host, servers in choose(settings, patterns, server):
                _act_on_host(settings, host, servers, deed, afterwards, fold, reporter, listen)
    except Interrupted as interrupted:
        if not fold.report().parts():  # no run was asked for yet
            reporter.close(None)
            error = _as_error(interrupted)
            fold.add_error(None, None, error)
            if settings.as_json:
                _say(json.dumps(fold.report().to_json()))
            print(error, file=sys.stderr)
            raise Leave(code=interrupted.exit_code) from interrupted
    except LamplighterError as error:
        fold.add_error(None, None, error)
        reporter.error(None, None, error)
    except Exception as error:
        _tell_defect(settings, None, error, fold, reporter)
    report = fold.report()
    reporter.close(report)
    raise Leave(code=report.exit_code)


def _act_on_host(
    settings: Settings,
    host: Host,
    servers: Iterable[Server],
    deed: Deed,
    afterwards: Afterwards | None,
    fold: Fold,
    reporter: Reporter,
    listen: Callable[[Event], None],
) -> None:
    try:
        with open_session(host, PROJECT) as session:
            for server in servers:
                try:
                    deed(session, server, listen)
                    if afterwards is not None:
                        afterwards(session, server, fold, listen)
                except Interrupted as interrupted:
                    _leave_or_cancel(session, interrupted, fold, reporter, listen)
                    if afterwards is not None:
                        _tell_unverified(host, server, fold)
                    raise
                except LamplighterError as error:
                    fold.add_error(host.name, server.name, error)
                    reporter.error(host.name, server.name, error)
                    if isinstance(error, ContactLost):
                        break
    except LamplighterError as error:
        fold.add_error(host.name, None, error)
        reporter.error(host.name, None, error)
    except Exception as error:
        _tell_defect(settings, host.name, error, fold, reporter)


def _leave_or_cancel(
    session: HostSession, interrupted: Interrupted, fold: Fold, reporter: Reporter, listen: Listen
) -> None:
    """Decide what becomes of a run that was interrupted here: it goes on, unless a person at a terminal cancels it."""
    if session.under_way is None:
        return
    server, run = session.under_way
    host = session.host.name
    is_asked = interrupted.exit_code == Exit.INTERRUPTED and sys.stdin.isatty() and sys.stderr.isatty()
    reporter.close(None)
    try:
        with _signals():  # armed again: a second Ctrl-C detaches
            if is_asked and _wants_to_cancel(f"{host}/{server.name}", run):
                session.cancel(server, listen, run)
                return
    except Interrupted:
        pass
    except LamplighterError as error:
        fold.add_error(host, server.name, error)
        reporter.error(host, server.name, error)
        return
    left = detached(host, server.name, run)
    fold.add_error(host, server.name, left)
    reporter.error(host, server.name, left)


def _tell_unverified(host: Host, server: Server, fold: Fold) -> None:
    """The run has ended, and the verification of what it put into service has not."""
    if fold.outcome(host.name, server.name) == "deployed":
        fold.add_degraded(
            host.name,
            server.name,
            "serving, but the checks were interrupted",
            cause="interrupted",
            hint=events.invocation("verify", host.name, server.name),
        )


def _wants_to_cancel(what: str, run: str) -> bool:
    while True:
        question = f"\nrun {run} of {what} is at work. [d]etach (it goes on) or [c]ancel? "
        print(question, end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline().strip().lower()
        if answer in ("c", "cancel"):
            return True
        if answer in ("", "d", "detach"):
            return False


def _tell_defect(settings: Settings, host: str | None, error: Exception, fold: Fold, reporter: Reporter) -> None:
    if settings.debug:
        traceback.print_exc()
    defect = LamplighterError(
        f"unforeseen {type(error).__name__}: {error}",
        why="this is a defect of lamplighter",
        next_step="report it; LAMPLIGHTER_DEBUG=1 shows where it happened",
    )
    fold.add_error(host, None, defect)
    reporter.error(host, None, defect)


def read(
    settings: Settings,
    patterns: Sequence[str],
    server: str | None,
    word: str,
    question: Callable[[HostSession, list[Server]], Mapping[str, Mapping[str, Any]]],
    text: Callable[[Mapping[str, Mapping[str, Mapping[str, Any]]]], str],
    judge: Callable[[Mapping[str, Any]], Exit] = lambda _: Exit.OK,
) -> NoReturn:
    """Ask every chosen host one thing, print the answers as a table or as one JSON line, and leave with the worst code.

    ``judge`` gives the exit code that one server's answer means.
    """
    answers: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    errors: dict[str, LamplighterError] = {}
    try:
        with _signals():
            for host, servers in choose(settings, patterns, server):
                try:
                    with begin_session(host, PROJECT) as session:
                        answers[host.name] = question(session, servers)
                except LamplighterError as error:
                    errors[host.name] = error
    except Interrupted as interrupted:
        _exit_with(_as_error(interrupted), settings.as_json)
    except LamplighterError as error:
        _exit_with(error, settings.as_json)
    if settings.as_json:
        hosts: dict[str, Any] = {host: {"servers": found} for host, found in answers.items()}
        hosts |= {host: {"error": str(bad), "exit_code": int(bad.exit_code)} for host, bad in errors.items()}
        _say(json.dumps({word: {"hosts": hosts}}))
    elif answers:
        _say(text(answers))
    for told in errors.values():
        print(told, file=sys.stderr)
    codes = {judge(found) for servers in answers.values() for found in servers.values()}
    codes |= {failed.exit_code for failed in errors.values()}
    raise Leave(code=codes.pop() if len(codes) == 1 else Exit.MIXED if codes else Exit.OK)


def judge_environment(answer: Mapping[str, Any]) -> Exit:
    """Return 8 where a variable differs, or nothing runs that could carry it; what cannot be read is no difference."""
    return Exit.DEGRADED if answer.get("state") in ("differs", "stopped") else Exit.OK


def judge_findings(answer: Mapping[str, Any]) -> Exit:
    """Return what the findings of a ``check`` would make of a deploy."""
    return Exit.REFUSED if any(found["level"] == "error" for found in answer["findings"]) else Exit.OK


def print_logs(
    settings: Settings, patterns: Sequence[str], server: str | None, lines: str, follow: bool, run: str | None = None
) -> None:
    """Print the log of one server: of what serves, or served last, or of what ``run`` started."""
    with guarded(settings):
        count = whole_number(lines, "--lines")
        targets = [(host, one) for host, servers in choose(settings, patterns, server) for one in servers]
        if len(targets) != 1:
            names = ", ".join(f"{host.name}/{one.name}" for host, one in targets)
            raise UsageError(f"that is {len(targets)} servers: {names}", next_step="name one with --host and --server")
        host, one = targets[0]
        with open_session(host, PROJECT) as session:
            session.logs(one, _print_piece, count, follow, run)


def _print_piece(text: str) -> None:
    if not _say(text, end=""):  # `logs --follow | head`: whoever read has seen enough
        raise Leave(code=Exit.OK)


def _say(text: str, end: str = "\n") -> bool:
    """Print to stdout whatever its encoding; False when nobody reads it any more. A full disk ends the command."""
    if sys.stdout is None:  # `>&-`
        return False
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return False
        raise Leave(f"stdout cannot be written: {error.strerror}", code=Exit.INTERNAL) from error
    return True


def print_config(settings: Settings, patterns: Sequence[str]) -> None:
    """Print what the inventory says of each host, with the origin of every value."""
    with guarded(settings):
        if not patterns:
            raise UsageError("no host given", next_step="name hosts or groups with --host (it may be repeated)")
        inventory = load_inventory(settings.inventory, PROJECT / "roles")
        found = {host.name: host.to_json() for host in inventory.resolve(inventory.select(patterns))}
        if settings.as_json:
            for host in found.values():
                _say(json.dumps(host))
        else:
            _say(config_text(found))


@contextlib.contextmanager
def guarded(settings: Settings) -> Iterator[None]:
    """Turn errors of a task that prints by itself into a message and an exit code."""
    try:
        with _signals():
            yield
    except Interrupted as interrupted:
        _exit_with(_as_error(interrupted), settings.as_json)
    except LamplighterError as error:
        _exit_with(error, settings.as_json)


def _as_error(interrupted: Interrupted) -> LamplighterError:
    error = LamplighterError("interrupted; nothing was touched")
    error.exit_code = interrupted.exit_code
    return error


def _exit_with(error: LamplighterError, as_json: bool) -> NoReturn:
    if as_json:
        print(json.dumps({"error": str(error), "exit_code": int(error.exit_code)}))
    print(error, file=sys.stderr)
    raise Leave(code=error.exit_code)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Make Ctrl-C and TERM one exception, raised once: a second one ends the process as usual."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Interrupted(Exit.INTERRUPTED if number == signal.SIGINT else Exit.TERMINATED)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
