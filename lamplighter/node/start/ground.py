"""Can this server start here, now? What every start asks of its node, asked before a server is stopped for it.

``examine`` asks it of whatever is to start: what the inventory wants, a release that is on the node, and the one that a
roll back would start again. Reads only, but starts one short-lived Python, in the environment of the launch. What
differs from engine to engine is under ``needs`` in its engine.yml.

facts: SGLang with DP attention takes its port + 233 (or the port of --dist-init-addr) and the five above it; NCCL fails
where /dev/shm cannot hold its segments, of 33 MB each; a package's metadata may outlive its code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any, Collection, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from lamplighter.node import arguments
from lamplighter.node.finding import Finding
from lamplighter.node.keeper import launcher
from lamplighter.node.layout import ReleaseDirectory
from lamplighter.node.plan import Plan
from lamplighter.node.start import startup
from lamplighter.node.system import disks, ports, processes

#: MAX_ARG_STRLEN of the kernel: one argument, or ``NAME=value``, with the NUL behind it, in bytes.
LONGEST_WORD = 131072
#: What the kernel counts for each word beside its bytes: a pointer to it.
POINTER_BYTES = 8
#: Below so many free inodes a file system counts as full, where it counts them.
LEAST_INODES = 64
GIB = 1 << 30
SHARED_MEMORY = "/dev/shm"  # noqa: S108
#: Where Python, and what it starts, look for a place for temporary files: the first that takes some.
TEMPORARY = ("TMPDIR", "TEMP", "TMP")
TEMPORARY_PLACES = ("/tmp", "/var/tmp", "/usr/tmp")  # noqa: S108 - looked at only
#: So long may a launch script take to say what it gives to its server.
SCRIPT_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Start:
    """One server as it would be started now: its words, its variables, and what it will take.

    ``python`` is the interpreter of its engine, "" for an engine that is no Python. ``directory``: where it works, if
    that is of interest to what it imports. ``gpus``: how many it gets, None where that cannot be told; 0 for one that
    uses none.
    """

    name: str
    argv: Tuple[str, ...]
    environment: Mapping[str, str]
    python: str
    model: str
    host: str
    port: int
    gpus: Optional[int]
    engine: Mapping[str, Any]
    engine_version: Optional[str] = None
    directory: Optional[str] = None

    @property
    def path(self) -> str:
        return self.environment.get("PATH", "")

    @property
    def needs(self) -> Mapping[str, Any]:
        return self.engine.get("needs") or {}

    @property
    def ranks(self) -> Mapping[str, Any]:
        return self.needs.get("ranks") or {}

    def setting(self, name: str) -> str:
        return f"servers.{self.name}.{name}"


class NoAnswer(Exception):
    """A launch script does not tell what it gives to its server; the text says why."""


_TELL = "import json, os, sys; sys.stdout.write(json.dumps([dict(os.environ), os.getcwd()]))"


def surroundings(launch_script: str, environ: Mapping[str, str]) -> Tuple[Dict[str, str], str]:
    """Return the environment and the working directory that a launch script gives to its server. Raises NoAnswer."""
    command = [launch_script, sys.executable, "-I", "-S", "-c", _TELL]
    directory = os.path.dirname(launch_script)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=dict(environ),
            cwd=directory,
            timeout=SCRIPT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswer(f"{launch_script}: {getattr(error, 'strerror', None) or 'no answer'}") from error
    try:
        given, place = json.loads(done.stdout)
    except ValueError as error:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise NoAnswer(f"{launch_script}: {last[-1]}") from error
    return given, place


def examine(start: Start, stopping: Collection[int] = ()) -> Iterator[Finding]:
    """Ask all questions of one start. ``stopping``: pids that will be gone by then, with what they hold."""
    yield from _program(start)
    yield from _engine(start)
    yield from _model(start)
    yield from _files(start)
    yield from _shared_memory(start, stopping)
    yield from _temporary(start)
    yield from _address(start)
    yield from _derived_ports(start, stopping)
    yield from _words(start)
    yield from _ranks(start)


# ------------------------------------------------------------------------------------------- the program, the engine


def _program(start: Start) -> Iterator[Finding]:
    if not start.python:
        trouble = _why_not_executable(start)
        hint = f"install it, or correct {start.setting('program')}"
        if trouble:
            yield Finding("program_missing", "error", "the program of the launch cannot be started", trouble, hint)
        else:
            place = shutil.which(start.argv[0], path=start.path)
            yield Finding("program", "ok", f"program {start.argv[0]}", place or "")
        return
    python = shutil.which(os.path.expanduser(start.python), path=start.path)
    if python is None and disks.forbids_programs(start.python):
        hint = f"remount it with exec, or put the environment elsewhere and correct {start.setting('python')}"
        message = f"the server's Python {start.python} lies on a file system mounted noexec: no program there can start"
        yield Finding("interpreter_noexec", "error", message, hint=hint)
        return
    if python is None:
        yield Finding(
            "interpreter_missing",
            "error",
            f"the server's Python {start.python} is not there or not executable",
            hint=f"install it, or correct {start.setting('python')}",
        )
        return
    yield Finding("interpreter", "ok", f"Python {start.python}", python)
    trouble = _why_not_executable(start)
    if trouble:
        hint = f"install it again, or correct {start.setting('python')}"
        yield Finding("program_missing", "error", "the program of the launch cannot be started", trouble, hint)


def _why_not_executable(start: Start) -> str:
    """Say what of the launch's own words is not there: its program, what runs that, the script given to Python."""
    if not start.argv:
        return ""
    word = start.argv[0]
    place = os.path.join(start.directory, word) if start.directory and "/" in word else word
    program = shutil.which(place, path=start.path)
    if program is None:
        where = f" on the PATH {start.path}" if "/" not in word else ""
        return f"{word} is not there or not executable{where}"
    runner = _missing_runner(program, start.path)
    if runner:
        return f"{program} is run by {runner}, which is not there"
    script = _script_of(start)
    if script and not os.path.isfile(script):
        return f"{script} is not there"
    return f"{script} cannot be read" if script and not os.access(script, os.R_OK) else ""


def _missing_runner(program: str, path: str) -> str:
    """Return what the first line of a script names and is not there; "" for a program, or where all is well.

    facts: a venv that was moved, or whose Python was removed, leaves its scripts behind.
    """
    try:
        with open(program, "rb") as file:
            first = file.readline(4096)
    except OSError:
        return ""  # may be run and not be read
    words = os.fsdecode(first[2:]).split() if first.startswith(b"#!") else []
    if not words:
        return ""
    if not os.access(words[0], os.X_OK):
        return words[0]
    named = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    if os.path.basename(words[0]) == "env" and named and shutil.which(named[0], path=path) is None:
        return named[0]
    return ""


def _interpreter(start: Start) -> List[str]:
    """Return the words that start the server's Python, with its flags; the engine's own where the words tell none."""
    with contextlib.suppress(startup.NoPython):
        return startup.interpreter_of(start.argv, start.path, start.python)
    return [os.path.expanduser(start.python)]


def _behind_python(start: Start) -> Sequence[str]:
    """Return the words that Python itself is given, behind its flags; none where it is started by something else."""
    words = _interpreter(start)
    return start.argv[len(words) :] if list(start.argv[: len(words)]) == words else ()


def _script_of(start: Start) -> str:
    script = next(iter(_behind_python(start)), "-")
    is_unknown = script.startswith("-") or not (os.path.isabs(script) or start.directory)
    return "" if is_unknown else os.path.join(start.directory or "/", script)


def _module_of(start: Start) -> str:
    words = _behind_python(start)
    return words[1] if len(words) > 1 and words[0] == "-m" else ""


def _engine(start: Start) -> Iterator[Finding]:
    """Is the engine there, as the server's Python will find it, its code and not only its metadata?"""
    distribution, package = start.engine.get("distribution") or "", _package_of(start)
    python = _interpreter(start)
    if not (distribution or package) or shutil.which(python[0], path=start.path) is None:
        return
    hint = f"install it there again, or correct {start.setting('python')}"
    try:
        found = installed(start)
    except startup.NoPython as error:
        yield Finding("interpreter_broken", "error", f"the server's Python {python[0]} does not run", str(error), hint)
        return
    name = distribution or package
    if distribution and found.version is None:
        message = f"{distribution} is not installed for {python[0]}"
        yield Finding("engine_missing", "error", message, found.trouble, hint)
    elif found.trouble:
        message = f"{name} is not whole for {python[0]}: it could not be imported"
        version = f"its metadata says {found.version}; " if found.version else ""
        yield Finding("engine_missing", "error", message, version + found.trouble, hint)
    elif distribution and start.engine_version not in (None, found.version):
        yield Finding(
            "engine_version",
            "error",
            f"the node has {distribution} {found.version}, the inventory says {start.engine_version}",
            hint=f"install that version, or correct {start.setting('engine_version')}",
        )
    else:
        yield Finding("engine_version", "ok", f"{name} {found.version or ''}".rstrip(), found.place or "")


def installed(start: Start) -> startup.Installed:
    """Ask the server's Python, in the environment of the launch, what it has of the engine. Raises NoPython."""
    package, module = _package_of(start), _module_of(start)
    return startup.installed(
        _interpreter(start),
        start.environment,
        distribution=start.engine.get("distribution") or "",
        package=package,
        module=module if module.partition(".")[0] == package else "",
        directory=start.directory,
    )


def _package_of(start: Start) -> str:
    return start.needs.get("package") or _module_of(start).partition(".")[0]


# ------------------------------------------------------------------------------------------------------ what it reads


def _model(start: Start) -> Iterator[Finding]:
    if not start.model.startswith(("/", "~", "./", "../")):
        return  # a hub id or a name: the engine's own affair
    path = os.path.join(start.directory or "/", os.path.expanduser(start.model))
    setting = start.setting("model")
    if not os.path.lexists(path):
        hint = f"put the model there, or correct {setting}"
        yield Finding("model_path", "error", f"the model path {start.model} does not exist on the node", hint=hint)
        return
    user = processes.user_name(os.geteuid())
    trouble = _why_not_readable(path, start)
    if trouble:
        hint = f"let {user} read it (a directory needs r and x, a file r), fetch it again, or correct {setting}"
        yield Finding("model_unreadable", "error", f"the model {start.model} cannot be read by {user}", trouble, hint)
        return
    wanted = start.needs.get("model_files") or ()
    if wanted and os.path.isdir(path):
        names = os.listdir(path)
        if not any(fnmatch.filter(names, pattern) for pattern in wanted):
            evidence = f"none of {', '.join(wanted)} is in {path}"
            hint = f"fetch the model again, or correct {setting}"
            yield Finding("model_incomplete", "error", f"there is no model in {start.model}", evidence, hint)
            return
    yield Finding("model", "ok", f"model {start.model}")


def _why_not_readable(path: str, start: Start) -> str:
    """Open ``path``, and of a directory the files that engines read, as the server will; return what fails.

    Really opened: permission bits do not tell of NFS, whose root may read less than others. facts: a model that comes
    from the hub's cache is a directory of links to files that may have been cleared away.
    """
    try:
        names = sorted(os.listdir(path)) if os.path.isdir(path) else [""]
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    patterns = start.needs.get("model_reads") or ("*",)
    for name in names:
        if name and not any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            continue
        file = os.path.join(path, name) if name else path
        try:
            if not os.path.isdir(file):
                os.close(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            dangling = f", a link to {os.readlink(file)}" if os.path.islink(file) and not os.path.exists(file) else ""
            return f"{file}{dangling}: {error.strerror}"
    return ""


def _files(start: Start) -> Iterator[Finding]:
    """Can the other files be read that the command line names: a draft model, a tokenizer, a certificate?"""
    for flag in start.needs.get("files") or ():
        path = arguments.value_of((flag,), start.argv)
        trouble = _why_not_readable(path, start) if path and os.path.isabs(path) else ""
        if trouble:
            hint = f"put it there and let {processes.user_name(os.geteuid())} read it, or correct {_where(start, flag)}"
            yield Finding("file_unreadable", "error", f"{path}, which {flag} names, cannot be read", trouble, hint)


# ---------------------------------------------------------------------------------------------------- what it takes


def _shared_memory(start: Start, stopping: Collection[int]) -> Iterator[Finding]:
    room = start.needs.get("room") or {}
    least = int(
        room.get("shm_mib_ranks" if (arguments.ranks_here(start.ranks, start.argv) or 1) > 1 else "shm_mib") or 0
    )
    free = disks.space(SHARED_MEMORY)
    if free["error"]:
        return  # none is mounted here: nothing in there can be full
    given_back = 0
    if _is_short(free, least):
        given_back = min(processes.mapped_below(SHARED_MEMORY, stopping), free["total"] - free["free"])
    if not _is_short({**free, "free": free["free"] + given_back}, least):
        return
    hint = "enlarge it (mount -o remount,size=...), or remove what others left in there (ls -l /dev/shm tells whose)"
    message = f"{SHARED_MEMORY} is full: at least {least} MiB are needed to start {start.engine.get('name') or 'it'}"
    yield Finding("shm_full", "error", message, _shown_space(free), hint)


def _temporary(start: Start) -> Iterator[Finding]:
    given = [start.environment[name] for name in TEMPORARY if start.environment.get(name)]
    usable = [place for place in (*given, *TEMPORARY_PLACES) if _takes_files(place)]
    user, setting = processes.user_name(os.geteuid()), f"TMPDIR under {start.setting('env')}"
    if not usable:
        hint = f"make /tmp a directory of mode 1777, or set {setting}"
        yield Finding("tmp_unusable", "error", f"there is no place where {user} can write temporary files", hint=hint)
        return
    if given and usable[0] != given[0]:
        message = f"{given[0]} is no directory that {user} can write to: temporary files go to {usable[0]}"
        yield Finding("tmp_unusable", "warning", message, hint=f"make it (mode 1777), or correct {setting}")
    least = int((start.needs.get("room") or {}).get("tmp_mib") or 0)
    free = disks.space(usable[0])
    if not free["error"] and _is_short(free, least):
        message = f"{usable[0]} is full: at least {least} MiB are needed there for sockets and temporary files"
        yield Finding("tmp_full", "error", message, _shown_space(free), f"make room there, or set another {setting}")


def _takes_files(place: str) -> bool:
    return os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK)


def _is_short(space: Mapping[str, Any], least_mib: int) -> bool:
    has_no_inodes = space["inodes"] and space["free_inodes"] < LEAST_INODES
    return bool(space["free"] < least_mib << 20 or has_no_inodes)


def _shown_space(space: Mapping[str, Any]) -> str:
    inodes = f", {space['free_inodes']} of {space['inodes']} inodes" if space["inodes"] else ""
    return f"{space['free'] >> 20} of {space['total'] >> 20} MiB{inodes} free in {space['at']}"


def _address(start: Start) -> Iterator[Finding]:
    """Is the address one to listen on here? Who has the port is another question: that one may be stopped for it."""
    check = ports.can_bind(start.host, start.port)
    if not check.free and not check.taken:
        message = f"a server cannot listen on {start.host} port {start.port} here"
        hint = f"correct {start.setting('host')} (`ip addr` lists the node's addresses), or {start.setting('port')}"
        yield Finding("listen_address", "error", message, check.reason, hint)


@dataclasses.dataclass(frozen=True)
class DerivedPort:
    """A port that the engine takes beside its HTTP port; ``setting`` moves it."""

    port: int
    use: str
    setting: str


def derived_ports(start: Start) -> List[DerivedPort]:
    """Return the ports that will be taken beside the HTTP port, as far as the command line decides them."""
    found: Dict[int, DerivedPort] = {}
    for rule in start.needs.get("ports") or ():
        first, moved_by = _first_of(rule, start) if _is_taken(rule, start) else (None, "")
        for port, use in enumerate(rule["uses"], first or 0):
            if first and 0 < port < 1 << 16 and port != start.port:
                found.setdefault(port, DerivedPort(port, use, moved_by))
    return list(found.values())


def _is_taken(rule: Mapping[str, Any], start: Start) -> bool:
    """Tell whether the command line makes the engine take these ports, and on this node."""
    when, only = rule.get("when"), rule.get("only")
    is_wanted = not when or arguments.has_any(when, start.argv)
    if only:
        value = arguments.value_of(only["flags"], start.argv)
        is_wanted = is_wanted and value is not None and re.search(only["like"], value) is not None
    return is_wanted and not _is_elsewhere(rule, start)


def _first_of(rule: Mapping[str, Any], start: Start) -> Tuple[Optional[int], str]:
    """Return the first of the ports, None where none is said, and the setting that moves it."""
    flags, name = rule.get("flags") or (), rule.get("env") or ""
    moved_by = _where(start, flags[0]) if flags else start.setting(f"env.{name}" if name else "port")
    first = _port_in(arguments.value_of(flags, start.argv)) if flags else _port_in(start.environment.get(name))
    if first is None and rule.get("plus") is not None:
        first = start.port + int(rule["plus"])
        first = first if first < 1 << 16 else start.port - int(rule["plus"])
    return (rule.get("default") if first is None else first), moved_by


def _port_in(value: Optional[str]) -> Optional[int]:
    """Read ``PORT``, ``HOST:PORT`` or ``[HOST]:PORT``; None for anything else."""
    last = (value or "").rpartition(":")[2]
    return int(last) if last.isascii() and last.isdigit() else None


def _is_elsewhere(rule: Mapping[str, Any], start: Start) -> bool:
    """Tell whether another node opens the port: of several, the first one does."""
    rank = arguments.value_of(rule.get("rank") or (), start.argv)
    return rank is not None and rank.isdigit() and int(rank) > 0


def _derived_ports(start: Start, stopping: Collection[int]) -> Iterator[Finding]:
    wanted = derived_ports(start)
    for each in wanted:
        holder = who_has(each.port, stopping)
        if holder:
            message = f"port {each.port}, which {start.engine.get('name')} takes for {each.use}, is held by {holder}"
            hint = f"end that process, or set another {each.setting}"
            yield Finding("derived_port_in_use", "error", message, holder, hint)
            return
    if wanted:
        shown = ", ".join(f"{each.port} ({each.use})" for each in wanted)
        yield Finding("derived_ports", "ok", "the ports beside the HTTP port are free", shown)


def who_has(port: int, stopping: Collection[int] = ()) -> str:
    """Name who has ``port`` and will not be gone by the start; "" where it is free."""
    listening = ports.who_listens(port, stopping)
    if listening or ports.owners(port):
        return listening
    check = ports.can_bind("0.0.0.0", port)  # noqa: S104 (bound for a moment, to ask)
    # What will be stopped may have bound it without listening: nothing in /proc tells whose such a socket is.
    return "a process that is bound to it without listening" if check.silent and not stopping else ""


# ------------------------------------------------------------------------------------------- what it is started with


def _words(start: Start) -> Iterator[Finding]:
    """Does the kernel take the arguments and variables: each by itself, and all together?"""
    words = [*start.argv, *(f"{name}={value}" for name, value in start.environment.items())]
    sizes = [len(word.encode("utf-8", "surrogateescape")) + 1 for word in words]
    longest = max(sizes, default=0)
    total, most = sum(sizes) + POINTER_BYTES * len(sizes), os.sysconf("SC_ARG_MAX")
    hint = f"put the content into a file on the node, and its path under {start.setting('args')} or .env"
    if longest > LONGEST_WORD:
        place = sizes.index(longest)
        what = _name_of(words, place, len(start.argv))
        message = f"no process can be started with {what}: it has {longest} bytes"
        yield Finding("argument_size", "error", message, f"Linux takes at most {LONGEST_WORD} of one", hint)
    elif total > most:
        message = f"no process can be started with so many arguments and variables: {total} bytes"
        yield Finding("argument_size", "error", message, f"this node takes at most {most} in all", hint)


def _name_of(words: Sequence[str], place: int, arguments_end: int) -> str:
    """Name a word that is too long without showing it: it may hold a secret."""
    if place >= arguments_end:
        return f"the variable {words[place].partition('=')[0]}"
    flag = words[place - 1] if place and words[place - 1].startswith("-") else ""
    own = words[place].partition("=")[0] if words[place].startswith("-") else ""
    return f"the argument {own[:60] or flag or place}"


def _ranks(start: Start) -> Iterator[Finding]:
    wanted = arguments.gpus_wanted(start.ranks, start.argv)
    if not start.gpus or wanted is None or wanted <= start.gpus:
        return
    given = "1 GPU" if start.gpus == 1 else f"{start.gpus} GPUs"
    message = f"the command line needs {wanted} GPUs on this node, {start.setting('gpus')} gives {given}"
    said = arguments.ranks_said(start.ranks, start.argv)
    hint = f"lower {' or '.join(_where(start, flag) for flag in said)}, or give more under {start.setting('gpus')}"
    evidence = ", ".join(f"{flag} {value}" for flag, value in said.items())
    yield Finding("gpu_count", "error", message, evidence, hint)


def _where(start: Start, flag: str) -> str:
    """Name the setting behind a flag, as the inventory spells it."""
    return start.setting(f"args.{flag.lstrip('-')}")


# ------------------------------------------------------------------------------------- what `verify` would ask later


def room_for_verify(paths: Iterable[str], checks: Mapping[str, Any], setting: str) -> Iterator[Finding]:
    """Warn of file systems on which ``verify`` will fail when the server is there: by its own thresholds, ``checks``.

    They hold what a check counts for as well; one that is off is not asked. ``setting`` is where they are written.
    """
    if checks.get("disks_have_room") != "off":
        told = set()
        for path in paths:
            space = disks.space(path)
            trouble = "" if space["error"] else _low_disk(space, checks)
            device = None if space["error"] else os.stat(space["at"]).st_dev
            if trouble and device not in told:
                told.add(device)
                hint = f"make room there, or lower {setting}.disk_free_gib or .inodes_free_percent"
                yield Finding("disk_low", "warning", f"verify will fail: {trouble}", "", hint)
    space = disks.space(SHARED_MEMORY)
    least = checks.get("shm_free_gib") or 0
    if checks.get("shm_has_room") != "off" and not space["error"] and space["free"] < least * GIB:
        message = (
            f"verify will fail: {space['free'] / GIB:.1f} GiB free in {SHARED_MEMORY}, at least {least} are wanted"
        )
        hint = f"NCCL and multiprocessing need it: enlarge it, remove dead segments, or lower {setting}.shm_free_gib"
        yield Finding("shm_low", "warning", message, "", hint)


def _low_disk(space: Mapping[str, Any], checks: Mapping[str, Any]) -> str:
    least, share = checks.get("disk_free_gib") or 0, checks.get("inodes_free_percent") or 0
    if space["free"] < least * GIB:
        return f"{space['free'] / GIB:.1f} GiB free in {space['at']}, at least {least} are wanted"
    if space["inodes"] and 100 * space["free_inodes"] < share * space["inodes"]:
        percent = 100 * space["free_inodes"] / space["inodes"]
        return f"{percent:.1f} % of the inodes free in {space['at']}, at least {share} are wanted"
    return ""


def start_of(
    plan: Plan,
    release: Optional[ReleaseDirectory] = None,
    *,
    gpu_count: Optional[int] = None,
    secrets: Optional[Mapping[str, str]] = None,
) -> Start:
    """Return what starting ``plan`` means on this node: by the launch script of its release, if that is here.

    ``secrets`` are those of a release that is not. Raises NoAnswer.
    """
    environment, directory = launcher.planned_environment(plan, secrets or {}), None
    if release is not None:
        environment, directory = surroundings(release.launch_script, launcher.bare_environment())
    return Start(
        name=plan.name,
        argv=plan.argv,
        environment=environment,
        python=plan.python,
        model=arguments.model_of(plan.engine, plan.argv) or plan.model,
        host=plan.host,
        port=plan.port,
        gpus=gpu_count,
        engine=plan.engine,
        engine_version=plan.engine_version,
        directory=directory,
    )
