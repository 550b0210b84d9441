"""Carrying one request to one host and bringing back what it says: deploy, its sister verbs, and the reading ones."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter.errors import (
    UNTOUCHED,
    ContactLost,
    InventoryError,
    LamplighterError,
    NodeRefused,
    Unreachable,
    UsageError,
)
from lamplighter.inventory import Host, Server, resolve_secrets
from lamplighter.inventory.schema import TREATMENT
from lamplighter.node import events
from lamplighter.node.events import Event
from lamplighter.project import Project
from lamplighter.release.engine import Engine, load_engine
from lamplighter.release.release import Release, build_release, server_plan
from lamplighter.report.wording import number, serving, text
from lamplighter.run.conversation import NoAnswer, converse
from lamplighter.run.places import with_places
from lamplighter.ssh.config import local_user

if TYPE_CHECKING:
    from lamplighter.ssh.connection import Node

OnEvent = Callable[[Event], None]


@dataclasses.dataclass(frozen=True)
class Unlisted:
    """A server that the inventory does not name: what is needed of it, its node has on record."""

    name: str


#: What a person can name with ``--server``.
Named = Server | Unlisted

#: What checks are told of a server that may differ from release to release.
OF_RELEASE = ("model", "served_name", "host", "port", "gpus", "tls")
#: Seconds to wait before each try to find a run again after contact was lost; a try costs a connect_timeout at most.
RECONNECT_PAUSES = (1.0, 3.0, 6.0)


class HostSession:
    """An open connection to one host of the inventory; every verb is one exec on it."""

    def __init__(self, host: Host, node: Node, project: Path | Project) -> None:
        self.host = host
        self.node = node
        self.project = project
        #: A run that we have asked for and whose end we have not heard of.
        self.under_way: Follower | None = None
        #: What our program has spent there on questions.
        self.seconds_on_node = 0.0
        #: Of a server that was just deployed, for who asks for them next.
        self._told_facts: dict[str, dict[str, Any]] = {}
        self._engines: dict[str, Engine] = {}
        #: The plans of servers that were rolled back, to which the inventory's are no measure.
        self._released: dict[str, dict[str, Any]] = {}

    def run(self, verb: str, server: Named, on_event: OnEvent, **options: Any) -> None:
        """Have the node do ``verb`` (deploy, rollback, start, stop) for ``server``, in a run of its own.

        Touches the node as the verb says. A run that has begun there ends there, connected or not: when
        the wire breaks we look for it again, and if that fails ContactLost names it. One that the node has not begun by
        then never begins. Raises LamplighterError for all that kept it from beginning.
        """
        prepared = self.prepare(verb, server)

        def listen(event: Event) -> None:
            if event["event"] == events.END:  # what comes after it may be given up
                self.under_way = None
            on_event(event)

        follower = self._follower(server, prepared["run"], listen)
        follower.asked = {"verb": verb, "by": whoever_asks()}

        def is_sent() -> None:
            self.under_way = follower

        try:
            self._follow({**prepared, **options}, follower, is_sent)
        except LamplighterError:  # it says all that is known of the run
            self.under_way = None
            raise
        self.under_way = None
        self._told_facts = {server.name: follower.facts} if follower.facts else {}

    def attach(self, server: Named, on_event: OnEvent, run: str | None = None) -> None:
        """Show a run of ``server`` from its first event, and follow it while it goes on. Reads only."""
        self._attach(self._follower(server, run, on_event))

    def cancel(self, server: Named, on_event: OnEvent, run: str | None = None) -> None:
        """Ask the run at work on ``server`` (or ``run``) to end, and follow it to its end.

        Before ``stop`` the node stays as it is, afterwards the run rolls back. Asked again when the wire breaks, until
        the node has heard it. Raises NoSuchRun where none is at work.
        """
        self._cancel(self._follower(server, run, on_event))

    def cancel_or_see_its_end(self, run: Follower) -> None:
        """Cancel a run that we have followed so far; where its own end came first, show that and say so.

        One that has not begun never begins. Raises NoSuchRun where the node does not know it.
        """
        try:
            self._cancel(run)
        except NoSuchRun as refusal:
            self._attach(run)
            run.tell(f"nothing was cancelled ({refusal.what}): the run had come to its own end")

    def _follower(self, server: Named, run: str | None, on_event: OnEvent) -> Follower:
        if isinstance(server, Unlisted):
            return Follower(self.host.name, server.name, run, on_event, is_unlisted=True)
        return Follower(self.host.name, server.name, run, self._with_places(server, on_event))

    def _with_places(self, server: Server, on_event: OnEvent) -> OnEvent:
        """Tell with each failure and warning, and with the end of the run, where the inventory says what it names."""

        def listen(event: Event) -> None:
            is_hint = event["event"] in (events.FAILURE, events.WARNING) or (
                event["event"] == events.END and event.get("hint")
            )
            on_event(self._placed(server, event) if is_hint else event)

        return listen

    def _placed(self, server: Server, told: Mapping[str, Any]) -> dict[str, Any]:
        return with_places(told, self.host, server, self.project / "roles")

    def _found(self, server: Server, findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The findings of a node, those that are not well with their places in the inventory."""
        return [dict(each) if each["level"] == "ok" else self._placed(server, each) for each in findings]

    def _attach(self, run: Follower) -> None:
        self._follow({"verb": "attach", **_about(run), "to": run.run, "after": run.last}, run)

    def _cancel(self, run: Follower) -> None:
        # by its number the node knows an order that comes twice: it is meant for one run, and not for the next one, too
        order = {"order": secrets.token_hex(8), "by": whoever_asks(), **run.unless_begun}
        self._follow({"verb": "cancel", **_about(run), "to": run.run, "after": run.last, **order}, run)

    def reconnect(self) -> None:
        """Give the connection up and log in again. Raises Unreachable or one of its kinds."""
        self.node.close()
        self.node.open()

    def _follow(
        self, request: Mapping[str, Any], follower: Follower, on_sending: Callable[[], None] = lambda: None
    ) -> None:
        """Hold the conversation that ``request`` begins to the run's end, over as many connections as it takes."""
        whole = {"host": self.host.name, "root": self.host.root, **request}
        pauses = list(RECONNECT_PAUSES)
        is_first = True
        words = follower.words
        while True:
            heard = follower.last
            try:
                if not (is_first and self.node.is_alive):  # what came before on this host may have lost it
                    self.reconnect()
                bye = converse(self.node, self.host.connection.python, whole, follower, on_sending)
            except LamplighterError as error:
                if is_first and not isinstance(error, ContactLost):
                    raise
                if request["verb"] == "cancel" and isinstance(error, NoSuchRun):
                    raise
                trouble = error
            else:
                self._check_farewell(bye, follower)
                return
            if follower.last > heard:
                pauses = list(RECONNECT_PAUSES)
            if not pauses:
                if request["verb"] == "cancel":
                    raise told_to_end(follower, trouble, is_heard=follower.words > words) from trouble
                raise detached(follower, trouble) from trouble
            if isinstance(trouble, NoAnswer):  # each try costs the whole time that the node is given
                del pauses[1:]
            follower.tell(f"contact lost ({trouble.what}); looking for the run again")
            time.sleep(pauses.pop(0))
            is_first = False
            whole = {"host": self.host.name, "root": self.host.root, **_once_more(request, follower)}

    def logs(
        self,
        server: Named,
        write: Callable[[str], None],
        lines: int,
        follow: bool,
        run: str | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Hand the last ``lines`` lines of a log to ``write``, then what it gains. Reads only.

        The log of what serves, or served last; with ``run``, of the server which that run started. ``tell`` gets what
        is to be said of the log itself: it was cut, or another one goes on in its place.
        """

        def listen(event: Event) -> None:
            if event.get("missing"):
                raise NodeRefused(
                    f"{self.host.name}: server {server.name} has no {'such log' if run else 'log'}",
                    why=event.get("why", "nothing has been deployed there"),
                    next_step=events.invocation("status", self.host.name, server.name),
                )
            if event["event"] == events.LOG and event.get("note"):
                tell(event["note"])
            elif event["event"] == events.LOG:
                write(event["text"])

        self._ask({"verb": "logs", **_named([server]), "lines": lines, "follow": follow, "to": run}, listen)

    def status(self, servers: Sequence[str], patience: float | None = None) -> dict[str, Any]:
        """Ask what serves and which run is in progress: {"root", "servers": [...]}. Reads only.

        ``patience``: seconds that each server has for a token, for those who can wait longer than a person.
        """
        return self._result({"verb": "status", "servers": list(servers), "patience": patience})

    def statuses(self, servers: Sequence[str], patience: float | None = None) -> dict[str, dict[str, Any]]:
        """Return ``status`` of each server, by name."""
        return {found["name"]: found for found in self.status(servers, patience)["servers"]}

    def standings(self, servers: Sequence[Named], *, everything: bool = False) -> dict[str, dict[str, Any]]:
        """Return ``status`` of each server with its ``drift`` from the inventory as it is now, by name. Reads only.

        With ``everything`` also of those that the node alone knows. Whom the inventory does not name is ``unlisted``,
        and its drift is told from its own release.
        """
        wanted: dict[str, dict[str, Any]] = {}
        faults: dict[str, str] = {}
        for server in servers:
            if isinstance(server, Unlisted):
                continue
            try:
                wanted[server.name] = self.wanted(server)
            except InventoryError as error:
                faults[server.name] = f"inventory: {error.what}"
        found = self._result({"verb": "status", **_named(servers), "wanted": wanted, "everything": everything})
        standing = {one["name"]: {**one, "unlisted": one["name"] not in self.host.servers} for one in found["servers"]}
        for name, fault in faults.items():
            standing[name]["drift"]["unknown"].append(fault)
        return standing

    def wanted(self, server: Server) -> dict[str, Any]:
        """Return what the inventory wants of ``server`` now, as drift is told by. Raises InventoryError."""
        return _wanted(self._release(server))

    def as_released(self, server: Server) -> Server:
        """Return ``server`` as the release that became ready last has it, which may be none of this inventory.

        Its ``facts`` are then asked for as that release wants them. Reads only.
        """
        plan = self._result({"verb": "released", "servers": [server.name]})["server"]
        if plan is None:
            return server
        self._released[server.name] = plan
        return server.model_copy(update={name: plan[name] for name in OF_RELEASE if name in plan})

    def facts(self, server: Server) -> dict[str, Any]:
        """Ask all that checks may know about the node and ``server``, in one exec. Reads only.

        Who has just deployed it has been told with the end of the run.
        """
        if server.name in self._told_facts:
            return self._told_facts.pop(server.name)
        engine = self.engine_of(server)
        if server.name in self._released:
            plan = self._released[server.name]
            return self._result({"verb": "facts", "server": plan, "engine": engine.compiled})
        release = build_release(self.host, server, engine, self.project)
        request = {"verb": "facts", "server": release.manifest["server"], "engine": engine.compiled}
        return self._result({**request, "wanted": _wanted(release)})

    def engine_of(self, server: Server) -> Engine:
        """The engine of ``server``, whose files are read once. Raises InventoryError."""
        if server.engine not in self._engines:
            self._engines[server.engine] = load_engine(server.engine, self.project / "roles")
        return self._engines[server.engine]

    def releases(self, servers: Sequence[Named]) -> dict[str, dict[str, Any]]:
        """List the releases that the node has of each server, by server name. Reads only."""
        return self._by_name({"verb": "releases", **_named(servers)})

    def history(self, servers: Sequence[Named], since: float | None, *, everything: bool) -> dict[str, dict[str, Any]]:
        """List the runs on each server that began within ``since`` seconds, by server name. Reads only.

        With ``everything`` also of the servers that the node alone knows.
        """
        return self._by_name({"verb": "history", **_named(servers), "since": since, "everything": everything})

    def hold(self, servers: Sequence[Named], order: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Put the servers on hold as ``order`` says (message, seconds), or end that (end); tell how each stands."""
        return self._by_name({"verb": "hold", **_named(servers), **order, "by": whoever_asks()})

    def _by_name(self, request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {server["name"]: server for server in self._result(request)["servers"]}

    def check(self, server: Server) -> dict[str, Any]:
        """Ask the preflight's questions, and who would be stopped by a deploy. Reads only."""
        found = self._result(self._question("check", server, self._release(server)))
        return {**found, "findings": [*_secret_findings(server), *self._found(server, found["findings"])]}

    def _release(self, server: Server) -> Release:
        return build_release(self.host, server, self.engine_of(server), self.project)

    def _question(self, verb: str, server: Server, release: Release) -> dict[str, Any]:
        """A request about what a deploy of ``release`` would do."""
        return {
            "verb": verb,
            "server": release.manifest["server"],
            "engine": release.manifest["engine"],
            "release": {"digest": release.digest},
            "checks": server.to_json()["checks"],
            "lint": _lint_of_node(server, self.project),
            **self._names(server),
        }

    def _names(self, server: Server) -> dict[str, Any]:
        """Which servers the node may have, and the name that this one had there."""
        return {"inventory": sorted(self.host.servers), "was": server.was}

    def plan(self, server: Server) -> dict[str, Any]:
        """Ask what a deploy of ``server`` would change, stop and find, as ``check`` does. Reads only."""
        from lamplighter.release.changes import compare  # with the reader of arguments, which other verbs do without

        findings, release = _secret_findings(server), self._release(server)
        asked = self._question("plan", server, release)
        found = self._result(asked if findings else {**asked, "secrets": resolve_secrets(server)})
        changes = compare(release, found["current"], found["changed_secrets"])
        serves = found["status"]["state"] == "serving"
        return {
            "release": release.digest,
            "state": found["status"]["state"],
            "serving": found["current"]["name"] if serves and found["current"] else None,
            "is_pending": bool(changes) or not serves or bool(found["drift"]["differences"]),
            "changes": changes.to_json(),
            "drift": found["drift"],
            "findings": [*findings, *self._found(server, found["findings"])],
            "would_stop": found["would_stop"],
        }

    def env(self, server: Server) -> dict[str, Any]:
        """Ask what the live workers of ``server`` carry, by the release that runs. Reads only."""
        return self._result({"verb": "env", "servers": [server.name]})

    def diagnose(self, server: Server) -> dict[str, Any]:
        """Diagnose the last run of ``server`` on its node, with what the node itself knows of it. Reads only."""
        engine = self.engine_of(server)
        return self._result({"verb": "diagnose", "servers": [server.name], "engine": engine.compiled})

    def prepare(self, verb: str, server: Named) -> dict[str, Any]:
        """Build the request: everything the node needs, so that it depends on no one afterwards.

        Only ``deploy`` brings a release. The other verbs work with what is on the node, and so also while the
        inventory is wrong about this server's command line: then the node takes the plan of the current release.
        """
        begun = {
            "verb": verb,
            "run": new_run_id(),
            "host": self.host.name,
            "root": self.host.root,
            "by": whoever_asks(),
        }
        if verb != "deploy" or isinstance(server, Unlisted):
            return {**begun, **self._plan(server)}
        engine = self.engine_of(server)
        release = build_release(self.host, server, engine, self.project)
        return {
            **begun,
            "server": release.manifest["server"],
            "engine": engine.compiled,
            "release": {
                "digest": release.digest,
                "files": {name: {"text": file.text, "mode": file.mode} for name, file in release.files.items()},
            },
            "checks": server.to_json()["checks"],
            "lint": _lint_of_node(server, self.project),
            **self._names(server),
            "secrets": resolve_secrets(server),
            "wanted": _wanted(release),
            "tell_facts": True,
        }

    def _plan(self, server: Named) -> dict[str, Any]:
        if isinstance(server, Unlisted):
            nowhere = f"the inventory names no server {server.name}"
            return {"server": {"name": server.name}, "unplanned": nowhere, "unlisted": True}
        try:
            engine = self.engine_of(server)
            return {"server": server_plan(self.host, server, engine), "engine": engine.compiled}
        except InventoryError as error:
            said = server.to_json()
            return {
                "server": {"name": server.name, **{key: said[key] for key in TREATMENT}},
                "unplanned": f"{error.origin}: {error.what}" if error.origin else error.what,
            }

    def _result(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._told_facts.clear()  # who asks anew wants what is so now
        found: dict[str, Any] = {}

        def listen(event: Event) -> None:
            if event["event"] == events.RESULT:
                found.update(event)

        self._ask(request, listen)
        return {name: value for name, value in found.items() if name != "event"}

    def _ask(self, request: Mapping[str, Any], listen: OnEvent) -> Event:
        whole = {"host": self.host.name, "root": self.host.root, **request}
        try:
            bye = converse(self.node, self.host.connection.python, whole, listen)
        except NoAnswer as silent:
            raise NodeRefused(silent.what, why=silent.why, next_step=silent.next_step) from silent
        except ContactLost as lost:  # a question leaves nothing behind that could go on without us
            raise Unreachable(lost.what, why=lost.why, next_step="ask again") from lost
        self.seconds_on_node += number(bye.get("took")) or 0.0
        self._refuse_unknown(bye)
        _raise_defect(self.host.name, bye)
        return bye

    def _refuse_unknown(self, bye: Event) -> None:
        if bye.get("unknown_server"):
            raise UsageError(
                f"neither the inventory nor {self.host.name} knows a server {bye['unknown_server']}",
                serving=UNTOUCHED,
                next_step=f"`./inv status --all --host {self.host.name}` shows what is there",
            )

    def _check_farewell(self, bye: Event, follower: Follower) -> None:
        self._refuse_unknown(bye)
        if bye.get("refused"):
            raise NodeRefused(
                f"{self.host.name}: no run can keep its journal there",
                why=bye["refused"],
                serving=UNTOUCHED,
                next_step="make room or fix the file system, then run the same command again",
            )
        if bye.get("unplanned"):
            raise InventoryError(
                bye["unplanned"],
                why=f"and {self.host.name} has no release of {follower.server} whose plan could be used instead",
                serving=UNTOUCHED,
            )
        _raise_defect(self.host.name, bye)
        if bye.get("worker_gone"):
            raise LamplighterError(
                f"{self.host.name}: run {follower.run} of server {follower.server} ended without a last word",
                why=bye.get("errors") or "its worker process was killed, or the node went down",
                serving=self._what_serves(follower.server),
                next_step="deploy again: it repairs from what the run wrote down",
            )

    def _what_serves(self, server: str) -> str:
        try:
            found = self.statuses([server])[server]
        except LamplighterError:
            return "unknown: the run may have stopped the old server"
        told = serving(found) if found["state"] == "serving" else f"nothing ({found['state']})"
        return f"{told}: {found['message']}" if found["message"] else told


@contextlib.contextmanager
def open_session(host: Host, project: Path | Project) -> Iterator[HostSession]:
    """Connect to ``host``. Raises Unreachable or one of its kinds."""
    from lamplighter.ssh.connection import Node

    with Node(host.name, host.connection) as node:
        yield HostSession(host, node, project)


@contextlib.contextmanager
def begin_session(host: Host, project: Path | Project) -> Iterator[HostSession]:
    """Begin to connect to ``host``; the first question waits for that, and raises what `open_session` would."""
    from lamplighter.ssh.connection import Node

    with contextlib.closing(Node(host.name, host.connection)) as node:
        node.begin()
        yield HostSession(host, node, project)


def _lint_of_node(server: Server, project: Path | Project) -> dict[str, Any]:
    from lamplighter.lint import lint_of_node  # with all its rules, which most verbs do without

    return lint_of_node(server, project / "roles")


def _secret_findings(server: Server) -> list[dict[str, str]]:
    """A secret that cannot be had here would refuse the deploy before the node is asked anything."""
    try:
        resolve_secrets(server)
    except InventoryError as error:
        where = f"{error.origin}: " if error.origin else ""
        return [
            {
                "id": "secret",
                "level": "error",
                "message": line,
                "evidence": "",
                "hint": error.next_step or "set it where you run lamplighter; it is read here, not on the node",
            }
            for line in f"{where}{error.what}".splitlines()
        ]
    return []


def _named(servers: Sequence[Named]) -> dict[str, Any]:
    """Which servers a question is about; the node says whether it knows those that the inventory does not."""
    return {
        "servers": [one.name for one in servers],
        "unlisted": any(isinstance(one, Unlisted) for one in servers),
    }


def _wanted(release: Release) -> dict[str, Any]:
    """Return what drift is told by: how we treat a server is no part of it, since that restarts nothing."""
    return {
        "digest": release.digest,
        "server": {name: value for name, value in release.manifest["server"].items() if name not in TREATMENT},
        "files": {name: hashlib.sha256(file.text.encode()).hexdigest() for name, file in release.files.items()},
    }


class NoSuchRun(NodeRefused):
    """The node has no such run of this server."""


class NodeDefect(LamplighterError):
    """Our program on the node ended in an unforeseen way; ``trace`` says where."""

    def __init__(self, what: str, *, why: str, next_step: str, trace: str) -> None:
        super().__init__(what, why=why, next_step=next_step)
        self.trace = trace


class Follower:
    """Hands the events of one run to ``on_event``, and knows how far it has come: ``last`` is the last one's number."""

    def __init__(
        self,
        host: str,
        server: str,
        run: str | None,
        on_event: OnEvent,
        after: int = 0,
        *,
        is_unlisted: bool = False,
    ) -> None:
        self.host = host
        self.server = server
        self.is_unlisted = is_unlisted
        self.run = run
        self.last = after
        #: How many lines of the node came, heartbeats too.
        self.words = 0
        #: Who asked for the run, and for which verb; None for a run of somebody else.
        self.asked: Mapping[str, str] | None = None
        #: What the node has told with the end of a deploy, for the checks.
        self.facts: dict[str, Any] = {}
        self._on_event = on_event

    def __call__(self, event: Event) -> None:
        if event["event"] == events.RESULT and event.get("error"):
            if event.get("hint"):  # there is one, and nothing has become of what we asked for
                goes_on = f"the run on server {self.server} goes on"
                raise NodeRefused(event["error"], serving=goes_on, next_step=event["hint"])
            status = events.invocation("status", self.host, self.server)
            raise NoSuchRun(event["error"], next_step=f"`{status}` shows what there is")
        self.words += 1
        if event["event"] == events.FACTS:
            self.facts = event["facts"]
            return
        self.run = text(event.get("run")) or self.run
        self.last = max(self.last, int(number(event.get("seq")) or 0))
        self._on_event(event if "host" in event else {**event, "host": self.host, "server": self.server})

    @property
    def is_begun(self) -> bool:
        """Whether the run was heard of."""
        return self.last > 0

    @property
    def unless_begun(self) -> dict[str, Any]:
        """What a request says for the node to see that the run never begins, if it has not: its first one may be late.

        Who makes the run's directory first, that one or this one, decides; so the answer is no guess.
        """
        return {"forbid": self.asked} if self.asked and not self.is_begun else {}

    def tell(self, message: str) -> None:
        """Tell a warning of our own."""
        self._on_event({**events.warning("", message), "host": self.host, "server": self.server, "run": self.run})


def _once_more(request: Mapping[str, Any], run: Follower) -> dict[str, Any]:
    """Return what to ask once contact was lost: the same order to cancel, else for the run."""
    if request["verb"] == "cancel":
        return {**request, "to": run.run, "after": run.last}
    return {"verb": "attach", **_about(run), "to": run.run, "after": run.last, **run.unless_begun}


def _about(run: Follower) -> dict[str, Any]:
    """Which server a request about a run is for."""
    return {"servers": [run.server], "unlisted": run.is_unlisted}


def whoever_asks() -> str:
    """Name the person and the machine that ask, for those who meet the lock."""
    return f"{local_user()}@{socket.gethostname()}"


def new_run_id() -> str:
    """Name a run: its UTC time, so that names sort by age, and six random hex digits."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"


def _raise_defect(host: str, bye: Event) -> None:
    if bye.get("error"):
        raise NodeDefect(
            f"{host}: our program on the node failed",
            why=str(bye["error"]),
            next_step="report it; LAMPLIGHTER_DEBUG=1 shows its trace",
            trace=text(bye.get("trace")) or "",
        )


def told_to_end(run: Follower, trouble: LamplighterError | None, *, is_heard: bool) -> ContactLost:
    """Return the error that says: we asked the run to end; without ``is_heard`` nothing came back after that."""
    name = f"{f'run {run.run}' if run.run else 'the run'} of server {run.server}"
    serving = f"{name} was told to end, and does so by itself on the node"
    if not is_heard:
        serving = f"whether {name} was told to end is not known; if it was not, it goes on by itself on the node"
    verb = "attach" if is_heard else "cancel"
    return ContactLost(
        trouble.what if trouble else f"{run.host}: detached",
        why=trouble.why if trouble else "interrupted",
        serving=serving,
        next_step=events.invocation(verb, run.host, run.server, *(("--run", run.run) if run.run else ())),
    )


def detached(run: Follower, trouble: LamplighterError | None = None) -> ContactLost:
    """Return the error that says: the run goes on without us, if it has begun, and this is how to see it again."""
    goes_on = (
        "goes on by itself on the node" if run.is_begun else "may have begun; then it goes on by itself on the node"
    )
    words = ("--run", run.run) if run.run else ()  # without it, attach shows another one where this has not begun
    return ContactLost(
        trouble.what if trouble else f"{run.host}: detached",
        why=trouble.why if trouble else "interrupted",
        serving=f"{f'run {run.run}' if run.run else 'a run'} of server {run.server} {goes_on}",
        next_step=events.invocation("attach", run.host, run.server, *words),
    )
