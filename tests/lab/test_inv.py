"""`./inv` itself: how it starts Python, and how it ends when nobody has taken the signals yet."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.driver import PROJECT, eventually

#: Stops at the import of a module, and says so.
HOLD = """
import sys, time
class Hold:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            open({imports!r}, "w").close()
            time.sleep(600)
sys.meta_path.insert(0, Hold())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_imports_ends_it_without_a_word(number: signal.Signals, tmp_path: Path) -> None:
    imports = tmp_path / "imports"
    (tmp_path / "sitecustomize.py").write_text(HOLD.format(module="pydantic_core", imports=str(imports)))
    words = ["env", "--default-signal=INT", str(PROJECT / "inv"), "config", "--host", "demo"]  # may be ignored here
    held = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(words, env=held, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as command:
        eventually(lambda: imports.exists() or command.poll() is not None)
        command.send_signal(number)
        said, _ = command.communicate(timeout=120)
    assert (command.returncode, said) == (-number, "")  # which a shell tells as 130 and 143


@pytest.mark.parametrize("words", [["--list"], ["--help"], ["deploy", "--help"]])
def test_who_reads_no_further_sees_no_traceback(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [str(PROJECT / "inv"), *words]
    done = subprocess.run(command, check=False, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


#: Tells which files the first descriptors are when a module is imported.
TELL = """
import os, sys
class Tell:
    def find_spec(self, name, path=None, target=None):
        if name == "pydantic_core":
            seen = [os.readlink(f"/proc/self/fd/{{number}}") for number in (0, 1, 2)]
            with open({told!r}, "w") as file:
                file.write(" ".join([*seen, str(sys.stdout is None)]))
sys.meta_path.insert(0, Tell())
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_no_socket_gets_the_number_of_a_closed_stream(closed: tuple[int, ...], tmp_path: Path) -> None:
    told = tmp_path / "told"
    (tmp_path / "sitecustomize.py").write_text(TELL.format(told=str(told)))
    streams = {number: f"{number}>&-" if number in closed else f"{number}<>{tmp_path}/{number}" for number in (0, 1, 2)}
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" config --host demo {" ".join(streams.values())}', str(PROJECT / "inv")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    *files, is_none = told.read_text().split()
    assert files == ["/dev/null" if number in closed else f"{tmp_path}/{number}" for number in (0, 1, 2)]
    assert is_none == str(1 in closed)


def test_what_lies_in_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    for name in ("signal", "json", "invoke", "fabric"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current directory')")
    done = subprocess.run(
        [PROJECT / "inv", "config", "--host", "demo", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


#: Makes an environment that holds nothing but itself, and runs whatever it is given to its end.
PYTHON = """#!/bin/sh
[ "$2" != venv ] || { mkdir -p "$4/bin" && cp "$0" "$4/bin/python"; }
"""
SLEEP = """#!/bin/sh
exec /bin/sleep 0.05
"""


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], subprocess.Popen[str]]:
    """Start the `inv` of a checkout in ``tmp_path`` that has no environment yet."""
    for name in ("inv", "requirements.lock"):
        shutil.copy(PROJECT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in (("python3", PYTHON), ("sleep", SLEEP)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    return lambda: subprocess.Popen(
        [tmp_path / "inv", "--list"], env=path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def test_a_lock_whose_maker_was_killed_before_it_wrote_its_name_is_taken_over(
    fresh: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / ".venv.lock").mkdir()
    with fresh() as command:
        _, said = command.communicate(timeout=120)
    assert command.returncode == 0
    assert said.count("waiting for") == 1
    assert "another inv, sets up .venv" in said
    assert not (tmp_path / ".venv.lock").exists()


def test_whoever_sets_up_the_environment_is_named_and_waited_for(
    fresh: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / ".venv.lock").mkdir()
    (tmp_path / ".venv.lock" / "pid").write_text(f"{os.getpid()}\n")
    with fresh() as command:
        assert command.stderr is not None
        assert f"process {os.getpid()}, another inv, sets up .venv" in command.stderr.readline()
        shutil.rmtree(tmp_path / ".venv.lock")
        _, said = command.communicate(timeout=120)
    assert command.returncode == 0
    assert "waiting" not in said


@pytest.mark.parametrize(
    "words",
    [
        ["rollback", "--to"], ["stop", "--server"], ["check", "--server"], ["attach", "--run"], ["cancel", "--run"],
        ["verify", "--only"], ["verify", "-k"], ["diagnose", "--server"],
    ],
)  # fmt: skip
def test_an_option_with_an_empty_value_is_a_usage_error(words: list[str]) -> None:
    done = subprocess.run(
        [PROJECT / "inv", *words, "", "--host", "demo", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"{words[1]} is empty\n")
    assert json.loads(done.stdout)["report"]["exit_code"] == 2


def test_an_empty_run_is_a_usage_error_of_logs() -> None:
    words = [PROJECT / "inv", "logs", "--host", "demo", "--run", " "]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--run is empty\n")
