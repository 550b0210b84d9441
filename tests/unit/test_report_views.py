"""What people and programs see: golden summaries, plain lines, the live view, JSON lines, streams that break."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lamplighter.errors import InventoryError, Unreachable
from lamplighter.node import events
from lamplighter.report import wording
from lamplighter.report.jsonlines import JsonLines
from lamplighter.report.lines import Lines
from lamplighter.report.live import Live, View
from lamplighter.report.output import Output
from lamplighter.report.progress import Progress, gpu_memory, ranks_that_differ, time_left
from lamplighter.report.report import Fold, Report
from lamplighter.report.reporter import Reporter, reporter_for
from lamplighter.report.summary import summary
from lamplighter.report.wording import clean, seconds
from tests.unit.report_stories import Journal, detached, first_crash, good_deploy, rolled_back
from tests.unit.test_report import any_event

GOLDEN = Path(__file__).parent / "test_report_golden"
PROJECT = Path(__file__).parents[2]


class Clock:
    """A clock that stands still unless it is set."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def golden(name: str) -> list[str]:
    return (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def mixed() -> Report:
    fold = Fold()
    for event in [*good_deploy("gpu1"), *rolled_back("gpu2"), *detached("gpu3")]:
        fold.add(event)
    error = Unreachable("gpu4 did not answer on port 22", why="Connection refused", next_step="start sshd on gpu4")
    fold.add_error("gpu4", None, error)
    return fold.report()


@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("good_deploy", Report.fold(good_deploy())),
        ("rolled_back", Report.fold(rolled_back())),
        ("first_crash", Report.fold(first_crash())),
        ("detached", Report.fold(detached())),
        ("mixed", mixed()),
    ],
)
def test_summary(name: str, report: Report) -> None:
    assert summary(report) == golden(name)


def test_many_servers_give_blocks_only_to_those_that_failed() -> None:
    fold = Fold()
    for event in [event for host in "abcdef" for event in good_deploy(host)] + first_crash("g"):
        fold.add(event)
    lines = summary(fold.report())
    assert lines[0] == "7 hosts: 6 deployed, 1 failed (exit code 11)."
    assert sum(line.startswith("  lock ") for line in lines) == 1
    assert sum("NOTHING IS SERVING" in line for line in lines) == 1


# -- plain lines


def told(story: list[events.Event], lines: Lines, clock: Clock) -> None:
    for event in story:
        clock.time = event["mono"] - story[0]["mono"]
        lines.event(event)


@pytest.mark.parametrize(("name", "story"), [("lines_good", good_deploy()), ("lines_rolled_back", rolled_back())])
def test_lines(name: str, story: list[events.Event]) -> None:
    stream, clock = io.StringIO(), Clock()
    told(story, Lines(Output(stream), clock), clock)
    assert stream.getvalue().splitlines() == golden(name)


def test_lines_of_an_attach_tell_the_runs_age_though_all_comes_at_once() -> None:
    stream = io.StringIO()
    lines = Lines(Output(stream), Clock())
    for event in [*good_deploy(), *good_deploy()]:
        lines.event(event)
    assert stream.getvalue().splitlines() == golden("lines_good")


def test_silence_is_broken_by_a_sign_of_life_every_half_minute() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = Lines(Output(stream), clock)
    told(detached(), lines, clock)
    began, before = clock.time, len(stream.getvalue().splitlines())
    for beat in range(1, 31):
        clock.time = began + 3.0 * beat
        lines.event({"event": "beat", "host": "gpu1"})
    signs = stream.getvalue().splitlines()[before:]
    assert len(signs) == 3
    assert signs[0].startswith("03:19:30  02:50  gpu1/kimi  ready: still at it for 2m 40s, phase weights 42 %")


def test_every_process_that_is_stopped_is_named() -> None:
    stream = io.StringIO()
    lines = Lines(Output(stream), Clock())
    journal = Journal()
    for pid in (11667, 11668, 11668):
        journal.write(events.progress("stop", f"stopping pid {pid} (sglang::scheduler_TP0)", pids=[pid]))
    for event in journal.lines:
        lines.event(event)
    assert [line.split("  ", 3)[3] for line in stream.getvalue().splitlines()] == [
        "stop: stopping pid 11667 (sglang::scheduler_TP0)",
        "stop: stopping pid 11668 (sglang::scheduler_TP0)",
    ]


def test_a_message_whose_numbers_change_is_told_once() -> None:
    stream = io.StringIO()
    lines = Lines(Output(stream), Clock())
    journal = Journal()
    journal.write(events.stage_started("free"))
    for used in range(50):
        journal.write(events.progress("free", f"{used} MiB are still held"))
    journal.write(events.progress("free", "pid 77 of bob holds GPU 3"))
    for event in journal.lines:
        lines.event(event)
    assert [line.split("  ", 3)[3] for line in stream.getvalue().splitlines()] == [
        "free: begins",
        "free: 0 MiB are still held",
        "free: pid 77 of bob holds GPU 3",
    ]


def test_no_word_of_a_plain_line_is_doubled() -> None:
    stream = io.StringIO()
    lines = Lines(Output(stream), Clock())
    journal = Journal()
    journal.write(events.stage_started("ready"))
    journal.write(events.progress("ready", "boot", phase="boot"))
    journal.write(events.progress("ready", "graphs", phase="graphs", percent=0.0))
    journal.write({"event": events.END, "outcome": "deployed", "exit_code": 0, "message": "deployed: demo answers"})
    for event in journal.lines:
        lines.event(event)
    assert [line.split("  ", 3)[3] for line in stream.getvalue().splitlines()][1:] == [
        "ready: phase boot",
        "ready: phase graphs 0 %",
        "run ended: deployed, demo answers",
    ]


def test_the_tail_of_the_log_keeps_a_tracebacks_indentation() -> None:
    story = first_crash()
    for event in story:
        if event["event"] == events.FAILURE:
            event["log_tail"] = ["Traceback:", '  File "x.py", line 1', "\tcode()", "Error"]
        elif event["event"] == events.END:
            event.pop("log_tail", None)
    text = "\n".join(summary(Report.fold(story)))
    assert '    | Traceback:\n    |   File "x.py", line 1\n    |     code()\n    | Error' in text


def test_after_a_rollback_it_says_which_server_was_ready() -> None:
    story = rolled_back()
    story[-1]["ready_seconds"] = 13.1
    text = "\n".join(summary(Report.fold(story)))
    assert "the old server was ready again after 13.1 s" in text
    assert "ready after  " not in text


def test_an_unknown_event_is_told_in_its_own_words() -> None:
    stream = io.StringIO()
    lines = Lines(Output(stream), Clock(), Clock())
    lines.event({"event": "novelty", "host": "gpu1", "server": "kimi", "message": "the moon\x1b[2J is full"})
    lines.event({"event": "novelty", "host": "gpu1", "server": "kimi"})
    assert stream.getvalue() == "00:00:00  00:00  gpu1/kimi  the moon is full\n"


# -- the live view


def console(width: int = 80, height: int = 40, encoding: str = "utf-8") -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)
    return Console(
        file=file, record=True, force_terminal=True, width=width, height=height, color_system=None, _environ={}
    )


def drawn(live: Live, width: int = 80, height: int = 40, encoding: str = "utf-8") -> list[str]:
    on = console(width, height, encoding)
    with on.capture() as captured:
        on.print(live.view())
    return captured.get().splitlines()


def test_live_view_shows_stages_phase_bar_memory_and_last_line() -> None:
    clock = Clock()
    live = Live(Output(io.StringIO()), console(), clock)
    story = detached()
    gpus = [{"index": 0, "used_mib": 51200, "total_mib": 143771}, {"index": 1, "used_mib": 51200, "total_mib": 143771}]
    story[-1] = {**story[-1], "gpus": gpus, "line": "Loading safetensors \x1b[32m42%\x1b[0m " + "#" * 200}
    for event in story:
        live.event(event)
    clock.time = 5.0
    lines = drawn(live)
    live.close(None)
    assert lines[0] == "gpu1/kimi  deploy 77aa01bc22ef  02:31"
    assert lines[1] == "  lock 0.0 preflight 1.2 stage 0.1 prove 2.3 stop 4.0 free 3.1 start 0.2"
    bar = "\u2501" * 7 + "\u2500" * 9
    assert lines[2] == f"  ready  weights  {bar}  42%  02:21  GPU memory 50 50 of 140 GiB"
    assert lines[3] == ("  Loading safetensors 42% " + "#" * 200)[:79] + "\u2026"


def test_live_view_shows_the_latest_stages_where_not_all_fit() -> None:
    live = Live(Output(io.StringIO()), console(width=40), Clock())
    for event in rolled_back():
        live.event(event)
    lines = drawn(live, width=40)
    live.close(None)
    assert lines[1] == "  start 0.2 ready FAILED rollback 320.5"


def test_live_view_without_room_gives_each_server_a_line() -> None:
    live = Live(Output(io.StringIO()), console(height=10), Clock())
    for host in ("a", "b", "c"):
        for event in detached(host):
            live.event(event)
    lines = drawn(live, height=10)
    live.close(None)
    assert lines == [f"{host}/kimi  deploy 77aa01bc22ef  02:26  ready weights 42%" for host in "abc"]


def test_live_view_in_an_ascii_terminal_is_ascii() -> None:
    live = Live(Output(io.StringIO()), console(width=40, encoding="ascii"), Clock())
    for event in detached():
        live.event(event)
    lines = drawn(live, width=40, encoding="ascii")
    live.close(None)
    assert all(line.isascii() and len(line) <= 40 for line in lines)
    assert lines[2] == "  ready  weights  ####------  42%  02:16"


def test_after_the_live_view_failures_and_the_summary_stay() -> None:
    on = console(width=60)
    live = Live(Output(io.StringIO()), on, Clock())
    threads = [
        threading.Thread(target=lambda story=story: [live.event(event) for event in story])  # type: ignore[misc]
        for story in (good_deploy("gpu1"), rolled_back("gpu2"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live.error("gpu3", None, Unreachable("gpu3 did not answer"))
    report = Report.fold(rolled_back("gpu2"))
    live.close(report)
    text = on.export_text()
    assert "gpu2/kimi  ready: ERROR the server exited with code 1" in text
    assert "gpu3  gpu3 did not answer" in text
    assert "\n".join(summary(report)) in text  # long lines are left to the terminal: they can be copied


@given(st.lists(any_event, max_size=8))
def test_any_events_are_shown_without_an_exception(items: list[dict[str, Any]]) -> None:
    stream, clock = io.StringIO(), Clock()
    live, lines = Live(Output(io.StringIO()), console(), clock), Lines(Output(stream), clock)
    live._begin = lambda: None  # type: ignore[method-assign]  # no drawing thread for each of some hundred examples
    for event in items:
        clock.time += 31.0
        live.event(event)
        lines.event(event)
    assert all(len(line) <= 80 for line in drawn(live))
    assert "\x1b" not in stream.getvalue()


# -- JSON lines and the choice of a reporter


def test_quiet_tells_the_result_alone_and_verbose_all() -> None:
    def told(volume: int, *, as_json: bool = False) -> tuple[list[str], list[str]]:
        stdout, stderr = io.StringIO(), io.StringIO()
        reporter = reporter_for(as_json, stdout, stderr, volume)
        for event in good_deploy():
            reporter.event(event)
        reporter.close(Report.fold(good_deploy()))
        return stdout.getvalue().splitlines(), stderr.getvalue().splitlines()

    assert told(-1) == (["gpu1/kimi: release 77aa01bc22ef is deployed and serving after 5m 43s."], [])
    (report,), nothing = told(-1, as_json=True)
    assert (json.loads(report)["report"]["exit_code"], nothing) == (0, [])
    verbose, usual = told(1)[0], told(0)[0]
    assert len(verbose) > len(usual)
    assert any(line.endswith("lock: begins") for line in verbose)
    stdout = io.StringIO()
    bad = reporter_for(False, stdout, None, -1)
    bad.close(Report.fold(rolled_back()))
    assert "\n  why " in stdout.getvalue()  # what did not go well is told whole


def test_json_lines_are_the_events_in_order_and_the_report_last() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    reporter = reporter_for(True, stdout, stderr)
    story = rolled_back()
    for event in [story[0], {"event": "beat", "host": "gpu1"}, *story]:
        reporter.event(event)
    reporter.error("gpu2", "kimi", Unreachable("no answer", why="timed out", next_step="ping it"))
    reporter.close(Report.fold(story))
    *written, last = [json.loads(line) for line in stdout.getvalue().splitlines()]
    assert written[:-1] == story
    assert {key: written[-1][key] for key in ("event", "host", "server", "exit_code", "message", "hint")} == {
        "event": "error",
        "host": "gpu2",
        "server": "kimi",
        "exit_code": 4,
        "message": "no answer",
        "hint": "ping it",
    }
    assert last == Report.fold(story).to_json()
    assert "rolled back; release 3f2a9c81d0aa is serving" in stderr.getvalue()


def test_json_lines_are_ascii_and_strict() -> None:
    stdout = io.StringIO()
    JsonLines(Output(stdout)).event({"event": "progress", "percent": float("nan"), "message": "\u7070\ud800", "x": {1}})
    assert stdout.getvalue().isascii()
    assert json.loads(stdout.getvalue())["percent"] is None


class Terminal(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_live_view_only_on_a_terminal_that_can_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(reporter_for(False, Terminal(), Terminal()), Live)
    assert isinstance(reporter_for(False, io.StringIO(), Terminal()), Lines)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(reporter_for(False, Terminal(), Terminal()), Lines)


def test_every_reporter_tells_an_error_before_any_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    error = InventoryError("unknown key 'modle'", origin="inventory/hosts.yml:3", next_step="write model")
    fold = Fold()
    fold.add_error(None, None, error)
    for as_json, stdout in ((True, io.StringIO()), (False, io.StringIO()), (False, Terminal())):
        reporter: Reporter = reporter_for(as_json, stdout, io.StringIO())
        reporter.error(None, None, error)
        reporter.close(fold.report())
        assert "inventory/hosts.yml:3: unknown key 'modle'" in stdout.getvalue()
        assert "\x1b[?25l" not in stdout.getvalue()  # the cursor was never hidden


# -- streams that break

SCRIPT = """
import sys
from tests.unit.report_stories import good_deploy
from lamplighter.report.report import Report
from lamplighter.report.reporter import reporter_for
reporter = reporter_for({as_json}, sys.stdout, sys.stderr)
for event in good_deploy() * 1:
    reporter.event({{**event, "message": "na\\u00efve \\u7070 " * 400}})
reporter.close(Report.fold(good_deploy()))
sys.exit(7)
"""


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("broken", ["reader gone", "closed", "full", "ascii"])
def test_a_broken_stdout_gives_no_traceback_and_keeps_the_exit_code(as_json: bool, broken: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    shell = {"closed": 'exec "$@" >&-', "full": 'exec "$@" >/dev/full'}.get(broken, 'exec "$@"')
    if broken == "ascii":
        environment |= {
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONIOENCODING": "ascii:strict",
        }
    read_end, write_end = os.pipe()
    if broken == "reader gone":
        os.close(read_end)
    words = ["sh", "-c", shell, "sh", sys.executable, "-c", SCRIPT.format(as_json=as_json)]
    process = subprocess.Popen(
        words, stdout=write_end, stderr=subprocess.PIPE, env=environment, cwd=PROJECT, text=True, encoding="utf-8"
    )
    os.close(write_end)
    if broken != "reader gone":
        with os.fdopen(read_end, "rb") as reader:
            read = reader.read()
        assert (b"\\u7070" in read) == (broken == "ascii")
    _, complaints = process.communicate(timeout=240)
    assert process.returncode == 7
    assert "Traceback" not in complaints
    assert "Exception" not in complaints
    assert ("deployed" in complaints) == as_json


# -- words


@given(st.text())
def test_clean_leaves_one_line_without_control_characters(value: str) -> None:
    shown = clean(value)
    assert len(shown.splitlines()) <= 1
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$r\x1b\\x", "x"),
        ("\x9b31mred", "red"),
        ("10%\r20%\r\n", "10% 20%"),
        ("a\tb\x00\x08\x7f", "a b"),
        ("exe\u202egpj.txt", "exegpj.txt"),
        ("\x1b(Bplain", "plain"),
        (None, ""),
        (7, "7"),
    ],
)
def test_clean(raw: object, shown: str) -> None:
    assert clean(raw) == shown


def test_clean_of_a_log_line_of_megabytes_is_short_and_quick() -> None:
    assert clean("\x1b[" * 5_000_000) == ""
    assert len(clean("x" * 10_000_000)) == 1000


@pytest.mark.parametrize(
    ("value", "shown"), [(0.04, "0.0 s"), (99.9, "99.9 s"), (99.96, "1m 40s"), (3599.6, "1h 00m"), (7260.0, "2h 01m")]
)
def test_seconds(value: float, shown: str) -> None:
    assert seconds(value) == shown


# -- what is left, ranks that differ, memory a GPU


def test_time_left_is_a_number_or_a_range() -> None:
    assert time_left([190.0, 190.0]) == "about 3m 10s"
    assert time_left([4, 220.0]) == "4.0 s to 3m 40s"
    for odd in (None, [], [1], ["x", 2], {}, [None, 3]):
        assert time_left(odd) == ""


def test_ranks_are_told_only_where_they_differ_the_slowest_first() -> None:
    assert ranks_that_differ({"0": "graphs", "1": "weights", "2": "graphs"}) == "rank 1 weights, rank 0 2 graphs"
    assert ranks_that_differ({"0": "graphs", "1": "graphs"}) == ""
    assert ranks_that_differ({"0": "odd", "1": "graphs"}) == "rank 1 graphs, rank 0 odd"
    assert ranks_that_differ([1]) == ""


def test_memory_is_told_for_each_gpu_while_they_are_few_and_alike() -> None:
    def row(used: int, total: int | None = 81920) -> dict[str, int | None]:
        return {"used_mib": used, "total_mib": total}

    assert gpu_memory([row(63488), row(62464)]) == "62 61 of 80 GiB"
    assert gpu_memory([row(63488)]) == "62 of 80 GiB"
    assert gpu_memory([row(63488), row(1024, 24576)]) == "63 of 104 GiB"
    assert gpu_memory([row(1024)] * 16) == "16 of 1280 GiB"
    assert gpu_memory([row(1024, None)]) == "1 GiB"


def test_the_live_view_and_the_lines_show_them() -> None:
    progress = Progress("gpu1", "kimi", 0.0)
    event = {"event": "progress", "stage": "ready", "message": "weights", "phase": "weights", "run": "r"}
    progress.take({"event": "stage_start", "stage": "ready", "run": "r"}, 0.0)
    progress.take({**event, "eta": [60, 90], "phase_eta": [5, 5], "ranks": {"0": "graphs", "1": "weights"}}, 1.0)
    assert (progress.eta, progress.phase_eta, progress.ranks) == (
        "60.0 s to 90.0 s",
        "about 5.0 s",
        "rank 1 weights, rank 0 graphs",
    )
    drawn = io.StringIO()
    Console(width=160, file=drawn, force_terminal=False).print(View([progress], 1.0))
    shown = drawn.getvalue()
    assert "ready in 60.0 s to 90.0 s" in shown
    assert "rank 1 weights" in shown
    progress.take(event, 2.0)
    assert progress.eta == progress.ranks == ""


def test_who_is_not_ours_is_named_by_its_pid_once() -> None:
    told = {"release": "pid 4242 (/opt/x/python)", "pid": 4242, "port": 8000, "model": "kimi"}
    assert wording.serving(told) == "kimi on port 8000, pid 4242 (/opt/x/python)"
    assert wording.serving({**told, "release": "unit llm.service"}) == "kimi on port 8000, pid 4242, unit llm.service"
