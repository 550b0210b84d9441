"""Waiting until the GPUs of a server are FREED: only that word may start one.

The wait follows progress: falling memory and disappearing processes extend it, ``timeouts.free`` seconds without any
end it, and so do ten minutes in all. Reads only, but for the idle memory of each GPU, which is learned once all is free
and kept on the node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Callable, Collection, Optional

from lamplighter.node.gpu import driver, gpus, holders
from lamplighter.node.keeper import parents
from lamplighter.node.layout import ServerHome, read_json
from lamplighter.node.plan import Plan
from lamplighter.node.system import files, processes

#: In the file of what was learned: the driver under which it was.
DRIVER = "driver"

#: However much still moves. facts: 370 s were seen with an orphaned engine.
LONGEST_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Freed:
    """The GPUs are free; ``reason`` is what the last sample said."""

    reason: str


@dataclasses.dataclass(frozen=True)
class NotFreed:
    """The GPUs are not free and waiting longer is no use; ``holders`` are the pids that stand in the way."""

    word: str
    reason: str
    holders: tuple[int, ...]


def await_freed(
    plan: Plan,
    home: ServerHome,
    uuids: tuple[str, ...],
    ours: Callable[[gpus.Sample], Collection[int]],
    tell: Callable[..., None],
    spared: Callable[[], Collection[int]] = frozenset,
) -> Freed | NotFreed:
    """Sample until every GPU of ``uuids`` is FREED, somebody else holds one, or nothing moves any more.

    ``ours`` returns our pids that still run, by a sample and by what it sees itself: they are waited for, however free
    the memory looks. ``spared`` may have the devices open, and no memory. A sample costs two calls of nvidia-smi, 20 to
    35 ms each (190 ms while memory is torn down).
    """
    baseline = read_baseline(home)
    may_be_open = {*plan.allow, *parents.Programs.of(plan.engine).watchers}
    watch = gpus.FreedWatch()
    began = time.monotonic()
    told = ""
    while True:
        sampled_at = time.monotonic()
        sample = gpus.accepting(gpus.take_sample(), plan.gpu_warnings.accept)
        mine = ours(sample)
        verdict = gpus.judge(sample, uuids, baseline, processes.is_pid_alive, ours=mine, allow=plan.allow)
        foreign: tuple[int, ...] = ()
        scanned = ""
        if verdict.word in (gpus.FREED, gpus.NO_HOLDERS):
            scan = gpus.device_holders()
            foreign = tuple(holders.open_devices(scan, sample, uuids, {*mine, *spared()}, may_be_open))
            scanned = f"; {scan.gap}" if scan.gap else ""
        now = time.monotonic()
        state = watch.feed(verdict, mine, foreign, now)
        if state == gpus.FREED or (state == gpus.NO_HOLDERS and plan.gpus_unified == "accept"):
            wanting = gpus.recovery_trouble(uuids, accepted=plan.gpu_warnings.accept)
            if wanting is not None:
                return NotFreed(gpus.UNKNOWN, f"{watch.reason}, but {wanting}", ())
            _learn_baseline(home, verdict)
            tell(f"{verdict.word}: {watch.reason}{scanned}", gpus=memory_of(verdict))
            return Freed(watch.reason + scanned)
        limit = _limit(plan, watch, began, now)
        if state != gpus.WAITING or limit is not None:
            reason = f"{watch.reason}; {limit}" if limit is not None and state == gpus.WAITING else watch.reason
            return NotFreed(verdict.word, reason + scanned, _in_the_way(verdict, foreign, mine))
        is_said_later = verdict.word == gpus.FREED and watch.reason == verdict.reason
        if watch.reason != told and not is_said_later:
            told = watch.reason
            tell(f"{verdict.word}: {watch.reason}{scanned}", gpus=memory_of(verdict))
        time.sleep(max(0.0, gpus.SAMPLE_SECONDS - (time.monotonic() - sampled_at)))


def _limit(plan: Plan, watch: gpus.FreedWatch, began: float, now: float) -> Optional[str]:
    """Say why waiting is over although it is not decided; None while it may go on."""
    still = now - (began if watch.progress_at is None else watch.progress_at)
    if still > plan.timeouts.free and not watch.is_about_to_decide:
        return f"nothing has changed for {still:.0f} s (timeouts.free)"
    if now - began > LONGEST_SECONDS:
        return f"waited {now - began:.0f} s in all"
    return None


def _in_the_way(verdict: gpus.Verdict, foreign: Collection[int], mine: Collection[int]) -> tuple[int, ...]:
    """Name foreign holders; where there are none, ours that would not go."""
    strangers = {*verdict.foreign, *foreign}
    return tuple(sorted(strangers or {*verdict.holders, *mine}))


def memory_of(verdict: gpus.Verdict) -> list[dict[str, object]]:
    """Return the memory of each GPU for an event."""
    return [
        {"uuid": row.uuid, "index": row.index, "used_mib": row.used_mib, "total_mib": row.total_mib}
        for row in verdict.rows
    ]


def read_baseline(home: ServerHome) -> dict[str, int]:
    """Return the idle memory that this node has learned: MiB by GPU UUID.

    What was learned under another driver does not count: each counts in its own way (facts: an idle A100 uses 7.8 MiB,
    or 912), and its change unloads the module, so that nothing can be left from before.
    """
    known = read_json(home.baseline) or {}
    if known.get(DRIVER, driver.loaded_driver()) != driver.loaded_driver():
        return {}
    return {uuid: mib for uuid, mib in known.items() if isinstance(mib, int) and mib >= 0}


def _learn_baseline(home: ServerHome, verdict: gpus.Verdict) -> None:
    known = read_baseline(home)
    found = {row.uuid: row.used_mib for row in verdict.rows if row.used_mib is not None}
    better = {uuid: mib for uuid, mib in found.items() if _is_better(known.get(uuid), mib)}
    if better:
        with contextlib.suppress(OSError):  # a full disk costs us a number, not the deploy
            files.write_json(home.baseline, {**known, **better, DRIVER: driver.loaded_driver()})


def _is_better(known: Optional[int], seen: int) -> bool:
    """The least ever seen idle: a few MiB that somebody left once must not raise the bar for all later deploys."""
    return known is None or seen < known
