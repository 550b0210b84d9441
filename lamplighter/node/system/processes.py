"""Who runs on this node, told apart for certain: the only reader of ``/proc/PID`` in the tree.

A process is named by its Identity (boot id, pid, start time in clock ticks since boot), never by its pid alone: pids
recycle fast (pid_max is 32768 on some GPU nodes). Everything here looks and changes nothing; ``Handle.signal`` is the
one exception, and it belongs here because the re-check before a signal must not be separated from the signal.

Questions never raise: a process that vanished in between, a ``/proc`` mounted with hidepid and another user's files
read as None, as "not in the table", or, where a wrong answer would be dangerous, as the cautious one.

facts: pidfd_open needs Linux 5.3 and Python 3.9; `kill -0`, pidfd_open and a cmdline-less `/proc` entry all succeed on
a zombie; a group leader whose own thread ended while others run is shown as Z and is not dead.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pwd
import re
import select
import signal
import threading
import time
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Collection,
    Dict,
    FrozenSet,
    Iterable,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
)

if TYPE_CHECKING:
    from types import TracebackType

PROC = "/proc"

#: Seconds to wait for a file of /proc that needs the memory map of a process in D state; it may never come.
_STUCK_READ_SECONDS = 0.3
#: After so long a session is looked for among all processes again.
FULL_SCAN_SECONDS = 60.0

_GONE_STATES = frozenset("ZXx")


# --------------------------------------------------------------------------------------------------- what is known


@dataclass(frozen=True)
class Identity:
    """One process for as long as this boot lasts; ``start`` is in clock ticks since boot (stat, field 22)."""

    boot_id: str
    pid: int
    start: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Identity:
        """Return whom a record speaks of that was made with ``to_json``."""
        return cls(record["boot_id"], record["pid"], record["start"])

    def to_json(self) -> Dict[str, Any]:
        return {"boot_id": self.boot_id, "pid": self.pid, "start": self.start}


@dataclass(frozen=True)
class Process:
    """A process as it was at one moment. ``argv`` is what the process shows now, which setproctitle may have replaced.

    ``uid`` is the real user id. ``exe`` is None where it may not be read (another user's) and for kernel threads.
    """

    identity: Identity
    ppid: int
    pgid: int
    sid: int
    state: str
    uid: int
    comm: str
    argv: Tuple[str, ...]
    cgroup: str
    exe: Optional[str]
    threads: int = 1

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def start(self) -> int:
        return self.identity.start

    @property
    def title(self) -> str:
        """The name it gives itself: argv[0], which is where setproctitle writes; comm where there is no argv."""
        return (self.argv[0] if self.argv else "") or self.comm

    @property
    def command(self) -> str:
        """The whole command line for people; ``[comm]`` where there is none, as ps shows it."""
        return " ".join(self.argv).strip() or f"[{self.comm}]"

    @property
    def is_dead(self) -> bool:
        """A zombie of which every thread has ended: only its parent's wait() is missing."""
        return self.state in _GONE_STATES and self.threads <= 1


@dataclass(frozen=True)
class Activity:
    """Work a process has done so far; only differences mean something.

    ``cpu_ticks`` user and system time in clock ticks. ``read_bytes`` asked of files plus fetched from storage (weights
    come by read() or by mapping); 0 where the counters are another user's.
    """

    cpu_ticks: int
    read_bytes: int


@dataclass(frozen=True)
class Unit:
    """A systemd unit. ``manager_uid`` None: the system manager; else the user whose ``systemctl --user`` owns it."""

    name: str
    manager_uid: Optional[int]


@dataclass(frozen=True)
class Container:
    """A container by its full id. ``runtime``: docker, podman, cri-o, containerd, "" where the path does not say.

    ``is_pod``: Kubernetes runs it, and starts it again. ``uid``: whose rootless runtime it belongs to, None: root's.
    """

    id: str
    runtime: str
    is_pod: bool = False
    uid: Optional[int] = None


# ------------------------------------------------------------------------------------------------ one and all


def boot_id() -> str:
    """Name this boot of the machine; where the kernel keeps no id, the boot time stands in."""
    text = _read(f"{PROC}/sys/kernel/random/boot_id")
    if text and text.strip():
        return text.decode("ascii", "replace").strip()
    found = re.search(rb"^btime (\d+)$", _read(f"{PROC}/stat") or b"", re.MULTILINE)
    return f"btime-{int(found.group(1))}" if found else "unknown"


def pids() -> List[int]:
    """List the pids that /proc shows; with hidepid these are one's own."""
    try:
        names = os.listdir(PROC)
    except OSError:
        return []
    return [int(name) for name in names if name.isdigit()]


def read_process(pid: int, boot: Optional[str] = None) -> Optional[Process]:
    """Describe process ``pid``, or None: gone, hidden from this user, or only a thread of another process.

    ``boot`` saves reading the boot id again when many are described.
    """
    stat = _stat(pid)
    if stat is None:
        return None
    tgid, uid = _tgid_and_uid(_read(f"{PROC}/{pid}/status") or b"")
    if tgid != pid or uid is None:  # /proc/TID opens as well though it is not listed
        return None
    argv = _split_argv(_read_of_memory(pid, "cmdline", stat.state) or b"")
    try:
        exe: Optional[str] = os.readlink(f"{PROC}/{pid}/exe")
    except OSError:
        exe = None
    cgroup = (_read(f"{PROC}/{pid}/cgroup") or b"").decode("utf-8", "surrogateescape")
    return Process(
        identity=Identity(boot_id() if boot is None else boot, pid, stat.start),
        ppid=stat.ppid,
        pgid=stat.pgid,
        sid=stat.sid,
        state=stat.state,
        uid=uid,
        comm=stat.comm,
        argv=argv,
        cgroup=cgroup,
        exe=exe,
        threads=stat.threads,
    )


def processes() -> Dict[int, Process]:
    """Describe every process that can be seen, by pid: zombies and kernel threads too."""
    boot = boot_id()
    table = {}
    for pid in pids():
        process = read_process(pid, boot)
        if process is not None:
            table[pid] = process
    return table


def find_by_argument(word: str) -> Tuple[int, ...]:
    """List the pids of living processes that have ``word`` as a whole argument; cheaper than the whole table."""
    wanted = word.encode("utf-8", "surrogateescape")
    found = []
    for pid in pids():
        stat = _stat(pid)
        argv = _read_of_memory(pid, "cmdline", stat.state) if stat else None
        if argv and wanted in argv and wanted in argv.split(b"\0"):
            found.append(pid)
    return tuple(sorted(found))


def is_alive(identity: Identity) -> bool:
    """Tell whether exactly this process still runs. A zombie is dead only when all its threads are gone.

    "Dead" is said only on proof: a process that hidepid hides counts as alive while the kernel knows its pid.
    """
    if identity.boot_id != boot_id():
        return False
    stat = _stat(identity.pid)
    if stat is None:
        return _kernel_knows(identity.pid)
    return stat.start == identity.start and not _is_dead(identity.pid, stat)


def is_pid_alive(pid: int) -> bool:
    """Tell whether any living process has this pid, another user's and hidden ones included.

    For pids that come from elsewhere without a start time (nvidia-smi); a zombie counts as for ``is_alive``.
    """
    if not 0 < pid < 1 << 31:
        return False
    stat = _stat(pid)
    if stat is None:
        return _kernel_knows(pid)
    tgid, _ = _tgid_and_uid(_read(f"{PROC}/{pid}/status") or b"")
    return tgid in (pid, None) and not _is_dead(pid, stat)


def foreground_group(pid: int) -> Optional[int]:
    """Return the process group in the foreground of the terminal of ``pid`` (stat, field 8); None without one."""
    fields = (_read(f"{PROC}/{pid}/stat") or b"").rpartition(b")")[2].split()
    return int(fields[5]) if len(fields) > 5 and fields[4] != b"0" else None


def hidden_by() -> str:
    """Name the option of /proc that hides processes from this user, ``hidepid=2``; "" where it shows all."""
    # The last mount there is the one that is seen.
    for line in reversed((_read(f"{PROC}/self/mounts") or b"").decode("utf-8", "replace").splitlines()):
        cells = line.split()
        if len(cells) > 3 and cells[1] == PROC and cells[2] == "proc":
            option = next((word for word in cells[3].split(",") if word.startswith("hidepid=")), "")
            return "" if option in ("hidepid=0", "hidepid=off") or os.geteuid() == 0 else option
    return ""


def why_unseen() -> str:
    """Say of a process that lives, and of which nothing can be read, why that is so."""
    option = hidden_by()
    return f"another user's: {PROC} is mounted with {option}" if option else f"alive, and not to be seen in {PROC}"


class SessionScan:
    """Lists the living pids of session ``sid`` again and again: what was no member is not read a second time.

    A session cannot be joined, only be born into. A pid that is gone in one look and back in the next is read again;
    all of them are every FULL_SCAN_SECONDS, lest one has changed hands in between.
    """

    def __init__(self, sid: int) -> None:
        self._sid = sid
        self._strangers: Set[int] = set()
        self._full_at = float("-inf")

    def look(self) -> Tuple[int, ...]:
        now, present = time.monotonic(), set(pids())
        if now - self._full_at >= FULL_SCAN_SECONDS:
            self._full_at = now
            self._strangers.clear()
        self._strangers &= present
        members = []
        for pid in present - self._strangers:
            stat = _stat(pid)
            if stat is not None and stat.sid == self._sid:
                if not _is_dead(pid, stat):
                    members.append(pid)
            elif stat is not None:
                self._strangers.add(pid)
        return tuple(sorted(members))


def descendants(roots: Iterable[int], table: Optional[Mapping[int, Process]] = None) -> Tuple[Process, ...]:
    """List the living children of ``roots`` (pids), their children and so on, by pid; the roots are not among them.

    A "child" older than its parent is a pid that changed hands while the table was read, and is left out.
    """
    look = _or_look(table)
    children: Dict[int, List[Process]] = {}
    for process in look.values():
        parent = look.get(process.ppid)
        if parent is None or process.start >= parent.start:
            children.setdefault(process.ppid, []).append(process)
    wanted = list(roots)
    seen: Set[int] = set(wanted)
    found: List[Process] = []
    while wanted:
        for child in children.get(wanted.pop(), ()):
            if child.pid not in seen:
                seen.add(child.pid)
                found.append(child)
                wanted.append(child.pid)
    return _living(found)


def user_name(uid: int) -> str:
    """Name a user; the number itself where the node has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError, OSError):
        return str(uid)


# ------------------------------------------------------------------------------------------------ a look inside


def environ(pid: int) -> Optional[Dict[str, str]]:
    """Read the environment that ``pid`` was given at its exec; None where it may not be read or is gone.

    facts: later changes never appear here, and setproctitle erases names from it unless SPT_NOENV was set, so that a
    missing name proves nothing while a present value is the exec-time one.
    """
    stat = _stat(pid)
    data = _read_of_memory(pid, "environ", stat.state) if stat else None
    if data is None:
        return None
    pairs = (entry.decode("utf-8", "surrogateescape").partition("=") for entry in data.split(b"\0"))
    return {name: value for name, equals, value in pairs if name and equals}


def activity(pid: int) -> Optional[Activity]:
    """Read how much ``pid`` has worked so far; None when it is gone or hidden."""
    stat = _stat(pid)
    if stat is None:
        return None
    counters = dict(re.findall(rb"^(\w+): (\d+)$", _read(f"{PROC}/{pid}/io") or b"", re.MULTILINE))
    return Activity(stat.cpu_ticks, int(counters.get(b"rchar", 0)) + int(counters.get(b"read_bytes", 0)))


def limits(pid: int) -> Dict[str, float]:
    """Return the soft limits of process ``pid``, by the kernel's names in lower case without "max"; empty if hidden."""
    text = (_read(f"{PROC}/{pid}/limits") or b"").decode("ascii", "replace")
    found = {}
    for line in text.splitlines()[1:]:
        columns = re.split(r" {2,}", line.strip())
        if len(columns) >= 3 and (columns[1] == "unlimited" or columns[1].isdigit()):
            name = columns[0].lower()
            name = name[len("max ") :] if name.startswith("max ") else name
            found[name] = float("inf") if columns[1] == "unlimited" else float(columns[1])
    return found


def open_files(pid: int) -> Optional[Dict[int, str]]:
    """Map the open file descriptors of ``pid`` to what they lead to (a path, ``socket:[INODE]``, ...).

    None where it may not be read (another user's process, unprivileged); {} when it is gone or has none.
    """
    directory = f"{PROC}/{pid}/fd"
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, ProcessLookupError):
        return {}
    except OSError:
        return None
    found = {}
    for name in names:
        try:
            found[int(name)] = os.readlink(f"{directory}/{name}")
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return None
    return found


def files_in_use() -> Tuple[FrozenSet[Tuple[int, int]], bool]:
    """Collect (device, inode) of every file that a process has open or mapped, and whether all could be looked into.

    By number, not by path: another mount namespace may see the same file elsewhere.
    """
    found: Set[Tuple[int, int]] = set()
    complete = True
    for pid in pids():
        stat = _stat(pid)
        text = _read_of_memory(pid, "maps", stat.state) if stat else None
        descriptors = open_files(pid)
        if text is None or descriptors is None:
            complete = complete and not is_pid_alive(pid)
        for line in (text or b"").splitlines():
            cells = line.split(maxsplit=5)
            if len(cells) >= 5 and cells[4] != b"0":
                major, _, minor = cells[3].partition(b":")
                found.add((os.makedev(int(major, 16), int(minor, 16)), int(cells[4])))
        for number in descriptors or ():
            try:
                seen = os.stat(f"{PROC}/{pid}/fd/{number}")
            except OSError:
                continue
            found.add((seen.st_dev, seen.st_ino))
    return frozenset(found), complete


def mapped_below(directory: str, pids: Collection[int]) -> int:
    """Return how many bytes of the files below ``directory`` the processes have mapped, deleted ones too, each once.

    An upper bound of the room that their end gives back: a mapping may be larger than what was written of it.
    """
    found: Dict[Tuple[bytes, bytes], int] = {}
    for pid in pids:
        stat = _stat(pid)
        text = _read_of_memory(pid, "maps", stat.state) if stat else None
        for line in (text or b"").splitlines():
            cells = line.split(maxsplit=5)
            if len(cells) == 6 and cells[5].startswith(os.fsencode(directory) + b"/"):
                first, _, last = cells[0].partition(b"-")
                file, end = (cells[3], cells[4]), int(cells[2], 16) + int(last, 16) - int(first, 16)
                found[file] = max(found.get(file, 0), end)
    return sum(found.values())


def working_directory(pid: int) -> Optional[str]:
    """Return the directory that ``pid`` works in; None where it may not be read or was removed."""
    try:
        path = os.readlink(f"{PROC}/{pid}/cwd")
    except OSError:
        return None
    return None if path.endswith(" (deleted)") else path


def age_seconds(process: Process) -> float:
    """Tell how long the process has run, in seconds (to one clock tick)."""
    uptime = (_read(f"{PROC}/uptime") or b"0").split()
    return max(0.0, float(uptime[0]) - process.start / os.sysconf("SC_CLK_TCK"))


#: What to do about a process that sleeps ``in`` kernel functions that begin so: roles/node/faults.yml.
Advice = Sequence[Mapping[str, str]]


def why_unkillable(process: Process, advice: Advice) -> Optional[str]:
    """Say why SIGKILL does not end the process and what helps, or None when nothing speaks against it.

    Looks again at every thread: one in D state keeps the process, as does one spinning inside the GPU driver. The
    place in the kernel (wchan; the stack for root) is part of the answer, and ``advice`` goes by it.
    """
    for tid in _threads(process.pid):
        path = f"{PROC}/{process.pid}/task/{tid}"
        stat = _parse_stat(_read(f"{path}/stat") or b"")
        if stat is None or stat.state not in "DR":
            continue
        wchan = (_read(f"{path}/wchan") or b"").decode("ascii", "replace").strip()
        stack = (_read(f"{path}/stack") or b"").decode("ascii", "replace")
        reason = explain_stuck(stat.state, wchan, stack, advice)
        if reason is not None:
            return f"pid {process.pid} ({process.title}): {reason}"
    return None


def explain_stuck(state: str, wchan: str, stack: str, advice: Advice) -> Optional[str]:
    """Put a thread's state and its place in the kernel into words with the advice that fits; None: not stuck.

    facts: a worker in D state or in R inside uvm_spin_loop outlives SIGKILL until the node reboots; tens of seconds in
    D while pinned host memory is given back are normal.
    """
    frames = re.findall(r"^(?:\[<[^>]*>\]\s*)?([A-Za-z_]\w*)", stack, re.MULTILINE)
    where = wchan if wchan not in ("", "0") else (frames[0] if frames else "")
    places = [where, *frames]
    if state == "R":
        spin = next((place for place in places if place.startswith("uvm_")), None)
        return f"spins inside the GPU driver (R, {spin}); only a reboot of the node ends it" if spin else None
    if state != "D":
        return None
    head = f"uninterruptible sleep (D, in {where or 'an unknown place'})"
    for each in advice:
        if any(re.match(each["in"], place) for place in places):
            return f"{head}: {each['advice']}"
    return f"{head}: it ends when what it waits for answers; if it stays for minutes, the node needs a reboot"


# ------------------------------------------------------------------------------------------- supervisors by cgroup


def unit_of(process: Process) -> Optional[Unit]:
    """Name the systemd unit that supervises the process, or None; stopping that unit is the way to stop it."""
    return unit_in(process.cgroup)


def container_of(process: Process) -> Optional[Container]:
    """Name the container that the process lives in, or None."""
    return container_in(process.cgroup)


def unit_in(cgroup: str) -> Optional[Unit]:
    """Find the unit in the text of ``/proc/PID/cgroup``, v1, v2 or hybrid.

    A login session's scope, a user's manager itself, init.scope and a container's own scope are no units to stop: the
    first would end the operator's login, the last belongs to its runtime. What lies below a unit, or below something
    that is neither slice nor manager, is no unit of this node's systemd: it may be that of a systemd in a container,
    with units of the same names.
    """
    ours = _place_of_systemd()
    for path in _systemd_paths(cgroup):
        unit = _first_unit(path[len(ours) :] if path[: len(ours)] == ours else path)
        if unit is not None:
            return unit
    return None


def _first_unit(path: Sequence[str]) -> Optional[Unit]:
    manager: Optional[int] = None
    for part in path:
        user = re.fullmatch(r"user@(\d+)\.service", part)
        if user:
            manager = int(user.group(1))
        elif re.fullmatch(r".+\.(service|scope)", part):
            return None if _is_no_unit(part) else Unit(part, manager)
        elif not part.endswith(".slice"):
            return None
    return None


@functools.lru_cache(maxsize=1)
def _place_of_systemd() -> List[str]:
    """Return the path above all units: that of a container where PID 1 is a systemd in one without its own view."""
    paths = _systemd_paths((_read(f"{PROC}/1/cgroup") or b"").decode("utf-8", "surrogateescape"))
    return next((path[:-1] for path in paths if path[-1:] == ["init.scope"]), [])


def container_in(cgroup: str) -> Optional[Container]:
    """Find the innermost container (docker, podman, CRI-O, containerd) in the text of ``/proc/PID/cgroup``."""
    for line in cgroup.splitlines():
        parts = _path_parts(line)
        for place in range(len(parts) - 1, -1, -1):
            match = _CONTAINER.fullmatch(parts[place])
            if match:
                above = parts[:place]
                owners = [found for found in map(_OWNER.fullmatch, above) if found]
                return Container(
                    match.group("id"),
                    _runtime(match.group("prefix") or "", above),
                    is_pod=any("kubepods" in part for part in above),
                    uid=int(owners[-1].group(1)) if owners else None,
                )
    return None


#: `docker-ID.scope`, `libpod-ID.scope`, `libpod-payload-ID`, `crio-ID.scope`, `cri-containerd-ID.scope`,
#: `nerdctl-ID.scope`, bare `ID`; `libpod-conmon-ID.scope` is podman's watcher, outside the container.
_CONTAINER = re.compile(r"(?:(?P<prefix>(?!.*conmon)[a-z][a-z0-9-]*)-)?(?P<id>[0-9a-f]{64})(?:\.scope)?")

#: Above a rootless container: the slice or the manager of its user.
_OWNER = re.compile(r"user(?:-(?=\d+\.slice)|@(?=\d+\.service))(\d+)\.(?:slice|service)")

_RUNTIMES = {
    "docker": "docker",
    "libpod": "podman",
    "libpod-payload": "podman",
    "crio": "cri-o",
    "cri-containerd": "containerd",
    "nerdctl": "containerd",
}


def _runtime(prefix: str, above: Sequence[str]) -> str:
    if prefix in _RUNTIMES:
        return _RUNTIMES[prefix]
    parent = above[-1] if above else ""
    return {"docker": "docker", "libpod_parent": "podman", "default": "containerd"}.get(parent, "")


def _is_no_unit(part: str) -> bool:
    is_session = re.fullmatch(r"session-[^.]+\.scope", part) is not None
    return is_session or part == "init.scope" or _CONTAINER.fullmatch(part) is not None


def _systemd_paths(cgroup: str) -> List[List[str]]:
    """Paths that systemd keeps, best first: its own v1 hierarchy (also in hybrid mode), then v2, then the rest."""
    lines = cgroup.splitlines()
    ranked = sorted(lines, key=lambda line: 0 if ":name=systemd:" in line else 1 if line.startswith("0::") else 2)
    return [_path_parts(line) for line in ranked]


def _path_parts(line: str) -> List[str]:
    path = line.split(":", 2)[-1]
    if path.endswith(" (deleted)"):
        path = path[: -len(" (deleted)")]
    # systemd puts "_" in front of a name that the kernel reserves
    return [part[1:] if part.startswith("_") else part for part in path.split("/") if part]


# ------------------------------------------------------------------------------------------------------- a grip


class Handle:
    """A grip on one proven process: it can be waited for and signalled, and never reaches another one.

    Holds a pidfd (closed by ``close`` or the ``with`` block), readable by poll once the whole process has exited.
    """

    def __init__(self, identity: Identity, uid: int, pidfd: int) -> None:
        self.identity = identity
        self.uid = uid
        self.refused: Optional[str] = None
        self._pidfd = pidfd

    @classmethod
    def open(cls, identity: Identity) -> Optional[Handle]:
        """Take hold of the process, or None: it is gone, its pid is another's by now, or it cannot be verified.

        Raises OSError where the kernel has no pidfds or descriptors ran out: that says nothing about the process.
        """
        if identity.boot_id != boot_id() or not 0 < identity.pid < 1 << 31:
            return None
        try:
            pidfd = os.pidfd_open(identity.pid)
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):  # gone; the last two: the id of a thread
                return None
            raise
        stat = _stat(identity.pid)
        _, uid = _tgid_and_uid(_read(f"{PROC}/{identity.pid}/status") or b"")
        if stat is None or stat.start != identity.start or uid is None:
            os.close(pidfd)
            return None
        return cls(identity, uid, pidfd)

    def signal(self, number: int) -> bool:
        """Send a signal if the process is still exactly the one it was; True when the kernel took it.

        False: ``refused`` says why (gone, changed user, not permitted, or ourselves), None when simply gone.
        """
        self.refused = None
        if self.identity.pid in (1, os.getpid()):
            self.refused = "this is the init process or lamplighter itself"
            return False
        stat = _stat(self.identity.pid)
        _, uid = _tgid_and_uid(_read(f"{PROC}/{self.identity.pid}/status") or b"")
        if stat is None or stat.start != self.identity.start:
            return False
        if uid != self.uid:
            self.refused = f"it changed its user from {user_name(self.uid)} to {'?' if uid is None else user_name(uid)}"
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            self.refused = f"it belongs to {user_name(self.uid)}"
            return False
        return True

    def exited(self) -> bool:
        """Tell whether the process, every thread of it, has exited; reaped or not."""
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Wait until it has exited, ``seconds`` at most; True when it has. Notices within milliseconds."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(max(0.0, seconds) * 1000))

    def fileno(self) -> int:
        return self._pidfd

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: Optional[type], value: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------------- the parsers


@dataclass(frozen=True)
class _Stat:
    comm: str
    state: str
    ppid: int
    pgid: int
    sid: int
    cpu_ticks: int
    threads: int
    start: int


def _stat(pid: int) -> Optional[_Stat]:
    return _parse_stat(_read(f"{PROC}/{pid}/stat") or b"")


def _parse_stat(data: bytes) -> Optional[_Stat]:
    """Fields are counted after the last ``)``: a process may be named ``a b) R 1 1 (``."""
    name_starts, name_ends = data.find(b"("), data.rfind(b")")
    fields = data[name_ends + 1 :].split()
    if name_starts < 0 or name_ends < name_starts or len(fields) < 20:
        return None
    try:
        return _Stat(
            comm=data[name_starts + 1 : name_ends].decode("utf-8", "surrogateescape"),
            state=fields[0].decode("ascii"),
            ppid=int(fields[1]),
            pgid=int(fields[2]),
            sid=int(fields[3]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            threads=int(fields[17]),
            start=int(fields[19]),
        )
    except ValueError:
        return None


def _tgid_and_uid(status: bytes) -> Tuple[Optional[int], Optional[int]]:
    # the name comes first in status; the kernel escapes newlines in it, so that it can't forge a line
    tgid = re.search(rb"^Tgid:\t(\d+)$", status, re.MULTILINE)
    uid = re.search(rb"^Uid:\t(\d+)\t", status, re.MULTILINE)
    return (int(tgid.group(1)) if tgid else None, int(uid.group(1)) if uid else None)


def _split_argv(data: bytes) -> Tuple[str, ...]:
    """What setproctitle overwrote is padded with NULs; an argument in the middle may be empty and stays."""
    text = data.rstrip(b"\0")
    return tuple(part.decode("utf-8", "surrogateescape") for part in text.split(b"\0")) if text else ()


def _is_dead(pid: int, stat: _Stat) -> bool:
    if stat.state not in _GONE_STATES:
        return False
    return stat.threads <= 1 or not _has_living_thread(pid)


def _has_living_thread(pid: int) -> bool:
    for tid in _threads(pid):
        stat = _parse_stat(_read(f"{PROC}/{pid}/task/{tid}/stat") or b"")
        if stat is not None and stat.state not in _GONE_STATES:
            return True
    return False


def _threads(pid: int) -> List[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"{PROC}/{pid}/task"))
    except OSError:
        return []


def _kernel_knows(pid: int) -> bool:
    """Ask without /proc: with hidepid a process of another user answers EPERM, a missing one ESRCH.

    facts: hidepid also hides processes of one's own that one may not trace (not dumpable, with capabilities).
    """
    for _ in range(2):  # one that is there for both, and in /proc for neither, has not just gone
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):
            return False
        if _stat(pid) is not None:
            return True
    return True


def _or_look(table: Optional[Mapping[int, Process]]) -> Mapping[int, Process]:
    return processes() if table is None else table


def _living(found: Iterable[Process]) -> Tuple[Process, ...]:
    return tuple(sorted((process for process in found if not process.is_dead), key=lambda process: process.pid))


def _read(path: str) -> Optional[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def _read_of_memory(pid: int, name: str, state: str) -> Optional[bytes]:
    """Read a file that needs the process's memory map.

    The map may be locked by a thread that waits in the kernel (this is why ps hangs on such a node): a process in D
    state is read with a deadline, in a thread that is given up when the answer does not come.
    """
    path = f"{PROC}/{pid}/{name}"
    if state != "D":
        return _read(path)
    answer: List[Optional[bytes]] = []
    reader = threading.Thread(target=lambda: answer.append(_read(path)), daemon=True)
    reader.start()
    reader.join(_STUCK_READ_SECONDS)
    return answer[0] if answer else None


__all__ = [
    "Activity",
    "Container",
    "Handle",
    "Identity",
    "Process",
    "SessionScan",
    "Unit",
    "activity",
    "age_seconds",
    "boot_id",
    "container_in",
    "container_of",
    "descendants",
    "environ",
    "explain_stuck",
    "files_in_use",
    "find_by_argument",
    "foreground_group",
    "hidden_by",
    "is_alive",
    "is_pid_alive",
    "open_files",
    "pids",
    "processes",
    "read_process",
    "unit_in",
    "unit_of",
    "user_name",
    "why_unkillable",
    "why_unseen",
    "working_directory",
]


def describe_pids(pids: Iterable[int]) -> str:
    """Name processes as a person would look for them: pid, user, command; one that is hidden is not gone."""
    parts = []
    for pid in pids:
        process = read_process(pid)
        if process is None:
            parts.append(f"pid {pid} ({why_unseen() if is_pid_alive(pid) else 'gone'})")
        else:
            with contextlib.suppress(OSError):
                parts.append(f"pid {pid} ({user_name(process.uid)}, {process.title})")
    return ", ".join(parts)
