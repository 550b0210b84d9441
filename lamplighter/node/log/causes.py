"""What the node itself knows of a failed start: kernel messages of its time, holders, space, proxies, what -9 means.

Reads only: the kernel's log where it may be read (dmesg, else journalctl -k), /proc, statvfs. Whatever cannot be read
adds nothing. The parsers are pure; the log's own cause stays, unless the kernel tells one that explains it.

facts: SGLang kills its own tree with SIGKILL when a child fails, so that signal 9 is no evidence of the kernel's
OOM killer; an Xid is the driver's word for a GPU error, and only some of them accuse the hardware.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
from typing import Any, Collection, List, Mapping, Optional, Sequence, Tuple

from lamplighter.node.gpu import gpus, xids
from lamplighter.node.log.verdict import Diagnosis
from lamplighter.node.system import memory, ports, processes

KERNEL_SECONDS = 3.0
KERNEL_BYTES = 4 << 20
MOST_NOTES = 6

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@dataclasses.dataclass(frozen=True)
class KernelNote:
    """One line of the kernel's log: ``kind`` xid or oom, ``at`` seconds since boot, the pid that it names."""

    kind: str
    at: float
    pid: Optional[int]
    code: Optional[int]
    text: str


_STAMP = re.compile(r"^(?:<\d+>)?\[ *(?P<seconds>\d+\.\d+)\](?:\[ *[TC]\d+\])? (?P<text>.*)$")
_XID = re.compile(r"NVRM: Xid \((?P<device>[^)]*)\): (?P<code>\d+)(?:,)?(?:.*?\bpid='?(?P<pid>\d+))?")
_OOM = re.compile(r"(?:[Oo]ut of memory|Memory cgroup out of memory|OOM): Kill(?:ed)? process (?P<pid>\d+)")
_OOM_TASK = re.compile(r"oom-kill:.*\bpid=(?P<pid>\d+)")


def read_kernel_notes(text: str, since: float = 0.0) -> Tuple[KernelNote, ...]:
    """Find Xid and oom-kill lines in dmesg's words, those stamped ``since`` (seconds since boot) or later.

    Of an oom-kill the kernel writes two lines that name the same process: one is enough.
    """
    found: List[KernelNote] = []
    killed = set()
    for line in text.splitlines():
        stamped = _STAMP.match(line)
        if stamped is None or float(stamped["seconds"]) < since:
            continue
        at, said = float(stamped["seconds"]), stamped["text"]
        xid = _XID.search(said)
        oom = _OOM.search(said) or _OOM_TASK.search(said)
        if xid is not None:
            pid = int(xid["pid"]) if xid["pid"] else None
            found.append(KernelNote("xid", at, pid, int(xid["code"]), said.strip()[:300]))
        elif oom is not None and (oom["pid"], int(at)) not in killed:
            killed.add((oom["pid"], int(at)))
            found.append(KernelNote("oom", at, int(oom["pid"]), None, said.strip()[:300]))
    return tuple(found)


def kernel_notes(since: float) -> Optional[Tuple[KernelNote, ...]]:
    """Xid and oom-kill lines since ``since`` (monotonic seconds); None where the kernel's log may not be read."""
    for command in (["dmesg"], ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q"]):
        text = _said_by(command)
        if text is not None:
            return read_kernel_notes(_as_dmesg(text), since)
    return None


def _as_dmesg(text: str) -> str:
    # journalctl: "[ 3461.109363] host kernel: message"
    return re.sub(r"^(\[ *\d+\.\d+\]) \S+ kernel: ", r"\1 ", text, flags=re.MULTILINE)


def _said_by(command: Sequence[str]) -> Optional[str]:
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=KERNEL_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0 or not done.stdout:
        return None
    return done.stdout[-KERNEL_BYTES:].decode("utf-8", "replace")


@dataclasses.dataclass(frozen=True)
class Explained:
    """A diagnosis with what the node adds to it: ``notes`` are facts, one sentence each, ``message`` who died first."""

    diagnosis: Diagnosis
    notes: Tuple[str, ...]
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Failed:
    """A failed start as the node saw it: ``since`` monotonic seconds, ``signal`` the one that ended its main process.

    ``has_ended``: its main process is gone, by a signal or not. ``pids`` were its processes, ``uuids`` its GPUs,
    ``environment`` the variables it was given. ``derived``: the ports that its engine takes beside ``port``, and what
    for.
    """

    port: int
    since: float
    signal: Optional[int]
    pids: Collection[int]
    uuids: Collection[str]
    environment: Mapping[str, str]
    directory: str
    derived: Mapping[int, str] = dataclasses.field(default_factory=dict)
    has_ended: bool = False


def explain(
    found: Diagnosis,
    failed: Failed,
    engine: Mapping[str, Any],
    kernel: Optional[Sequence[KernelNote]],
    message: str = "",
) -> Explained:
    """Add what the node knows. ``kernel``: its notes of the run's time, None if they cannot be read; ``message``: what
    the watch said of the end.
    """
    notes: List[str] = []
    cause, evidence, hint = found.cause, found.evidence, found.hint
    looks = engine.get("processes") or {}
    of_gpus = [note for note in kernel or () if note.kind == "xid"]
    broken = [note for note in of_gpus if xids.is_fatal(engine, note.code)]
    killed = [note for note in kernel or () if note.kind == "oom" and note.pid in failed.pids]
    notes += [f"kernel: {note.text}" for note in [*killed, *of_gpus][:MOST_NOTES]]
    if broken and explains("gpu_hardware", cause, engine):
        cause, evidence = "gpu_hardware", broken[0].text
        hint = "drain the node and reset or replace the GPU; leave it out of servers.{server}.gpus until then"
    elif killed and (cause == "host_oom" or explains("host_oom", cause, engine)):
        if cause != "host_oom":
            evidence = killed[0].text
            hint = "give the node more memory, or let the server load less of it at once: servers.{server}.args"
        cause = "host_oom"
    elif failed.signal == 9 and cause == "crashed" and not found.evidence:
        cause = "killed"
        evidence = "its main process was ended by SIGKILL, and its log names no error"
        hint = "find out who sends it: another deploy, a supervisor, a memory limit of servers.{server}"
    notes += _about_nine(cause, failed, bool(killed), kernel is not None, bool(looks.get("kills_itself")))
    if cause == "derived_port_in_use":
        held = _holders_of_derived(failed, evidence)
        evidence = "; ".join([*([evidence] if evidence else []), *held[:1]])
        notes += held
    notes += _about(cause, failed)
    said = headline(message, found, failed, engine, [note.pid for note in killed if note.pid is not None])
    return Explained(dataclasses.replace(found, cause=cause, evidence=evidence, hint=hint), tuple(notes), said)


#: How a log words the status of a child that died: as Python tells it, negative for a signal.
_STATUS = re.compile(r"exit ?code:? ?(?P<code>-?\d+)|'[\w-]+': (?P<core>-\d+)")


def headline(message: str, found: Diagnosis, failed: Failed, engine: Mapping[str, Any], killed: Sequence[int]) -> str:
    """Who died first, and of what, in place of ``message`` where that only tells how the main process ended.

    ``killed``: pids of the server that the kernel's OOM killer chose. An engine that kills its own tree leaves SIGKILL
    as the status of its main process: what made it do so is the news.
    """
    if killed:
        return f"pid {killed[0]} of the server was killed by the kernel because memory ran out, in phase {found.phase}"
    kills_itself = bool((engine.get("processes") or {}).get("kills_itself"))
    status = _STATUS.search(found.evidence)
    is_by_itself = kills_itself and failed.signal == signal.SIGKILL and found.evidence
    if not is_by_itself and not (status and (failed.has_ended or failed.signal is not None)):
        return message
    who = f"rank {found.rank}" if found.rank is not None else "one of its processes"
    end = "; the server then ended its own processes" if kills_itself else ""
    return f"{who} {_how_it_died(found, status)} first, in phase {found.phase}{end}"


def _how_it_died(found: Diagnosis, status: Optional[re.Match[str]]) -> str:
    if status is None:
        return f"failed ({found.cause})" if found.cause not in (None, "crashed") else "failed"
    code = int(status["code"] or status["core"])
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def explains(known: str, cause: Optional[str], engine: Mapping[str, Any]) -> bool:
    """Whether ``known``, which the node found out of a start, is why its log has ``cause``."""
    faults = engine.get("faults") or {}
    return (
        (known == "gpu_hardware" and cause in faults.get("explained_by_xid", ()))
        or (known == "host_oom" and cause in faults.get("explained_by_oom", ()))
        or (known == "gpu_oom" and cause == "gpu_held")  # the node knew which processes were the server's
    )


def _about_nine(cause: Optional[str], failed: Failed, is_oom: bool, is_readable: bool, kills_itself: bool) -> List[str]:
    """What SIGKILL means here."""
    if is_oom or (failed.signal != 9 and cause not in ("host_oom", "worker_died", "killed")):
        return []
    if not is_readable:
        return ["the kernel's log may not be read here: whether its OOM killer was at work is not known"]
    said = "the kernel's log of that time has no oom-kill of this server"
    if kills_itself and failed.signal == 9 and cause not in ("host_oom", "killed"):
        return [f"signal 9 was the server's own: it kills its tree when a child fails ({said})"]
    return [f"{said}: whatever sent signal 9 was not the kernel's OOM killer"] if failed.signal == 9 or cause else []


def _about(cause: Optional[str], failed: Failed) -> List[str]:
    """What can be measured now that belongs to the cause."""
    if cause == "port_in_use":
        return _holders_of_port(failed)
    if cause in ("gpu_held", "gpu_oom", "kv_cache_too_small"):
        return _holders_of_gpus(failed)
    if cause == "disk_full":
        return [_space(failed.directory), _space("/tmp")]  # noqa: S108
    if cause == "shm_full":
        return [_space("/dev/shm")]  # noqa: S108
    if cause == "host_oom":
        return _memory()
    if cause in ("proxy", "hub_offline", "gated_model"):
        return _proxies(failed.environment)
    return []


def _holders_of_port(failed: Failed) -> List[str]:
    holder = ports.who_listens(failed.port, failed.pids)
    return [f"port {failed.port} is held by {holder}"] if holder else []


def _holders_of_derived(failed: Failed, evidence: str) -> List[str]:
    """Name who holds one of the ports, or socket files, that the log's line or the engine's rules name."""
    named = [int(word) for word in re.findall(r"(?<![\d.])\d{4,5}(?![\d.])", evidence) if int(word) < 1 << 16]
    found = []
    for port in dict.fromkeys([*named, *failed.derived]):
        holder = ports.who_listens(port, failed.pids) if port != failed.port else ""
        if holder:
            use = f" ({failed.derived[port]})" if port in failed.derived else ""
            found.append(f"port {port}{use} is held by {holder}")
    for path in re.findall(r"ipc://(/[^\s'\")]+)", evidence):
        holder = ports.who_has_file(path, failed.pids)
        if holder:
            found.append(f"{path} is held by {holder}")
    return found


def _holders_of_gpus(failed: Failed) -> List[str]:
    if not failed.uuids:
        return []
    sample = gpus.take_sample()
    rows = gpus.judge(sample, tuple(failed.uuids), {}, processes.is_pid_alive).holders
    found = []
    for pid in rows:
        process = processes.read_process(pid)
        if pid not in failed.pids and process is not None:
            found.append(f"pid {pid} ({processes.user_name(process.uid)}, {process.title}) holds GPU memory")
    return found


def _space(path: str) -> str:
    try:
        state = os.statvfs(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    free, size = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    return f"{path} has {free >> 20} of {size >> 20} MiB free"


def _memory() -> List[str]:
    found = memory.meminfo()
    free, total = found.get("MemAvailable"), found.get("MemTotal")
    return [] if free is None or total is None else [f"{free >> 20} of {total >> 20} MiB of host memory are free now"]


def _proxies(environment: Mapping[str, str]) -> List[str]:
    """The proxy variables of the server, without any password in them."""
    found = []
    for name, value in sorted(environment.items()):
        if name.lower() in PROXIES and value:
            found.append(f"{name}={re.sub(r'//[^/@]*@', '//***@', value)}")
    return [f"its environment has {', '.join(found)}"] if found else ["its environment has no proxy variables"]
