"""The tests' own runner: sessions side by side, counts added up, and an end that lets each session tear down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import PROJECT, SESSIONS, Everything, files_of, together

SPEAKS = """
import sys
print("platform linux")
print("tests/unit/test_a.py ...")
print("= FAILURES =")
print("unit       2 passed, 1 failed, 0 skipped")
print("2 passed, 1 failed, 0 skipped")
sys.exit(int(sys.argv[1]))
"""


def test_each_test_is_in_exactly_one_session() -> None:
    covered = [
        file
        for session in SESSIONS
        for place in files_of(session)
        for file in ((PROJECT / place).rglob("test_*.py") if (PROJECT / place).is_dir() else [PROJECT / place])
    ]
    assert sorted(covered) == sorted((PROJECT / "tests").rglob("test_*.py"))


def test_counts_are_added_up_by_kind_and_the_worst_status_is_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    everything = Everything([[sys.executable, "-c", SPEAKS, status] for status in ("0", "3", "1")])
    assert everything.run(2) == 3
    counts = together(everything.said)
    assert list(counts) == ["unit", ""]
    assert counts["unit"] == counts[""] == {"passed": 6, "failed": 3, "skipped": 0}
    said = capsys.readouterr().out.splitlines()
    closing = ["= FAILURES =", "unit       2 passed, 1 failed, 0 skipped", "2 passed, 1 failed, 0 skipped"]
    starts = [number for number, line in enumerate(said) if line == closing[0]]
    assert [said[start : start + 3] for start in starts] == [closing] * 3  # in one piece, whatever else is said


def test_a_session_that_was_killed_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert Everything([[sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]]).run(1) == 9


PATIENT = """
import signal, sys, time
from pathlib import Path
def torn_down(*_):
    Path(sys.argv[1]).touch()
    sys.exit(2)
signal.signal(signal.SIGTERM, torn_down)
print("tests/ready", flush=True)
time.sleep(300)
"""
RUNNER = """
import signal, sys
from tests.run import Everything
everything = Everything([[sys.executable, "-c", sys.argv[1], sys.argv[2]], [sys.executable, "-c", "print('late')"]])
signal.signal(signal.SIGTERM, everything.end)
sys.exit(everything.run(1))
"""


def test_term_lets_a_session_tear_down_and_begins_no_other(tmp_path: Path) -> None:
    done = tmp_path / "torn-down"
    command = [sys.executable, "-c", RUNNER, PATIENT, str(done)]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        assert runner.stdout.readline() == "tests/ready\n"
        os.kill(runner.pid, signal.SIGTERM)
        rest = runner.stdout.read()
    assert runner.returncode == 2
    assert rest == ""
    assert done.exists()
