"""The detached process that does the work of one run and writes its journal; it outlives the session that began it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
import traceback
from typing import TYPE_CHECKING, Any, Callable, Iterator, NamedTuple, Optional

from lamplighter.node import confidential, events, journal
from lamplighter.node.events import Exit
from lamplighter.node.layout import IDENTITY, RunDirectory, ServerHome, read_json
from lamplighter.node.system import files, lock, processes

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec, TypeVar

    Handed = ParamSpec("Handed")
    HandedOn = TypeVar("HandedOn")

#: Files that hold room for the records which make a run recoverable: for the start, the commit and the rollback.
RESERVES = 6
RESERVE_BYTES = 32768
#: A run directory without a worker's record belongs, for so long, to a run that is just beginning.
BEGIN_SECONDS = 60.0
#: Below this much free space a reserve is given back.
SCARCE_BYTES = 1 << 20
#: A file system that takes no writes; the node's trouble, and no defect of ours.
NO_WRITES = frozenset((errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO))


class StageFailure(Exception):
    """A stage failed: what, why and what to do next, and the exit code if nothing serves afterwards."""

    def __init__(
        self,
        exit_code: Exit,
        message: str,
        *,
        cause: Optional[str] = None,
        evidence: str = "",
        hint: str = "",
        **fields: Any,
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.message = message
        self.cause = cause
        self.evidence = evidence
        self.hint = hint
        self.fields = fields
        self.stage = ""


class Skipped(NamedTuple):
    """What a stage returns that had nothing to do."""

    why: str


class Run:
    """One run: who asked for what, the locks that it holds, and the journal that tells of it.

    What its stages find out they return (stages/values.py).
    """

    def __init__(self, request: dict[str, Any], home: ServerHome, directory: RunDirectory, runner: str) -> None:
        self.request = request
        self.home = home
        self.directory = directory
        self.runner = runner
        self.confidential = confidential.of_homes([home], request)
        self.journal = journal.Journal(
            directory.journal,
            directory.ballast,
            {"host": request["host"], "server": self.server, "run": directory.run_id},
            hide=self._hide,
        )
        self.locks: list[lock.Lock] = []
        self.durations: dict[str, float] = {}
        self._touched = False
        self._stage = ""
        self.began = directory.began
        self.reserves = _fill_reserves(directory)

    @property
    def server(self) -> str:
        """Name the server that this run is about."""
        return str(self.request["server"]["name"])

    @property
    def touched(self) -> bool:
        """Tell whether a signal was sent or a server started: until then what served before serves still."""
        return self._touched

    def touch(self) -> None:
        """Note that what serves is about to be touched: from here on the run goes to a good end or rolls back."""
        self._touched = True

    def learn_secrets(self) -> None:
        """Hide from now on what the releases of this server hold secret by now, too."""
        self.confidential = confidential.of_homes([self.home], self.request)

    def _hide(self, value: Any) -> Any:
        return self.confidential.hide(value)

    def emit(self, event: events.Event) -> None:
        self.journal.write({"stage": self._stage, **event})

    def progress(self, message: str, **fields: Any) -> None:
        self.emit(events.progress(self._stage, message, **fields))

    def warn(self, message: str, hint: str = "") -> None:
        self.emit(events.warning(self._stage, message, hint))

    def perform(
        self,
        name: str,
        action: Callable[Concatenate[Run, Handed], HandedOn],
        *handed: Handed.args,
        **options: Handed.kwargs,
    ) -> HandedOn:
        """Run one stage, with what earlier ones have handed on, between its start and end events; return its value.

        Raises StageFailure, already journalled; an unforeseen exception becomes one with exit code 1.
        """
        self._stage = name
        self.note_holder(name)
        if name in ("start", "commit", "rollback"):
            self._make_room()
        self.emit(events.stage_started(name))
        began = time.monotonic()
        try:
            self.heed()
            value = action(self, *handed, **options)
        except StageFailure as failure:
            self._fail(name, began, failure)
            raise
        except Exception as error:
            told = self._unforeseen(name, error)
            self._fail(name, began, told)
            raise told from error
        self.durations[name] = round(time.monotonic() - began, 3)
        skipped = value.why if isinstance(value, Skipped) else None
        self.emit(events.stage_ended(name, True, self.durations[name], skipped=skipped))
        return value

    def invocation(self, verb: str, *words: str) -> str:
        """The command line that asks for ``verb`` on this server."""
        return events.invocation(verb, self.request["host"], self.server, *words)

    def _unforeseen(self, name: str, error: Exception) -> StageFailure:
        if isinstance(error, OSError) and error.errno in NO_WRITES:
            touched = Exit.NOT_FREED if name in ("stop", "free") else Exit.CRASHED
            return StageFailure(
                touched if self.touched else Exit.REFUSED,
                f"the node takes no writes: {error}",
                cause="no_writes",
                hint="fix the file system (`dmesg` and `df` say what is wrong with it), then deploy again",
            )
        return StageFailure(
            Exit.INTERNAL,
            f"unforeseen {type(error).__name__} in stage {name}: {error}",
            cause="internal",
            evidence=traceback.format_exc().strip().splitlines()[-1],
            hint="this is a defect of lamplighter: report it with the log_tail of this event",
            log_tail=traceback.format_exc().splitlines()[-12:],
        )

    def _fail(self, name: str, began: float, failure: StageFailure) -> None:
        failure.stage = name
        self.durations[name] = round(time.monotonic() - began, 3)
        self.emit(
            events.failure(
                name,
                failure.message,
                cause=failure.cause,
                evidence=failure.evidence,
                hint=failure.hint,
                **failure.fields,
            )
        )
        self.emit(events.stage_ended(name, False, self.durations[name], message=failure.message))

    def heed(self) -> None:
        """Raise StageFailure when somebody has asked to cancel this run; to be called wherever it waits.

        A rollback is gone through with, and so is a stop that has begun: neither has a better end.
        """
        if self._stage == "rollback" or (self.touched and self.request["verb"] == "stop"):
            return
        order = read_json(self.directory.cancel)
        if order is not None:
            raise StageFailure(
                Exit.NOT_READY if self.touched else Exit.INTERRUPTED,
                f"cancelled by {order.get('by', 'an unknown user')} at stage {self._stage}",
                cause="cancelled",
                hint="deploy again when you like",
            )

    def _make_room(self) -> None:
        """On a full disk, give back what was set aside for the records that are written next."""
        with contextlib.suppress(OSError):
            state = os.statvfs(self.directory.path)
            if state.f_bavail * state.f_frsize < SCARCE_BYTES and self.reserves:
                os.unlink(self.reserves.pop())

    def give_back_room(self) -> bool:
        """Free one reserve, for a write that the disk has refused; not before there is something to lose."""
        if not self.touched or not self.reserves:
            return False
        with contextlib.suppress(OSError):
            os.unlink(self.reserves.pop())
        return True

    def note_holder(self, stage: str) -> None:
        """Write into every lock that we hold who we are and how far."""
        for held in self.locks:
            held.note({**self._holder(), "stage": stage})

    def _holder(self) -> dict[str, Any]:
        """Say who holds a lock, for the message that others get; since when by this node's clock."""
        return {
            "run": self.directory.run_id,
            "verb": self.request["verb"],
            "by": self.request["by"],
            "server": self.server,
            "pid": os.getpid(),
            "since": round(self.began, 3),
        }

    def end(
        self,
        outcome: str,
        exit_code: Exit,
        message: str,
        serving: Optional[dict[str, Any]],
        unknown: str = "",
        *,
        failure: Optional[StageFailure] = None,
        release: Optional[str] = None,
        ready_seconds: Optional[float] = None,
        downtime_seconds: Optional[float] = None,
    ) -> None:
        """Give the locks back and write the end event: the next run may begin as soon as the end is heard of.

        ``unknown``: why it is not known what serves.
        """
        while self.locks:
            self.locks.pop().release()
        self.emit(
            events.ended(
                outcome,
                exit_code,
                message,
                stage=failure.stage if failure else None,
                phase=failure.fields.get("phase") if failure else None,
                cause=failure.cause if failure else None,
                evidence=failure.evidence if failure else None,
                hint=failure.hint if failure else "",
                release=release,
                durations=self.durations,
                ready_seconds=ready_seconds,
                downtime_seconds=downtime_seconds,
                serving=serving,
                serving_unknown=unknown,
            )
        )


def take_place(run: RunDirectory) -> bool:
    """Make the directory of ``run``; False where it is there already: of several who try, one has made it.

    Raises OSError.
    """
    runs = os.path.dirname(run.path)
    files.make_directory(runs)
    try:
        os.mkdir(run.path, 0o700)
    except FileExistsError:
        return False
    files.sync_directory(runs)
    return True


def is_at_work(directory: RunDirectory) -> bool:
    """Tell whether the worker of a run lives, or may be just about to begin."""
    record = read_json(directory.worker, **IDENTITY)
    if record is not None:
        return processes.is_alive(processes.Identity.of(record))
    if os.path.exists(directory.worker):
        return False  # damaged since: it began long ago
    if any(processes.read_process(pid) is None for pid in files.writers_of(directory.worker)):
        return False  # killed while it wrote its first word
    try:
        return time.time() - os.stat(directory.path).st_mtime < BEGIN_SECONDS
    except OSError:
        return False


def work(
    request: dict[str, Any], home: ServerHome, runner: str, runner_of: Callable[[str], Callable[[Run], None]]
) -> None:
    """Do the work of ``request`` in this process and journal it to its end event, whatever happens.

    ``runner_of`` a verb is what does its work; asked for when we have said that we are there.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    directory = home.run(request["run"])
    me = processes.read_process(os.getpid())
    if me is not None:
        files.write_json(directory.worker, {**me.identity.to_json(), "t": time.time()})
    run = Run(request, home, directory, runner)
    release = request.get("release") or {}
    run.emit(events.run_started(request["verb"], request["by"], release.get("digest")))
    files.Room.give_back = run.give_back_room
    with _last_words(run):
        runner_of(request["verb"])(run)
    run.journal.close()
    for reserve in run.reserves:
        with contextlib.suppress(OSError):
            os.unlink(reserve)


def _fill_reserves(directory: RunDirectory) -> list[str]:
    """Set room aside; random bytes, since some file systems store zeros as nothing."""
    made = []
    with contextlib.suppress(OSError):
        for number in range(RESERVES):
            with open(directory.reserve(number), "wb") as file:
                file.write(os.urandom(RESERVE_BYTES))
            made.append(directory.reserve(number))
    return made


@contextlib.contextmanager
def _last_words(run: Run) -> Iterator[None]:
    """Turn a defect outside every stage into an end event, lest the control side waits for one that never comes."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        run.end("failed", Exit.INTERNAL, f"unforeseen {type(error).__name__}: {error}", None)
