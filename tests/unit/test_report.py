"""Events become one report: the JSON contract, the exit code, repeated and unknown events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamplighter.errors import ContactLost, InventoryError, LamplighterError, Unreachable
from lamplighter.node import events
from lamplighter.node.events import Exit
from lamplighter.report.jsonlines import encode
from lamplighter.report.report import Fold, Report, ServerReport
from lamplighter.report.summary import summary
from tests.unit.report_stories import (
    NEW,
    OLD,
    OOM,
    SECONDS,
    Journal,
    detached,
    first_crash,
    good_deploy,
    rolled_back,
    serving,
)

CONTRACT = {
    "outcome",
    "exit_code",
    "stage",
    "phase",
    "cause",
    "evidence",
    "message",
    "hint",
    "release",
    "serving",
    "durations",
    "ready_seconds",
    "downtime_seconds",
    "began",
    "ended",
    "run",
}


def only(report: Report) -> ServerReport:
    [(_, part)] = report.parts()
    return part


def fold_of(*stories: list[events.Event]) -> Fold:
    fold = Fold()
    for story in stories:
        for event in story:
            fold.add(event)
    return fold


def test_what_serves_may_be_unknown_and_is_then_no_nothing() -> None:
    why = "not known: release 3f2a9c81d0aa (pid 7) answers HTTP"
    journal = Journal()
    journal.stage("lock")
    journal.write(events.ended("refused", Exit.REFUSED, "no", serving=None, serving_unknown=why))
    told = "\n".join(summary(Report.fold(journal.lines)))
    assert f"serving now  {why}" in told
    assert "nothing, as before" not in told


def test_json_of_a_rollback_is_the_contract() -> None:
    story = rolled_back()
    body = Report.fold(story).to_json()["report"]
    assert body["exit_code"] == 9
    assert body["outcome"] == "rolled_back"
    server = body["hosts"]["gpu1"]["servers"]["kimi"]
    assert set(server) == CONTRACT
    assert server["stage"] == "ready"
    assert server["phase"] == "weights"
    assert server["cause"] == "cuda_out_of_memory"
    assert server["evidence"] == OOM
    assert server["release"] == NEW
    assert server["serving"] == serving(OLD, 5151)
    assert server["durations"]["rollback"] == 320.5
    assert server["ready_seconds"] is None
    assert server["downtime_seconds"] == 344.0
    assert (server["began"], server["ended"]) == (story[0]["t"], story[-1]["t"])
    assert server["run"] == "20260102-030000-1"


def test_keys_are_there_whatever_happened() -> None:
    fold = fold_of(good_deploy("a"), first_crash("b"), detached("c"))
    fold.add_error("d", "kimi", Unreachable("no route"))
    for host in fold.report().to_json()["report"]["hosts"].values():
        assert set(host["servers"]["kimi"]) == CONTRACT


@pytest.mark.parametrize(
    ("stories", "exit_code", "outcome"),
    [
        ([good_deploy("a")], 0, "deployed"),
        ([good_deploy("a"), good_deploy("b")], 0, "deployed"),
        ([first_crash("a"), first_crash("b")], 6, "failed"),
        ([good_deploy("a"), first_crash("b")], 11, "mixed"),
        ([rolled_back("a"), first_crash("b")], 11, "mixed"),
        ([detached("a")], 13, "detached"),
        ([], 1, "failed"),
    ],
)
def test_exit_code_over_all(stories: list[list[events.Event]], exit_code: int, outcome: str) -> None:
    report = fold_of(*stories).report()
    assert (report.exit_code, report.outcome) == (exit_code, outcome)


def test_unchanged_beside_deployed_is_deployed() -> None:
    unchanged = {**events.ended("unchanged", 0, "nothing to do"), "host": "b", "server": "kimi", "run": "r", "seq": 1}
    report = fold_of(good_deploy("a"), [unchanged]).report()
    assert (report.exit_code, report.outcome) == (0, "deployed")


def test_events_that_come_twice_count_once() -> None:
    story = rolled_back()
    assert fold_of(story, story[3:], story).report() == Report.fold(story)


def test_a_newer_run_replaces_an_older_one_and_its_repeats() -> None:
    newer = [{**event, "run": "20260102-040000-2"} for event in good_deploy()]
    report = fold_of(first_crash("gpu1"), newer, first_crash("gpu1")).report()
    assert only(report).run == "20260102-040000-2"
    assert report.exit_code == 0


def test_without_an_end_the_run_is_detached_where_it_was_last_seen() -> None:
    part = only(Report.fold(detached()))
    assert (part.outcome, part.exit_code, part.stage, part.phase) == ("detached", 13, "ready", "weights")
    assert "attach --host gpu1 --server kimi" in part.hint
    assert part.serving is None


def test_what_the_end_leaves_out_comes_from_the_failure() -> None:
    story = rolled_back()
    story[-1] = {key: story[-1][key] for key in ("event", "host", "server", "run", "seq", "outcome")}
    part = only(Report.fold(story))
    assert part.exit_code == 9
    assert (part.stage, part.phase, part.cause) == ("ready", "weights", "cuda_out_of_memory")
    assert "CUDA out of memory" in part.evidence
    assert part.durations["rollback"] == 320.5
    assert part.release == NEW


@pytest.mark.parametrize("stage", ["free", "commit"])
def test_the_phase_is_that_of_the_stage_that_failed_and_not_of_the_rollback(stage: str) -> None:
    journal = Journal()
    journal.write(events.run_started("deploy", "ann@desk", NEW))
    journal.write(events.stage_started("ready"))
    journal.write(events.progress("ready", "capturing", phase="graphs"))
    journal.write(events.stage_ended("ready", True, 9.0))
    journal.write(events.stage_started(stage))
    journal.write(events.failure(stage, "cancelled by ann", cause="cancelled"))
    journal.write(events.stage_ended(stage, False, 1.0))
    journal.write(events.stage_started("rollback"))
    journal.write(events.progress("rollback", "answers", phase="ready"))
    journal.write(events.ended("rolled_back", Exit.ROLLED_BACK, "cancelled by ann", stage=stage, phase=None))
    report = Report.fold(journal.lines)
    assert (only(report).stage, only(report).phase) == (stage, None)
    assert "phase" not in "\n".join(summary(report))


def test_a_failure_without_a_phase_is_in_that_of_its_stage() -> None:
    journal = Journal()
    journal.write(events.stage_started("ready"))
    journal.write(events.progress("ready", "loading", phase="weights"))
    journal.write(events.failure("ready", "cancelled by ann", cause="cancelled"))
    journal.write(events.stage_started("rollback"))
    journal.write(events.progress("rollback", "answers", phase="ready"))
    journal.write(events.ended("rolled_back", Exit.ROLLED_BACK, "cancelled by ann"))
    assert (only(Report.fold(journal.lines)).stage, only(Report.fold(journal.lines)).phase) == ("ready", "weights")


@pytest.mark.parametrize(("cause", "is_ours"), [("abandoned", False), (None, True)])
def test_only_an_end_without_a_cause_is_called_a_defect(cause: str | None, is_ours: bool) -> None:
    journal = Journal()
    journal.write(events.ended("failed", Exit.INTERNAL, "abandoned at stage free", cause=cause, hint=""))
    part = only(Report.fold(journal.lines))
    assert ("defect of lamplighter" in part.hint) == is_ours
    assert "./inv status --host gpu1 --server kimi" in part.hint


@pytest.mark.parametrize("code", [256, -1, "9", None, True, 9.5, 10**400, float("nan")])
def test_an_exit_code_that_the_shell_cannot_carry_follows_from_the_outcome(code: object) -> None:
    end = {
        "event": "end",
        "host": "a",
        "server": "s",
        "run": "r",
        "seq": 1,
        "outcome": "rolled_back",
        "exit_code": code,
    }
    assert Report.fold([end]).exit_code == 9


def test_an_end_that_says_nothing_is_no_success() -> None:
    assert Report.fold([{"event": "end"}]).exit_code == Exit.INTERNAL


def test_unreachable_host_without_servers_has_its_error() -> None:
    fold = Fold()
    fold.add_error("gpu1", None, Unreachable("gpu1 did not answer", why="timed out", next_step="ping it"))
    report = fold.report()
    assert (report.exit_code, report.outcome) == (4, "unreachable")
    error = report.to_json()["report"]["hosts"]["gpu1"]["error"]
    assert set(error) == CONTRACT
    assert (error["message"], error["evidence"], error["hint"]) == ("gpu1 did not answer", "timed out", "ping it")


def test_error_of_the_command_itself_has_no_host() -> None:
    fold = Fold()
    fold.add_error(None, None, InventoryError("unknown key 'modle'", origin="inventory/hosts.yml:3"))
    report = fold.report()
    assert report.exit_code == 2
    assert report.to_json()["report"]["error"]["message"] == "inventory/hosts.yml:3: unknown key 'modle'"


def test_lost_contact_and_the_end_seen_later_is_the_end() -> None:
    story = good_deploy()
    fold = fold_of(story[:30])
    fold.add_error("gpu1", None, ContactLost("the wire went silent", why="10 s without a line"))
    lost = only(fold.report())
    assert (lost.exit_code, lost.evidence, lost.stage) == (13, "10 s without a line", "ready")
    for event in story:
        fold.add(event)
    assert only(fold.report()).exit_code == 0


def test_lost_contact_after_the_end_changes_nothing() -> None:
    fold = fold_of(good_deploy())
    before = fold.report()
    fold.add_error("gpu1", None, ContactLost("the wire went silent"))
    fold.add_error("gpu1", "kimi", ContactLost("the wire went silent"))
    assert fold.report() == before


@pytest.mark.parametrize("exit_code", [Exit.UNREACHABLE, Exit.INTERRUPTED])
def test_nothing_was_touched_is_never_said_of_a_run_that_goes_on(exit_code: Exit) -> None:
    error = LamplighterError("gone")
    error.exit_code = exit_code
    fold = fold_of(detached())
    fold.add_error("gpu1", "kimi", error)
    assert only(fold.report()).exit_code == Exit.DETACHED


def test_host_error_goes_to_the_servers_that_have_not_ended() -> None:
    other = [{**event, "server": "other"} for event in detached()]
    fold = fold_of(good_deploy(), other)
    fold.add_error("gpu1", None, ContactLost("the wire went silent"))
    servers = fold.report().hosts["gpu1"].servers
    assert (servers["kimi"].exit_code, servers["other"].exit_code) == (0, 13)
    assert servers["other"].message == "the wire went silent"
    assert fold.report().hosts["gpu1"].error is None


def test_failed_verification_degrades_a_good_deploy_but_not_a_failed_one() -> None:
    fold = fold_of(good_deploy("a"), rolled_back("b"))
    assert fold.is_put_into_service("a", "kimi")
    assert not any(fold.is_put_into_service(*other) for other in (("b", "kimi"), ("a", "other"), ("c", "kimi")))
    for host in ("a", "b"):
        fold.add_degraded(host, "kimi", "1 of 4 checks failed", cause="verify", evidence="port 8000 is public")
    hosts = fold.report().hosts
    degraded, kept = hosts["a"].servers["kimi"], hosts["b"].servers["kimi"]
    assert (degraded.outcome, degraded.exit_code, degraded.evidence) == ("deployed", 8, "port 8000 is public")
    assert degraded.serving is not None
    assert (kept.outcome, kept.exit_code, kept.evidence) == ("rolled_back", 9, OOM)


def test_a_run_of_which_nothing_was_heard_is_not_said_to_go_on() -> None:
    fold = Fold()
    fold.add_error(
        "gpu1", "kimi", ContactLost("detached", serving="run R1 may have begun", next_step="attach --run R1")
    )
    text = "\n".join(summary(fold.report()))
    assert "not known here whether the run has begun (exit code 13)" in text
    assert "goes on on the node" not in text
    assert "goes on on the node" in "\n".join(summary(Report.fold(detached())))


def test_reading_verbs_and_beats_are_no_runs() -> None:
    others = [{"event": kind, "host": "gpu1", "server": "kimi", "seq": 1} for kind in ("beat", "log", "result", "new")]
    assert Report.fold(others).hosts == {}


def test_a_second_failure_is_told_too() -> None:
    story = rolled_back()
    second = events.failure("rollback", "the old server crashed too", evidence="No space left on device")
    story.insert(-1, {**second, **{key: story[0][key] for key in ("host", "server", "run")}, "seq": 500})
    text = "\n".join(summary(Report.fold(story)))
    assert "rollback: the old server crashed too" in text
    assert '"No space left on device"' in text


# A node's worst, by hand: generated nesting is slow to draw and finds nothing more.
_odd: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        3,
        7.5,
        1e300,
        10**400,
        float("nan"),
        float("inf"),
        "",
        "x",
        "9",
        "two\nlines\r\x1b[2Jx",
    ),
    *("\x1b]0;title\x07", "\x9b31m", "\u202egpj", "half \ud800", "\x00\x7f\x85\u2028", "\u7070\u706f", "y" * 9000),
    *(
        [],
        {},
        [1, "two", None],
        {"pid": "x", "port": 1e400, "since": 1e14, "release": []},
        {"ready": "soon", "stop": 2},
    ),
    *([{"used_mib": 1, "total_mib": "x"}, 3], {"release": "r", "pid": 1, "since": -1e14}),
]
_values = st.sampled_from(_odd)
_names = st.sampled_from(["run", "stage_start", "stage_end", "progress", "warning", "failure", "end", "beat", "new"])
_fields = {
    "event": _names | _values,
    "host": st.sampled_from(["a", "b"]) | _values,
    "server": st.sampled_from(["s", "t"]) | _values,
    "run": st.sampled_from(["1", "2"]) | _values,
    "seq": st.integers(0, 5) | _values,
    "stage": st.sampled_from([*events.STAGES, "rollback"]) | _values,
    "outcome": st.sampled_from(events.OUTCOMES) | _values,
    "exit_code": st.sampled_from([int(code) for code in Exit]) | _values,
}
_others = [
    *("phase", "percent", "message", "evidence", "hint", "cause", "log_tail", "serving", "durations", "release", "by"),
    *("seconds", "ok", "skipped", "t", "mono", "gpus", "line", "ready_seconds", "downtime_seconds", "verb"),
]
any_event = st.fixed_dictionaries({}, optional={**_fields, **dict.fromkeys(_others, _values)})


@given(st.lists(any_event, max_size=12))
def test_any_events_fold_into_strict_json_and_a_summary(items: list[dict[str, Any]]) -> None:
    report = Report.fold(items)
    json.loads(encode(report.to_json()), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert 0 <= report.exit_code <= 255
    lines = summary(report)
    assert lines
    assert all(character.isprintable() for line in lines for character in line)


@given(st.lists(any_event, max_size=12))
def test_any_numbered_events_repeated_fold_into_the_same(items: list[dict[str, Any]]) -> None:
    numbered = [{**event, "seq": number} for number, event in enumerate(items)]
    assert encode(Report.fold(numbered + numbered).to_json()) == encode(Report.fold(numbered).to_json())


@given(st.lists(any_event, max_size=8), st.sampled_from([None, "a"]), st.sampled_from([None, "s"]))
def test_errors_of_ours_never_raise(items: list[dict[str, Any]], host: str | None, server: str | None) -> None:
    fold = Fold()
    for event in items:
        fold.add(event)
    fold.add_error(host, server, Unreachable("gone", why="no route"))
    assert fold.report().exit_code != 0 or any(event.get("event") == "end" for event in items)


def second_run(outcome: str, code: Exit, message: str, release: str | None) -> list[events.Event]:
    journal = Journal(run="20260102-040000-1")
    journal.write(events.run_started("rollback", "ann@desk", OLD))
    journal.stages("lock", "stop")
    journal.write(events.ended(outcome, code, message, serving=serving(release) if release else None))
    return journal.lines


@pytest.mark.parametrize(
    ("second", "outcome", "code", "release", "says"),
    [
        (("deployed", Exit.OK, "answers", OLD), "rolled_back", Exit.ROLLED_BACK, OLD,
         f"; rolled back: release {OLD} is serving again"),
        (("deployed", Exit.DEGRADED, "answers, but", OLD), "rolled_back", Exit.ROLLED_BACK, OLD, "is serving again"),
        (("rolled_back", Exit.ROLLED_BACK, "it crashed", NEW), "deployed", Exit.DEGRADED, NEW,
         "; the release before did not come back: it crashed"),
        (("refused", Exit.REFUSED, "there is none", None), "failed", Exit.CRASHED, None,
         "; not rolled back: there is none"),
        (("refused", Exit.LOCKED, "another run", None), "failed", Exit.CRASHED, None, "; not rolled back: another run"),
        (("failed", Exit.NOT_FREED, "it holds on", None), "failed", Exit.NOT_FREED, None,
         "; rolling back failed: it holds on"),
    ],
)  # fmt: skip
def test_a_deploy_and_the_run_that_undoes_it_are_one_result(
    second: tuple[str, Exit, str, str | None], outcome: str, code: Exit, release: str | None, says: str
) -> None:
    fold = fold_of(good_deploy())
    first = only(fold.report())
    fold.add_gone("gpu1", "kimi", "it serves no more", Exit.CRASHED, cause="crashed", evidence="no answer")
    for event in second_run(*second):
        fold.add(event)
    fold.add_way_back("gpu1", "kimi")
    part = only(fold.report())
    assert (part.outcome, part.exit_code, part.serving and part.serving.release) == (outcome, code, release)
    assert part.message.startswith("it serves no more; ")
    assert says in part.message
    assert (part.run, part.release, part.cause, part.evidence) == (first.run, NEW, "crashed", "no answer")
    assert part.durations["rollback"] == SECONDS["lock"] + SECONDS["stop"]
    assert summary(fold.report())[0].endswith(f"(exit code {int(code)}).")


def test_a_run_that_never_began_undoes_nothing() -> None:
    fold = fold_of(good_deploy())
    fold.add_degraded("gpu1", "kimi", "serving, but 1 of 9 checks failed", cause="verify")
    fold.add_no_way_back("gpu1", "kimi", Unreachable("gpu1: no route to host"))
    part = only(fold.report())
    assert (part.exit_code, part.serving is not None) == (Exit.DEGRADED, True)
    assert part.message == "serving, but 1 of 9 checks failed; not rolled back: gpu1: no route to host"
