"""How `./inv` begins and ends: nothing that was said or asked for is lost by its end coming soon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
TASKS = """
import atexit, sys, threading, time
from invoke.tasks import task

@task
def tell(c):
    atexit.register(print, "at the end")
    print("bytecode", not sys.dont_write_bytecode)

@task
def fail(c):
    sys.exit(7)

@task
def linger(c):
    threading.Thread(target=lambda: (time.sleep(0.2), print("late"))).start()

@task
def defect(c):
    raise RuntimeError("of a task")

@task
def mock(c):
    import asyncio, unittest.mock
    print(unittest.mock.Mock(return_value=3)(), unittest.TestCase.__name__)
"""


def inv(root: Path, *words: str, **variables: str) -> tuple[int, str, str]:
    (root / "tasks.py").write_text(TASKS)
    start = "from lamplighter.start import main; main()"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", start, str(root), *words],
        env={**environment, "PYTHONPATH": str(PROJECT), **variables},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_what_asked_for_the_end_is_called_and_all_is_written(tmp_path: Path) -> None:
    assert inv(tmp_path, "tell") == (0, "bytecode True\nat the end\n", "")


def test_who_wants_no_byte_code_gets_none(tmp_path: Path) -> None:
    assert inv(tmp_path, "tell", PYTHONDONTWRITEBYTECODE="1")[1].startswith("bytecode False")


def test_the_exit_code_is_the_tasks(tmp_path: Path) -> None:
    assert inv(tmp_path, "fail") == (7, "", "")


def test_a_thread_that_is_at_work_is_waited_for(tmp_path: Path) -> None:
    assert inv(tmp_path, "linger") == (0, "late\n", "")


def test_a_defect_has_its_traceback(tmp_path: Path) -> None:
    code, _, said = inv(tmp_path, "defect")
    assert (code, said.splitlines()[-1]) == (1, "RuntimeError: of a task")


def test_what_was_left_out_at_first_can_be_had(tmp_path: Path) -> None:
    assert inv(tmp_path, "mock") == (0, "3 TestCase\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    start = "from lamplighter.start import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", start, str(tmp_path), "tell"], env={**os.environ, "PYTHONPATH": str(PROJECT)},
            stdout=full, stderr=subprocess.PIPE, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode != 0
    assert b"No space left" in done.stderr
