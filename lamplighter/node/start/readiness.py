"""Watching a server's start until it is ready, dead, stalled, or out of time.

Ready means that it answered a question: our process is alive, our group owns the port, the model is the right one by
the engine's own rule, and one token was generated. Log lines only tell the phase: a ready line can lie (another server
on the port answers the warm-up), and ``/v1/models`` answers long before the model can.

One loop over the ends of processes, the log, HTTP and samples of the GPUs; whatever may take long (questions,
nvidia-smi) has a thread of its own. Reads only. Watching is cheap, however fast the log grows: a flood is read at a
fifth of one CPU, and what cannot be kept up with is skipped, and said to be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import select
import time
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

from lamplighter.node.events import PHASES
from lamplighter.node.keeper import launcher
from lamplighter.node.keeper.launcher import ExitStatus, Launched, read_exit
from lamplighter.node.layout import LaunchFiles
from lamplighter.node.log.file import READ_BYTES, LogFile
from lamplighter.node.log.verdict import Diagnosis
from lamplighter.node.log.watch import LogEvent, LogWatch
from lamplighter.node.plan import Plan
from lamplighter.node.start import eta
from lamplighter.node.start.eta import Start
from lamplighter.node.start.probe import (
    HEALTH_PAUSE_SECONDS,
    PROBE_PAUSE_SECONDS,
    PROBE_SECONDS,
    Answer,
    Asker,
    Port,
    ask,
    ask_health,
    who_answers,
)
from lamplighter.node.start.vitals import GpuSampler, Stall, StallClock
from lamplighter.node.system import ports, processes

#: A log that is silent for so long while a server boots is told of, and again after as much.
IMPORT_SECONDS = 3.0
#: Between two rounds: while something happens (the log has just grown, the port is ours), and else.
POLL_SECONDS, QUIET_POLL_SECONDS = 0.05, 0.1
#: For so long after a line of the log something is going to happen: servers write when they open their port.
EVENTFUL_SECONDS = 0.5
#: How often another file is looked for in the place of the log.
MOVED_SECONDS = 0.5
#: How often the processes are listed, in the first minute of a start and later.
MEMBERS_SECONDS, MEMBERS_LATER_SECONDS = 2.0, 5.0
VITALS_SECONDS = 2.0
#: A piece of log that took t to read is followed by a pause of this many t.
PAUSE_FACTOR = 4.0
#: After the main process died its ranks may still be writing; the first cause may be among their last lines.
QUIET_SECONDS = 0.5
DRAIN_SECONDS = 3.0
#: CPU seconds spent on looking for a cause in what was skipped.
READ_AGAIN_SECONDS = 5.0
#: When the engine says nothing about it: how long the first cause may come after the first sign of failure.
SETTLE_SECONDS = 5.0
#: However busy the other ranks are after a fatal line, the verdict is not put off for longer.
LONGEST_SETTLE_SECONDS = 60.0
#: So many times in a row must the engine say after its ready line that it is unwell.
VETOES = 2
TAIL_LINES = 15
#: Who has had the port for so long is no process of ours that was not known yet.
STRANGER_SECONDS = 2.0
#: Causes that no log knows better.
OUR_OWN = ("port_in_use", "wrong_model", "api_key", "tls", "forbidden", "rejected", "bound_elsewhere")
#: A launcher that ends so long after one of its workers has followed it; one that kills its workers ends at once.
FOLLOWED_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Ready:
    """It answered: wall clock seconds of the first generated token's arrival, and seconds since the launch.

    ``warnings`` are (line, hint) of what a person should know all the same, ``{server}`` in hints its name.
    """

    answered_at: float
    seconds: float
    phases: Mapping[str, float]
    measures: Mapping[str, float]
    warnings: Tuple[Tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class NotReady:
    """It did not become ready. ``crashed`` tells death from time-out.

    ``since`` is the launch in seconds of the monotonic clock, ``own_pids`` all processes that were ever seen.
    """

    crashed: bool
    message: str
    diagnosis: Diagnosis
    log_tail: tuple[str, ...]
    status: Optional[ExitStatus] = None
    since: float = 0.0
    own_pids: frozenset[int] = frozenset()


def watch(
    plan: Plan,
    launch: LaunchFiles,
    launched: Launched,
    api_key: Optional[str],
    progress: Callable[..., None],
    heed: Callable[[], None] = lambda: None,
    *,
    warn: Callable[[str, str], None] = lambda message, hint: None,
    uuids: Sequence[str] = (),
    starts: Sequence[Start] = (),
) -> Ready | NotReady:
    """Wait until the launched server is ready, has died or stalled, or ``plan.timeouts.ready`` seconds are over.

    ``heed`` is called in every round; what it raises ends the watch. ``warn`` is told, with a hint, what a person can
    still fix. ``uuids``: GPUs whose memory is followed; ``starts``: earlier ones, for an estimate.
    """
    watched = _Watch(plan, launch, launched, api_key, progress, warn, uuids, starts)
    with contextlib.closing(watched) as watching:
        while True:
            heed()
            verdict = watching.look(time.monotonic())
            if verdict is not None:
                return verdict
            watching.wait()


class _Watch:
    def __init__(
        self,
        plan: Plan,
        launch: LaunchFiles,
        launched: Launched,
        api_key: Optional[str],
        progress: Callable[..., None],
        warn: Callable[[str, str], None],
        uuids: Sequence[str],
        starts: Sequence[Start],
    ) -> None:
        now = time.monotonic()
        engine = plan.engine
        self.plan, self.launch, self.launched = plan, launch, launched
        self.began = now
        self._hints: Mapping[str, str] = plan.faults.get("hints", {})
        self.settle = float(engine.get("settle") or SETTLE_SECONDS)
        self.log = LogFile(launch.log, launched.log_from)
        self.watched = LogWatch(engine, plan.engine_version, is_whole=True)
        self.main = processes.Handle.open(launched.main)
        self.crew = _Crew(engine, launched)
        self.gpus = GpuSampler(uuids)
        self.stall = StallClock(engine, plan.timeouts.silence, now)
        self._model_proven = False
        self.probe = Asker(
            lambda: ask(plan, api_key, PROBE_SECONDS, knows_model=self._model_proven), *PROBE_PAUSE_SECONDS
        )
        self.health: Optional[Asker] = None
        if engine.get("health"):
            self.health = Asker(lambda: ask_health(plan, api_key), *HEALTH_PAUSE_SECONDS)
        self.hide = _Hider(api_key)
        self.teller = _Teller(progress, self.hide, starts, now, is_python=bool(plan.python))
        self.port = Port(False, ())
        self._warn = warn
        self._others_since: Optional[float] = None
        self._is_warned = False
        self._inodes: frozenset[int] = frozenset()
        self._ours_since = 0.0
        self._fatal_at: Optional[float] = None
        self._moved_at = now
        self._ready_line_at: Optional[float] = None
        self._vetoes = 0
        self._well_at: Optional[float] = None
        self._refusal = ""
        self._refused_at = now
        self._elsewhere_at: Optional[float] = None
        self._due: Dict[str, float] = {}
        self._grew_at = now
        self._ended: frozenset[int] = frozenset()
        self.wait(0.0)

    # -- one round

    def look(self, now: float) -> Optional[Ready | NotReady]:
        """Take in all news, then judge: death first, life last."""
        self.crew.note_ended(self._ended)
        self._read_log(now)
        if self._is_due("members", MEMBERS_SECONDS if now - self.began < 60 else MEMBERS_LATER_SECONDS, now):
            self.crew.look()
            self.watched.own_pids.update(self.crew.pids)
        vitals = min(VITALS_SECONDS, self.stall.limit(self._phase) / 4)
        if self._is_due("vitals", vitals, now):
            self.stall.note_work(self.crew.pids, now)
        if self.gpus.poll():
            self.stall.note_memory(self.gpus.used_mib, now)
        self.teller.tell(self.watched, self.gpus.latest, now, now - self._grew_at)
        for judge in (self._death, self._worker_death, self._fatal_line, self._answers, self._silence):
            verdict = judge(now)
            if verdict is not None:
                return verdict
        return None

    def wait(self, seconds: Optional[float] = None) -> None:
        """Sleep until something ends or answers, until the next round at most; see what has ended."""
        if seconds is None:
            is_eventful = self.port.ours or time.monotonic() - self._grew_at < EVENTFUL_SECONDS
            seconds = POLL_SECONDS if is_eventful else QUIET_POLL_SECONDS
            if self.port.ours:
                seconds = min(seconds, self.probe.due_in)
        poller = select.poll()
        for each in (self.main, self.probe, self.health, *self.crew.handles()):
            if each is not None:
                poller.register(each.fileno(), select.POLLIN)
        self._ended = frozenset(fd for fd, _ in poller.poll(seconds * 1000))

    def close(self) -> None:
        self.log.close()
        self.gpus.close()
        self.crew.close()
        for each in (self.main, self.probe, self.health):
            if each is not None:
                each.close()

    @property
    def _phase(self) -> str:
        return self.watched.phase or "boot"

    def _is_due(self, what: str, pause: float, now: float) -> bool:
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + pause
        return True

    def _read_log(self, now: float) -> None:
        if now < self._due.get("log", 0.0):
            return
        before, skipped = time.thread_time(), self.log.skipped
        data = self.log.new(closely=self._is_due("moved", MOVED_SECONDS, now))
        if not data:
            return
        self._grew_at = now
        if self.log.skipped > skipped:
            self.watched.forget_partial()
        self._take(self.watched.feed(data, at=now), now)
        if len(data) >= READ_BYTES // 2:  # a flood: others need this node's CPUs more than we do
            self._due["log"] = time.monotonic() + PAUSE_FACTOR * (time.thread_time() - before)

    def _take(self, news: List[LogEvent], now: float) -> None:
        self.stall.note_log(self.watched, now)
        for event in news:
            if event.kind in ("phase", "percent"):
                self._moved_at = now
                if event.kind == "phase":  # a worker that has come so far may be new: from now on its death is seen
                    self._due.pop("members", None)
            elif event.kind == "ready_line" and self._ready_line_at is None:
                self._ready_line_at = now

    # -- verdicts

    def _death(self, now: float) -> Optional[NotReady]:
        worker = self.crew.dead
        if self.main is not None and self.main.fileno() not in self._ended:
            return None
        self._drain(0.0)
        phase = self._phase  # of its death: what it leaves behind may go on writing
        self._drain(QUIET_SECONDS)
        status = read_exit(self.launch, wait=1.0)
        how = str(status) if status is not None else "exit status unknown"
        if status is not None and status.code == 0:
            message = f"the launch program ended in phase {phase} ({how}), and {self._left_behind()}"
            return self._not_ready(True, message, "launcher_left", status=status, phase=phase)
        message = f"the server died in phase {phase} ({how})"
        # An end of its own takes the workers with it, first or last: then the log says of what it died.
        if worker is not None and now - worker.at >= FOLLOWED_SECONDS and not self.watched.has_error:
            message += f", after {worker.title} (pid {worker.pid})"
            return self._not_ready(True, message, "worker_died", status=status, phase=phase)
        return self._not_ready(True, message, "crashed", status=status, phase=phase)

    def _left_behind(self) -> str:
        """Say what of ours goes on without the launch program; what it has had others start (dockerd) is not ours."""
        found = [process for pid in self._members() if (process := processes.read_process(pid)) is not None]
        living = [f"{each.title} (pid {each.pid})" for each in found if not each.is_dead]
        return f"what it started goes on without it: {', '.join(living[:3])}" if living else "left nothing of ours"

    def _worker_death(self, now: float) -> Optional[NotReady]:
        """A worker that the engine needs is gone: give the launcher time to say why, and to end by itself."""
        dead = self.crew.dead
        if dead is None or now - dead.at < self.settle:
            return None
        message = f"{dead.title} (pid {dead.pid}) died in phase {self._phase}, and the launcher goes on without it"
        return self._not_ready(True, message, "worker_died", f"{dead.title} (pid {dead.pid}) is gone")

    def _fatal_line(self, now: float) -> Optional[NotReady]:
        """A failure that no server survives: the first cause over all ranks is in the log soon."""
        if not self.watched.is_fatal:
            self._fatal_at = None
            return None
        if self._fatal_at is None:
            self._fatal_at = now
        is_quiet = now - max(self._fatal_at, self._moved_at) >= self.settle
        if not is_quiet and now - self._fatal_at < LONGEST_SETTLE_SECONDS:
            return None
        return self._not_ready(True, f"the server failed in phase {self._phase}, and hangs on", "crashed")

    def _answers(self, now: float) -> Optional[Ready | NotReady]:
        self._look_at_port(now)
        if self.health is not None and self.health.poll():
            said = self.health.last
            if said.is_well and self._well_at is None:
                self._well_at = now
            is_late = self._ready_line_at is not None and said.asked_at >= self._ready_line_at
            self._vetoes = self._vetoes + 1 if not said.ok and is_late else 0
            if self._vetoes >= VETOES and not self.probe.last.ok:
                message = f"it says that it is ready, and then that it is unwell: {said.trouble}"
                return self._not_ready(False, message, "engine_hung", said.trouble)
        if self.probe.poll():
            verdict = self._judge_answer(self.probe.last, now)
            if verdict is not None:
                return verdict
        if not self.port.ours:
            return self._someone_else(now) or self._bound_elsewhere(now)
        self.probe.ask()
        if self.health is not None:
            self.health.ask()
        return None

    def _judge_answer(self, answer: Answer, now: float) -> Optional[Ready | NotReady]:
        if not self.port.ours or answer.asked_at < self._ours_since:
            return None  # the port that answered was not proven to be ours
        self._model_proven = self._model_proven or answer.model_proven
        if answer.is_wrong_model:
            return self._not_ready(False, f"the server answers, but {answer.trouble}", "wrong_model", answer.trouble)
        if answer.is_refused:
            message = f"the server does not take our API key: {answer.trouble}"
            return self._not_ready(False, message, "api_key", answer.trouble)
        if answer.is_other_tls:
            message = f"the server cannot be asked with tls {self.plan.tls}: {answer.trouble}"
            return self._not_ready(False, message, "tls", answer.trouble)
        if answer.refusal:
            return self._refused(answer, now)
        self._refusal = ""
        if not answer.ok or self._vetoes:
            return None
        self._look_at_port(now, again=True)
        if not self.port.ours or (self.main is not None and self.main.exited()):
            return None
        self._read_log(time.monotonic())
        return self._ready(answer)

    def _refused(self, answer: Answer, now: float) -> Optional[NotReady]:
        """The server says no, and the same again and again: a while after it has said that it is up, that is final.

        A server error may pass, and a server that never says that it is up may still begin: they have longer.
        """
        if answer.refusal != self._refusal:
            self._refusal, self._refused_at = answer.refusal, now
        up_at = min((at for at in (self._ready_line_at, self._well_at) if at is not None), default=None)
        since = max(self._refused_at, up_at or 0.0)
        patience = self.settle if up_at is not None and answer.refusal[:1] != "5" else LONGEST_SETTLE_SECONDS
        if now - since < patience:
            return None
        cause = "forbidden" if answer.refusal.startswith("403 ") else "rejected"
        message = f"the server answers, but for {now - since:.0f} s it has refused every question: {answer.trouble}"
        return self._not_ready(False, message, cause, answer.trouble)

    def _ready(self, answer: Answer) -> Ready:
        behind = time.monotonic() - answer.at
        found = self.watched
        warnings = [(self.hide(line), found.hint(name)) for name, line in found.warnings.items()]
        if self.log.skipped:
            warnings.append(
                (_skipped(self.log.skipped), "a server that writes so much fills the disk: lower its log level")
            )
        phases = {each.phase: each.seconds for each in found.diagnosis().phases if each.seconds is not None}
        # facts: SGLang says nothing for its first 11 s, transformers for 5.6 s; the log's clock begins at a line.
        silent = max(0.0, answer.at - self.began - sum(phases.values()))
        phases = {**phases, "boot": round(phases.get("boot", 0.0) + silent, 3)}
        return Ready(
            time.time() - behind, round(answer.at - self.began, 3), phases, dict(found.measures), tuple(warnings)
        )

    def _someone_else(self, now: float) -> Optional[NotReady]:
        """The port is another's: said once; when the ready line is out, the warm-up and every probe asked that one."""
        if not self.port.others:
            self._others_since = None
            return None
        self._others_since = self._others_since or now
        if not self._is_warned and now - self._others_since >= STRANGER_SECONDS:
            self._is_warned = True
            message = f"port {self.plan.port} was taken by {self.port} while the server starts"
            self._warn(message, "end that process now, or the server will not get its port")
        if self._ready_line_at is None or now - self._ready_line_at < self.settle:
            return None
        message = f"it says that it is ready, but port {self.plan.port} is answered by {self.port}"
        return self._not_ready(False, message, "port_in_use", f"port {self.plan.port}: {self.port}")

    def _bound_elsewhere(self, now: float) -> Optional[NotReady]:
        """It listens on the port, but under an address where it is not asked; or nowhere, and says that it is ready."""
        if self.port.others or not self._is_due("elsewhere", 1.0, now):
            return None
        is_said = self._ready_line_at is not None
        if not (is_said or ports.listening_inodes(self.plan.port)) or not ports.refuses(self.plan.host, self.plan.port):
            self._elsewhere_at = None
            return None
        own = self._members()
        places = [each for each in ports.listeners(self.plan.port, own) if each.pids]
        if not places and is_said:
            places = [each for each in ports.listeners(None, own) if each.pids]
        if not places and not is_said:
            return None
        self._elsewhere_at = self._elsewhere_at or now
        if now - max(self._elsewhere_at, self._ready_line_at or 0.0) < self.settle:
            return None
        where = ", ".join(f"{each.address} port {each.port}" for each in places) or "no port"
        wanted = f"{ports.probe_host(self.plan.host)} port {self.plan.port}"
        message = f"nothing answers at {wanted}, where it is asked: it listens on {where}"
        return self._not_ready(False, message, "bound_elsewhere", f"it listens on {where}")

    def _look_at_port(self, now: float, *, again: bool = False) -> None:
        """Whose the port is may cost a look at every process: it is asked again when the sockets have changed."""
        if self._inodes:
            if not again and not self._is_due("owner", 1.0, now):
                return
        elif not ports.accepts(self.plan.host, self.plan.port):
            return
        inodes = ports.listening_inodes(self.plan.port)
        if inodes == self._inodes and self.port.ours:
            return
        was_ours, self._inodes = self.port.ours, inodes
        known = self.crew.scan()
        self.port = who_answers(self.plan, self._members, known) if inodes else Port(False, ())
        if self.port.ours and not was_ours:
            self._ours_since = now
            self._model_proven = False

    def _members(self) -> List[int]:
        found = {process.pid for process in launcher.members(self.launched, processes.processes())}
        return [*found, *self.crew.scan()]

    def _silence(self, now: float) -> Optional[NotReady]:
        spent = now - self.began
        stall = self.stall.look(self._phase, now)
        if stall is None and spent <= self.plan.timeouts.ready:
            return None
        sign = self.stall.last
        last = f"last sign of life {now - sign.at:.0f} s ago: {self.hide(sign.what)}"
        trouble = f"; the last probe: {self.probe.last.trouble}" if self.probe.last.trouble else ""
        if stall is None:
            message = f"not ready after {self.plan.timeouts.ready:.0f} s, in phase {self._phase}; {last}{trouble}"
            return self._not_ready(False, message, "timeout", hint="raise servers.{server}.timeouts.ready")
        busy = ", though its CPUs are busy" if stall.is_spinning else ""
        slowest = self.watched.slowest
        if slowest is not None and slowest[1] != stall.phase and stall.phase not in ("http", "warmup", "ready"):
            busy += f", rank {slowest[0]} is still in {slowest[1]}"
        message = f"stalled in phase {stall.phase}: no progress for {stall.seconds:.0f} s{busy}; {last}{trouble}"
        return self._not_ready(False, message, "stalled", hint=_hint_for_stall(stall))

    def _not_ready(
        self,
        crashed: bool,
        message: str,
        cause: str,
        evidence: str = "",
        *,
        hint: str = "",
        status: Optional[ExitStatus] = None,
        phase: Optional[str] = None,
    ) -> NotReady:
        """Our own ``cause`` stands where the log has none of its own."""
        self._drain(0.0)
        self.watched.finish()
        found = self.watched.diagnosis(exited=crashed)
        if found.cause is None and self.log.skipped:
            found = self._read_again(crashed) or found
        if found.cause is None or cause in OUR_OWN:
            own = found.cause != cause
            found = dataclasses.replace(
                found,
                outcome="failed",
                cause=cause,
                evidence=(evidence or found.evidence) if own else found.evidence,
                hint=hint or found.hint or self.watched.hint_of(cause) or self._hints.get(cause, ""),
            )
        if self.log.skipped:
            message += f" ({_skipped(self.log.skipped)})"
        return NotReady(
            crashed,
            self.hide(message),
            dataclasses.replace(found, phase=phase or self._phase, evidence=self.hide(found.evidence)),
            tuple(map(self.hide, self.watched.tail(TAIL_LINES))),
            status,
            self.began,
            frozenset(self.crew.ever),
        )

    def _read_again(self, crashed: bool) -> Optional[Diagnosis]:
        """Look for the cause in what was skipped, from the beginning and for a while; None without one there."""
        log = LogFile(self.launch.log, self.launched.log_from, may_skip=False)
        watched = LogWatch(self.plan.engine, is_whole=True)
        watched.own_pids.update(self.crew.ever)
        end = time.thread_time() + READ_AGAIN_SECONDS
        while time.thread_time() < end and (data := log.new()):
            watched.feed(data)
        log.close()
        watched.finish()
        found = watched.diagnosis(exited=crashed)
        return found if found.cause is not None else None

    def _drain(self, quiet_seconds: float) -> None:
        """Read the log to its end; while processes of the server live, until it has been quiet for a while."""
        end = time.monotonic() + DRAIN_SECONDS
        quiet_until = time.monotonic() + quiet_seconds
        while time.monotonic() < end:
            data = self.log.new()
            if data:
                self._take(self.watched.feed(data, at=time.monotonic()), time.monotonic())
                quiet_until = time.monotonic() + quiet_seconds
            elif time.monotonic() >= quiet_until or not self.crew.scan():
                break
            else:
                time.sleep(0.02)


def _skipped(count: int) -> str:
    return f"{count >> 20} MiB of its log were written too fast to be read, and were skipped"


def _hint_for_stall(stall: Stall) -> str:
    longer = "raise servers.{server}.timeouts.stall if it is only slow"
    if stall.phase == "weights":
        return f"see how fast the storage under servers.{{server}}.model reads; {longer}"
    if stall.phase in ("distributed", "graphs", "warmup"):
        return f"a rank hangs: on PCIe machines try NCCL_P2P_DISABLE: 1 under servers.{{server}}.env; {longer}"
    return f"look with py-spy what its processes do; {longer}"


@dataclasses.dataclass(frozen=True)
class _Gone:
    """A needed worker that has exited."""

    pid: int
    title: str
    at: float


class _Crew:
    """The server's processes as they come and go; those that the engine needs are held by pidfd."""

    def __init__(self, engine: Mapping[str, Any], launched: Launched) -> None:
        looks = engine.get("processes") or {}
        self._needed = [re.compile(pattern) for pattern in looks.get("needed_workers", ())]
        self._main = launched.main.pid
        self._session = processes.SessionScan(self._main)
        self._held: Dict[int, Tuple[processes.Handle, str]] = {}
        self.pids: Tuple[int, ...] = ()
        self.ever: set[int] = {self._main}
        self.dead: Optional[_Gone] = None

    def look(self) -> None:
        """List them again. A title comes late, so those without a known one are looked at each time."""
        self.pids = self.scan()
        self.ever.update(self.pids)
        if not self._needed:
            return
        for pid in self.pids:
            if pid == self._main or pid in self._held:
                continue
            process = processes.read_process(pid)
            if process is None or not any(pattern.search(process.title) for pattern in self._needed):
                continue
            with contextlib.suppress(OSError):  # out of descriptors: its death is then only seen in the log
                handle = processes.Handle.open(process.identity)
                if handle is not None:
                    self._held[pid] = (handle, process.title)

    def scan(self) -> Tuple[int, ...]:
        """The pids that live now."""
        return self._session.look()

    def note_ended(self, descriptors: Collection[int]) -> None:
        """Take in which of ``handles`` were seen to have exited; ``dead`` is the first of them."""
        for pid, (handle, title) in list(self._held.items()):
            if handle.fileno() in descriptors:
                handle.close()
                del self._held[pid]
                if self.dead is None:
                    self.dead = _Gone(pid, title, time.monotonic())

    def handles(self) -> List[processes.Handle]:
        return [handle for handle, _ in self._held.values()]

    def close(self) -> None:
        for handle in self.handles():
            handle.close()


class _Hider:
    """Takes the API key out of whatever is said: servers print their arguments."""

    def __init__(self, api_key: Optional[str]) -> None:
        self._key = api_key if api_key and len(api_key) >= 4 else None

    def __call__(self, text: str) -> str:
        return text.replace(self._key, "******") if self._key else text


class _Teller:
    """Turns news into progress: each change of phase, each new percent, the last line and the GPUs now and then."""

    def __init__(
        self,
        progress: Callable[..., None],
        hide: Callable[[str], str],
        starts: Sequence[Start],
        began: float,
        *,
        is_python: bool,
    ) -> None:
        self._progress = progress
        self._is_python = is_python
        self._hide = hide
        self._starts = starts
        self._began = began
        self._phase, self._phase_since = "boot", began
        self._state: Tuple[Any, ...] = (None, "", (), "")
        self._gpus: Tuple[Any, ...] = ()
        self._last_at = 0.0

    def tell(self, watched: LogWatch, gpus: Tuple[Any, ...], now: float, silent: float) -> None:
        """``silent``: seconds since the log has grown."""
        phase = watched.phase or "boot"
        silence = self._silence(phase, silent)
        state = (None if watched.percent is None else int(watched.percent), watched.last_line, gpus, silence)
        if phase != self._phase:
            self._phase, self._phase_since = phase, now
        elif state == self._state or now - self._last_at < (0.2 if state[0] != self._state[0] else 1.0):
            return  # a bar may move a thousand times a second
        self._state, self._gpus, self._last_at = state, gpus, now
        fields = self._fields(watched, phase, now)
        if silence:
            del fields["line"]  # it is no news
        self._progress(silence or phase, phase=phase, **fields)

    def _silence(self, phase: str, seconds: float) -> str:
        """Say what goes on while nothing is written. facts: launcher and children of SGLang import for 15 s each."""
        if phase != "boot" or seconds < IMPORT_SECONDS:
            return ""
        what = "imports: its Python processes load packages" if self._is_python else "it starts"
        return f"{what}; nothing new in its log for {seconds - seconds % IMPORT_SECONDS:.0f} s"

    def _fields(self, watched: LogWatch, phase: str, now: float) -> Dict[str, Any]:
        fields: Dict[str, Any] = {
            "percent": watched.percent,
            "line": self._hide(watched.last_line[:400]),
            "elapsed": round(now - self._began, 1),
        }
        slowest = watched.slowest
        if slowest is not None and len(set(watched.ranks.values())) > 1:
            fields["rank"] = slowest[0]
            fields["ranks"] = {str(rank): watched.ranks[rank] for rank in sorted(watched.ranks)[:16]}
        if self._gpus:
            fields["gpus"] = [
                {"index": gpu.index, "used_mib": gpu.used_mib, "total_mib": gpu.total_mib} for gpu in self._gpus
            ]
        spent = now - self._phase_since
        left = eta.remaining(self._starts, phase, spent)
        if left is not None and phase in PHASES:
            fields["eta"] = list(left)
            ends = eta.phase_remaining(self._starts, phase, spent)
            if ends is not None:
                fields["phase_eta"] = list(ends)
        return fields
