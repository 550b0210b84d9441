"""From flags to exit code: what every task has in common.

A task chooses hosts and servers, does one thing to each, and ends with a report and an exit code. Hosts come one after
another. Errors are told at the place where they belong (host, server or the command itself), and the rest goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from invoke.context import Context
from invoke.exceptions import Exit as Leave

from lamplighter.errors import (
    UNTOUCHED,
    ContactLost,
    LamplighterError,
    NodeRefused,
    Unreachable,
    UsageError,
)
from lamplighter.inventory import Host, Inventory, Server, Vault, load_inventory, password_sources, require_secrets
from lamplighter.inventory.schema import NAME_OF_SERVER
from lamplighter.inventory.values import did_you_mean
from lamplighter.node import events
from lamplighter.node.events import Event, Exit
from lamplighter.paths import at_home
from lamplighter.project import PROJECT, Project, project_beside
from lamplighter.report import Fold, Reporter, config_text, reporter_for
from lamplighter.report.timings import CONTROL, WIRE, Timings
from lamplighter.report.wording import printable, spoken
from lamplighter.run.host_session import (
    Follower,
    HostSession,
    Named,
    NodeDefect,
    NoSuchRun,
    Unlisted,
    begin_session,
    detached,
    open_session,
    told_to_end,
)

NAME = "lamplighter"
VOLUMES = ("verbose", "quiet")
#: What Invoke's configuration may say of us under `lamplighter`.
SETTINGS = {"root", "inventory", "debug", "vault_password_file", "vault_id", "box", "timings", *VOLUMES}
CONFIGURED = "Invoke's configuration says so: invoke.yml, ~/.invoke.yml, /etc/invoke.yml, INVOKE_LAMPLIGHTER_..."
#: What `init` writes is also what there is where nobody wrote one.
DEMO = PROJECT / "templates" / "repository" / "inventory"

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: What asks of a deploy beforehand, and is refused like one.
LINTED = ("check", "plan")

LONGEST_SECONDS = 1e9
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or TERM arrived, or the terminal was closed; ``exit_code`` is what it means while nothing was touched.

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
    vault: Vault = dataclasses.field(default_factory=Vault)
    sources: tuple[str, ...] = ()
    """All sources of the inventory, where there are several or one is no path: ``inventory`` is the first of them."""
    timings: Timings | None = None
    """Where the time goes, for a command that is to say it."""
    volume: int = 0
    """Below 0 only the result is told, above 0 all that there is."""
    box: Callable[[Host, Sequence[Server]], tuple[Host, list[Server]]] | None = None
    """Brings up the node in a box that a host with ``lab: NAME`` stands for, and points the host to it."""

    @property
    def project(self) -> Path | Project:
        """Our roles and templates, under the roles that lie beside the inventory."""
        return project_beside(self.inventory)

    def load(self) -> Inventory:
        """The inventory, over the defaults of the roles; its warnings are printed. Raises InventoryError."""
        if self.inventory == DEMO and self.volume >= 0:
            complain(f"no inventory/ in {Path.cwd()}: this is the demo's; `{NAME} init DIR` begins one of your own")
        if self.volume > 0:
            complain(f"inventory: {', '.join(self.sources) or self.inventory}")
            if isinstance(self.project, Project):
                complain(f"roles: {self.project.own}, then {self.project.built_in / 'roles'}")
        inventory = load_inventory(self.sources or self.inventory, self.project / "roles", self.vault)
        self.warn(inventory.warnings)
        return inventory

    def warn(self, lints: Iterable[object]) -> None:
        """Print what looks wrong, unless the result alone was asked for."""
        for lint in lints if self.volume >= 0 else ():
            complain(f"warning: {lint}")


def settings_from(context: Context, *, as_json: bool = False, **given: str | Sequence[str] | None) -> Settings:
    """Read the tool's own settings: ``--inventory``, else LAMPLIGHTER_INVENTORY, else Invoke's configuration.

    Refuses Invoke's ``--dry``, and values of ``given`` (options by name) that can only be a mistake of who wrote
    the command line.
    """
    if "--" in sys.argv:  # Invoke drops what follows without a word
        lost = sys.argv[sys.argv.index("--") + 1 :]
        refusal = UsageError(f"what follows -- would be lost: {shlex.join(lost)}", next_step="leave out the --")
        _exit_with(refusal, as_json or "--json" in lost)
    for name, value in given.items():
        for each in [value] if isinstance(value, str) else value or ():
            flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
            refused = _refused_value(flag, each)
            if refused is not None:
                _exit_with(refused, as_json)
    if context.config.run.dry:
        refusal = UsageError(
            "--dry is refused", why="it would fake every command", next_step="./inv deploy --dry-run, or ./inv check"
        )
        _exit_with(refusal, False)
    if context.config.timeouts.command:
        refusal = UsageError(
            "--command-timeout is refused",
            why="it would not reach the node, which goes on",
            next_step="servers.NAME.timeouts bounds each stage of a run, and --wait a lock",
        )
        _exit_with(refusal, as_json)
    ours = context.config.lamplighter
    try:
        for name in set(ours) - SETTINGS:
            raise UsageError(f"no setting lamplighter.{name}{did_you_mean(name, SETTINGS)}", why=CONFIGURED)
        root = Path(ours.get("root") or Path.cwd())
        sources = _sources(ours.inventory, os.environ.get("LAMPLIGHTER_INVENTORY", ""), root)
        volume = bool(ours.get("verbose")) - bool(ours.get("quiet"))
        if ours.get("verbose") and ours.get("quiet"):
            raise UsageError("--verbose and --quiet exclude each other", next_step="give one of them")
        if not ours.get("root") and sources == (str(root / "inventory"),) and not (root / "inventory").exists():
            sources = (str(DEMO),)
        vault = Vault(password_sources(ours.vault_password_file, ours.vault_id, os.environ))
    except UsageError as error:
        _exit_with(error, as_json)
    return Settings(
        at_home(sources[0]),
        bool(ours.debug or os.environ.get("LAMPLIGHTER_DEBUG")),
        as_json,
        vault,
        sources,
        Timings() if ours.get("timings") else None,
        volume,
        ours.get("box"),
    )


def _refused_value(flag: str, value: str) -> UsageError | None:
    """Return what is wrong with a value that can only be a mistake: a variable that was not set, the next option."""
    if not value.strip():
        return UsageError(f"{flag} is empty", next_step=f"give {flag} a value, or leave it out")
    if value.startswith("-") and value != "-":
        return UsageError(
            f"{flag} has the value {value!r}, which looks like an option",
            next_step=f"give {flag} a value (a path that begins so: ./{value})",
        )
    return None


def _sources(given: str | Sequence[str], environment: str, root: Path = PROJECT) -> tuple[str, ...]:
    """The sources of the inventory: a tuple of the command line as it is, of the environment parted by commas.

    Others are of a configuration file, and begin at its directory ``root``. A source with a comma is a list of names
    (``gpu1,``), as in Ansible.
    """
    if isinstance(given, tuple):
        for each in given:
            parts = [part.strip() for part in each.split(",") if part.strip()]
            if not parts:
                raise UsageError("--inventory is empty", next_step="give --inventory a path, or leave it out")
            if len(parts) > 1 and any(at_home(part).exists() for part in parts) and not at_home(each).exists():
                raise UsageError(f"--inventory {each}: a comma lists names of hosts", next_step="repeat --inventory")
        return tuple(given)
    if environment.strip(", "):
        whole = at_home(environment).exists()
        return (environment,) if whole else tuple(each.strip() for each in environment.split(",") if each.strip())
    configured = [given] if isinstance(given, str) else given
    if not isinstance(configured, list) or not all(isinstance(each, str) for each in configured):
        raise UsageError(f"lamplighter.inventory is {given!r}, and no path nor a list of paths", why=CONFIGURED)
    return tuple(each if each.startswith("~") or "," in each else str(root / each) for each in configured)


def named_hosts(host: Sequence[str], limit: Sequence[str]) -> list[str]:
    """The patterns of ``--host``, or of ``--limit``, another name for it. Raises UsageError for both at once."""
    if host and limit:
        raise UsageError("--limit is another name for --host", next_step="give one of them, as often as needed")
    return [*host, *limit]


def seconds_in(text: str, flag: str) -> float:
    """Read the value of ``flag``, a duration such as ``7d``, ``12h``, ``30m``, ``90s`` or ``90``. Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw]?)", text.strip())
    if found is None:
        raise UsageError(f"{flag}: {text!r} is no duration", next_step="write 7d, 12h, 30m, 90s or seconds")
    seconds = float(found.group(1)) * _UNITS[found.group(2)]
    if seconds > LONGEST_SECONDS:  # no clock here, nor a node's, can wait for that
        raise UsageError(f"{flag}: {text!r} is more than thirty years", next_step="write 7d, 12h, 30m, 90s or seconds")
    return seconds


def whole_number(text: str, flag: str) -> int:
    """Read the value of ``flag``. Raises UsageError."""
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise UsageError(f"{flag}: {text!r} is no whole number", next_step=f"write {flag} 500, for example")
    return int(text)


Listen = Callable[[Event], None]
Chosen = list[tuple[Host, list[Server]]]
#: With ``--server`` a person may mean one that only its node still knows.
Reached = list[tuple[Host, list[Named]]]
#: What a task does to one server, telling its events to the listener.
Deed = Callable[[HostSession, Any, Listen], None]


class Afterwards(Protocol):
    """What follows a deed that went well: the verification."""

    def on(self, session: HostSession) -> None:
        """Learn where the next deed is done."""

    def hear(self, event: Event) -> None:
        """Learn how far the deed is."""

    def __call__(self, session: HostSession, server: Server, fold: Fold, listen: Listen) -> None: ...

    def close(self) -> None:
        """Give up what was made ready for it."""


def choose(
    settings: Settings, patterns: Sequence[str], server: str | None, before: Callable[[Chosen], None] | None = None
) -> Chosen:
    """Resolve ``--host`` patterns and ``--server`` to hosts and their servers. Raises UsageError or InventoryError.

    ``before`` may refuse them before a box is started.
    """
    chosen = [(host, servers) for host, servers in _named_in_inventory(settings, patterns, server) if servers]
    if not chosen:
        raise no_host_has(server, patterns)
    if before is not None:
        before(chosen)
    return [_in_its_box(settings, host, servers) for host, servers in chosen]


def reach(settings: Settings, patterns: Sequence[str], server: str | None, *, everything: bool = False) -> Reached:
    """Resolve as `choose` does; a server that no inventory names is looked for on all the hosts.

    With ``everything`` a host without servers is one, too: its node may know some. Raises UsageError or InventoryError.
    """
    found = _named_in_inventory(settings, patterns, server)
    if not everything and not any(servers for _, servers in found):
        if server is None or not found or not NAME_OF_SERVER.fullmatch(server):
            raise no_host_has(server, patterns)
        return [(_in_its_box(settings, host, [])[0], [Unlisted(server)]) for host, _ in found]
    boxed = [_in_its_box(settings, host, servers) for host, servers in found if servers or everything]
    return [(host, list(servers)) for host, servers in boxed]


def _named_in_inventory(settings: Settings, patterns: Sequence[str], server: str | None) -> Chosen:
    """All hosts of the patterns, each with those of its servers that are meant."""
    if not patterns:
        raise UsageError("no host given", next_step="name hosts or groups with --host (it may be repeated)")
    inventory = settings.load()
    hosts = inventory.resolve(inventory.select(patterns))
    settings.warn(dict.fromkeys(lint for host in hosts for lint in host.warnings))
    return [(host, [one for one in host.servers.values() if server in (None, one.name)]) for host in hosts]


def _in_its_box(settings: Settings, host: Host, servers: list[Server]) -> tuple[Host, list[Server]]:
    return (host, servers) if settings.box is None or host.lab is None else settings.box(host, servers)


def no_host_has(server: str | None, patterns: Sequence[str]) -> UsageError:
    """What to say where no host has the server."""
    wanted = f"server {server!r}" if server else "a server"
    return UsageError(f"no host of {', '.join(patterns)} has {wanted}", next_step="`./inv config --host H` shows them")


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
        patience = seconds_in(wait, "--wait")
    act(
        settings,
        patterns,
        server,
        lambda session, one, listen: session.run(verb, one, listen, wait=patience, **options),
        afterwards,
        sends_secrets=verb == "deploy",
    )


def act(
    settings: Settings,
    patterns: Sequence[str],
    server: str | None,
    deed: Deed,
    afterwards: Afterwards | None = None,
    *,
    sends_secrets: bool = False,
    seeks_run: bool = False,
) -> NoReturn:
    """Do ``deed`` to every chosen server and leave with the exit code of the report.

    ``afterwards`` is the verification. A deed that ``sends_secrets`` is refused before the first host is reached where
    one of them cannot be had. One that ``seeks_run`` is for the server that has the run: others are told of only where
    none has.
    """
    absent: list[tuple[str, str, LamplighterError]] = []
    fold = Fold()
    reporter = reporter_for(settings.as_json, sys.stdout, sys.stderr, settings.volume)
    chosen: Reached = []
    timings = settings.timings or Timings()
    timings.spent(CONTROL, "start and imports")

    def listen(event: Event) -> None:
        timings.heard()
        fold.add(event)
        reporter.event(event)
        if afterwards is not None:
            afterwards.hear(event)

    try:
        with _signals(last=True), contextlib.ExitStack() as stack:
            if afterwards is not None:
                stack.callback(afterwards.close)
            if sends_secrets:
                refuse = functools.partial(_refuse, settings)
                chosen = [(host, list(servers)) for host, servers in choose(settings, patterns, server, refuse)]
            else:
                chosen = reach(settings, patterns, server)
            timings.spent(CONTROL, "inventory")
            for host, servers in chosen:
                one = _putting_aside(deed, absent) if seeks_run else deed
                _act_on_host(settings, host, servers, one, afterwards, fold, reporter, listen, timings)
            if not fold.report().parts():
                for host_name, server_name, error in absent:
                    _tell(host_name, server_name, error, fold, reporter)
    except Interrupted as interrupted:
        _tell_untold(chosen, _as_error(interrupted), fold, reporter)
    except LamplighterError as error:
        _tell(None, None, error, fold, reporter)
    except Exception as error:
        _tell(None, None, _defect(settings, error), fold, reporter)
    report = fold.report()
    if settings.timings is not None:
        timings.spent(CONTROL, "end")
        report = dataclasses.replace(report, timings=timings.to_json())
    reporter.close(report)
    if settings.timings is not None:
        (complain if settings.as_json else say)(timings.text())
    raise Leave(code=report.exit_code)


def _putting_aside(deed: Deed, absent: list[tuple[str, str, LamplighterError]]) -> Deed:
    """``deed``, but that a server without the run is put aside."""

    def try_it(session: HostSession, server: Any, listen: Listen) -> None:
        try:
            deed(session, server, listen)
        except NoSuchRun as error:
            absent.append((session.host.name, server.name, error))

    return try_it


def _refuse(settings: Settings, chosen: Chosen) -> None:
    """Raises InventoryError for what must not be deployed, or cannot be."""
    _lint(settings, chosen)
    require_secrets(server for _, servers in chosen for server in servers)


def _lint(settings: Settings, chosen: Sequence[tuple[Host, Sequence[Server]]]) -> None:
    """Print what looks wrong with the servers. Raises InventoryError where something is."""
    from lamplighter.lint.chosen import refuse

    settings.warn(dict.fromkeys(map(str, refuse(chosen, settings.project))))


def _act_on_host(
    settings: Settings,
    host: Host,
    servers: Sequence[Named],
    deed: Deed,
    afterwards: Afterwards | None,
    fold: Fold,
    reporter: Reporter,
    listen: Callable[[Event], None],
    timings: Timings,
) -> None:
    try:
        with open_session(host, settings.project) as session:
            timings.spent(WIRE, "login", host.name)
            if afterwards is not None:
                afterwards.on(session)
            for server in servers:
                try:
                    deed(session, server, listen)
                    if afterwards is not None and isinstance(server, Server):
                        afterwards(session, server, fold, listen)
                    heard_of = fold.report().hosts.get(host.name)
                    if heard_of is not None and server.name in heard_of.servers:  # the run may be another server's
                        timings.ran(f"{host.name}/{server.name}", heard_of.servers[server.name])
                except Interrupted as interrupted:
                    _leave_or_cancel(settings, session, interrupted, fold, reporter)
                    if afterwards is not None:
                        _tell_unverified(host, server, fold)
                    raise
                except Exception as unforeseen:
                    error = _as_told(settings, session, unforeseen)
                    _tell(host.name, server.name, error, fold, reporter)
                    if isinstance(error, ContactLost):
                        _tell_untold([(host, servers)], _not_attempted(host, server), fold, reporter)
                        break
    except LamplighterError as error:
        _tell(host.name, None, error, fold, reporter)
    except Exception as error:
        _tell(host.name, None, _defect(settings, error), fold, reporter)


def _as_told(settings: Settings, session: HostSession, error: Exception) -> LamplighterError:
    """What to tell of an error at one server; a defect of ours does not end the run that the node is at."""
    if isinstance(error, LamplighterError):
        return traced(settings, error)
    defect = _defect(settings, error)
    return detached(session.under_way, defect) if session.under_way is not None else defect


def _not_attempted(host: Host, lost: Named) -> LamplighterError:
    return Unreachable(
        f"{host.name}: not attempted",
        why=f"contact to the host was lost during the run on {lost.name}",
        serving=UNTOUCHED,
        next_step="run the same command again once that run has ended",
    )


def _tell(host: str | None, server: str | None, error: LamplighterError, fold: Fold, reporter: Reporter) -> None:
    fold.add_error(host, server, error)
    reporter.error(host, server, error)


def _tell_untold(
    chosen: Sequence[tuple[Host, Sequence[Named]]], error: LamplighterError, fold: Fold, reporter: Reporter
) -> None:
    """Tell ``error`` of every chosen server of which nothing is known: none is left out of the report.

    Of the command itself where none was chosen yet.
    """
    if not chosen:
        _tell(None, None, error, fold, reporter)
    known = fold.report().hosts
    for host, servers in chosen:
        told = known.get(host.name)
        if told is None or told.error is None:
            for server in servers:
                if told is None or server.name not in told.servers:
                    _tell(host.name, server.name, error, fold, reporter)


def _leave_or_cancel(
    settings: Settings, session: HostSession, interrupted: Interrupted, fold: Fold, reporter: Reporter
) -> None:
    """Decide what becomes of a run that was interrupted here: it goes on, unless a person at a terminal cancels it."""
    run = session.under_way
    if run is None:
        return
    is_asked = interrupted.exit_code == Exit.INTERRUPTED and _is_a_person_there()
    reporter.close(None)
    trouble: LamplighterError | None = None
    words: int | None = None  # those that had come when we began to cancel
    try:
        with _signals(last=True):  # armed again: a second Ctrl-C detaches
            if is_asked and _wants_to_cancel(run):
                words = run.words
                session.cancel_or_see_its_end(run)
                return
    except Interrupted:
        if words is not None:
            _tell(run.host, run.server, told_to_end(run, None, is_heard=run.words > words), fold, reporter)
            return
    except (NodeRefused, Unreachable) as error:  # no run was asked to cancel, as far as we know
        trouble = error
    except LamplighterError as error:
        _tell(run.host, run.server, traced(settings, error), fold, reporter)
        return
    except Exception as error:
        trouble = _defect(settings, error)
    _tell(run.host, run.server, detached(run, trouble), fold, reporter)


def _tell_unverified(host: Host, server: Named, fold: Fold) -> None:
    """The run has ended, and the verification of what it put into service has not."""
    if fold.is_put_into_service(host.name, server.name):
        fold.add_degraded(
            host.name,
            server.name,
            "serving, but the checks were interrupted",
            cause="interrupted",
            hint=events.invocation("verify", host.name, server.name),
        )


def _is_a_person_there() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))


def _wants_to_cancel(run: Follower) -> bool:
    state = "is at work" if run.is_begun else "may have begun"
    while True:
        question = f"\nrun {run.run} of {run.host}/{run.server} {state}. [d]etach (it goes on) or [c]ancel? "
        print(printable(question), end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline().strip().lower()
        if answer in ("c", "cancel"):
            return True
        if answer in ("", "d", "detach"):
            return False


def traced(settings: Settings, error: LamplighterError) -> LamplighterError:
    """Return ``error``; where a traceback is wanted and it is a defect on a node, print that one's."""
    if settings.debug and isinstance(error, NodeDefect):
        complain(error.trace)
    return error


def complain(words: object) -> None:
    """Print to stderr for people, as long as there is one: a terminal that was closed takes nothing any more."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(printable(words), file=sys.stderr)


def _defect(settings: Settings, error: Exception) -> LamplighterError:
    """What to say of an unforeseen exception; its traceback is printed where one is wanted."""
    if settings.debug:
        traceback.print_exception(error)
    return LamplighterError(
        f"unforeseen {type(error).__name__}: {error}",
        why="this is a defect of lamplighter",
        next_step="report it; LAMPLIGHTER_DEBUG=1 shows where it happened",
    )


def read(
    settings: Settings,
    patterns: Sequence[str],
    server: str | None,
    word: str,
    question: Callable[[HostSession, list[Any]], Mapping[str, Mapping[str, Any]]],
    text: Callable[[Mapping[str, Mapping[str, Mapping[str, Any]]]], str],
    judge: Callable[[Mapping[str, Any]], Exit] = lambda _: Exit.OK,
    hosts: Callable[[], Reached] | None = None,
) -> NoReturn:
    """Ask every chosen host one thing, print the answers as a table or as one JSON line, and leave with the worst code.

    ``judge`` gives the exit code that one server's answer means. ``hosts`` are others than `choose` gives.
    """
    with guarded(settings):
        answers: dict[str, Mapping[str, Mapping[str, Any]]] = {}
        errors: dict[str, LamplighterError] = {}
        timings = settings.timings or Timings()
        timings.spent(CONTROL, "start and imports")
        lint = functools.partial(_lint, settings) if word in LINTED else None
        chosen: Sequence[tuple[Host, list[Any]]] = (
            hosts() if hosts is not None else choose(settings, patterns, server, lint)
        )
        timings.spent(CONTROL, "inventory")
        for host, servers in chosen:
            try:
                with begin_session(host, settings.project) as session:
                    answers[host.name] = question(session, servers)
                timings.asked(host.name, session.seconds_on_node)
            except LamplighterError as known:
                errors[host.name] = traced(settings, known)
            except Exception as unforeseen:
                errors[host.name] = _defect(settings, unforeseen)
        if settings.as_json:
            told: dict[str, Any] = {host: {"servers": found} for host, found in answers.items()}
            told |= {host: {"error": str(bad), "exit_code": int(bad.exit_code)} for host, bad in errors.items()}
            more = {} if settings.timings is None else {"timings": timings.to_json()}
            say_json({word: {"hosts": told, **more}})
        elif answers:
            say(text(answers))
        for error in errors.values():
            complain(error.whole)
        if settings.timings is not None:
            (complain if settings.as_json else say)(timings.text())
        codes = {judge(found) for servers in answers.values() for found in servers.values()}
        codes |= {failed.exit_code for failed in errors.values()}
        raise Leave(code=codes.pop() if len(codes) == 1 else Exit.MIXED if codes else Exit.OK)
    raise AssertionError  # guarded() lets nothing else through


def judge_environment(answer: Mapping[str, Any]) -> Exit:
    """Return 8 where a variable differs, or nothing runs that could carry it; what cannot be read is no difference."""
    return Exit.DEGRADED if answer.get("state") in ("differs", "stopped") else Exit.OK


def judge_plan(answer: Mapping[str, Any]) -> Exit:
    """Return 3 where a deploy would be refused, 12 where it would change something, else 0."""
    refused = judge_findings(answer)
    return refused if refused is not Exit.OK else Exit.CHANGES if answer["is_pending"] else Exit.OK


def judge_findings(answer: Mapping[str, Any]) -> Exit:
    """Return what the findings of a ``check`` would make of a deploy."""
    return Exit.REFUSED if any(found["level"] == "error" for found in answer["findings"]) else Exit.OK


def columns() -> int:
    """How wide the terminal on stdout is; 0 where it is none, so that nothing has to fit."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (AttributeError, OSError, ValueError):
        return 0


def say(text: str) -> bool:
    """Print text for people to stdout, nothing in it orders a terminal; False when its reader is gone."""
    return put(printable(text) + "\n")


def say_json(value: Mapping[str, Any]) -> bool:
    """Print one JSON object as a line to stdout; False when its reader is gone."""
    return put(spoken(json.dumps(value)) + "\n")


def put(text: str) -> bool:
    """Write ``text`` to stdout as it is, whatever the encoding; False when its reader is gone.

    A full disk ends the command.
    """
    if sys.stdout is None:  # `>&-`
        return False
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)
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
        inventory = settings.load()
        shown = {host.name: _linted(host, settings.project) for host in inventory.resolve(inventory.select(patterns))}
        if settings.as_json:
            for host in shown.values():
                say_json(host)
        else:
            say(config_text(shown))


def _linted(host: Host, project: Path | Project) -> dict[str, Any]:
    """What the inventory says of a host, with all that `lint` has to say of its servers."""
    from lamplighter.lint import lint_servers

    shown = host.to_json()
    if isinstance(project, Project):
        used = dict.fromkeys(server.engine for server in host.servers.values())
        own = {name: project.own_engine(name) for name in used}
        shown["engines"] = {name: dataclasses.asdict(found) for name, found in own.items() if found is not None}
    found = lint_servers(host, host.servers.values(), project / "roles")
    return {**shown, "lint": [*shown["lint"], *(each.to_json() for each in found)]}


@contextlib.contextmanager
def guarded(settings: Settings) -> Iterator[None]:
    """Turn errors of a task that prints by itself, defects too, into a message and an exit code."""
    try:
        with _signals():
            yield
    except Leave:
        raise
    except Interrupted as interrupted:
        _exit_with(_as_error(interrupted), settings.as_json)
    except LamplighterError as error:
        _exit_with(traced(settings, error), settings.as_json)
    except Exception as error:
        _exit_with(_defect(settings, error), settings.as_json)


def _as_error(interrupted: Interrupted) -> LamplighterError:
    error = LamplighterError("interrupted; nothing was touched")
    error.exit_code = interrupted.exit_code
    return error


def _exit_with(error: LamplighterError, as_json: bool) -> NoReturn:
    """Leave with what kept the whole task from its work; with ``as_json`` that line is the promised report, too."""
    if as_json:
        fold = Fold()
        fold.add_error(None, None, error)
        say_json({"error": str(error), "exit_code": int(error.exit_code), **fold.report().to_json()})
    complain(error.whole)
    raise Leave(code=error.exit_code)


@contextlib.contextmanager
def _signals(*, last: bool = False) -> Iterator[None]:
    """Make Ctrl-C, TERM and HUP one exception, raised once: a second one ends the process as usual.

    With ``last`` none is heeded any more after the first one, nor after the block: the report that follows and the
    exit code have to say the same. Another `_signals` heeds them again while its block lasts, but for HUP, which it
    leaves ignored: that is how `nohup` begins, too.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS if last else (number,):
            signal.signal(each, signal.SIG_IGN if last else signal.SIG_DFL)
        raise Interrupted(Exit.INTERRUPTED if number == signal.SIGINT else Exit.TERMINATED)

    is_deaf = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heeded = [number for number in SIGNALS if not (number == signal.SIGHUP and is_deaf)]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if last else handler)
