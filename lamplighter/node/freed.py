"""Waiting until the GPUs of a server are FREED: only that word may start one.

The wait follows progress (falling memory, disappearing processes) up to the cap that the inventory gives. Reads only,
but for the idle memory of each GPU, which is learned once all is free and kept on the node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Callable, Collection, Optional

from lamplighter.node.act import files
from lamplighter.node.layout import ServerHome, read_json
from lamplighter.node.observe import gpus, processes
from lamplighter.node.plan import Plan

SAMPLE_SECONDS = 0.3


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
    ours: Callable[[], Collection[int]],
    tell: Callable[..., None],
) -> Freed | NotFreed:
    """Sample until every GPU of ``uuids`` is FREED, somebody else holds one, or nothing moves any more.

    ``ours`` returns our pids that still run: they are waited for, however free the memory looks. A sample costs two
    calls of nvidia-smi, 20 to 35 ms each (190 ms while memory is torn down).
    """
    baseline = read_baseline(home)
    watch = gpus.FreedWatch()
    deadline = time.monotonic() + plan.timeouts.free
    told = ""
    while True:
        sample = gpus.take_sample()
        mine = ours()
        verdict = gpus.judge(sample, uuids, baseline, processes.is_pid_alive, ours=mine, allow=plan.allow)
        foreign: tuple[int, ...] = ()
        if verdict.word in (gpus.FREED, gpus.NO_HOLDERS):
            foreign = gpus.foreign_holders(gpus.device_holders(), sample, uuids, mine, plan.allow)
        state = watch.feed(verdict, mine, foreign, time.monotonic())
        if state == gpus.FREED or (state == gpus.NO_HOLDERS and plan.gpus_unified == "accept"):
            _learn_baseline(home, verdict)
            return Freed(verdict.reason)
        if state != gpus.WAITING or time.monotonic() > deadline:
            return NotFreed(verdict.word, watch.reason, tuple(sorted({*verdict.foreign, *foreign})))
        if watch.reason != told:
            told = watch.reason
            tell(f"{verdict.word}: {watch.reason}", gpus=memory_of(verdict))
        time.sleep(SAMPLE_SECONDS)


def memory_of(verdict: gpus.Verdict) -> list[dict[str, object]]:
    """Return the memory of each GPU for an event."""
    return [
        {"uuid": row.uuid, "index": row.index, "used_mib": row.used_mib, "total_mib": row.total_mib}
        for row in verdict.rows
    ]


def read_baseline(home: ServerHome) -> dict[str, Optional[int]]:
    """Return the idle memory that this node has learned: MiB by GPU UUID."""
    return read_json(home.baseline) or {}


def _learn_baseline(home: ServerHome, verdict: gpus.Verdict) -> None:
    known = read_baseline(home)
    found = {row.uuid: row.used_mib for row in verdict.rows if row.used_mib is not None}
    # The least ever seen idle: a few MiB that somebody left once must not raise the bar for all later deploys.
    better = {uuid: mib for uuid, mib in found.items() if known.get(uuid) is None or mib < (known[uuid] or 0)}
    if better:
        with contextlib.suppress(OSError):  # a full disk costs us a number, not the deploy
            files.write_json(home.baseline, {**known, **better})
