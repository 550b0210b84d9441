"""What earlier starts say of this one, and when silence is a stall: pure, but for the journals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamplighter.node.layout import ServerHome
from lamplighter.node.log.watch import LogWatch
from lamplighter.node.start import eta, vitals
from lamplighter.node.start.eta import Start, earlier_starts, phase_remaining, remaining, shrunk
from lamplighter.node.start.vitals import StallClock
from lamplighter.node.system import processes
from lamplighter.node.system.processes import Activity


def journal(home: ServerHome, number: int, outcome: str = "deployed", **told: Any) -> None:
    directory = Path(home.runs, f"202611{number:02d}T000000Z-00000{number % 10}")
    directory.mkdir(parents=True)
    lines = [
        {"event": "run", "verb": "deploy"},
        {"event": "progress", "stage": "ready", **told},
        {"event": "end", "outcome": outcome},
    ]
    (directory / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_good_starts_are_read_from_the_journals_newest_first(tmp_path: Path) -> None:
    home = ServerHome(str(tmp_path))
    assert earlier_starts(home) == ()
    journal(home, 1, phase_seconds={"weights": 10}, measures={"kv_tokens": 5}, command="c")
    journal(home, 2, outcome="rolled_back", phase_seconds={"weights": 99})
    journal(home, 3, phase_seconds={"weights": 20, "odd": "x"})
    journal(home, 4)  # has told nothing
    (Path(home.runs) / "20261105T000000Z-000005").mkdir()
    found = earlier_starts(home)
    assert found == (Start({"weights": 20.0}, {}, ""), Start({"weights": 10.0}, {"kv_tokens": 5.0}, "c"))


def test_what_is_left_is_a_range_once_there_are_three() -> None:
    starts = [Start({"boot": 10.0, "weights": each, "graphs": 30.0}, {}, "") for each in (60.0, 100.0, 80.0)]
    assert remaining([], "weights", 0) is None
    assert remaining(starts[:1], "weights", 20) == (70.0, 70.0)
    assert remaining(starts[:2], "weights", 20) == (90.0, 90.0)
    assert remaining(starts, "weights", 20) == (70.0, 110.0)
    assert remaining(starts, "weights", 500) == (30.0, 30.0)  # slower than ever: what comes after is still to come
    assert phase_remaining(starts, "weights", 20) == (40.0, 80.0)
    assert phase_remaining(starts, "http", 0) is None
    assert remaining(starts, "no-phase", 0) == (0.0, 0.0)


def test_a_pool_has_shrunk_only_compared_with_the_same_command_line() -> None:
    starts = [Start({}, {"kv_tokens": each}, "c") for each in (100.0, 102.0, 98.0)]
    assert shrunk(starts, "c", {"kv_tokens": 60.0}) == {"kv_tokens": (60.0, 100.0)}
    assert shrunk(starts, "c", {"kv_tokens": 95.0}) == {}
    assert shrunk(starts, "other", {"kv_tokens": 1.0}) == {}
    assert shrunk([], "c", {"kv_tokens": 1.0}) == {}
    assert eta.SHRUNK < 0.95


ENGINE = {"stall": {"weights": 100}, "phases": [{"name": "weights", "patterns": ["loading"]}], "idle": ["waiting"]}


class Worker:
    """One process's counters, as far as the clock sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ticks = self.read = 0
        monkeypatch.setattr(processes, "activity", lambda pid: Activity(self.ticks, self.read))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def test_each_phase_has_its_limit_and_a_number_holds_in_all() -> None:
    assert StallClock(ENGINE, None, 0).limit("weights") == 100
    assert StallClock(ENGINE, None, 0).limit("graphs") == vitals.STALL_SECONDS
    assert StallClock(ENGINE, 7, 0).limit("weights") == 7


def test_lines_memory_and_reading_are_life_and_waiting_is_none(worker: Worker) -> None:
    clock, log = StallClock(ENGINE, None, 0.0), LogWatch(ENGINE)
    log.feed(b"loading\n")
    clock.note_log(log, 10.0)
    assert clock.look("weights", 109.0) is None
    assert clock.look("weights", 110.0) is not None
    log.feed(b"waiting\n")
    clock.note_log(log, 100.0)
    assert clock.last.at == 10.0
    clock.note_memory(1000, 101.0)
    clock.note_memory(1000 + vitals.MEMORY_MIB, 102.0)
    assert clock.last.at == 102.0
    clock.note_work([1], 103.0)
    worker.read += 60 << 10
    clock.note_work([1], 104.0)
    assert (clock.last.at, clock.last.what) == (104.0, "data read by its processes")
    worker.read += 5 << 10  # our own questions
    clock.note_work([1], 105.0)
    assert clock.last.at == 104.0


def test_busy_cpus_stretch_the_time_and_no_further(worker: Worker) -> None:
    clock = StallClock(ENGINE, None, 0.0)
    for second in range(0, 299, 2):
        worker.ticks += 2 * vitals.TICKS
        clock.note_work([1], float(second))
        assert clock.look("weights", float(second)) is None
    stall = clock.look("weights", 301.0)
    assert stall is not None
    assert stall.is_spinning
    idle = StallClock(ENGINE, None, 0.0)
    for second in range(0, 100, 2):
        worker.ticks += vitals.TICKS // 50  # threads that wake up now and then
        idle.note_work([1], float(second))
    assert idle.look("weights", 101.0) is not None
