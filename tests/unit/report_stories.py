"""Runs as their journals tell them, for the tests of the report."""

from __future__ import annotations

from typing import Any

from lamplighter.node import events
from lamplighter.node.events import Event, Exit

OLD, NEW = "3f2a9c81d0aa", "77aa01bc22ef"
SINCE = 1767323351.0  # 2026-01-02 03:09:11 UTC
SECONDS = {
    "lock": 0.01,
    "preflight": 1.2,
    "stage": 0.1,
    "prove": 2.3,
    "stop": 4.0,
    "free": 3.1,
    "start": 0.2,
    "ready": 331.0,
    "confirm": 1.0,
    "commit": 0.1,
}
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


class Journal:
    """Numbers and stamps the events of one run, as the node does; its clock moves with the stages."""

    def __init__(self, host: str = "gpu1", server: str = "kimi", run: str = "20260102-030000-1") -> None:
        self.common = {"host": host, "server": server, "run": run}
        self.lines: list[Event] = []
        self.clock = 1000.0

    def write(self, event: Event, after: float = 0.0) -> None:
        self.clock += after
        stamps = {"seq": len(self.lines) + 1, "t": 1767322800.0 + self.clock, "mono": self.clock}
        self.lines.append({**event, **self.common, **stamps})

    def stage(self, name: str, skipped: str | None = None) -> None:
        self.write(events.stage_started(name))
        self.write(events.stage_ended(name, True, SECONDS[name], skipped=skipped), after=SECONDS[name])

    def stages(self, *names: str) -> None:
        for name in names:
            self.stage(name)


def serving(release: str, pid: int = 4242) -> dict[str, Any]:
    return {"release": release, "pid": pid, "port": 8000, "model": "kimi-k2.5-int4", "since": SINCE}


def good_deploy(host: str = "gpu1") -> list[Event]:
    journal = Journal(host)
    journal.write(events.run_started("deploy", "ann@desk", NEW))
    journal.stages("lock", "preflight", "stage", "prove", "stop", "free", "start")
    journal.write(events.stage_started("ready"))
    journal.write(events.progress("ready", "loading", phase="weights", percent=0.0), after=10.0)
    for percent in range(1, 101):
        news = events.progress("ready", f"loading {percent}", phase="weights", percent=float(percent))
        journal.write(news, after=3.0)
    journal.write(events.progress("ready", "capturing", phase="graphs"), after=1.0)
    journal.write(events.stage_ended("ready", True, 331.0), after=20.0)
    journal.stages("confirm", "commit")
    journal.write(
        events.ended(
            "deployed",
            Exit.OK,
            "ready",
            stage=None,
            phase=None,
            cause=None,
            evidence=None,
            hint=None,
            release=NEW,
            durations=SECONDS,
            ready_seconds=331.2,
            downtime_seconds=338.3,
            serving=serving(NEW),
        )
    )
    return journal.lines


def _crash(journal: Journal, old: bool) -> None:
    journal.write(events.run_started("deploy", "cron@ops", NEW))
    journal.stages("lock", "preflight", "stage", "prove")
    journal.stage("stop", skipped=None if old else "nothing of ours was running")
    journal.stages("free", "start")
    journal.write(events.stage_started("ready"))
    journal.write(events.progress("ready", "loading", phase="weights", percent=12.0), after=5.0)
    tail = [f"line {number}" for number in range(1, 20)]
    journal.write(
        events.failure(
            "ready",
            "the server exited with code 1 after 12.3 s",
            cause="cuda_out_of_memory",
            evidence=f"\x1b[31m{OOM}\x1b[0m",
            hint="lower mem-fraction-static, or free the GPUs of others",
            phase="weights",
            log_tail=[*tail, f"\x1b]0;title\x07\x1b[31m{OOM}\x1b[0m\r"],
        ),
        after=7.3,
    )
    journal.write(events.stage_ended("ready", False, 12.3, message="the server exited with code 1 after 12.3 s"))


def rolled_back(host: str = "gpu1") -> list[Event]:
    journal = Journal(host)
    _crash(journal, old=True)
    journal.write(events.stage_started("rollback"))
    journal.write(events.stage_ended("rollback", True, 320.5), after=320.5)
    journal.write(
        events.ended(
            "rolled_back",
            Exit.ROLLED_BACK,
            "the server exited with code 1 after 12.3 s",
            stage="ready",
            phase="weights",
            cause="cuda_out_of_memory",
            evidence=OOM,
            hint="lower mem-fraction-static, or free the GPUs of others",
            release=NEW,
            durations={**SECONDS, "ready": 12.3, "rollback": 320.5},
            ready_seconds=None,
            downtime_seconds=344.0,
            serving=serving(OLD, 5151),
        )
    )
    return journal.lines


def first_crash(host: str = "gpu9") -> list[Event]:
    journal = Journal(host)
    _crash(journal, old=False)
    journal.write(
        events.ended(
            "failed",
            Exit.CRASHED,
            "the server exited with code 1 after 12.3 s",
            stage="ready",
            phase="weights",
            cause="cuda_out_of_memory",
            evidence=OOM,
            hint="",
            release=NEW,
            durations={name: spent for name, spent in SECONDS.items() if name not in ("ready", "confirm", "commit")},
            ready_seconds=None,
            downtime_seconds=None,
            serving=None,
        )
    )
    return journal.lines


def detached(host: str = "gpu1") -> list[Event]:
    """The first part of a good deploy: the wire broke while the weights were loading."""
    events_so_far = good_deploy(host)
    return events_so_far[: next(i for i, event in enumerate(events_so_far) if event.get("percent") == 42.0) + 1]
