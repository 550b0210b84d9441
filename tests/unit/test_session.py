"""The test session itself: counts at the end, what a test may demand, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).parents[2]
# hypothesis alone takes a second to import
WITHOUT_PLUGINS = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}


def run_session(tmp_path: Path, source: str, *, require: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(tmp_path, source),
        env=WITHOUT_PLUGINS | {"LAMPLIGHTER_REQUIRE": require},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def words(tmp_path: Path, source: str) -> list[str]:
    (tmp_path / "test_inner.py").write_text(source)
    inner = [
        "--rootdir",
        str(tmp_path),
        "-c",
        "/dev/null",
        "-p",
        "tests.conftest",
        "--basetemp",
        str(tmp_path / "temp"),
    ]
    return [sys.executable, "-m", "pytest", *inner, str(tmp_path / "test_inner.py")]


def closing_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [" ".join(line.split()) for line in done.stdout.splitlines()[-2:]]


def test_each_kind_is_counted_and_the_last_line_has_the_sums(tmp_path: Path) -> None:
    done = run_session(
        tmp_path,
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 0\n"
        "@pytest.fixture\n"
        "def broken():\n    yield\n    raise OSError\n"
        "def test_bad_afterwards(broken): pass\n"
        "@pytest.mark.xfail\ndef test_known(): assert 0\n"
        "@pytest.mark.lab\n@pytest.mark.parametrize('x', [1, 2])\ndef test_other(x): pytest.skip('not here')\n",
    )
    assert done.returncode == 1
    assert [" ".join(line.split()) for line in done.stdout.splitlines()[-3:]] == [
        "unit 1 passed, 2 failed, 1 skipped",
        "lab 0 passed, 0 failed, 2 skipped",
        "1 passed, 2 failed, 3 skipped",
    ]


def test_a_file_that_does_not_import_counts_as_failed(tmp_path: Path) -> None:
    done = run_session(tmp_path, "import no_such_module\n")
    assert closing_lines(done) == ["collection 0 passed, 1 failed, 0 skipped", "0 passed, 1 failed, 0 skipped"]


def test_what_is_missing_skips_a_test_or_fails_it_where_the_run_demands_it(tmp_path: Path) -> None:
    source = "def test_it(require):\n    require('netns', None)\n    require('netns', 'no root here')\n"
    assert closing_lines(run_session(tmp_path, source, require="sshd,engine"))[-1] == "0 passed, 0 failed, 1 skipped"
    demanded = run_session(tmp_path, source, require="sshd, netns")
    assert demanded.returncode == 1
    assert "LAMPLIGHTER_REQUIRE asks for netns, but no root here" in demanded.stdout


def test_processes_left_behind_fail_the_session_and_are_ended(tmp_path: Path) -> None:
    done = run_session(
        tmp_path,
        "import subprocess\n"
        "def test_marked(): subprocess.Popen(['setsid', 'sleep', '1001'])\n"
        "def test_unmarked(tmp_path):\n"
        "    subprocess.run(['sh', '-c', 'env -i setsid sleep 1002 & exit'], cwd=tmp_path)\n",
    )
    assert closing_lines(done) == ["leaks 0 passed, 1 failed, 0 skipped", "2 passed, 1 failed, 0 skipped"]
    assert done.returncode == 1
    assert sorted(line.rpartition(": ")[2] for line in done.stdout.splitlines() if line.startswith("LEAKED")) == [
        "sleep 1001",
        "sleep 1002",
    ]
    assert not {"sleep 1001", "sleep 1002"} & set(command_lines().values())


def test_a_session_that_is_interrupted_tears_down_and_counts(tmp_path: Path) -> None:
    source = (
        "import pathlib, subprocess, time\n"
        f"mark = pathlib.Path({str(tmp_path)!r}) / 'running'\n"
        "def test_it():\n    subprocess.Popen(['sleep', '1003'])\n    mark.touch()\n    time.sleep(1000)\n"
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        (tmp_path / "running").unlink(missing_ok=True)
        session = subprocess.Popen(
            words(tmp_path, source), cwd=PROJECT, env=WITHOUT_PLUGINS, stdout=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 120
        while not (tmp_path / "running").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        session.send_signal(number)
        output, _ = session.communicate(timeout=120)
        assert session.returncode == 2
        assert output.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
        assert "sleep 1003" not in command_lines().values()


def command_lines() -> dict[int, str]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
            except OSError:
                continue
    return found
