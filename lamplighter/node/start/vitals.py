"""Whether a starting server is still at work: the clock that runs out when nothing shows it any more.

A sign of life is a new line of work in the log, a new phase or percent, growing GPU memory, and data read by the
server's processes. Busy CPUs alone are a weak sign: compiling looks like that, and so does a rank that waits in NCCL
for one that is lost. They stretch the time to SPIN_FACTOR times as long, and no further.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from typing import Any, Dict, Iterable, Mapping, Optional, Tuple

from lamplighter.node.gpu import gpus
from lamplighter.node.log.watch import LogWatch
from lamplighter.node.system import processes

SPIN_FACTOR = 3.0
#: What counts: MiB more on the GPUs, bytes read a second (our own questions make a server read some thousand), and the
#: share of one CPU that is more than idling threads use.
MEMORY_MIB = 64
READ_RATE = 50 << 10
BUSY_SHARE = 0.2
#: Without a word in engine.yml.
STALL_SECONDS = 600.0

TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Sign:
    """The last sign of life: monotonic seconds, and what it was."""

    at: float
    what: str


@dataclasses.dataclass(frozen=True)
class Stall:
    """Nothing has shown life for ``seconds`` in ``phase``; ``is_spinning`` says that CPUs were busy all the time."""

    phase: str
    seconds: float
    is_spinning: bool


class StallClock:
    """``limit``: seconds in every phase, or None for those of the engine."""

    def __init__(self, engine: Mapping[str, Any], limit: Optional[float], now: float) -> None:
        self._by_phase: Mapping[str, float] = engine.get("stall") or {}
        self._limit = limit
        self._busy_at = now
        self._memory: Optional[int] = None
        self._state: Tuple[Any, ...] = ()
        self._worked: Dict[int, processes.Activity] = {}
        self._worked_at = now
        self.last = Sign(now, "its launch")

    def limit(self, phase: str) -> float:
        """Seconds of silence that are a stall in ``phase``."""
        return self._limit if self._limit is not None else float(self._by_phase.get(phase, STALL_SECONDS))

    def note_log(self, watched: LogWatch, now: float) -> None:
        state = (watched.lines_of_work, watched.phase, watched.percent)
        if state != self._state:
            self._state = state
            if watched.last_line:
                self._sign(now, f"the line {watched.last_line[:200]!r}")

    def note_memory(self, used_mib: Optional[int], now: float) -> None:
        """Take in how much memory is used on the server's GPUs together."""
        if used_mib is None:
            return
        if self._memory is None or used_mib < self._memory:
            self._memory = used_mib
        elif used_mib >= self._memory + MEMORY_MIB:
            self._memory = used_mib
            self._sign(now, f"growing GPU memory ({used_mib} MiB)")

    def note_work(self, pids: Iterable[int], now: float) -> None:
        """Take in what the processes have done since the last call."""
        found = {pid: activity for pid in pids if (activity := processes.activity(pid)) is not None}
        ticks = data = 0
        for pid, activity in found.items():
            before = self._worked.get(pid)
            if before is not None:
                ticks += max(0, activity.cpu_ticks - before.cpu_ticks)
                data += max(0, activity.read_bytes - before.read_bytes)
        spent = max(0.001, now - self._worked_at)
        if data / spent >= READ_RATE:
            self._sign(now, "data read by its processes")
        if ticks / TICKS / spent >= BUSY_SHARE:
            self._busy_at = now
        self._worked, self._worked_at = found, now

    def look(self, phase: str, now: float) -> Optional[Stall]:
        """Say whether the start has stalled in ``phase``."""
        limit, silent = self.limit(phase), now - self.last.at
        if silent < limit:
            return None
        is_spinning = self._busy_at > self.last.at and now - self._busy_at < limit
        if is_spinning and silent < SPIN_FACTOR * limit:
            return None
        return Stall(phase, silent, is_spinning)

    def _sign(self, now: float, what: str) -> None:
        self.last = Sign(now, what)


class GpuSampler:
    """Looks at the GPUs every ``pause`` seconds in a thread of its own, since nvidia-smi may hang."""

    def __init__(self, uuids: Iterable[str], pause: float = 5.0) -> None:
        self._uuids = frozenset(uuids)
        self._pause = pause
        self._over = threading.Event()
        self._samples: queue.SimpleQueue[Tuple[gpus.Gpu, ...]] = queue.SimpleQueue()
        self.latest: Tuple[gpus.Gpu, ...] = ()
        if self._uuids:
            threading.Thread(target=self._run, name="gpus", daemon=True).start()

    def poll(self) -> bool:
        """Take over a new sample; False without one."""
        try:
            self.latest = self._samples.get_nowait()
        except queue.Empty:
            return False
        return True

    @property
    def used_mib(self) -> Optional[int]:
        used = [gpu.used_mib for gpu in self.latest if gpu.used_mib is not None]
        return sum(used) if used else None

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            found = tuple(gpu for gpu in gpus.list_gpus(gpus.take_sample()) if gpu.uuid in self._uuids)
            if found:
                self._samples.put(found)
            self._over.wait(self._pause)
