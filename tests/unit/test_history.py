"""What was done, who holds what, and until when: the words, and what a person may write."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamplighter.errors import UsageError
from lamplighter.node import events
from lamplighter.node.events import Exit
from lamplighter.report.history import history_text, hold_text
from lamplighter.report.report import Fold, Report
from lamplighter.report.summary import summary
from lamplighter.report.tables import status_text
from lamplighter.run.holding import order, seconds_until
from tests.unit.report_stories import Journal, serving

NOON = 1767355200.0  # 2026-01-02 12:00:00 UTC, a Friday
HELD = {"message": "debugging\x1b[2J until Friday", "by": "ann@desk", "since": NOON, "until": NOON + 3600}
GOOD = {
    "id": "20260102T120000Z-00000a",
    "verb": "deploy",
    "by": "ann@desk",
    "since": NOON,
    "state": "ended",
    "outcome": "deployed",
    "exit_code": 0,
    "cause": None,
    "message": "kimi answers on port 8000",
    "downtime_seconds": 344.0,
}
FAILED = {
    **GOOD,
    "id": "20260101T120000Z-00000b",
    "since": NOON - 86400,
    "by": "cron@ops",
    "outcome": "rolled_back",
    "exit_code": 9,
    "cause": "cuda_out_of_memory",
    "message": "the server exited with code 1",
}
KILLED = {"id": "20260102T130000Z-00000c", "verb": "stop", "by": "bob@lab", "since": NOON + 3600, "state": "killed"}


def test_history_is_one_list_over_all_hosts_oldest_first() -> None:
    text = history_text({"gpu1": {"kimi": {"runs": [FAILED, KILLED]}}, "gpu2": {"draft": {"runs": [GOOD]}}})
    assert text.splitlines() == [
        "  when                     server      verb    by        outcome          downtime  cause               run",
        (
            "  2026-01-01 12:00:00 UTC  gpu1/kimi   deploy  cron@ops  rolled back (9)    5m 44s  cuda_out_of_memory  "
            "20260101T120000Z-00000b"
        ),
        "      the server exited with code 1",
        (
            "  2026-01-02 12:00:00 UTC  gpu2/draft  deploy  ann@desk  deployed           5m 44s  -                   "
            "20260102T120000Z-00000a"
        ),
        (
            "  2026-01-02 13:00:00 UTC  gpu1/kimi   stop    bob@lab   killed                  -  -                   "
            "20260102T130000Z-00000c"
        ),
    ]
    assert history_text({"gpu1": {"kimi": {"runs": []}}}) == "no runs"


def test_status_shows_the_hold_the_last_run_and_whom_no_inventory_names() -> None:
    old = {"state": "serving", "unlisted": True, "hold": HELD, "last_run": FAILED}
    gone = {"state": "stopped", "unlisted": True}
    assert status_text({"gpu1": {"old": old, "gone": gone}}).splitlines()[1:] == [
        "  gpu1/old   serving  -      -     -    -        -",
        "      the inventory does not name it: `./inv undeploy --host gpu1 --server old --stop` ends it",
        (
            "      on hold until 2026-01-02 13:00:00 UTC, by ann@desk since 2026-01-02 12:00:00 UTC: "
            '"debugging until Friday"'
        ),
        (
            "      last run: deploy, rolled back (9) [cuda_out_of_memory], 2026-01-01 12:00:00 UTC, "
            "asked for by cron@ops, run 20260101T120000Z-00000b"
        ),
        "  gpu1/gone  stopped  -      -     -    -        -",
        "      the inventory does not name it",
    ]


def test_a_hold_is_told_with_the_run_that_goes_on_and_its_end_with_what_it_was() -> None:
    at_work = {"id": "R7", "verb": "deploy", "by": "cron@ops"}
    told = hold_text({"gpu1": {"a": {"hold": HELD, "run": at_work}, "b": {"ended": HELD}, "c": {}}, "gpu2": {}})
    assert told.splitlines() == [
        (
            "gpu1/a: on hold until 2026-01-02 13:00:00 UTC, by ann@desk since 2026-01-02 12:00:00 UTC: "
            '"debugging until Friday"'
        ),
        "  run R7 (deploy, by cron@ops) was at work already, and goes on",
        (
            "gpu1/b: no longer on hold (it was until 2026-01-02 13:00:00 UTC, by ann@desk "
            'since 2026-01-02 12:00:00 UTC: "debugging until Friday")'
        ),
        "gpu1/c: not on hold",
    ]


_odd = st.sampled_from([None, True, 7.5, float("nan"), 10**400, "x\x1b[2J\r\ny", [], {}, [1, {"id": []}], {"id": {}}])
_keys = st.sampled_from(["runs", "hold", "ended", "run", "last_run", "id", "since", "exit_code", "state"])


@given(st.dictionaries(_keys, st.one_of(_odd, st.lists(st.dictionaries(_keys, _odd), max_size=2))))
def test_odd_answers_never_raise_nor_reach_the_terminal(server: dict[str, Any]) -> None:
    for view in (history_text, hold_text, status_text):
        assert all(line.isprintable() for line in view({"gpu1": {"kimi": server}}).splitlines())


BERLIN = dt.timezone(dt.timedelta(hours=1))
NOW = dt.datetime(2026, 1, 2, 13, 0, tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("said", "hours"),
    [
        ("18:00", 5),
        ("18:00Z", 6),
        ("9:30", 20.5),  # tomorrow
        ("13:00", 24),
        ("2026-01-02", 11),  # to its end
        ("2026-01-05", 24 * 3 + 11),
        ("2026-01-03 08:00", 19),
        ("2026-01-03T08:00:00 UTC", 20),
        ("90m", 1.5),
        (" 3d ", 72),
    ],
)
def test_until_is_a_time_a_date_or_a_duration(said: str, hours: float) -> None:
    assert seconds_until(said, NOW) == hours * 3600


@pytest.mark.parametrize(
    "said", ["", "Z", "friday", "25:00", "2026-02-30", "2026-01-02 12:59", "2025-12-31", "-1h", "T"]
)
def test_until_is_no_other_word_and_no_time_that_is_over(said: str) -> None:
    with pytest.raises(UsageError, match="--until"):
        seconds_until(said, NOW)


def test_a_hold_has_its_reason_and_its_end() -> None:
    assert order(None, None, False, NOW) == {}
    assert order(None, None, True, NOW) == {"end": True}
    assert order("why", "1h", False, NOW) == {"message": "why", "seconds": 3600.0}
    for half in (("why", None, False), (None, "1h", False), ("why", None, True), (None, "1h", True)):
        with pytest.raises(UsageError):
            order(*half, NOW)


def story(*told: events.Event, server: str = "kimi") -> list[events.Event]:
    journal = Journal(server=server)
    journal.write(events.run_started("deploy", "ann@desk", "77aa01bc22ef"))
    for event in told:
        journal.write(event)
    return journal.lines


def test_a_cancelled_deploy_that_put_the_old_server_back_has_not_failed() -> None:
    end = events.ended("rolled_back", Exit.ROLLED_BACK, "cancelled by bob@lab at stage ready; rolled back",
                       stage="ready", cause="cancelled", serving=serving("3f2a9c81d0aa"))  # fmt: skip
    first, *rest = summary(Report.fold(story(end)))
    assert first == "gpu1/kimi: cancelled at ready; release 3f2a9c81d0aa is serving again (exit code 9)."
    assert any("cancelled by bob@lab at stage ready" in line for line in rest)
    assert not any("failed" in line for line in rest)


def test_a_rollback_that_was_asked_for_is_one_and_no_failure() -> None:
    end = events.ended("rolled_back", Exit.OK, "it answers", serving=serving("3f2a9c81d0aa"))
    report = Report.fold(story(end))
    assert (report.exit_code, report.outcome) == (0, "rolled_back")
    assert summary(report)[0] == "gpu1/kimi: rolled back, release 3f2a9c81d0aa is serving."


def test_a_hold_is_told_as_what_it_is() -> None:
    end = events.ended("refused", Exit.LOCKED, "kimi is on hold", stage="lock", cause="hold")
    assert "refused, it is on hold; nothing was touched (exit code 10)" in summary(Report.fold(story(end)))[0]


def test_what_two_servers_of_a_host_warn_of_is_told_once() -> None:
    warning = events.warning("preflight", "the inventory names no server old", "end it")
    end = events.ended("deployed", Exit.OK, "ready", serving=serving("77aa01bc22ef"))
    fold = Fold()
    for event in [*story(warning, warning, end), *story(warning, end, server="draft")]:
        fold.add(event)
    text = "\n".join(summary(fold.report()))
    assert (text.count("names no server old"), text.count("end it")) == (1, 1)
