"""Where the time went: every second has one place, and what the node says of its stages is taken at its word."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lamplighter.report.report import ServerReport, Stage
from lamplighter.report.timings import CONTROL, NODE, SERVER, WIRE, Timings

Clock = Callable[[float], None]


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Clock:
    now = [100.0]
    monkeypatch.setattr("lamplighter.report.timings.time.monotonic", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def told(timings: Timings) -> list[tuple[str, str, str, float]]:
    return [(row.where, row.what, row.about, row.seconds) for row in timings.rows]


def test_a_run_is_shared_out_to_wire_node_and_server(wait: Clock) -> None:
    timings = Timings(100.0)
    wait(0.25)
    timings.spent(CONTROL, "start and imports")
    wait(0.5)
    timings.heard()
    wait(10)
    timings.heard()
    stages = (Stage("lock", 0.125, True), Stage("ready", 4.0, True), Stage("commit", None, None), Stage("verify", 2.0))
    timings.ran("gpu1/demo", ServerReport("deployed", 0, stages=stages, ready_seconds=3.5))
    assert told(timings) == [
        (CONTROL, "start and imports", "", 0.25),
        (WIRE, "request, until the first word", "gpu1/demo", 0.5),
        (NODE, "lock", "gpu1/demo", 0.125),
        (SERVER, "getting ready", "gpu1/demo", 3.5),
        (NODE, "ready", "gpu1/demo", 0.5),
        (NODE, "commit", "gpu1/demo", 0.0),
        (CONTROL, "verify", "gpu1/demo", 2.0),
        (WIRE, "words that travel, and what lies between stages", "gpu1/demo", 3.875),
    ]
    assert sum(row.seconds for row in timings.rows) == 10.75


def test_the_node_is_believed_no_more_than_there_was(wait: Clock) -> None:
    timings = Timings(100.0)
    wait(0.5)
    timings.asked("gpu1", 0.125)
    wait(0.25)
    timings.asked("gpu2", 9.0)
    assert told(timings) == [
        (NODE, "answer", "gpu1", 0.125),
        (WIRE, "login, question and answer", "gpu1", 0.375),
        (NODE, "answer", "gpu2", 0.25),
        (WIRE, "login, question and answer", "gpu2", 0.0),
    ]


def test_the_table_ends_with_what_each_place_took(wait: Clock) -> None:
    timings = Timings(100.0)
    wait(1)
    timings.spent(CONTROL, "inventory")
    wait(2)
    timings.asked("gpu1", 0.5)
    assert timings.text().splitlines() == [
        "  where    of    what                        seconds",
        "  control        inventory                     1.000",
        "  node     gpu1  answer                        0.500",
        "  wire     gpu1  login, question and answer    1.500",
        "  control        in all                        1.000",
        "  wire           in all                        1.500",
        "  node           in all                        0.500",
        "                 all                           3.000",
    ]


def test_the_process_began_before_this_test() -> None:
    timings = Timings()
    timings.spent(CONTROL, "all of it")
    assert timings.rows[0].seconds > 0
