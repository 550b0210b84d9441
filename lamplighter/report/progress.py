"""Where one server's run stands right now, for the views that people watch.

Pure: the caller gives the local time (monotonic seconds). Elapsed times come from the node's own clock, so that a view
that joins later (attach) tells the run's age and not its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lamplighter.node import events
from lamplighter.node.events import PHASES
from lamplighter.report.wording import clean, number, seconds, text

#: With more GPUs than these only their sum is shown.
MOST_GPUS = 8


@dataclass(frozen=True)
class PastStage:
    """A stage that is over."""

    name: str
    seconds: float
    ok: bool
    skipped: bool


class Progress:
    """One server's run as it goes; a new run on the same server starts it afresh."""

    def __init__(self, host: str, server: str, now: float) -> None:
        self.host = host
        self.server = server
        self.run: str | None = None
        self._reset(None, now)

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """Take one event that came at the local time ``now``."""
        run = text(event.get("run"))
        if run and run != self.run:
            if self.run:
                self._reset(run, now)
            self.run = run
        self._keep_time(event, now)
        kind = event.get("event")
        if kind == events.RUN:
            self.verb, self.release = clean(event.get("verb")), clean(event.get("release"))
        elif kind == events.STAGE_START:
            self._begin(clean(event.get("stage")) or "?")
        elif kind == events.STAGE_END:
            self._finish(event)
        elif kind == events.PROGRESS:
            self._move(event)
        elif kind == events.FAILURE:
            self.has_failed = True
        elif kind == events.END:
            self.outcome, self.stage = clean(event.get("outcome")) or "ended", ""

    def elapsed(self, now: float) -> float:
        """Seconds since the run began."""
        return self._node_elapsed + max(0.0, now - self._heard_at)

    def in_stage(self, now: float) -> float:
        """Seconds since the current stage began."""
        return max(0.0, self.elapsed(now) - self._stage_began)

    def wall_clock(self, now: float) -> float | None:
        """What the clock of the node says now; None where it has not been heard."""
        return None if self._told_at is None else self._told_at + max(0.0, now - self._heard_at)

    @property
    def is_over(self) -> bool:
        return bool(self.outcome)

    def _reset(self, run: str | None, now: float) -> None:
        self.run = run
        self.verb = self.release = self.stage = self.phase = self.outcome = ""
        #: The last line of the log, or what the node has said since.
        self.news = ""
        self.percent: float | None = None
        self.memory = self.ranks = self.eta = self.phase_eta = ""
        self.has_failed = False
        self.past: list[PastStage] = []
        self._stage_began = self._node_elapsed = 0.0
        self._heard_at = now
        self._told_at: float | None = None
        self._node_start: tuple[str, float] | None = None

    def _keep_time(self, event: Mapping[str, Any], now: float) -> None:
        if (told_at := number(event.get("t"))) is not None:
            self._told_at, self._heard_at = told_at, now
        for clock in ("mono", "t"):
            stamp = number(event.get(clock))
            if stamp is None:
                continue
            if self._node_start is None:
                self._node_start = (clock, stamp - self.elapsed(now))
            if self._node_start[0] == clock:
                # Events of an attach come in a burst: only the node's clock knows how far apart they were.
                self._node_elapsed = max(self._node_elapsed, stamp - self._node_start[1])
                self._heard_at = now
            return

    def _begin(self, stage: str) -> None:
        self.stage, self.phase, self.news, self.percent = stage, "", "", None
        self.ranks = self.eta = self.phase_eta = ""
        self._stage_began = self._node_elapsed

    def _finish(self, event: Mapping[str, Any]) -> None:
        self.past.append(
            PastStage(
                name=clean(event.get("stage")) or "?",
                seconds=number(event.get("seconds")) or 0.0,
                ok=event.get("ok") is not False,
                skipped=bool(event.get("skipped")),
            )
        )
        self.stage = ""

    def _move(self, event: Mapping[str, Any]) -> None:
        phase = clean(event.get("phase"))
        if phase and phase != self.phase:
            self.phase, self.percent = phase, None
        if phase:  # each of these events tells again what is left, and how the ranks differ
            self.eta, self.phase_eta = time_left(event.get("eta")), time_left(event.get("phase_eta"))
            self.ranks = ranks_that_differ(event.get("ranks"))
        percent = number(event.get("percent"))
        if percent is not None:
            self.percent = min(100.0, max(0.0, percent))
        message = clean(event.get("message"))
        self.news = clean(event.get("line")) or (message if message != phase else "") or self.news
        self.memory = gpu_memory(event.get("gpus")) or self.memory


def time_left(span: object) -> str:
    """``about 3m 10s`` or ``2m 50s to 3m 40s`` for [least, most] seconds; empty when they are unknown."""
    if not isinstance(span, (list, tuple)) or len(span) != 2:
        return ""
    least, most = number(span[0]), number(span[1])
    if least is None or most is None:
        return ""
    low, high = seconds(max(0.0, least)), seconds(max(0.0, most))
    return f"about {low}" if low == high else f"{low} to {high}"


def ranks_that_differ(ranks: object) -> str:
    """``rank 1 weights, rank 0 2 3 graphs`` for {rank: phase}, the slowest first; empty while they are alike."""
    if not isinstance(ranks, Mapping):
        return ""
    by_phase: dict[str, list[str]] = {}
    for rank, phase in ranks.items():
        by_phase.setdefault(clean(phase), []).append(clean(rank))
    if len(by_phase) < 2:
        return ""
    order = sorted(by_phase, key=lambda phase: PHASES.index(phase) if phase in PHASES else len(PHASES))
    return ", ".join(f"rank {' '.join(by_phase[each])} {each}" for each in order)


def gpu_memory(gpus: object) -> str:
    """``62 61 of 80 GiB`` for GPUs given as ``[{"used_mib", "total_mib"}, ...]``, one number a GPU.

    ``310 of 640 GiB`` where they are many or differ in size; empty when nothing is known.
    """
    if not isinstance(gpus, (list, tuple)):
        return ""
    rows = [(number(gpu.get("used_mib")), number(gpu.get("total_mib"))) for gpu in gpus if isinstance(gpu, Mapping)]
    used = [row[0] for row in rows if row[0] is not None]
    total = [row[1] for row in rows if row[1] is not None]
    if not used:
        return ""
    if len(total) == len(used) and len(set(total)) == 1 and 1 < len(used) <= MOST_GPUS:
        return f"{' '.join(f'{each / 1024:.0f}' for each in used)} of {total[0] / 1024:.0f} GiB"
    text_used = f"{sum(used) / 1024:.0f}"
    return f"{text_used} of {sum(total) / 1024:.0f} GiB" if len(total) == len(used) else f"{text_used} GiB"
