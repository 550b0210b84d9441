"""Servers as systemd units: a node's reboot brings them back, a crash restarts them, nothing escapes their cgroup.

There is one lasting unit a server, ``lamplighter-NAME.service``, and one of its own for each launch, whose name has the
run in it: a new server may wait in its own beside the old one in the lasting one. A launch's unit lies below /run only,
with ``Restart=no`` and the drop-ins of the lasting one: the old unit and its enabled state stay untouched, and a reboot
in the middle of a deploy brings the old release back. ``commit`` makes the running unit the lasting one; only the
cgroup keeps the launch's name, until the next start. Root uses the system's manager; anybody else their own, and only
with lingering: without it systemd ends all of a user's units ten seconds after the last logout.

facts: a unit file in ``system.control`` below /run goes before one in /etc (systemd.unit(5), table 1); removing it and
reloading gives a running unit its old description back. A failed unit blocks its name: reset-failed first.
``systemctl show`` forgets exit status 0, so ExecStopPost writes it down.
facts (systemd 247, 252 and 257, both managers): where a unit's own file has become a link to another unit, a reload
gives the running unit that one's name and settings. Had that name a unit in memory, be it a dead one (what is enabled
or wanted always has), the two become one, and the state of either: so the dead one gets another name first, by another
reload. The other way round, the lasting name as a link, `systemctl enable` refuses it, `disable` removes it, and `edit`
and `set-property` write beside the launch's name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import os
import pwd
import re
import shutil
import subprocess
import time
from typing import Any, Callable, Mapping, Optional

from lamplighter.node.keeper.launched import Launched, LaunchFailed, Order, bare_environment, unit_in
from lamplighter.node.layout import LaunchFiles, ServerHome, read_json
from lamplighter.node.system import files, processes
from lamplighter.node.system.processes import Unit

CALL_SECONDS = 30.0
POLL_SECONDS = 0.1
#: Beyond the seconds from TERM to KILL: systemd's own time to notice, and that of ExecStopPost.
STOP_MARGIN_SECONDS = 10.0

RUNNING = "/run/systemd/system"
LINGER = "/var/lib/systemd/linger"
#: Below it are system users, whose shared memory logind leaves alone.
SYSTEM_UIDS = 1000
#: A drop-in that exists while an old unit is started again: it shall not be restarted before it was ready once.
HOLD = "zz-lamplighter-starting.conf"

#: What the name of every unit of ours begins with.
PREFIX = "lamplighter-"

_VENDOR_UNITS = ("/usr/lib/systemd/system", "/lib/systemd/system")

_TOKEN = re.compile(r"@([A-Z_]+)@")


# --------------------------------------------------------------------------------------------------------- may we?


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Why there can be no unit for us here, and what to do about it."""

    reason: str
    hint: str


def why_not() -> Optional[Obstacle]:
    """Say why this user cannot have lasting units on this node, None if that works."""
    obstacle = _why_no_manager()
    if obstacle is None and not _is_writable(our_manager().directory):
        where = our_manager().directory
        return Obstacle(f"{where} cannot be written", "say launcher: detached where units are managed by other means")
    return obstacle


def _is_writable(directory: str) -> bool:
    """Tell whether a directory can be written, or made."""
    while not os.path.lexists(directory):
        directory = os.path.dirname(directory)
    return os.access(directory, os.W_OK | os.X_OK)


def _why_no_manager() -> Optional[Obstacle]:
    if not os.path.isdir(RUNNING):
        return Obstacle("PID 1 of this node is not systemd", "say launcher: auto or detached")
    if shutil.which("systemctl") is None:
        return Obstacle("there is no systemctl on the PATH", "install systemd's tools, or say launcher: detached")
    uid = os.geteuid()
    if uid == 0:
        return None
    user = processes.user_name(uid)
    if not is_lingering(uid):
        return Obstacle(
            f"lingering is off for {user}: systemd would end the server ten seconds after the last logout",
            f"run `loginctl enable-linger` as {user} on the node (needs no root), or use become: true",
        )
    if not os.path.exists(f"/run/user/{uid}/systemd/private"):
        return Obstacle(
            f"the systemd manager of {user} does not run", f"run `systemctl start user@{uid}.service` as root"
        )
    return None


def is_lingering(uid: int) -> bool:
    """Tell whether systemd keeps this user's manager when nobody is logged in."""
    return os.path.exists(f"{LINGER}/{processes.user_name(uid)}")


def scope(unit: str) -> list[str]:
    """Return the words that put a command into a systemd scope of its own; none where that is not possible.

    Outside of our session's scope neither logind nor a restart of sshd ends it. Measured cost: 50 ms.
    """
    if _why_no_manager() is not None or shutil.which("systemd-run") is None:
        return []
    words = ["--scope", "--collect", "--quiet", f"--unit={unit}"]
    uid = os.geteuid()
    if uid == 0:
        return ["systemd-run", *words]
    runtime = "XDG_RUNTIME_DIR"
    return ["env", f"{runtime}=/run/user/{uid}", "systemd-run", "--user", *words, "env", "-u", runtime]


@dataclasses.dataclass(frozen=True)
class Danger:
    """What ends a server that is started now although nobody stops it; ``id`` names it, ``is_sure``: that is known."""

    id: str
    message: str
    evidence: str
    hint: str
    is_sure: bool = True


def dangers(*, is_unit: bool) -> list[Danger]:
    """Say what the end of our login, or of the unit that we run in, does to a server. Asks logind and systemd.

    ``is_unit``: it will be a unit. Else it gets a scope of its own where there can be one, and without one it stays in
    our own cgroup. facts: with KillUserProcesses=yes only that scope or unit outlives the logout, lingering or not; a
    service that ends takes along all that was started in it, unless its KillMode is process or none.
    """
    if not os.path.isdir(RUNNING):
        return []
    me = processes.read_process(os.getpid())
    stays = not is_unit and not scope("lamplighter-server")
    found: list[Optional[Danger]] = []
    if stays and me is not None:
        found = [_end_of_login(me.cgroup), _time_of_login(me.cgroup), _end_of_manager(me.cgroup)]
        found.append(_end_of_unit(processes.unit_of(me)))
    return [danger for danger in (*found, _loss_of_shared_memory()) if danger is not None]


def _end_of_login(cgroup: str) -> Optional[Danger]:
    """Whose login it is, the cgroup says: what sudo starts there ends with the login of who called it."""
    session = re.search(r"/user-(\d+)\.slice/session-[^/]+\.scope", cgroup)
    if session is None:
        return None
    user = processes.user_name(int(session.group(1)))
    kills, spared, only = (logind(name) for name in ("KillUserProcesses", "KillExcludeUsers", "KillOnlyUsers"))
    if kills is None:
        message = f"it is not known whether logind kills the processes of {user} at logout"
        evidence = "neither busctl nor systemd-analyze tells KillUserProcesses"
        return Danger("logout_unknown", message, evidence, _how_to_stay(), is_sure=False)
    if not _is_yes(kills) or user in _names(spared) or (_names(only) and user not in _names(only)):
        return None
    message = f"logind kills all processes of {user} at logout: the server, and this run too"
    return Danger("logout_kills", message, f"KillUserProcesses=yes, and {_why_no_scope()}", _how_to_stay())


def _time_of_login(cgroup: str) -> Optional[Danger]:
    """facts: PAM may limit a session (systemd.runtime_max_sec); then its scope is killed, with all that is in it."""
    scope = re.search(r"/(session-[^/]+\.scope)", cgroup)
    limit = Manager(None).show(scope.group(1), "RuntimeMaxUSec").get("RuntimeMaxUSec", "") if scope else ""
    if not _is_limit(limit) or scope is None:
        return None
    message = f"systemd kills the login that this run came by, and the server in it, after {limit}"
    return Danger("login_expires", message, f"{scope.group(1)}: RuntimeMaxUSec={limit}", _how_to_stay())


def _end_of_manager(cgroup: str) -> Optional[Danger]:
    """What lives below a user's manager ends with it, ten seconds after that user's last logout.

    No login over SSH gets there: it is a terminal of a desktop, or a session that its user has made and still has.
    """
    manager = re.search(r"/user@(\d+)\.service/", cgroup)
    if manager is None or is_lingering(int(manager.group(1))):
        return None
    user = processes.user_name(int(manager.group(1)))
    message = f"the server would live below the systemd manager of {user}, which ends with the last logout"
    trouble = f"user@{manager.group(1)}.service, no lingering"
    return Danger("manager_ends", message, trouble, _how_to_stay(), is_sure=False)


def _is_limit(value: str) -> bool:
    return value not in ("", "infinity", "0")


def _end_of_unit(unit: Optional[Unit]) -> Optional[Danger]:
    if unit is None or not unit.name.endswith(".service"):
        return None
    mode = Manager(unit.manager_uid).show(unit.name, "KillMode").get("KillMode", "")
    if mode not in ("control-group", "mixed"):
        return None
    message = f"the server would live in {unit.name}, and be killed when that ends"
    return Danger("unit_kills", message, f"KillMode={mode}, and {_why_no_scope()}", _how_to_stay())


def _loss_of_shared_memory() -> Optional[Danger]:
    """No more than a risk: what is mapped stays, what is opened by its name later is gone."""
    uid = os.geteuid()
    if uid < SYSTEM_UIDS or is_lingering(uid) or not _is_yes(logind("RemoveIPC") or ""):
        return None
    user = processes.user_name(uid)
    message = f"logind removes the shared memory of {user} 15 s after logout, a live server's too"
    hint = f"run `loginctl enable-linger` as {user} on the node (needs no root)"
    return Danger("remove_ipc", message, "RemoveIPC=yes, no lingering", hint, is_sure=False)


def _why_no_scope() -> str:
    obstacle = _why_no_manager()
    return obstacle.reason if obstacle is not None else "there is no systemd-run to make a scope of its own"


def _how_to_stay() -> str:
    obstacle = _why_no_manager()
    return obstacle.hint if obstacle is not None else "install systemd-run (Debian: package systemd), or become: true"


def _is_yes(value: str) -> bool:
    return value.rpartition(" ")[2].lower() in ("true", "yes", "on", "1", "t", "y")


def _names(value: Optional[str]) -> list[str]:
    """Read a list of users: `as 2 "root" "ops"` of busctl, `root ops` of a file."""
    return re.findall(r'"([^"]*)"', value or "") if (value or "").startswith("as ") else (value or "").split()


def logind(setting: str) -> Optional[str]:
    """Return a setting of logind (RemoveIPC, KillUserProcesses, KillExcludeUsers) as busctl prints it, or None.

    Where the bus does not answer, as the files say it, in their words.
    """
    words = ["busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"]
    answer = run([*words, "org.freedesktop.login1.Manager", setting])
    if answer.ok:
        return answer.stdout.strip()
    answer = run(["systemd-analyze", "cat-config", "systemd/logind.conf"])
    said = re.findall(rf"^\s*{setting}\s*=(.*)$", answer.stdout, re.MULTILINE) if answer.ok else []
    return said[-1].strip() if said else None


# ------------------------------------------------------------------------------------------------------ one manager


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command said; ``ok`` false also when it could not be run or did not end in time."""

    ok: bool
    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True)
class Manager:
    """One systemd manager: the system's (``uid`` None), or a user's. Asking changes nothing."""

    uid: Optional[int]

    @property
    def directory(self) -> str:
        """Where units lie that outlive a reboot."""
        if self.uid is None:
            return "/etc/systemd/system"
        return os.path.join(pwd.getpwuid(self.uid).pw_dir, ".config/systemd/user")

    @property
    def runtime_directory(self) -> str:
        """Where units lie until the next reboot, and go before those of ``directory``."""
        if self.uid is None:
            return "/run/systemd/system.control"
        return f"/run/user/{self.uid}/systemd/user.control"

    @property
    def drop_in_bases(self) -> tuple[str, ...]:
        """Where settings for units may lie, the strongest first; `systemctl set-property` writes into the first two."""
        set_by_property = (f"{self.directory}.control", self.runtime_directory)
        if self.uid is None:
            vendors = ("/usr/local/lib/systemd/system", *_VENDOR_UNITS)
            return (*set_by_property, self.directory, "/run/systemd/system", *vendors)
        shared = ("/run/systemd/user", "/usr/local/lib/systemd/user", "/usr/lib/systemd/user")
        return (*set_by_property, self.directory, "/etc/systemd/user", f"/run/user/{self.uid}/systemd/user", *shared)

    @property
    def target(self) -> str:
        return "multi-user.target" if self.uid is None else "default.target"

    def may_be_asked(self) -> bool:
        """Tell whether we may start and stop units there."""
        return os.geteuid() == 0 or self.uid == os.geteuid()

    def call(self, *words: str) -> Answer:
        """Run systemctl on this manager, for at most CALL_SECONDS. Never raises."""
        where: list[str] = []
        environment = {}
        if self.uid is not None and self.uid == os.geteuid():
            where = ["--user"]
            environment["XDG_RUNTIME_DIR"] = f"/run/user/{self.uid}"
        elif self.uid is not None:
            where = ["--user", f"--machine={processes.user_name(self.uid)}@.host"]
        return run(["systemctl", "--no-ask-password", "--no-pager", *where, *words], environment=environment)

    def do(self, *words: str) -> None:
        """Run systemctl. Raises LaunchFailed with what it said."""
        answer = self.call(*words)
        if not answer.ok:
            raise LaunchFailed(f"systemctl {' '.join(words)}: {_last_line(answer.stderr) or 'failed'}")

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Return properties of a unit; empty where the manager does not answer."""
        answer = self.call("show", f"--property={','.join(names)}", "--", unit)
        pairs = (line.partition("=") for line in answer.stdout.splitlines()) if answer.ok else ()
        return {name: value for name, _, value in pairs}


def run(words: list[str], seconds: float = CALL_SECONDS, environment: Optional[Mapping[str, str]] = None) -> Answer:
    """Run a supervisor's command (systemctl, busctl, docker), for at most so long. Never raises."""
    try:
        done = subprocess.run(
            words,
            env={**os.environ, "LC_ALL": "C", **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(False, "", str(error))
    return Answer(done.returncode == 0, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def our_manager() -> Manager:
    """Return the manager that our own servers live under."""
    return Manager(None if os.geteuid() == 0 else os.geteuid())


def unit_for(server: str) -> Unit:
    """Name the lasting unit of a server: there is one of that name a manager."""
    return Unit(f"{PREFIX}{server}.service", our_manager().uid)


def unit_of_launch(lasting: Unit, run_id: str, attempt: str) -> Unit:
    """Name the unit that a launch has until it is committed. No server's name has a colon in it."""
    return Unit(f"{_stem(lasting)}:{run_id}:{attempt}.service", lasting.manager_uid)


def known_as(unit: Unit) -> Unit:
    """Return the unit by the name that its manager has for it: once committed, a launch has that of the server.

    Its file tells: that of a launch's own unit is there until then, and at most until the next boot.
    """
    stem, colon, _ = unit.name.partition(":")
    if not colon or not stem.startswith(PREFIX) or os.path.lexists(_runtime_file(unit)):
        return unit
    return Unit(f"{stem}.service", unit.manager_uid)


def _stem(unit: Unit) -> str:
    return unit.name[: -len(".service")]


def _runtime_file(unit: Unit) -> str:
    return os.path.join(Manager(unit.manager_uid).runtime_directory, unit.name)


def _lasting_file(unit: Unit) -> str:
    return os.path.join(Manager(unit.manager_uid).directory, unit.name)


def _stand_in(lasting: Unit) -> Unit:
    """Name the unit that a dead one becomes when the lasting name is given to another."""
    return Unit(f"{_stem(lasting)}:was.service", lasting.manager_uid)


# ------------------------------------------------------------------------------------------------------- start


def launch(order: Order, home: ServerHome) -> Launched:
    """Start the release of ``order`` as a unit that a reboot forgets and nothing restarts; ``commit`` makes it lasting.

    It is a unit of its own: what runs in the lasting one goes on. Going back to the release that is committed starts
    the lasting unit as it is, by its own log. Touches: a unit file and its drop-ins below /run, ``unit.json``, the
    launch's log and process record. Raises LaunchFailed, OSError.
    """
    manager, unit = our_manager(), unit_for(order.server)
    known = committed(home)
    if order.launch.attempt == "old" and known is not None and known["release"] == order.release.name:
        order = dataclasses.replace(order, launch=home.run(known["run"]).launch(known["attempt"]))
        _hold(manager, unit)
    else:
        text = unit_text(order, home, manager, "no", order.gate)
        lasting, unit = unit, unit_of_launch(unit, order.run_id, order.launch.attempt)
        others = [each.name for each in _launches(home) if each != unit]
        _note(home, lasting, {"launches": [*others, unit.name]})
        files.make_directory(manager.runtime_directory)
        _link_drop_ins(manager, lasting, unit)
        files.write_file(_runtime_file(unit), text, 0o644)
    log_from = _open_log(order.launch)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(order.launch.exit)
    manager.do("daemon-reload")
    manager.call("reset-failed", unit.name)
    answer = manager.call("start", unit.name)
    main = _main_process(manager, unit)
    if main is None:
        raise LaunchFailed(_why_not_started(manager, unit, answer))
    launched = Launched(main, None, unit, order.launch, log_from)
    _record(launched, order)
    return launched


def _link_drop_ins(manager: Manager, lasting: Unit, unit: Unit) -> None:
    """Let what an administrator sets for the lasting unit hold for a launch's own one, from its start on."""
    directory = f"{_runtime_file(unit)}.d"
    _drop_directory(directory)
    for name, path in sorted(_drop_in_files(manager, lasting.name).items()):
        if os.path.basename(os.path.dirname(path)) == f"{lasting.name}.d" and name != HOLD:
            files.make_directory(directory)
            files.point(os.path.join(directory, name), path)


def unit_text(order: Order, home: ServerHome, manager: Manager, restart: str, gate: Optional[str] = None) -> str:
    """Fill what only the node knows into the release's unit file. Raises LaunchFailed for an unknown place in it.

    ``gate``: where this one start is to wait.
    """
    with open(order.release.unit, encoding="utf-8") as file:
        template = file.read()
    here = _safe_place(home)

    def at(path: str) -> str:
        return here + path[len(home.path) :] if path.startswith(home.path + "/") else path

    environment = bare_environment(at(order.records), None if gate is None else at(gate))
    values = {
        "ENVIRONMENT": " ".join(quote(f"{name}={value}") for name, value in environment.items()),
        "LAUNCH": quote(at(order.release.launch_script)),
        "DIRECTORY": plain_path(at(order.release.path)),
        "LOG": plain_path(at(order.launch.log)),
        "EXIT": quote(at(order.launch.exit)),
        "RESTART": restart,
        "KILL_SIGNAL": f"SIG{order.stop_signal}",
        "STOP_SECONDS": f"{order.stop_seconds + STOP_MARGIN_SECONDS:g}",
        "WANTED_BY": manager.target,
    }
    unknown = {name for name in _TOKEN.findall(template) if name not in values}
    if unknown:
        raise LaunchFailed(f"{order.release.unit}: nothing is known of @{min(unknown)}@; known: {', '.join(values)}")
    # In comments nothing is filled in: they speak of the places.
    lines = template.split("\n")
    return "\n".join(
        line if line.startswith("#") else _TOKEN.sub(lambda found: values[found.group(1)], line) for line in lines
    )


def quote(word: str) -> str:
    """Return ``word`` as one word of an Exec line that stands for exactly these bytes."""
    out = []
    for byte in os.fsencode(word):
        character = chr(byte)
        if character in '\\"':
            out.append("\\" + character)
        elif character in "%$":
            out.append(character * 2)
        elif byte < 0x20 or byte >= 0x7F:
            out.append(f"\\x{byte:02x}")
        else:
            out.append(character)
    return f'"{"".join(out)}"'


def plain_path(path: str) -> str:
    """Return ``path`` for a setting that knows no quotes (a log, a directory); it has passed ``_is_expressible``."""
    return path.replace("%", "%%")


def _is_expressible(path: str) -> bool:
    """Tell whether a setting without quotes can hold the path: valid UTF-8, no control characters."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return not re.search(r"[\x00-\x1f\x7f]", path)


def _safe_place(home: ServerHome) -> str:
    """Return the server's directory, or a link to it where systemd could not express its name."""
    if _is_expressible(home.path):
        return home.path
    links = links_directory()
    if not _is_expressible(links):
        raise LaunchFailed(f"systemd cannot express the path {links!r}: say launcher: detached")
    files.make_directory(links)
    link = os.path.join(links, hashlib.sha256(os.fsencode(home.path)).hexdigest()[:12])
    if not os.path.islink(link) or os.readlink(link) != home.path:
        files.point(link, home.path)
    return link


def links_directory() -> str:
    """Return where links to places with odd names lie."""
    above = "/var/lib" if os.geteuid() == 0 else os.path.join(pwd.getpwuid(os.geteuid()).pw_dir, ".local/state")
    return os.path.join(above, "lamplighter-links")


def _open_log(launch: LaunchFiles) -> int:
    """Make the log, as private as a detached server's; return its size."""
    fd = os.open(launch.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _main_process(manager: Manager, unit: Unit) -> Optional[processes.Identity]:
    """Return the unit's main process; one that has ended already by its pid alone."""
    shown = manager.show(unit.name, "MainPID", "ExecMainPID")
    pid = int(shown.get("MainPID") or 0)
    process = processes.read_process(pid) if pid else None
    if process is not None and processes.unit_of(process) == unit:
        return process.identity
    ended = pid or int(shown.get("ExecMainPID") or 0)
    return processes.Identity(processes.boot_id(), ended, 0) if ended else None


def _why_not_started(manager: Manager, unit: Unit, answer: Answer) -> str:
    where = ["--user-unit" if manager.uid is not None else "--unit", unit.name]
    words = run(["journalctl", *where, "--lines=3", "--output=cat", "--no-pager", "--quiet"]).stdout
    said = "; ".join(line.strip() for line in words.splitlines())
    return f"systemd did not start {unit.name}: {_last_line(answer.stderr)}" + (f" ({said})" if said else "")


def _record(launched: Launched, order: Order) -> None:
    unit = launched.unit
    assert unit is not None
    files.write_json(
        order.launch.process,
        {
            **launched.main.to_json(),
            "unit": unit.name,
            "manager_uid": unit.manager_uid,
            "cgroup": our_manager().show(unit.name, "ControlGroup").get("ControlGroup", ""),
            "command": [order.release.launch_script],
            "t": time.time(),
        },
    )


# --------------------------------------------------------------------------------------------------- commit, forget


def commit(order: Order, home: ServerHome, launched: Launched) -> None:
    """Let the running unit outlive crashes and reboots. Raises LaunchFailed, OSError: a boot starts the old one then.

    From the moment on at which the lasting unit's file is written, a boot starts the new release.
    """
    assert launched.unit is not None
    manager, unit, lasting = our_manager(), launched.unit, unit_for(order.server)
    if unit == lasting:  # the committed unit, started again as it was
        _let_go(manager, lasting)
        return
    path = _lasting_file(lasting)
    before = files.read_text(path)
    known = {
        "text": unit_text(order, home, manager, "on-failure"),
        "release": order.release.name,
        "run": order.run_id,
        "attempt": order.launch.attempt,
    }
    _note(home, lasting, {"next": known})
    files.make_directory(manager.directory)
    try:
        _free_name(manager, lasting, before)
        files.write_file(path, known["text"], 0o644)
        _take_name(manager, lasting, unit, launched.main)
        manager.do("enable", lasting.name)
    except (LaunchFailed, OSError):
        with contextlib.suppress(OSError):
            _drop(path) if before is None else files.write_file(path, before, 0o644)
        for left in (lasting, _stand_in(lasting)):
            _drop(_runtime_file(left))
        manager.call("daemon-reload")
        raise
    others = [each.name for each in _launches(home) if each != unit]
    _note(home, lasting, {**known, "launches": others, "next": None})


def _free_name(manager: Manager, lasting: Unit, text: Optional[str]) -> None:
    """Give the dead unit that has the lasting name another one, lest its state be taken for that of the new one.

    Who starts the name meanwhile gets what has been committed before.
    """
    if not _is_down(lasting):
        raise LaunchFailed(f"{lasting.name} is not down: it was started again, not by this run")
    manager.call("reset-failed", lasting.name)
    aside = _stand_in(lasting)
    files.write_file(_runtime_file(aside), text or "[Service]\nExecStart=/bin/false\n", 0o644)
    files.point(_runtime_file(lasting), aside.name)
    manager.do("daemon-reload")


def _take_name(manager: Manager, lasting: Unit, unit: Unit, main: processes.Identity) -> None:
    """Let the running unit of a launch go by the lasting name, and by no other. Raises LaunchFailed if it does not.

    A reload by somebody else between the two steps that change the names could have it mistaken for the dead one.
    """
    was, new = _runtime_file(lasting), _runtime_file(unit)
    fresh = os.path.join(os.path.dirname(new), f"{files.TEMP_PREFIX}{unit.name}.{os.getpid()}")
    _drop(fresh)
    os.symlink(_lasting_file(lasting), fresh)
    _drop(was)
    os.rename(fresh, new)
    _drop(_runtime_file(_stand_in(lasting)))
    _drop_directory(f"{new}.d")
    manager.do("daemon-reload")
    state = look(lasting)
    if state is None or state.is_down or state.main != main:
        now = "unknown" if state is None else state.active
        raise LaunchFailed(f"{unit.name} did not become {lasting.name}, which is {now}")
    _drop(new)


def forget(home: ServerHome) -> None:
    """Remove the server's units, which do not run any more: it has another launcher now. Raises LaunchFailed, OSError.

    An administrator's drop-ins stay.
    """
    lasting = recorded(home)
    if lasting is None:
        return
    manager, launches = Manager(lasting.manager_uid), _launches(home)
    path = _lasting_file(lasting)
    if os.path.exists(path):
        manager.do("disable", lasting.name)
        _drop(path)
    _drop_runtime(manager, lasting)
    for unit in launches:
        _drop_launch(unit)
    manager.do("daemon-reload")
    for unit in (lasting, *launches):
        manager.call("reset-failed", unit.name)
    _drop(home.unit)


def recorded(home: ServerHome) -> Optional[Unit]:
    """Return the lasting unit of this server if we ever made one, or one of a launch; None if there never was any."""
    record = read_json(home.unit)
    return None if record is None else unit_in(record)


def units(home: ServerHome, sparing: Optional[Unit] = None) -> list[Unit]:
    """Return all units that we made for this server, but for ``sparing``: the lasting one, then those of launches."""
    lasting = recorded(home)
    return [] if lasting is None else [each for each in (lasting, *_launches(home)) if each != sparing]


def names(home: ServerHome, sparing: Optional[Unit] = None) -> frozenset[Unit]:
    """Return the units whose cgroups hold what is ours, but for ``sparing``: also that from which one was committed."""
    lasting, known = recorded(home), committed(home)
    found = units(home, sparing)
    if lasting is not None and known is not None:
        found.append(unit_of_launch(lasting, known["run"], known["attempt"]))
    return frozenset(found)


def is_up(home: ServerHome, sparing: Optional[Unit] = None) -> bool:
    """Tell whether a unit of this server runs, or waits to be restarted, in which case there is no process of it."""
    states = map(look, units(home, sparing))
    return any(state is not None and not state.is_down for state in states)


def _launches(home: ServerHome) -> list[Unit]:
    """Return the units of launches that were not committed, or not to the end."""
    record = read_json(home.unit, launches=list) or {}
    lasting = unit_in(record)
    if lasting is None:
        return []
    mark = f"{_stem(lasting)}:"
    found = [name for name in record["launches"] if isinstance(name, str) and name.startswith(mark)]
    return [Unit(name, lasting.manager_uid) for name in found]


def remembered(home: ServerHome) -> dict[str, Any]:
    """Return what ``unit.json`` tells, {} where there is none; after a killed commit what the unit's file is by now."""
    record = read_json(home.unit) or {}
    lasting, coming = unit_in(record), record.get("next")
    if lasting is None or not isinstance(coming, dict) or not isinstance(coming.get("text"), str):
        return record
    return {**record, **coming} if files.read_text(_lasting_file(lasting)) == coming["text"] else record


def edited_by_hand(home: ServerHome) -> Optional[str]:
    """Return what somebody changed in the committed unit file since we wrote it, None if nothing."""
    record = remembered(home)
    unit = unit_in(record)
    unit = unit if unit is not None else unit_for(home.name)
    text = files.read_text(os.path.join(Manager(unit.manager_uid).directory, unit.name))
    if text is None or text == record.get("text"):
        return None
    if not record.get("text"):
        return f"{unit.name} exists, and nothing is known here of who made it"
    changes = difflib.unified_diff(record["text"].splitlines(), text.splitlines(), lineterm="", n=0)
    lines = [line for line in changes if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return f"{unit.name}: " + "; ".join(lines[:6]) + ("; ..." if len(lines) > 6 else "")


_SETTING = re.compile(r"^[ \t]*([A-Za-z]+)[ \t]*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
#: Settings of a drop-in that end a server which nobody stops, or forbid to start it, and what they do.
_DEADLY = {
    "RuntimeMaxSec": "systemd kills it after that time",
    "StopWhenUnneeded": "systemd stops it as soon as no other unit wants it: at once",
    "RefuseManualStart": "systemd does not let it be started",
}
_TYING = {
    "BindsTo": "it stops with that unit",
    "PartOf": "it stops and restarts with that unit",
    "Requisite": "it is not started while that unit is down",
}


def dangers_of_drop_ins(home: ServerHome) -> list[Danger]:
    """Say what an administrator's settings beside the server's unit, or for all services, would do to the server."""
    name = unit_for(home.name).name
    found = []
    for setting, (value, place) in _dropped_in(our_manager(), name).items():
        hint = (
            f"take it out of {place} (`systemctl revert` drops what `systemctl edit` made), or say launcher: detached"
        )
        told = f"{place}: {setting}={value}"
        off = ("infinity", "0") if setting == "RuntimeMaxSec" else ()
        if setting in _DEADLY and value not in off and (setting == "RuntimeMaxSec" or _is_yes(value)):
            found.append(Danger("unit_dies", f"{name} will not live: {_DEADLY[setting]}", told, hint))
        elif setting in _TYING:
            found.append(Danger("unit_tied", f"{name} hangs on {value}: {_TYING[setting]}", told, hint, is_sure=False))
    return found


def _dropped_in(manager: Manager, name: str) -> dict[str, tuple[str, str]]:
    """Return the settings of all drop-ins for a unit, each with its file: those that are not empty.

    facts: of one setting the last name counts (systemd.unit(5)).
    """
    chosen = _drop_in_files(manager, name)
    found = {
        setting: (value, chosen[file])
        for file in sorted(chosen)
        for setting, value in _SETTING.findall(files.read_text(chosen[file]) or "")
    }
    return {setting: told for setting, told in found.items() if told[0]}


def _drop_in_files(manager: Manager, name: str) -> dict[str, str]:
    """Return the drop-ins that are in force for a unit, or will be: paths by name. Ours, there for a moment, too.

    Files are read, since systemd tells nothing of a unit that is not there yet. facts: of one name the first place
    counts (systemd.unit(5)).
    """
    chosen: dict[str, str] = {}
    for base in manager.drop_in_bases:
        for directory in (f"{name}.d", f"{PREFIX}.service.d", "service.d"):
            place = os.path.join(base, directory)
            for file in os.listdir(place) if os.path.isdir(place) else ():
                if file.endswith(".conf"):
                    chosen.setdefault(file, os.path.join(place, file))
    return chosen


def is_masked(home: ServerHome) -> bool:
    """Tell whether an administrator has forbidden the server's unit (`systemctl mask`)."""
    path = os.path.join(our_manager().directory, unit_for(home.name).name)
    return os.path.islink(path) and os.path.realpath(path) == os.devnull


def returns_at_boot(home: ServerHome) -> Optional[str]:
    """Name the server's unit if a reboot will start it, None if nothing will."""
    unit = recorded(home)
    if unit is None:
        return None
    shown = Manager(unit.manager_uid).show(unit.name, "UnitFileState")
    return unit.name if shown.get("UnitFileState") == "enabled" else None


def let_go(home: ServerHome) -> None:
    """Give an old unit its restart policy back that was started again and did not get ready."""
    unit = recorded(home)
    if unit is None:
        return
    manager = Manager(unit.manager_uid)
    path = os.path.join(manager.runtime_directory, f"{unit.name}.d", HOLD)
    if os.path.lexists(path):
        _drop(path)
        manager.call("daemon-reload")


def committed(home: ServerHome) -> Optional[dict[str, Any]]:
    """Return what is known of the committed unit (release, run, attempt), None if there is none, or not any more."""
    record = remembered(home)
    if not all(isinstance(record.get(name), str) for name in ("text", "release", "run", "attempt")):
        return None
    unit = unit_in(record)
    if unit is None or not record["text"] or not os.path.exists(_lasting_file(unit)):
        return None
    return record


def _note(home: ServerHome, unit: Unit, known: dict[str, Any]) -> None:
    """Write down that the unit is ours, before it first runs; keep what was committed unless ``known`` says more."""
    before = read_json(home.unit) or {}
    files.write_json(home.unit, {**before, "unit": unit.name, "manager_uid": unit.manager_uid, **known})


def _hold(manager: Manager, unit: Unit) -> None:
    _drop(os.path.join(manager.runtime_directory, unit.name))
    directory = os.path.join(manager.runtime_directory, f"{unit.name}.d")
    files.make_directory(directory)
    files.write_file(os.path.join(directory, HOLD), "[Service]\nRestart=no\n", 0o644)


def _let_go(manager: Manager, unit: Unit) -> None:
    _drop_runtime(manager, unit)
    manager.do("daemon-reload")


def _drop_runtime(manager: Manager, unit: Unit) -> None:
    for each in (unit, _stand_in(unit)):
        _drop(_runtime_file(each))
    directory = os.path.join(manager.runtime_directory, f"{unit.name}.d")
    _drop(os.path.join(directory, HOLD))
    with contextlib.suppress(OSError):  # not there, or somebody else's settings are in it
        os.rmdir(directory)


def _drop_launch(unit: Unit) -> None:
    _drop(_runtime_file(unit))
    _drop_directory(f"{_runtime_file(unit)}.d")


def _drop_directory(path: str) -> None:
    """Remove a directory of links that we have made."""
    for name in os.listdir(path) if os.path.isdir(path) else ():
        _drop(os.path.join(path, name))
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def _drop(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


# -------------------------------------------------------------------------------------------------- look, stop


@dataclasses.dataclass(frozen=True)
class State:
    """A unit as it is now: systemd's words, its main process, how often it was restarted since somebody started it."""

    active: str
    sub: str
    main: Optional[processes.Identity]
    restarts: int

    @property
    def is_down(self) -> bool:
        """Neither runs nor will be restarted."""
        return self.active in ("inactive", "failed")


def look(unit: Unit) -> Optional[State]:
    """Ask for the state of a unit, also by the name that a launch had; None where its manager does not answer."""
    unit = known_as(unit)
    shown = Manager(unit.manager_uid).show(unit.name, "ActiveState", "SubState", "MainPID", "NRestarts")
    if "ActiveState" not in shown:
        return None
    pid = int(shown.get("MainPID") or 0)
    process = processes.read_process(pid) if pid else None
    main = process.identity if process is not None and not process.is_dead else None
    return State(shown["ActiveState"], shown.get("SubState", ""), main, int(shown.get("NRestarts") or 0))


def members(unit: Unit, table: Mapping[int, processes.Process]) -> list[processes.Process]:
    """Return the processes in a unit's cgroup; of a launch that was committed also those in the lasting unit's."""
    names = (unit, known_as(unit))
    return [process for process in table.values() if processes.unit_of(process) in names]


def stop(unit: Unit, seconds: float, tell: Callable[[str], None], *, at_once: bool = False) -> bool:
    """Stop a unit through its manager, so that nothing restarts it; tell whether it was down within ``seconds``.

    ``at_once``: its processes are killed as soon as the manager knows that it is to stop.
    """
    state = look(unit)
    if state is None or (state.is_down and state.main is None):
        return True
    unit = known_as(unit)
    manager = Manager(unit.manager_uid)
    tell(f"stopping unit {unit.name}")
    answer = manager.call("stop", "--no-block", unit.name)
    if not answer.ok:
        tell(f"systemctl stop {unit.name}: {_last_line(answer.stderr)}")
        return False
    if at_once:
        manager.call("kill", "--signal=SIGKILL", unit.name)
    deadline = time.monotonic() + seconds
    while True:
        state = look(unit)
        if state is None or state.is_down:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)


def clear(home: ServerHome, sparing: Optional[Unit] = None) -> None:
    """Remove what attempts that were never committed left and what does not run; the committed unit is as before.

    A commit that was killed after it had begun to change names is brought to its end. ``sparing`` is left alone.
    """
    lasting = recorded(home)
    if lasting is None:
        return
    manager = Manager(lasting.manager_uid)
    if not manager.may_be_asked():
        return
    halves = tuple(f"{files.TEMP_PREFIX}{_stem(lasting)}{mark}" for mark in (":", ".service."))
    for directory in (manager.directory, manager.runtime_directory):
        files.sweep_temporaries(directory, lambda name: name.startswith(halves))
    launches = [each for each in _launches(home) if each != sparing]
    done = [each for each in launches if os.path.islink(_runtime_file(each))]
    gone = [each for each in launches if known_as(each) == lasting or (each not in done and _is_down(each))]
    hold = os.path.join(f"{_runtime_file(lasting)}.d", HOLD)
    places = (_runtime_file(lasting), _runtime_file(_stand_in(lasting)), hold)
    is_left = any(map(os.path.lexists, places)) and _is_down(lasting)
    if not (done or gone or is_left):
        return
    if is_left:
        _drop_runtime(manager, lasting)
    for unit in gone:
        _drop_launch(unit)
    if not manager.call("daemon-reload").ok:
        return  # what links stand for is not in force yet
    for unit in (lasting, *gone) if is_left else gone:
        manager.call("reset-failed", unit.name)
    record = remembered(home)
    if done and record != read_json(home.unit):
        manager.call("enable", lasting.name)
    for unit in done:
        _drop_launch(unit)
    left = [each.name for each in _launches(home) if each not in (*done, *gone)]
    with contextlib.suppress(OSError):  # the next run finds them gone
        _note(home, lasting, {**record, "launches": left, "next": None})


def _is_down(unit: Unit) -> bool:
    """Tell whether a unit is known not to run, and not to be restarted."""
    state = look(unit)
    return state is not None and state.is_down
