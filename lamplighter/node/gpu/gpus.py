"""What the GPUs of this node hold, judged so that only proof counts as freed: the only reader of nvidia-smi.

FREED, HELD, UNKNOWN or NO_HOLDERS: only FREED may start a server, and every answer that is not wholly understood is
UNKNOWN. NO_HOLDERS is for GPUs whose memory cannot be judged (unified memory); whether it suffices is for the operator.

Memory is in MiB. Runs ``nvidia-smi`` (with a deadline) and looks into ``/proc``; changes nothing on the node, never
resets a GPU. Nothing here raises on what nvidia-smi says.

facts: exit codes of nvidia-smi are unreliable beside a dead GPU, errors go to stdout or to stderr, a dead GPU may read
"0 MiB", a lost one leaves a message in the middle of the table, every call may hang for ever when the driver is stuck.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
import select
import shutil
import signal
import time
from dataclasses import dataclass, field
from typing import Callable, Collection, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

from lamplighter.node.system import processes

FREED = "FREED"
HELD = "HELD"
UNKNOWN = "UNKNOWN"
NO_HOLDERS = "NO_HOLDERS"

#: MiB over the idle baseline that is noise, and the limit where no baseline is known.
TOLERANCE_MIB = 64
LIMIT_WITHOUT_BASELINE_MIB = 512

#: From the beginning of one sample to the next. facts: memory reads 0 within 0.2 to 1.5 s of the kill.
SAMPLE_SECONDS = 0.3
#: Memory outlives its process. Measured: up to 1.5 s with pinned host memory, 0.3 s without.
TEARDOWN_SECONDS = 3.0

#: For so long one answer serves all who only read. facts: eight of ten calls of a preflight came within 0.4 s.
LOOK_SECONDS = 1.0

# -------------------------------------------------------------------------------------------------- the questions

QUERY_GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "memory.reserved",
    "temperature.gpu",
    "pstate",
)
_FORMAT = "--format=csv,noheader,nounits"
QUERY_GPUS = ("nvidia-smi", "--query-gpu=" + ",".join(QUERY_GPU_FIELDS), _FORMAT)
QUERY_APPS = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", _FORMAT)
#: Asked apart: one field that the driver does not know fails a whole query.
QUERY_RECOVERY = ("nvidia-smi", "--query-gpu=uuid,gpu_recovery_action", _FORMAT)

#: Carries each call's own deadline (monotonic seconds), so that any later run can tell a hung call from a slow one, and
#: which program it is: nodes that share a machine (in a box, in namespaces) see each other's processes.
_CALL_VARIABLE = "LAMPLIGHTER_SMI_CALL"

#: Seconds that a killed call gets to be gone before it counts as stuck in the driver.
_KILL_SECONDS = 0.3

_LARGEST_ANSWER = 4 << 20

#: How the reason of an UNKNOWN begins where a call hung: a call by hand would hang as well.
NO_ANSWER = "nvidia-smi gave no answer"
#: facts: documented as "infoROM is corrupted"; the tables before the warning are whole.
_INFOROM_RC = 14


@dataclass(frozen=True)
class Answer:
    """What one call of nvidia-smi left. ``rc`` None: no exit code (a deadline, or it could not be started)."""

    rc: Optional[int]
    stdout: str
    stderr: str


#: Answers of the look that is going on, by their question, each with the moment at which it was asked.
_look: contextvars.ContextVar[Optional[Dict[Tuple[str, ...], Tuple[float, Answer]]]] = contextvars.ContextVar(
    "look", default=None
)


@contextlib.contextmanager
def one_look() -> Iterator[None]:
    """Let those who only read share what nvidia-smi answers, for LOOK_SECONDS; failures are asked about again.

    Not for who stops or starts anything: a proof needs samples of its own.
    """
    token = _look.set({})
    try:
        yield
    finally:
        _look.reset(token)


def _look_again() -> None:
    known = _look.get()
    if known is not None:
        known.clear()


@dataclass(frozen=True)
class Sample:
    """One look at all GPUs: QUERY_GPUS and QUERY_APPS."""

    gpus: Answer
    apps: Answer


def take_sample(deadline: float = 10.0) -> Sample:
    """Ask nvidia-smi both questions, ``deadline`` seconds for each; a call that hangs is never waited for longer.

    A hung call is killed; one that is stuck in the driver stays behind, and while it is there no other is started.
    facts: a call takes 20-35 ms, 190 ms while memory is torn down; 2 s is too short on busy nodes; without persistence
    mode, each call on idle GPUs initialises all of them first, which takes seconds.
    """
    gpus = _ask(QUERY_GPUS, time.monotonic() + deadline)
    if gpus.rc is None:
        return Sample(gpus, Answer(None, "", "not asked: the call before it had no answer"))
    return Sample(gpus, _ask(QUERY_APPS, time.monotonic() + deadline))


def accepting(sample: Sample, accepted: Collection[str]) -> Sample:
    """Return the sample without the warnings that the operator accepts, see ``without_warnings``."""
    return Sample(without_warnings(sample.gpus, accepted), without_warnings(sample.apps, accepted))


def without_warnings(answer: Answer, accepted: Collection[str]) -> Answer:
    """Return the answer without the warnings that the operator accepts by a part of their words, in any case.

    Only lines that call themselves a warning go, and everything else counts as it was printed. The exit code goes with
    the one warning that it stands for. facts: a corrupted infoROM is told after every table, on either stream.
    """
    words = [each.lower() for each in accepted]
    gone: List[str] = []

    def kept(text: str) -> str:
        lines = text.split("\n")
        gone.extend(line for line in lines if _is_warning(line) and any(word in line.lower() for word in words))
        return "\n".join(line for line in lines if line not in gone)

    stdout, stderr = kept(answer.stdout), kept(answer.stderr)
    is_inforom = answer.rc == _INFOROM_RC and any("inforom" in line.lower() for line in gone)
    return Answer(0 if is_inforom else answer.rc, stdout, stderr)


def _is_warning(line: str) -> bool:
    return line.strip().lower().startswith("warning")


def recovery_trouble(uuids: Collection[str], deadline: float = 10.0, accepted: Collection[str] = ()) -> Optional[str]:
    """Say which of the GPUs ``uuids`` wants a reset or a reboot; None where none does or the driver does not know."""
    answer = without_warnings(_ask(QUERY_RECOVERY, time.monotonic() + deadline), accepted)
    if answer.rc is None:
        return f"{NO_ANSWER} about recovery: {_first_line(answer.stderr)}"
    wanted = {uuid.lower() for uuid in uuids}
    found = [(uuid, act) for uuid, act in read_recovery_actions(answer).items() if uuid.lower() in wanted]
    return ", ".join(f"GPU {uuid} needs recovery: {action}" for uuid, action in found) or None


def read_recovery_actions(answer: Answer) -> Dict[str, str]:
    """Read the answer to QUERY_RECOVERY: only GPUs that need something (Reset, Reboot, Drain P2P, Drain and Reset).

    facts: "None" is good; an unknown field is rc 2 with a message on stdout.
    """
    if answer.rc not in (0, _INFOROM_RC):
        return {}
    found = {}
    for line in _lines(answer.stdout):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 2 and _UUID.fullmatch(cells[0]) and _token(cells[1]) not in (_ABSENT | {"none"}):
            found[cells[0]] = cells[1]
    return found


def details(fields: Sequence[str], deadline: float = 10.0) -> Dict[str, Dict[str, str]]:
    """Ask for more ``fields`` of every GPU: {uuid: {field: cell as nvidia-smi wrote it}}; unanswered ones are left out.

    One field that the driver does not know fails a whole query, so then each is asked apart. A corrupted infoROM, which
    makes every call fail, hides nothing here: this is for people and for comparison, and frees no GPU.
    """
    until = time.monotonic() + deadline
    found = read_details(fields, _ask(_query(fields), until))
    if found is not None:
        return found
    merged: Dict[str, Dict[str, str]] = {}
    for field_ in fields:
        for uuid, cells in (read_details([field_], _ask(_query([field_]), until)) or {}).items():
            merged.setdefault(uuid, {}).update(cells)
    return merged


def _query(fields: Sequence[str]) -> Tuple[str, ...]:
    return ("nvidia-smi", "--query-gpu=" + ",".join(["uuid", *fields]), _FORMAT)


def read_details(fields: Sequence[str], answer: Answer) -> Optional[Dict[str, Dict[str, str]]]:
    """Read the answer to a query of ``uuid`` and ``fields``; None when the query failed. Odd lines are passed over."""
    if answer.rc not in (0, _INFOROM_RC):
        return None
    found = {}
    for line in _lines(answer.stdout):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(fields) + 1 and _UUID.fullmatch(cells[0]):
            found[cells[0]] = dict(zip(fields, cells[1:]))  # noqa: B905 - 3.9 has no strict
    return found


def _ask(command: Sequence[str], until: float) -> Answer:
    known, now = _look.get(), time.monotonic()
    if known is None:
        return _ask_now(command, until)
    asked, answer = known.get(tuple(command), (-LOOK_SECONDS, Answer(None, "", "")))
    if now - asked >= LOOK_SECONDS:
        answer = _ask_now(command, until)
        if answer.rc == 0:
            known[tuple(command)] = (now, answer)
    return answer


def _ask_now(command: Sequence[str], until: float) -> Answer:
    program = shutil.which(command[0])
    if program is None:
        return Answer(127, "", f"{command[0]}: not found")
    stuck = _stuck_call(program)
    if stuck is not None:
        return Answer(None, "", f"an earlier nvidia-smi (pid {stuck}) has not answered yet; no other is started")
    try:
        out, err = os.memfd_create("stdout"), os.memfd_create("stderr")
    except OSError as error:
        return Answer(None, "", f"no room for its output: {error.strerror}")
    try:
        rc, problem = _run(program, command, until, out, err)
        return Answer(rc, _content(out), _content(err) + problem)
    finally:
        os.close(out)
        os.close(err)


def _run(program: str, command: Sequence[str], until: float, out: int, err: int) -> Tuple[Optional[int], str]:
    """Run it in a session of its own, its output in files: nothing of it can block or signal us."""
    try:
        pid = os.posix_spawn(
            program,
            list(command),
            {**os.environ, "LC_ALL": "C", _CALL_VARIABLE: f"{until!r} {os.path.realpath(program)}"},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, out, 1),
                (os.POSIX_SPAWN_DUP2, err, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGHUP],  # the worker ignores these, its children must not
        )
    except OSError as error:
        return 126, f"{program}: {error.strerror}"
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        return None, f"{command[0]} cannot be watched: {error.strerror}"
    try:
        if not _exits(pidfd, until - time.monotonic()):
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)  # our own child, not reaped yet: the number cannot be another's
            if _exits(pidfd, _KILL_SECONDS):
                os.waitpid(pid, 0)
            return None, f"{command[0]} gave no answer in time"
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), ""
    except ChildProcessError:
        return None, f"{command[0]}: its exit code was taken by another wait"
    finally:
        os.close(pidfd)


def _exits(pidfd: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(max(0.0, seconds) * 1000))


def _content(file: int) -> str:
    try:
        return os.pread(file, _LARGEST_ANSWER, 0).decode("utf-8", "replace")
    except OSError:
        return ""


def _stuck_call(program: str) -> Optional[int]:
    """Find a call of ours, of this run or an earlier one, that is past its own deadline and still there."""
    for pid in processes.find_by_argument(_FORMAT):
        until, _, called = (processes.environ(pid) or {}).get(_CALL_VARIABLE, "").partition(" ")
        with contextlib.suppress(ValueError):
            if called == os.path.realpath(program) and time.monotonic() > float(until):
                return pid
    return None


# ---------------------------------------------------------------------------------------------------- the parsers

#: "Extra spaces, CRLF and a MiB suffix in spite of nounits" are accepted, nothing else is.
_MIB = re.compile(r"([0-9]{1,9})(?:\s*MiB)?")
_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_INDEX = re.compile(r"[0-9]{1,5}")
_PID = re.compile(r"[0-9]{1,10}")
_TEMPERATURE = re.compile(r"[0-9]{1,5}")
_PSTATE = re.compile(r"P[0-9]{1,3}")

_FAULTS: FrozenSet[str] = frozenset(
    ("gpu requires reset", "gpu is lost", "unknown error", "err!", "insufficient permissions")
)
_ABSENT: FrozenSet[str] = frozenset(("n/a", "not supported", "not found", "no data", ""))
_UNIFIED: FrozenSet[str] = frozenset(("n/a", "not supported"))

#: facts: pages of these are not returned at exit and page cache may sit in GPU memory, so "used" proves nothing.
_NUMA_NAMES = re.compile(r"GH200|GB200|GB300", re.IGNORECASE)


@dataclass(frozen=True)
class GpuRow:
    """A well-formed row of QUERY_GPUS: its cells as nvidia-smi wrote them, without the blanks around."""

    index: int
    uuid: str
    name: str
    total: str
    used: str
    reserved: str
    temperature: str
    pstate: str

    @property
    def used_mib(self) -> Optional[int]:
        return _mib(self.used)

    @property
    def total_mib(self) -> Optional[int]:
        return _mib(self.total)

    @property
    def has_fault(self) -> bool:
        cells = (self.name, self.total, self.used, self.reserved, self.temperature, self.pstate)
        return any(_token(cell) in _FAULTS for cell in cells)

    @property
    def has_unified_memory(self) -> bool:
        return _token(self.used) in _UNIFIED and _token(self.total) in _UNIFIED


@dataclass(frozen=True)
class AppRow:
    """A row of QUERY_APPS. ``uuid`` "" and ``pid`` None where unreadable; ``is_whole``: every part was understood.

    The name is chosen by the workload and may contain commas: uuid and pid are taken from the left, memory from the
    right. facts: rows of MIG instances carry the parent's UUID; during teardown the name becomes ``[No data]``.
    """

    uuid: str
    pid: Optional[int]
    name: str
    memory: str
    is_whole: bool


@dataclass(frozen=True)
class Gpu:
    """A GPU for people and for ``resolve``; None stands for what nvidia-smi could not read."""

    index: int
    uuid: str
    name: str
    total_mib: Optional[int]
    used_mib: Optional[int]
    temperature: Optional[int]
    pstate: Optional[str]


def list_gpus(sample: Sample) -> Tuple[Gpu, ...]:
    """List the GPUs whose rows can be read, by index; ``unreadable`` says whether that may be all."""
    rows, _ = _read_gpus(sample.gpus.stdout)
    return tuple(
        Gpu(
            index=row.index,
            uuid=row.uuid,
            name=row.name,
            total_mib=row.total_mib,
            used_mib=row.used_mib,
            temperature=int(row.temperature) if _TEMPERATURE.fullmatch(row.temperature) else None,
            pstate=row.pstate if _PSTATE.fullmatch(row.pstate) else None,
        )
        for row in sorted(rows, key=lambda row: row.index)
    )


def unreadable(sample: Sample) -> Optional[str]:
    """Say why the sample as a whole cannot be trusted (exit code, stderr, a line that is no row), or None."""
    for word, answer in (("GPUs", sample.gpus), ("processes", sample.apps)):
        said = _complaint(answer)
        if answer.rc is None:
            return f"{NO_ANSWER} about its {word}: {said}"
        if answer.rc != 0:
            return f"nvidia-smi failed with rc {answer.rc}: {said}"
        if answer.stderr.strip():
            return f"nvidia-smi complained: {said}"
    _, odd = _read_gpus(sample.gpus.stdout)
    return f"nvidia-smi wrote a line that is no GPU: {odd[0]}" if odd else None


def _complaint(answer: Answer) -> str:
    """Return the line that says what is wrong: a warning comes behind the rows, which say nothing of it."""
    spoken = [line for line in _lines(answer.stderr + "\n" + answer.stdout) if not _UUID.search(line)]
    return _first_line("\n".join(spoken) or answer.stdout)


def how_to_see(reason: str, server: str) -> str:
    """Say what to do about a sample that is UNKNOWN for ``reason``: never to run what would hang as well."""
    if reason.startswith(NO_ANSWER):
        return (
            "do not run nvidia-smi there, it would hang as well: `dmesg | grep -iE 'xid|nvrm'` and "
            "`ps -eo pid,stat,wchan:32,comm | grep ' D'` show what the driver waits for; mostly only a reboot helps"
        )
    if "warning" in reason.lower():
        words = "infoROM is corrupted" if "inforom" in reason.lower() else "PART OF ITS WORDS"
        return (
            "have that GPU looked at; to go on with it all the same, accept this one warning: "
            f"servers.{server}.gpu_warnings: {{accept: [{words}]}}"
        )
    return "run nvidia-smi on the node: what it says is not fit to start a server on"


def _read_gpus(text: str) -> Tuple[List[GpuRow], List[str]]:
    """Rows, and the lines that are none: a lost GPU leaves ``Unable to determine the device handle`` among the rows."""
    rows, odd = [], []
    for line in _lines(text):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(QUERY_GPU_FIELDS) and _INDEX.fullmatch(cells[0]) and _UUID.fullmatch(cells[1]):
            rows.append(GpuRow(int(cells[0]), *cells[1:]))
        else:
            odd.append(line.strip())
    return rows, odd


def _read_apps(text: str) -> List[AppRow]:
    """No process at all is an empty answer; ``No running processes found`` belongs to the table for people."""
    found = []
    for line in _lines(text):
        cells = [cell.strip() for cell in line.split(",")]
        uuid = cells[0] if _UUID.fullmatch(cells[0]) else ""
        pid = int(cells[1]) if len(cells) > 1 and _PID.fullmatch(cells[1]) else None
        memory = cells[-1] if len(cells) >= 4 else ""
        is_memory = _mib(memory) is not None or _token(memory) in (_ABSENT | _FAULTS)
        is_whole = len(cells) >= 4 and uuid != "" and pid is not None and is_memory
        name = ",".join(line.split(",")[2:-1]) if len(cells) >= 4 else line  # a message, which says why
        found.append(AppRow(uuid, pid, name.strip(), memory, is_whole))
    return found


def _lines(text: str) -> List[str]:
    # not splitlines(): a process may carry a form feed or a Unicode line separator in its name
    return [line for line in text.split("\n") if line.strip()]


def _mib(cell: str) -> Optional[int]:
    found = _MIB.fullmatch(cell)
    return int(found.group(1)) if found else None


def _token(cell: str) -> str:
    return " ".join(cell.strip().strip("[]").split()).lower()


def _first_line(text: str) -> str:
    lines = _lines(text)
    return lines[0].strip()[:300] if lines else "it said nothing"


# ---------------------------------------------------------------------------------------------------- the verdict


@dataclass(frozen=True)
class Verdict:
    """One sample's judgement about the GPUs asked for, with its evidence.

    ``holders``: live pids on them outside the allow-list, sorted, ours or not; ``foreign``: those that are not ours.
    ``rows`` and ``apps``: what nvidia-smi said about these GPUs.
    """

    word: str
    holders: Tuple[int, ...]
    reason: str
    rows: Tuple[GpuRow, ...] = ()
    foreign: Tuple[int, ...] = ()
    apps: Tuple[AppRow, ...] = ()

    @property
    def used_mib(self) -> Optional[int]:
        """Memory used on all of them together; None as soon as one cannot be read."""
        used = [row.used_mib for row in self.rows]
        return sum(mib for mib in used if mib is not None) if used and None not in used else None


def judge(
    sample: Sample,
    expected: Sequence[str],
    baseline: Mapping[str, Optional[int]],
    alive: Callable[[int], bool],
    ours: Collection[int] = (),
    allow: Collection[str] = (),
) -> Verdict:
    """Judge the GPUs ``expected`` (UUIDs) by one sample; the first test that matches decides.

    ``baseline``: MiB that each uses when idle, None or missing where unknown. ``alive``: does this pid exist.
    ``allow``: process names, as nvidia-smi shows them, that may stay. No GPU expected is UNKNOWN, never FREED.
    """
    wanted = {uuid.lower() for uuid in expected}
    idle = {uuid.lower(): mib for uuid, mib in baseline.items()}
    rows = tuple(row for row in _read_gpus(sample.gpus.stdout)[0] if row.uuid.lower() in wanted)
    apps = tuple(app for app in _read_apps(sample.apps.stdout) if not app.uuid or app.uuid.lower() in wanted)
    listed = {app.pid: alive(app.pid) for app in apps if app.uuid and app.pid is not None}
    holders = sorted({app.pid for app in apps if app.pid is not None and listed.get(app.pid) and app.name not in allow})

    def verdict(word: str, reason: str) -> Verdict:
        foreign = tuple(pid for pid in holders if pid not in ours)
        return Verdict(word, tuple(holders), reason, rows, foreign, tuple(app for app in apps if app.uuid))

    problem = (
        unreadable(sample)
        or _wrong_set(wanted, expected, rows)
        or next((text for text in map(_faulty, rows) if text), None)
        or _mixed_memory(rows)
        or next((_doubtful(app, listed) for app in apps if _doubtful(app, listed)), None)
    )
    if problem:
        return verdict(UNKNOWN, problem)
    if holders:
        return verdict(HELD, "held by " + ", ".join(f"pid {pid} ({_name_of(pid, apps)})" for pid in holders))
    if all(row.has_unified_memory for row in rows):
        return verdict(NO_HOLDERS, "unified memory cannot be judged; no process is listed")
    over = [row for row in rows if (row.used_mib or 0) > _limit(idle.get(row.uuid.lower()))]
    if any(_NUMA_NAMES.search(row.name) for row in over):
        return verdict(NO_HOLDERS, f"{_memory(over)}, which on this kind of GPU proves nothing; no process is listed")
    if over:
        known = [mib for mib in (idle.get(row.uuid.lower()) for row in over) if mib is not None]
        least = f" (idle: {', '.join(map(str, known))})" if len(known) == len(over) else ""
        return verdict(HELD, f"{_memory(over)}{least}, but no process is listed")
    if any(row.has_fault for row in rows):  # beyond the tests above: a fault in a cell that none of them reads
        return verdict(UNKNOWN, "a GPU reports a fault")
    return verdict(FREED, f"no process, {_memory(rows)}")


def settle(
    expected: Sequence[str],
    baseline: Mapping[str, Optional[int]],
    allow: Collection[str] = (),
    deadline: float = 10.0,
    accepted: Collection[str] = (),
) -> Tuple[Sample, Verdict]:
    """Sample and judge; again for TEARDOWN_SECONDS while it may be the memory of a process that has just died.

    That reads as memory of no process, or as that of a pid which does not exist. ``deadline`` is for each call.
    """
    until = time.monotonic() + TEARDOWN_SECONDS
    while True:
        sample = accepting(take_sample(deadline), accepted)
        verdict = judge(sample, expected, baseline, processes.is_pid_alive, allow=allow)
        is_passing = verdict.word == UNKNOWN or (verdict.word == HELD and not verdict.holders)
        if not is_passing or unreadable(sample) is not None or time.monotonic() > until:
            return sample, verdict
        time.sleep(SAMPLE_SECONDS)
        _look_again()


def unaccounted(verdict: Verdict, baseline: Mapping[str, Optional[int]]) -> Optional[str]:
    """Say on which GPUs much more memory is used than the processes listed on them hold; "" where on none.

    None where that cannot be told: memory of a GPU or of a process is unreadable, or pages outlive their process.
    facts: beside one process 16 MiB are used that it does not hold, with MIG 60; a bare context holds 612.
    """
    idle = {uuid.lower(): mib for uuid, mib in baseline.items()}
    held = {row.uuid.lower(): 0 for row in verdict.rows}
    for app in verdict.apps:
        mib = _mib(app.memory)
        if mib is None:
            return None
        held[app.uuid.lower()] = held.get(app.uuid.lower(), 0) + mib
    found = []
    for row in verdict.rows:
        used, its = row.used_mib, held[row.uuid.lower()]
        if used is None or _NUMA_NAMES.search(row.name):
            return None
        if used > its + (idle.get(row.uuid.lower()) or 0) + LIMIT_WITHOUT_BASELINE_MIB:
            found.append(f"GPU {row.index} uses {used} MiB, of which its processes hold {its}")
    return "; ".join(found)


def _wrong_set(wanted: Collection[str], expected: Sequence[str], rows: Sequence[GpuRow]) -> Optional[str]:
    if not wanted:
        return "no GPU was asked for"
    seen = [row.uuid.lower() for row in rows]
    for uuid in expected:
        if seen.count(uuid.lower()) != 1:
            return f"{uuid} is listed {seen.count(uuid.lower())} times"
    return None


def _faulty(row: GpuRow) -> Optional[str]:
    """A dead GPU reads ``0, [GPU requires reset], [GPU requires reset], 0 MiB``: its 0 MiB is no proof."""
    name = f"GPU {row.index}"
    for cell in (row.used, row.total):
        if _token(cell) in _FAULTS:
            return f"{name} reports {cell}"
    if row.has_fault and row.used_mib == 0:
        return f"{name} reports a fault beside its 0 MiB"
    if not _TEMPERATURE.fullmatch(row.temperature):
        return f"{name} has no temperature: {row.temperature}"
    if not _PSTATE.fullmatch(row.pstate):
        return f"{name} has no performance state: {row.pstate}"
    used, total = row.used_mib, row.total_mib
    if used is None or total is None:
        return None if row.has_unified_memory else f"{name} has unreadable memory: {row.used} of {row.total}"
    return f"{name} uses more than it has: {used} of {total} MiB" if used > total else None


def _mixed_memory(rows: Sequence[GpuRow]) -> Optional[str]:
    without = [row for row in rows if row.has_unified_memory]
    return (
        f"memory of GPU {without[0].index} is unreadable, that of others is not"
        if 0 < len(without) < len(rows)
        else None
    )


def _doubtful(app: AppRow, listed: Mapping[int, bool]) -> Optional[str]:
    if not app.is_whole:
        return f"a process cannot be read: {app.uuid or '?'}, {'?' if app.pid is None else app.pid}, {app.name}"
    if app.pid is not None and not listed[app.pid]:
        return f"pid {app.pid} ({app.name}) is listed but does not exist: the driver still holds its memory"
    return None


def _limit(idle: Optional[int]) -> int:
    return LIMIT_WITHOUT_BASELINE_MIB if idle is None else idle + TOLERANCE_MIB


def _memory(rows: Sequence[GpuRow]) -> str:
    return ", ".join(f"GPU {row.index} uses {row.used} MiB".replace(" MiB MiB", " MiB") for row in rows)


def _name_of(pid: int, apps: Sequence[AppRow]) -> str:
    return next((app.name for app in apps if app.pid == pid), "")


# ------------------------------------------------------------------------------------------------- which GPUs


@dataclass(frozen=True)
class Resolved:
    """The UUIDs asked for, in the order asked for; ``error`` says what is missing, and then there are none."""

    uuids: Tuple[str, ...]
    error: Optional[str] = None


def resolve(gpus: Union[str, Sequence[Union[int, str]]], sample: Sample) -> Resolved:
    """Turn the inventory's ``gpus`` ("all", or indices and UUIDs) into UUIDs of this node, in nvidia-smi's spelling.

    "all" needs a wholly readable sample: a GPU that fell off the bus must not shrink the set silently. facts:
    ``nvidia-smi -i 0,9`` prints GPU 0 and returns 0, and CUDA ignores a wrong index: so the set is checked here.
    """
    present = list_gpus(sample)
    problem = unreadable(sample)
    if problem is not None and (gpus == "all" or not present):
        return Resolved((), problem)
    if isinstance(gpus, str) and gpus != "all":
        return Resolved((), f'gpus is neither "all" nor a list: {gpus}')
    if gpus == "all":
        uuids = tuple(gpu.uuid for gpu in present)
        if len(set(uuids)) != len(uuids):
            return Resolved((), "nvidia-smi lists a GPU twice")
        return Resolved(uuids) if uuids else Resolved((), "this node has no GPU")
    has = f"this node has GPU {', '.join(str(gpu.index) for gpu in present)}" if present else "this node has no GPU"
    found: List[str] = []
    for wanted in gpus:
        text = str(wanted).strip().lower()
        matches = [gpu.uuid for gpu in present if text in (str(gpu.index), gpu.uuid.lower())]
        if len(matches) != 1:
            return Resolved((), f"no GPU {wanted}: {has}" if not matches else f"GPU {wanted} is listed twice")
        if matches[0] in found:
            return Resolved((), f"GPU {wanted} is asked for twice")
        found.append(matches[0])
    return Resolved(tuple(found))


# ------------------------------------------------------------------------------------------ who has the devices open

#: What the device files begin with.
DEVICES = "/dev/nvidia"

#: Their ends through which no memory can be held: who has only these open asks questions or switches displays.
_CONTROL = re.compile(r"(?:ctl|-modeset|-caps(?:-imex-channels)?/.*)(?: \(deleted\))?")


@dataclass(frozen=True)
class DeviceHolder:
    """A process with ``/dev/nvidia*`` files open. ``/dev/nvidiaN`` carries the minor number, not the index."""

    process: processes.Process
    devices: Tuple[str, ...]


@dataclass(frozen=True)
class DeviceHolders:
    """Who has GPU devices open; ``complete`` False: not all processes could be looked into, the scan proves less.

    ``unread`` counts those that could not; others may be hidden from this user altogether.
    """

    by_pid: Mapping[int, DeviceHolder]
    complete: bool
    unread: int = 0

    @property
    def gap(self) -> str:
        """What the scan did not see, in words; empty when it saw all."""
        if self.complete:
            return ""
        if not self.unread:
            return "only this user's processes could be looked into for open GPU devices"
        noun = "process" if self.unread == 1 else "processes"
        return f"{self.unread} {noun} could not be looked into for open GPU devices"


def device_holders() -> DeviceHolders:
    """Scan ``/proc/*/fd`` for open ``/dev/nvidia*``; as root over all processes, else over one's own.

    It finds what nvidia-smi may not list: processes without a context. Costs some microseconds per open file of the
    node, so ask when nvidia-smi has nothing more to say rather than at every sample.
    """
    unread = 0
    found = {}
    for pid in processes.pids():
        files = processes.open_files(pid)
        if files is None:
            unread += 1
            continue
        devices = tuple(sorted({target for target in files.values() if target.startswith(DEVICES)}))
        process = processes.read_process(pid) if devices else None
        if process is not None:
            found[pid] = DeviceHolder(process, devices)
    return DeviceHolders(found, os.geteuid() == 0 and not unread, unread)


def foreign_holders(
    found: DeviceHolders,
    sample: Sample,
    expected: Sequence[str],
    ours: Collection[int] = (),
    allow: Collection[str] = (),
) -> Tuple[int, ...]:
    """Pick the pids that stand in the way: not ours, not allowed, and not at work on other GPUs only.

    A CUDA process opens the devices of GPUs that it does not use, so one that nvidia-smi lists on other GPUs and on
    none of the ``expected`` is a neighbour.
    """
    wanted = {uuid.lower() for uuid in expected}
    on_ours: Set[Optional[int]] = set()
    elsewhere: Set[Optional[int]] = set()
    for app in _read_apps(sample.apps.stdout):
        (on_ours if not app.uuid or app.uuid.lower() in wanted else elsewhere).add(app.pid)
    passed = {*ours, os.getpid(), *(elsewhere - on_ours)}
    return tuple(
        pid
        for pid, holder in sorted(found.by_pid.items())
        if pid not in passed
        and not _names(holder.process) & set(allow)
        and not all(_CONTROL.fullmatch(device[len(DEVICES) :]) for device in holder.devices)
    )


def _names(process: processes.Process) -> FrozenSet[str]:
    return frozenset((process.comm, process.title, os.path.basename(process.title)))


# ------------------------------------------------------------------------------------------------- until it is freed

WAITING = "waiting"
HELD_FOREIGN = "held_foreign"
FLAT = "flat"


@dataclass
class FreedWatch:
    """Turns samples into one decision: go on waiting, freed, held by others, or stuck.

    Pure: it is fed what was seen and the time (monotonic seconds), and remembers the streak and the last progress.

    * FREED or NO_HOLDERS after ``needed`` of that word in a row, each with all of ours gone and no foreign holder of a
      device. NO_HOLDERS with readable memory (NUMA) is said only once the memory has stopped falling. Whether
      NO_HOLDERS suffices is for the inventory to say.
    * HELD_FOREIGN as soon as nvidia-smi lists a foreign process; a foreign holder of device files must be seen
      ``needed`` times in a row, since monitors open them for a moment.
    * FLAT when memory is held, no process is listed, none of ours is left, and nothing has moved for ``flat_seconds``.
    * WAITING otherwise: while pids disappear or memory falls, and on UNKNOWN. The cap on the whole is the caller's.

    facts: a spawn child orphaned early can take its memory after nvidia-smi read 0, so processes and memory both count.
    """

    needed: int = 3
    flat_seconds: float = 60.0
    reason: str = ""
    progress_at: Optional[float] = None
    _streak: int = field(default=0, repr=False)
    _word: str = field(default="", repr=False)
    _least_mib: Optional[int] = field(default=None, repr=False)
    _pids: FrozenSet[int] = field(default=frozenset(), repr=False)
    _foreign_seen: Dict[int, int] = field(default_factory=dict, repr=False)

    def feed(self, verdict: Verdict, ours_alive: Collection[int], foreign: Collection[int], now: float) -> str:
        """Take one sample in: WAITING, FREED, NO_HOLDERS, HELD_FOREIGN or FLAT; ``reason`` says it in words.

        ``ours_alive``: our recorded pids that still run. ``foreign``: see ``foreign_holders``.
        """
        self._note_progress(verdict, ours_alive, now)
        self._foreign_seen = {pid: self._foreign_seen.get(pid, 0) + 1 for pid in foreign}
        self.reason = verdict.reason
        if verdict.word == HELD and verdict.foreign:
            return HELD_FOREIGN
        staying = sorted(pid for pid, times in self._foreign_seen.items() if times >= self.needed)
        if staying:
            self.reason = f"GPU devices are open in pid {', '.join(map(str, staying))}, not ours"
            return HELD_FOREIGN
        if verdict.word in (FREED, NO_HOLDERS) and not ours_alive and not foreign:
            self._streak = self._streak + 1 if verdict.word == self._word else 1
            self._word = verdict.word
            is_settled = verdict.word == FREED or verdict.used_mib is None or self._is_flat(now)
            return verdict.word if self._streak >= self.needed and is_settled else WAITING
        self._streak, self._word = 0, ""
        if ours_alive and verdict.word in (FREED, NO_HOLDERS):
            self.reason = f"pid {', '.join(map(str, sorted(ours_alive)))} still run"
        elif foreign and verdict.word in (FREED, NO_HOLDERS):
            self.reason = f"GPU devices are open in pid {', '.join(map(str, sorted(foreign)))}"
        if verdict.word == HELD and not verdict.holders and not ours_alive and self._is_flat(now):
            self.reason = f"{verdict.reason}; nothing has moved for {self.flat_seconds:g} s"
            return FLAT
        return WAITING

    @property
    def is_about_to_decide(self) -> bool:
        """All is free in the last sample, and only has to be seen again: no time limit says otherwise."""
        return 0 < self._streak < self.needed

    def _note_progress(self, verdict: Verdict, ours_alive: Collection[int], now: float) -> None:
        here = frozenset((*ours_alive, *verdict.holders))
        used = verdict.used_mib
        has_fallen = used is not None and self._least_mib is not None and used < self._least_mib
        if self.progress_at is None or has_fallen or self._pids - here:
            self.progress_at = now
        if used is not None:
            self._least_mib = used if self._least_mib is None else min(used, self._least_mib)
        self._pids = here

    def _is_flat(self, now: float) -> bool:
        return self.progress_at is not None and now - self.progress_at >= self.flat_seconds
